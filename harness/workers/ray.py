"""Backends examined by actors of a Ray cluster."""

import logging
import os
import platform
import socket
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attncheck
from attncheck.errors import AttncheckError, ClusterError, MissingExtraError, QuestionError
from attncheck.harness.run.options import RaySettings
from attncheck.harness.run.outcomes import BackendDescription, ProcessEnd
from attncheck.harness.run.run import file_digest
from attncheck.harness.run.selection import RunPlan
from attncheck.harness.truth.shared_folder import truths_folder
from attncheck.harness.workers.examination import WAITING, Place, Stopped
from attncheck.harness.workers.executor import SlotExecutor, Supervisor
from attncheck.harness.workers.limits import WorkerSettings
from attncheck.harness.workers.pool import WorkerPool, assignment_of
from attncheck.harness.workers.process import WorkerError
from attncheck.harness.workers.protocol import HarnessFailure, Refused
from attncheck.harness.workers.schedule import BackendQuestion, Chosen, untimed
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

    def examine(self, question: BackendQuestion) -> ActorRecords | Refused | HarnessFailure:
        """Examine one question. Returns Refused if the backend, or one of its files, differs from that of the run."""
        assert self._supervisor is not None
        backend, num_blind = question.backend, len(self._supervisor.blind)
        try:
            if backend.is_loaded and (reason := self._reason_against(backend)):
                return Refused(reason=reason)
            records = tuple(self._supervisor.examine_case(backend, question.case, question.checks))
        except WorkerError as error:
            return HarnessFailure(error=str(error), traceback="".join(traceback.format_exception(error)))
        blind = self._supervisor.blind[num_blind:]
        return ActorRecords(tuple(format_line(record).encode() for record in records), str(blind[0]) if blind else None)

    def close(self) -> None:
        """End the processes of the backends, and their children."""
        self._pool.close(at_once=True)

    def _reason_against(self, backend: BackendDescription) -> str:
        """Return how a backend differs from the one of the run, or "" if it is the same."""
        if backend.ref not in self._described:
            self.describe({backend.ref: file_digest(backend.ref)})
        found = self._described[backend.ref]
        if isinstance(found, str):
            return found
        return "" if found == backend else f"backend {backend.ref!r} is another one there"


# This is the only module that calls ray, which is imported on connecting. A lost node is replaced by a new actor, which
# waits until the cluster has room for it. Its question goes to any node.

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


_TRIES = 3
"""Nodes that may be lost at one question before its checks are ``crashed``."""


class RaySlot:
    """Examines on one node of ``cluster`` at a time, through an actor."""

    def __init__(self, cluster: "RayCluster") -> None:
        self.name = "a node"
        self._cluster = cluster
        self._has_joined = self._is_over = False
        self._start()

    def join(self) -> DeviceChosen | None:
        """Wait until the actor joins the run; return None if it takes no part.

        Raises:
            ClusterError: no node joins the run in time, or the connection to the cluster is lost.
        """
        answer = self._get(self._joining)
        chosen, words = None, ""
        if isinstance(answer, Lost):
            words = f"was lost: {answer.cause}"
        elif isinstance(answer, HarnessFailure):  # the node has another version of attncheck or ray
            words = f"takes no part: {answer.error}"
        else:
            self.name, reason = answer["name"], answer.get("refused", "")
            if not reason:
                chosen = DeviceChosen.model_validate_json(answer["chosen"])
                reason = self._cluster.accept(self, chosen)
            words = f"takes no part: {reason}" if reason else ""
        if words:
            self._leave(words, is_over=True)
            return None
        self._has_joined = True
        return chosen

    def begin(self, _chosen: Chosen) -> bool:
        """Wait until a node joins the run, unless there is one."""
        if not self._has_joined and (self._is_over or self.join() is None):
            raise self._cluster.error(f"no node is left; {self._cluster.last_words}")
        return True

    def examine(self, place: Place) -> bool:
        """Examine a question; return False if the node is lost, or refuses the backend."""
        question = place.question
        if len(place.losses) == _TRIES:
            stopped = Stopped(WAITING, ProcessEnd(f"its node was lost {_TRIES} times: {place.losses[-1]}"))
            place.end(stopped, question.checks)
            return True
        match answer := self._get(self.actor.examine.remote(question)):
            case Lost():
                place.losses.append(answer.cause)
                self._leave(f"was lost: {answer.cause}")
            case Refused():
                self._leave(f"takes no part: {answer.reason}", is_over=True)
            case HarnessFailure():
                raise WorkerError(question.backend.ref, answer)
            case ActorRecords():
                place.blind = answer.blind
                for line in answer.records:
                    place.records.put(_record(line))
        return self._has_joined

    def leave(self, _ref: str) -> None:
        """Do nothing: the node ends the process of a backend when it gets a question to another one."""

    def stop(self) -> None:
        """End the actor at once; its end is no loss of a node."""
        self._is_over = True
        self._cluster.ray.kill(self.actor)

    def _start(self) -> None:
        """Start an actor, which joins the run once the cluster has room for it."""
        self.actor, self._joining = self._cluster.new_actor()

    def _get(self, reference: Any) -> Any:
        """Wait for the result of a call, and return it, or why there is none."""
        ray = self._cluster.ray
        try:
            while not ray.wait([reference], timeout=_PATIENCE_S)[0]:
                if not self._cluster.joined:
                    raise self._cluster.error(f"no node has joined the run within {_PATIENCE_S:g} s")
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            return HarnessFailure(error=_cause(error), traceback=str(error))
        except ray.exceptions.RayError as error:
            return Lost(_cause(error))
        except OSError as error:
            raise self._cluster.error(f"the connection was lost: {_cause(error)}") from error

    def _leave(self, words: str, *, is_over: bool = False) -> None:
        self._has_joined = False
        if self._is_over:
            return  # the run has stopped this slot
        self._cluster.dismiss(self, words)
        if is_over:
            self.stop()
        else:
            self._cluster.ray.kill(self.actor)
            self._start()


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
        self.joined: set[RaySlot] = set()  # changed by several threads
        self.ray = _connected(self._name, settings)
        offered: dict[str, float] = self.ray.cluster_resources()
        is_gpu = device != "cpu" and (device is not None or bool(offered.get("GPU")))
        self._needs = {"CPU": 1.0, **({"GPU": 1.0} if is_gpu else {}), **settings.resources}
        room = min((int(offered.get(name, 0) // amount) for name, amount in self._needs.items() if amount), default=1)
        if room < 1 and jobs is None:
            needs = ", ".join(f"{name}={amount:g}" for name, amount in self._needs.items())
            reason = f"has no room for an actor that takes {needs}; add nodes, or give --jobs N to wait for them"
            self.close()
            raise self.error(reason)
        self._most = jobs or room
        self._wish: tuple[str | None, list[str]] = (device, [])
        self._environment: Environment | None = None
        self._assignment: Any = None
        self.last_words = ""
        self._noted: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, at_once: bool = False) -> None:
        """End all actors, with their backends' processes and the children of these. May be called repeatedly."""
        closing = [slot.actor.close.remote() for slot in self.joined]
        self.joined.clear()
        if closing:
            with suppress(self.ray.exceptions.RayError, OSError):
                self.ray.wait(closing, num_returns=len(closing), timeout=_BREAKING_S if at_once else _CLOSING_S)
        self.ray.shutdown()

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment there, from the first node.

        Raises:
            ClusterError: the node takes no part, or no node is found.
        """
        self._wish = (wanted, list(wishes))
        self._first = RaySlot(self)
        chosen = self._first.join()
        if chosen is None:
            raise self.error(self.last_words)
        self._environment = chosen.environment
        self._wish = (chosen.device, [])
        return chosen.device, chosen.notes, chosen.environment

    def begin(self, selection: "Selection", plan: "RunPlan", environment: Environment) -> None:
        """Assign the run of ``plan`` to the nodes."""
        self._assignment = self.ray.put(assignment_of(selection, plan, environment))
        self._first.actor.begin.remote(self._assignment, self._workers)

    def describe(self, refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
        """Return the description of each backend on the first node, or why it cannot be examined.

        Raises:
            ClusterError: the node was lost.
        """
        digests = {ref: file_digest(ref) for ref in refs}
        try:
            found = self.ray.get(self._first.actor.describe.remote(digests))
        except self.ray.exceptions.RayError as error:
            raise self.error(f"{self._first.name} was lost ({_cause(error)}); run again") from error
        return [QuestionError(each) if isinstance(each, str) else each for each in found]

    def examiner(self, run: "Run", costs: object = None) -> "RayExecutor":
        """Return what examines the questions of ``run`` on the nodes."""
        return RayExecutor(run.plan, run.backends, self, run.environment)

    def slots(self, most: int) -> list[RaySlot]:
        """Return up to ``most`` slots, whose actors start at once; the first has the node that has already joined."""
        return [self._first, *(RaySlot(self) for _ in range(min(self._most, most) - 1))]

    def new_actor(self) -> tuple[Any, Any]:
        """Start one more actor and make it join the run; return it, and the reference of its answer."""
        needs = dict(self._needs)
        options = {
            "num_cpus": needs.pop("CPU"),
            "num_gpus": needs.pop("GPU", 0),
            "memory": needs.pop("memory", None),
            "resources": needs,
            "max_restarts": 0,
        }
        actor = self.ray.remote(RayActor).options(**options).remote()
        folder = None if "working_dir" in self._settings.runtime_env else str(Path.cwd())
        joining = actor.join.remote(attncheck.__version__, folder, self._imports.model_dump_json(), self._wish)
        return actor, joining

    def accept(self, slot: RaySlot, chosen: DeviceChosen) -> str:
        """Let the node of ``slot`` accept questions; return why it does not, or ""."""
        if self._environment is not None:
            ours, theirs = self._environment.model_dump(), chosen.environment.model_dump()
            if different := [f"{name} {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]:
                wanted = ", ".join(f"{name} {ours[name]!r}" for name in ours if ours[name] != theirs[name])
                return f"it has {', '.join(different)}, and the run {wanted}"
            slot.actor.begin.remote(self._assignment, self._workers)
        self.joined.add(slot)
        return ""

    def dismiss(self, slot: RaySlot, words: str) -> None:
        """Show why the node of ``slot`` gets no more questions."""
        self.joined.discard(slot)
        self.last_words = f"{slot.name} {words}"
        if self.last_words not in self._noted:  # several actors may be on one machine
            self._noted.add(self.last_words)
            self._note(self.last_words)

    def error(self, reason: str) -> ClusterError:
        """Return an error of this cluster."""
        return ClusterError(self._name, reason)


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


class RayExecutor(SlotExecutor):
    """Examines a plan through the nodes of ``cluster``, without the check ``timing``."""

    def __init__(
        self, plan: RunPlan, backends: Sequence[BackendDescription], cluster: RayCluster, environment: Environment
    ) -> None:
        super().__init__(plan, backends, environment)
        self._cluster = cluster

    def run(self) -> Generator[Record, None, None]:
        """Yield every record, by backend, then by case.

        Raises:
            ClusterError: no node is left.
            WorkerError: attncheck itself failed on a node.
        """
        questions = untimed(self._plan, self._descriptions)
        if questions:
            yield from self.examine_all(questions, self._cluster.slots(len(questions)), shares_machine=False)


def _record(line: bytes) -> Record:
    record = parse_line(line)
    assert not isinstance(record, RunHeader | RunFooter)
    return record
