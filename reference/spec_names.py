"""Names of checks, features and modifiers, and what each check can and cannot detect.

Part of :mod:`attncheck.reference.spec`; imports no torch, because listing and reporting need nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckInfo:
    """What a check establishes and what it cannot detect, one line each. ``applies_to``: the kind of code it examines.

    ``by_default``: where the check runs if the run and the case name no check.
    """

    establishes: str
    cannot_see: str
    applies_to: Literal["backend", "provider"] = "backend"
    by_default: Literal["everywhere", "on CUDA", "nowhere"] = "everywhere"


CHECKS: Mapping[str, CheckInfo] = {
    "numerics": CheckInfo(
        "every output row of every head is within the error budget of the float64 reference",
        "errors below the rounding of the layer's dtype, and keys whose weight is below it",
    ),
    "lse": CheckInfo(
        "the log-sum-exp is right, and -inf exactly where a row sees no key",
        "whether the backend uses the same LSE when it merges partial results itself",
    ),
    "cache_write": CheckInfo(
        "the mapped slots hold exactly the new K/V, no other byte of the cache changes, inputs are unchanged",
        "writes outside the cache",
    ),
    "containment": CheckInfo(
        "NaN, Inf and huge values in memory that the batch does not own do not change the output",
        "reads whose result is discarded",
    ),
    "features": CheckInfo(
        "another layer in the same process, with one modifier off or moved, gets its own right output",
        "state shared by layers that differ in something else",
    ),
    "determinism": CheckInfo(
        "equal inputs give equal bits in output, LSE and cache, on the same impl and on a new one",
        "differences between processes or machines",
    ),
    "invariance": CheckInfo(
        "right rows stay right with other strides, request orders, pages, padding, layers and earlier steps",
        "properties that no variation of a case changes, and rows that are wrong in the first step",
    ),
    "builder": CheckInfo(
        "build changes no shared metadata, waits for no device if that is declared, and works beside a second builder",
        "changes outside the common metadata",
    ),
    "streams": CheckInfo(
        "forward works in the order of the current stream, also if that is not the default stream",
        "work on another stream that ends early enough by chance, and the order of work in build",
        by_default="on CUDA",
    ),
    "cudagraph": CheckInfo(
        "the measured AttentionCGSupport level, from captures and replays, is at least the declared one",
        "batches larger than those of its probes, and work hidden from the recorder",
    ),
    "refusals": CheckInfo(
        "declared cases run; undeclared cases are refused, or computed correctly",
        "declarations that no case of the run needs",
    ),
    "timing": CheckInfo(
        "how long build and forward take, with the spread; every timed output is right",
        "other machines and sizes, and a backend that recognises attncheck's calls",
        by_default="nowhere",
    ),
    "utilities": CheckInfo(
        "metadata functions of a provider return and refuse the same as the reference, and change no argument",
        "batches that are neither in a suite nor drawn, and the speed of a function",
        applies_to="provider",
    ),
}
"""All checks, in the order of reports. ``harness/checks`` has a module for each check of a backend."""

FORMER_CHECKS: Mapping[str, str] = {"claims": "refusals"}
"""Former names of checks, mapped to the current ones."""

BACKEND_CHECKS: tuple[str, ...] = tuple(name for name, info in CHECKS.items() if info.applies_to == "backend")
"""The checks that a case may name."""

DEFAULT_CHECKS: tuple[str, ...] = tuple(name for name in BACKEND_CHECKS if CHECKS[name].by_default == "everywhere")
"""The checks that run on every device if neither the case nor the run names any."""


def default_checks(device: str) -> tuple[str, ...]:
    """Return the checks that run on ``device`` if neither the case nor the run names any, in the order of reports."""
    on_cuda = ("on CUDA",) if device.startswith("cuda") else ()
    return tuple(name for name in BACKEND_CHECKS if CHECKS[name].by_default in ("everywhere", *on_cuda))


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
