"""The check ``cache_write``: each new row is stored in its slot, and no other slot changes."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.dtypes import FP8_DTYPES, cache_dtype
from attncheck.harness.checks.coded_rows import has_coded_rows, wrong_coded_rows
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase, Function, call
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.diagnosis import paging
from attncheck.harness.driver.foreign_code import StageError, call_backend, stage_named
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.pool import KVPool, flat_bytes, same_bytes
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.driver.step import ForwardCall
from attncheck.harness.problem.pages import RandomStream
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.queries import decode
from attncheck.harness.problem.storage import (
    Storage,
    alike,
    key_storage,
    magnitudes,
    nearest_code,
    numbers_of,
    truncated_code,
    value_storage,
)
from attncheck.harness.truth.truth import Truth
from attncheck.reference import copy_blocks, reshape_and_cache, swap_blocks
from attncheck.reference.step_spec import ROW_FORMATS

# What correct and faulty writers store in an FP8 cache for numbers that no code represents exactly.
#
# The rows lie between codes, at and near ties, beyond the range and below the smallest code; NaN and, in formats
# without infinities, those are included. A correct kernel divides by the scale or multiplies by its reciprocal, in
# float32 or wider. The results may differ by one code if the scale is not a power of two; each such code is accepted,
# no others.

_AT = (0, 1, 2, 7, 8, 9, 24, 37, 51, 60, 77, 90, 101, 110)
"""Indices of codes; the rows lie between each and the next. Smallest, subnormal, even, odd, small and large ones."""

_ASIDE = 2.0**-7
"""Relative distance of a near tie from the tie. Larger than the rounding of any activation dtype."""

Rows = tuple[Tensor, Tensor]
"""Keys and values."""


def extreme_rows(rows: Tensor, storage: Storage) -> Tensor:
    """Return rows of the shape of ``rows`` that expose how a writer rounds.

    Elements for which the cache cannot hold one of the honest codes are 0.
    """
    quotients = torch.tensor(list(_quotients(storage.held)), dtype=torch.float64)
    chosen = quotients.repeat(-(-rows.numel() // len(quotients)))[: rows.numel()].reshape(rows.shape)
    made = (chosen * storage.scale.double()).to(storage.dtype)
    is_held = torch.stack([storage.holds(codes) for codes in honest_codes(made, storage)]).all(0)
    if storage.held != torch.float8_e4m3fn:
        is_held &= ~torch.isinf(made)  # a number beyond the activation dtype's range became infinite
    return made.masked_fill(~is_held, 0.0)


def _quotients(held: torch.dtype) -> Iterator[float]:
    """Yield numbers in the scale of the codes, with alternating signs."""
    numbers = magnitudes(held).tolist()
    sign = 1.0
    for low, high in ((numbers[i], numbers[i + 1]) for i in _AT):
        tie = (low + high) / 2
        most = low + 0.8 * (high - low)
        for number in (tie, tie * (1 + _ASIDE), tie * (1 - _ASIDE), most):
            yield sign * number
            sign = -sign
    limit = numbers[-1]
    for factor in (1.0, 1.01, 1.04, 1.3, 16.0, 1000.0):
        yield sign * limit * factor
        yield -sign * limit * factor
        sign = -sign
    yield from (numbers[1] / 64, -numbers[1] / 64)
    yield torch.nan
    if held == torch.float8_e4m3fn:
        yield from (torch.inf, -torch.inf)


def honest_codes(rows: Tensor, storage: Storage) -> tuple[Tensor, ...]:
    """Return the codes (uint8) that correct arithmetic may produce for ``rows``; first the reference's."""
    scale = storage.scale.to(rows.device)
    quotients = (rows.float() / scale, rows.float() * (1 / scale), rows.double() / scale.double())
    return tuple(nearest_code(quotient.double(), storage.held) for quotient in quotients)


def honest_rows(rows: Rows, storages: tuple[Storage, Storage]) -> list[Rows]:
    """Return, for each of the honest codes, rows that the codec stores as those codes."""
    keys, values = ([s.rows_of(codes) for codes in honest_codes(x, s)] for x, s in zip(rows, storages, strict=True))
    return list(zip(keys, values, strict=True))


def faulty_rows(rows: Rows, storages: tuple[Storage, Storage]) -> Iterator[tuple[str, Rows]]:
    """Yield (fault of a writer, rows that the codec stores as the faulty writer would store ``rows``)."""
    key, value = storages
    both = list(zip(rows, storages, strict=True))

    def scaled(factors: tuple[Tensor, Tensor]) -> Rows:
        numbers = (x.double() * factor.to(x.device) for x, factor in zip(rows, factors, strict=True))
        made = [s.rows_of(nearest_code(x, s.held)) for x, s in zip(numbers, storages, strict=True)]
        return made[0], made[1]

    scales = key.scale.double(), value.scale.double()
    yield "the scale multiplies what is stored, instead of dividing it", scaled(scales)
    yield "the scale is left out", scaled((torch.ones(1, 1), torch.ones(1, 1)))
    yield "k_scale and v_scale are exchanged", scaled((1 / scales[1], 1 / scales[0]))
    yield "the scale of KV head 0 is used for all heads", scaled((1 / scales[0][:1], 1 / scales[1][:1]))
    cut = [s.rows_of(truncated_code(x.double() / s.scale.to(x.device).double(), s.held)) for x, s in both]
    yield "codes are truncated, not rounded to the nearest", (cut[0], cut[1])


def is_unsaturated(expected: Tensor, got: Tensor, held: torch.dtype) -> bool:
    """Return whether every differing code (uint8) should be the largest number and is NaN or infinite."""
    differs = expected != got
    limit = len(magnitudes(held)) - 1
    is_limit = (expected[differs] & 0x7F) == limit
    is_finite = torch.isfinite(numbers_of(got[differs], held))
    return bool(is_limit.all()) and not bool(is_finite.any())


# A layer that reads another layer's cache must not write keys and values passed to it.
#
# A model computes keys in every layer by default, and passes them to `forward`. The output must depend on the cache
# alone, and the cache must not change. A backend may also refuse such keys.


_WRITES_SHARED = (
    "a layer writes to a cache that it shares: with kv_sharing_target_layer_name, it reads the cache of that layer, "
    "and writes nothing"
)


def check_handed_keys(session: Session, truth: Truth, finding: Holds) -> Finding:
    """Run one more step that passes keys; return ``finding`` if they are neither written nor used, or what is wrong.

    Return ``finding`` without a step if the cache update is separate from ``forward``, because such a layer does not
    call the update; for a latent layer; or if the step takes several forward calls.
    """
    problem, backend, pool = session.problem, session.backend, session.pool
    if pool is None or problem.layer.mla is not None or not backend.forward_includes_kv_cache_update:
        return finding
    if len(session.prepared().calls) > 1:
        return finding
    try:
        own = session.with_second_builder(problem)
        begun = own.begin()
        calls = [_with_keys(call, problem.keys, problem.values) for call in begun.calls]
        for call, metadata in own.built(calls):
            own.take(begun, call, metadata)
        seen = own.finish(begun)
    except StageError as failure:
        if failure.raised.is_refusal:
            return finding
        with stage_named("with keys for a shared cache"):
            raise
    if begun.before is not None and pool.differs_from(begun.before):
        return Broken(
            "a layer that shares another's cache wrote the keys it was passed",
            finding.figures,
            _WRITES_SHARED,
        )
    judged = check_numerics(problem, truth, seen, explains=False)
    if not isinstance(judged, Broken):
        return finding
    return Broken(f"a layer that shares another's cache uses the keys it was passed: {judged.summary}", judged.figures)


def _with_keys(call: ForwardCall, keys: Tensor, values: Tensor) -> ForwardCall:
    """Return the call with a key and a value for each query row, whose values occur nowhere in the cache."""
    key, value = (
        torch.full((len(call.query), *rows.shape[1:]), 3.0, dtype=rows.dtype, device=call.query.device)
        for rows in (keys, values)
    )
    return replace(call, key=key, value=value)


# Page functions of a backend: `reshape_and_cache`, `copy_blocks` and `swap_blocks`, if it offers them.
#
# Part of `cache_write`. The caches have the case's page size, heads, layout and dtype, with gaps between pages if the
# case has strided views. Exactly the named pages must change, to exactly the right contents; all memory is compared
# byte for byte. A source may be named twice, a destination not, and no page is both. Cannot see: pools too large to
# compare.

NAMES = ("reshape_and_cache", "copy_blocks", "swap_blocks")

_BLOCKS = 13
_PAIRS = 5
_SOURCES = 3
_SPARE = 32
"""Elements between two consecutive pages."""

_K_SCALE, _V_SCALE = 0.5, 0.25
"""Powers of two, so that division and multiplication by the inverse agree. A cache of floats ignores them."""


@dataclass(frozen=True)
class _Question:
    """One call: its tensors, which of them it may write, the backend's function and the reference's function."""

    name: str
    arguments: Mapping[str, Tensor]
    written: tuple[str, ...]
    function: Function
    right: Function


def check_block_moves(
    problem: Problem, backend: type[AttentionBackend], device: torch.device, first: Finding
) -> Finding:
    """Return ``first``, or what is wrong with the first page function of the backend that does not do as specified."""
    offered = call_backend("functions", backend.functions)
    for question in _questions(problem, offered, device):
        wrong = _judge(question)
        if wrong is not None:
            return wrong
    return first


def _questions(problem: Problem, offered: Mapping[str, Function], device: torch.device) -> Iterator[_Question]:
    stream = RandomStream(problem.seed, problem.case.hash, "block moves")
    for name in NAMES:
        is_coded = name == "reshape_and_cache" and problem.cache.kv_cache_dtype in ROW_FORMATS
        if name not in offered or is_coded:  # the function has no arguments for the scales of rows
            continue
        function = offered[name]
        if name == "reshape_and_cache":
            yield _writing(problem, stream, device, function)
        elif name == "copy_blocks":
            yield _copying(problem, stream, device, function)
        else:
            places = [(device, device)]
            if device.type != "cpu":  # the purpose of swap_blocks: moving pages to the host and back
                places += [(device, torch.device("cpu")), (torch.device("cpu"), device)]
            for source, destination in places:
                yield _swapping(problem, stream, (source, destination), function)


def _writing(problem: Problem, stream: RandomStream, device: torch.device, function: Function) -> _Question:
    layer, cache = problem.layer, problem.cache
    count = min(24, _BLOCKS * cache.block_size - 1)
    slots = stream.permutation(_BLOCKS * cache.block_size)[:count]
    slots[1::4] = -1
    rows = {  # two more rows than slots, as in a padded batch
        name: stream.uniform(count + 2, layer.num_kv_heads, size).to(problem.dtype).to(device)
        for name, size in (("key", layer.head_size), ("value", layer.value_head_size))
    }
    caches = {name: _codes(tensor, cache.kv_cache_dtype) for name, tensor in _caches(problem, stream, device).items()}
    given = {"k_scale": torch.tensor(_K_SCALE, device=device), "v_scale": torch.tensor(_V_SCALE, device=device)}
    return _Question(
        "reshape_and_cache",
        {**rows, **caches, "slot_mapping": slots.to(device)},
        tuple(caches),
        lambda *arguments: function(*arguments, **given),
        lambda *arguments: reshape_and_cache(*arguments, k_scale=_K_SCALE, v_scale=_V_SCALE),
    )


def _copying(problem: Problem, stream: RandomStream, device: torch.device, function: Function) -> _Question:
    caches = _caches(problem, stream, device)
    mapping = _pairs(stream).to(device)
    return _Question(
        "copy_blocks",
        {**caches, "mapping": mapping},
        tuple(caches),
        lambda key, value, pairs: function([key, value], pairs),
        lambda key, value, pairs: copy_blocks([key, value], pairs),
    )


def _swapping(
    problem: Problem, stream: RandomStream, places: tuple[torch.device, torch.device], function: Function
) -> _Question:
    source, destination = (_caches(problem, stream, place)["key_cache"] for place in places)
    # Pairs are on the host, where code that moves pages between devices needs them.
    arguments = {"src": source, "dst": destination, "mapping": _pairs(stream)}
    return _Question("swap_blocks", arguments, ("dst",), function, swap_blocks)


def _judge(question: _Question) -> Broken | None:
    expected = {name: _twin(tensor) for name, tensor in question.arguments.items()}
    question.right(*expected.values())
    _, changed = call(question.name, question.function, question.arguments, {}, *question.written)
    if changed:
        return Broken(f"{question.name} changed its argument {' and '.join(changed)}")
    for name in question.written:
        got, right = question.arguments[name], expected[name]
        if same_bytes(flat_bytes(got), flat_bytes(right)):
            continue
        wrong = [block for block in range(len(got)) if not same_bytes(got[block], right[block])]
        if not wrong:
            return Broken(f"{question.name} wrote between the pages of {name}")
        return Broken(
            f"{question.name}: {len(wrong)} of {len(got)} pages of {name} are wrong, the first is page {wrong[0]}",
            {"pages_wrong": len(wrong)},
            _meaning(question, wrong),
        )
    return None


def _meaning(question: _Question, wrong: Sequence[int]) -> str | None:
    mapping = question.arguments.get("mapping")
    if mapping is None:
        return None
    destinations = set(mapping[:, 1].tolist())
    if set(wrong) == destinations:
        return "no page was written as block_mapping requires"
    if not set(wrong) <= destinations:
        return "pages were written that no pair names as a destination"
    return None


def _pairs(stream: RandomStream) -> Tensor:
    """Return pairs (source, destination). Sources repeat, destinations do not, and no page is both.

    The first and the last page are neither.
    """
    pages = stream.permutation(_BLOCKS - 2) + 1
    return torch.stack([pages[torch.arange(_PAIRS) % _SOURCES], pages[_SOURCES : _SOURCES + _PAIRS]], dim=1)


def _caches(problem: Problem, stream: RandomStream, device: torch.device) -> dict[str, Tensor]:
    """Return filled key and value caches ``[NB, BS, Hkv, size]`` in the memory order of the case's layout."""
    layer, cache = problem.layer, problem.cache
    dtype = cache_dtype(layer, cache)
    spare = _SPARE if "views" in problem.inputs else 0
    made = {}
    for name, size in (("key_cache", layer.head_size), ("value_cache", layer.value_head_size)):
        lengths = {"N": cache.block_size, "H": layer.num_kv_heads, "D": size}
        page = math.prod(lengths.values())
        numbers = stream.int8(_BLOCKS, page + spare)
        memory = (numbers.view(dtype) if dtype == torch.uint8 else (numbers.double() / 64).to(dtype)).to(device)
        pages = memory[:, :page].unflatten(1, [lengths[axis] for axis in cache.layout])
        made[name] = pages.permute(0, *(1 + cache.layout.index(axis) for axis in lengths))
    return made


def _codes(cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """Return FP8 codes (uint8) as a view of the FP8 dtype, so that the dtype states their format."""
    return cache.view(FP8_DTYPES[kv_cache_dtype]) if kv_cache_dtype in FP8_DTYPES else cache


def _twin(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype over a copy of the whole storage."""
    memory = flat_bytes(tensor).clone()
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


# `cache_write`: exactly the mapped slots contain exactly the new K/V, byte for byte, and inputs are unchanged.
#
# The whole pool is compared with a copy that a proven codec wrote. A second step writes rows at the limits of their
# dtype, to expose a cache that rounds or clamps. An FP8 cache gets numbers between codes and beyond their range
# instead; every code that correct arithmetic can produce is accepted. Writes outside the cache's memory are not seen.

_NAMED = 4
"""Most wrong slots described in a finding."""

_MOST_BYTES = 2**26
"""Pool size in bytes above which faults of writers are not searched for."""

_TWICE = re.compile(r"([KV]) of (.+) and ([KV]) of \2$")
"""K and V of one place."""

_CHANGED = "; a backend may write only the output and the KV cache"

_EXPLAINED = 0.98
"""Share of the wrong bytes that a fault must explain to be reported."""


def check_cache_write(case: CheckedCase) -> Finding:
    """Judge the effect of one step on cache and inputs, a step with extreme rows, and the backend's page functions."""
    problem, (session, seen) = case.problem, case.first_step()
    finding, pool = _examine_steps(problem, session, seen), session.pool
    if pool is not None and pool.note:
        finding = _with_note(finding, pool.note)
    if pool is not None and not isinstance(finding, Broken):
        finding = check_block_moves(problem, session.backend, session.device, finding)
    if isinstance(finding, Holds) and problem.writes_nothing:
        return check_handed_keys(session, case.truth, finding)
    if isinstance(finding, NotExamined) and seen.changed:
        changed = f"inputs were changed: {', '.join(seen.changed)}"
        return Broken(changed, meaning=changed + _CHANGED, details=finding.reasons)
    return finding


def _with_note(finding: Finding, note: str) -> Finding:
    if isinstance(finding, Holds):
        return replace(finding, notes=(*finding.notes, note))
    return replace(finding, details=(*finding.details, note)) if isinstance(finding, Broken) else finding


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
        rows = extreme_rows(problem.keys, storages[0]), extreme_rows(problem.values, storages[1])
        honest, name = honest_rows(rows, storages), "that no FP8 code represents"
    elif storages[0].coded_rows is not None and storages[1].coded_rows is not None:
        rows = storages[0].coded_rows.extreme(problem.keys), storages[1].coded_rows.extreme(problem.values)
        honest, name = [rows], "between codes"
    else:
        rows = _extreme(problem.keys), _extreme(problem.values)
        honest, name = [rows], f"at the limits of {problem.layer.dtype}"
    extreme = session.run(Fill(rows=rows))
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
    new = problem.written_keys
    slots = problem.key_slots[new]
    figures: dict[str, int | float] = {"slots_written": len(slots), "pool_bytes": seen.pool_before.numel()}
    changed = (f"inputs were changed: {', '.join(seen.changed)}",) if seen.changed else ()
    held, before, got = _storages(problem)[0].held, seen.pool_before, seen.pool_after
    if has_coded_rows(problem):
        fault = wrong_coded_rows(problem, pool, got, rows)
        if fault is not None:
            return replace(fault, figures={**figures, **fault.figures}, details=changed)

    def after(written: Rows, image: Tensor = before) -> Tensor:
        image = image.clone()
        pool.write_image(image, slots, *(rows.index_select(0, new.to(rows.device)) for rows in written))
        return image

    if has_coded_rows(problem):  # the new rows are right, so all bytes are if they are the codec's with its bytes there
        got = after(rows, got)

    expected = after(honest[0])
    if len(honest) > 1:
        for image in map(after, honest):
            right = alike(image, held) == alike(got, held)
            expected = torch.where(right, got, expected)
    if same_bytes(expected, got):
        return Broken(changed[0], figures, changed[0] + _CHANGED) if changed else Holds(figures)
    examined = torch.cat([slots, *pool.regions.values(), problem.owned_slots]).unique()
    wrong = _differing(pool.read_exactly, expected, got, examined.to(expected.device)).cpu()
    figures["slots_wrong"] = len(wrong)
    if not len(wrong):
        where = "that are not of the new rows" if has_coded_rows(problem) else "between the slots of the pool"
        return Broken(f"bytes {where} were changed", figures, details=changed)
    images = seen.pool_before, got
    complaints = [_complaint(problem, pool, images, int(slot), slots) for slot in wrong[:_NAMED]]
    if len(wrong) > _NAMED:
        rest = len(wrong) - _NAMED
        complaints[-1] += f"; and {rest} more {'slot is' if rest == 1 else 'slots are'} wrong"
    count = "1 slot is wrong" if len(wrong) == 1 else f"{len(wrong)} slots are wrong, the first"
    if problem.writes_nothing:
        return Broken(f"{count}: {complaints[0]}", figures, _WRITES_SHARED, (*complaints[1:], *changed))
    meaning = _padding_fault(problem, wrong, slots) or _fault_of_writer(problem, pool, rows, (before, expected, got))
    if meaning is None and held.itemsize == 1:
        guesses = ((text, after(stored)) for text, stored in faulty_rows(rows, _storages(problem)))
        meaning = _coding_fault(expected, got, held, guesses)
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
    if is_unsaturated(expected[~is_lost], got[~is_lost], held):
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


def _differing(read: Callable[[Tensor, Tensor], Rows], expected: Tensor, got: Tensor, slots: Tensor) -> Tensor:
    """Return those of ``slots`` whose key or value differs in any bit."""
    unequal = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
    for a, b in zip(read(expected, slots), read(got, slots), strict=True):
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
    why = "the layer only reads this cache" if problem.writes_nothing else "slot_mapping does not contain it"
    return f"{name} was overwritten{' with ' + found if found else ''}, although {why}"


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
    new = problem.key_slots[problem.written_keys]
    if not len(new) or got.numel() > _MOST_BYTES:
        return None
    keys, values = pool.read_image(before, new.to(got.device))
    for meaning, written, slots in paging.faulty_writes(problem, rows, (keys, values)):
        image = before.clone()
        kept = slots >= 0
        pool.write_image(image, slots[kept], *(part[kept.to(part.device)] for part in written))
        if paging.explains(expected, got, image):
            return meaning
    return None


CHECKS = {"cache_write": Check(check_cache_write)}
