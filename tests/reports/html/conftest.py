"""Runs written by hand, with the times of an imagined device."""

import math
import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from attncheck.reports.run_file.header import BackendInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Failed, Passed, Record, RunFooter, Unsupported
from attncheck.reports.run_file.store import Run, count_outcomes
from attncheck.reports.run_file.timings import Ceilings, DeviceState, Latency, StepPart, Timing

ENVIRONMENT = Environment(
    attncheck="0.1.0",
    python="3.12.3",
    torch="2.13.0",
    numpy="2.3.5",
    platform="Linux x86_64",
    cpu="a cpu",
    cores=16,
    device="cuda",
    device_name="a gpu",
    capability="9.0",
    driver="580.1",
)
CEILINGS = Ceilings(copy_bytes_per_s=4e12, matmul_flops_per_s=6e14, dtype="bfloat16")
NEEDS = ("attn_type=decoder", "dtype=bfloat16", "head_size=128", "block_size=16", "layout=NHD", "kv_cache_dtype=auto")


def latency(
    part: StepPart, samples_ns: Sequence[int], moved_bytes: int | None = None, flops: int | None = None
) -> Latency:
    ordered = sorted(samples_ns)
    middle = ordered[len(ordered) // 2]
    return Latency(
        part=part,
        clock="host" if part == "build" else "events",
        median_ns=middle,
        low_ns=ordered[len(ordered) // 4],
        high_ns=ordered[-len(ordered) // 4],
        samples_ns=tuple(samples_ns),
        is_settled=True,
        moved_bytes=moved_bytes,
        flops=flops,
    )


def record(kind: type[Record] = Passed, **fields: object) -> Record:
    """A record with defaults for all other fields."""
    defaults = {
        "suite": "decode",
        "case_id": "edge",
        "case_hash": "0123456789ab",
        "check": "numerics",
        "seed": 0,
        "backend": "reference",
        "backend_ref": fields.get("backend", "reference"),
        "backend_version": "0.1.0",
        "environment": ENVIRONMENT.digest,
        "attncheck_version": "0.1.0",
        "needs": NEEDS,
    }
    return kind(**(defaults | fields))


def run_of(records: Iterable[Record], *, path: str = "run.jsonl", is_complete: bool = True, **header: object) -> Run:
    """A run of these records, with the header that announces them."""
    records = tuple(records)
    suites = dict.fromkeys(each.suite for each in records)
    names = dict.fromkeys(each.backend for each in records)
    defaults = {
        "started": "2026-01-01T00:00:00+00:00",
        "environment": ENVIRONMENT,
        "suites": tuple(
            SuiteInfo(name=name, ref=name, cases=len({each.case_id for each in records if each.suite == name}))
            for name in suites
        ),
        "checks": tuple(dict.fromkeys(each.check for each in records)),
        "device": "cuda",
        "seed": 0,
        "rounds": max((each.round for each in records), default=0) + 1,
        "backends": tuple(BackendInfo(name=name, ref=name, version="0.1.0", features=("lse",)) for name in names),
    }
    footer = RunFooter(finished="2026-01-01T00:10:00+00:00", counts=count_outcomes(records)) if is_complete else None
    return Run(path, RunHeader(**(defaults | header)), records, footer)


def timed_records(
    backends: Sequence[str], lengths: Sequence[int], *, rounds: int = 1, slower: float = 1.0, seed: int = 0
) -> list[Record]:
    """Decodes of 8 requests of each length, and prefills of a quarter of it; each backend takes longer than the last.

    A time is what the device takes at least, times a factor of the backend, and what it takes to start; processes
    differ by 2 %. ``slower``: a factor for the first backend.
    """
    luck = random.Random(seed)
    found = []
    for index, backend in enumerate(backends):
        factor = (1.3 + 0.35 * index) * (slower if index == 0 else 1.0)
        for length in lengths:
            for name, queries, keys in (("decode", 1, length), ("prefill", length // 4, length // 4)):
                moved, flops = 8 * keys * 8 * 128 * 2 * 2, 8 * queries * keys * 32 * 128 * 4
                least = max(moved / CEILINGS.copy_bytes_per_s, flops / CEILINGS.matmul_flops_per_s) * 1e9
                common = {"case_id": f"{name}.{length}", "backend": backend, "suite": "lengths"}
                share = math.exp(luck.gauss(-1.2, 0.5)) if index < 11 else 1.8
                for round_ in range(rounds):
                    process = luck.gauss(1, 0.02)
                    times = [int((4000 + least * factor) * process * luck.uniform(0.99, 1.05)) for _ in range(40)]
                    builds = [int((15000 + 900 * index) * process * luck.uniform(0.95, 1.2)) for _ in range(40)]
                    timing = Timing(
                        latencies=(latency("forward", times, moved, flops), latency("build", builds)),
                        cache="cold",
                        ceilings=CEILINGS,
                        device=DeviceState(sm_clock_mhz=1980, max_sm_clock_mhz=1980, temperature_c=45),
                    )
                    found.append(record(check="timing", timing=timing, round=round_, duration_s=0.2, **common))
                figures = {"rows": 8, "budget_share": share}
                if share > 1:
                    failure = {
                        "summary": "3 of 8 rows are wrong, the first is row 2",
                        "meaning": "the window is one key too long",
                    }
                    found.append(record(Failed, figures=figures, **failure, **common))
                else:
                    found.append(record(figures=figures, duration_s=0.01, **common))
                found.append(record(Unsupported, check="lse", reasons=("feature 'lse' is not declared",), **common))
    return found


@pytest.fixture
def record_of() -> Callable[..., Record]:
    return record


@pytest.fixture
def run_with() -> Callable[..., Run]:
    return run_of


@pytest.fixture
def timed() -> Callable[..., list[Record]]:
    return timed_records
