"""The metadata of candidate ``flashinfer``: which rows run through which wrapper, by which plan.

A wrapper holds one plan at a time, and runs by the latest. Metadata therefore keep their own plan, since running them
by another one would use the lengths of another step without an error.
"""

from dataclasses import dataclass
from typing import Any

import torch

from attncheck.backends.candidates.flashinfer.settings import LayerSettings
from attncheck.backends.paged_metadata import PagedMetadata


class Plan:
    """One call of a wrapper's ``plan``, identified by object identity."""


class PlannedWrapper:
    """A wrapper of the library, and its latest plan."""

    def __init__(self, wrapper: Any, device: torch.device, *, is_for_graphs: bool) -> None:
        """Store the wrapper; with ``is_for_graphs``, plans refill its buffers, and a graph uses the latest one."""
        self.wrapper, self.is_for_graphs, self._device = wrapper, is_for_graphs, device
        self.latest: Plan | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def kernels(self) -> str:
        """The kernel family of the latest plan, such as ``fa2``, and the class of the wrapper."""
        return f"{self.wrapper._backend} {type(self.wrapper).__name__}"

    def plan(self, **arguments: Any) -> Plan:
        """Plan for another step, which invalidates the previous plan.

        The library composes a plan in pinned memory, which the device copies later. The next plan waits until that copy
        is done.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self.latest = None
        self.wrapper.plan(**arguments)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        self.latest = Plan()
        return self.latest


@dataclass(frozen=True)
class PlannedRows:
    """Rows of a step that one call of a wrapper attends to, by ``plan``, for layers with these ``settings``.

    kv_layout: the memory order of a page, ``NHD`` or ``HND``.
    """

    rows: slice
    planned: PlannedWrapper
    plan: Plan
    settings: LayerSettings
    kv_layout: str

    @property
    def is_current(self) -> bool:
        """Whether this is still the wrapper's latest plan."""
        return self.planned.latest is self.plan


@dataclass
class FlashInferMetadata(PagedMetadata):
    """Metadata of one step, its rows in at most two parts: leading single-token requests, then all others."""

    decode: PlannedRows | None = None
    prefill: PlannedRows | None = None

    @property
    def parts(self) -> tuple[PlannedRows, ...]:
        """The parts that exist."""
        return tuple(part for part in (self.decode, self.prefill) if part is not None)
