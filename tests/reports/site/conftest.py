"""Small runs of one backend with given outcomes by case."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.run_file.header import BackendInfo, RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.site.digest import digest_of
from attncheck.reports.site.model import SiteRun

LATENCY = {"part": "forward", "clock": "events", "samples_ns": [1], "is_settled": True}


@pytest.fixture
def run_file(
    tmp_path: Path, header: RunHeader, make_record: Callable[..., Record], write_run: Callable[..., Path]
) -> Callable[..., Path]:
    """``run_file(day, {"a": "passed"})`` writes a run of that day in January with these outcomes by case id.

    ``device``, ``backend``, ``version``: of the run. ``finding``: of its failures. ``times``: nanoseconds by case id.
    """

    def write(
        day: int,
        outcomes: dict[str, str],
        *,
        device: str = "a gpu",
        backend: str = "Mine",
        version: str = "1",
        finding: str = "the window is ignored",
        times: dict[str, float] | None = None,
        folder: str = "runs",
        **fields: Any,
    ) -> Path:
        environment = header.environment.model_copy(update={"device_name": device, "capability": "9.0"})
        whose = {"backend": backend, "backend_ref": backend, "backend_version": version}
        common = whose | {"environment": environment.digest, "needs": ("sliding_window", "block_size=16")} | fields
        records = [
            make_record(outcome, case_id=case, **(common | ({"finding": finding} if outcome == "failed" else {})))
            for case, outcome in outcomes.items()
        ]
        for case, time in (times or {}).items():
            latency = LATENCY | {"median_ns": time, "low_ns": 0.99 * time, "high_ns": 1.01 * time}
            timing = {"latencies": [latency]}
            records += [make_record("passed", case_id=case, check="timing", timing=timing, **common)]
        described = header.model_copy(
            update={
                "started": f"2026-01-{day:02}T00:00:00+00:00",
                "environment": environment,
                "backends": (BackendInfo(name=backend, ref=backend, version=version, features=("sliding_window",)),),
                "checks": ("numerics", "timing", "refusals"),
            }
        )
        path = tmp_path / folder / f"{len(list(tmp_path.rglob('*.jsonl'))):03}.jsonl"
        path.parent.mkdir(exist_ok=True)
        return write_run(path, described, *records)

    return write


@pytest.fixture
def run_of(run_file: Callable[..., Path]) -> Callable[..., SiteRun]:
    """``run_of(...)`` returns what the site keeps of such a run."""

    def read(*args: Any, **fields: Any) -> SiteRun:
        path = run_file(*args, **fields)
        return digest_of(path, path.name)

    return read
