"""``cache_write``: exactly the mapped slots hold exactly the new K/V, byte for byte; inputs are unchanged.

The whole pool is compared with a copy that the proven codec wrote. Cannot see: writes outside the cache's own memory.
"""

import torch
from torch import Tensor

from attncheck.harness.coordinates import decode
from attncheck.harness.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.observation import Observation
from attncheck.harness.pool import Pool
from attncheck.harness.problem import Problem


def examine(problem: Problem, pool: Pool | None, seen: Observation, brings_writer: bool) -> Finding:
    """Judge what one step did to the cache and to its inputs."""
    if pool is None:
        return NotExamined((f"attn_type {problem.layer.attn_type} has no cache",), "attncheck")
    if pool.codec is None:
        return NotExamined(("the backend brings no cache codec, and its packing is none of the usual ones",))
    if not brings_writer:
        return NotExamined(("the backend brings no writer: attncheck wrote the new K/V",))
    if seen.pool_before is None or seen.pool_after is None:
        return NotExamined(("the cache was not observed",), "attncheck")
    new = problem.new_keys[problem.new_keys >= 0]
    slots = problem.key_slots[new]
    figures = {"slots_written": len(slots), "pool_bytes": seen.pool_before.numel()}
    expected = seen.pool_before.clone()
    device = expected.device
    pool.write_image(expected, slots, problem.keys[new], problem.values[new])
    if torch.equal(expected, seen.pool_after):
        if seen.changed:
            return Broken(f"inputs were changed: {', '.join(seen.changed)}", figures)
        return Holds(figures)
    examined = torch.cat([slots, *pool.regions.values(), problem.owned_slots]).unique()
    wrong = _differing(pool, expected, seen.pool_after, examined.to(device)).cpu()
    figures["slots_wrong"] = len(wrong)
    if not len(wrong):
        return Broken("bytes between the slots of the pool were changed", figures)
    images = seen.pool_before, seen.pool_after
    complaints = [_complaint(problem, pool, images, int(slot), slots) for slot in wrong[:4]]
    meaning = _meaning(problem, wrong, slots)
    changed = (f"inputs were changed: {', '.join(seen.changed)}",) if seen.changed else ()
    count = "1 slot is wrong" if len(wrong) == 1 else f"{len(wrong)} slots are wrong, first"
    return Broken(f"{count}: {complaints[0]}", figures, meaning, (*complaints[1:], *changed))


def _differing(pool: Pool, expected: Tensor, got: Tensor, slots: Tensor) -> Tensor:
    """The slots whose key or value differs, bit for bit."""
    unequal = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
    for a, b in zip(pool.read_image(expected, slots), pool.read_image(got, slots), strict=True):
        bits = torch.int16 if a.element_size() == 2 else torch.int32
        unequal |= (a.contiguous().view(bits) != b.contiguous().view(bits)).flatten(1).any(dim=1)
    return slots[unequal]


def _complaint(problem: Problem, pool: Pool, images: tuple[Tensor, Tensor], slot: int, mapped: Tensor) -> str:
    """What is wrong with one slot, and whose rows were found there; ``images``: the pool before and after."""
    at = torch.tensor([slot], device=images[1].device)
    before, after = (pool.read_image(image, at) for image in images)
    changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    name = problem.slot_name(slot)
    found = "; ".join(dict.fromkeys(text for rows in after if (text := _origin(problem, rows[0, 0].cpu()))))
    if bool((mapped == slot).any()):
        return f"{name} {'holds ' + (found or 'other values') if changed else 'was never written'}"
    return f"{name} was overwritten{' with ' + found if found else ''}, and no row maps to it"


def _origin(problem: Problem, row: Tensor) -> str:
    """Which row of the problem a stored row (``[D]``) is, read from its signature."""
    for coordinate in decode(row):
        in_batch = coordinate.request < len(problem.requests) and coordinate.head < problem.layer.num_kv_heads
        if in_batch and coordinate.position < problem.requests[coordinate.request].num_keys:
            return str(coordinate)
    return ""


def _meaning(problem: Problem, wrong: Tensor, mapped: Tensor) -> str | None:
    last = problem.num_blocks * problem.cache.block_size - 1
    strays = wrong[~torch.isin(wrong, mapped)].tolist()
    if strays == [last]:
        return "slot -1 was taken for the last slot of the pool"
    if strays == [0]:
        return "rows with slot -1 were written to slot 0"
    if not strays:
        return None
    return "rows were written where the slot mapping does not point"
