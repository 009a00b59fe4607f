"""The reference never guesses: what has no meaning is refused by name, before anything is written."""

from dataclasses import replace

import pytest
import torch

from attncheck.errors import AttncheckError, ReferenceArgumentError
from attncheck.reference import (
    AttentionParams,
    MLAParams,
    Precision,
    causal_conv1d,
    compute_slot_mapping,
    copy_blocks,
    dcp_rank_attention,
    dequantize_fp8,
    kv_cache_views,
    merge_attn_states,
    merge_many,
    mla_attention_absorbed,
    mla_attention_chunked,
    mla_attention_naive,
    mla_latent_attention,
    mla_write_cache,
    paged_attention,
    quantize_fp8,
    quantize_fp8_group,
    reshape_and_cache,
    swap_blocks,
    varlen_attention,
    window_pair,
)

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, device=device).to(dtype)


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


LAYER = AttentionParams(4, 2, 8, head_size_v=6)
LATENT = MLAParams(3, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=2)
# Two requests of 2 and 1 rows over 6 and 3 keys, in pages of 4.
REQUESTS = {
    "block_table": ints([1, 2], [4, 99]),
    "seq_lens": ints(6, 3),
    "query_start_loc": ints(0, 2, 3),
}
REQUEST_ROWS = [
    ({"block_table": torch.tensor([[1.0, 2.0], [4.0, 0.0]])}, "block_table.dtype"),
    ({"block_table": ints([1], [4])}, "block_table.shape"),
    ({"block_table": ints([1, 5], [4, 99])}, "block_table[0, 1]"),
    ({"seq_lens": ints(6)}, "seq_lens.shape"),
    ({"seq_lens": ints(6, -1)}, "seq_lens[1]"),
    ({"seq_lens": ints(9, 3)}, "block_table.shape"),
    ({"query_start_loc": ints(1, 2, 3)}, "query_start_loc"),
    ({"query_start_loc": ints(0, 2, 4)}, "query_start_loc[-1]"),
    ({"query_start_loc": ints([0, 2, 3])}, "query_start_loc.shape"),
    ({"query_start_loc": ints(0, 2, 3, dtype=torch.int16)}, "query_start_loc.dtype"),
    ({"params": None}, "params"),
    ({"kv_tile": 2.0}, "kv_tile"),
]
RANGE_ROWS = [({"kv_range": span}, "kv_range") for span in ((4, 2), (-1, 2), (1, 2, 3), (0, 2.0), (0, True), 5)]

# Scales of caches that are no codes are ignored, whatever they are.
PAGED = {
    "query": zeros(3, 4, 8),
    "key_cache": zeros(5, 4, 2, 8),
    "value_cache": zeros(5, 4, 2, 6),
    **REQUESTS,
    "params": LAYER,
    "k_scale": -1.0,
    "q_scale": zeros(9),
}
PAGED_ROWS = [
    ({"query": zeros(3, 5, 8)}, "query.shape"),
    ({"query": zeros(3, 4, 8, dtype=torch.int32)}, "query.dtype"),
    ({"key_cache": zeros(5, 4, 4, 8)}, "key_cache.shape"),
    ({"key_cache": zeros(5, 0, 2, 8), "value_cache": zeros(5, 0, 2, 6)}, "key_cache.shape"),
    ({"key_cache": zeros(5, 4, 2, 8, dtype=torch.uint8)}, "key_cache.dtype"),
    ({"value_cache": zeros(5, 4, 2, 8)}, "value_cache.shape"),
    ({"value_cache": zeros(5, 4, 2, 6, device="meta")}, "value_cache.device"),
    ({"query": zeros(3, 4, 8, dtype=E4M3), "q_scale": torch.ones(2)}, "q_scale.shape"),
    ({"query": zeros(3, 4, 8, dtype=E4M3), "q_scale": 0.0}, "q_scale"),
    ({"key_cache": zeros(5, 4, 2, 8, dtype=E4M3), "k_scale": torch.ones(4)}, "k_scale.shape"),
    ({"key_cache": zeros(5, 4, 2, 8, dtype=E4M3), "k_scale": NAN}, "k_scale"),
    ({"value_cache": zeros(5, 4, 2, 6, dtype=E4M3), "v_scale": torch.ones(5, 4)}, "v_scale.shape"),
    ({"value_cache": zeros(5, 4, 2, 6, dtype=E4M3), "v_scale": ints(1)}, "v_scale.dtype"),
]
MASK_ROWS = [
    ({"tree_mask": torch.ones(2, 2)}, "tree_mask.dtype"),
    ({"tree_mask": torch.ones(1, 1, dtype=torch.bool)}, "tree_mask.shape"),
    ({"tree_mask": torch.ones(2, 3, dtype=torch.bool)}, "tree_mask.shape"),
    ({"mask_fn": lambda r, q, k: (k <= q).float()}, "mask_fn(...)"),
    ({"mask_fn": lambda r, q, k: k >= 0}, "mask_fn(...)"),
]
RANK_ROWS = [
    ({"dcp_size": 0}, "dcp_size"),
    ({"dcp_size": 2, "dcp_rank": 2}, "dcp_rank"),
    ({"dcp_size": 2, "dcp_rank": True}, "dcp_rank"),
    ({"cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size"),
]

PACKED = {
    "query": zeros(3, 4, 8),
    "key": zeros(5, 2, 8),
    "value": zeros(5, 2, 6),
    "cu_seqlens_q": ints(0, 2, 3),
    "cu_seqlens_k": ints(0, 2, 5),
    "params": LAYER,
}
PACKED_ROWS = [
    ({"query": zeros(3, 4, 8, dtype=E4M3)}, "query.dtype"),
    ({"key": zeros(5, 4, 8)}, "key.shape"),
    ({"value": zeros(4, 2, 6)}, "value.shape"),
    ({"value": zeros(5, 2, 6, device="meta")}, "value.device"),
    ({"cu_seqlens_q": ints(0, 2, 4)}, "cu_seqlens_q[-1]"),
    ({"cu_seqlens_k": ints(0, 5)}, "cu_seqlens_k.shape"),
    ({"params": "AttentionParams"}, "params"),
    ({"q_tile": True}, "q_tile"),
    ({"kv_tile": 0}, "kv_tile"),
]

Q_PE, CACHE, LATENT_TABLES = zeros(3, 3, 4), zeros(5, 4, 10), {**REQUESTS, "params": LATENT}
UNABSORBED = {
    "q_nope": zeros(3, 3, 5),
    "q_pe": Q_PE,
    "kv_cache": CACHE,
    "w_uk": zeros(6, 3, 5),
    "w_uv": zeros(6, 3, 2),
    **LATENT_TABLES,
    "k_scale": 0.0,
}
LATENT_ROWS = [
    ({"q_pe": zeros(2, 3, 4)}, "q_pe.shape"),
    ({"q_pe": zeros(3, 3, 4, device="meta")}, "q_pe.device"),
    ({"kv_cache": zeros(5, 4, 9)}, "kv_cache.shape"),
    ({"kv_cache": zeros(5, 4, 10, dtype=torch.uint8)}, "kv_cache.dtype"),
    ({"params": LAYER}, "params"),
    ({"kv_cache": zeros(5, 4, 10, dtype=E4M3), "k_scale": 0.0}, "k_scale"),
    ({"kv_cache": zeros(5, 4, 10, dtype=E4M3), "k_scale": torch.ones(5, 4)}, "k_scale.shape"),
]
UNABSORBED_ROWS = [
    ({"q_nope": zeros(3, 3, 6)}, "q_nope.shape"),
    ({"q_nope": zeros(3, 3, 5, dtype=E4M3)}, "q_nope.dtype"),
    ({"w_uk": zeros(6, 3, 2)}, "w_uk.shape"),
    ({"w_uv": zeros(6, 3, 5)}, "w_uv.shape"),
    ({"w_uv": zeros(6, 3, 2, device="meta")}, "w_uv.device"),
]
CHUNK_ROWS = [({"workspace": 0}, "workspace"), ({"workspace": None}, "workspace")]
ABSORBED = {"q_latent": zeros(3, 3, 6), "q_pe": Q_PE, "kv_cache": CACHE, **LATENT_TABLES}

CONVOLUTION = {
    "x": torch.ones(5, 3),
    "weight": torch.ones(3, 4),
    "bias": None,
    "conv_states": zeros(4, 3, 3),
    "query_start_loc": ints(0, 2, 4, 5),
    "cache_indices": ints(2, -1, 0),
    "has_initial_state": torch.tensor([True, False, True]),
}
CONVOLUTION_ROWS = [
    ({"x": zeros(5, 3, 1)}, "x.shape"),
    ({"x": zeros(5, 3, dtype=torch.int32)}, "x.dtype"),
    ({"weight": torch.ones(2, 4)}, "weight.shape"),
    ({"weight": zeros(3, 4, dtype=E4M3)}, "weight.dtype"),
    ({"weight": torch.ones(3, 5)}, "conv_states.shape"),
    ({"bias": torch.ones(4)}, "bias.shape"),
    ({"bias": zeros(3, device="meta")}, "bias.device"),
    ({"conv_states": zeros(4, 3, 3, dtype=E4M3)}, "conv_states.dtype"),
    ({"query_start_loc": ints(0, 4, 2, 5)}, "query_start_loc"),
    ({"query_start_loc": ints(0, 5)}, "cache_indices.shape"),
    ({"cache_indices": ints(0, 1, 4)}, "cache_indices"),
    ({"cache_indices": ints(2, 1, 2)}, "cache_indices"),
    ({"cache_indices": zeros(3)}, "cache_indices.dtype"),
    ({"has_initial_state": torch.tensor([True])}, "has_initial_state.shape"),
    ({"has_initial_state": ints(1, 0, 1)}, "has_initial_state.dtype"),
    ({"activation": "relu"}, "activation"),
]

WRITE = {
    "key": zeros(3, 2, 8),
    "value": zeros(3, 2, 6),
    "key_cache": zeros(5, 4, 2, 8, dtype=E4M3),
    "value_cache": zeros(5, 4, 2, 6),
    "slot_mapping": ints(3, -1, 7),
    "v_scale": 0.0,
}
WRITE_ROWS = [
    ({"key": zeros(1, 2, 8)}, "key.shape"),
    ({"value": zeros(2, 2, 6)}, "value.shape"),
    ({"key": zeros(3, 2, 7)}, "key.shape"),
    ({"key": zeros(3, 2, 8, dtype=E4M3)}, "key.dtype"),
    ({"key_cache": zeros(5, 2, 8)}, "key_cache.shape"),
    ({"value_cache": zeros(5, 3, 2, 6)}, "value_cache.shape"),
    ({"value": zeros(3, 2, 6, device="meta")}, "value.device"),
    ({"slot_mapping": ints(3, 20)}, "slot_mapping"),
    ({"slot_mapping": ints(3, 3)}, "slot_mapping"),
    ({"slot_mapping": torch.tensor([3.0])}, "slot_mapping.dtype"),
    ({"k_scale": torch.ones(3)}, "k_scale.shape"),
    ({"k_scale": INF}, "k_scale"),
]
LATENT_WRITE = {
    "kv_c_normed": zeros(3, 3),
    "k_pe": zeros(3, 2),
    "kv_cache": zeros(5, 4, 5, dtype=E4M3),
    "slot_mapping": ints(3, -1, 7),
}
LATENT_WRITE_ROWS = [
    ({"kv_c_normed": zeros(1, 3)}, "kv_c_normed.shape"),
    ({"kv_c_normed": zeros(3, 3, dtype=E4M3)}, "kv_c_normed.dtype"),
    ({"k_pe": zeros(1, 2)}, "k_pe.shape"),
    ({"k_pe": zeros(3, 2, device="meta")}, "k_pe.device"),
    ({"kv_cache": zeros(5, 4, 6)}, "kv_cache.shape"),
    ({"kv_cache": zeros(5, 4, 5, dtype=torch.uint8)}, "kv_cache.dtype"),
    ({"slot_mapping": ints(1, 20)}, "slot_mapping"),
    ({"k_scale": torch.ones(5)}, "k_scale.shape"),
]
SLOTS = {"positions": ints(0, 5), "req_indices": ints(0, 0), "block_table": ints([1, 3]), "block_size": 4}
SLOT_ROWS = [
    ({"positions": ints(-1, 0)}, "positions"),
    ({"positions": ints(0, 8)}, "positions"),
    # On rank 0 it is position 8: beyond its row of two pages, where the page of the next row would be read.
    ({"positions": ints(0, 16), "block_table": ints([1, 3], [5, 7]), "dcp_size": 2}, "positions on this rank"),
    ({"positions": ints(0)}, "req_indices.shape"),
    ({"req_indices": ints(0, 1)}, "req_indices"),
    ({"block_table": ints([-1, 3])}, "block_table"),
    ({"block_size": 0}, "block_size"),
    ({"dcp_size": 0}, "dcp_size"),
    ({"dcp_rank": 1}, "dcp_rank"),
    ({"cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size"),
]
SWAP_ROWS = [
    ({"dst": zeros(5, 2)}, "dst.shape"),
    ({"dst": zeros(5, 3, dtype=torch.float64)}, "dst.dtype"),
    ({"mapping": ints([4, 0])}, "mapping[:, 0]"),
    ({"mapping": ints([0, 5])}, "mapping[:, 1]"),
    ({"mapping": ints([0, 1], [2, 1])}, "mapping[:, 1]"),
    ({"mapping": torch.tensor([[0.0, 4.0]])}, "mapping.dtype"),
]
QUANTIZE_ROWS = [
    ({"x": zeros(2, 3, dtype=E4M3)}, "x.dtype"),
    ({"scale": 0.0}, "scale"),
    ({"scale": torch.tensor([1.0, 0.0, 1.0])}, "scale"),
    ({"scale": torch.ones(2)}, "scale.shape"),
    ({"dtype": torch.float16}, "dtype"),
]
DEQUANTIZE_ROWS = [
    ({"codes": torch.ones(2, 3)}, "codes.dtype"),
    ({"scale": torch.tensor([1.0, NAN, 2.0])}, "scale"),
    ({"dtype": torch.int32}, "dtype"),
]
GROUP_ROWS = [
    ({"x": zeros(4, 2, 2)}, "x.shape"),
    ({"x": zeros(4, 4, dtype=E4M3)}, "x.dtype"),
    ({"group": 3}, "group"),
    ({"dtype": torch.float16}, "dtype"),
]
STATES = {"out_a": zeros(3, 2, 4), "lse_a": zeros(3, 2), "out_b": zeros(3, 2, 4), "lse_b": zeros(3, 2)}
MERGE_ROWS = [
    ({"out_b": zeros(3, 2, 5)}, "outs[1].shape"),
    ({"out_a": zeros(3, 8)}, "outs[0].shape"),
    ({"lse_a": zeros(2, 3)}, "lses[0].shape"),
    ({"lse_b": zeros(3, 2, dtype=torch.int64)}, "lses[1].dtype"),
    ({"out_b": zeros(3, 2, 4, device="meta")}, "outs[1].device"),
]
PACKING = {"cache": zeros(3, 2, 8, 5), "packing": "plane", "head_size": 5}
PACKING_ROWS = [
    ({"packing": "split_first", "cache": zeros(3, 3, 4, 2, 5)}, "cache.shape"),
    ({"packing": "split_first", "cache": zeros(2, 3, 4, 2, 6)}, "cache.shape"),
    ({"packing": "split_second", "cache": zeros(2, 3, 4, 2)}, "cache.shape"),
    ({"packing": "content", "cache": zeros(3, 2, 4, 5)}, "cache.shape"),
    ({"cache": zeros(3, 2, 7, 5)}, "cache.shape"),
    ({"packing": "planes"}, "packing"),
]
LAYER_ROWS = [
    ({"num_kv_heads": 3}, "num_kv_heads"),
    ({"num_heads": -8}, "num_heads"),
    ({"head_size": True}, "head_size"),
    ({"head_size_v": 0}, "head_size_v"),
    ({"scale": NAN}, "scale"),
    ({"window": (1, 2, 3)}, "window"),
    ({"window": (2**62, 0)}, "window"),
    ({"logits_soft_cap": INF}, "logits_soft_cap"),
    ({"alibi_slopes": (0.5,) * 2}, "alibi_slopes"),
    ({"sinks": (0.5,) * 5}, "sinks"),
    ({"sinks": (NAN,) * 4}, "sinks"),
    ({"attn_chunk_size": 0}, "attn_chunk_size"),
    ({"attn_chunk_lookback": -1}, "attn_chunk_lookback"),
]
LATENT_LAYER_ROWS = [
    ({"num_heads": 0}, "num_heads"),
    ({"kv_lora_rank": 0}, "kv_lora_rank"),
    ({"qk_nope_head_dim": -1}, "qk_nope_head_dim"),
    ({"qk_rope_head_dim": True}, "qk_rope_head_dim"),
    ({"qk_nope_head_dim": 0, "qk_rope_head_dim": 0}, "qk_nope_head_dim + qk_rope_head_dim"),
    ({"scale": NAN}, "scale"),
]
PRECISION_ROWS = [
    ({"compute": torch.int32}, "precision.compute"),
    ({"prob": torch.int8}, "precision.prob"),
    ({"out": E4M3}, "precision.out"),
    ({"prob_factor": 0.0}, "precision.prob_factor"),
]
WINDOW_ROWS = [({"sliding_window": window}, "sliding_window") for window in (0, -1, 2.5, True)]

# By name: the function, valid arguments, and changes that are refused one by one.
CALLS = {
    "paged": (paged_attention, PAGED, REQUEST_ROWS + PAGED_ROWS + RANGE_ROWS + MASK_ROWS),
    "rank": (dcp_rank_attention, {**PAGED, "dcp_size": 1, "dcp_rank": 0}, REQUEST_ROWS + PAGED_ROWS + RANK_ROWS),
    "packed": (varlen_attention, PACKED, PACKED_ROWS),
    "naive": (mla_attention_naive, UNABSORBED, REQUEST_ROWS + LATENT_ROWS + UNABSORBED_ROWS + RANGE_ROWS),
    "absorbed": (mla_attention_absorbed, UNABSORBED, REQUEST_ROWS + LATENT_ROWS + UNABSORBED_ROWS + RANGE_ROWS),
    "chunked": (
        mla_attention_chunked,
        {**UNABSORBED, "workspace": 2},
        REQUEST_ROWS + LATENT_ROWS + UNABSORBED_ROWS + CHUNK_ROWS,
    ),
    "latent": (
        mla_latent_attention,
        ABSORBED,
        [*REQUEST_ROWS, *LATENT_ROWS, *RANGE_ROWS, ({"q_latent": zeros(3, 3, 5)}, "q_latent.shape")],
    ),
    "convolution": (causal_conv1d, CONVOLUTION, CONVOLUTION_ROWS),
    "write": (reshape_and_cache, WRITE, WRITE_ROWS),
    "latent write": (mla_write_cache, LATENT_WRITE, LATENT_WRITE_ROWS),
    "slots": (compute_slot_mapping, SLOTS, SLOT_ROWS),
    "swap": (swap_blocks, {"src": zeros(4, 3), "dst": zeros(5, 3), "mapping": ints([0, 4])}, SWAP_ROWS),
    "copy": (
        copy_blocks,
        {"caches": [zeros(3, 2)], "mapping": ints([0, 2])},
        [({"mapping": ints([0, 3])}, "mapping[:, 1]")],
    ),
    "quantize": (quantize_fp8, {"x": torch.ones(2, 3), "scale": 1.0}, QUANTIZE_ROWS),
    "dequantize": (dequantize_fp8, {"codes": zeros(2, 3, dtype=E4M3), "scale": 1.0}, DEQUANTIZE_ROWS),
    "groups": (quantize_fp8_group, {"x": zeros(4, 4), "group": 2}, GROUP_ROWS),
    "merge": (merge_attn_states, STATES, MERGE_ROWS),
    "packing": (kv_cache_views, PACKING, PACKING_ROWS),
    "layer": (lambda **changes: replace(LAYER, **changes), {}, LAYER_ROWS),
    "latent layer": (lambda **changes: replace(LATENT, **changes), {}, LATENT_LAYER_ROWS),
    "precision": (Precision, {}, PRECISION_ROWS),
    "window": (window_pair, {"sliding_window": 4}, WINDOW_ROWS),
}


def refused(function, arguments):
    """The argument that the refusal names; None without a refusal."""
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    versions = [x._version for x in tensors]
    try:
        function(**arguments)
    except ReferenceArgumentError as refusal:
        assert ": must be " in str(refusal)
        assert [x._version for x in tensors] == versions
        return refusal.argument
    return None


@pytest.mark.parametrize("name", CALLS)
def test_what_has_no_meaning_is_refused_by_name(name):
    function, sound, rows = CALLS[name]
    assert refused(function, sound) is None
    for change, argument in rows:
        assert refused(function, {**sound, **change}) == argument, change


def test_numbers_of_states_and_widths_of_a_rank():
    for states in (([], []), ([zeros(3, 2, 4)], [])):
        with pytest.raises(ReferenceArgumentError):
            merge_many(*states)
    rank = {**PAGED, "dcp_size": 2, "dcp_rank": 0}
    assert refused(dcp_rank_attention, {**rank, "seq_lens": ints(16, 3)}) is None
    assert refused(dcp_rank_attention, {**rank, "seq_lens": ints(17, 3)}) == "block_table.shape"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": ints(9, 3)}, "block_table.shape = (2, 2): must be at least 3 wide for seq_lens[0] 9"),
        ({"params": replace(LAYER, num_kv_heads=4)}, "[any, any, 4, 8] (blocks, block_size, num_kv_heads, head_size)"),
        (
            {"key_cache": zeros(5, 4, 2, 8, dtype=E4M3), "k_scale": torch.ones(3)},
            "must be one element, or [2], [5, 4, 2]",
        ),
    ],
)
def test_a_message_states_what_would_be_right(change, message):
    with pytest.raises(ReferenceArgumentError) as refusal:
        paged_attention(**{**PAGED, **change})
    assert message in str(refusal.value)
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, AttncheckError)
