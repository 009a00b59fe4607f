"""Chunked local attention by virtual requests."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import make_local_attention_virtual_batches

TABLE = [  # chunk, block, q, s, table, start locations, lengths, computed, pages
    (4, 2, [5, 1], [7, 9], [[7, 3, 9, 1, 2], [4, 8, 6, 5, 0]], [0, 2, 5, 6], [4, 3, 1], [2, 0, 0], "73 91 00"),
    (4, 4, [1, 1, 1], [8, 9, 3], [[5, 6, 7], [8, 9, 3], [1, 2, 4]], [0, 1, 2, 3], [4, 1, 3], [3, 0, 2], "6 3 1"),
    (4, 2, [9], [9], [[7, 3, 9, 1, 2]], [0, 4, 8, 9], [4, 4, 1], [0, 0, 0], "73 91 22"),
    (4, 4, [8], [8], [[3, 1]], [0, 4, 8], [4, 4], [0, 0], "3 1"),
    (8, 2, [3], [5], [[7, 8, 9]], [0, 3], [5], [2], "7899"),
    (8, 2, [4], [11], [[7, 8, 9, 4, 5, 6]], [0, 1, 4], [8, 3], [7, 0], "7894 5666"),
    (4, 2, [2, 0], [6, 0], [[7, 8, 9], [0, 0, 0]], [0, 2, 2], [2, 0], [0, 0], "99 00"),
    (8, 2, [2, 0], [6, 0], [[7, 8, 9], [0, 0, 0]], [0, 2, 2], [6, 0], [4, 0], "7899 0000"),
    (4, 2, [2, 1], [6, 5], [[1, 2, 3], [4, 5, 6]], [0, 2, 3], [2, 1], [0, 0], "33 66"),
    # Without a query, yet with keys: one virtual request for the last chunk.
    (4, 2, [0], [8], [[1, 2, 3, 4]], [0, 0], [4], [4], "34"),
    (4, 2, [0], [5], [[1, 2, 3, 4]], [0, 0], [1], [1], "34"),
]


@pytest.mark.parametrize("one_object", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("chunk", "block", "q", "s", "table", "starts", "lens", "computed", "pages"), TABLE)
def test_virtual_requests(
    chunk, block, q, s, table, starts, lens, computed, pages, dtype, one_object, common, unchanged, same_storage
):
    batch = common(q, s, table=table, extra_tokens=5, dtype=dtype, one_object=one_object)
    with unchanged(batch):
        got = make_local_attention_virtual_batches(chunk, batch, block)
    assert got.query_start_loc.tolist() == got.query_start_loc_cpu.tolist() == starts
    assert got.seq_lens.tolist() == got.seq_lens_cpu.tolist() == lens
    assert got.num_computed_tokens_cpu.tolist() == computed
    assert got.block_table_tensor.tolist() == [[int(page) for page in row] for row in pages.split()]
    counts = (got.num_reqs, got.num_actual_tokens, got.max_query_len, got.max_seq_len)
    longest = max(end - start for start, end in pairwise(starts))
    assert counts == (len(lens), sum(q) + 5, longest, max(lens))
    assert all(type(count) is int for count in counts)
    assert got.slot_mapping is batch.slot_mapping
    index = (got.query_start_loc, got.query_start_loc_cpu, got.seq_lens, got.seq_lens_cpu, got.num_computed_tokens_cpu)
    assert {tensor.dtype for tensor in index} == {torch.int32}
    assert got.block_table_tensor.dtype == dtype
    assert not same_storage(got.block_table_tensor, batch.block_table_tensor)
    assert not same_storage(got.query_start_loc, got.query_start_loc_cpu)
    assert not same_storage(got.seq_lens, got.seq_lens_cpu)


def test_the_optional_fields_do_not_survive_and_the_result_is_causal(common):
    lens = torch.tensor([8])
    options = {"logits_indices_padded": lens, "num_logits_indices": 1, "dcp_local_seq_lens": lens}
    batch = common([3], [8], causal=False, encoder_seq_lens=lens.numpy(), **options)
    got = make_local_attention_virtual_batches(4, batch, 4)
    assert got.causal is True
    assert [getattr(got, name) for name in (*options, "encoder_seq_lens")] == [None] * 4


def test_device_values_are_not_read(common):
    nowhere = torch.empty(2, dtype=torch.int32, device="meta")
    batch = common([3], [8], query_start_loc=nowhere, seq_lens=nowhere[:1])
    got = make_local_attention_virtual_batches(4, batch, 4)
    assert got.query_start_loc.device.type == got.seq_lens.device.type == "meta"
    assert got.seq_lens_cpu.tolist() == [4]
    assert got.block_table_tensor.device.type == "cpu"


def test_sizes_may_be_numpys(common):
    got = make_local_attention_virtual_batches(np.int64(4), common([5, 1], [7, 9]), np.int32(2))
    assert got.seq_lens.tolist() == [4, 3, 1]
    assert type(got.max_query_len) is type(got.max_seq_len) is int


def test_the_table_may_be_a_view_of_a_wider_one(common):
    wide = torch.arange(60, dtype=torch.int32).view(2, 30)
    batch = common([6, 1], [6, 1], block_table_tensor=wide[:, ::3])
    got = make_local_attention_virtual_batches(4, batch, 2)
    assert got.block_table_tensor.tolist() == [[0, 3], [6, 9], [30, 33]]


@pytest.mark.parametrize(
    ("chunk", "block", "fields", "name"),
    [
        (4, 0, {}, "block_size"),
        (4, -2, {}, "block_size"),
        (4, 3, {}, "attn_chunk_size"),
        (2, 4, {}, "attn_chunk_size"),
        (0, 2, {}, "attn_chunk_size"),
        (-4, 2, {}, "attn_chunk_size"),
        (4, 2, {"seq_lens_cpu": torch.tensor([8, 1])}, "(query, seq) lengths of request 1"),
        (4, 2, {"seq_lens_cpu": torch.tensor([8])}, "seq_lens_cpu"),
        (4, 2, {"num_reqs": 0, "query_start_loc_cpu": torch.tensor([0])}, "num_reqs"),
        (4, 2, {"query_start_loc_cpu": torch.tensor([0, 5, 3])}, "query_start_loc_cpu"),
        (4, 2, {"block_table_tensor": torch.zeros(2, 0, dtype=torch.int32)}, "block_table_tensor"),
        (4, 2, {"block_table_tensor": torch.zeros(1, 4, dtype=torch.int32)}, "block_table_tensor"),
        (4, 2, {"block_table_tensor": torch.zeros(2, 4)}, "block_table_tensor"),
    ],
)
def test_refusals_name_the_argument(chunk, block, fields, name, common, unchanged):
    batch = common([3, 2], [8, 4], **fields)
    with unchanged(batch), pytest.raises(ReferenceArgumentError) as refusal:
        make_local_attention_virtual_batches(chunk, batch, block)
    assert refusal.value.argument.startswith(name)


def test_the_block_size_must_be_given(common):
    with pytest.raises(ReferenceArgumentError, match="block_size = 0"):
        make_local_attention_virtual_batches(4, common([3], [8]))


BATCHES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=5)


@given(requests=BATCHES, block=st.integers(1, 3), pages=st.integers(1, 4), width=st.integers(0, 3))
def test_the_mask_is_that_of_chunks(requests, block, pages, width, common):
    """Through the virtual block table every query sees the keys of its chunk up to itself, and nothing else."""
    chunk = block * pages
    query_lens, seq_lens = [q for q, _ in requests], [q + c for q, c in requests]
    columns = max(1, width + max(-(-s // block) for s in seq_lens))
    table = [[r * columns + page for page in range(columns)] for r in range(len(requests))]
    got = make_local_attention_virtual_batches(chunk, common(query_lens, seq_lens, table=table), block)
    seen = []
    starts, lens = got.query_start_loc.tolist(), got.seq_lens.tolist()
    for v, row in enumerate(got.block_table_tensor.tolist()):
        blocks = [divmod(page, columns) for page in row]
        keys = [(blocks[k // block][0], blocks[k // block][1] * block + k % block) for k in range(lens[v])]
        before = int(got.num_computed_tokens_cpu[v])
        seen += [keys[: before + i + 1] for i in range(starts[v + 1] - starts[v])]
    expected = [
        [(r, key) for key in range(position // chunk * chunk, position + 1)]
        for r, (q, c) in enumerate(requests)
        for position in range(c, c + q)
    ]
    assert seen == expected
    assert got.max_seq_len <= chunk


@given(requests=BATCHES, block=st.integers(1, 3))
def test_a_chunk_of_all_keys_changes_no_length(requests, block, common):
    query_lens, seq_lens = [q for q, _ in requests], [q + c for q, c in requests]
    batch = common(query_lens, seq_lens, table=[[0] * 40] * len(requests))
    got = make_local_attention_virtual_batches(block * 21, batch, block)
    assert got.query_start_loc.tolist() == batch.query_start_loc.tolist()
    assert got.seq_lens.tolist() == seq_lens


@given(requests=BATCHES, order=st.permutations(range(20)))
def test_block_ids_change_nothing_else(requests, order, common, plain):
    query_lens, seq_lens = [q for q, _ in requests], [q + c for q, c in requests]
    table = [[r * 4 + page for page in range(4)] for r in range(len(requests))]
    other = [[order[page] for page in row] for row in table]
    first, second = (
        plain(make_local_attention_virtual_batches(6, common(query_lens, seq_lens, table=pages), 3))
        for pages in (table, other)
    )
    assert [[order[page] for page in row] for row in first.pop("block_table_tensor")] == second.pop(
        "block_table_tensor"
    )
    assert first == second
