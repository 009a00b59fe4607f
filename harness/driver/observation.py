"""What was seen when a backend was driven once: tensors, traces of misbehaviour, or the exception it raised.

Importing this module loads no torch.
"""

import dis
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from attncheck.harness.driver.kernel_faults import kernel_fault
from attncheck.reports.run_file.causes import raised_at

if TYPE_CHECKING:
    from torch import Tensor

DOCUMENTED_ERRORS = (ValueError, NotImplementedError, TypeError)
"""What the contract lets a backend refuse with. RuntimeError is for calls in the wrong order, which the harness never
makes; libraries raise it for anything."""

_RAISE = dis.opmap["RAISE_VARARGS"]
"""The instruction of a ``raise`` statement; what a function of C raises leaves another one behind."""

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of libraries."""

_TOOLS = frozenset({"torch", "triton", "numpy"})
"""Packages that raise what says nothing of attention."""

_DRIVES = ("attncheck.harness.", "attncheck.backends.candidates.vllm.")
"""Modules that drive a backend and are no part of it."""

_SIGNATURE = re.compile(
    r"(?:unexpected keyword argument|missing \d+ required .*arguments?:) .*"
    r"'(?:sinks|head_size_v|output_lse|output_scale|q_lora_rank|kv_lora_rank|qk_\w+_dim|v_head_dim|kv_b_proj)'"
)
"""What Python says of a signature without a keyword that is handed over for one feature alone, or that requires it."""

_AUTHORS = "attncheck.backends.candidates."
"""Modules of ours that are an author's code; the others of ours serve authors."""

_LONGEST_MESSAGE, _LONGEST_TRACE = 2_000, 20_000
"""Characters kept of what an exception says: some print a whole tensor."""


@dataclass(frozen=True)
class Observation:
    """One call that returned. Rows stand in the problem's order, padding rows behind them."""

    output: "Tensor"
    """``[T + padding, H, Dv]``"""
    lse: "Tensor | None"
    """``[T + padding, H]``, for backends that declare it."""
    unwritten: "Tensor"
    """bool ``[T]``: rows of which some element still holds the pattern put there before the call."""
    lse_unwritten: "Tensor | None"
    """The same of the LSE."""
    nth: "Tensor"
    """int64 ``[T]``, on the host: how many rows of its request stood before a row in the call that answered it."""
    position: "Tensor"
    """Likewise its position in that call: an engine that cuts requests counts from the cut."""
    pool_before: "Tensor | None"
    """The cache's bytes before the call (uint8, flat), None without a pool."""
    pool_after: "Tensor | None"
    changed: tuple[str, ...] = ()
    """Inputs and metadata fields that the call changed."""
    breaches: tuple[str, ...] = ()
    """Zones around the output buffers that the call wrote to."""
    protocol: tuple[str, ...] = ()
    """Promises of the contract that the call broke in passing (such as not returning the buffer it was given)."""


@dataclass(frozen=True)
class Raised:
    """A stage (construct, build, forward, ...) that raised. ``touched``: what it had changed before.

    ``message`` is the exception in one line, ``trace`` its traceback from the first frame on that is not the harness's
    own; both are cut where they are long, and free of what no file could hold. ``is_deliberate``: a ``raise`` of the
    backend raised it, in words, or its signature leaves out a keyword of the contract that goes with one feature.
    """

    stage: str
    error: BaseException
    message: str
    trace: str
    touched: tuple[str, ...] = ()
    is_deliberate: bool = False

    @property
    def in_words(self) -> str:
        """Where what was raised, in a line."""
        return f"{self.stage} raised {type(self.error).__name__}: {self.message}"

    @property
    def is_refusal(self) -> bool:
        """A documented error that the backend raised on purpose, before anything was changed."""
        return isinstance(self.error, DOCUMENTED_ERRORS) and self.is_deliberate and not self.touched


def capture_exception(stage: str, error: BaseException) -> Raised:
    """What ``stage`` raised, told now: the traceback, whose frames hold a whole cache, is let go."""
    lines, said = _formatted(error), _said(error)
    fault = kernel_fault(error)
    if fault is not None:
        said = f"{fault.message} (launched by {raised_at(''.join(lines))})"
        lines.insert(len(lines) - len(traceback.format_exception_only(error)), f"  {fault.place}\n")
    text = "".join(map(printable, lines))
    by_signature = isinstance(error, TypeError) and _SIGNATURE.search(said) is not None
    is_deliberate = by_signature or (any(map(str.isalpha, said)) and _is_raised_on_purpose(error))
    message = " ".join(printable(said).split()) or "(no message)"
    for part in (error, error.__cause__, error.__context__):
        if part is not None:
            part.__traceback__ = None
    return Raised(stage, error, _cut(message, _LONGEST_MESSAGE), text[-_LONGEST_TRACE:], is_deliberate=is_deliberate)


def _is_raised_on_purpose(error: BaseException) -> bool:
    """Return whether ``error`` comes from a ``raise`` statement of the backend, and not of a library it calls.

    The backend is all code that is not installed, ours, and the package that the harness enters first.
    """
    frames = list(_frames(error.__traceback__))
    if not frames:
        return False
    modules = [str(entry.tb_frame.f_globals.get("__name__", "")) for entry in frames]
    own = next((m.partition(".")[0] for m in modules if not m.startswith("attncheck.") or m.startswith(_AUTHORS)), "")
    code, root = frames[-1].tb_frame.f_code, modules[-1].partition(".")[0]
    is_installed = code.co_filename.startswith(("<frozen ", *_INSTALLED))
    return (
        code.co_code[frames[-1].tb_lasti] == _RAISE
        and root not in _TOOLS
        and (not is_installed or root in {own, "attncheck"})
    )


def _frames(entry: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries of a traceback from the first frame on that does not drive the backend; all, if none does."""
    first = entry
    while entry is not None and str(entry.tb_frame.f_globals.get("__name__", "")).startswith(_DRIVES):
        entry = entry.tb_next
    entry = entry or first
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 (foreign code, too)
        return f"(its message cannot be had: str() raised {type(another).__name__})"


def _formatted(error: BaseException) -> list[str]:
    """The traceback, from the first frame on that is not the harness's own."""
    entry = error.__traceback__
    ours = Path(__file__).parents[1]  # all of the harness
    while entry is not None and Path(entry.tb_frame.f_code.co_filename).is_relative_to(ours):
        entry = entry.tb_next
    return traceback.format_exception(type(error), error, entry or error.__traceback__)


def printable(text: str) -> str:
    """``text`` as a file can hold it: lone surrogates, which no encoding has, spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
