"""Memory and objects that the result of a function shares: with its arguments, an earlier result, or within itself."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

FREE = frozenset({"seq_lens", "seq_lens_cpu", "num_computed_tokens_cpu"})
"""Fields that may share memory with an argument: where nothing is cut, or where the device is the host."""

SHARED = frozenset({"slot_mapping", "block_table_tensor", "result"})
"""Fields that share memory with an argument if the reference's do: graphs read them, or callers write through them."""

EARLIER = "an earlier result"
_ITSELF = "another part of it"

_TWINS = FREE | {"query_start_loc", "query_start_loc_cpu"}
"""Fields for host and device, which may share memory with each other where the device is the host."""


class Alias(NamedTuple):
    """What a part of a result shares: with whom, and whether it is that very object."""

    owner: str
    is_same: bool


def aliases_of(result: Any, arguments: Mapping[str, Any], earlier: Any) -> dict[str, Alias]:
    """Return what the parts of ``result`` share, by place.

    A part shares the memory of an argument if their storages overlap, so any view of an argument does. It shares memory
    with an earlier result, or with a part before it, if their elements overlap.
    """
    given = [part for name, value in arguments.items() for part in _parts(f"its argument {name}", value)]
    made = [(EARLIER, value) for _, value in _parts("", earlier) if _has_memory(value)]
    found = {}
    for place, part in _parts("returned", result):
        for owner, value in given:
            if value is part or _overlap(_storage(value), _storage(part)):
                found[place] = Alias(owner, value is part and not isinstance(part, list | dict))
                break
        else:
            sharer = next((owner for owner, value in made if value is part or _share_elements(value, part)), None)
            if sharer is not None:
                found[place] = Alias(sharer, is_same=False)
            elif _has_memory(part) and place.rpartition(".")[2] not in _TWINS:
                made.append((_ITSELF, part))
    return found


def _parts(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the mutable parts of ``value``, itself included, each after its place."""
    match value:
        case Mapping():
            members = {f".{key}": item for key, item in value.items()}
        case list() | tuple():
            members = {f"[{index}]": item for index, item in enumerate(value)}
        case SimpleNamespace():
            members = {f".{name}": item for name, item in vars(value).items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            members = {f".{each.name}": getattr(value, each.name, None) for each in fields(value)}
        case Tensor() | np.ndarray():
            members = {}
        case _:
            return
    if not isinstance(value, tuple):
        yield place, value
    for name, item in members.items():
        yield from _parts(f"{place}{name}", item)


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _storage(value: Any) -> range:
    """Return the addresses of the whole storage of a tensor, or of an array; an empty range for anything else."""
    match value:
        case Tensor():
            memory = value.untyped_storage()
            return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
        case np.ndarray():
            return _span(value)
    return range(0)


def _span(value: Any) -> range:
    """Return the addresses from the first to the last element of a tensor or array; an empty range without elements."""
    first, strides, item = _layout(value)
    if 0 in value.shape:
        return range(0)
    steps = [(size - 1) * stride for size, stride in zip(value.shape, strides, strict=True)]
    return range(first + sum(min(step, 0) for step in steps), first + sum(max(step, 0) for step in steps) + item)


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _share_elements(one: Any, other: Any) -> bool:
    """Return whether two values are tensors or arrays with an element in common. Slices with a step may interleave."""
    if not (_has_memory(one) and _has_memory(other)) or not _overlap(_span(one), _span(other)):
        return False
    return bool(np.intersect1d(_bytes(one), _bytes(other)).size)


def _bytes(value: Any) -> np.ndarray:
    """Return the address of each byte of each element."""
    first, strides, item = _layout(value)
    found = np.arange(first, first + item)
    for size, stride in zip(value.shape, strides, strict=True):
        steps = np.arange(size if stride else 1) * stride
        found = np.add.outer(found, steps).ravel()
    return found


def _layout(value: Any) -> tuple[int, tuple[int, ...], int]:
    """Return the address of the first element, the strides in bytes, and the size of an element in bytes."""
    if isinstance(value, Tensor):
        size = value.element_size()
        return value.data_ptr(), tuple(stride * size for stride in value.stride()), size
    return value.__array_interface__["data"][0], value.strides, value.itemsize
