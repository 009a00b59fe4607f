"""Layers with a latent cache where vLLM is a stand-in: unsupported batches, and the arguments of its constructors."""

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from attncheck.backends.candidates.vllm import bridge
from attncheck.backends.candidates.vllm.bridge import VLLMLatentBackend, VLLMLatentBuilder
from attncheck.backends.candidates.vllm.layers import LatentSizes, make_layer
from attncheck.backends.contract import KVCacheSpec
from attncheck.backends.impl import LayerArguments
from attncheck.reference.spec import LayerSpec, MLASpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, PaddingSpec, PathSpec, RequestSpec, SpecDecodeOptions

SIZES = MLASpec(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=48, dtype="float16", mla=SIZES)
SPEC = KVCacheSpec(block_size=16, num_kv_heads=1, head_size=48, dtype=torch.float16)


class QueryLens(Enum):
    SINGLE_ONLY = 0
    UNIFORM = 1


class Builder:
    query_len_support = QueryLens.SINGLE_ONLY
    determine_chunked_prefill_workspace_size = staticmethod(lambda _config: 4096)


class TakesDrafts(Builder):
    query_len_support = QueryLens.UNIFORM


class Theirs:
    get_name = staticmethod(lambda: "THEIRS")
    get_builder_cls = staticmethod(lambda: Builder)


class Candidate(VLLMLatentBackend):
    their_backend = Theirs
    declared = SimpleNamespace(head_sizes=())
    features = frozenset({"mla", "non_causal", "fp8_kv"})
    supported_kv_cache_dtypes = ("auto", "fp8")
    supported_layouts = ("NHD", "HND")
    get_name = staticmethod(lambda: "CANDIDATE")
    get_impl_cls = staticmethod(lambda: SimpleNamespace(brings_writer=True))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A CPU on which the backend's kernels are its own."""
    monkeypatch.setattr(bridge.package, "platform", lambda: SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setattr(bridge, "launches_triton", lambda _: False)
    monkeypatch.setattr(bridge, "_is_interpreted", lambda _: False)
    monkeypatch.setattr(bridge, "configuration_problems", lambda *_, **__: [])
    monkeypatch.setattr(bridge, "refusals", lambda *_: ())


def batch(*lengths, drafts=None, **padding):
    """Requests of ``(query_len, seq_len)``."""
    options = None if drafts is None else SpecDecodeOptions(num_speculative_tokens=drafts)
    path = PathSpec(name="mla") if options is None else PathSpec(name="spec_decode", options=options)
    requests = tuple(RequestSpec(query_len=query, seq_len=seq) for query, seq in lengths)
    return BatchSpec(requests=requests, padding=PaddingSpec(**padding), path=path)


def reasons(spec, *, layer=LAYER, dtype="auto"):
    return Candidate.unsupported_reasons(layer, CacheSpec(kv_cache_dtype=dtype), spec)


def test_padding_is_supported_where_a_graph_of_vllm_s_has_it(monkeypatch):
    """Decodes of one length, and a request for each row of padding; drafts where the builder takes them for decodes."""
    for spec in (batch((1, 9), (1, 3), requests=2, tokens=2), batch((5, 9), (1, 3))):
        assert reasons(spec) == []
    for spec in (batch((1, 9), requests=2, tokens=3), batch((5, 5), (1, 3), requests=1, tokens=1)):
        (reason,) = reasons(spec)
        assert f"{spec.padding.tokens} padding tokens: vLLM pads decodes of one length alone" in reason
    spec = batch((3, 9), (3, 5), drafts=2, requests=1, tokens=3)
    assert len(reasons(spec)) == 1
    monkeypatch.setattr(Theirs, "get_builder_cls", staticmethod(lambda: TakesDrafts))
    assert reasons(spec) == []
    assert len(reasons(replace(spec, padding=PaddingSpec(requests=1, tokens=1)))) == 1


def test_rows_without_a_slot_are_supported_where_graphs_are(monkeypatch):
    spec = batch((1, 9), (4, 9), unmapped_tokens=3)
    assert reasons(spec) == ["rows that no slot is for: vLLM's runner pads no rows on a CPU"]
    monkeypatch.setattr(bridge, "launches_triton", lambda _: True)
    assert reasons(spec) == []


def test_layers_decide_with_the_batch():
    blocks = replace(LAYER, causal=False)  # rows that see later ones come in blocks of one length
    assert reasons(batch((3, 9), (3, 5)), layer=blocks) == []
    (reason,) = reasons(batch((3, 9), (2, 5)), layer=blocks)
    assert "one" in reason
    plain = LayerSpec(num_heads=2, num_kv_heads=1, head_size=48, dtype="float16")
    assert len(reasons(batch((5, 9), (1, 3), requests=1, tokens=1), layer=plain)) == 1


def test_a_context_of_codes_is_read_by_decodes_alone_on_a_cpu(monkeypatch):
    def unavailable(spec, dtype="fp8"):
        return Candidate.unavailable_case_reasons("cpu", LAYER, CacheSpec(kv_cache_dtype=dtype), spec)

    assert unavailable(batch((1, 9), (1, 5))) == []
    assert unavailable(batch((5, 5), (1, 1))) == []
    assert unavailable(batch((5, 9)), dtype="auto") == []
    (reason,) = unavailable(batch((5, 9)))
    assert reason.startswith("kv_cache_dtype fp8: ")
    # An undeclared FP8 cache stays a case that the backend has to refuse itself.
    assert unavailable(batch((5, 9)), dtype="fp8_e4m3") == []
    assert reasons(batch((5, 9)), dtype="fp8") == []
    monkeypatch.setattr(bridge.package, "platform", lambda: SimpleNamespace(is_cpu=lambda: False))
    assert unavailable(batch((5, 9))) == []


def test_the_workspace_is_the_case_s_in_whole_pages():
    builder = type("Made", (VLLMLatentBuilder,), {"their_backend": Theirs})
    for size, rows in ((None, 4096), (16, 16), (17, 32), (1, 16)):
        vllm_builder = builder.their_builder(replace(SPEC, chunked_prefill_workspace_size=size))
        assert vllm_builder.determine_chunked_prefill_workspace_size(None) == rows
    assert Builder.determine_chunked_prefill_workspace_size(None) == 4096


def test_what_vllm_s_layer_takes():
    for width in (576, 320, 64, 24):
        sizes = LatentSizes.of_row(width)
        assert sizes.row_size == width
        assert sizes.kv_lora_rank > 0
        assert LatentSizes.of(SimpleNamespace(**vars(sizes))) == sizes
        assert sizes.model()["kv_lora_rank"] == sizes.kv_lora_rank
    refused = {"alibi_slopes": [0.5], "logits_soft_cap": 30.0, "attn_type": "encoder_only"}
    for name, value in {**refused, "kv_sharing_target_layer_name": "layer.0"}.items():
        with pytest.raises(NotImplementedError, match=name):
            make_layer(Theirs, None, LayerArguments(2, 48, 0.1, 1, **{name: value}), LatentSizes.of_row(48))
