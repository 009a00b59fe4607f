"""The pretend device: its storages, and the operations of the host."""

import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pretend_cuda.clock import BYTES_PER_NS, KERNEL_NS, Event, SimulatedClock, Stream
from pretend_cuda.order import Order

T = TypeVar("T")
SYNCHRONISED = "called a synchronizing CUDA operation"
"""torch's message if its sync-debug mode forbids a wait."""

ILLEGAL = "CUDA error: an illegal memory access was encountered"

_OWN = Path(__file__).parent
_UNSEEN = (f"{os.sep}site-packages{os.sep}", str(_OWN), f"{os.sep}contextlib.py")
_FIRST_SWEEP = 4096
"""Number of storages at which freed ones are first removed from the table."""


@dataclass(frozen=True)
class Settings:
    """A device and its faults.

    ``type``: as in ``torch.device``; torch's module of this name gets the functions of ``torch.cuda``.
    ``names``: one for each GPU of the machine; the first that ``CUDA_VISIBLE_DEVICES`` selects is the device.
    ``lock``: a file that a process with a context locks, as in exclusive-process mode, or "". ``report``: a folder in
    which each process writes what it did, or "".
    """

    type: str = "cuda"
    names: tuple[str, ...] = ("Pretend GPU",)
    capability: tuple[int, int] = (9, 0)
    num_sms: int = 132
    total_memory: int = 80 * 2**30
    l2_cache_size: int = 50 * 2**20
    lock: str = ""
    report: str = ""


@dataclass(frozen=True)
class Act:
    """An operation of the host on the device other than a launch, with the line outside of torch that caused it."""

    kind: Literal["hold", "event", "wait", "to host", "to device", "mixed", "float8"]
    what: str
    place: str


class PretendDevice:
    """One device of one process. ``launches``: operators and kernels, by name. ``acts``: other operations, in order."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.named = torch.device(settings.type, 0)
        self.visible = visible_gpus(len(settings.names))
        self.launches: Counter[str] = Counter()
        self.acts: list[Act] = []
        self.given: object = ()
        """Arguments of the running torch function; a tensor made without tensor arguments gets their device."""
        self.is_capturing = False
        self.sync_debug_mode = 0
        self.memory_fraction = 1.0
        self.clock = SimulatedClock()
        self.order = Order()
        self.stream_class = type("Stream", (Stream,), {"pretend": self})
        self.event_class = type("Event", (Event,), {"pretend": self})
        self.default: Stream = self.stream_class()
        self.current = self.default
        self._held: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._sweep_at = _FIRST_SWEEP
        self._lock: int | None = None
        self._service = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
        self._is_lost = False

    # Storages on the device.

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the storage of ``tensor`` is on the device."""
        return storage_key(tensor) in self._held

    def take(self, tensor: Tensor) -> None:
        """Put the storage of ``tensor`` on the device; raise torch.OutOfMemoryError if it does not fit."""
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
        """Move the storage of ``tensor`` from the device to the host."""
        key = storage_key(tensor)
        self._held.pop(key, None)
        self._sizes.pop(key, None)

    def allocated(self) -> int:
        """Return the bytes of all storages on the device."""
        self._held = {key: held for key, held in self._held.items() if not held.expired()}
        self._sizes = {key: self._sizes[key] for key in self._held}
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._held))
        return sum(self._sizes.values())

    # Operations on the device.

    def answer(self) -> None:
        """Create the context if there is none; raise torch.AcceleratorError if the device is in use or lost."""
        if self._is_lost or (self._service and Path(self._service, "lost").exists()):
            raise torch.AcceleratorError(ILLEGAL)
        if self.settings.lock and self._lock is None:
            lock = os.open(f"{self.settings.lock}{self.visible[0]}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable") from None
            self._lock = lock

    def lose(self) -> None:
        """Lose the device by an illegal access, with all clients of the same MPS."""
        self._is_lost = True
        if self._service:
            Path(self._service, "lost").touch()

    def close(self) -> None:
        """Release the context, and write the report."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self.settings.report:
            written = {
                "gpus": self.visible,
                "launches": self.launches,
                "acts": [asdict(act) for act in self.acts],
            }
            Path(self.settings.report, f"{os.getpid()}.json").write_text(json.dumps(written), encoding="utf-8")

    def launch(self, name: str, num_bytes: int = 0) -> None:
        """Run ``name`` on the current stream."""
        self.answer()
        self.launches[name] += 1
        self.clock.work(self.current, KERNEL_NS + num_bytes // BYTES_PER_NS)

    def wait(self, what: str, kind: Literal["wait", "to host", "to device"] = "wait") -> None:
        """Let the host wait for the current stream; raise RuntimeError if capture or sync-debug mode forbids it."""
        self.refuse_to_wait()
        self.note(kind, what)
        self.clock.wait_until(self.current.free_ns)
        self.order.finish(self.current.past)

    def run(self, given: list[Tensor], changed: list[Tensor], call: Callable[[], T]) -> T:
        """Return the result of an operation of the current stream on ``given`` tensors, which changes ``changed``."""
        held = [tensor for tensor in given if self.holds(tensor)]
        return self.order.run(self.current.stream_id, self.current.past, held, changed, call)

    def refuse_to_wait(self) -> None:
        """Raise RuntimeError if a capture or the sync-debug mode forbids a wait for the device."""
        if self.is_capturing or self.sync_debug_mode in {2, "error"}:
            raise RuntimeError(SYNCHRONISED)

    def refuse_in_capture(self) -> None:
        """Raise CUDA's error for a wait that a capture forbids and the sync-debug mode allows."""
        if self.is_capturing:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def note(self, kind: str, what: str) -> None:
        """Record one operation, with its place."""
        self.answer()
        self.acts.append(Act(kind, what, place()))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Forbid waits for a capture."""
        self.answer()
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False


def visible_gpus(count: int) -> list[int]:
    """Return the numbers of the visible GPUs among ``count``."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(count)) if given is None else list(map(int, given.split(",")))


def storage_key(tensor: Tensor) -> int:
    """Return an id that tensors of one storage share, or 0 for a tensor without a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def place() -> str:
    """Return the innermost line outside of installed packages and of this package, as ``file:line function``."""
    frame = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _UNSEEN):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
