"""Find the lines of ``build`` that wait for the device.

On a GPU torch raises at the first one. Without a GPU, the watch of emulated graphs tracks which memory a GPU would
hold. Cannot see: waits in C++ code that does not use torch.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from attncheck.backends.contract import CommonAttentionMetadata
from attncheck.harness.checks.cudagraph.emulation.modes import Args, Kwargs
from attncheck.harness.checks.cudagraph.emulation.torch_functions import TorchFunction
from attncheck.harness.checks.cudagraph.emulation.watch import Watch
from attncheck.harness.checks.cudagraph.recorder import Violation, ViolationKind
from attncheck.harness.checks.cudagraph.rehearsal import first_wait

T = TypeVar("T")


class _WatchForWaits(Watch):
    """A watch that allows copies for which the host does not wait."""

    _is_unwaited = False

    def function(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        outer, is_copy = self._is_unwaited, getattr(func, "__name__", "") == "copy_"
        self._is_unwaited = outer or kwargs.get("non_blocking") is True or (is_copy and args[2:3] == (True,))
        try:
            return super().function(func, args, kwargs)
        finally:
            self._is_unwaited = outer

    def _note(self, kind: ViolationKind, call: str) -> None:
        if not self._is_unwaited:
            super()._note(kind, call)


class WaitFinder:
    """Follows one builder from its construction on, to track which memory the builder puts on the host."""

    def __init__(self, device: torch.device) -> None:
        self._watch = None if device.type == "cuda" else _WatchForWaits()

    def construct(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``, called under watch."""
        if self._watch is None:
            return make()
        with self._watch.active():
            return make()

    def waits_of(self, build: Callable[[], object], common: CommonAttentionMetadata) -> tuple[Violation, ...] | None:
        """Call ``build`` with the metadata ``common``, and return where it waits, in order.

        On a GPU, return the first wait only. Return None if ``build`` raises under watch.
        """
        if self._watch is None:
            found = first_wait(build)
            return () if found is None else None if found.kind == "error" else (found,)
        for twin in (common.query_start_loc_cpu, common.seq_lens_cpu, common.num_computed_tokens_cpu):
            self._watch.host.mark(twin)
        with self._watch.recording(_run.__code__) as (_, report):
            try:
                _run(build)
            except Exception:  # noqa: BLE001 (the caller repeats the build without the watch, to see if it raises too)
                return None
        return tuple(report.violations)


def _run(build: Callable[[], object]) -> None:
    """Call ``build``. Its frame marks the boundary between the backend's code and ours."""
    build()
