"""Page functions of a backend: ``reshape_and_cache``, ``copy_blocks`` and ``swap_blocks``, if it offers them.

Part of ``cache_write``. The caches have the case's page size, heads, layout and dtype, with gaps between pages if the
case has strided views. Exactly the named pages must change, to exactly the right contents; all memory is compared byte
for byte. A source may be named twice, a destination not, and no page is both. Cannot see: pools too large to compare.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.dtypes import FP8_DTYPES, cache_dtype
from attncheck.harness.checks.findings import Broken, Finding
from attncheck.harness.checks.function_calls import Function, call
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.pool_memory import flat_bytes
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.reference import copy_blocks, reshape_and_cache, swap_blocks

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
        if name not in offered:
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
        if torch.equal(flat_bytes(got), flat_bytes(right)):
            continue
        wrong = [block for block in range(len(got)) if not torch.equal(_bytes(got[block]), _bytes(right[block]))]
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
    dtype, spare = cache_dtype(layer, cache), _SPARE if "views" in problem.inputs else 0
    made = {}
    for name, size in (("key_cache", layer.head_size), ("value_cache", layer.value_head_size)):
        shape = (cache.block_size, layer.num_kv_heads, size)
        if cache.layout == "HND":
            shape = (shape[1], shape[0], size)
        page = shape[0] * shape[1] * size
        numbers = stream.int8(_BLOCKS, page + spare)
        memory = (numbers.view(dtype) if dtype == torch.uint8 else (numbers.double() / 64).to(dtype)).to(device)
        pages = memory[:, :page].unflatten(1, shape)
        made[name] = pages.transpose(1, 2) if cache.layout == "HND" else pages
    return made


def _codes(cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """Return FP8 codes (uint8) as a view of the FP8 dtype, so that the dtype states their format."""
    return cache.view(FP8_DTYPES[kv_cache_dtype]) if kv_cache_dtype in FP8_DTYPES else cache


def _twin(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype over a copy of the whole storage."""
    memory = flat_bytes(tensor).clone()
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
