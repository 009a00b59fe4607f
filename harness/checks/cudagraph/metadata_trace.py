"""Record where each tensor of metadata is in memory and the value of each number, at one moment.

Holds no tensor, so that memory a builder releases is freed. The result is used for explanations, never for verdicts,
because objects that cannot be inspected, or that exceed the limits below, are missing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_DEEPEST, _WIDEST, _MOST = 6, 1_000, 10_000
"""Limits of the search: depth of nesting, parts of one object, and leaves or objects in total."""

Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape, strides."""


_NOWHERE: Place = (-1, (), ())

_HANDED = "metadata.common"
"""Path at which backends by convention keep the common metadata."""


class _Gone:
    def __repr__(self) -> str:
        return "gone"


_GONE = _Gone()


@dataclass(frozen=True)
class MetadataTrace:
    """Places of tensors, and values of numbers on the host, by their path from ``metadata``."""

    places: Mapping[str, Place]
    numbers: Mapping[str, object]

    def moved(self, later: "MetadataTrace") -> list[str]:
        """Return paths of tensors that have another address in ``later`` or are missing there."""
        return [path for path, place in self.places.items() if later.places.get(path, _NOWHERE)[0] != place[0]]

    def reshaped(self, later: "MetadataTrace") -> list[str]:
        """Return paths of tensors with the same address in ``later`` but another shape or other strides."""
        pairs = ((path, place, later.places.get(path, _NOWHERE)) for path, place in self.places.items())
        return [path for path, was, now in pairs if was[0] == now[0] and was != now]

    def changed(self, later: "MetadataTrace") -> list[str]:
        """Return texts for numbers that differ in ``later``, with both values; only the first one of a sequence.

        Numbers of the backend come before those of the common metadata, whose maxima are only upper bounds.
        """
        first: dict[str, str] = {}
        for path, was in self.numbers.items():
            now = later.numbers.get(path, _GONE)
            if was != now:
                name = path.partition("[")[0]
                first.setdefault(name, f"{path} was {was!r} at capture and is {now!r} now")
        return [text for _, text in sorted(first.items(), key=lambda item: item[0].startswith(_HANDED))]

    def path_of(self, start: int, end: int) -> str | None:
        """Return the path of the tensor at an address in ``[start, end)``, or None if there is none."""
        return next((path for path, (address, *_) in self.places.items() if start <= address < end), None)


def trace(parts: Mapping[str, object]) -> MetadataTrace:
    """Return the trace of the result of :func:`parts_of`."""
    places, numbers = {}, {}
    for path, value in parts.items():
        if isinstance(value, Tensor):
            places[path] = _place(value)
        else:
            numbers[path] = value
    return MetadataTrace(places, numbers)


def parts_of(metadata: object) -> dict[str, object]:
    """Return the tensors and numbers in the metadata that ``build`` returned, by path."""
    return dict(islice(_leaves(metadata, "metadata", 0, set()), _MOST))


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _leaves(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, object]]:
    kind = type(value)  # isinstance would query a proxy for its __class__, which may raise
    if issubclass(kind, Tensor):
        if value.layout == torch.strided and not value.is_nested:
            yield path, value
    elif issubclass(kind, bool | int | float | str) or value is None:
        yield path, value
    elif not issubclass(kind, type | Enum | ModuleType) and depth < _DEEPEST and id(value) not in seen:
        if len(seen) == _MOST:
            return
        seen.add(id(value))
        try:
            parts = list(islice(_parts(value), _WIDEST))
        except Exception:  # noqa: BLE001 (foreign code may raise anything; omit the object)
            return
        for name, part in parts:
            yield from _leaves(part, f"{path}{name}", depth + 1, seen)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield (suffix of the path, value) for each part of ``value``."""
    match value:
        case Mapping():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple():
            yield from ((f"[{index}]", part) for index, part in enumerate(value))
        case _:
            slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
            named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            yield from ((f".{name}", part) for name, part in {**named, **getattr(value, "__dict__", {})}.items())
