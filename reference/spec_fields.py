"""Helpers that describe the fields of the specs for pydantic without importing it, and a check that specs share."""

import math
from dataclasses import field
from typing import Any

from attncheck.errors import SpecError

STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""Configuration that pydantic reads from a spec: no unknown key, no implicit conversion, no infinity or NaN."""

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Magnitudes between which float32 keeps its full precision (the normal numbers)."""


def positive(description: str) -> Any:
    """Return a required field that must be above 0."""
    return field(metadata={"description": description, "gt": 0})


def option(default: Any, description: str, **constraints: Any) -> Any:
    """Return a field with a default; ``constraints`` are pydantic's (gt, ge, le)."""
    return field(default=default, metadata={"description": description, **constraints})


def refuse_beyond_float32(name: str, given: float | tuple[float, ...], *, is_factor: bool = False) -> None:
    """Raise :class:`SpecError` if a number, or one of several, does not fit float32, the type that kernels take.

    ``is_factor``: the number is used as a divisor, so subnormal numbers are rejected too. An infinity is accepted.
    """
    least = _SMALLEST if is_factor else 0.0
    for number in given if isinstance(given, tuple) else (given,):
        if abs(number) < least or (math.isfinite(number) and abs(number) > _LARGEST):
            raise SpecError(
                "kernels are given it as float32, which cannot hold it",
                field=name,
                value=given,
                allowed=f"stay within {least:.2g} and {_LARGEST:.2g}" if is_factor else f"stay below {_LARGEST:.2g}",
            )
