"""Examines cases that no suite has with one backend in a process of its own. Loads no torch.

A crash or a hang becomes a record, as in a run, and a fresh process examines the next cases.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attncheck.cases.model import Case
from attncheck.errors import SelectionError
from attncheck.harness.run.preparation import PreparedRun, RunSettings, prepare_run
from attncheck.harness.run.selection import Selection
from attncheck.harness.workers.protocol import GetReasons, Reasons
from attncheck.harness.workers.supervisor import Supervisor
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.reports.run_file.records import Record

_CASES_AT_ONCE = 256
"""Number of cases per request for declarations."""


@dataclass(frozen=True)
class ExaminedCase:
    """The result of one case. ``blind``: why it could not be examined; empty if it was."""

    records: tuple[Record, ...]
    blind: str = ""


class BackendProcess:
    """Examines drawn cases of the backend ``ref`` in a process of ``pool``, with the inputs of ``seed``.

    Raises:
        QuestionError: the backend cannot be loaded, or cannot run here, or the device is not there.
    """

    def __init__(self, ref: str, pool: WorkerPool, *, device: str | None, seed: int) -> None:
        nothing = Selection(suites=(), refs=(), cases=(), checks=None)
        pool.start([ref])
        self.prepared: PreparedRun = prepare_run(nothing, [ref], RunSettings(device=device, seed=seed), pool=pool)
        (self.backend,) = self.prepared.backends
        if not self.backend.is_loaded:
            raise SelectionError(f"backend {ref!r} cannot be examined: {self.backend.reason}")
        self._pool = pool
        self._supervisor = Supervisor(self.prepared.plan, (self.backend,), pool, self.prepared.environment)

    @property
    def device(self) -> str:
        """The device on which cases are examined."""
        return self.prepared.plan.device

    def examine(self, case: Case, checks: Sequence[str]) -> ExaminedCase:
        """Run ``checks`` on ``case``; its key must differ from those of all earlier cases."""
        blind = self._supervisor.blind
        known = len(blind)
        records = tuple(self._supervisor.examine_case(self.backend, case, tuple(checks), is_drawn=True))
        return ExaminedCase(records, str(blind[-1]) if len(blind) > known else "")

    def reasons_against(self, cases: Iterable[Case]) -> list[tuple[str, ...]]:
        """Return, for each of ``cases``, why the backend's declarations refuse it; empty if they accept it."""
        all_cases, found = tuple(cases), list[tuple[str, ...]]()
        for first in range(0, len(all_cases), _CASES_AT_ONCE):
            process = self._pool.process(self.backend.ref) or self._pool.restart(self.backend.ref)
            process.send(GetReasons(cases=all_cases[first : first + _CASES_AT_ONCE]))
            answer = process.receive(self._pool.limits.of_loading)
            if not isinstance(answer, Reasons):
                raise SelectionError(f"backend {self.backend.ref!r} does not answer for its declarations: {answer}")
            found += answer.reasons
        return found
