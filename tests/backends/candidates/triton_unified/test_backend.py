from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified.attention import ragged_attention, unified_attention
from attncheck.backends.candidates.triton_unified.backend import UnifiedBackend
from attncheck.backends.contract import KVCacheSpec
from attncheck.reference import AttentionParams, CommonAttentionMetadata
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODE = BatchSpec(requests=(RequestSpec(query_len=1),))


def test_the_scratch_is_the_same_in_every_step():
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_num_attention_heads=lambda _: 4),
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        speculative_config=None,
    )
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16, head_size_v=24)
    builder = UnifiedBackend.get_builder_cls()(spec, ["layer.0"], config, DEVICE)
    common = CommonAttentionMetadata(
        *(torch.zeros(2, dtype=torch.int32) for _ in range(5)), 1, 0, 1, 1, torch.zeros(1, 1), torch.zeros(0)
    )
    first, second = (builder.build(0, common) for _ in range(2))
    assert first.scratch is second.scratch
    assert len(first.scratch.out) == 24 * len(first.scratch.lse)  # the size of a value


def test_heads_that_fit_no_tile_are_not_supported_and_refused():
    layer = LayerSpec(num_heads=2, num_kv_heads=1, head_size=256)
    assert UnifiedBackend.unsupported_reasons(layer, CacheSpec(), DECODE) == []
    assert UnifiedBackend.get_impl_cls()(2, 256, 0.1, 1).head_size == 256
    for name, size in (("head_size", 257), ("head_size_v", 300)):
        layer = LayerSpec(**{"num_heads": 2, "num_kv_heads": 1, "head_size": 64, name: size})
        reason = f"{name} {size}: supported are sizes up to 256"
        assert UnifiedBackend.unsupported_reasons(layer, CacheSpec(), DECODE) == [reason]
        with pytest.raises(ValueError, match=f"{size}: supported are sizes up to 256"):
            UnifiedBackend.get_impl_cls()(2, layer.head_size, 0.1, 1, head_size_v=layer.value_head_size)


def rows(*shape, dtype=torch.float32):
    return torch.zeros(shape, device=DEVICE).to(dtype)


def indices(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def test_what_does_not_go_together_is_refused(refusals):
    arguments = {
        "query": rows(3, 2, 16),
        "key_cache": rows(4, 16, 1, 16),
        "value_cache": rows(4, 16, 1, 16),
        "output": rows(3, 2, 16),
        "block_table": indices(1).reshape(1, 1),
        "seq_lens": indices(3),
        "query_start_loc": indices(0, 3),
        "max_query_len": 3,
        "params": AttentionParams(2, 1, 16),
    }
    wrong = [
        ("query is torch.float64, keys are torch.float32", {"query": rows(3, 2, 16, dtype=torch.float64)}),
        ("keys have shape (4, 16, 2, 16), not [..., 1, 16]; keys are", {"key_cache": rows(4, 16, 2, 16)}),
        (
            "keys are torch.float32 (4, 16, 1, 16), values torch",
            {"value_cache": rows(4, 16, 1, 16, dtype=torch.float16)},
        ),
        ("output has shape (2, 2, 16) for a query of (3, 2, 16)", {"output": rows(2, 2, 16)}),
        ("output has dtype torch.float8_e4m3fn, and", {"output": rows(3, 2, 16, dtype=torch.float8_e4m3fn)}),
        ("output has dtype torch.float32, and output_scale is given", {"output_scale": rows(1)}),
        ("block_table has shape (1, 1) and strides (1, 1); query_start_loc", {"seq_lens": indices(3, 3)}),
        ("params and sinks differ in whether there are any", {"sinks": rows(2)}),
        ("k_scale has shape (3,), not [1]", {"k_scale": rows(3)}),
        ("tree is torch.bool (3, 2), not a square of bools", {"tree": rows(3, 2, dtype=torch.bool)}),
        ("query_start_loc or seq_lens has gaps", {"query_start_loc": indices(0, 1, 3)[::2]}),
    ]
    found = refusals(lambda changed: unified_attention(**arguments | changed[1]), wrong)
    for message, (reason, _) in zip(found, wrong, strict=True):
        assert message.startswith(f"unified attention: {reason}")
    query, new = rows(3, 2, 16), rows(3, 1, 16)
    given = {"query_start_loc": indices(0, 3), "max_query_len": 3, "alibi_slopes": None}
    for reason, options, changes in (
        ("lookback", {"attn_chunk_size": 8, "attn_chunk_lookback": 1}, {}),
        ("square-root form", {"alibi_slopes": (0.5, 0.25), "alibi_sqrt": True}, {"alibi_slopes": rows(2)}),
    ):
        params = AttentionParams(2, 1, 16, **options)
        with pytest.raises(NotImplementedError, match=f"{reason}.* not supported"):
            ragged_attention(query, new, new, rows(3, 2, 16), params=params, **given | changes)
