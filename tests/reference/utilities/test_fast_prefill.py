"""KV-sharing fast prefill: the batch reduced to the rows that want logits, and backends that see it."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionMetadataBuilder,
    KVSharingFastPrefillMetadata,
    create_fast_prefill_custom_backend,
    make_kv_sharing_fast_prefill_common_attn_metadata,
)


def wanting(common, query_lens, seq_lens, indices, count, index_dtype=torch.int64, **fields):
    padded = None if indices is None else torch.tensor(indices, dtype=index_dtype)
    return common(query_lens, seq_lens, logits_indices_padded=padded, num_logits_indices=count, **fields)


@pytest.mark.parametrize("index", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("q", "s", "indices", "count", "starts", "longest", "computed"),
    [
        ([6, 1, 4], [6, 9, 8], [5, 6, 9, 10, 0, 0], 4, [0, 1, 2, 4], 2, [5, 8, 6]),
        ([6, 1, 0], [6, 9, 0], [6, 6], 1, [0, 0, 1, 1], 1, [6, 8, 0]),
        ([6, 4], [6, 9], [0], 0, [0, 0, 0], 0, [6, 9]),
        ([6, 4], [6, 9], [9], 1, [0, 0, 1], 1, [6, 8]),
        ([2, 0, 3], [2, 5, 3], [0, 1, 4], 3, [0, 2, 2, 3], 2, [0, 5, 2]),
    ],
)
def test_reduction(q, s, indices, count, starts, longest, computed, dtype, index, common, unchanged, same_storage):
    batch = wanting(common, q, s, indices, count, index, dtype=dtype, one_object=True, causal=False, extra_tokens=2)
    with unchanged(batch):
        got = make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    assert got.query_start_loc.tolist() == got.query_start_loc_cpu.tolist() == starts
    assert got.seq_lens_cpu.tolist() == s
    assert got.num_computed_tokens_cpu.tolist() == computed
    counts = (got.num_reqs, got.num_actual_tokens, got.max_query_len)
    assert counts == (len(q), count, longest)
    assert all(type(number) is int for number in counts)
    new = (got.query_start_loc, got.query_start_loc_cpu, got.seq_lens_cpu, got.num_computed_tokens_cpu)
    assert {tensor.dtype for tensor in new} == {dtype}
    for kept in ("seq_lens", "max_seq_len", "block_table_tensor", "slot_mapping"):
        assert getattr(got, kept) is getattr(batch, kept)
    assert not same_storage(got.query_start_loc, got.query_start_loc_cpu)
    assert not same_storage(got.seq_lens, got.seq_lens_cpu)
    assert got.causal is True
    dropped = ("logits_indices_padded", "num_logits_indices", "encoder_seq_lens", "dcp_local_seq_lens")
    assert [getattr(got, name) for name in dropped] == [None] * 4


def test_every_field_keeps_its_own_dtype(common):
    batch = wanting(common, [6, 4], [6, 9], [9], 1)
    batch.query_start_loc_cpu, batch.seq_lens = batch.query_start_loc_cpu.long(), batch.seq_lens.long()
    got = make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    found = [getattr(got, name).dtype for name in ("query_start_loc", "query_start_loc_cpu", "num_computed_tokens_cpu")]
    assert found == [torch.int32, torch.int64, torch.int32]
    assert got.seq_lens_cpu.dtype == torch.int64


@pytest.mark.parametrize(("indices", "count"), [(None, None), ([0, 1], 2), ([7], 9)])
def test_a_pure_decode_is_the_same_object(indices, count, common):
    batch = wanting(common, [1, 1], [6, 9], indices, count)
    assert make_kv_sharing_fast_prefill_common_attn_metadata(batch) is batch


@pytest.mark.parametrize(
    ("indices", "count", "name", "why"),
    [
        (None, None, "logits_indices_padded", "armed"),
        (None, 1, "logits_indices_padded", "armed"),
        ([9], None, "num_logits_indices", "armed"),
        ([9], 2, "num_logits_indices", "at most 1"),
        ([9], -1, "num_logits_indices", "at least 0"),
        ([9], 1.0, "num_logits_indices", "integer"),
        ([10], 1, "logits_indices_padded", "a token"),
        ([-1, 9], 2, "logits_indices_padded", "a token"),
        ([9, 5], 2, "logits_indices_padded", "ascending"),
        ([9, 9], 2, "logits_indices_padded", "ascending"),
        ([8], 1, "logits_indices_padded", "last tokens of request 1"),
        ([5, 7, 9], 3, "logits_indices_padded", "last tokens of request 1"),
        ([0, 9], 2, "logits_indices_padded", "last tokens of request 0"),
        ([[9]], 1, "logits_indices_padded.shape", "any"),
    ],
)
def test_refusals_name_the_argument(indices, count, name, why, common, unchanged):
    batch = wanting(common, [6, 4], [6, 9], indices, count)
    with unchanged(batch), pytest.raises(ReferenceArgumentError, match=why) as refusal:
        make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    assert refusal.value.argument == name


def test_lengths_of_another_number_of_requests_are_refused(common):
    batch = wanting(common, [6, 4], [6, 9], [9], 1)
    batch.seq_lens = batch.seq_lens[:1]
    with pytest.raises(ReferenceArgumentError, match="seq_lens"):
        make_kv_sharing_fast_prefill_common_attn_metadata(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_indices_are_integers(dtype, common):
    with pytest.raises(ReferenceArgumentError, match="integers"):
        make_kv_sharing_fast_prefill_common_attn_metadata(wanting(common, [6, 4], [6, 9], [1], 1, dtype))


@given(
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=6),
    padding=st.integers(0, 3),
)
def test_wanted_tails_become_the_queries(requests, padding, common):
    """Every wanted row keeps its request and its position; all of them wanted changes nothing."""
    query_lens, seq_lens = [q for q, _, _ in requests], [q + c for q, c, _ in requests]
    ends = [sum(query_lens[: r + 1]) for r in range(len(requests))]
    wanted = [min(n, q) for q, _, n in requests]
    indices = [t for end, n in zip(ends, wanted, strict=True) for t in range(end - n, end)]
    batch = wanting(common, query_lens, seq_lens, indices + [0] * padding, len(indices), max_query_len=9)
    got = make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    assert got.query_start_loc.diff().tolist() == wanted
    assert (got.seq_lens - got.num_computed_tokens_cpu).tolist() == wanted
    everything = wanting(common, query_lens, seq_lens, list(range(ends[-1])), ends[-1], max_query_len=9)
    same = make_kv_sharing_fast_prefill_common_attn_metadata(everything)
    assert same.query_start_loc.tolist() == batch.query_start_loc.tolist()


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
    @staticmethod
    def get_builder_cls():
        return Builder


def make_builder(prefix="FastPrefill", backend=Bk2):
    kind = create_fast_prefill_custom_backend(prefix, backend).get_builder_cls()
    return kind("spec", ["layer"], None, torch.device("cpu"))


def test_the_backend_is_a_subclass_and_the_underlying_one_stays():
    backend = create_fast_prefill_custom_backend("FastPrefill", Bk2)
    assert backend.__name__ == "FastPrefillBk2"
    assert issubclass(backend, Bk2)
    assert issubclass(backend.get_builder_cls(), Builder)
    assert backend.get_builder_cls() is not Builder
    assert Bk2.get_builder_cls() is Builder
    assert make_builder().layer_names == ["layer"]


def test_the_builder_sees_the_reduced_batch_and_returns_both_kinds(common, unchanged):
    batch = wanting(common, [6, 1, 4], [6, 9, 8], [5, 6, 10, 0], 3)
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


def test_the_inherited_ways_to_build_are_wrapped_too(common):
    batch = wanting(common, [6, 4], [6, 9], [9], 1)
    built = make_builder().build_for_cudagraph_capture(batch), make_builder().build_for_drafting(batch, 2)
    assert [(b.starts, b.arguments, b.num_logits_indices) for b in built] == [
        ([0, 0, 1], (0, False), 1),
        ([0, 0, 1], (0, True), 1),
    ]


def test_a_pure_decode_reaches_the_builder_as_it_is(common):
    batch = wanting(common, [1, 1], [6, 9], [0, 1], 2)
    built = make_builder().build(0, batch)
    assert built.common is batch
    assert (built.starts, built.num_logits_indices) == ([0, 1, 2], 2)


@pytest.mark.parametrize(("indices", "count"), [(None, None), ([0, 1], None), (None, 2)])
def test_an_unarmed_batch_is_refused_even_as_a_pure_decode(indices, count, common):
    builder = make_builder()
    with pytest.raises(ReferenceArgumentError, match="not armed"):
        builder.build(0, wanting(common, [1, 1], [6, 9], indices, count))
    assert not hasattr(builder, "last")


def test_building_twice_makes_one_class_and_wrapping_twice_works(common):
    batch, builder = wanting(common, [6, 4], [6, 9], [9], 1), make_builder()
    assert type(builder.build(0, batch)) is type(builder.build(0, batch))
    decode = wanting(common, [1, 1], [6, 9], [0, 1], 2)
    twice = make_builder("Again", create_fast_prefill_custom_backend("Once", Bk2)).build(0, decode)
    assert isinstance(twice, Built)
    assert twice.num_logits_indices == 2


@pytest.mark.parametrize("result", [(1, 2), dataclass(frozen=True)(type("Frozen", (), {}))()])
def test_metadata_that_cannot_be_extended_is_refused(result, common):
    class Odd(Builder):
        def build(self, *arguments):
            return result

    class Backend:
        get_builder_cls = staticmethod(lambda: Odd)

    with pytest.raises(ReferenceArgumentError, match="unfrozen dataclass"):
        make_builder(backend=Backend).build(0, wanting(common, [1], [6], [0], 1))
