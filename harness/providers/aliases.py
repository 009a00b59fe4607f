"""Memory and objects that the result of a function shares with its arguments or with an earlier result."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

FREE = frozenset({"seq_lens", "seq_lens_cpu", "num_computed_tokens_cpu"})
"""Fields that may share memory with an argument: where nothing is cut, or where the device is the host."""

SHARED = frozenset({"slot_mapping", "block_table_tensor"})
"""Fields that share memory with an argument if the reference's do, because a captured graph reads their buffers."""


EARLIER = "an earlier result"


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor, array, list, dict or dataclass within a value. ``place``: its path, such as ``returned.seq_lens``."""

    place: str
    value: Any

    @property
    def has_elements(self) -> bool:
        """Whether it is a tensor or an array."""
        return isinstance(self.value, Tensor | np.ndarray)

    @property
    def addresses(self) -> range:
        """The addresses of its memory; empty if it is no tensor or array."""
        match self.value:
            case Tensor():
                memory = self.value.untyped_storage()
                return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
            case np.ndarray():
                first = self.value.__array_interface__["data"][0]
                return range(first, first + self.value.nbytes)
        return range(0)


@dataclass(frozen=True)
class Alias:
    """What a part of a result shares. ``owner``: an argument, or an earlier result.

    ``is_same``: whether it is the same object, and more than a list or dict of its parts.
    """

    owner: str
    is_same: bool


def parts_of(place: str, value: Any) -> Iterator[Part]:
    """Yield the mutable parts of ``value``, itself included."""
    match value:
        case Tensor() | np.ndarray():
            yield Part(place, value)
            return
        case Mapping():
            members = {str(key): item for key, item in value.items()}
        case list() | tuple():
            members = {str(index): item for index, item in enumerate(value)}
        case SimpleNamespace():
            members = vars(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            members = {field.name: getattr(value, field.name, None) for field in fields(value)}
        case _:
            return
    if not isinstance(value, tuple):
        yield Part(place, value)
    for name, item in members.items():
        yield from parts_of(f"{place}.{name}", item)


def aliases_of(result: Any, arguments: Mapping[str, Any], earlier: Any) -> dict[str, Alias]:
    """Return what the parts of ``result`` share, by place. Only memory is compared with an earlier result."""
    given = [part for name, value in arguments.items() for part in parts_of(f"its argument {name}", value)]
    before = [Part(EARLIER, part.value) for part in parts_of("", earlier) if part.has_elements]
    found = {}
    for part in parts_of("returned", result):
        addresses = part.addresses
        for owner in (*given, *before):
            is_same = owner.value is part.value
            if is_same or _overlap(addresses, owner.addresses):
                found[part.place] = Alias(owner.place, is_same and not isinstance(part.value, list | dict))
                break
    return found


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def must_be_new(place: str) -> bool:
    """Return whether the part at ``place`` shares nothing where the reference's is new."""
    return place.rpartition(".")[2] not in FREE


def must_be_shared(place: str, alias: Alias) -> bool:
    """Return whether the part at ``place`` has the memory of an argument, as the reference's, which is ``alias``."""
    return alias.is_same or place.rpartition(".")[2] in SHARED
