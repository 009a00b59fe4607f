"""``cache_write``: exactly the mapped slots contain exactly the new K/V, byte for byte, and inputs are unchanged.

The whole pool is compared with a copy that a proven codec wrote. A second step writes rows at the limits of their
dtype, to expose a cache that rounds or clamps. An FP8 cache gets numbers between codes and beyond their range instead;
every code that correct arithmetic can produce is accepted. The backend's page functions are checked likewise
(:mod:`attncheck.harness.checks.block_moves`). Cannot see: writes outside the cache's own memory.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attncheck.harness.checks import block_moves, fp8_write, shared_cache, write_faults
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.fp8_write import Rows
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.driver.kv_pool import KVPool, same_bytes
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.turn import Fill
from attncheck.harness.problem.float8 import alike, numbers_of
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.signatures import decode
from attncheck.harness.problem.storage import Storage, key_storage, value_storage

_NAMED = 4
"""Most wrong slots described in a finding."""

_MOST_BYTES = 2**26
"""Pool size in bytes above which faults of writers are not searched for."""

_TWICE = re.compile(r"([KV]) of (.+) and ([KV]) of \2$")
"""K and V of one place."""

_CHANGED = "; a backend may write only the output and the KV cache"

_EXPLAINED = 0.98
"""Share of the wrong bytes that a fault must explain to be reported."""


def check_cache_write(problem: Problem, session: Session, seen: Observation) -> Finding:
    """Judge the effect of one step on cache and inputs, a step with extreme rows, and the backend's page functions."""
    finding = _examine_steps(problem, session, seen)
    pool = session.pool
    if isinstance(finding, Holds) and pool is not None and pool.note:
        finding = replace(finding, notes=(*finding.notes, pool.note))
    if isinstance(finding, Broken) and pool is not None and pool.note:
        finding = replace(finding, details=(*finding.details, pool.note))
    if isinstance(finding, Broken | Raised) or pool is None:
        return finding
    return block_moves.check_block_moves(problem, session.backend, session.device, finding)


def _examine_steps(problem: Problem, session: Session, seen: Observation) -> Finding:
    pool = session.pool
    if pool is None:
        return NotExamined((f"attn_type {problem.layer.attn_type} has no cache",), "attncheck")
    if pool.codec is None:
        return NotExamined((pool.no_codec,))
    if not session.impl.brings_writer:
        return NotExamined(("the backend has no cache writer: attncheck writes the new K and V",))
    storable = problem.keys, problem.values
    finding = judge_pool(problem, pool, seen, storable, [storable])
    if not isinstance(finding, Holds) or not len(problem.new_keys):
        return finding
    storages = _storages(problem)
    if storages[0].is_fp8:
        rows = fp8_write.extreme_rows(problem.keys, storages[0]), fp8_write.extreme_rows(problem.values, storages[1])
        honest, name = fp8_write.honest_rows(rows, storages), "that no code stands for"
    else:
        rows = _extreme(problem.keys), _extreme(problem.values)
        honest, name = [rows], f"at the limits of {problem.layer.dtype}"
    extreme = session.run(Fill(rows=rows))
    if isinstance(extreme, Raised):
        return extreme
    again = judge_pool(problem, pool, extreme, rows, honest)
    if isinstance(again, Broken):
        return Broken(f"with rows {name}: {again.summary}", again.figures, again.meaning)
    return finding


def judge_pool(problem: Problem, pool: KVPool, seen: Observation, rows: Rows, honest: Sequence[Rows]) -> Finding:
    """Compare the pool after a step with the expected one. ``rows``: the keys and values that the step was given.

    ``honest``: alternatives for the rows stored; each element may equal that of any alternative after the codec.
    """
    if seen.pool_before is None or seen.pool_after is None:
        return NotExamined(("the cache was not observed",), "attncheck")
    new = problem.new_keys[problem.new_keys >= 0]
    slots = problem.key_slots[new]
    figures = {"slots_written": len(slots), "pool_bytes": seen.pool_before.numel()}
    changed = (f"inputs were changed: {', '.join(seen.changed)}",) if seen.changed else ()
    held, before = _storages(problem)[0].held, seen.pool_before

    def after(written: Rows) -> Tensor:
        image = before.clone()
        pool.write_image(image, slots, *(rows.index_select(0, new.to(rows.device)) for rows in written))
        return image

    expected = after(honest[0])
    if len(honest) > 1:
        for image in map(after, honest):
            right = alike(image, held) == alike(seen.pool_after, held)
            expected = torch.where(right, seen.pool_after, expected)
    if same_bytes(expected, seen.pool_after):
        return Broken(changed[0], figures, changed[0] + _CHANGED) if changed else Holds(figures)
    examined = torch.cat([slots, *pool.regions.values(), problem.owned_slots]).unique()
    wrong = _differing(pool, expected, seen.pool_after, examined.to(expected.device)).cpu()
    figures["slots_wrong"] = len(wrong)
    if not len(wrong):
        return Broken("bytes between the slots of the pool were changed", figures, details=changed)
    images = seen.pool_before, seen.pool_after
    complaints = [_complaint(problem, pool, images, int(slot), slots) for slot in wrong[:_NAMED]]
    if len(wrong) > _NAMED:
        rest = len(wrong) - _NAMED
        complaints[-1] += f"; and {rest} more {'slot is' if rest == 1 else 'slots are'} wrong"
    count = "1 slot is wrong" if len(wrong) == 1 else f"{len(wrong)} slots are wrong, the first"
    meaning = _padding_fault(problem, wrong, slots) or _fault_of_writer(
        problem, pool, rows, (before, expected, seen.pool_after)
    )
    if meaning is None and held.itemsize == 1:
        guesses = ((text, after(stored)) for text, stored in fp8_write.faulty_rows(rows, _storages(problem)))
        meaning = _coding_fault(expected, seen.pool_after, held, guesses)
    if meaning is None:
        meaning = _stray_rows(wrong, slots)
    return Broken(f"{count}: {complaints[0]}", figures, meaning, (*complaints[1:], *changed))


def _storages(problem: Problem) -> tuple[Storage, Storage]:
    return key_storage(problem.layer, problem.cache), value_storage(problem.layer, problem.cache)


def _coding_fault(
    expected: Tensor, got: Tensor, held: torch.dtype, guesses: Iterable[tuple[str, Tensor]]
) -> str | None:
    """Return the fault that explains nearly all differing bytes, if any; ``guesses``: (fault, pool after it)."""
    expected, got = alike(expected, held), alike(got, held)
    is_lost = torch.isnan(numbers_of(expected, held)) & ~torch.isnan(numbers_of(got, held))
    differs = (expected != got) & ~is_lost
    faults = ["NaN is stored as a number"] if bool(is_lost.any()) else []
    if not bool(differs.any()):
        return "; ".join(faults) or None
    if fp8_write.is_unsaturated(expected[~is_lost], got[~is_lost], held):
        return "; ".join(["numbers beyond the range of the format become NaN or Inf; they have to saturate", *faults])
    for meaning, image in guesses:
        if float((alike(image, held) == got)[differs].double().mean()) >= _EXPLAINED:
            return "; ".join([meaning, *faults])
    return None


def _extreme(rows: Tensor) -> Tensor:
    """Return rows of the same shape, of numbers that narrower formats lose: large, tiny, and with all bits in use."""
    limits = torch.finfo(rows.dtype)
    numbers = [limits.max, limits.tiny, 1 + limits.eps, -limits.max, -limits.tiny, 2 - limits.eps, 449.0, -61440.0]
    pattern = torch.tensor(numbers, dtype=rows.dtype)
    return pattern.repeat(-(-rows.numel() // len(pattern)))[: rows.numel()].reshape(rows.shape)


def _differing(pool: KVPool, expected: Tensor, got: Tensor, slots: Tensor) -> Tensor:
    """Return those of ``slots`` whose key or value differs in any bit."""
    unequal = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
    for a, b in zip(pool.read_image(expected, slots), pool.read_image(got, slots), strict=True):
        bits = torch.int16 if a.element_size() == 2 else torch.int32
        unequal |= (a.contiguous().view(bits) != b.contiguous().view(bits)).flatten(1).any(dim=1)
    return slots[unequal]


def _complaint(problem: Problem, pool: KVPool, images: tuple[Tensor, Tensor], slot: int, mapped: Tensor) -> str:
    """Return what is wrong with one slot, and whose rows it contains; ``images``: the pool before and after."""
    at = torch.tensor([slot], device=images[1].device)
    before, after = (pool.read_image(image, at) for image in images)
    changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    name = problem.slot_name(slot)
    found = " and ".join(dict.fromkeys(text for rows in after if (text := _origin(problem, rows[0, 0].cpu()))))
    found = _TWICE.sub(r"\1 and \3 of \2", found)
    if bool((mapped == slot).any()):
        return f"{name} {'holds ' + (found or 'other values') if changed else 'was never written'}"
    return f"{name} was overwritten{' with ' + found if found else ''}, although slot_mapping does not contain it"


def _origin(problem: Problem, row: Tensor) -> str:
    """Return the name of the problem's row that a stored row ``[D]`` is, decoded from its signature; "" if none."""
    for coordinate in decode(row):
        in_batch = coordinate.request < len(problem.requests) and coordinate.head < problem.layer.num_kv_heads
        if not in_batch or coordinate.position >= problem.requests[coordinate.request].num_keys:
            continue
        rows = problem.keys if coordinate.kind == "key" else problem.values
        index = problem.requests[coordinate.request].base + coordinate.position
        if torch.equal(rows[index, coordinate.head], row):
            return str(coordinate)
    return ""


def _padding_fault(problem: Problem, wrong: Tensor, mapped: Tensor) -> str | None:
    last = problem.num_blocks * problem.cache.block_size - 1
    strays = wrong[~torch.isin(wrong, mapped)].tolist()
    if strays == [last]:
        return "slot -1 (padding) was used as an index: the last slot of the pool was overwritten"
    return "rows with slot -1 were written to slot 0" if strays == [0] else None


def _stray_rows(wrong: Tensor, mapped: Tensor) -> str | None:
    strays = wrong[~torch.isin(wrong, mapped)]
    for shift, where in ((1, "after"), (-1, "before")):
        if len(strays) == len(wrong) > 0 and bool(torch.isin(strays - shift, mapped).all()):
            return f"the slot {where} each new row is written too, although slot_mapping does not contain it"
    return "rows were written to slots that slot_mapping does not contain" if len(strays) else None


def _fault_of_writer(problem: Problem, pool: KVPool, rows: Rows, images: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """Return a writer's fault that explains nearly all bytes, if any; ``images``: pool before, expected, and after."""
    before, expected, got = images
    new = problem.key_slots[problem.new_keys[problem.new_keys >= 0]]
    if not len(new) or got.numel() > _MOST_BYTES:
        return None
    keys, values = pool.read_image(before, new.to(got.device))
    for meaning, written, slots in write_faults.faulty_writes(problem, rows, (keys, values)):
        image = before.clone()
        kept = slots >= 0
        pool.write_image(image, slots[kept], *(part[kept.to(part.device)] for part in written))
        if write_faults.explains(expected, got, image):
            return meaning
    return None


def _check(case: CheckedCase) -> Finding:
    session, seen = case.first_step()
    finding = check_cache_write(case.problem, session, seen)
    if isinstance(finding, Holds) and case.problem.writes_nothing:
        return shared_cache.check_handed_keys(session, case.truth, finding)
    if isinstance(finding, NotExamined) and seen.changed:
        changed = f"inputs were changed: {', '.join(seen.changed)}"
        return Broken(changed, meaning=changed + _CHANGED, details=finding.reasons)
    return finding


CHECK = Check(_check)
