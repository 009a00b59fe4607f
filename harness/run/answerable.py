"""Which questions this version can put at all. Must not know: backends."""

from attncheck.cases.model import Case

ANSWERED_PATHS = frozenset(
    {
        "paged",
        "encoder_only",
        "cross",
        "mla",
        "fast_prefill",
        "spec_decode",
        "tree",
        "local",
        "cascade",
        "split_kv",
        "dcp",
        "micro_batch",
        "merge",
        "causal_conv1d",
    }
)

MERGED_PATHS = frozenset({"cascade", "split_kv", "dcp"})
"""Paths whose calls may see a part of the keys each."""

LATENT_PATHS = frozenset({"mla", "spec_decode", "cascade", "split_kv", "dcp", "micro_batch"})
"""Of layers with a latent cache."""


def unanswered_reasons(case: Case) -> tuple[str, ...]:
    """Why no code of this version can examine ``case``; empty: it can."""
    layer, path = case.layer, case.batch.path.name
    reasons = []
    if path not in ANSWERED_PATHS:
        reasons.append(f"path {path!r} is not examined by this version of attncheck")
    if layer.mla is not None and path not in LATENT_PATHS:
        reasons.append(f"latent attention by the path {path!r} is not examined by this version of attncheck")
    if layer.mla is not None and layer.output_quant is not None:
        reasons.append("output_quant of latent attention is not examined by this version of attncheck")
    if layer.output_quant is not None and path in MERGED_PATHS:
        reasons.append(f"output_quant by the path {path!r}: codes of parts of the keys cannot be merged")
    return tuple(reasons)
