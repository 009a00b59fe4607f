"""Keys that an indexer chose: against a matrix of zeros and ones, one request at a time."""

import numpy as np
import pytest
import torch
from dense_sparse import dense_sparse_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import TILES, make_batch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import AttentionParams, MLAParams, mla_attention_absorbed, mla_attention_naive

PARAMS = AttentionParams(4, 2, 8, 5)


@st.composite
def chosen_keys_of(draw, query_lens, seq_lens, width):
    """Entries of each row: keys up to its own, one at least, with gaps and repetitions."""
    rows = []
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        for position in range(seq_len - query_len, seq_len):
            row = draw(st.lists(st.integers(-1, position), min_size=width, max_size=width))
            row[draw(st.integers(0, width - 1))] = draw(st.integers(0, position))
            rows.append(row)
    return rows


@settings(max_examples=50)
@given(data=st.data(), sizes=TILES)
def test_a_row_attends_to_the_keys_that_it_names(data, sizes):
    lens = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 15)), min_size=1, max_size=3))
    query_lens = [query for query, _ in lens]
    seq_lens = [query + context for query, context in lens]
    batch = make_batch(query_lens, seq_lens, PARAMS, seed=data.draw(st.integers(0, 9)))
    entries = data.draw(chosen_keys_of(query_lens, seq_lens, data.draw(st.integers(1, 9))))
    behind = [[0] * len(entries[0])] * (len(batch.query) - len(entries) + 2)  # rows of no request
    out, lse = batch.attend(PARAMS, topk_indices=torch.tensor(entries + behind, dtype=torch.int32), **sizes)
    for request in range(len(lens)):
        rows = batch.rows(request)
        keys, values = (
            each[request].repeat_interleave(PARAMS.group_size, dim=1).numpy() for each in (batch.keys, batch.values)
        )
        want = dense_sparse_attention(
            batch.query[rows].numpy(), keys, values, entries[rows.start : rows.stop], PARAMS.softmax_scale
        )
        assert np.allclose(out[rows].numpy(), want)
    assert bool(lse[: len(entries)].isfinite().all())


def test_the_causal_mask_holds_for_keys_that_are_named():
    batch = make_batch((3,), (7,), PARAMS)
    everything = torch.arange(9, dtype=torch.int32).expand(5, 9)
    for mine, plain in zip(batch.attend(PARAMS, topk_indices=everything), batch.attend(PARAMS), strict=True):
        assert torch.allclose(mine, plain)
    out, lse = batch.attend(PARAMS, topk_indices=torch.full((5, 2), -1))
    assert not out.any()
    assert bool(lse.isneginf().all())


@pytest.mark.parametrize(
    ("indices", "named"),
    [
        (torch.zeros(2, 4), "topk_indices.dtype"),
        (torch.zeros(6, dtype=torch.int32), "topk_indices.shape"),
        (torch.zeros(4, 2, dtype=torch.int32), "at least 5 rows"),
    ],
)
def test_undefined_indices_are_refused(indices, named):
    with pytest.raises(ReferenceArgumentError, match=named):
        make_batch((3,), (7,), PARAMS).attend(PARAMS, topk_indices=indices)


def test_both_forms_of_latent_attention_see_the_named_keys():
    params = MLAParams(2, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=3, v_head_dim=4)
    draw = torch.Generator().manual_seed(0)

    def rows(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q_nope, q_pe, cache, w_uk, w_uv = rows(3, 2, 5), rows(3, 2, 3), rows(4, 4, 9), rows(6, 2, 5), rows(6, 2, 4)
    table, lens, starts = torch.tensor([[2, 0, 3]]), torch.tensor([11]), torch.tensor([0, 3])
    entries = [[0, 8, -1, 4], [9, 9, -1, 2], [-1, 10, 7, 3]]
    tokens = cache[table[0]].reshape(-1, 9)[:11]
    keys = torch.cat([torch.einsum("nl,lhp->nhp", tokens[:, :6], w_uk), tokens[:, None, 6:].expand(-1, 2, -1)], -1)
    values = torch.einsum("nl,lhv->nhv", tokens[:, :6], w_uv)
    query = torch.cat([q_nope, q_pe], dim=-1).numpy()
    want = dense_sparse_attention(query, keys.numpy(), values.numpy(), entries, params.softmax_scale)
    for form in (mla_attention_naive, mla_attention_absorbed):
        out, _ = form(
            *(q_nope, q_pe, cache, w_uk, w_uv, table, lens, starts, params),
            topk_indices=torch.tensor(entries),
            q_tile=2,
        )
        assert np.allclose(out.numpy(), want)
