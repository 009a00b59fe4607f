"""Caches as faulty writers leave them: rows in other slots, permuted, rounded, scaled, or not written."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem

_MOSTLY = 0.98
"""Share of the wrong bytes that a fault must explain. It may be wrong in 2 % as many other bytes."""

Written = tuple[str, tuple[Tensor, Tensor], Tensor]
"""The fault in words, the keys and values that the writer writes, and the slots that it writes them to."""


def faulty_writes(problem: Problem, rows: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> Iterator[Written]:
    """Yield faulty writes of a step's new keys and values (``rows``), likelier faults first.

    ``held``: the keys and values in their slots before the step.
    """
    new = problem.new_keys[problem.new_keys >= 0]
    slots = problem.key_slots[new]
    key, value = (part.index_select(0, new.to(part.device)) for part in rows)
    both, one_size = (key, value), key.shape == value.shape
    if one_size:
        yield "keys and values are exchanged", (value, key), slots
        yield "values are written instead of keys too", (value, value), slots
        yield "keys are written instead of values too", (key, key), slots
    yield "the new keys are not written", (held[0], value), slots
    yield "the new values are not written", (key, held[1]), slots
    for meaning, other in _other_slots(problem, slots):
        yield meaning, both, other
    yield from ((meaning, made, slots) for meaning, made in _other_rows(key, value))
    yield from ((meaning, made, slots) for meaning, made in _other_numbers(problem, key, value))
    for count in (1, 2, 3):
        if len(slots) > count:
            meaning = f"rows at the end of the step are not written, {count} of them"
            yield meaning, both, _without(slots, slice(-count, None))
    yield "only the first row of the step is written", both, _without(slots, slice(1, None))
    for step in (4, 8, 16, 32, 64, 128):
        if len(slots) % step and len(slots) > step:
            whole = slice(len(slots) // step * step, None)
            yield f"only whole runs of {step} rows are written", both, _without(slots, whole)
        if len(slots) > step:
            yield f"only the first {step} rows of the step are written", both, _without(slots, slice(step, None))


def explains(expected: Tensor, got: Tensor, image: Tensor) -> bool:
    """Return whether ``image``, the cache after a fault, differs from ``got`` in few bytes.

    Few: at most 2 % of the bytes in which ``expected`` differs from ``got``.
    """
    wrong = int((expected != got).sum())
    return int((image != got).sum()) <= (1 - _MOSTLY) * wrong


def _without(slots: Tensor, left_out: slice) -> Tensor:
    kept = slots.clone()
    kept[left_out] = -1
    return kept


def _other_slots(problem: Problem, slots: Tensor) -> Iterator[tuple[str, Tensor]]:
    size, total = problem.cache.block_size, problem.num_blocks * problem.cache.block_size
    page, offset = slots // size, slots % size
    found = {
        "every row is written one slot after its own": slots + 1,
        "every row is written one slot before its own": slots - 1,
        "the offset in the page is left out": page * size,
        "the page of a slot is left out": offset,
        "page and offset of a slot are exchanged": offset * problem.num_blocks + page,
        "every row is written one page after its own": slots + size,
        "slots are kept in 16 bits": slots % 2**16,
    }
    for other in (8, 16, 32, 64):
        found[f"a page is taken to have {other} tokens, not {size}"] = page * other + offset
    for meaning, written in found.items():
        if not torch.equal(written, slots) and bool(((written >= 0) & (written < total)).all()):
            yield meaning, written


def _other_rows(key: Tensor, value: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    if len(key) > 1:
        yield "every slot holds the next row of the step", (key.roll(-1, 0), value.roll(-1, 0))
        yield "every slot holds the row before in the step", (key.roll(1, 0), value.roll(1, 0))
        yield "every slot holds the first row of the step", (key[:1].expand_as(key), value[:1].expand_as(value))
        yield "the rows are written in reversed order", (key.flip(0), value.flip(0))
    if key.shape[1] > 1:
        yield "the heads are written in reversed order", (key.flip(1), value.flip(1))
        yield "every head holds head 0", (key[:, :1].expand_as(key), value[:, :1].expand_as(value))
        tiled = [part.transpose(1, 2).reshape(part.shape) for part in (key, value)]
        yield "heads and channels are exchanged", (tiled[0], tiled[1])
    for name, parts in (("keys", (True, False)), ("values", (False, True)), ("keys and values", (True, True))):
        turned = [
            part.roll(part.shape[-1] // 2, -1) if turns else part
            for part, turns in zip((key, value), parts, strict=True)
        ]
        yield f"the halves of the channels of {name} are exchanged", (turned[0], turned[1])


def _other_numbers(problem: Problem, key: Tensor, value: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    kinds = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    coarse = [kind for kind in kinds if torch.finfo(kind).bits < torch.finfo(key.dtype).bits or kind != key.dtype]
    for kind in coarse:
        name = str(kind).removeprefix("torch.")
        rounded = [part.to(kind).to(part.dtype) for part in (key, value)]
        yield f"keys and values are rounded to {name}", (rounded[0], rounded[1])
        yield f"keys are rounded to {name}", (rounded[0], value)
        yield f"values are rounded to {name}", (key, rounded[1])
    for limit in (448.0, 57344.0, 65504.0):
        clamped = [part.clamp(-limit, limit) for part in (key, value)]
        yield f"numbers are clamped to {limit:g}", (clamped[0], clamped[1])
    scales = [
        torch.tensor(scale, dtype=torch.float32, device=key.device).reshape(-1, 1)
        for scale in (problem.cache.k_scale, problem.cache.v_scale)
    ]
    if any(bool((scale != 1).any()) for scale in scales):
        # The codec divides by the scales where the cache holds codes.
        words = (
            "keys and values are divided by k_scale and v_scale",
            "keys and values are multiplied by k_scale and v_scale",
        )
        if problem.cache.kv_cache_dtype.startswith("fp8"):
            words = ("k_scale and v_scale are applied twice", "k_scale and v_scale are left out")
        for meaning, power in zip(words, (-1, 1), strict=True):
            made = [
                (part.float() * scale**power).to(part.dtype) for part, scale in zip((key, value), scales, strict=True)
            ]
            yield meaning, (made[0], made[1])
