"""Times, and two whole runs, from hand-made records."""

from typing import Any

import pytest

from attncheck.reports.run_file.header import BackendInfo, CaseInfo
from attncheck.reports.run_file.records import BUDGET_SHARE, RunFooter
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import speeds

SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"
READ = "host read: .item() at wrong.py:9 in forward"


@pytest.fixture
def timing_header(header):
    return header.model_copy(update={"checks": ("numerics", "timing"), "rounds": 10})


@pytest.fixture
def speeds_of():
    return lambda *records: speeds(records)


def levels(declared: str, measured: str) -> dict[str, Any]:
    probes = [
        {"name": "decode", "level": SINGLE, "outcome": "failed", "reason": READ},
        {"name": "verify", "level": "UNIFORM_BATCH", "outcome": "not run", "reason": "'decode' broke"},
    ]
    if measured == SINGLE:
        probes = [probes[0] | {"outcome": "passed", "reason": ""}, probes[1] | {"outcome": "failed", "reason": READ}]
    return {"declared": declared, "measured": measured, "recorder": "emulated", "probes": probes}


@pytest.fixture
def passing_run(header, make, graph):
    """One backend that passes and could declare a higher level, with two reasons why checks were not examined."""
    checks = ("numerics", "lse", "cudagraph")
    header = header.model_copy(update={"suites": header.suites[:1], "backends": header.backends[:1], "checks": checks})
    records = (
        make("passed", figures={BUDGET_SHARE: 0.5}, needs=["sinks", "head_size=64"]),
        graph("passed", levels("NEVER", SINGLE)),
        make("unsupported", check="lse", reasons=["feature 'lse' is not declared"]),
        *(make("unsupported", check=check, case_id="wide") for check in checks),
    )
    return Run("run.jsonl", header, records, RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}))


@pytest.fixture
def failing_run(header, make, graph, timed):
    """Two backends in two suites: findings, an expected one, levels, times, and a backend that cannot run here."""
    third = BackendInfo(name="third", ref="third", conventions={"lse_base": "e"})
    shape = "4 heads, 2 KV heads, head size 64, bfloat16"
    cases = tuple(
        CaseInfo(suite="smoke", id=name, shape=shape, description=f"case {name}", keys={"layer.sliding_window": window})
        for name, window in (("edge", "none"), ("window", 128), ("both", 128))
    )
    header = header.model_copy(
        update={
            "backends": (*header.backends, third),
            "cases": cases,
            "checks": ("numerics", "lse", "cache_write", "cudagraph", "timing"),
            "command": ("attncheck", "run", "reference", "./wrong.py:Wrong"),
            "notes": ("a note | of the run",),
        }
    )
    wrong = {"backend": "Wrong"}
    failure = wrong | {
        "figures": {"rows": 40, "bad_rows": 7, BUDGET_SHARE: 18.4},
        "summary": "7 of 40 rows are wrong, the first is row 3 (request 0, position 35), all heads; the largest error is 18.4 times the allowed error, at head 2",
        "meaning": "the window is one key too long (the truth with sliding_window=129 fits all rows)",
        "details": ["row 3: found 0.5, expected 0.25"],
        "needs": ["sliding_window"],
    }
    records = (
        make("passed", figures={BUDGET_SHARE: 0.5}, needs=["head_size=64"]),
        make("passed", case_id="window", figures={BUDGET_SHARE: 0.25}, needs=["sliding_window"], chosen_kernels=["a"]),
        make("passed", suite="mine"),
        timed({"forward": 1e6, "build": 1e5}),
        make("failed", case_id="window", **failure),
        make("failed", case_id="both", **failure),
        make("errored", **wrong, check="cache_write", traceback='  File "wrong.py", line 9, in forward\n    x'),
        graph("failed", levels(SINGLE, "NEVER"), **wrong, summary=f"declared {SINGLE}: {READ}"),
        *(make("unsupported", **wrong, check="lse", case_id=f"c{n}", reasons=["no lse"]) for n in range(3)),
        make("xfailed", **wrong, check="lse", case_id="known", reason="upstream issue 5"),
        timed({"forward": 2e6}, **wrong),
        make("unavailable", backend="third"),
    )
    footer = RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}, errors=("entry 2 matches no case",))
    return Run("run.jsonl", header, records, footer)
