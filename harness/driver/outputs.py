"""The output buffers that a backend fills, and the results read from them."""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.harness.driver.foreign_code import as_plain, has_its_memory, kind_of
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.step import ForwardCall, Step, empty_rows
from attncheck.reference import merge_many
from attncheck.reference.step_spec import StrideForm

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

    ``form``: its memory layout. The gaps between its rows are guarded, too. ``memory``: all of it, flat.
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
        rows, self.memory = empty_rows(guarded, form, dtype, device)
        self.rows = rows[_GUARD_ROWS : _GUARD_ROWS + shape[0]]
        self.refill(real)

    def refill(self, real: int) -> None:
        """Reset the buffer in the same memory, for a step of ``real`` rows."""
        self.memory.fill_(_GUARD)
        self.rows[real:] = CANARY
        self._real = self.rows[:real]
        mark_unwritten(self._real)

    def find_unwritten(self) -> None:
        """Set ``unwritten``, bool ``[rows]``: True if some element still holds the pattern written before the call."""
        self.unwritten = still_unwritten(self.rows).flatten(1).any(dim=1)

    def on(self, device: torch.device) -> "GuardedBuffer":
        """Return the buffer as it is now, on ``device``: itself on its own, else with one copy of what it holds."""
        if device.type == self.memory.device.type:
            return self
        other = copy(self)
        held = torch.cat([self.memory.view(torch.uint8), self.unwritten.view(torch.uint8)]).to(device)
        other.memory = held[: self.memory.nbytes].view(self.memory.dtype)
        other.unwritten = held[self.memory.nbytes :].view(torch.bool)
        other.rows = other.memory.as_strided(self.rows.shape, self.rows.stride(), self.rows.storage_offset())
        return other

    def handed_out(self) -> Tensor:
        """Return an alias of ``rows``, so that reshaping or rebinding the tensor object leaves the original alone."""
        return self.rows.detach()

    def breached(self) -> bool:
        """Return whether memory outside the rows changed."""
        beside = self.memory.clone()
        beside.as_strided(self.rows.shape, self.rows.stride(), self.rows.storage_offset()).fill_(_GUARD)
        if beside.itemsize == 1:
            beside = beside.float()  # torch compares no float8
        return not bool((beside == _GUARD).all())

    def touched(self) -> bool:
        """Return whether any real row was written, or lost its memory."""
        return not has_its_memory(self.memory) or not bool(still_unwritten(self._real).all())


def read_result(returned: object, buffer: GuardedBuffer, *, must_be_buffer: bool) -> tuple[Tensor, tuple[str, ...]]:
    """Return the rows to judge, and how ``returned`` breaks the contract; if it does, the rows are those of ``buffer``.

    ``must_be_buffer``: the backend has ``accept_output_buffer``, so that it must return the buffer itself.
    """
    rows = buffer.rows
    result = as_plain(returned)
    if result is None:
        right = "a torch.Tensor" if issubclass(type(returned), Tensor) else "the output"
        return rows, (f"forward returned {kind_of(returned)}; the contract requires {right}",)
    facts: tuple[tuple[str, object, object], ...] = (
        ("device", result.device, rows.device),
        ("layout", result.layout, rows.layout),
        ("dtype", result.dtype, rows.dtype),
    )
    for name, got, wanted in facts:
        if got != wanted:
            return rows, (f"forward returned a tensor of {name} {got}; the output needs {wanted}",)
    if result.numel() != rows.numel():
        shapes = f"{list(result.shape)}; expected {list(rows.shape)}"
        return rows, (f"the output of forward has the shape {shapes}",)
    if not has_its_memory(result):
        return rows, ("forward returned a tensor whose storage it had resized",)
    is_buffer = result.data_ptr() == rows.data_ptr()
    form = f"shape {list(result.shape)} and the strides {list(result.stride())}"
    result = result.reshape(rows.shape)  # copies if the elements have another order in memory
    if is_buffer and (result.data_ptr() != rows.data_ptr() or _steps(result) != _steps(rows)):
        return rows, (f"forward returned the output in the {form}, so that its rows lie elsewhere",)
    if is_buffer:
        return rows, ()
    if must_be_buffer:
        return rows, ("forward returned another tensor than the output it was given (accept_output_buffer)",)
    return result, ()


def _steps(rows: Tensor) -> list[int]:
    """Return the strides of the dimensions that have more than one element."""
    return [step for size, step in zip(rows.shape, rows.stride(), strict=True) if size > 1]


@dataclass(frozen=True)
class CallResult:
    """The result of one call, in the row order of the call; padding rows come last.

    output: ``[rows, H, Dv]``. lse: ``[rows, H]`` or None. unwritten, lse_unwritten: bool ``[rows]``, rows in which some
    element was not written.
    """

    call: ForwardCall
    output: Tensor
    lse: Tensor | None
    unwritten: Tensor
    lse_unwritten: Tensor | None
    breaches: tuple[str, ...] = ()
    protocol: tuple[str, ...] = ()

    def real(self, rows: Tensor) -> Tensor:
        """Return the rows of one of these tensors that belong to requests."""
        return rows[: self.call.num_rows]

    def padding(self, rows: Tensor) -> Tensor:
        """Return the rows of one of these tensors that belong to no request."""
        return rows[self.call.num_rows :]


def placed(results: Sequence[CallResult]) -> Observation:
    """Return the results of calls for different rows, each row at its place in the step; padding rows come last."""
    calls = [result.call for result in results]
    rows = torch.cat([call.rows for call in calls])
    place = None if torch.equal(rows, torch.arange(len(rows))) else rows
    lses = [result.lse for result in results if result.lse is not None]
    lse = None
    if lses:
        pairs = list(zip(results, lses, strict=True))
        lse = torch.cat([_at(place, [r.real(own) for r, own in pairs]), *(r.padding(own) for r, own in pairs)])
    output = [_at(place, [r.real(r.output) for r in results]), *(r.padding(r.output) for r in results)]
    return Observation(
        output=torch.cat(output),
        lse=lse,
        unwritten=_at(place, [r.real(r.unwritten) for r in results]),
        lse_unwritten=_at(place, flags) if (flags := _lse_flags(results)) else None,
        nth=_at(place, [call.nth for call in calls]),
        position=_at(place, [call.position for call in calls]),
        breaches=_distinct(result.breaches for result in results),
        protocol=_distinct(result.protocol for result in results),
    )


def merged(results: Sequence[CallResult], conventions: Conventions) -> Observation:
    """Return the results of calls for the same rows over different keys, merged in float64 by their LSE.

    The merged LSE has the base of ``conventions``. NaN or Inf in the output of any part makes the row NaN, even if the
    part has no visible keys. Raises ValueError if a result has no LSE.
    """
    unit = math.log(2) if conventions.lse_base == "2" else 1.0
    outs, lses, pads = [], [], []
    for result in results:
        if result.lse is None:
            raise ValueError("without an LSE the results of parts cannot be merged")
        outs.append(result.real(result.output).double())
        lses.append(result.real(result.lse).double() * unit)
        pads.append((result.padding(result.output).double(), result.padding(result.lse).double()))
    output, lse = merge_many(outs, lses)
    # merge_many ignores the output where the LSE is -inf. Other engines multiply it by 0, so NaN or Inf must show here.
    output = output + torch.stack([torch.where(torch.isfinite(out), 0.0, torch.nan) for out in outs]).sum(0)
    unwritten = torch.stack([r.real(r.unwritten) for r in results]).any(0)
    lse_unwritten = torch.stack(_lse_flags(results)).any(0)
    return Observation(
        output=torch.cat([output, *(out for out, _ in pads)]),
        lse=torch.cat([lse / unit, *(own for _, own in pads)]),
        unwritten=unwritten,
        lse_unwritten=lse_unwritten,
        nth=results[0].call.nth,
        position=results[0].call.position,
        breaches=_distinct(result.breaches for result in results),
        protocol=_distinct(result.protocol for result in results),
    )


def in_problem_order(seen: Observation, step: Step) -> Observation:
    """Return the observation of ``step`` with the real rows in the problem's order, and padding rows last."""
    if step.is_in_problem_order:
        return seen
    place = step.row_order

    def ordered(rows: Tensor) -> Tensor:
        made = rows.clone()
        made[place.to(rows.device)] = rows[: len(place)]
        return made

    return replace(
        seen,
        output=ordered(seen.output),
        lse=None if seen.lse is None else ordered(seen.lse),
        unwritten=ordered(seen.unwritten),
        lse_unwritten=None if seen.lse_unwritten is None else ordered(seen.lse_unwritten),
        nth=ordered(seen.nth),
        position=ordered(seen.position),
    )


def _at(place: Tensor | None, pieces: Sequence[Tensor]) -> Tensor:
    """Return the rows of all pieces, row ``i`` moved to ``place[i]``, or in their own order if ``place`` is None.

    A single piece is then returned without a copy.
    """
    rows = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    if place is None:
        return rows
    placed = torch.empty_like(rows)
    placed[place.to(rows.device)] = rows
    return placed


def _lse_flags(results: Sequence[CallResult]) -> list[Tensor]:
    return [r.real(r.lse_unwritten) for r in results if r.lse_unwritten is not None]


def _distinct(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(lists)))
