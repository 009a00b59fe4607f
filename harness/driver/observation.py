"""What was seen when a backend was driven once: tensors, traces of misbehaviour, or the exception it raised.

Importing this module loads no torch.
"""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.harness.driver.kernel_faults import kernel_fault
from attncheck.reports.run_file.causes import raised_at

if TYPE_CHECKING:
    from torch import Tensor

DOCUMENTED_ERRORS = (ValueError, NotImplementedError, TypeError)
"""What the contract lets a backend refuse with. RuntimeError is for calls in the wrong order, which the harness never
makes; libraries raise it for anything."""


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
    own; both are cut where they are long, and free of what no file could hold.
    """

    stage: str
    error: BaseException
    message: str
    trace: str
    touched: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """Where what was raised, in a line."""
        return f"{self.stage} raised {type(self.error).__name__}: {self.message}"

    @property
    def is_refusal(self) -> bool:
        """A documented error raised before anything was changed."""
        return isinstance(self.error, DOCUMENTED_ERRORS) and not self.touched


def capture_exception(stage: str, error: BaseException) -> Raised:
    """What ``stage`` raised, told now: the traceback, whose frames hold a whole cache, is let go."""
    lines, said = _formatted(error), _said(error)
    fault = kernel_fault(error)
    if fault is not None:
        said = f"{fault.message} (launched by {raised_at(''.join(lines))})"
        lines.insert(len(lines) - len(traceback.format_exception_only(error)), f"  {fault.place}\n")
    text = "".join(map(printable, lines))
    message = " ".join(printable(said).split()) or "(no message)"
    for part in (error, error.__cause__, error.__context__):
        if part is not None:
            part.__traceback__ = None
    return Raised(stage, error, _cut(message, _LONGEST_MESSAGE), text[-_LONGEST_TRACE:])


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
