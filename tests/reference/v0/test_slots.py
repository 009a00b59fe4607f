"""The slots of one sequence: worked examples, both paths, refusals."""

from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import (
    _compute_slot_mapping_numpy,
    _compute_slot_mapping_python,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    is_block_tables_empty,
)

TABLE = [7, 2, 5]


def slots(seq_len, context_len, start_idx, table=TABLE, block_size=4):
    """What a call appends behind a first element; the id of the sequence is 3."""
    mapping = [99]
    assert compute_slot_mapping(False, mapping, 3, seq_len, context_len, start_idx, block_size, {3: table}) is None
    assert mapping.pop(0) == 99
    return mapping


def test_a_table_may_repeat_a_block_and_what_is_not_needed_may_be_anything():
    assert slots(10, 0, 2, [7, 2, 7]) == [-1, -1, 30, 31, 8, 9, 10, 11, 28, 29]
    assert slots(10, 10, 10, []) == []
    assert slots(2, 0, 0, [7, -1, -5]) == [28, 29]
    assert slots(10, 6, 0, [-1, 2, 5]) == [10, 11, 20, 21]
    mapping = [5]
    compute_slot_mapping(True, mapping, 3, 5, 2, 0, 4, None)
    assert mapping == [5, -1, -1, -1, -1, -1], "a profile run"
    found = slots(np.int64(10), np.int64(8), np.int64(0), np.array(TABLE, dtype=np.int32), np.int64(4))
    assert {type(slot) for slot in found} == {int}


def test_what_counts_as_no_tables():
    for empty in (None, {}, {3: None}, OrderedDict({3: None})):
        assert is_block_tables_empty(empty) is True
    for tables in ({3: []}, {3: None, 4: [1]}, [], MappingProxyType({})):
        assert is_block_tables_empty(tables) is False


def test_the_first_position_worth_storing():
    """A prompt's positions before its window are not worth it; decodes and chunks have none."""
    assert compute_slot_mapping_start_idx(True, 10, 0, None) == 0
    assert compute_slot_mapping_start_idx(True, 10, 0, 8) == 2
    assert compute_slot_mapping_start_idx(False, 10, 0, 8) == 0
    assert compute_slot_mapping_start_idx(True, 10, 32, 8) == 2
    for is_prompt in (True, False):
        with pytest.raises(ReferenceArgumentError, match="sliding_window = 0"):
            compute_slot_mapping_start_idx(is_prompt, 10, 0, 0)


@st.composite
def sequences(draw):
    """(block size, table without repetition, context length, sequence length)."""
    block_size = draw(st.integers(1, 9))
    table = draw(st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True))
    seq_len = draw(st.integers(0, block_size * len(table)))
    return block_size, table, draw(st.integers(0, seq_len)), seq_len


@given(sequences(), st.data())
def test_every_new_token_is_masked_or_in_its_slot(sequence, data):
    block_size, table, context_len, seq_len = sequence
    start_idx = data.draw(st.integers(0, seq_len))
    flat = [block * block_size + offset for block in table for offset in range(block_size)]
    want = [flat[position] if position >= start_idx else -1 for position in range(context_len, seq_len)]
    assert slots(seq_len, context_len, start_idx, table, block_size) == want


@pytest.mark.parametrize("fill", [_compute_slot_mapping_python, _compute_slot_mapping_numpy])
def test_either_half_appends_a_range_of_positions(fill):
    mapping = [1]
    fill(mapping, [*TABLE, -3], 3, 10, 4)
    assert mapping == [1, 31, 8, 9, 10, 11, 20, 21]
    assert {type(slot) for slot in mapping} == {int}
    fill(mapping, [], 3, 3, 4)
    assert len(mapping) == 8


@pytest.mark.parametrize("fill", [_compute_slot_mapping_python, _compute_slot_mapping_numpy])
@pytest.mark.parametrize(
    ("table", "start", "end", "block_size", "message"),
    [
        (TABLE, 0, 13, 4, r"at least 4 blocks long for positions 0 to 12 .* length is 3"),
        ([7, -2, 5], 2, 5, 4, "it has -2"),
        (TABLE, -1, 5, 4, "range_start = -1"),
    ],
)
def test_either_half_refuses_before_it_appends(fill, table, start, end, block_size, message):
    mapping = [1]
    with pytest.raises(ReferenceArgumentError, match=message):
        fill(mapping, table, start, end, block_size)
    assert mapping == [1]


GOOD = {"seq_len": 10, "context_len": 0, "start_idx": 2, "block_size": 4, "block_tables": {3: TABLE, 8: [1]}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_len": 13}, r"block_tables\[3\] = \[7, 2, 5\]: .* at least 4 blocks .* 2 to 12 .* length is 3"),
        ({"block_tables": {3: None, 8: [1]}}, r"block_tables\[3\] = None"),
        ({"block_tables": None}, r"block_tables = None: .* sequence 3"),
        ({"block_size": 0}, "block_size = 0"),
        ({"context_len": 11}, "seq_len = 10: .* context_len 11"),
        ({"start_idx": 11}, "start_idx = 11: .* seq_len 10"),
        ({"block_tables": {3: [7, -2, 5]}}, r"block_tables\[3\] .* negative .* it has -2"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_appended(wrong, message):
    mapping = [99]
    compute_slot_mapping(False, mapping, 3, **GOOD)
    before = list(mapping)
    assert len(before) == 11
    with pytest.raises(ReferenceArgumentError, match=message):
        compute_slot_mapping(False, mapping, 3, **{**GOOD, **wrong})
    assert mapping == before
