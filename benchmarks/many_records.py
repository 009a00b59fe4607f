"""Measure how many records a second one run can take from its nodes, and the memory each record costs.

The nodes of the cluster are simulated and answer at once. Everything else is that of a real run: order, expectations,
run file, progress, and the report at the end. ``python benchmarks/many_records.py [RECORDS]``
"""

import resource
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import attncheck
from attncheck.harness.cli.progress import ProgressLines, Tally
from attncheck.harness.cli.run_execution import take_records
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.expectation_file import load_expectations
from attncheck.harness.run.expectations import Expectations
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.run.selection import select_cases
from attncheck.harness.workers.ray_actor import Examined
from attncheck.harness.workers.ray_cluster import Answer, Node
from attncheck.harness.workers.ray_executor import RayExecutor
from attncheck.harness.workers.schedule import BackendQuestion
from attncheck.reports.run_file.header import BackendInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Passed, Record, format_line
from attncheck.reports.run_file.store import RunWriter
from attncheck.reports.terminal.run import render

CHECKS = ("numerics", "lse", "cache_write", "containment", "refusals")
NODES = 1000
LEAST = 5000
"""Required records a second."""

EXPECTED = """\
- {backend: reference, case: smoke/case7, check: numerics, outcome: failed, reason: never seen}
- {backend: reference, case: 'smoke/none*', check: lse, outcome: failed, reason: never seen}
"""


class MadeUpNodes:
    """Simulated nodes that answer each case with the records of ``template``, its id instead of ``ID``."""

    def __init__(self, template: tuple[bytes, ...]) -> None:
        self._template = template
        self._answers: list[tuple[Node, Answer]] = []

    def start(self, most: int) -> Node:
        """Make all nodes join the cluster, and return the first."""
        first, *others = (Node(None, str(number)) for number in range(min(NODES, most)))
        self._answers = [(node, None) for node in others]
        return first

    def send(self, node: Node, question: BackendQuestion) -> None:
        """Prepare the answer to ``question``, which :meth:`wait` returns."""
        lines = tuple(line.replace(b"ID", question.case.id.encode()) for line in self._template)
        self._answers.append((node, Examined(lines)))

    def wait(self) -> list[tuple[Node, Answer]]:
        """Return all prepared answers, the latest first, as from nodes of unequal speed."""
        answers, self._answers = self._answers[::-1], []
        return answers


def measure(count: int, folder: Path) -> None:
    """Print the cost of ``count`` records, and assert that the run takes more than :data:`LEAST` a second."""
    backend = BackendDescription(info=BackendInfo(name="reference", ref="reference"))
    environment = Environment(
        attncheck=attncheck.__version__,
        python="3.11",
        torch="2.13",
        numpy="2.3",
        platform="Linux",
        cpu="made up",
        cores=2,
        device="cpu",
        device_name="made up",
    )
    base = select_cases(["smoke"]).cases[0]
    plan = RunPlan(
        cases=tuple(replace(base, id=f"case{number}") for number in range(count // len(CHECKS))), checks=CHECKS
    )
    header = RunHeader(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment,
        suites=(SuiteInfo(name="smoke", ref="smoke", cases=len(plan.cases)),),
        checks=CHECKS,
        device="cpu",
        seed=0,
        backends=(backend.info,),
    )
    expected = folder / "expected.yaml"
    expected.write_text(EXPECTED)
    expectations = Expectations(
        load_expectations(expected),
        cases=plan.cases,
        selected=plan.cases,
        backends=["reference"],
        checks=CHECKS,
        today=datetime.now(UTC).date(),
    )
    cluster = MadeUpNodes(tuple(format_line(_record(check, environment)).encode() for check in CHECKS))
    examiner = RayExecutor(plan, (backend,), cluster, environment)
    tally, progress = Tally(len(plan.cases), 1), ProgressLines(len(plan.cases), 1)
    records: list[Record] = []
    before, began = _memory(), time.perf_counter()
    with RunWriter(folder / "run.jsonl", header) as writer:
        judged = map(expectations.apply, examiner.run())
        take_records(judged, records, (tally.see, writer.add, progress.see), maxfail=None)
    seconds, each = time.perf_counter() - began, (_memory() - before) / len(records)
    print(f"{len(records)} records in {seconds:.1f} s: {len(records) / seconds:.0f} a second, {each:.0f} bytes each")
    began = time.perf_counter()
    render(header, records)
    print(f"report: {time.perf_counter() - began:.1f} s; peak memory: {_memory() / 2**20:.0f} MiB")
    assert len(records) == len(plan.cases) * len(CHECKS)
    assert len(records) / seconds > LEAST, f"fewer than {LEAST} records a second"


def _record(check: str, environment: Environment) -> Passed:
    """Return a record as long as those of suite ``smoke``."""
    return Passed(
        suite="smoke",
        case_id="ID",
        case_hash="0123456789ab",
        check=check,
        seed=0,
        backend="reference",
        backend_ref="reference",
        backend_version="torch 2.13.0",
        environment=environment.digest,
        attncheck_version=attncheck.__version__,
        needs=("attn_type=decoder", "dtype=float32", "head_size=64", "block_size=16", "layout=NHD", "path=paged"),
        duration_s=0.012345,
        figures={"rows": 8, "worst_row": 1, "budget_share": 0.3317, "max_error": 1.3e-07},
    )


def _memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    # macOS counts bytes, Linux KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, Path(name))
