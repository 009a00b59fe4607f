"""Names of checks, features and modifiers, and what each check can and cannot detect.

Part of :mod:`attncheck.reference.spec`; imports no torch, because listing and reporting need nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckInfo:
    """What a check establishes and what it cannot detect, one line each. ``applies_to``: the kind of code it examines.

    ``by_name_only``: the check runs only if it is named, and is not part of "all checks".
    """

    establishes: str
    cannot_see: str
    applies_to: Literal["backend", "provider"] = "backend"
    by_name_only: bool = False


CHECKS: Mapping[str, CheckInfo] = {
    "numerics": CheckInfo(
        "every real output row of every head lies within the error budget of the float64 truth",
        "errors below the rounding of the layer's dtype, and keys whose weight lies below it",
    ),
    "lse": CheckInfo(
        "the log-sum-exp is right: natural log, -inf exactly where a row sees nothing",
        "whether the backend uses the same LSE when it merges partial results itself",
    ),
    "cache_write": CheckInfo(
        "exactly the mapped slots hold exactly the new K/V, slot -1 wrote nowhere, inputs are unchanged",
        "writes outside the cache's own memory",
    ),
    "containment": CheckInfo(
        "NaN, Inf and huge values in memory the batch does not own never reach the output",
        "reads whose result is discarded",
    ),
    "features": CheckInfo(
        "a modifier turned off or moved, on another layer of the process, changes the output as it changes the truth",
        "what is kept between layers that differ in something else",
    ),
    "determinism": CheckInfo(
        "equal inputs give equal bits in output, LSE and cache, on the same impl and on a new one",
        "what differs between processes or machines",
    ),
    "invariance": CheckInfo(
        "what must not matter does not: strides, order and composition of the batch, pages, spare room, earlier steps",
        "what the variations of a case leave alone, and rows that are wrong in the first step",
    ),
    "builder": CheckInfo(
        "build changes no shared metadata, waits for no device where that is declared, and is right beside others",
        "what a builder changes outside of the common metadata",
    ),
    "cudagraph": CheckInfo(
        "the declared AttentionCGSupport level is the measured one: captures and replays of its kinds of batches",
        "batches larger than the probes', and work that is hidden from the recorder",
    ),
    "refusals": CheckInfo(
        "what is declared runs; what is not declared is refused, or answered right",
        "declarations that no case of the run needs",
    ),
    "timing": CheckInfo(
        "how long build and forward take, with their spread, and that what was timed is the honest, right answer",
        "other machines and sizes, and a backend that recognises attncheck's calls",
        by_name_only=True,
    ),
    "utilities": CheckInfo(
        "a provider's metadata functions answer as the reference does, refuse what it refuses, change no argument",
        "batches that are neither written nor drawn, and how fast a function is",
        applies_to="provider",
    ),
}
"""All checks, in the order of reports. ``harness/checks`` has a module for each check of a backend."""

FORMER_CHECKS: Mapping[str, str] = {"claims": "refusals"}
"""Former names of checks, mapped to the current ones."""

BACKEND_CHECKS: tuple[str, ...] = tuple(name for name, info in CHECKS.items() if info.applies_to == "backend")
"""The checks that a case may name."""

DEFAULT_CHECKS: tuple[str, ...] = tuple(name for name in BACKEND_CHECKS if not CHECKS[name].by_name_only)
"""The checks that run if neither the case nor the run names any."""


@dataclass(frozen=True)
class Modifier:
    """A field of a layer that changes its scores or hides keys.

    ``feature``: the feature that a backend declares to support it. ``from_query``: depends on the distance to the
    query.
    """

    feature: str
    from_query: bool = False


MODIFIERS: Mapping[str, Modifier] = {
    "sliding_window": Modifier("sliding_window", from_query=True),
    "logits_soft_cap": Modifier("logits_soft_cap"),
    "alibi": Modifier("alibi", from_query=True),
    "sinks": Modifier("sinks"),
    "attn_chunk_size": Modifier("local", from_query=True),
}
"""The modifiers, by field of ``LayerSpec``. None, False and 0 turn one off. Latent attention defines none of them."""

FEATURES: tuple[str, ...] = (
    "sliding_window",
    "logits_soft_cap",
    "alibi",
    "alibi_sqrt",
    "alibi_non_causal",
    "sinks",
    "non_causal",
    "head_size_v",
    "lse",
    "cascade",
    "local",
    "kv_sharing",
    "fp8_kv",
    "fp8_per_head",
    "fp8_query",
    "output_quant",
    "mla",
    "tree",
    "tree_depth",
    "short_keys",
    "merge_nan",
)
"""Everything a backend may declare in ``features``."""

FORMS: tuple[str, ...] = (
    "attn_type",
    "dtype",
    "head_size",
    "block_size",
    "layout",
    "kv_cache_dtype",
    "group_size",
    "path",
)
"""Sizes and forms of a layer and its cache by which cases are counted, besides the features they need."""
