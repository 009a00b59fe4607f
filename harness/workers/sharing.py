"""A device that several processes of a run use at once, and CUDA's Multi-Process Service (MPS). Loads no torch."""

import os
import select
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from attncheck.errors import QuestionError
from attncheck.harness.device import accelerator_of

# A process can take memory and time of a GPU from another one. If a client of MPS loses the GPU, all clients lose it.
# What may be due to another process is examined again alone: the other slots wait, and their processes have ended.


@dataclass(eq=False)
class Turn:
    """A question, or the start of a process, on a device.

    ``ends``: of clients of MPS, up to the latest turn alone before. ``is_shared``: another turn overlaps.
    ``is_alone``: no other process uses the device. ``is_over``: the rest is examined again alone.
    """

    ends: int = 0
    is_shared: bool = False
    is_alone: bool = False
    is_over: bool = False


class SharedDevice:
    """A GPU, or the CPU, that slots use. Each question is a turn beside others, or alone.

    ``is_shared_gpu``: a GPU that several processes use. A case may then be examined again alone, and the processes end
    before. ``start_mps``: starts MPS for the GPU, or returns None; None if it is not used. ``note``: called with a
    sentence for the user.
    """

    def __init__(
        self,
        *,
        is_shared_gpu: bool = False,
        start_mps: "Callable[[], Mps | None] | None" = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.is_shared_gpu = is_shared_gpu
        self._start_mps, self._note = start_mps, note
        self._mps: Mps | None = None
        self._begin_mps()
        self._is_given_up = False
        self._without_mps: set[str] = set()
        self._ends_processes: list[Callable[[], None]] = []
        self._turns: set[Turn] = set()
        self._ends = self._ends_before = 0
        self._num_waiting, self._is_alone = 0, False
        self._changed = threading.Condition()

    @property
    def uses_mps(self) -> bool:
        """Whether processes that start now use MPS."""
        return self._mps is not None and not self._is_given_up

    def add(self, end_processes: Callable[[], None]) -> None:
        """Call ``end_processes`` before each turn alone; it returns when its processes have ended."""
        self._ends_processes.append(end_processes)

    def variables(self, ref: str) -> Mapping[str, str]:
        """Return the environment variables with which a process of the backend ``ref`` starts now."""
        return self._mps.variables if self._mps and self.is_client(ref) else {}

    def is_client(self, ref: str) -> bool:
        """Return whether processes of the backend ``ref`` that start now use MPS."""
        return self.uses_mps and ref not in self._without_mps and not self._is_alone

    def separate(self, ref: str) -> None:
        """Start the processes of the backend ``ref`` without MPS from now on, since its faults would end others."""
        self._without_mps.add(ref)

    def count_end(self) -> None:
        """Count a client of MPS that has ended, or lost the device."""
        with self._changed:
            self._ends += 1

    def have_others_ended(self, turn: Turn) -> bool:
        """Return whether a client of MPS ended since the turn alone before, besides that of ``turn``."""
        return self._ends > turn.ends + 1

    def give_up_mps(self, turn: Turn) -> bool:
        """Use MPS no more, since a process did not start in ``turn``; return whether it may start without it.

        Other clients keep it. After the end of a client MPS refuses new ones for a while, which is no reason.
        """
        with self._changed:
            if not self.uses_mps or turn.is_alone or self._ends > turn.ends:
                return False
            self._is_given_up = True
        self._note("MPS is used no more: a process of a backend did not start with it")
        return True

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Wait while a turn is alone, or waits for that; yield a turn that others may overlap."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting)
            turn = Turn(self._ends_before, is_shared=bool(self._turns))
            for other in self._turns:
                other.is_shared = True
            self._turns.add(turn)
        try:
            yield turn
        finally:
            with self._changed:
                self._turns.remove(turn)
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[Turn]:
        """Wait until no other turn goes on, end the processes on the GPU, and yield a turn alone, without MPS."""
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: not self._turns and not self._is_alone)
            self._is_alone = True
        try:
            self._end_processes()
            had_mps = self.uses_mps
            if self._ends > self._ends_before:
                self._end_mps()
            self._ends_before = self._ends
            yield Turn(self._ends, is_alone=True)
            if had_mps:  # the next processes are to use it
                self._end_processes()
                self._begin_mps()
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._is_alone = False
                self._changed.notify_all()

    def close(self) -> None:
        """End MPS."""
        self._start_mps = None
        self._end_mps()

    def _end_processes(self) -> None:
        if self.is_shared_gpu:
            with ThreadPoolExecutor() as threads:  # the end of a process on a GPU takes long
                list(threads.map(lambda end: end(), self._ends_processes))

    def _end_mps(self) -> None:
        """End MPS. After the end of a client, its server may be lost, or a kernel of the client goes on in it."""
        if self._mps is not None:
            self._mps.close()
            self._mps = None

    def _begin_mps(self) -> None:
        if self._mps is None and self._start_mps is not None:
            self._mps = self._start_mps()
            if self._mps is None:
                self._note("MPS does not start, so processes continue without it")


# The daemon of MPS leaves the session of the process that starts it, and would survive it. So a shell starts it, waits
# for the end of its standard input, which is the end of the run however it comes, and then ends the daemon.

_PROGRAM = "nvidia-cuda-mps-control"
_PIPES, _LOGS, _VISIBLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
CLIENT_VARIABLES = (_PIPES, _LOGS, _VISIBLE)
"""Environment variables of a client of MPS. CUDA reads them when it is initialised, and not when it is loaded."""
_OF_USER = Path("/tmp/nvidia-mps/control")  # noqa: S108 (where CUDA looks for the daemon)

_KEEPER = f"""\
trap '' PIPE
{_PROGRAM} -d </dev/null >/dev/null 2>&1 || exit 1
echo started
read -r _
for words in 'quit -t 5' quit; do echo "$words" | {_PROGRAM}; done >/dev/null 2>&1
rm -rf "$1"
"""
_STARTING_S, _ENDING_S = 10.0, 20.0


def has_mps() -> bool:
    """Return whether this machine has the program of MPS, and the user runs no daemon."""
    return shutil.which(_PROGRAM) is not None and _PIPES not in os.environ and not _OF_USER.exists()


def is_client(variables: Mapping[str, str]) -> bool:
    """Return whether a process with these environment variables uses MPS, of this run or of the user."""
    return _PIPES in variables or _OF_USER.exists()


def refuse_missing_mps(device: str) -> None:
    """Raise QuestionError if this process is to be a client of MPS, and cannot use ``device`` through it."""
    accelerator = accelerator_of(device)
    if accelerator is None or _PIPES not in os.environ:
        return
    try:
        accelerator.synchronize()  # creates a context
    except RuntimeError as error:
        raise QuestionError(
            f"{device} cannot be used through MPS: {next(iter(str(error).splitlines()), '')}"
        ) from error


class Mps:
    """A daemon of MPS for this run alone. ``variables``: the environment variables of its clients."""

    def __init__(self, folder: str, keeper: "subprocess.Popen[bytes]", variables: Mapping[str, str]) -> None:
        self.variables = variables
        self._folder, self._keeper = folder, keeper

    @classmethod
    def start(cls, visible: Mapping[str, str] = {}) -> Self | None:
        """Return a new daemon for the GPUs that the environment, with the variables ``visible``, makes visible.

        None if it does not start.
        """
        folder = tempfile.mkdtemp(prefix="attncheck-mps-")
        own = {_PIPES: folder, _LOGS: folder}
        environment = {**os.environ, **visible, **own}
        try:
            keeper = subprocess.Popen(  # noqa: S603 (words of ours)
                ["/bin/sh", "-c", _KEEPER, "sh", folder],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the run first
            )
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        if (given := environment.get(_VISIBLE)) is not None:  # its clients count the GPUs that the daemon has
            own[_VISIBLE] = ",".join(map(str, range(given.count(",") + 1)))
        mps = cls(folder, keeper, own)
        assert keeper.stdout is not None
        ready, _, _ = select.select([keeper.stdout], [], [], _STARTING_S)
        if not ready or not keeper.stdout.readline():
            mps.close()
            return None
        return mps

    def close(self) -> None:
        """End the daemon. May be called repeatedly."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()
        with suppress(OSError):
            shutil.rmtree(self._folder)
