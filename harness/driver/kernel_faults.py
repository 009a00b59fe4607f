"""Find the line of a Triton kernel that failed; a plain traceback shows only the launch and Triton's own code.

An interpreted kernel raises an exception, which the launch replaces by an InterpreterError. A kernel that does not
compile raises a CompilationError with a node of the syntax tree, whose lines count from the kernel's ``def``. Triton is
not imported here: its classes are recognised by their attributes.
"""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from attncheck.reports.run_file.causes import raised_at


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
    node, source = getattr(error, "node", None), getattr(error, "src", None)
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
