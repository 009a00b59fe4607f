"""Interface of a graph recorder, which captures one ``forward`` and replays it in the same memory without its Python.

:mod:`attncheck.harness.checks.cudagraph.cuda` captures a real ``torch.cuda.CUDAGraph``;
:mod:`attncheck.harness.checks.cudagraph.emulation.emulated_recorder` records operators on a machine without a GPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from attncheck.errors import InternalError

RecorderName = Literal["cuda", "emulated"]

Forward = Callable[[], object]
"""One call of ``forward`` with all arguments bound."""

ViolationKind = Literal["host read", "data-dependent shape", "host copy", "error"]


@dataclass(frozen=True)
class Violation:
    """Something that a captured graph cannot contain.

    ``call``: what was called, such as ``.item()``. ``where``: the backend's line, as ``file:line in function``. Empty
    if unknown.
    """

    kind: ViolationKind
    call: str
    where: str = ""

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.kind}: {self.call}{place}"


class CaptureError(InternalError):
    """``forward`` cannot be captured. ``violations``: the reasons, in order of occurrence, without duplicates."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        self.violations = violations
        super().__init__("; ".join(map(str, violations)))


class UnseenError(InternalError):
    """The recorder cannot observe what ``forward`` does, so nothing can be concluded. The message gives the reason."""


@dataclass(frozen=True)
class Released:
    """Memory that a graph uses but that only graphs keep alive: addresses in ``[start, end)``.

    ``first_used``: the first operator that used it, and the line of the backend.
    """

    start: int
    end: int
    first_used: str

    def __str__(self) -> str:
        return f"memory first used by {self.first_used}"


class Recording(Protocol):
    """One captured ``forward``."""

    def replay(self) -> None:
        """Repeat everything that was recorded, in the same memory. Exceptions of operators propagate."""

    def launch(self) -> None:
        """Replay for timing, without waiting for the device and without checking memory."""

    def reads(self, tensor: Tensor) -> bool | None:
        """Return whether the graph was given the memory of ``tensor``, or None if that is unknown."""

    def host_reads(self) -> tuple[str, ...]:
        """Return what ``forward`` read from host memory during capture: legal, but frozen. Empty if unknown."""

    def hands_out_memory(self) -> bool:
        """Return whether ``forward`` gave addresses to code that the recorder may not observe."""

    def released(self) -> tuple[Released, ...]:
        """Return memory that the graph uses but that only graphs keep alive.

        A real graph would read whatever the allocator has stored there since. Empty if the recorder cannot determine
        this.
        """


class Recorder(Protocol):
    """Captures ``forward`` calls on one device."""

    name: RecorderName

    def watching(self) -> AbstractContextManager[None]:
        """Return a context for calls into a backend outside :meth:`record`; it tracks which memory is on the host."""

    def mark_host(self, *tensors: Tensor) -> None:
        """Mark tensors that are on the host by contract (the ``_cpu`` fields), so that reading them is no fault."""

    def record(self, prepare: Callable[[], Forward]) -> Recording:
        """Warm up, then capture. ``prepare`` builds fresh metadata and returns the call to capture.

        It is called again for each warm-up and for the capture, as in a model runner, so that values which a warm-up
        cached on its metadata are not available to the capture. Raise :class:`CaptureError` or :class:`UnseenError`.
        Exceptions of ``prepare`` and of warm-ups propagate.
        """


class UnwatchedRecorder:
    """A recorder that records nothing: it runs twice what a recorder would run, as the backend runs on its own."""

    name: RecorderName = "emulated"

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def mark_host(self, *tensors: Tensor) -> None:
        """Do nothing."""

    def record(self, prepare: Callable[[], Forward]) -> Recording:
        """Raise UnseenError, after two runs. Exceptions of ``prepare`` and of the runs propagate."""
        for _ in range(2):
            prepare()()
        raise UnseenError("nothing is recorded")


def recorder_for(device: torch.device) -> Recorder:
    """Return a recorder of real graphs for a GPU, or the emulation for other devices."""
    if device.type == "cuda":
        from attncheck.harness.checks.cudagraph.cuda import CudaRecorder

        return CudaRecorder(device)
    from attncheck.harness.checks.cudagraph.emulation.emulated_recorder import EmulatedRecorder

    return EmulatedRecorder()


def count_uses(tensor: Tensor) -> int:
    """Return the number of references to the storage of ``tensor``, including one or more from this call itself."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
