"""Find where ``forward`` waits for the device, without a capture, and describe what was raised.

Cannot see: waits in C++ code that does not use torch, which fail in a capture. An index by a host tensor is reported as
a host read although it is copied to the device.
"""

import linecache
import sys
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from traceback import extract_tb, walk_tb
from types import FrameType

import torch
from torch import Tensor

from attncheck.harness.checks.cudagraph.call_sites import SourceLine, call_site_of
from attncheck.harness.checks.cudagraph.recorder import Violation, ViolationKind

SYNCHRONISED = "called a synchronizing CUDA operation"
"""Text of torch's error if its sync-debug mode forbids waiting for the device."""

_WAITS = frozenset({"synchronize", "_cuda_synchronize"})
"""C functions that wait for an event, a stream or the device but that the sync-debug mode allows."""

_FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
_MOVES = frozenset({"to", "cuda"})


def rehearse(forward: Callable[[], object]) -> Violation | None:
    """Call ``forward`` with torch reporting a capture; return what a capture would not allow, or None."""
    with _capturing_pretended():
        return first_wait(forward)


def first_wait(call: Callable[[], object]) -> Violation | None:
    """Call ``call`` until it waits for the device; return what it did there, or what it raised, or None."""
    host_copies: set[SourceLine] = set()
    try:
        with syncs_raise(), _calls_watched(host_copies):
            call()
    except Exception as error:  # noqa: BLE001 (whatever a backend raises)
        return violation_of(error, host_copies)
    return None


@contextmanager
def syncs_raise() -> Iterator[None]:
    """Make torch raise if an operator waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that the mode does not see every wait
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _capturing_pretended() -> Iterator[None]:
    """Make torch report that the stream is capturing, because many backends read on the host only if it is not."""
    own = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = own


@contextmanager
def _calls_watched(host_copies: set[SourceLine]) -> Iterator[None]:
    """Raise if a function waits that the sync-debug mode allows; add lines whose copy to the device raised.

    Python's profile function sees every C function that is called, under any imported name. If another profiler is
    active, it is left in place, and such waits fail in the capture instead.
    """

    def watch(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and getattr(called, "__name__", "") in _WAITS:
            raise RuntimeError(SYNCHRONISED)
        if event == "c_exception" and _copies_from_host(called):
            host_copies.add(SourceLine(frame.f_code, frame.f_lineno))

    if sys.getprofile() is not None:
        yield
        return
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def _copies_from_host(called: object) -> bool:
    """Return whether a C function that had to wait copies host memory to the device."""
    name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
    if name in _FROM_PYTHON:
        return True
    return isinstance(owner, Tensor) and (name == "copy_" if owner.is_cuda else name in _MOVES)


def violation_of(error: BaseException, host_copies: Container[SourceLine] = ()) -> Violation:
    """Return what ``error`` shows about ``forward``, with the backend's line that raised it.

    ``host_copies``: lines at which a copy to the device had to wait.
    """
    waited = next((each for each in _chain(error) if SYNCHRONISED in str(each)), None)
    if waited is not None:
        place = call_site_of(waited)
        lines = (SourceLine(frame.f_code, number) for frame, number in walk_tb(waited.__traceback__))
        kind: ViolationKind = "host copy" if any(line in host_copies for line in lines) else "host read"
        return Violation(kind, _expression(waited, place.line) or SYNCHRONISED, str(place))
    first, *_ = str(error).strip().splitlines() or [""]
    return Violation("error", f"{type(error).__name__}: {first}", str(call_site_of(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _expression(error: BaseException, line: SourceLine | None) -> str:
    """Return the source of the call on ``line`` that raised ``error``, or the whole line if the call spans several."""
    for (frame, number), summary in zip(walk_tb(error.__traceback__), extract_tb(error.__traceback__), strict=False):
        if line == SourceLine(frame.f_code, number):
            source = linecache.getline(summary.filename, number)
            if summary.colno is None or summary.end_lineno != number:
                return source.strip()
            return source.encode()[summary.colno : summary.end_colno].decode()
    return ""
