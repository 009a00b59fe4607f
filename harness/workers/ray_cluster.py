"""The actors of a run on a Ray cluster: connect, choose the device, describe the backends, send questions.

This is the only module that calls ray, which is imported on connecting. A lost node is replaced by a new actor, which
waits until the cluster has room for it.
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attncheck
from attncheck.errors import ClusterError, MissingExtraError, QuestionError
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.preparation import file_digest
from attncheck.harness.workers.first_messages import assignment_of
from attncheck.harness.workers.protocol import (
    ChooseDevice,
    DeviceChosen,
    HarnessFailure,
    Prepare,
    Refused,
    format_message,
    parse_answer,
)
from attncheck.harness.workers.ray_actor import Examined, RayActor
from attncheck.harness.workers.schedule import BackendQuestion
from attncheck.harness.workers.worker_settings import WorkerSettings
from attncheck.reports.run_file.header import Environment

if TYPE_CHECKING:
    from attncheck.harness.run.plan import RunPlan
    from attncheck.harness.run.selection import Selection

_PATIENCE_S = 600.0
"""Seconds that a run waits until the cluster has room for its first actor, or for another one."""

_CLOSING_S, _BREAKING_S = 10.0, 1.0
"""Seconds that actors may take to end their backends' processes, normally and if the run ends at once."""

_CONNECTING_S = 10.0
"""Seconds that the head of the cluster may take to accept a connection."""


@dataclass(frozen=True)
class RaySettings:
    """Which Ray cluster a run uses, and the resources of each actor.

    ``address``: None for RAY_ADDRESS, or else for the cluster that this machine is part of. ``resources``: amounts of
    ``CPU``, ``GPU``, ``memory`` in bytes, and of other resources of the nodes. ``runtime_env``: Ray's description of an
    actor's environment.
    """

    address: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lost:
    """The node or the actor ended, for this ``cause``."""

    cause: str


Answer = Examined | Refused | HarnessFailure | Lost | None
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

    def __init__(
        self,
        settings: RaySettings,
        prepare: Prepare,
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
        self._settings, self._prepare, self._note = settings, prepare, note
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
        self._wish = ChooseDevice(wanted=device, wishes=())
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
        closing, self._joined_nodes = [node.actor.close.remote() for node in self._joined_nodes], []
        if closing:
            with suppress(self._ray.exceptions.RayError, OSError):
                self._ray.wait(closing, num_returns=len(closing), timeout=_BREAKING_S if at_once else _CLOSING_S)
        self._ray.shutdown()

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment there, from the first node.

        Raises:
            ClusterError: the node takes no part, or no node is found.
        """
        self._wish = ChooseDevice(wanted=wanted, wishes=tuple(wishes))
        self._add()
        ((self._first, _),) = self.wait()
        chosen = self._first.chosen
        if chosen is None:
            raise ClusterError(self._name, self._last_words)
        self._environment = chosen.environment
        self._wish = ChooseDevice(wanted=chosen.device, wishes=())
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
        """Wait for an answer, and return the references of all there are."""
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
        return answer if node.chosen is not None else self._joined(node, *answer)

    def _joined(self, node: Node, name: str, line: bytes) -> Refused | None:
        """Let ``node`` accept questions, or return why it does not."""
        node.name, answer = name, parse_answer(line)
        if isinstance(answer, Refused):
            return answer
        assert isinstance(answer, DeviceChosen)
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
        messages = format_message(self._prepare), format_message(self._wish)
        self._pending[actor.join.remote(attncheck.__version__, folder, messages)] = Node(actor)

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
    """Return the module ray, connected to the cluster ``name``."""
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
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = f"cannot be used: {_cause(error)}; --ray-address local starts one on this machine"
        raise ClusterError(name, reason) from error
    return ray


def _cause(error: Exception) -> str:
    """Return the last line of an error of Ray, which is the most specific one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
