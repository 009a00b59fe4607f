"""How the attention paths are called: tensors by position, options by keyword, defaults that callers count on."""

import inspect

import pytest

from attncheck import reference

TILES = "precision=Precision() q_tile=128 kv_tile=1024"
PAGES = "block_table seq_lens query_start_loc params *"
LATENT = "q_nope q_pe kv_cache w_uk w_uv"
SIGNATURES = {
    "AttentionParams": "num_heads num_kv_heads head_size head_size_v=None scale=None causal=True window=(-1, -1) "
    "logits_soft_cap=None alibi_sqrt=False attn_chunk_size=None attn_chunk_lookback=0 alibi_slopes=None sinks=None",
    "MLAParams": "num_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim scale=None causal=True",
    "Precision": "compute=torch.float64 prob=None out=None",
    "causal_conv1d": "x weight bias conv_states query_start_loc cache_indices has_initial_state * activation='silu' "
    "pad_id=-1 precision=Precision()",
    "compute_slot_mapping": "positions req_indices block_table block_size * dcp_size=1 dcp_rank=0 "
    "cp_kv_cache_interleave_size=1",
    "copy_blocks": "caches mapping",
    "dcp_rank_attention": f"query key_cache value_cache {PAGES} dcp_size dcp_rank cp_kv_cache_interleave_size=1 "
    f"k_scale=1.0 v_scale=1.0 q_scale=1.0 {TILES}",
    "dequantize_fp8": "codes scale * dtype=torch.float64",
    "kv_cache_views": "cache packing head_size",
    "merge_attn_states": "out_a lse_a out_b lse_b * precision=Precision()",
    "merge_many": "outs lses * precision=Precision()",
    "mla_attention_absorbed": f"{LATENT} {PAGES} k_scale=1.0 kv_range=None {TILES}",
    "mla_attention_chunked": f"{LATENT} {PAGES} workspace k_scale=1.0 {TILES}",
    "mla_attention_naive": f"{LATENT} {PAGES} k_scale=1.0 kv_range=None {TILES}",
    "mla_latent_attention": f"q_latent q_pe kv_cache {PAGES} k_scale=1.0 kv_range=None {TILES}",
    "mla_write_cache": "kv_c_normed k_pe kv_cache slot_mapping * k_scale=1.0",
    "paged_attention": f"query key_cache value_cache {PAGES} k_scale=1.0 v_scale=1.0 q_scale=1.0 kv_range=None "
    f"include_sinks=True tree_mask=None mask_fn=None {TILES}",
    "quantize_fp8": "x scale dtype=torch.float8_e4m3fn",
    "quantize_fp8_group": "x group * dtype=torch.float8_e4m3fn",
    "reshape_and_cache": "key value key_cache value_cache slot_mapping * k_scale=1.0 v_scale=1.0",
    "swap_blocks": "src dst mapping",
    "varlen_attention": f"query key value cu_seqlens_q cu_seqlens_k params * include_sinks=True {TILES}",
    "visible": "params q_pos k_pos",
    "window_pair": "sliding_window * bidirectional=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters(name):
    spelled = []
    for parameter in inspect.signature(getattr(reference, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in spelled:
            spelled.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        spelled.append(parameter.name + default.replace(repr(reference.Precision()), "Precision()"))
    assert " ".join(spelled) == SIGNATURES[name]
