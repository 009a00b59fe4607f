"""What holds of every function of a batch: nothing given changes, and the same question has the same answer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import (
    UBatchSlice,
    compute_causal_conv1d_metadata,
    get_dcp_local_seq_lens,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    slice_query_start_locs,
    split_attn_metadata,
    split_decodes_and_prefills,
)

FUNCTIONS = {
    "slice": lambda batch: [slice_query_start_locs(batch.query_start_loc, slice(0, batch.num_reqs))],
    "split": lambda batch: split_attn_metadata(
        [UBatchSlice(slice(0, batch.num_reqs), slice(0, batch.num_actual_tokens))], batch
    ),
    "boundary": split_decodes_and_prefills,
    "local": lambda batch: [make_local_attention_virtual_batches(4, batch, 2)],
    "fast prefill": lambda batch: [make_kv_sharing_fast_prefill_common_attn_metadata(batch)],
    "conv1d": lambda batch: compute_causal_conv1d_metadata(batch.query_start_loc)[1:],
    "dcp": lambda batch: [get_dcp_local_seq_lens(batch.seq_lens, 2)],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=25)
@given(requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_asked_twice_and_in_either_width(name, requests, common, unchanged, plain):
    query_lens, seq_lens = [q for q, _ in requests], [q + c for q, c in requests]
    answers = []
    for dtype in (torch.int32, torch.int64):
        wanted = torch.tensor([sum(query_lens) - 1])
        batch = common(
            query_lens, seq_lens, dtype=dtype, one_object=True, logits_indices_padded=wanted, num_logits_indices=1
        )
        batch.max_query_len += 1
        with unchanged(batch):
            for _ in range(2):
                parts = FUNCTIONS[name](batch)
                answers.append([part if isinstance(part, int) else plain(part) for part in parts])
    assert answers[1:] == answers[:-1]
