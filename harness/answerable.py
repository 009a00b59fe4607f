"""Which questions this version can put at all. Must not know: backends."""

from attncheck.cases.model import Case

ANSWERED_PATHS = frozenset({"paged", "encoder_only", "cross", "merge"})


def unanswered_reasons(case: Case) -> tuple[str, ...]:
    """Why no code of this version can examine ``case``; empty: it can."""
    layer, cache, path = case.layer, case.cache, case.batch.path.name
    reasons = []
    if path not in ANSWERED_PATHS:
        reasons.append(f"path {path!r} is not examined by this version of attncheck")
    if layer.mla is not None and path != "mla":
        reasons.append("multi-head latent attention is not examined by this version of attncheck")
    if layer.attn_chunk_size is not None:
        reasons.append(f"attn_chunk_size {layer.attn_chunk_size}: local attention is not examined by this version")
    if layer.kv_sharing:
        reasons.append("kv_sharing: layers without a cache of their own are not examined by this version")
    if layer.output_quant is not None:
        reasons.append("output_quant: fused output quantisation is not examined by this version")
    if cache.kv_cache_dtype not in ("auto", layer.dtype):
        reasons.append(f"kv_cache_dtype {cache.kv_cache_dtype}: quantised caches are not examined by this version")
    return tuple(reasons)
