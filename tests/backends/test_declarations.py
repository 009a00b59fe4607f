"""Every feature has a case that needs it, and every reason names value and limit."""

import pytest
import torch

from attncheck.backends.contract import AttentionBackend, Conventions, MultipleOf
from attncheck.backends.declarations import required_features, undeclared
from attncheck.reference.spec import FEATURES, AttentionType, LayerSpec, MLASpec, OutputQuantSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, IndexerOptions, PathSpec, RequestSpec


def layer(**changes):
    return LayerSpec(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 64} | changes)


def batch(query_len=1, seq_len=9, path="paged"):
    return BatchSpec(requests=(RequestSpec(query_len=query_len, seq_len=seq_len),), path=PathSpec(name=path))


PLAIN = (layer(), CacheSpec(), batch())
SIZES = MLASpec(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=8)
LATENT = LayerSpec(num_heads=4, num_kv_heads=1, head_size=48, mla=SIZES)

# feature -> (case that needs it, the part of it that does, features that come along)
IMAGE = BatchSpec(requests=(RequestSpec(query_len=8, mm_req_doc_ranges=((2, 5),)),))
FP8_INDEX = BatchSpec(
    requests=(RequestSpec(query_len=8),),
    path=PathSpec(name="indexer", options=IndexerOptions(index_cache_dtype="fp8_e4m3")),
)
NEEDS = {
    "sliding_window": ((layer(sliding_window=7), CacheSpec(), batch()), "sliding_window 7", ()),
    "logits_soft_cap": ((layer(logits_soft_cap=30.0), CacheSpec(), batch()), "logits_soft_cap 30.0", ()),
    "alibi": ((layer(alibi=True), CacheSpec(), batch()), "ALiBi slopes", ()),
    "alibi_non_causal": (
        (layer(alibi=True, attn_type=AttentionType.ENCODER_ONLY), CacheSpec(), batch(9)),
        "ALiBi slopes and is not causal",
        ("alibi",),
    ),
    "sinks": ((layer(sinks=True), CacheSpec(), batch()), "sinks", ()),
    "non_causal": ((layer(causal=False), CacheSpec(), batch()), "causal false", ()),
    "head_size_v": ((layer(head_size_v=32), CacheSpec(), batch()), "head_size_v 32 beside head_size 64", ()),
    "local": ((layer(attn_chunk_size=16), CacheSpec(), batch()), "attn_chunk_size 16", ()),
    "kv_sharing": ((layer(kv_sharing=True), CacheSpec(), batch()), "kv_sharing true", ()),
    "fp8_kv": ((layer(), CacheSpec(kv_cache_dtype="fp8_e5m2"), batch()), "kv_cache_dtype fp8_e5m2", ()),
    "fp8_per_head": ((layer(), CacheSpec(kv_cache_dtype="fp8", v_scale=(1.0, 2.0)), batch()), "per head", ("fp8_kv",)),
    "fp8_query": (
        (layer(query_quant=True), CacheSpec(kv_cache_dtype="fp8"), batch()),
        "query_quant true",
        ("fp8_kv",),
    ),
    "output_quant": ((layer(output_quant=OutputQuantSpec(scale=0.5)), CacheSpec(), batch()), "fp8_e4m3", ()),
    "mla": ((LATENT, CacheSpec(), batch()), "latent cache", ()),
    "tree": ((layer(), CacheSpec(), batch(path="tree")), "path tree", ()),
    "mm_prefix": ((layer(), CacheSpec(), IMAGE), "mm_req_doc_ranges of image spans", ()),
    "rswa": ((layer(rswa_window=8), CacheSpec(), batch()), "rswa_window 8", ()),
    "sparse": ((layer(index_topk=8), CacheSpec(), batch()), "index_topk 8: an indexer chooses the keys", ()),
    "fp8_index": ((layer(), CacheSpec(), FP8_INDEX), "an indexer with FP8 keys", ()),
    "short_keys": ((layer(), CacheSpec(), batch(3, 1)), "query_len 3 above seq_len 1", ()),
}

NEEDED_BY_NO_CASE = {
    "lse": "an output a backend may offer",
    "cascade": "played by the harness where it is not declared",
    "alibi_sqrt": "no layer has it",
    "tree_depth": "a convention of trees",
    "merge_nan": "a property of a function",
    "dcp": "of a path that needs options",
}


class Strict(AttentionBackend):
    """Declares one dtype, two head sizes, one kind of page, nothing else."""

    get_name = get_impl_cls = get_builder_cls = get_kv_cache_shape = None
    get_supported_dtypes = classmethod(lambda cls: [torch.bfloat16])
    get_supported_head_sizes = classmethod(lambda cls: [64, 128])
    get_supported_kernel_block_sizes = classmethod(lambda cls: [8, MultipleOf(16)])


def test_the_newest_declaration_of_strides_counts():
    def reads(blocks):
        return {"indexes_kv_by_block_stride": classmethod(lambda _cls: blocks)}

    def derived(base, **members):
        return type("Derived", (base,), members)

    plain, explicit = Conventions(), Conventions(cache_strides="any")
    pages = derived(Strict, **reads(False))
    assert pages.conventions.cache_strides == "pages"
    assert derived(pages, conventions=plain).conventions.cache_strides == "pages"
    assert derived(pages, conventions=explicit).conventions.cache_strides == "any"
    assert derived(pages, **reads(True)).conventions.cache_strides == "blocks"
    both = derived(Strict, conventions=explicit, **reads(True))
    assert both.conventions.cache_strides == derived(both).conventions.cache_strides == "any"


def test_every_feature_is_needed_by_a_case_or_explained():
    assert set(NEEDS) | set(NEEDED_BY_NO_CASE) == set(FEATURES)


@pytest.mark.parametrize("feature", NEEDS)
def test_a_feature_is_required_and_its_absence_explained(feature):
    case, need, along = NEEDS[feature]
    assert required_features(*case) == {feature, *along}

    class Declaring(Strict):
        features = frozenset(along)
        supported_attn_types = tuple(AttentionType)
        supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e5m2")
        get_supported_head_sizes = classmethod(lambda cls: [])

    (reason,) = undeclared(Declaring, *case)
    assert need in reason
    assert f"feature {feature!r} is not declared" in reason
    Declaring.features = frozenset({feature, *along})
    assert undeclared(Declaring, *case) == []


def test_what_needs_no_feature():
    for case in (
        PLAIN,
        (layer(logits_soft_cap=0.0), CacheSpec(), batch()),
        (layer(head_size_v=64), CacheSpec(), batch()),
        (layer(), CacheSpec(k_scale=2.0, v_scale=(1.0, 2.0), q_scale=3.0), batch()),
        (layer(attn_type=AttentionType.ENCODER_ONLY), CacheSpec(), batch(9)),
        (layer(attn_type=AttentionType.ENCODER_DECODER), CacheSpec(), batch(5, 2)),  # more rows than keys
    ):
        assert required_features(*case) == frozenset(), case


def test_a_value_outside_the_declared_ones_is_the_only_reason():
    for case, reasons in (
        (PLAIN, []),
        ((layer(), CacheSpec(block_size=8), batch()), []),
        ((layer(), CacheSpec(block_size=48, kv_cache_dtype="bfloat16"), batch()), []),  # the layer's own dtype
        ((layer(dtype="float32"), CacheSpec(), batch()), ["dtype float32: supported are bfloat16"]),
        ((layer(head_size=80), CacheSpec(), batch()), ["head_size 80: supported are 64, 128"]),
        ((layer(), CacheSpec(block_size=24), batch()), ["block_size 24: supported are 8, multiples of 16"]),
        ((layer(), CacheSpec(layout="HND"), batch()), ["layout HND: supported are NHD"]),
        ((layer(), CacheSpec(kv_cache_dtype="float16"), batch()), ["kv_cache_dtype float16: supported are auto"]),
        (
            (layer(attn_type=AttentionType.ENCODER), CacheSpec(block_size=3, layout="HND"), batch(9)),
            ["attn_type encoder: supported are decoder"],  # its cache is not checked
        ),
    ):
        assert undeclared(Strict, *case) == reasons
    assert "head_size_v 96: supported are 64, 128" in undeclared(Strict, layer(head_size_v=96), CacheSpec(), batch())


def test_every_reason_is_listed_at_once():
    case = layer(dtype="float16", head_size=72, sliding_window=3, alibi=True), CacheSpec(block_size=3), batch(5, 4)
    assert [reason.split(":")[0] for reason in undeclared(Strict, *case)] == [
        "dtype float16",
        "head_size 72",
        "block_size 3",
        "the layer has ALiBi slopes",
        "query_len 5 above seq_len 4",
        "sliding_window 3",
    ]


def test_a_sparse_class_serves_layers_with_an_indexer_alone():
    class Chosen(Strict):
        is_sparse = classmethod(lambda cls: True)

    assert Chosen.features == {"sparse"}
    assert undeclared(Chosen, *PLAIN) == ["the layer has no indexer"]
    assert undeclared(Chosen, layer(index_topk=8, dtype="bfloat16"), CacheSpec(), batch()) == []
    assert undeclared(Strict, layer(index_topk=8, dtype="bfloat16"), CacheSpec(), batch()) == [
        "index_topk 8: an indexer chooses the keys: feature 'sparse' is not declared"
    ]


@pytest.mark.parametrize("kind", ["is_mla", "is_sparse"])
def test_a_class_of_other_layers_declares_fp8_keys_of_its_function(kind):
    case = layer(dtype="bfloat16"), CacheSpec(), FP8_INDEX
    without = type("Without", (Strict,), {kind: classmethod(lambda cls: True)})
    declared = type("Declared", (without,), {"features": without.features | {"fp8_index"}})
    assert undeclared(declared, *case) == []
    assert undeclared(without, *case) == ["an indexer with FP8 keys: feature 'fp8_index' is not declared"]
