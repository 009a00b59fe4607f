"""The pretend device: which storages lie on it, what the host asks of it, and whether it still answers."""

import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pretend_cuda.clock import BYTES_PER_NS, KERNEL_NS, Event, SimulatedClock, Stream

CUDA = torch.device("cuda", 0)
SYNCHRONISED = "called a synchronizing CUDA operation"
"""torch's words where its sync-debug mode forbids to wait."""

_OWN = Path(__file__).parent
_UNSEEN = (f"{os.sep}site-packages{os.sep}", str(_OWN), f"{os.sep}contextlib.py")
_FIRST_SWEEP = 4096
"""Storages after which those that are freed are dropped for the first time."""


@dataclass(frozen=True)
class Settings:
    """A device and its faults.

    ``names``: of each GPU of the machine. ``CUDA_VISIBLE_DEVICES`` may leave some; the first of them is the device.
    ``lost_at``: the launch that loses the device, counted from 1; 0: none. ``failing_capture``: the capture that fails;
    0: none. ``lock``: a file that a process with a context locks, as in exclusive-process mode; empty: no such mode.
    ``report``: a folder in which each process leaves what it did; empty: none does.
    """

    names: tuple[str, ...] = ("Pretend GPU",)
    capability: tuple[int, int] = (9, 0)
    num_sms: int = 132
    total_memory: int = 80 * 2**30
    l2_cache_size: int = 50 * 2**20
    lost_at: int = 0
    failing_capture: int = 0
    lock: str = ""
    report: str = ""


@dataclass(frozen=True)
class Act:
    """Something other than a launch that the host asked of the device, and the line outside of torch that did."""

    kind: Literal["hold", "event", "wait", "to host", "to device", "mixed", "float8"]
    what: str
    place: str


class PretendDevice:
    """One device of one process. ``launches``: operators and kernels, by name. ``acts``: all else, in their order."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.visible = visible_gpus(len(settings.names))
        self.launches: Counter[str] = Counter()
        self.float8_operators: Counter[str] = Counter()
        self.acts: list[Act] = []
        self.given: object = ()
        """The arguments of the torch function that runs: what it makes of no tensor lies beside them."""
        self.is_lost = self.is_capturing = False
        self.num_captures = 0
        self.sync_debug_mode = 0
        self.memory_fraction = 1.0
        self.clock = SimulatedClock()
        self.stream_class = type("Stream", (Stream,), {"pretend": self})
        self.event_class = type("Event", (Event,), {"pretend": self})
        self.current: Stream = self.stream_class()
        self._held: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._sweep_at = _FIRST_SWEEP
        self._lock: int | None = None

    # What lies on it.

    def holds(self, tensor: Tensor) -> bool:
        """Whether the storage of ``tensor`` lies on the device."""
        return storage_key(tensor) in self._held

    def take(self, tensor: Tensor) -> None:
        """Put the storage of ``tensor`` on the device. Raises torch.OutOfMemoryError."""
        key = storage_key(tensor)
        if key == 0 or key in self._held:
            return
        self.answer()
        size = tensor.untyped_storage().nbytes()
        self._held[key], self._sizes[key] = StorageWeakRef(tensor.untyped_storage()), size
        if len(self._held) >= self._sweep_at or size > self.settings.total_memory // 64:
            free = int(self.memory_fraction * self.settings.total_memory) - self.allocated()
            if free < 0:
                self.release(tensor)
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size} bytes, {free + size} are free"
                )

    def release(self, tensor: Tensor) -> None:
        """Take the storage of ``tensor`` off the device: it lies on the host."""
        key = storage_key(tensor)
        self._held.pop(key, None)
        self._sizes.pop(key, None)

    def allocated(self) -> int:
        """Return the bytes of all storages on the device."""
        self._held = {key: held for key, held in self._held.items() if not held.expired()}
        self._sizes = {key: self._sizes[key] for key in self._held}
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._held))
        return sum(self._sizes.values())

    # What is asked of it.

    def answer(self) -> None:
        """Make the context if there is none. Raises torch.AcceleratorError where the device is lost or taken."""
        if self.is_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if self.settings.lock and self._lock is None:
            lock = os.open(f"{self.settings.lock}{self.visible[0]}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable") from None
            self._lock = lock

    def close(self) -> None:
        """Give the context back, and leave the report."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self.settings.report:
            written = {
                "gpus": self.visible,
                "launches": self.launches,
                "float8": self.float8_operators,
                "acts": [asdict(act) for act in self.acts],
            }
            Path(self.settings.report, f"{os.getpid()}.json").write_text(json.dumps(written), encoding="utf-8")

    def launch(self, name: str, num_bytes: int = 0) -> None:
        """Run ``name`` on the current stream; the launch ``lost_at`` still succeeds, and nothing after it does."""
        self.answer()
        self.launches[name] += 1
        self.clock.work(self.current, KERNEL_NS + num_bytes // BYTES_PER_NS)
        if self.settings.lost_at and self.launches.total() == self.settings.lost_at:
            self.is_lost = True

    def wait(self, what: str, kind: Literal["wait", "to host", "to device"] = "wait") -> None:
        """Let the host wait for the current stream, where neither a capture nor the sync-debug mode forbids it."""
        self.refuse_to_wait()
        self.note(kind, what)
        self.clock.wait_until(self.current.free_ns)

    def refuse_to_wait(self) -> None:
        """Raise RuntimeError where no call may wait for the device."""
        if self.is_capturing or self.sync_debug_mode in {2, "error"}:
            raise RuntimeError(SYNCHRONISED)

    def refuse_in_capture(self) -> None:
        """Raise what CUDA raises for a wait that sync-debug mode lets pass, and a capture does not."""
        if self.is_capturing:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def note(self, kind: str, what: str) -> None:
        """Keep one act, with its place."""
        self.answer()
        self.acts.append(Act(kind, what, place()))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Forbid what a capture forbids. Raises torch.AcceleratorError at the end of the capture that is to fail."""
        self.answer()
        self.num_captures += 1
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False
        if self.num_captures == self.settings.failing_capture:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


def visible_gpus(count: int) -> list[int]:
    """Return the numbers of the GPUs that this process sees of ``count``."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(count)) if given is None else list(map(int, given.split(",")))


def storage_key(tensor: Tensor) -> int:
    """Return what the tensors of one storage have in common; 0 for a tensor without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def place() -> str:
    """Return the innermost line outside of installed packages and of this one, as ``file:line function``."""
    frame = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _UNSEEN):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
