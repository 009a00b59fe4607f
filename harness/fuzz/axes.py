"""The values that drawn cases may have for every key. Extend this module for a new key.

Keys are the dotted names of fields of ``LayerSpec`` and ``CacheSpec``, and some about the batch, which
:mod:`attncheck.harness.fuzz.drawing` turns into requests. A field of type bool, Enum or Literal needs no entry: all its
values are drawn. Any other field needs an entry in ``VALUES``, or in ``NOT_DRAWN`` with its reason; a test enforces
this. The first value of a key is its plain value. A value may be a function of the choice so far; keys it depends on
precede it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from attncheck.reference.spec import (
    BlockTableSpec,
    CacheSpec,
    CausalConv1dOptions,
    DCPOptions,
    FastPrefillOptions,
    LayerSpec,
    MicroBatchOptions,
    MLASpec,
    OutputQuantSpec,
    PathSpec,
    SpecDecodeOptions,
    SplitKVOptions,
    StridesSpec,
    TreeOptions,
)

Axes = Mapping[str, tuple[Any, ...]]
"""The values of each key, the plain one first."""

Choice = Mapping[str, Any]
"""The chosen values of keys; keys that are missing have their plain value."""


def _per_head(key: str, numbers: tuple[float, ...]) -> Callable[[Choice], tuple[float, ...]]:
    """Return a value with one of ``numbers`` for each head; ``key``: the key with the number of heads."""

    def value(choice: Choice) -> tuple[float, ...]:
        return tuple(numbers[head % len(numbers)] for head in range(choice[key]))

    value.__name__ = f"per_head_{numbers[0]}"
    return value


def _at_element_2_31(choice: Choice) -> int:
    """Return a first page just below element 2^31 of the keys, so that 32-bit offsets overflow in the batch.

    A host reserves such a pool and does not fill it.
    """
    size = choice["cache.block_size"] * choice["layer.num_kv_heads"] * choice["layer.head_size"]
    return max(2**31 // int(size) - 1, 1)


def _path(name: str, options: Any = None) -> PathSpec:
    return PathSpec(name=name, options=options)


GROUP = "layer.group"
"""Query heads per KV head; multiplied by ``layer.num_kv_heads`` it gives ``layer.num_heads``."""

VALUES: Axes = MappingProxyType(
    {
        "layer.num_kv_heads": (1, 2, 3, 4),
        GROUP: (1, 2, 3, 4, 7, 8),
        "layer.head_size": (64, 32, 16, 8, 80, 96, 112, 128, 192, 256),
        "layer.head_size_v": (None, 16, 32, 64, 128),
        "layer.scale": (None, 0.03, 0.4, 1.0),
        "layer.sliding_window": (None, 1, 2, 8, 16, 17, 31, 64, 100),
        "layer.logits_soft_cap": (None, 0.0, 5.0, 30.0),
        "layer.alibi": (False, True, _per_head("layer.num_heads", (0.5, 0.03, 0.0, 0.2))),
        "layer.sinks": (False, True, _per_head("layer.num_heads", (2.0, -1.5, 0.0, 4.0))),
        "layer.sinks_dtype": (None, "float32"),
        "layer.attn_chunk_size": (None, 8, 16, 32, 48),
        "layer.mla": (
            None,
            MLASpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
            MLASpec(kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, workspace=32),
        ),
        "layer.output_quant": (None, OutputQuantSpec(scale=0.02), OutputQuantSpec(scale=0.25)),
        "cache.block_size": (16, 1, 4, 8, 12, 32, 64, 128),
        "cache.k_scale": (1.0, 0.5, 0.037, _per_head("layer.num_kv_heads", (0.25, 0.6, 0.11))),
        "cache.v_scale": (1.0, 0.25, 0.083, _per_head("layer.num_kv_heads", (0.5, 0.07, 0.3))),
        "cache.q_scale": (1.0, 0.3),
        "cache.first_block": (None, 2, 37, 32760, 65530, _at_element_2_31),
        "padding.requests": (0, 1, 3),
        "padding.tokens": (0, 1, 5, 17),
        "padding.unmapped_tokens": (0, 1, 8),
        "padding.key_rows": (0, 2),
        "batch.block_table": (
            BlockTableSpec(),
            BlockTableSpec(extra_columns=5),
            BlockTableSpec(row_gap=3),
            BlockTableSpec(null_pages=True),
        ),
        "batch.requests": (1, 2, 3, 5, 9),
        "batch.queries": ("mixed", "one", "uniform", "prompts"),
        "batch.contexts": ("mixed", "none", "edges", "long", "fewer keys than rows", "beyond 16 bits"),
        "batch.shared_prefix": (False, True),
        "batch.order": ("as drawn", "short first", "long first"),
        "path": (
            None,
            _path("spec_decode", SpecDecodeOptions(num_speculative_tokens=1)),
            _path("spec_decode", SpecDecodeOptions(num_speculative_tokens=3)),
            _path("tree", TreeOptions()),
            _path("tree", TreeOptions(parents=(-1, 0, 0, 1, 2, 2))),
            _path("local"),
            _path("cascade"),
            _path("split_kv", SplitKVOptions()),
            _path("split_kv", SplitKVOptions(parts=3)),
            _path("dcp", DCPOptions()),
            _path("dcp", DCPOptions(size=3, interleave=4)),
            _path("micro_batch", MicroBatchOptions(cuts=(1,))),
            _path("fast_prefill", FastPrefillOptions()),
            _path("fast_prefill", FastPrefillOptions(rows=3)),
            _path("merge"),
            _path("causal_conv1d", CausalConv1dOptions()),
            _path("causal_conv1d", CausalConv1dOptions(channels=65, width=2, bias=False)),
        ),
        "after": (False, True),
        "layers": (False, True),
        "strides": (
            None,
            StridesSpec(query="contiguous", key="padded", value="offset"),
            StridesSpec(query="padded", key="odd", value="fused", output="fused"),
            StridesSpec(query="transposed", key="transposed", value="contiguous", output="transposed"),
            StridesSpec(query="odd", key="offset", value="transposed", output="padded"),
        ),
        "inputs": (None, ("needles", "coordinates"), ("needles", "large_scores"), ("needles", "equal_scores", "views")),
    }
)
"""The values of keys whose types do not enumerate them."""

NOT_DRAWN: Mapping[str, str] = MappingProxyType(
    {
        "layer.num_heads": f"follows from {GROUP}",
        "cache.num_blocks": "the default has room for the batch; less is refused, more is what first_block needs",
        "batch.requests.query_len": "batch.queries, in drawing.py",
        "batch.requests.seq_len": "batch.contexts, in drawing.py",
        "batch.requests.count": "equal requests side by side test the same",
        "batch.requests.encoder_len": "follows from layer.attn_type",
        "batch.requests.shared_prefix": "batch.shared_prefix",
        "batch.padding": "padding.requests and padding.tokens",
        "batch.path": "path",
        "checks": "an option of the command",
        "tolerance": "a case may loosen its budget, and none of these needs it",
        "weight": "how often a batch came: it changes no input",
    }
)
"""Fields of a case that are not keys: what determines them, or why nothing does."""

GUIDED: tuple[str, ...] = (
    "layer.head_size",
    "cache.block_size",
    "layer.sliding_window",
    "layer.attn_chunk_size",
    "batch.requests",
)
"""Keys that also get the constants of the backend's code, and their neighbours."""

_MOST = MappingProxyType(
    {
        "layer.head_size": 256,
        "cache.block_size": 256,
        "layer.sliding_window": 4096,
        "layer.attn_chunk_size": 4096,
        "batch.requests": 65,
    }
)


_MOST_INTERPRETED = MappingProxyType(
    {
        "layer.num_kv_heads": 2,
        GROUP: 4,
        "layer.head_size": 64,
        "layer.head_size_v": 64,
        "layer.sliding_window": 64,
        "layer.attn_chunk_size": 64,
        "cache.block_size": 32,
        "batch.requests": 3,
    }
)


def all_axes(constants: Iterable[int] = ()) -> dict[str, tuple[Any, ...]]:
    """Return the values of every key; ``constants``: numbers of the backend's code, tried with -1, 0 and +1."""
    found = {
        f"{name}.{field.name}": _typed_values(get_type_hints(spec)[field.name], field.default)
        for name, spec in (("layer", LayerSpec), ("cache", CacheSpec))
        for field in fields(spec)
        if f"{name}.{field.name}" not in (VALUES.keys() | NOT_DRAWN.keys())
    }
    axes = dict(VALUES) | found
    for key in GUIDED:
        near = sorted({n for c in constants for n in (c - 1, c, c + 1) if 1 <= n <= _MOST[key]})
        axes[key] = tuple(dict.fromkeys((*axes[key], *near)))
    return axes


def few_and_small(axes: Axes) -> dict[str, tuple[Any, ...]]:
    """Return the values that interpreted kernels compute within seconds; the plain value of each key always stays."""

    def is_small(key: str, value: Any) -> bool:
        return value not in ("long", "beyond 16 bits") and not (
            isinstance(value, int) and value > _MOST_INTERPRETED.get(key, value)
        )

    return {key: (values[0], *(each for each in values[1:] if is_small(key, each))) for key, values in axes.items()}


def plain(axes: Axes) -> dict[str, Any]:
    """Return the plain value of each key."""
    return {key: values[0] for key, values in axes.items()}


def _typed_values(hint: Any, default: Any) -> tuple[Any, ...]:
    """Return all values of a bool, an Enum, a Literal or a union of these with None, the default first.

    Raises:
        TypeError: the type does not enumerate its values; the key belongs in ``VALUES`` or ``NOT_DRAWN``.
    """
    if get_origin(hint) is Literal:
        values: tuple[Any, ...] = get_args(hint)
    elif hint is bool:
        values = (False, True)
    elif hint is type(None):
        values = (None,)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        values = tuple(hint)
    elif get_args(hint):
        values = tuple(chain.from_iterable(_typed_values(each, MISSING) for each in get_args(hint)))
    else:
        raise TypeError(f"{hint}: give the values of this field in VALUES, or the reason in NOT_DRAWN")
    return values if default is MISSING else tuple(dict.fromkeys((default, *values)))
