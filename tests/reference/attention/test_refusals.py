"""The reference never guesses: what has no meaning is refused by name, before anything is computed."""

from dataclasses import replace

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionParams,
    dequantize_fp8,
    merge_attn_states,
    merge_many,
    paged_attention,
    quantize_fp8,
    reshape_and_cache,
    swap_blocks,
    varlen_attention,
)

PARAMS = AttentionParams(4, 2, 8, head_size_v=6)
E4M3 = torch.float8_e4m3fn


def paged():
    """A sound question: two requests of 2 and 1 rows over 6 and 3 keys, pages of 4."""
    return {
        "query": torch.zeros(3, 4, 8),
        "key_cache": torch.zeros(5, 4, 2, 8),
        "value_cache": torch.zeros(5, 4, 2, 6),
        "block_table": torch.tensor([[1, 2], [4, 99]]),
        "seq_lens": torch.tensor([6, 3]),
        "query_start_loc": torch.tensor([0, 2, 3]),
        "params": PARAMS,
    }


def varlen():
    return {
        "query": torch.zeros(3, 4, 8),
        "key": torch.zeros(5, 2, 8),
        "value": torch.zeros(5, 2, 6),
        "cu_seqlens_q": torch.tensor([0, 2, 3]),
        "cu_seqlens_k": torch.tensor([0, 2, 5]),
        "params": PARAMS,
    }


def write():
    return {
        "key": torch.zeros(3, 2, 8),
        "value": torch.zeros(3, 2, 6),
        "key_cache": torch.zeros(5, 4, 2, 8),
        "value_cache": torch.zeros(5, 4, 2, 6),
        "slot_mapping": torch.tensor([3, -1, 7]),
    }


def refused(function, question, change):
    function(**question)
    with pytest.raises(ReferenceArgumentError) as refusal:
        function(**{**question, **change})
    assert isinstance(refusal.value, ValueError)
    assert "must be" in str(refusal.value)
    return refusal.value.argument


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"query": torch.zeros(3, 5, 8)}, "query.shape"),
        ({"query": torch.zeros(3, 4, 9)}, "query.shape"),
        ({"query": torch.zeros(3, 32)}, "query.shape"),
        ({"query": torch.zeros(3, 4, 8, dtype=torch.int32)}, "query.dtype"),
        ({"query": torch.zeros(3, 4, 8, dtype=torch.bool)}, "query.dtype"),
        ({"query": torch.zeros(2, 4, 8)}, "query_start_loc[-1]"),
        ({"key_cache": torch.zeros(5, 4, 4, 8)}, "key_cache.shape"),
        ({"key_cache": torch.zeros(5, 2, 4, 8)}, "key_cache.shape"),
        ({"key_cache": torch.zeros(5, 0, 2, 8), "value_cache": torch.zeros(5, 0, 2, 6)}, "key_cache.shape"),
        ({"key_cache": torch.zeros(5, 4, 2, 8, dtype=torch.uint8)}, "key_cache.dtype"),
        ({"value_cache": torch.zeros(5, 4, 2, 8)}, "value_cache.shape"),
        ({"value_cache": torch.zeros(6, 4, 2, 6)}, "value_cache.shape"),
        ({"value_cache": torch.zeros(5, 4, 2, 6, device="meta")}, "value_cache.device"),
        ({"block_table": torch.tensor([[1, 2]])}, "block_table.shape"),
        ({"block_table": torch.tensor([1, 2])}, "block_table.shape"),
        ({"block_table": torch.tensor([[1.0, 2.0], [4.0, 0.0]])}, "block_table.dtype"),
        ({"block_table": torch.tensor([[1], [4]])}, "block_table.shape"),
        ({"block_table": torch.tensor([[1, 5], [4, 99]])}, "block_table[0, 1]"),
        ({"block_table": torch.tensor([[1, 2], [-1, 99]])}, "block_table[1, 0]"),
        ({"seq_lens": torch.tensor([6])}, "seq_lens.shape"),
        ({"seq_lens": torch.tensor([6, -1])}, "seq_lens[1]"),
        ({"seq_lens": torch.tensor([6.0, 3.0])}, "seq_lens.dtype"),
        ({"seq_lens": torch.tensor([9, 3])}, "block_table.shape"),
        ({"query_start_loc": torch.tensor([1, 2, 3])}, "query_start_loc"),
        ({"query_start_loc": torch.tensor([0, 3, 2])}, "query_start_loc"),
        ({"query_start_loc": torch.tensor([0, 2, 4])}, "query_start_loc[-1]"),
        ({"query_start_loc": torch.zeros(0, dtype=torch.int64)}, "query_start_loc"),
        ({"query_start_loc": torch.tensor([[0, 2, 3]])}, "query_start_loc.shape"),
        ({"query_start_loc": torch.tensor([0, 2, 3], dtype=torch.int16)}, "query_start_loc.dtype"),
        ({"params": None}, "params"),
        ({"q_tile": 0}, "q_tile"),
        ({"kv_tile": -1}, "kv_tile"),
        ({"kv_tile": 2.0}, "kv_tile"),
        ({"kv_range": (4, 2)}, "kv_range"),
        ({"kv_range": (-1, 2)}, "kv_range"),
        ({"kv_range": (1, 2, 3)}, "kv_range"),
        ({"tree_mask": torch.ones(2, 2)}, "tree_mask.dtype"),
        ({"tree_mask": torch.ones(1, 1, dtype=torch.bool)}, "tree_mask.shape"),
        ({"tree_mask": torch.ones(2, 3, dtype=torch.bool)}, "tree_mask.shape"),
        ({"mask_fn": lambda r, q, k: (k <= q).float()}, "mask_fn(...)"),
        ({"mask_fn": lambda r, q, k: k >= 0}, "mask_fn(...)"),
    ],
)
def test_paged_attention(change, argument):
    assert refused(paged_attention, paged(), change) == argument


@pytest.mark.parametrize(
    ("dtypes", "change", "argument"),
    [
        (("query",), {"q_scale": torch.ones(2)}, "q_scale.shape"),
        (("query",), {"q_scale": 0.0}, "q_scale"),
        (("key_cache",), {"k_scale": torch.ones(4)}, "k_scale.shape"),
        (("key_cache",), {"k_scale": torch.ones(4, 4, 2)}, "k_scale.shape"),
        (("key_cache",), {"k_scale": -1.0}, "k_scale"),
        (("key_cache",), {"k_scale": float("nan")}, "k_scale"),
        (("value_cache",), {"v_scale": torch.ones(5, 4)}, "v_scale.shape"),
        (("value_cache",), {"v_scale": torch.tensor(1)}, "v_scale.dtype"),
    ],
)
def test_scales_of_codes(dtypes, change, argument):
    question = paged()
    question.update({name: question[name].to(E4M3) for name in dtypes})
    assert refused(paged_attention, question, change) == argument


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"query": torch.zeros(3, 4, 8).to(E4M3)}, "query.dtype"),
        ({"key": torch.zeros(5, 2, 8).to(E4M3)}, "key.dtype"),
        ({"query": torch.zeros(3, 2, 8)}, "query.shape"),
        ({"key": torch.zeros(5, 4, 8)}, "key.shape"),
        ({"value": torch.zeros(5, 2, 8)}, "value.shape"),
        ({"value": torch.zeros(4, 2, 6)}, "value.shape"),
        ({"value": torch.zeros(5, 2, 6, device="meta")}, "value.device"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 4])}, "cu_seqlens_q[-1]"),
        ({"cu_seqlens_k": torch.tensor([0, 2, 6])}, "cu_seqlens_k[-1]"),
        ({"cu_seqlens_k": torch.tensor([0, 5])}, "cu_seqlens_k.shape"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 2])}, "cu_seqlens_k"),
        ({"params": "AttentionParams"}, "params"),
        ({"q_tile": True}, "q_tile"),
        ({"kv_tile": 0}, "kv_tile"),
    ],
)
def test_varlen_attention(change, argument):
    assert refused(varlen_attention, varlen(), change) == argument


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"key": torch.zeros(1, 2, 8)}, "key.shape"),
        ({"value": torch.zeros(2, 2, 6)}, "value.shape"),
        ({"key": torch.zeros(3, 2, 7)}, "key.shape"),
        ({"key": torch.zeros(3, 2, 8).to(E4M3)}, "key.dtype"),
        ({"key": torch.zeros(3, 2, 8, dtype=torch.int64)}, "key.dtype"),
        ({"key_cache": torch.zeros(5, 2, 8)}, "key_cache.shape"),
        ({"value_cache": torch.zeros(5, 3, 2, 6)}, "value_cache.shape"),
        ({"value_cache": torch.zeros(5, 4, 2, 6, dtype=torch.uint8)}, "value_cache.dtype"),
        ({"value": torch.zeros(3, 2, 6, device="meta")}, "value.device"),
        ({"slot_mapping": torch.tensor([3, 20])}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([3, 3])}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([3.0])}, "slot_mapping.dtype"),
        ({"slot_mapping": torch.tensor([[3]])}, "slot_mapping.shape"),
    ],
)
def test_reshape_and_cache(change, argument):
    assert refused(reshape_and_cache, write(), change) == argument


def test_scales_of_a_write():
    question = {**write(), "key_cache": torch.zeros(5, 4, 2, 8).to(E4M3)}
    for scale in (torch.ones(3), 0.0, float("inf"), torch.tensor(2)):
        assert refused(reshape_and_cache, question, {"k_scale": scale}).startswith("k_scale")
    reshape_and_cache(**{**question, "v_scale": 0.0})  # of a cache that is no code: ignored


def test_quantisation():
    x = {"x": torch.ones(2, 3), "scale": 1.0}
    for change, argument in (
        ({"x": torch.ones(2, 3, dtype=torch.int32)}, "x.dtype"),
        ({"x": torch.ones(2, 3).to(E4M3)}, "x.dtype"),
        ({"scale": 0.0}, "scale"),
        ({"scale": torch.tensor([1.0, 0.0, 1.0])}, "scale"),
        ({"scale": torch.ones(2)}, "scale.shape"),
        ({"scale": torch.ones(1, 2, 3)}, "scale.shape"),
        ({"dtype": torch.float16}, "dtype"),
    ):
        assert refused(quantize_fp8, x, change) == argument
    codes = {"codes": torch.ones(2, 3).to(E4M3), "scale": 1.0}
    assert refused(dequantize_fp8, codes, {"codes": torch.ones(2, 3)}) == "codes.dtype"
    assert refused(dequantize_fp8, codes, {"scale": torch.tensor([1.0, float("nan"), 2.0])}) == "scale"
    assert refused(dequantize_fp8, codes, {"dtype": torch.int32}) == "dtype"


def test_merging():
    state = {"out_a": torch.zeros(3, 2, 4), "lse_a": torch.zeros(3, 2)}
    state |= {"out_b": torch.zeros(3, 2, 4), "lse_b": torch.zeros(3, 2)}
    for change, argument in (
        ({"out_b": torch.zeros(3, 2, 5)}, "outs[1].shape"),
        ({"out_a": torch.zeros(3, 8)}, "outs[0].shape"),
        ({"lse_a": torch.zeros(2, 3)}, "lses[0].shape"),
        ({"lse_b": torch.zeros(3, 2, dtype=torch.int64)}, "lses[1].dtype"),
        ({"out_b": torch.zeros(3, 2, 4, device="meta")}, "outs[1].device"),
    ):
        assert refused(merge_attn_states, state, change) == argument
    with pytest.raises(ReferenceArgumentError, match="one or more"):
        merge_many([], [])
    with pytest.raises(ReferenceArgumentError, match="as many"):
        merge_many([torch.zeros(3, 2, 4)], [])


def test_swapping():
    sound = {"src": torch.zeros(4, 3), "dst": torch.zeros(5, 3), "mapping": torch.tensor([[0, 4]])}
    for change, argument in (
        ({"dst": torch.zeros(5, 2)}, "dst.shape"),
        ({"dst": torch.zeros(5, 3, dtype=torch.float64)}, "dst.dtype"),
        ({"mapping": torch.tensor([[4, 0]])}, "mapping[:, 0]"),
        ({"mapping": torch.tensor([0, 4])}, "mapping.shape"),
        ({"mapping": torch.tensor([[0.0, 4.0]])}, "mapping.dtype"),
        ({"src": torch.tensor(0.0)}, "dst.shape"),
    ):
        assert refused(swap_blocks, sound, change) == argument


def test_a_message_states_what_would_be_right():
    with pytest.raises(ReferenceArgumentError) as refusal:
        paged_attention(**{**paged(), "seq_lens": torch.tensor([9, 3])})
    assert str(refusal.value) == "block_table.shape = (2, 2): must be at least 3 wide for seq_lens[0] 9"
    with pytest.raises(ReferenceArgumentError) as refusal:
        paged_attention(**{**paged(), "params": replace(PARAMS, num_kv_heads=4)})
    assert "[any, any, 4, 8] (blocks, block_size, num_kv_heads, head_size)" in str(refusal.value)
