"""What `cache_write` examines in a cache that scales each row by itself.

Correct writers differ in the last bits of a scale, and round a number between two codes to either if it is near the
middle. So the rows of a written slot are compared as numbers: each within half a step of its row
(:meth:`~attncheck.harness.problem.coded_rows.CodedRows.allowed_error`). All other bytes must be unchanged.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attncheck.harness.checks.findings import Broken
from attncheck.harness.driver.pool import KVPool
from attncheck.harness.problem.coded_rows import CodedRows
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage, value_storage

Rows = tuple[Tensor, Tensor]
"""Keys and values."""

_Part = tuple[Tensor, Tensor, CodedRows]
"""Rows given to the writer, the same rows read from the cache in float64, and their form; of keys or of values."""

_NEAR = 2.0**-6
"""Relative difference within which a stored number is the one that a fault explains."""

_EXPLAINED = 0.98
"""Share of the wrong elements that a fault must explain to be reported."""


def has_coded_rows(problem: Problem) -> bool:
    """Return whether the cache scales each row by itself."""
    return key_storage(problem.layer, problem.cache).coded_rows is not None


def wrong_coded_rows(problem: Problem, pool: KVPool, image: Tensor, rows: Rows) -> Broken | None:
    """Return what is wrong with the new rows of a step, or None. ``image``: the pool after it.

    ``rows``: the keys and values that the step was given. Other slots are not examined.
    """
    forms = key_storage(problem.layer, problem.cache).coded_rows, value_storage(problem.layer, problem.cache).coded_rows
    new = problem.new_keys[problem.new_keys >= 0]
    if problem.writes_nothing or not len(new):
        return None
    slots = problem.key_slots[new]
    given = [part.index_select(0, new.to(part.device)).to(image.device) for part in rows]
    found = pool.read_exactly(image, slots)
    parts = [(wanted, got, form) for wanted, got, form in zip(given, found, forms, strict=True) if form is not None]
    shares = [_share(*part) for part in parts]
    wrong = torch.stack([(share > 1).flatten(1).any(dim=1) for share in shares]).any(dim=0).nonzero().flatten().tolist()
    if not wrong:
        return None
    count = "1 slot is wrong" if len(wrong) == 1 else f"{len(wrong)} slots are wrong, the first"
    summary = f"{count}: {problem.slot_name(int(slots[wrong[0]]))} {_difference(parts, shares, wrong[0])}"
    worst = max(float(share.max()) for share in shares)
    return Broken(summary, {"slots_wrong": len(wrong), "worst_half_steps": worst}, _cause(parts, shares))


def _share(wanted: Tensor, got: Tensor, form: CodedRows) -> Tensor:
    """Return the errors in units of the allowed ones; NaN counts as infinite."""
    error = (got.double() - wanted.double()).abs()
    return (error / form.allowed_error(wanted)).nan_to_num(nan=torch.inf)


def _difference(parts: Sequence[_Part], shares: Sequence[Tensor], row: int) -> str:
    name, (wanted, got, _), share = max(
        zip(("K", "V"), parts, shares, strict=True), key=lambda each: float(each[2][row].max())
    )
    head, element = divmod(int(share[row].argmax()), share.shape[-1])
    return (
        f"holds {float(got[row, head, element]):.6g} instead of {float(wanted[row, head, element]):.6g} in {name}, "
        f"KV head {head}, element {element} ({float(share[row, head, element]):.3g} times half a step)"
    )


def _cause(parts: Sequence[_Part], shares: Sequence[Tensor]) -> str | None:
    """Return the fault of a writer that explains nearly all wrong elements, or None."""
    is_wrong = [share > 1 for share in shares]
    total = sum(int(wrong.sum()) for wrong in is_wrong)
    if any(bool(torch.isnan(got[wrong]).any()) for (_, got, _), wrong in zip(parts, is_wrong, strict=True)):
        return "a scale or code is NaN: the scale of a row of zeros must be above 0"
    for meaning, stored in _faults(parts):
        near = [(got - made).abs() <= _NEAR * made.abs() for (_, got, _), made in zip(parts, stored, strict=True)]
        explained = sum(int((a & b).sum()) for a, b in zip(near, is_wrong, strict=True))
        if explained >= _EXPLAINED * total:
            return meaning
    is_cut = [
        (got.abs() <= wanted.double().abs()) & (share <= 2)
        for (wanted, got, _), share in zip(parts, shares, strict=True)
    ]
    explained = sum(int((a & b).sum()) for a, b in zip(is_cut, is_wrong, strict=True))
    return "codes are truncated, not rounded to the nearest" if explained >= _EXPLAINED * total else None


def _faults(parts: Sequence[_Part]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield (fault of a writer, keys and values as they are then read), for right codes with a wrong scale or place."""
    rows = [wanted.double() for wanted, _, _ in parts]
    groups = [form.grouped(row) for row, (_, _, form) in zip(rows, parts, strict=True)]
    scales = [group.abs().amax(dim=-1, keepdim=True) for group in groups]

    def scaled(others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        factors = [other / scale.masked_fill(scale == 0, 1.0) for other, scale in zip(others, scales, strict=True)]
        return tuple((group * factor).flatten(-2) for group, factor in zip(groups, factors, strict=True))

    for where, shift in (("before", 1), ("after", -1)):
        yield f"a row has the scale of the row {where}", scaled([scale.roll(shift, 0) for scale in scales])
        yield f"a head has the scale of the head {where}", scaled([scale.roll(shift, 1) for scale in scales])
        if scales[0].shape[2] > 1:
            meaning = f"a group of numbers has the scale of the group {where}"
            yield meaning, scaled([scale.roll(shift, 2) for scale in scales])
    yield "the scale of KV head 0 is used for all heads", scaled([scale[:, :1] for scale in scales])
    if scales[0].shape == scales[1].shape:
        yield "keys have the scales of values", scaled([scales[1], scales[1]])
        yield "values have the scales of keys", scaled([scales[0], scales[0]])
        yield "the scales of keys and values are exchanged", scaled([scales[1], scales[0]])
    if parts[0][2].row_format.bits == 4:
        exchanged = [row.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) for row in rows]
        yield "the two codes of a byte are exchanged", tuple(exchanged)
