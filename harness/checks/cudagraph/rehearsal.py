"""What waits for the device in ``forward``, found while nothing is captured, and the words for what was raised.

Cannot see: an index by a host tensor, which is called a host read though it is copied to the device; what C++ code
waits for without torch. A capture of that fails.
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
"""What torch says where its sync-debug mode forbids to wait for the device."""

_WAITS = frozenset({"synchronize", "_cuda_synchronize"})
"""C functions that wait for an event, a stream or the device, which the sync-debug mode lets pass."""

_FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
_MOVES = frozenset({"to", "cuda"})


def rehearse(forward: Callable[[], object]) -> Violation | None:
    """Call ``forward`` as under capture, but without one: return what a capture of it would not allow, or None."""
    with _capturing_pretended():
        return first_wait(forward)


def first_wait(call: Callable[[], object]) -> Violation | None:
    """Call ``call`` up to where it waits for the device: return what it did there, or what it raised; else None."""
    host_copies: set[SourceLine] = set()
    try:
        with syncs_raise(), _calls_watched(host_copies):
            call()
    except Exception as error:  # noqa: BLE001 (whatever a backend raises)
        return violation_of(error, host_copies)
    return None


@contextmanager
def syncs_raise() -> Iterator[None]:
    """Have torch raise where an operator waits for the device."""
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
    """While torch says that the stream is capturing: many a backend reads on the host only where it is not."""
    own = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = own


@contextmanager
def _calls_watched(host_copies: set[SourceLine]) -> Iterator[None]:
    """Raise where a function waits that the sync-debug mode lets pass; add lines whose copy to the device raised.

    Python's profile function sees the C functions that are called, by whatever name a backend imported them. Where
    another profiler is at work it is left alone: what waits then fails in the capture.
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
    """Whether a C function that had to wait brings host memory to the device."""
    name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
    if name in _FROM_PYTHON:
        return True
    return isinstance(owner, Tensor) and (name == "copy_" if owner.is_cuda else name in _MOVES)


def violation_of(error: BaseException, host_copies: Container[SourceLine] = ()) -> Violation:
    """What ``error`` says about ``forward``, and which line of the backend it comes from.

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
    """``error``, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _expression(error: BaseException, line: SourceLine | None) -> str:
    """The source of the call on ``line`` that raised ``error``; the whole line, where the call has more than one."""
    for (frame, number), summary in zip(walk_tb(error.__traceback__), extract_tb(error.__traceback__), strict=False):
        if line == SourceLine(frame.f_code, number):
            source = linecache.getline(summary.filename, number)
            if summary.colno is None or summary.end_lineno != number:
                return source.strip()
            return source.encode()[summary.colno : summary.end_colno].decode()
    return ""
