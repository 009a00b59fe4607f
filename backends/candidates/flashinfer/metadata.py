"""What a builder of candidate ``flashinfer`` makes: which rows run through which wrapper, by which plan.

A wrapper holds one plan at a time, and runs by its latest one. So metadata keep the plan they were made with: run by
another, they would attend to the lengths of another step without an error.
"""

from dataclasses import dataclass
from typing import Any

import torch

from attncheck.backends.candidates.flashinfer.settings import LayerSettings
from attncheck.backends.paged_metadata import PagedMetadata


class Plan:
    """One call of a wrapper's ``plan``, told from others by its identity."""


class PlannedWrapper:
    """A wrapper of the library, and its latest plan."""

    def __init__(self, wrapper: Any, device: torch.device, *, is_for_graphs: bool) -> None:
        """``is_for_graphs``: it refills the buffers of its plans, so that a graph sees the latest one."""
        self.wrapper, self.is_for_graphs, self._device = wrapper, is_for_graphs, device
        self.latest: Plan | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def kernels(self) -> str:
        """The family of kernels that the library's latest plan chose, such as ``fa2``, and the wrapper that runs it."""
        return f"{self.wrapper._backend} {type(self.wrapper).__name__}"

    def plan(self, **arguments: Any) -> Plan:
        """Plans for another step, and forgets the plan before it.

        The library composes a plan in pinned memory, which the device copies later; composing the next one there waits
        until that has happened.
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
        """Whether the wrapper was planned for nothing else since."""
        return self.planned.latest is self.plan


@dataclass
class FlashInferMetadata(PagedMetadata):
    """A step, its rows in at most two parts: single-token requests in front, then all others."""

    decode: PlannedRows | None = None
    prefill: PlannedRows | None = None

    @property
    def parts(self) -> tuple[PlannedRows, ...]:
        """Those there are."""
        return tuple(part for part in (self.decode, self.prefill) if part is not None)
