"""Chunked local attention by virtual requests; KV-sharing fast prefill, and backends that see the reduced batch."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from common_batches import common_metadata, plain_values, refused, same_storage, unchanged
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionMetadataBuilder,
    KVSharingFastPrefillMetadata,
    create_fast_prefill_custom_backend,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
)

LOCAL = [  # chunk, block, q, s, table, start locations, lengths, computed, pages
    (4, 2, [5, 1], [7, 9], [[7, 3, 9, 1, 2], [4, 8, 6, 5, 0]], [0, 2, 5, 6], [4, 3, 1], [2, 0, 0], "73 91 00"),
    (8, 2, [4], [11], [[7, 8, 9, 4, 5, 6]], [0, 1, 4], [8, 3], [7, 0], "7894 5666"),
    # Without a query, yet with keys: one virtual request for the last chunk.
    (4, 2, [0], [8], [[1, 2, 3, 4]], [0, 0], [4], [4], "34"),
]
DTYPES = st.sampled_from((torch.int32, torch.int64))
OPTIONAL = [
    "logits_indices_padded",
    "num_logits_indices",
    "encoder_seq_lens",
    "dcp_local_seq_lens",
    "mm_req_doc_ranges",
    "rswa_prefix_lens",
]
GIVEN = dict.fromkeys(OPTIONAL, torch.tensor([1])) | {"causal": False}


@pytest.mark.parametrize(("chunk", "block", "q", "s", "table", "starts", "lens", "computed", "pages"), LOCAL)
def test_virtual_requests(chunk, block, q, s, table, starts, lens, computed, pages):
    batch = common_metadata(q, s, table=table, extra_tokens=5, **GIVEN)
    got = make_local_attention_virtual_batches(chunk, batch, block)
    assert plain_values(got) == {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lens,
        "seq_lens_cpu": lens,
        "num_computed_tokens_cpu": computed,
        "num_reqs": len(lens),
        "num_actual_tokens": sum(q) + 5,
        "max_query_len": max(end - start for start, end in pairwise(starts)),
        "max_seq_len": max(lens),
        "block_table_tensor": [[int(page) for page in row] for row in pages.split()],
        "slot_mapping": batch.slot_mapping.tolist(),
        "causal": True,
        **dict.fromkeys(OPTIONAL),
    }


def test_device_values_are_not_read():
    nowhere = torch.empty(2, dtype=torch.int32, device="meta")
    batch = common_metadata([3], [8], query_start_loc=nowhere, seq_lens=nowhere[:1])
    got = make_local_attention_virtual_batches(4, batch, 4)
    assert got.query_start_loc.device.type == got.seq_lens.device.type == "meta"
    assert got.seq_lens_cpu.tolist() == [4]
    assert got.block_table_tensor.device.type == "cpu"


@pytest.mark.parametrize(
    ("chunk", "block", "fields", "name"),
    [
        (4, 0, {}, "block_size"),
        (4, 3, {}, "attn_chunk_size"),
        (0, 2, {}, "attn_chunk_size"),
        (4, 2, {"seq_lens_cpu": torch.tensor([8, 1])}, "(query, seq) lengths of request 1"),
        (4, 2, {"num_reqs": 0, "query_start_loc_cpu": torch.tensor([0])}, "num_reqs"),
        (4, 2, {"query_start_loc_cpu": torch.tensor([0, 5, 3])}, "query_start_loc_cpu"),
        (4, 2, {"block_table_tensor": torch.zeros(1, 4, dtype=torch.int32)}, "block_table_tensor"),
    ],
)
def test_refused_chunks_name_the_argument(chunk, block, fields, name):
    batch = common_metadata([3, 2], [8, 4], **fields)
    assert refused(make_local_attention_virtual_batches, chunk, batch, block).startswith(name)


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=5),
    block=st.integers(1, 3),
    pages=st.integers(1, 4),
    width=st.integers(0, 3),
    dtype=DTYPES,
    one_object=st.booleans(),
)
def test_the_mask_is_that_of_chunks(requests, block, pages, width, dtype, one_object):
    """Through the virtual block table every query sees the keys of its chunk up to itself, and nothing else."""
    chunk = block * pages
    query_lens, seq_lens = [q for q, _ in requests], [q + c for q, c in requests]
    columns = max(1, width + max(-(-s // block) for s in seq_lens))
    table = [[r * columns + page for page in range(columns)] for r in range(len(requests))]
    batch = common_metadata(query_lens, seq_lens, table=table, dtype=dtype, one_object=one_object)
    with unchanged(batch):
        got = make_local_attention_virtual_batches(chunk, batch, block)
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
    index = (got.query_start_loc, got.query_start_loc_cpu, got.seq_lens, got.seq_lens_cpu, got.num_computed_tokens_cpu)
    assert {tensor.dtype for tensor in index} == {torch.int32}
    assert got.block_table_tensor.dtype == dtype
    assert got.slot_mapping is batch.slot_mapping
    assert not same_storage(got.block_table_tensor, batch.block_table_tensor)
    assert not same_storage(got.query_start_loc, got.query_start_loc_cpu)
    assert not same_storage(got.seq_lens, got.seq_lens_cpu)


def wanting(query_lens, seq_lens, indices, count, index_dtype=torch.int64, **fields):
    padded = None if indices is None else torch.tensor(indices, dtype=index_dtype)
    return common_metadata(
        query_lens, seq_lens, **{**fields, "logits_indices_padded": padded, "num_logits_indices": count}
    )


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=6),
    padding=st.integers(0, 3),
    dtype=DTYPES,
    index=st.sampled_from((torch.int64, torch.int32, torch.uint8)),
    one_object=st.booleans(),
)
def test_wanted_tails_become_the_queries(requests, padding, dtype, index, one_object):
    """The last wanted tokens of each request keep their positions; keys, tables and slots are those of the batch."""
    query_lens, seq_lens = [q for q, _, _ in requests], [q + c for q, c, _ in requests]
    ends = [sum(query_lens[: r + 1]) for r in range(len(requests))]
    wanted = [min(n, q) for q, _, n in requests]
    indices = [t for end, n in zip(ends, wanted, strict=True) for t in range(end - n, end)]
    options = GIVEN | {"dtype": dtype, "one_object": one_object, "max_query_len": 9}
    batch = wanting(query_lens, seq_lens, indices + [0] * padding, len(indices), index, **options)
    with unchanged(batch):
        got = make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    starts = [sum(wanted[:r]) for r in range(len(wanted) + 1)]
    assert plain_values(got) == {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": seq_lens,
        "seq_lens_cpu": seq_lens,
        "num_computed_tokens_cpu": [s - n for s, n in zip(seq_lens, wanted, strict=True)],
        "num_reqs": len(requests),
        "num_actual_tokens": len(indices),
        "max_query_len": max(wanted),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": batch.block_table_tensor.tolist(),
        "slot_mapping": batch.slot_mapping.tolist(),
        "causal": True,
        **dict.fromkeys(OPTIONAL),
    }
    new = (got.query_start_loc, got.query_start_loc_cpu, got.seq_lens_cpu, got.num_computed_tokens_cpu)
    assert {tensor.dtype for tensor in new} == {dtype}
    assert all(
        getattr(got, kept) is getattr(batch, kept) for kept in ("seq_lens", "block_table_tensor", "slot_mapping")
    )
    assert not same_storage(got.query_start_loc, got.query_start_loc_cpu)
    assert not same_storage(got.seq_lens, got.seq_lens_cpu)


@pytest.mark.parametrize(("indices", "count"), [(None, None), ([0, 1], 2), ([7], 9)])
def test_a_pure_decode_is_the_same_object(indices, count):
    batch = wanting([1, 1], [6, 9], indices, count)
    assert make_kv_sharing_fast_prefill_common_attn_metadata(batch) is batch


@pytest.mark.parametrize(
    ("indices", "count", "name", "why"),
    [
        (None, None, "logits_indices_padded", "armed"),
        ([9], None, "num_logits_indices", "armed"),
        ([9], 2, "num_logits_indices", "at most 1"),
        ([9], -1, "num_logits_indices", "at least 0"),
        ([10], 1, "logits_indices_padded", "a token"),
        ([9, 5], 2, "logits_indices_padded", "ascending"),
        ([8], 1, "logits_indices_padded", "last tokens of request 1"),
        ([0, 9], 2, "logits_indices_padded", "last tokens of request 0"),
        ([[9]], 1, "logits_indices_padded.shape", "any"),
    ],
)
def test_refused_indices_name_the_argument(indices, count, name, why):
    batch = wanting([6, 4], [6, 9], indices, count)
    with unchanged(batch), pytest.raises(ReferenceArgumentError, match=why) as refusal:
        make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    assert refusal.value.argument == name


@dataclass
class Built:
    starts: list[int]
    tokens: int
    common: Any
    arguments: tuple[int, bool]


class Builder(AttentionMetadataBuilder[Built]):
    def __init__(self, *arguments):
        super().__init__(*arguments)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        meta = common_attn_metadata
        self.last = Built(meta.query_start_loc.tolist(), meta.num_actual_tokens, meta, (common_prefix_len, fast_build))
        return self.last


class Bk2:
    get_builder_cls = staticmethod(lambda: Builder)


def make_builder(prefix="FastPrefill", backend=Bk2):
    kind = create_fast_prefill_custom_backend(prefix, backend).get_builder_cls()
    return kind("spec", ["layer"], None, torch.device("cpu"))


def test_the_builder_sees_the_reduced_batch_and_returns_both_kinds():
    batch = wanting([6, 1, 4], [6, 9, 8], [5, 6, 10, 0], 3)
    builder = make_builder()
    with unchanged(batch):
        built = builder.build(7, batch, fast_build=True)
    assert isinstance(built, Built)
    assert isinstance(built, KVSharingFastPrefillMetadata)
    assert type(built).__module__ == __name__
    assert (built.starts, built.tokens, built.arguments) == ([0, 1, 2, 3], 3, (7, True))
    assert built.common is builder.last.common
    assert built.logits_indices_padded is batch.logits_indices_padded
    assert built.num_logits_indices == 3
    assert not hasattr(builder.last, "num_logits_indices")


def test_the_inherited_ways_to_build_are_wrapped_too():
    batch = wanting([6, 4], [6, 9], [9], 1)
    built = make_builder().build_for_cudagraph_capture(batch), make_builder().build_for_drafting(batch, 2)
    assert [(b.starts, b.arguments, b.num_logits_indices) for b in built] == [
        ([0, 0, 1], (0, False), 1),
        ([0, 0, 1], (0, True), 1),
    ]


@pytest.mark.parametrize(("indices", "count"), [([0, 1], None), (None, 2)])
def test_an_unarmed_batch_is_refused_even_as_a_pure_decode(indices, count):
    builder = make_builder()
    with pytest.raises(ReferenceArgumentError, match="not armed"):
        builder.build(0, wanting([1, 1], [6, 9], indices, count))
    assert not hasattr(builder, "last")


@pytest.mark.parametrize("result", [(1, 2), dataclass(frozen=True)(type("Frozen", (), {}))()])
def test_metadata_that_cannot_be_extended_is_refused(result):
    class Odd(Builder):
        def build(self, *arguments):
            return result

    class Backend:
        get_builder_cls = staticmethod(lambda: Odd)

    with pytest.raises(ReferenceArgumentError, match="unfrozen dataclass"):
        make_builder(backend=Backend).build(0, wanting([1], [6], [0], 1))
