"""What `cache_write` examines in a cache that scales each row by itself.

Correct writers differ in the last bits of a scale, and round a number between two codes to either if it is near the
middle. So the rows of a written slot are compared as numbers: each within half a step of its row
(:meth:`~attncheck.harness.problem.coded_rows.CodedRows.allowed_error`), and within the rounding of the codec that reads
it. In a registered cache, a number may change by as much as its codec changes it. All other bytes must be unchanged.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from attncheck.harness.checks.findings import Broken
from attncheck.harness.diagnosis.coded_rows import exchanged_scales, faulty_coded_rows
from attncheck.harness.driver.pool import KVPool
from attncheck.harness.problem.coded_rows import CodedRows
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage, value_storage
from attncheck.reference.step_spec import REGISTERED

Rows = tuple[Tensor, Tensor]
"""Keys and values."""

_Part = tuple[Tensor, Tensor, CodedRows]
"""Rows given to the writer, the same rows read from the cache, and their form; of keys or of values."""

_NEAR = 2.0**-10
"""Relative difference within which a stored number is the one that a fault explains."""

_EXPLAINED = 0.98
"""Share of the elements that a fault must explain to be reported."""


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
    allowed = [form.allowed_error(wanted) for wanted, _, form in parts]
    unit, figure = "half a step", "worst_half_steps"
    if problem.cache.kv_cache_dtype == REGISTERED:
        allowed = _errors_of_codec(pool, image, slots, given)
        unit, figure = "what its codec changes", "worst_share"
    shares = [_share(wanted, got, most) for (wanted, got, _), most in zip(parts, allowed, strict=True)]
    wrong = torch.stack([(share > 1).flatten(1).any(dim=1) for share in shares]).any(dim=0).nonzero().flatten().tolist()
    if not wrong:
        return None
    count = "1 slot is wrong" if len(wrong) == 1 else f"{len(wrong)} slots are wrong, the first"
    summary = f"{count}: {problem.slot_name(int(slots[wrong[0]]))} {_difference(parts, shares, wrong[0], unit)}"
    worst = max(float(share.max()) for share in shares)
    return Broken(summary, {"slots_wrong": len(wrong), figure: worst}, _cause(parts, shares))


def _errors_of_codec(pool: KVPool, image: Tensor, slots: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    """Return by how much the codec itself changes each number, and a share of it for scales of other last bits."""
    stored = image.clone()
    pool.write_image(stored, slots, given[0], given[1])
    made = pool.read_exactly(stored, slots)
    return [
        (got.double() - wanted.double()).abs() + _NEAR * wanted.double().abs()
        for got, wanted in zip(made, given, strict=True)
    ]


def _share(wanted: Tensor, got: Tensor, allowed: Tensor) -> Tensor:
    """Return the errors in units of the allowed ones; NaN counts as infinite."""
    error = (got.double() - wanted.double()).abs()
    share = error / (allowed + _rounding_error(got))
    return torch.where(error == 0, 0.0, share).nan_to_num(nan=torch.inf)


def _rounding_error(rows: Tensor) -> Tensor:
    """Return by how much each number differs at most from one that was rounded to it in the dtype of ``rows``."""
    dtype = torch.finfo(rows.dtype)
    exponent = torch.frexp(rows.double().abs().clamp(min=dtype.smallest_normal)).exponent - 1
    return dtype.eps / 2 * 2.0 ** exponent.double()


def _difference(parts: Sequence[_Part], shares: Sequence[Tensor], row: int, unit: str) -> str:
    name, (wanted, got, _), share = max(
        zip(("K", "V"), parts, shares, strict=True), key=lambda each: float(each[2][row].max())
    )
    head, element = divmod(int(share[row].argmax()), share.shape[-1])
    return (
        f"holds {float(got[row, head, element]):.6g} instead of {float(wanted[row, head, element]):.6g} in {name}, "
        f"KV head {head}, element {element} ({float(share[row, head, element]):.3g} times {unit})"
    )


def _cause(parts: Sequence[_Part], shares: Sequence[Tensor]) -> str | None:
    """Return the fault of a writer that explains nearly all wrong elements, or None."""
    is_wrong = [share > 1 for share in shares]
    if any(bool(torch.isnan(got[wrong]).any()) for (_, got, _), wrong in zip(parts, is_wrong, strict=True)):
        return "a scale or code is NaN: the scale of a row of zeros must be above 0"
    rows = parts[0][0].double(), parts[1][0].double()
    forms = parts[0][2], parts[1][2]
    for meaning, stored in chain(faulty_coded_rows(rows, forms), exchanged_scales(rows, forms)):
        if _explained(parts, stored, is_wrong):
            return meaning
    cut = forms[0].truncated(rows[0]), forms[1].truncated(rows[1])
    everywhere = [torch.ones_like(wrong) for wrong in is_wrong]  # elements within the allowed error must be cut, too
    is_cut = _explained(parts, cut, is_wrong) and _explained(parts, cut, everywhere)
    return "codes are truncated, not rounded to the nearest" if is_cut else None


def _explained(parts: Sequence[_Part], stored: Sequence[Tensor], chosen: Sequence[Tensor]) -> bool:
    """Return whether nearly all ``chosen`` elements of the cache equal those of ``stored``."""
    near = [(got - made).abs() <= _NEAR * made.abs() for (_, got, _), made in zip(parts, stored, strict=True)]
    explained = sum(int((a & b).sum()) for a, b in zip(near, chosen, strict=True))
    return explained >= _EXPLAINED * sum(int(each.sum()) for each in chosen)
