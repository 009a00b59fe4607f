"""What a graph recorder is: it captures one ``forward``, and replays it in the same memory, without its Python code.

Two implementations share this: :mod:`attncheck.harness.checks.cudagraph.cuda` captures a real ``torch.cuda.CUDAGraph``;
:mod:`attncheck.harness.checks.cudagraph.emulation.emulated_recorder` records the operators on a machine without a GPU.
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
"""What is captured: one call of ``forward``, all of its arguments bound."""

ViolationKind = Literal["host read", "data-dependent shape", "host copy", "error"]


@dataclass(frozen=True)
class Violation:
    """Something a captured graph cannot hold.

    ``call``: what was called, such as ``.item()``. ``where``: the backend's line that did it, ``file:line in
    function``, empty where it is unknown.
    """

    kind: ViolationKind
    call: str
    where: str = ""

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.kind}: {self.call}{place}"


class CaptureError(InternalError):
    """``forward`` cannot be captured; ``violations`` says why, in the order they came, each once."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        self.violations = violations
        super().__init__("; ".join(map(str, violations)))


class UnseenError(InternalError):
    """The recorder cannot see what ``forward`` does, so that nothing can be said about it here; the reason in words."""


@dataclass(frozen=True)
class Released:
    """Memory that a graph uses and nobody but graphs holds any more: ``start <= address < end``.

    ``first_used``: by which operator, at which line of the backend.
    """

    start: int
    end: int
    first_used: str

    def __str__(self) -> str:
        return f"memory first used by {self.first_used}"


class Recording(Protocol):
    """One captured ``forward``."""

    def replay(self) -> None:
        """Everything that was recorded, once more, in the same memory. Whatever an operator raises comes through."""

    def launch(self) -> None:
        """The same, to be timed: nothing is waited for, and no memory is looked after."""

    def reads(self, tensor: Tensor) -> bool | None:
        """Whether the memory of ``tensor`` is among what the graph was given; None: this recorder cannot tell."""

    def host_reads(self) -> tuple[str, ...]:
        """What ``forward`` read from host memory while it was captured: legal, and frozen. Empty where unknown."""

    def hands_out_memory(self) -> bool:
        """Whether ``forward`` gave addresses to code that the recorder may not see."""

    def released(self) -> tuple[Released, ...]:
        """Memory the graph uses that nobody but graphs holds any more.

        A real graph would read what the allocator has meanwhile put there. Empty where the recorder cannot tell.
        """


class Recorder(Protocol):
    """Makes recordings for one device."""

    name: RecorderName

    def watching(self) -> AbstractContextManager[None]:
        """Around every entry into a backend but those of :meth:`record`: keeps account of what lies on the host."""

    def mark_host(self, *tensors: Tensor) -> None:
        """These tensors lie on the host, where the contract says so (the ``_cpu`` twins); reading them is no fault."""

    def record(self, prepare: Callable[[], Forward]) -> Recording:
        """Warm up, then capture. ``prepare`` builds fresh metadata and gives the call to make with them.

        It is called anew for every warm-up run and for the capture, as a model runner does: what a warm-up computed
        lazily and left on its metadata is not there any more. Raises :class:`CaptureError`, :class:`UnseenError`, and
        whatever ``prepare`` or a warm-up raises.
        """


class UnwatchedRecorder:
    """Records nothing: it runs what a recorder would run, twice, as the backend runs without any recorder."""

    name: RecorderName = "emulated"

    def watching(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def mark_host(self, *tensors: Tensor) -> None:
        """Nothing."""

    def record(self, prepare: Callable[[], Forward]) -> Recording:
        """Raises whatever ``prepare`` or one of the runs raises, and UnseenError where none does."""
        for _ in range(2):
            prepare()()
        raise UnseenError("nothing is recorded")


def recorder_for(device: torch.device) -> Recorder:
    """Real graphs on a GPU, the emulation elsewhere."""
    if device.type == "cuda":
        from attncheck.harness.checks.cudagraph.cuda import CudaRecorder

        return CudaRecorder(device)
    from attncheck.harness.checks.cudagraph.emulation.emulated_recorder import EmulatedRecorder

    return EmulatedRecorder()


def count_uses(tensor: Tensor) -> int:
    """Return how many tensors share the memory of ``tensor``, and one or more for the call itself."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
