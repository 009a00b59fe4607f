"""How the fields of the specs are described to whoever validates them, without importing the validator.

Beside it stands a refusal that several of them share.
"""

import math
from dataclasses import field
from typing import Any

from attncheck.errors import SpecError

STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""How pydantic, which reads this attribute, validates a spec: no unknown key, no silent conversion, no infinity."""

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Magnitudes between which float32 keeps all its bits."""


def positive(description: str) -> Any:
    """A required field that must be above 0."""
    return field(metadata={"description": description, "gt": 0})


def option(default: Any, description: str, **constraints: Any) -> Any:
    """A field with a default; ``constraints`` as pydantic has them (gt, ge, le)."""
    return field(default=default, metadata={"description": description, **constraints})


def refuse_beyond_float32(name: str, given: float | tuple[float, ...], *, is_factor: bool = False) -> None:
    """Raises :class:`SpecError` for a number (or one of several) that float32, as which kernels take it, cannot hold.

    ``is_factor``: it is divided by, and must keep its bits. An infinity stays what it is.
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
