"""Distribute the questions of a run over a Ray cluster, and yield the records in the order of a serial run.

The supervisor examines in processes of one machine; :mod:`~attncheck.harness.workers.ray_cluster` returns answers in
any order. Questions that share a CUDA-graph level go to one node. The questions of a lost node go to another one.
"""

import heapq
from collections import Counter, deque
from collections.abc import Generator, Hashable, Iterable, Sequence
from typing import Protocol

import attncheck
from attncheck.errors import QuestionError
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.outcomes import Circumstances, ProcessEnd
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.workers.examining import ended_records
from attncheck.harness.workers.first_messages import WorkerError
from attncheck.harness.workers.protocol import HarnessFailure, Refused
from attncheck.harness.workers.ray_actor import Examined
from attncheck.harness.workers.ray_cluster import Answer, Lost, Node
from attncheck.harness.workers.requesting import WAITING, Stopped
from attncheck.harness.workers.schedule import BackendQuestion, untimed
from attncheck.reports.run_file.header import Environment, RunHeader
from attncheck.reports.run_file.records import Record, RunFooter, parse_line

_TRIES = 3
"""Nodes that may be lost at one question before its checks are ``crashed``."""

_AHEAD = 10_000
"""How many questions after the first unfinished one may be started; their results wait in memory."""

Unit = tuple[int, ...]
"""Indices of questions for one node, in order."""


class Cluster(Protocol):
    """The interface of a cluster that :class:`RayExecutor` uses."""

    def start(self, most: int) -> Node:
        """Let up to ``most`` nodes join the run, and return the first, which has already joined."""

    def send(self, node: Node, question: BackendQuestion) -> None:
        """Send a question to an idle node."""

    def wait(self) -> list[tuple[Node, Answer]]:
        """Wait for answers, and return all there are."""


class RayExecutor:
    """Examines a plan through the nodes of ``cluster``, without the check ``timing``.

    ``blind``: cases that could not be examined at all, each once.
    """

    def __init__(
        self, plan: RunPlan, backends: Sequence[BackendDescription], cluster: Cluster, environment: Environment
    ) -> None:
        self.blind: list[QuestionError] = []
        self._plan, self._backends, self._cluster = plan, backends, cluster
        self._circumstances = Circumstances(plan.seed, environment.digest, attncheck.__version__)
        self._questions: list[BackendQuestion] = []
        self._waiting: list[Unit] = []
        self._at_work: dict[Node, Unit] = {}
        self._losses: Counter[int] = Counter()
        self._found: dict[int, Sequence[Record] | Examined] = {}
        self._faulty: set[str] = set()

    def run(self) -> Generator[Record, None, None]:
        """Yield every record, by backend, then by case.

        Raises:
            ClusterError: no node is left.
            WorkerError: attncheck itself failed on a node.
        """
        self._questions = untimed(self._plan, self._backends)
        self._waiting = _units(self._questions)
        if not self._questions:
            return
        idle = deque([self._cluster.start(len(self._waiting))])
        over = 0
        while over < len(self._questions):
            while idle and self._waiting and self._waiting[0][0] < over + _AHEAD:
                self._send(idle.popleft(), heapq.heappop(self._waiting))
            for node, answer in self._cluster.wait():
                self._take(node, answer)
                if not isinstance(answer, Lost | Refused) and node not in self._at_work:
                    idle.append(node)
            while over in self._found:
                yield from self._records(over)
                over += 1

    def _send(self, node: Node, unit: Unit) -> None:
        self._at_work[node] = unit
        self._cluster.send(node, self._questions[unit[0]])

    def _take(self, node: Node, answer: Answer) -> None:
        """Store an answer; send the node the next question of its unit, or return the rest of the unit to the queue."""
        unit = self._at_work.pop(node, ())
        if not unit:  # the answer is about joining the run
            return
        first = self._questions[unit[0]]
        match answer:
            case HarnessFailure():
                raise WorkerError(first.backend.ref, answer)
            case Examined():
                self._found[unit[0]] = answer
                if unit[1:]:
                    self._send(node, unit[1:])
                return
            case Lost():
                self._losses[unit[0]] += 1
                if self._losses[unit[0]] == _TRIES:
                    stopped = Stopped(WAITING, ProcessEnd(f"its node was lost {_TRIES} times: {answer.cause}"))
                    self._found[unit[0]] = [*ended_records(self._circumstances, first, first.checks, stopped)]
                    unit = unit[1:]
        if unit:
            heapq.heappush(self._waiting, unit)

    def _records(self, index: int) -> Iterable[Record]:
        """Return the records of a question that is over, and drop them from memory."""
        found = self._found.pop(index)
        if not isinstance(found, Examined):
            return found
        key = self._questions[index].case.key
        if found.blind is not None and key not in self._faulty:
            self._faulty.add(key)
            self.blind.append(QuestionError(found.blind))
        return map(_record, found.records)


def _units(questions: Sequence[BackendQuestion]) -> list[Unit]:
    """Return the questions as units, by index; questions that share a CUDA-graph level form one unit."""
    units: dict[Hashable, list[int]] = {}
    for index, each in enumerate(questions):
        units.setdefault(index if each.group is None else each.group, []).append(index)
    return [tuple(unit) for unit in units.values()]


def _record(line: bytes) -> Record:
    record = parse_line(line)
    assert not isinstance(record, RunHeader | RunFooter)
    return record
