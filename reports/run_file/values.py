"""What all written values share. Must not know: what they say."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, without unknown keys; NaN and infinities survive the way through JSON (as strings)."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")
