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
            if value is part or np.may_share_memory(_storage(value), _storage(part)):
                found[place] = Alias(owner, value is part and not isinstance(part, list | dict))
                break
        else:
            if not _has_memory(part):
                continue
            sharer = next((owner for owner, value in made if np.shares_memory(_elements(value), _elements(part))), None)
            if sharer is not None:
                found[place] = Alias(sharer, is_same=False)
            elif place.rpartition(".")[2] not in _TWINS:
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


def _storage(value: Any) -> np.ndarray:
    """Return the whole storage of a tensor, as bytes, or an array itself; an empty array for anything else."""
    match value:
        case Tensor():
            memory = value.untyped_storage()
            return _at(memory.data_ptr(), (memory.nbytes(),), (1,), 1)
        case np.ndarray():
            return value
    return np.empty(0)


def _elements(value: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    size = value.element_size()
    return _at(value.data_ptr(), tuple(value.shape), tuple(stride * size for stride in value.stride()), size)


def _at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> np.ndarray:
    """Return an array at these addresses, for comparison alone: they may be those of a GPU. Strides are in bytes."""
    if not address:  # it has no memory
        return np.empty(0)
    described = {"data": (address, True), "shape": shape, "strides": strides, "typestr": f"|V{size}", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=described))
