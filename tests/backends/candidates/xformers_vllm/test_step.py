"""A step of ``xformers_vllm``: the split, the views and the bias, by the numbers of a mixed batch worked by hand."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from attncheck.backends.candidates.xformers.backend import library_reasons
from attncheck.backends.contract import CommonAttentionMetadata, KVCacheSpec

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers_vllm.builder import (
    XFormersAttentionMetadata,
    XFormersAttentionMetadataBuilder,
)

STARTS, LENS = [0, 1, 2, 5, 25], [5, 17, 3, 36]


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def common(starts, lens):
    table = torch.arange(len(lens) * 3, dtype=torch.int32).view(len(lens), 3)
    query_lens = [end - start for start, end in pairwise(starts)]
    return CommonAttentionMetadata(
        query_start_loc=int32(starts),
        query_start_loc_cpu=int32(starts),
        seq_lens=int32(lens),
        seq_lens_cpu=int32(lens),
        num_computed_tokens_cpu=int32([s - q for s, q in zip(lens, query_lens, strict=True)]),
        num_reqs=len(lens),
        num_actual_tokens=starts[-1],
        max_query_len=max(query_lens),
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=torch.arange(starts[-1]) + 100,
    )


@pytest.fixture
def builder():
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16)
    return XFormersAttentionMetadataBuilder(spec, ["layer.0"], None, torch.device("cpu"))


def numbers(view):
    return {
        "tokens": view.num_actual_tokens,
        "starts": view.query_start_loc.tolist(),
        "lens": view.seq_lens.tolist(),
        "longest": (view.max_query_len, view.max_seq_len),
        "table": view.block_table[:, 0].tolist(),
        "slots": (len(view.slot_mapping), int(view.slot_mapping[0])),
        "counters": (view.num_prefills, view.num_decodes, view.num_prefill_tokens, view.num_decode_tokens),
    }


def test_a_mixed_step_is_split_and_seen_in_two_views(builder):
    step = builder.build(0, common(STARTS, LENS))
    assert (step.num_decodes, step.num_prefills, step.num_decode_tokens, step.num_prefill_tokens) == (2, 2, 2, 23)
    assert (builder.block_size, builder._num_decodes, builder._num_decode_tokens) == (16, 2, 2)
    prefill, decode = step.prefill_metadata, step.decode_metadata
    assert numbers(prefill) == {
        "tokens": 23,
        "starts": [0, 3, 23],
        "lens": [3, 36],
        "longest": (20, 36),
        "table": [6, 9],
        "slots": (23, 102),
        "counters": (0, 0, 0, 0),
    }
    assert numbers(decode) == {
        "tokens": 2,
        "starts": [0, 1, 2],
        "lens": [5, 17],
        "longest": (1, 17),
        "table": [0, 3],
        "slots": (2, 100),
        "counters": (0, 0, 0, 0),
    }
    assert prefill.attn_bias is None
    assert decode.attn_bias is step.attn_bias
    assert step.prefill_metadata is prefill
    assert step.decode_metadata is decode
    assert prefill.prefill_metadata is prefill.decode_metadata is decode.decode_metadata is None


def test_the_bias_is_of_the_decodes(builder):
    bias = builder.build(0, common(STARTS, LENS)).attn_bias
    assert bias.q_seqinfo.seqstart.tolist() == [0, 1, 2]
    assert bias.k_seqinfo.padding == 48
    assert bias.k_seqinfo.seqstart.tolist() == [0, 48, 96]
    assert bias.k_seqinfo.seqlen.tolist() == [5, 17]
    assert (bias.page_size, bias.block_tables.tolist()) == (16, [[0, 1, 2], [3, 4, 5]])


def test_a_step_of_one_kind_has_one_view(builder):
    prompts = builder.build(0, common([0, 3, 23], [3, 36]))
    assert prompts.attn_bias is prompts.decode_metadata is None
    assert prompts.prefill_metadata.num_actual_tokens == 23
    decodes = builder.build(7, common([0, 1, 2], [5, 17]), fast_build=True)
    assert decodes.prefill_metadata is None
    assert decodes.decode_metadata.num_actual_tokens == 2


def test_padding_is_a_decode_without_a_query(builder):
    """As the library then refuses; see docs/expected/xformers-vllm.yaml."""
    step = builder.build(0, common([0, 1, 2, 2], [5, 17, 0]))
    assert step.num_decodes == 3
    assert step.attn_bias.q_seqinfo.seqstart.tolist() == [0, 1, 2, 2]


def test_a_view_waits_for_the_device_when_it_is_first_read():
    step = XFormersAttentionMetadata(2, 1, int32([0, 1, 2]), 17, int32([5, 17]), int32([[0]]), torch.arange(2))
    assert step.decode_metadata is None
    step.num_decodes = step.num_decode_tokens = 2
    step.seq_lens = step.seq_lens.to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        _ = step.decode_metadata


def test_a_length_beyond_the_table_is_asserted_by_the_library(builder):
    with pytest.raises(AssertionError, match="Padding 48"):
        builder.build(0, common([0, 1], [49]))


def test_decodes_are_moved_to_the_front(builder):
    ids = ["long", "short"]

    def swap_states(i, j):
        ids[i], ids[j] = ids[j], ids[i]

    batch = SimpleNamespace(req_ids=ids, swap_states=swap_states)
    scheduled = SimpleNamespace(num_scheduled_tokens={"long": 5, "short": 1})
    assert builder.reorder_batch(batch, scheduled)
    assert ids == ["short", "long"]
    assert builder.reorder_batch_threshold == 1
