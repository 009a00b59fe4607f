"""How the fields of the specs are described to whoever validates them, without importing the validator.

Must not know: what any field means.
"""

from dataclasses import field
from typing import Any

STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""How pydantic, which reads this attribute, validates a spec: no unknown key, no silent conversion, no infinity."""


def positive(description: str) -> Any:
    """A required field that must be above 0."""
    return field(metadata={"description": description, "gt": 0})


def option(default: Any, description: str, **constraints: Any) -> Any:
    """A field with a default; ``constraints`` as pydantic has them (gt, ge, le)."""
    return field(default=default, metadata={"description": description, **constraints})
