"""The answer of a function as plain values: its result or refusal, and its arguments after the call.

Two answers are compared field by field, so that a difference has a place (``returned.seq_lens[3]``) and both values. A
reported maximum above the truth is an upper bound, which vLLM allows everywhere; one below is wrong. Any exception
counts as a refusal; its type is left to the implementation.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.errors import shorten

UPPER_BOUNDS = frozenset({"max_query_len", "max_seq_len"})
"""Fields whose value may exceed the truth."""

REFUSAL = "refusal"
"""The place of a difference where only one side refuses."""

ABSENT = "nothing of that name"
"""The value reported for a missing attribute."""


@dataclass(frozen=True)
class Refusal:
    """The function raised. ``error``: the name of the exception's class."""

    error: str
    message: str

    def __str__(self) -> str:
        first = next(iter(self.message.strip().splitlines()), "")
        return f"a refusal ({self.error}" + (f": {_cut(first)})" if first else ")")


@dataclass(frozen=True, eq=False)
class Values:
    """A snapshot of a tensor or array: its dtype, and a copy on the host."""

    dtype: str
    values: Tensor

    def __str__(self) -> str:
        return f"{self.dtype} {shorten(self.values.tolist())}"

    def first_difference(self, other: "Values") -> tuple[int, ...] | None:
        """Return the index of the first element that differs, or None if all are equal. The shapes must be equal."""
        unequal = (self.values != other.values).nonzero()
        return tuple(unequal[0].tolist()) if len(unequal) else None


class NumpyInt(int):
    """A value that was a NumPy integer; it equals a Python integer but has another type."""


@dataclass(frozen=True)
class ProviderAnswer:
    """``returned``: the result in plain values, or a :class:`Refusal`. ``arguments``: their values after the call."""

    returned: Any
    arguments: Any

    @property
    def refused(self) -> bool:
        """Whether the function raised."""
        return isinstance(self.returned, Refusal)


@dataclass(frozen=True)
class AnswerDifference:
    """One place where two answers differ. ``tolerated``: reported but not wrong, such as an upper bound."""

    place: str
    expected: str
    seen: str
    tolerated: bool = False

    def __str__(self) -> str:
        return f"{self.place}: expected {self.expected}; got {self.seen}"


def answer_of(call: Callable[..., Any], arguments: Mapping[str, Any]) -> ProviderAnswer:
    """Call ``call`` with these keywords; any exception except KeyboardInterrupt becomes a refusal."""
    returned: Any
    try:
        returned = plain_value(call(**arguments))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code)
        returned = Refusal(type(error).__name__, str(error))
    return ProviderAnswer(returned, plain_value(dict(arguments)))


def plain_value(value: Any) -> Any:
    """Return a snapshot of ``value`` in numbers, strings, lists, dicts and :class:`Values`; it shares no memory."""
    match value:
        case None | str():
            return value
        case Enum():
            return str(value)
        case bool() | np.bool_():
            return bool(value)
        case np.integer():
            return NumpyInt(value)
        case int():
            return int(value)
        case float() | np.floating():
            return float(value)
        case Tensor():
            return Values(str(value.dtype).removeprefix("torch."), value.detach().cpu().clone())
        case np.ndarray():
            return Values(str(value.dtype), torch.from_numpy(value.copy()))
        case slice():
            return {name: plain_value(getattr(value, name)) for name in ("start", "stop", "step")}
        case range() | torch.device() | torch.dtype():
            return str(value)
        case list() | tuple():
            return [plain_value(item) for item in value]
        case Mapping():
            return {key: plain_value(item) for key, item in value.items()}
        case type():
            return value.__name__
        case SimpleNamespace():
            return {name: plain_value(item) for name, item in vars(value).items()}
    if is_dataclass(value):
        return {field.name: plain_value(getattr(value, field.name, ABSENT)) for field in fields(value)}
    return f"a {type(value).__name__}"


def answer_differences(expected: ProviderAnswer, seen: ProviderAnswer) -> list[AnswerDifference]:
    """Return the differences of ``seen`` from ``expected``. If both refuse, only the arguments are compared."""
    if expected.refused and seen.refused:
        found: list[AnswerDifference] = []
    elif expected.refused or seen.refused:
        found = [AnswerDifference(REFUSAL, _format(expected.returned), _format(seen.returned))]
    else:
        found = list(_differences("returned", expected.returned, seen.returned))
    return found + list(_differences("arguments", expected.arguments, seen.arguments))


def _differences(place: str, expected: Any, seen: Any) -> Iterator[AnswerDifference]:
    match expected, seen:
        case Values(), Values():
            yield from _in_values(place, expected, seen)
        case dict(), dict():
            for key, value in expected.items():
                yield from _differences(f"{place}.{key}", value, seen.get(key, ABSENT))
        case int(), NumpyInt() if type(expected) is int and expected == seen:
            yield AnswerDifference(f"{place}.type", "int", "an integer of numpy's", tolerated=True)
        case list(), list() if len(expected) == len(seen):
            for index, (ours, theirs) in enumerate(zip(expected, seen, strict=True)):
                yield from _differences(f"{place}[{index}]", ours, theirs)
        case _:
            if type(expected) is not type(seen) or expected != seen:
                bound = is_bound(place) and isinstance(expected, int) and isinstance(seen, int) and seen > expected
                yield AnswerDifference(place, _format(expected), _format(seen), tolerated=bound)


def is_bound(place: str) -> bool:
    """Return whether the value at ``place`` may exceed the truth."""
    return place.rpartition(".")[2] in UPPER_BOUNDS


def _in_values(place: str, expected: Values, seen: Values) -> Iterator[AnswerDifference]:
    if expected.values.shape != seen.values.shape:
        yield AnswerDifference(place, _with_shape(expected), _with_shape(seen))
        return
    if expected.dtype != seen.dtype:
        yield AnswerDifference(f"{place}.dtype", expected.dtype, seen.dtype)
    index = expected.first_difference(seen)
    if index is not None:
        where = "".join(f"[{axis}]" for axis in index)
        ours, theirs = expected.values[index].item(), seen.values[index].item()
        yield AnswerDifference(f"{place}{where}", f"{ours} of {expected}", f"{theirs} of {seen}")


def _cut(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _with_shape(values: Values) -> str:
    return f"{values} of shape {list(values.values.shape)}"


def _format(value: Any) -> str:
    """Return a value on one line, cut if it is long."""
    match value:
        case Refusal() | Values():
            return str(value)
        case dict():
            return _cut(", ".join(f"{key}={_format(item)}" for key, item in value.items()))
        case list():
            return _cut(f"[{', '.join(map(_format, value))}]")
        case str():
            return value
        case _:
            return shorten(value)
