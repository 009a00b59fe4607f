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
    """Return what the parts of ``result`` share, by place. Of an earlier result and the parts before, memory counts."""
    owners = [part for name, value in arguments.items() for part in _parts(f"its argument {name}", value)]
    owners += [(EARLIER, value) for _, value in _parts("", earlier) if _has_memory(value)]
    known = [(owner, value, _addresses(value)) for owner, value in owners]
    found = {}
    for place, part in _parts("returned", result):
        own = _addresses(part)
        for owner, value, theirs in known:
            if value is part or max(own.start, theirs.start) < min(own.stop, theirs.stop):
                is_argument = owner not in (EARLIER, _ITSELF)
                found[place] = Alias(owner, value is part and is_argument and not isinstance(part, list | dict))
                break
        else:
            if _has_memory(part) and place.rpartition(".")[2] not in _TWINS:
                known.append((_ITSELF, part, own))
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


def _addresses(value: Any) -> range:
    """Return the addresses of the memory of a tensor or array; an empty range for anything else."""
    match value:
        case Tensor():
            memory = value.untyped_storage()
            return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
        case np.ndarray():
            first = value.__array_interface__["data"][0]
            return range(first, first + value.nbytes)
    return range(0)
