"""Output buffers for a backend, which detect unwritten rows and writes outside the buffer.

A backend gets an alias, so that resizing or rebinding the tensor object leaves the original alone.
"""

import torch
from torch import Tensor

from attncheck.harness.driver.operand_strides import empty_rows
from attncheck.reference.spec import StrideForm

CANARY = 1.5
"""Value of the output's padding rows before a call."""

_PATTERNS = {1: 0x7F, 2: 0x7FE5, 4: 0x7FE5A5A5}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

_GUARD_ROWS = 4
_GUARD = 0.75


def mark_unwritten(tensor: Tensor) -> None:
    """Fill the tensor with a NaN whose bit pattern no computation produces."""
    tensor.view(_INTEGERS[tensor.element_size()]).fill_(_PATTERNS[tensor.element_size()])


def still_unwritten(tensor: Tensor) -> Tensor:
    """Return a bool tensor of the same shape: True where an element still holds the pattern."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()]) == _PATTERNS[tensor.element_size()]


class GuardedBuffer:
    """A buffer between guard rows: real rows are marked as unwritten, padding rows hold a finite canary.

    ``form``: its memory layout. The gaps between its rows are guarded, too.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        real: int,
        dtype: torch.dtype,
        device: torch.device,
        form: StrideForm = "contiguous",
    ) -> None:
        guarded = (shape[0] + 2 * _GUARD_ROWS, *shape[1:])
        rows, self._memory = empty_rows(guarded, form, dtype, device)
        self.rows = rows[_GUARD_ROWS : _GUARD_ROWS + shape[0]]
        self.refill(real)

    def refill(self, real: int) -> None:
        """Reset the buffer in the same memory, for a step of ``real`` rows."""
        self._memory.fill_(_GUARD)
        self.rows[real:] = CANARY
        self._real = self.rows[:real]
        mark_unwritten(self._real)

    def handed_out(self) -> Tensor:
        """Return an alias of ``rows``: another tensor object over the same memory."""
        return self.rows.detach()

    def breached(self) -> bool:
        """Return whether memory outside the rows changed."""
        beside = self._memory.clone()
        beside.as_strided(self.rows.shape, self.rows.stride(), self.rows.storage_offset()).fill_(_GUARD)
        return not bool((beside.float() == _GUARD).all())

    def touched(self) -> bool:
        """Return whether any real row was written."""
        return not bool(still_unwritten(self._real).all())

    def unwritten_rows(self) -> Tensor:
        """Return bool ``[rows]``: True if some element still holds the pattern written before the call."""
        return still_unwritten(self.rows).flatten(1).any(dim=1)


def read_result(returned: object, buffer: GuardedBuffer, *, must_be_buffer: bool) -> tuple[Tensor, tuple[str, ...]]:
    """Return the rows to judge, and how ``returned`` breaks the contract; if it does, the rows are those of ``buffer``.

    ``must_be_buffer``: the backend has ``accept_output_buffer``, so that it must return the buffer itself.
    """
    rows = buffer.rows
    if not isinstance(returned, Tensor):
        kind = "None" if returned is None else f"a {type(returned).__name__}"
        return rows, (f"forward returned {kind}; the contract requires the output",)
    facts: tuple[tuple[str, object, object], ...] = (
        ("device", returned.device, rows.device),
        ("layout", returned.layout, rows.layout),
        ("dtype", returned.dtype, rows.dtype),
    )
    for name, got, wanted in facts:
        if got != wanted:
            return rows, (f"forward returned a tensor of {name} {got}; the output needs {wanted}",)
    if returned.numel() != rows.numel():
        shapes = f"{list(returned.shape)}; expected {list(rows.shape)}"
        return rows, (f"the output of forward has the shape {shapes}",)
    if returned.data_ptr() == rows.data_ptr():
        return rows, ()
    if must_be_buffer:
        return rows, ("forward returned another tensor than the output it was given (accept_output_buffer)",)
    return returned.detach().reshape(rows.shape), ()
