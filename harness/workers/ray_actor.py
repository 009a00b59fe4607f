"""The actor on a node of a Ray cluster, which starts the processes of the backends that it examines.

Each node has a supervisor, so that a crash, a hang or a limit is handled where it happens. The run exchanges only
questions and records with it. This module does not import ray.
"""

import os
import platform
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import attncheck
from attncheck.errors import AttncheckError, QuestionError
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.plan import RunPlan
from attncheck.harness.run.preparation import file_digest
from attncheck.harness.truth.shared_folder import truths_folder
from attncheck.harness.workers.first_messages import WorkerError
from attncheck.harness.workers.protocol import (
    Assignment,
    ChooseDevice,
    DeviceChosen,
    HarnessFailure,
    Prepare,
    Refused,
    format_message,
    parse_request,
)
from attncheck.harness.workers.schedule import BackendQuestion
from attncheck.harness.workers.supervisor import Supervisor
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.harness.workers.worker_settings import WorkerSettings
from attncheck.reports.run_file.records import format_line


@dataclass(frozen=True)
class Examined:
    """The records of one question, one line of JSON each. ``blind``: why the case could not be examined at all."""

    records: tuple[bytes, ...]
    blind: str | None = None


class RayActor:
    """Examines questions one after another. The run calls :meth:`join`, then :meth:`begin`, then the other methods."""

    def __init__(self) -> None:
        self._pool = WorkerPool()
        self._supervisor: Supervisor | None = None
        self._described: dict[str, BackendDescription | str] = {}

    def join(self, version: str, folder: str | None, messages: tuple[bytes, bytes]) -> tuple[str, bytes]:
        """Return this node's name, and a message: the device with its environment, or why it takes no part.

        ``version``: of attncheck in the run. ``folder``: the current folder of the run; None for the one that Ray
        chose. ``messages``: Prepare and ChooseDevice.
        """
        # Arguments and result are of plain types, because the node may have another version of attncheck.
        answer = self._join(version, folder, *messages)
        return platform.node(), format_message(answer)

    def _join(self, version: str, folder: str | None, *messages: bytes) -> DeviceChosen | Refused:
        if version != attncheck.__version__:
            reason = f"it has attncheck {attncheck.__version__}, and the run {version}"
            return Refused(reason=reason)
        try:
            if folder is not None:
                os.chdir(folder)
        except OSError as error:
            reason = f"it cannot use the folder {folder} ({error.strerror}); share it, or give working_dir in "
            return Refused(reason=f"{reason}--ray-runtime-env")
        prepare, wish = map(parse_request, messages)
        assert isinstance(prepare, Prepare)
        assert isinstance(wish, ChooseDevice)
        self._pool = WorkerPool(prepare=prepare)
        try:
            device, notes, environment = self._pool.choose_device(wish.wishes, wish.wanted)
        except AttncheckError as error:
            return Refused(reason=str(error))
        return DeviceChosen(device=device, notes=notes, environment=environment)

    def begin(self, assignment: Assignment, settings: WorkerSettings) -> None:
        """Accept the run that the questions belong to, and ``settings`` for the processes of backends."""
        folder = truths_folder() if assignment.truths else None  # the cache of this node's user
        assignment = assignment.model_copy(update={"truths": folder and str(folder.absolute())})
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

    def examine(self, question: BackendQuestion, digest: str) -> Examined | Refused | HarnessFailure:
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
        return Examined(tuple(format_line(record).encode() for record in records), str(blind[0]) if blind else None)

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
