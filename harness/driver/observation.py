"""What a backend did in one step: its results, or the exception that it raised."""

import dis
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attncheck.reference.spec import MODIFIERS
from attncheck.reports.run_file.causes import raised_at

if TYPE_CHECKING:
    from torch import Tensor

# Find the line of a Triton kernel that failed; a plain traceback shows only the launch and Triton's own code.
#
# An interpreted kernel raises an exception, which the launch replaces by an InterpreterError. A kernel that does not
# compile raises a CompilationError with a node of the syntax tree, whose lines count from the kernel's `def`. Triton is
# not imported here: its classes are recognised by their attributes.


@dataclass(frozen=True)
class KernelFault:
    """A kernel's error in one line, and its place: ``File "...", line 12, in kernel``."""

    message: str
    place: str


def kernel_fault(error: BaseException) -> KernelFault | None:
    """Return the fault of the Triton kernel that raised ``error``, or None for any other exception."""
    if not type(error).__module__.startswith("triton."):
        return None
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if type(error).__name__ == "InterpreterError" and len(causes) > 1:
        root = causes[-1]
        place = raised_at("".join(traceback.format_exception(type(root), root, root.__traceback__, chain=False)))
        return KernelFault(f"{type(root).__name__}: {root}", place)
    functions = list(_jit_functions(error.__traceback__))
    for cause in reversed(causes):  # a helper's error comes before that of the kernel that calls it
        place = _place(cause, functions)
        if place:
            return KernelFault(str(getattr(cause, "error_message", None) or causes[-1]), place)
    return None


def _place(error: BaseException, functions: list[Any]) -> str:
    """Return the place of a CompilationError in one of ``functions``, or "" if it is in none of them."""
    node = getattr(error, "node", None)
    source = getattr(error, "src", None)
    line = getattr(node, "lineno", None)
    function = next((each for each in functions if source and getattr(each, "src", None) == source), None)
    if function is None or line is None:
        return ""
    decorators = next((i for i, text in enumerate(function.raw_src) if text.lstrip().startswith("def ")), 0)
    code = function.fn.__code__
    number = function.starting_line_number + decorators + line - 1
    return f'File "{code.co_filename}", line {number}, in {code.co_name}'


def _jit_functions(entry: TracebackType | None) -> Iterator[Any]:
    """Yield the kernels that the frames were compiling, and those that these can call by a global name."""
    while entry is not None:
        owner = entry.tb_frame.f_locals.get("self")
        each: Any
        for each in (owner, getattr(owner, "fn", None)):
            if hasattr(each, "raw_src") and hasattr(each, "starting_line_number"):
                yield each
                yield from (other for other in each.fn.__globals__.values() if hasattr(other, "raw_src"))
        entry = entry.tb_next


# The result of driving a backend once: tensors, protocol violations, or the exception it raised.
#
# Importing this module does not import torch.

DOCUMENTED_ERRORS = (ValueError, NotImplementedError, TypeError)
"""Exception types with which the contract lets a backend refuse.

RuntimeError is not one of them: it is for calls in the wrong order, which the harness never makes, and libraries raise
it for any reason.
"""

_RAISE = dis.opmap["RAISE_VARARGS"]
"""The instruction of a ``raise`` statement; an exception from C code leaves a different one behind."""

INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of installed libraries. A backend may be installed there, too."""

_TOOLS = frozenset({"torch", "triton", "numpy"})
"""Packages whose exceptions are no findings about attention."""

DRIVES = ("attncheck.harness.", "attncheck.backends.candidates.vllm.")
"""Modules that drive a backend but are not part of it."""

_OF_OTHER_PROCESSES = re.compile(
    r" Process \d+ has [\d.]+ \w+ memory in use\.| If reserved but unallocated memory is large .*", re.DOTALL
)
"""Parts of CUDA's message on a full GPU that concern other processes, or are advice on torch."""

_BY_KEYWORD = "|".join(str(modifier.argument) for modifier in MODIFIERS.values() if modifier.by_keyword)
_SIGNATURE = re.compile(
    r"(?:unexpected keyword argument|missing \d+ required .*arguments?:) .*"
    rf"'(?:{_BY_KEYWORD}|head_size_v|output_lse|output_scale|q_lora_rank|kv_lora_rank|qk_\w+_dim|v_head_dim|kv_b_proj)'"
)
"""Python's message about a signature that lacks, or requires, a keyword that is passed for one feature only."""

_AUTHORS = "attncheck.backends.candidates."
"""Modules of attncheck that count as a backend author's code."""

_LONGEST_MESSAGE, _LONGEST_TRACE = 2_000, 20_000
"""Characters kept of a message and of a traceback; some exceptions print a whole tensor."""


@dataclass(frozen=True)
class Observation:
    """The result of one step that returned. Rows are in the problem's order, followed by padding rows."""

    output: "Tensor"
    """``[T + padding, H, Dv]``"""
    lse: "Tensor | None"
    """``[T + padding, H]``, or None if the backend does not declare it."""
    unwritten: "Tensor"
    """bool ``[T]``: rows in which some element still holds the pattern written before the call."""
    lse_unwritten: "Tensor | None"
    """The same for the LSE."""
    nth: "Tensor"
    """int64 ``[T]``, on the host: index of the row within its request, in the call that computed it."""
    position: "Tensor"
    """int64 ``[T]``, on the host: position of the row in that call.

    An engine that cuts requests counts from the cut.
    """
    pool_before: "Tensor | None" = None
    """The cache's bytes before the step (uint8, flat); None without a pool or if images were not kept."""
    pool_after: "Tensor | None" = None
    changed: tuple[str, ...] = ()
    """Inputs and metadata fields that the step changed."""
    breaches: tuple[str, ...] = ()
    """Output buffers whose guard memory was written to."""
    protocol: tuple[str, ...] = ()
    """Other rules of the contract that were broken, such as returning the output buffer."""

    def judged_on(self, device: "torch.device") -> "Observation":
        """Return this with the results on ``device``; a session of a larger problem leaves them on its own."""
        if self.output.device == device:
            return self
        return replace(
            self,
            output=self.output.to(device),
            lse=None if self.lse is None else self.lse.to(device),
            unwritten=self.unwritten.to(device),
            lse_unwritten=None if self.lse_unwritten is None else self.lse_unwritten.to(device),
        )


@dataclass(frozen=True)
class Raised:
    """An exception that a stage (construct, build, forward, ...) raised.

    ``touched``: what the stage had changed before. ``message``: the exception in one line. ``trace``: its traceback,
    starting at the first frame outside the harness. Both are cut if they are long, and contain no characters that a
    file cannot hold. ``is_deliberate``: True if it is a documented error, and a ``raise`` statement of the backend
    raised it with a message, or its signature lacks a keyword of the contract that belongs to one feature.
    """

    stage: str
    error_type: str
    message: str
    trace: str = ""
    touched: tuple[str, ...] = ()
    is_deliberate: bool = False

    @property
    def in_words(self) -> str:
        """The stage and its exception, in one line."""
        return f"{self.stage} raised {self.error_type}: {self.message}"

    @property
    def is_refusal(self) -> bool:
        """Whether this is a documented error that the backend raised on purpose, before it changed anything."""
        return self.is_deliberate and not self.touched

    @property
    def may_end_the_device(self) -> bool:
        """Whether the device reported the error. Later steps then raise too, if the device is lost."""
        return self.error_type == "AcceleratorError"


def capture_exception(stage: str, error: BaseException) -> Raised:
    """Return what ``stage`` raised, with its traceback as text."""
    lines, raw_message = _formatted(error), _message_of(error)
    fault = kernel_fault(error)
    if fault is not None:
        raw_message = f"{fault.message} (launched by {raised_at(''.join(lines))})"
        lines.insert(len(lines) - len(traceback.format_exception_only(error)), f"  {fault.place}\n")
    text = "".join(map(printable, lines))
    by_signature = isinstance(error, TypeError) and _SIGNATURE.search(raw_message) is not None
    by_statement = any(map(str.isalpha, raw_message)) and _is_raised_on_purpose(error)
    is_deliberate = isinstance(error, DOCUMENTED_ERRORS) and (by_signature or by_statement)
    message = " ".join(printable(raw_message).split()) or "(no message)"
    # Frames of the traceback would keep a whole cache alive.
    for part in (error, error.__cause__, error.__context__):
        if part is not None:
            part.__traceback__ = None
    message = _cut(message, _LONGEST_MESSAGE)
    return Raised(stage, type(error).__name__, message, text[-_LONGEST_TRACE:], is_deliberate=is_deliberate)


def _is_raised_on_purpose(error: BaseException) -> bool:
    """Return whether a ``raise`` statement of the backend raised ``error``, and not one of a library it calls.

    The backend is all code that is not installed, attncheck's own code, and the package that the harness enters first.
    """
    frames = list(_frames(error.__traceback__))
    if not frames:
        return False
    modules = [str(entry.tb_frame.f_globals.get("__name__", "")) for entry in frames]
    own = next((m.partition(".")[0] for m in modules if not m.startswith("attncheck.") or m.startswith(_AUTHORS)), "")
    code = frames[-1].tb_frame.f_code
    root = modules[-1].partition(".")[0]
    return (
        code.co_code[frames[-1].tb_lasti] == _RAISE
        and root not in _TOOLS
        and (not is_installed(code.co_filename) or root in {own, "attncheck"})
    )


def passes_foreign_code(error: BaseException) -> bool:
    """Return whether ``error`` passed through code that is neither installed nor attncheck's, such as a backend's."""
    entry = error.__traceback__
    while entry is not None:
        module = str(entry.tb_frame.f_globals.get("__name__", ""))
        is_ours = module.startswith("attncheck.") and not module.startswith(_AUTHORS)
        if not is_ours and not is_installed(entry.tb_frame.f_code.co_filename):
            return True
        entry = entry.tb_next
    return False


def is_installed(filename: str) -> bool:
    """Return whether the file of a code object belongs to an installed library."""
    return filename.startswith(("<frozen ", *(folder + os.sep for folder in INSTALLED)))


def _frames(entry: TracebackType | None) -> Iterator[TracebackType]:
    """Yield a traceback's entries from the first frame that does not drive the backend, or all if every frame does."""
    first = entry
    while entry is not None and str(entry.tb_frame.f_globals.get("__name__", "")).startswith(DRIVES):
        entry = entry.tb_next
    entry = entry or first
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _message_of(error: BaseException) -> str:
    try:
        return _OF_OTHER_PROCESSES.sub("", str(error)) if type(error).__name__ == "OutOfMemoryError" else str(error)
    except (Exception, SystemExit, GeneratorExit) as another:  # noqa: BLE001 (foreign code, too)
        return f"(its message cannot be had: str() raised {type(another).__name__})"


def _formatted(error: BaseException) -> list[str]:
    entry = error.__traceback__
    ours = Path(__file__).parents[1]  # all of the harness
    while entry is not None and Path(entry.tb_frame.f_code.co_filename).is_relative_to(ours):
        entry = entry.tb_next
    return traceback.format_exception(type(error), error, entry or error.__traceback__)


def printable(text: str) -> str:
    """Return ``text`` with lone surrogates, which no encoding has, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
