"""Combine the results of a step's calls: place them row by row, or merge them by their LSE."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.step import Step
from attncheck.reference import merge_many


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


@dataclass(frozen=True)
class StepAnswer:
    """The result of a step: real rows in the order of the step, then the padding rows of every call."""

    output: Tensor
    lse: Tensor | None
    unwritten: Tensor
    """bool, for the real rows only; likewise ``lse_unwritten``."""
    lse_unwritten: Tensor | None
    nth: Tensor
    """int64, for the real rows only, as in :class:`ForwardCall`; likewise ``position``."""
    position: Tensor


def placed(results: Sequence[CallResult]) -> StepAnswer:
    """Return the results of calls for different rows, each row at its place in the step."""
    calls = [result.call for result in results]
    rows = torch.cat([call.rows for call in calls])
    place = None if torch.equal(rows, torch.arange(len(rows))) else rows
    lses = [result.lse for result in results if result.lse is not None]
    lse = None
    if lses:
        pairs = list(zip(results, lses, strict=True))
        lse = torch.cat([_at(place, [r.real(own) for r, own in pairs]), *(r.padding(own) for r, own in pairs)])
    output = [_at(place, [r.real(r.output) for r in results]), *(r.padding(r.output) for r in results)]
    return StepAnswer(
        output=torch.cat(output),
        lse=lse,
        unwritten=_at(place, [r.real(r.unwritten) for r in results]),
        lse_unwritten=_at(place, flags) if (flags := _lse_flags(results)) else None,
        nth=_at(place, [call.nth for call in calls]),
        position=_at(place, [call.position for call in calls]),
    )


def merged(results: Sequence[CallResult], conventions: Conventions) -> StepAnswer:
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
    return StepAnswer(
        output=torch.cat([output, *(out for out, _ in pads)]),
        lse=torch.cat([lse / unit, *(own for _, own in pads)]),
        unwritten=unwritten,
        lse_unwritten=lse_unwritten,
        nth=results[0].call.nth,
        position=results[0].call.position,
    )


def observed(
    whole: StepAnswer,
    step: Step,
    results: Sequence[CallResult],
    *,
    pool_before: Tensor | None,
    pool_after: Tensor | None,
    changed: Iterable[str],
) -> Observation:
    """Return the observation of a step from its combined result, with rows in the problem's order."""
    return Observation(
        output=in_problem_order(whole.output, step),
        lse=None if whole.lse is None else in_problem_order(whole.lse, step),
        unwritten=in_problem_order(whole.unwritten, step),
        lse_unwritten=None if whole.lse_unwritten is None else in_problem_order(whole.lse_unwritten, step),
        nth=in_problem_order(whole.nth, step),
        position=in_problem_order(whole.position, step),
        pool_before=pool_before,
        pool_after=pool_after,
        changed=_distinct(changed),
        breaches=_distinct(name for result in results for name in result.breaches),
        protocol=_distinct(name for result in results for name in result.protocol),
    )


def in_problem_order(rows: Tensor, step: Step) -> Tensor:
    """Return ``rows`` with the step's real rows in the problem's order, and padding rows last.

    ``rows`` itself is returned if it already has that order.
    """
    if step.is_in_problem_order:
        return rows
    ordered = rows.clone()
    ordered[step.row_order.to(rows.device)] = rows[: step.num_rows]
    return ordered


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


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
