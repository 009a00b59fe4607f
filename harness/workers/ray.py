"""Backends examined by actors of a Ray cluster."""

import heapq
import logging
import os
import platform
import socket
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attncheck
from attncheck.errors import AttncheckError, ClusterError, MissingExtraError, QuestionError
from attncheck.harness.run.options import RaySettings
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, ProcessEnd
from attncheck.harness.run.run import file_digest
from attncheck.harness.run.selection import RunPlan
from attncheck.harness.truth.shared_folder import truths_folder
from attncheck.harness.workers.executor import WAITING, BackendQuestion, Stopped, Supervisor, ended_records, untimed
from attncheck.harness.workers.limits import WorkerSettings
from attncheck.harness.workers.pool import WorkerPool, assignment_of
from attncheck.harness.workers.process import WorkerError
from attncheck.harness.workers.protocol import HarnessFailure, Refused
from attncheck.harness.workers.worker import Assignment, DeviceChosen, Imports
from attncheck.reports.run_file.header import Environment, RunHeader
from attncheck.reports.run_file.records import Record, RunFooter, format_line, parse_line

if TYPE_CHECKING:
    from attncheck.harness.run.run import Run
    from attncheck.harness.run.selection import Selection

# Each node has a supervisor, so that a crash, a hang or a limit is handled where it happens. The run exchanges only
# questions and records with it. This module does not import ray.


@dataclass(frozen=True)
class ActorRecords:
    """The records of one question, one line of JSON each. ``blind``: why the case could not be examined at all."""

    records: tuple[bytes, ...]
    blind: str | None = None


class RayActor:
    """Examines questions one after another. The run calls :meth:`join`, then :meth:`begin`, then the other methods."""

    def __init__(self) -> None:
        self._pool = WorkerPool()
        self._supervisor: Supervisor | None = None
        self._described: dict[str, BackendDescription | str] = {}

    def join(
        self, version: str, folder: str | None, imports: str, wish: tuple[str | None, list[str]]
    ) -> dict[str, str]:
        """Return this node's ``name``, and the device ``chosen`` as JSON, or why it is ``refused`` by the node.

        ``version``: of attncheck in the run. ``folder``: the current folder of the run; None for the one that Ray
        chose. ``imports``: Imports as JSON. ``wish``: the arguments of ``choose_device``.
        """
        # Arguments and result are of plain types, because the node may have another version of attncheck.
        answer = self._join(version, folder, imports, *wish)
        name = {"name": platform.node()}
        if isinstance(answer, Refused):
            return name | {"refused": answer.reason}
        return name | {"chosen": answer.model_dump_json()}

    def _join(
        self, version: str, folder: str | None, imports: str, wanted: str | None, wishes: Sequence[str]
    ) -> DeviceChosen | Refused:
        if version != attncheck.__version__:
            reason = f"it has attncheck {attncheck.__version__}, and the run {version}"
            return Refused(reason=reason)
        try:
            if folder is not None:
                os.chdir(folder)
        except OSError as error:
            reason = f"it cannot use the folder {folder} ({error.strerror}); share it, or give a working_dir "
            return Refused(reason=f"{reason}in the runtime_env of --executor ray:FILE")
        self._pool = WorkerPool(imports=Imports.model_validate_json(imports))
        try:
            device, notes, environment = self._pool.choose_device(wishes, wanted)
        except AttncheckError as error:
            return Refused(reason=str(error))
        return DeviceChosen(device=device, notes=notes, environment=environment)

    def begin(self, assignment: Assignment, settings: WorkerSettings) -> None:
        """Accept the run that the questions belong to, and ``settings`` for the processes of backends."""
        folder = truths_folder() if assignment.truths else None  # the cache of this node's user
        assignment = assignment.model_copy(update={"truths": folder and folder.absolute()})
        self._pool = self._pool.with_settings(settings)
        self._pool.assign(assignment)
        plan = RunPlan(cases=(), device=assignment.device, seed=assignment.seed)
        self._supervisor = Supervisor(plan, (), self._pool, assignment.environment)

    def describe(self, digests: Mapping[str, str]) -> list[BackendDescription | str]:
        """Return the descriptions of these backends on this node, or why one cannot be examined.

        ``digests``: by reference, the digest of the file that it names.
        """
        others = [ref for ref, digest in digests.items() if file_digest(ref) != digest]
        self._described |= {ref: f"{Path.cwd()} has another file for {ref}, or none" for ref in others}
        refs = [ref for ref in digests if ref not in others]
        for ref, found in zip(refs, self._pool.describe(refs), strict=True):
            self._described[ref] = str(found) if isinstance(found, QuestionError) else found
        return [self._described[ref] for ref in digests]

    def examine(self, question: BackendQuestion, digest: str) -> ActorRecords | Refused | HarnessFailure:
        """Examine one question. ``digest``: of the file that the reference of its backend names.

        Returns Refused if the backend differs from the one of the run.
        """
        assert self._supervisor is not None
        backend, num_blind = question.backend, len(self._supervisor.blind)
        try:
            if backend.is_loaded and (reason := self._reason_against(backend, digest)):
                return Refused(reason=reason)
            records = tuple(self._supervisor.examine_case(backend, question.case, question.checks))
        except WorkerError as error:
            return HarnessFailure(error=str(error), traceback="".join(traceback.format_exception(error)))
        blind = self._supervisor.blind[num_blind:]
        return ActorRecords(tuple(format_line(record).encode() for record in records), str(blind[0]) if blind else None)

    def close(self) -> None:
        """End the processes of the backends, and their children."""
        self._pool.close(at_once=True)

    def _reason_against(self, backend: BackendDescription, digest: str) -> str:
        """Return how a backend differs from the one of the run, or "" if it is the same."""
        if backend.ref not in self._described:
            self.describe({backend.ref: digest})
        found = self._described[backend.ref]
        if isinstance(found, str):
            return found
        return "" if found == backend else f"backend {backend.ref!r} is another one there"


# This is the only module that calls ray, which is imported on connecting. A lost node is replaced by a new actor, which
# waits until the cluster has room for it.

_PATIENCE_S = 600.0
"""Seconds that a run waits until the cluster has room for its first actor, or for another one."""

_CLOSING_S, _BREAKING_S = 10.0, 1.0
"""Seconds that actors may take to end their backends' processes, normally and if the run ends at once."""

_CONNECTING_S = 10.0
"""Seconds that the head of the cluster may take to accept a connection."""


@dataclass(frozen=True)
class Lost:
    """The node or the actor ended, for this ``cause``."""

    cause: str


Answer = ActorRecords | Refused | HarnessFailure | Lost | None
"""The result of a node; None if it has joined the run and has no question yet."""


@dataclass(eq=False)
class Node:
    """One actor. ``name``: of its machine. ``chosen``: the device it examines on; None until it has joined the run."""

    actor: Any
    name: str = "a node"
    chosen: DeviceChosen | None = None


class RayCluster:
    """The nodes of a run; a context manager that ends all actors on exit.

    Raises:
        MissingExtraError: ray is not installed.
        ClusterError: there is no such cluster, or no room in it.
    """

    fits_pages = False  # a node accepts no other suites once it has described a backend

    def __init__(
        self,
        settings: RaySettings,
        imports: Imports,
        note: Callable[[str], None],
        *,
        device: str | None = None,
        jobs: int | None = None,
        workers: WorkerSettings | None = None,
    ) -> None:
        """``note``: called with each line to show. ``device``: wanted by the user.

        ``jobs``: number of actors; None for as many as there is room for. ``workers``: settings of the processes of
        backends on the nodes.
        """
        self._name = settings.address or os.environ.get("RAY_ADDRESS") or "auto"
        self._settings, self._imports, self._note = settings, imports, note
        self._workers = workers or WorkerSettings()
        self._joined_nodes: list[Node] = []
        self._ray = _connected(self._name, settings)
        offered: dict[str, float] = self._ray.cluster_resources()
        is_gpu = device != "cpu" and (device is not None or bool(offered.get("GPU")))
        self._needs = {"CPU": 1.0, **({"GPU": 1.0} if is_gpu else {}), **settings.resources}
        room = min((int(offered.get(name, 0) // amount) for name, amount in self._needs.items() if amount), default=1)
        if room < 1 and jobs is None:
            needs = ", ".join(f"{name}={amount:g}" for name, amount in self._needs.items())
            reason = f"has no room for an actor that takes {needs}; add nodes, or give --jobs N to wait for them"
            self.close()
            raise ClusterError(self._name, reason)
        self._most = jobs or room
        self._wish: tuple[str | None, list[str]] = (device, [])
        self._environment: Environment | None = None
        self._assignment: Any = None
        self._digests: dict[str, str] = {}
        self._pending: dict[Any, Node] = {}
        self._last_words = ""
        self._noted: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, at_once: bool = False) -> None:
        """End all actors, with their backends' processes and the children of these. May be called repeatedly."""
        closing = [node.actor.close.remote() for node in self._joined_nodes]
        self._joined_nodes = []
        if closing:
            with suppress(self._ray.exceptions.RayError, OSError):
                self._ray.wait(closing, num_returns=len(closing), timeout=_BREAKING_S if at_once else _CLOSING_S)
        self._ray.shutdown()

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment there, from the first node.

        Raises:
            ClusterError: the node takes no part, or no node is found.
        """
        self._wish = (wanted, list(wishes))
        self._add()
        ((self._first, _),) = self.wait()
        chosen = self._first.chosen
        if chosen is None:
            raise ClusterError(self._name, self._last_words)
        self._environment = chosen.environment
        self._wish = (chosen.device, [])
        return chosen.device, chosen.notes, chosen.environment

    def begin(self, selection: "Selection", plan: "RunPlan", environment: Environment) -> None:
        """Assign the run of ``plan`` to the nodes."""
        self._assignment = self._ray.put(assignment_of(selection, plan, environment))
        self._first.actor.begin.remote(self._assignment, self._workers)

    def describe(self, refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
        """Return the description of each backend on the first node, or why it cannot be examined.

        Raises:
            ClusterError: the node was lost.
        """
        digests = {ref: file_digest(ref) for ref in refs}
        self._digests |= digests
        try:
            found = self._ray.get(self._first.actor.describe.remote(digests))
        except self._ray.exceptions.RayError as error:
            raise ClusterError(self._name, f"{self._first.name} was lost ({_cause(error)}); run again") from error
        return [QuestionError(each) if isinstance(each, str) else each for each in found]

    def examiner(self, run: "Run", costs: object = None) -> "RayExecutor":
        """Return what examines the questions of ``run`` on the nodes."""
        return RayExecutor(run.plan, run.backends, self, run.environment)

    def start(self, most: int) -> Node:
        """Let up to ``most`` nodes join the run, and return the first, which has already joined."""
        for _ in range(min(self._most, most) - 1):
            self._add()
        return self._first

    def send(self, node: Node, question: BackendQuestion) -> None:
        """Send a question to an idle node; :meth:`wait` returns its answer."""
        self._pending[node.actor.examine.remote(question, self._digests[question.backend.ref])] = node

    def wait(self) -> list[tuple[Node, Answer]]:
        """Wait for answers, and return all there are. A node that has refused or is lost gets no more questions.

        Raises:
            ClusterError: no node is left, none joins the run in time, or the connection to the cluster is lost.
        """
        if not self._pending:
            raise ClusterError(self._name, f"no node is left; {self._last_words}")
        answers = []
        for reference in self._ready():
            node = self._pending.pop(reference)
            has_joined = node.chosen is not None
            answer = self._answer(node, reference)
            if isinstance(answer, Lost | Refused):
                self._leave(node, answer, is_replaced=has_joined and isinstance(answer, Lost))
            answers.append((node, answer))
        return answers

    def _ready(self) -> list[Any]:
        references = list(self._pending)
        is_at_work = any(node.chosen for node in self._pending.values())
        try:
            if not self._ray.wait(references, timeout=None if is_at_work else _PATIENCE_S)[0]:
                raise ClusterError(self._name, f"no node has joined the run within {_PATIENCE_S:g} s")
            ready: list[Any] = self._ray.wait(references, num_returns=len(references), timeout=0)[0]
        except OSError as error:
            raise ClusterError(self._name, f"the connection was lost: {_cause(error)}") from error
        return ready

    def _answer(self, node: Node, reference: Any) -> Answer:
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if node.chosen is None:  # the node has another version of attncheck or ray
                return Refused(reason=_cause(error))
            return HarnessFailure(error=_cause(error), traceback=str(error))
        except self._ray.exceptions.RayError as error:
            return Lost(_cause(error))
        except OSError as error:
            raise ClusterError(self._name, f"the connection was lost: {_cause(error)}") from error
        return answer if node.chosen is not None else self._joined(node, **answer)

    def _joined(self, node: Node, name: str, chosen: str = "", refused: str = "") -> Refused | None:
        """Let ``node`` accept questions, or return why it does not."""
        node.name = name
        if refused:
            return Refused(reason=refused)
        answer = DeviceChosen.model_validate_json(chosen)
        if self._environment is not None:
            ours, theirs = self._environment.model_dump(), answer.environment.model_dump()
            if different := [f"{name} {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]:
                wanted = ", ".join(f"{name} {ours[name]!r}" for name in ours if ours[name] != theirs[name])
                return Refused(reason=f"it has {', '.join(different)}, and the run {wanted}")
            node.actor.begin.remote(self._assignment, self._workers)
        node.chosen = answer
        self._joined_nodes.append(node)
        return None

    def _add(self) -> None:
        """Start one more actor, which joins the run once the cluster has room for it."""
        needs = dict(self._needs)
        options = {
            "num_cpus": needs.pop("CPU"),
            "num_gpus": needs.pop("GPU", 0),
            "memory": needs.pop("memory", None),
            "resources": needs,
            "max_restarts": 0,
        }
        actor = self._ray.remote(RayActor).options(**options).remote()
        folder = None if "working_dir" in self._settings.runtime_env else str(Path.cwd())
        joined = actor.join.remote(attncheck.__version__, folder, self._imports.model_dump_json(), self._wish)
        self._pending[joined] = Node(actor)

    def _leave(self, node: Node, answer: Lost | Refused, *, is_replaced: bool) -> None:
        why = f"was lost: {answer.cause}" if isinstance(answer, Lost) else f"takes no part: {answer.reason}"
        self._last_words = f"{node.name} {why}"
        if self._last_words not in self._noted:  # several actors may be on one machine
            self._noted.add(self._last_words)
            self._note(self._last_words)
        self._joined_nodes = [each for each in self._joined_nodes if each is not node]
        self._ray.kill(node.actor)
        if is_replaced:
            self._add()


def _connected(name: str, settings: RaySettings) -> Any:
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # else it prints the log of a lost node to stdout
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("--executor ray", "ray", "ray") from error
    try:
        host, colon, port = name.rpartition(":")
        if colon and "/" not in host:  # ray itself tries for many minutes
            socket.create_connection((host, int(port)), _CONNECTING_S).close()
        ray.init(
            address=name,
            runtime_env=dict(settings.runtime_env) or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # ray raises a plain Exception if its own processes do not start in time
        advice = "`address: local` in --executor ray:FILE starts one on this machine"
        if name == "local":
            advice = "if this machine is busy, try again later"
        raise ClusterError(name, f"cannot be used: {_cause(error).removesuffix('.')}; {advice}") from error
    return ray


def _cause(error: Exception) -> str:
    """Return the last line of an error of Ray, which is the most specific one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


# Answers arrive in any order, and records are yielded in that of a serial run. Questions that share a CUDA-graph level
# go to one node. The questions of a lost node go to another one.

_TRIES = 3
"""Nodes that may be lost at one question before its checks are ``crashed``."""

_AHEAD = 10_000
"""How many questions after the first unfinished one may be started; their results wait in memory."""

Unit = tuple[int, ...]
"""Indices of questions for one node, in order."""


class RayExecutor:
    """Examines a plan through the nodes of ``cluster``, without the check ``timing``.

    ``blind``: cases that could not be examined at all, each once.
    """

    def __init__(
        self, plan: RunPlan, backends: Sequence[BackendDescription], cluster: RayCluster, environment: Environment
    ) -> None:
        self.blind: list[QuestionError] = []
        self._plan, self._backends, self._cluster = plan, backends, cluster
        self._circumstances = Circumstances(plan.seed, environment.digest, attncheck.__version__)
        self._questions: list[BackendQuestion] = []
        self._waiting: list[Unit] = []
        self._at_work: dict[Node, Unit] = {}
        self._losses: Counter[int] = Counter()
        self._found: dict[int, Sequence[Record] | ActorRecords] = {}
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
            case ActorRecords():
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
        if not isinstance(found, ActorRecords):
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
