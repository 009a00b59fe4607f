"""Relations of builds of random batches: counts, repetition, chunking, what a graph build leaves behind."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

BLOCK_SIZE = 4  # that of the builder fixture


@st.composite
def steps(draw, seq, group):
    """Groups of one step: prompts first, each perhaps without tables or with a prefix hit, then one of decodes.

    Tables of the batch share no block.
    """
    groups: list[SimpleNamespace] = []
    free = draw(st.permutations(range(200)))

    def sequence(seq_id: int, is_prompt: bool) -> Any:
        seq_len = draw(st.integers(1, 30))
        context_len = draw(st.integers(0, seq_len - 1)) if is_prompt else seq_len - 1
        pages = -(-seq_len // BLOCK_SIZE)
        return seq(seq_id, seq_len, context_len, [free.pop() for _ in range(pages)])

    for seq_id in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["plain", "hit", "profile"]))
        given_tables = {"tables": None} if kind == "profile" else {}
        groups.append(group(True, sequence(seq_id, True), hit=kind == "hit", **given_tables))
    decodes = [sequence(10 + i, False) for i in range(draw(st.integers(0 if groups else 1, 4)))]
    return [*groups, group(False, *decodes)]


def lens(groups, name):
    return [length for group in groups for length in getattr(group, name)]


def build(instance, groups, pad=-1):
    """A step over the groups, its ``seq_lens`` padded with 1s as a runner pads."""
    instance.input_builder.inter_data_list = groups
    instance.prepare()
    seq_lens, query_lens = lens(groups, "seq_lens"), lens(groups, "query_lens")
    return instance.build([*seq_lens, *[1] * max(pad, 0)], query_lens, pad, len(query_lens) + max(pad, 0))


def same(one, other):
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for (_, x), (_, y) in zip(vars(one).items(), vars(other).items(), strict=True)
    )


def padded(row, metadata):
    return [*row, *[0] * (metadata.block_tables.shape[1] - len(row))]


def leftovers():
    return np.arange(1000, 1120, dtype=np.int32).reshape(12, 10)


@given(data=st.data(), pad=st.integers(-1, 4))
def test_slots_are_counted(data, pad, seq, group, builder):
    groups = data.draw(steps(seq, group))
    metadata = build(builder(array=leftovers()), groups, pad)
    expected = sum(
        seq_len if entry.block_tables is None else seq_len - context_len
        for entry in groups
        for seq_len, context_len in zip(entry.orig_seq_lens, entry.context_lens, strict=True)
    )
    assert len(metadata.slot_mapping) == expected + max(pad, 0)
    stored = [slot for slot in metadata.slot_mapping.tolist() if slot >= 0]
    assert len(set(stored)) == len(stored)


@given(data=st.data())
def test_queries_end_where_the_tokens_end(data, seq, group, builder):
    metadata = build(builder(), data.draw(steps(seq, group)))
    assert int(metadata.query_start_loc[-1]) == metadata.num_prefill_tokens + metadata.num_decode_tokens
    assert len(metadata.query_start_loc) == len(metadata.context_lens_tensor) + 1


@given(data=st.data(), chunked=st.booleans())
def test_building_twice_gives_the_same_and_changes_nothing(data, chunked, seq, group, builder):
    groups, array = data.draw(steps(seq, group)), leftovers()
    before = copy.deepcopy(groups)
    instance = builder(chunked=chunked, array=array)
    assert same(build(instance, groups), build(instance, groups))
    assert groups == before
    assert np.array_equal(array, leftovers())


@given(data=st.data())
def test_chunked_prefill_changes_rows_of_plain_prompts_only(data, seq, group, builder):
    groups = data.draw(steps(seq, group))
    plain, chunked = build(builder(), groups), build(builder(chunked=True), groups)
    rows = [
        (entry, table)
        for entry in groups
        for table in (entry.block_tables or {seq_id: [] for seq_id in entry.seq_ids}).values()
    ]
    for i, (entry, table) in enumerate(rows):
        ordinary = entry.is_prompt and not entry.prefix_cache_hit
        assert chunked.block_tables[i].tolist() == padded(table, chunked)
        assert plain.block_tables[i].tolist() == padded([] if ordinary else table, plain)
    del plain.block_tables, chunked.block_tables
    assert same(plain, chunked)


@given(data=st.data())
def test_a_smaller_graph_build_leaves_the_first_ones_entries_behind_its_rows(data, seq, group, builder):
    instance = builder(array=leftovers())
    first = build(instance, data.draw(steps(seq, group)), data.draw(st.integers(0, 3))).block_tables
    groups = data.draw(steps(seq, group))
    second = build(instance, groups, pad=0).block_tables
    rows = instance.block_tables
    for i, row in enumerate(rows[: len(first)]):
        assert second[i].tolist() == [*row, *first[i].tolist()[len(row) :]]
    assert torch.equal(torch.from_numpy(instance.runner.graph_block_tables)[: len(second)], second)
    assert torch.equal(torch.from_numpy(instance.runner.graph_block_tables)[len(rows) : len(first)], first[len(rows) :])
