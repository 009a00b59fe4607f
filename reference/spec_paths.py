"""The paths by which a case calls a backend, and the options of each. Part of :mod:`attncheck.reference.spec`.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from attncheck.errors import SpecError
from attncheck.reference.spec_fields import STRICT, option


@dataclass(frozen=True, kw_only=True)
class FastPrefillOptions:
    """``fast_prefill``: only the rows that yield logits are computed."""

    __pydantic_config__: ClassVar = STRICT
    rows: int = option(1, "last rows of each request that are computed", gt=0)


@dataclass(frozen=True, kw_only=True)
class SpecDecodeOptions:
    """``spec_decode``: verification of draft tokens, every request with 1 + num_speculative_tokens rows."""

    __pydantic_config__: ClassVar = STRICT
    num_speculative_tokens: int = option(3, "draft tokens per request", gt=0)


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """``tree``: draft tokens form a tree."""

    __pydantic_config__: ClassVar = STRICT
    parents: tuple[int, ...] = option((-1, 0, 0, 1), "parent of each new row, -1 for a root; parents come first")

    def __post_init__(self) -> None:
        for row, parent in enumerate(self.parents):
            if not -1 <= parent < row:
                raise SpecError(
                    f"row {row} names parent {parent}",
                    field="parents",
                    value=self.parents,
                    allowed="a parent is -1 or an earlier row",
                )


@dataclass(frozen=True, kw_only=True)
class SplitKVOptions:
    """``split_kv``: the keys are cut into parts, whose results are merged by their LSE."""

    __pydantic_config__: ClassVar = STRICT
    parts: int = option(2, "parts the keys are cut into", gt=0)


@dataclass(frozen=True, kw_only=True)
class DCPOptions:
    """``dcp``: decode context parallelism, the keys spread over ranks."""

    __pydantic_config__: ClassVar = STRICT
    size: int = option(2, "ranks", gt=0)
    interleave: int = option(1, "consecutive positions a rank holds", gt=0)


@dataclass(frozen=True, kw_only=True)
class MicroBatchOptions:
    """``micro_batch``: the rows are cut at token positions and computed part by part."""

    __pydantic_config__: ClassVar = STRICT
    cuts: tuple[int, ...] = field(metadata={"description": "token positions where the batch is cut, increasing"})


@dataclass(frozen=True, kw_only=True)
class CausalConv1dOptions:
    """``causal_conv1d``: the short convolution of state-space layers."""

    __pydantic_config__: ClassVar = STRICT
    channels: int = option(64, "channels", gt=0)
    width: int = option(4, "taps", gt=0)
    activation: Literal["silu"] | None = option("silu", "activation after the convolution")
    bias: bool = option(True, "whether a bias is added")


PathOptions = (
    FastPrefillOptions
    | SpecDecodeOptions
    | TreeOptions
    | SplitKVOptions
    | DCPOptions
    | MicroBatchOptions
    | CausalConv1dOptions
)

PATH_OPTIONS: Mapping[str, type[PathOptions] | None] = {
    "paged": None,
    "encoder_only": None,
    "cross": None,
    "mla": None,
    "fast_prefill": FastPrefillOptions,
    "spec_decode": SpecDecodeOptions,
    "tree": TreeOptions,
    "local": None,
    "cascade": None,
    "split_kv": SplitKVOptions,
    "dcp": DCPOptions,
    "micro_batch": MicroBatchOptions,
    "merge": None,
    "causal_conv1d": CausalConv1dOptions,
}
"""The class of the options of every path, or None if it has none."""

PATHS: tuple[str, ...] = tuple(PATH_OPTIONS)


@dataclass(frozen=True, kw_only=True)
class PathSpec:
    """The path of a case: a name of :data:`PATHS` and, if the path has options, their values."""

    name: str = "paged"
    options: PathOptions | None = None
