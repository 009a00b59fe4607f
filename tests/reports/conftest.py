"""Hand-made records: reports know nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.header import BackendInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Record, parse_line
from attncheck.reports.run_file.store import RunWriter, read_run

ENVIRONMENT = Environment(
    attncheck="0.1.0",
    python="3.11.9",
    torch="2.13.0+cpu",
    numpy="2.3.0",
    platform="Linux x86_64",
    cpu="a cpu",
    cores=2,
    device="cpu",
    device_name="a cpu",
)

_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "passed": {"figures": {"rows": 40, "worst_budget": 0.5}},
    "failed": {"summary": "7 of 40 rows", "figures": {"rows": 40, "worst_budget": 18.4}},
    "errored": {"stage": "forward", "error_type": "RuntimeError", "message": "no such kernel"},
    "crashed": {"stage": "check numerics", "cause": "killed by SIGABRT"},
    "unsupported": {"reasons": ["head_size 80 is not one of 64, 128"]},
    "unavailable": {"reasons": ["needs CUDA"]},
    "xfailed": {"underlying": "failed", "summary": "7 of 40 rows", "reason": "known"},
    "xpassed": {"reason": "known"},
}


@pytest.fixture
def header() -> RunHeader:
    return RunHeader(
        started="2026-01-01T00:00:00+00:00",
        environment=ENVIRONMENT,
        suites=(SuiteInfo(name="smoke", ref="smoke", cases=2), SuiteInfo(name="mine", ref="./my suite.yaml", cases=1)),
        checks=("numerics", "lse", "cache_write"),
        device="cpu",
        seed=0,
        backends=(
            BackendInfo(name="reference", ref="reference", version="0.1.0", conventions={"lse_base": "e"}),
            BackendInfo(name="Wrong", ref="./wrong.py:Wrong", conventions={"lse_base": "2", "batch_invariant": True}),
        ),
    )


@pytest.fixture
def make() -> Callable[..., Record]:
    """``make("failed", case_id="b", ...)``: a record of that outcome with everything else filled in."""

    def make(outcome: str, **fields: Any) -> Record:
        who = {
            "kind": "record",
            "outcome": outcome,
            "suite": "smoke",
            "case_id": "edge",
            "case_hash": "0123456789ab",
            "check": "numerics",
            "seed": 0,
            "backend": "reference",
            "backend_ref": "reference",
            "backend_version": "0.1.0",
            "environment": ENVIRONMENT.digest,
            "attncheck_version": "0.1.0",
        }
        if fields.get("backend") == "Wrong":
            who |= {"backend_ref": "./wrong.py:Wrong", "backend_version": ""}

        record = parse_line(json.dumps(who | _OWN_FIELDS[outcome] | fields))
        assert not isinstance(record, RunHeader)
        return record  # type: ignore[return-value]

    return make


@pytest.fixture
def write(tmp_path: Path, header: RunHeader) -> Callable[..., Path]:
    """``write(records)``: a complete run file of these records."""

    def write(*records: Record, errors: tuple[str, ...] = (), name: str = "run.jsonl") -> Path:
        with RunWriter(tmp_path / name, header) as writer:
            for record in records:
                writer.add(record)
            for error in errors:
                writer.fail(error)
        return tmp_path / name

    return write


@pytest.fixture
def graph(make: Callable[..., Record]) -> Callable[..., Record]:
    """``graph("failed", levels, case_id=...)``: a record of the check ``cudagraph`` with these levels."""

    def record(outcome: str, found: dict[str, Any] | None, **fields: Any) -> Record:
        extra = {} if found is None else {"graph": found}
        return make(outcome, check="cudagraph", **extra, **fields)

    return record


@pytest.fixture
def asked(header: RunHeader) -> RunHeader:
    return header.model_copy(update={"checks": ("numerics", "cudagraph")})


@pytest.fixture
def as_markdown(tmp_path: Path, asked: RunHeader) -> Callable[..., str]:
    def render(*records: Record) -> str:
        path = tmp_path / f"graphs-{len(list(tmp_path.iterdir()))}.jsonl"
        with RunWriter(path, asked) as writer:
            for record in records:
                writer.add(record)
        return markdown.render_run(read_run(path))

    return render
