"""A run as pytest-benchmark's JSON, for its command line and for dashboards.

There is one benchmark for each case, backend and part, with the samples of all rounds in seconds. Those of one case and
part form a group, so that backends are shown side by side. The pytest plugin names its benchmarks by the functions of
this module, so files of both can be compared. pytest-benchmark computes the statistics.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from attncheck.errors import QuestionError
from attncheck.reports.analysis.phrases import one_line
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.run_file.timings import TIMING, DeviceState, StepPart
from attncheck.reports.speeds.speed import Speed, speeds

MACHINE = "attncheck"
"""The key in pytest-benchmark's ``machine_info`` for attncheck's own facts."""


class BenchmarkNames(NamedTuple):
    """The names of one benchmark in pytest-benchmark, which compares by ``fullname`` and tabulates by ``group``."""

    name: str
    fullname: str
    group: str
    param: str
    params: dict[str, str]


def benchmark_names(suite: str, case_id: str, backend: str, part: StepPart) -> BenchmarkNames:
    """Return the names of one part of one case of one backend; ``fullname`` is the pytest item's id and the part."""
    param = f"{backend}-{part}"
    return BenchmarkNames(
        name=one_line(f"{case_id}[{param}]"),
        fullname=one_line(f"attncheck::{suite}::{case_id}::{backend}::{TIMING}[{part}]"),
        group=one_line(f"{suite}/{case_id} {part}"),
        param=one_line(param),
        params={"suite": suite, "case": case_id, "backend": backend, "part": part},
    )


def machine_of(environment: Environment, device: DeviceState | None) -> dict[str, Any]:
    """Return what a comparison of runs needs to know: the device, its driver and clocks, and versions."""
    return {
        "device": environment.device.partition(":")[0],
        "device_name": environment.device_name,
        "capability": environment.capability,
        "driver": environment.driver,
        "max_sm_clock_mhz": None if device is None else device.max_sm_clock_mhz,
        "attncheck": environment.attncheck,
        "torch": environment.torch,
        "tf32": environment.tf32,
    }


def extra_info(speed: Speed, record: Record) -> dict[str, Any]:
    """Return the further facts of a benchmark in SI units: versions, clock, cache, medians, intervals, rates, notes.

    They summarise all rounds, of which the first produced ``record``. The median of each round is included, since
    processes differ more than samples within one.
    """
    return {
        "backend_version": record.backend_version,
        "case_hash": record.case_hash,
        "seed": record.seed,
        "clock": speed.rounds[0].clock,
        "cache": speed.timings[0].cache,
        "median_s": speed.median_ns / 1e9,
        "round_medians_s": [median / 1e9 for median in speed.medians_ns],
        "interval_s": [
            min(latency.low_ns for latency in speed.rounds) / 1e9,
            max(latency.high_ns for latency in speed.rounds) / 1e9,
        ],
        "is_settled": all(latency.is_settled for latency in speed.rounds),
        "moved_bytes": speed.rounds[0].moved_bytes,
        "flops": speed.rounds[0].flops,
        "bytes_per_s": speed.bytes_per_s,
        "flops_per_s": speed.flops_per_s,
        "roofline_share": speed.roofline_share,
        "notes": list(dict.fromkeys(note for timing in speed.timings for note in timing.notes)),
    }


def render_run(run: Run) -> str:
    """Return all times of one run, ending in a newline.

    Raises:
        QuestionError: the run has no times of right outputs.
    """
    records = {(record.backend, record.case): record for record in reversed(run.records) if record.check == TIMING}
    found = speeds(run.records)
    if not found:
        what = f"it has no times; run with --check {TIMING}"
        if records:
            is_wrong = any(record.outcome == "failed" for record in records.values())
            what = "its times are of wrong outputs" if is_wrong else f"no case passed the check {TIMING}"
        raise QuestionError(f"{run.path}: there is nothing to convert: {what}")
    states = [timing.device for speed in found for timing in speed.timings if timing.device is not None]
    written = {
        "machine_info": _machine_info(run.header.environment, states[0] if states else None),
        "commit_info": _commit_info(run.header.environment),
        "benchmarks": [_benchmark(speed, records[speed.backend, speed.case]) for speed in found],
        "datetime": run.footer.finished if run.footer else run.header.started,
        "version": _version(),
    }
    return json.dumps(written, indent=1) + "\n"


def _benchmark(speed: Speed, record: Record) -> dict[str, Any]:
    names = benchmark_names(record.suite, record.case_id, speed.backend, speed.part)
    samples = [sample / 1e9 for latency in speed.rounds for sample in latency.samples_ns]
    return {
        "group": names.group,
        "name": names.name,
        "fullname": names.fullname,
        "params": names.params,
        "param": names.param,
        "extra_info": extra_info(speed, record),
        "options": {"timer": speed.rounds[0].clock, "disable_gc": False, "warmup": True},
        "stats": _stats(samples),
    }


def _stats(samples: Sequence[float]) -> dict[str, Any]:
    from pytest_benchmark.stats import Stats

    stats = Stats()
    for sample in samples:
        stats.update(sample)
    found: dict[str, Any] = stats.as_dict()
    return found | {"data": samples, "iterations": 1}


def _version() -> str:
    from pytest_benchmark import __version__

    return str(__version__)


def _machine_info(environment: Environment, device: DeviceState | None) -> dict[str, Any]:
    """Return pytest-benchmark's own keys, as far as a run file has their values, and attncheck's."""
    system, _, machine = environment.platform.partition(" ")
    return {
        "processor": machine,
        "machine": machine,
        "python_version": environment.python,
        "system": system,
        "cpu": {"brand_raw": environment.cpu, "count": environment.cores},
        MACHINE: machine_of(environment, device),
    }


def _commit_info(environment: Environment) -> dict[str, Any]:
    commit = environment.git_commit or "unversioned"
    return {
        "id": commit.removesuffix("-dirty"),
        "time": None,
        "author_time": None,
        "dirty": commit.endswith("-dirty"),
        "project": "attncheck",
        "branch": "(unknown)",
    }
