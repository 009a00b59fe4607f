"""Relations of slot mappings of random sequences."""

from hypothesis import given
from hypothesis import strategies as st

from attncheck.reference.v0 import compute_slot_mapping, compute_slot_mapping_start_idx


@st.composite
def sequences(draw):
    """(block size, table without repetition, context length, sequence length)."""
    block_size = draw(st.integers(1, 9))
    table = draw(st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True))
    seq_len = draw(st.integers(0, block_size * len(table)))
    return block_size, table, draw(st.integers(0, seq_len)), seq_len


def appended(block_size, table, context_len, seq_len, start_idx=0):
    mapping = []
    compute_slot_mapping(False, mapping, "s", seq_len, context_len, start_idx, block_size, {"s": table})
    return mapping


@given(sequences(), st.data())
def test_every_new_token_is_masked_or_in_its_slot(sequence, data):
    block_size, table, context_len, seq_len = sequence
    start_idx = data.draw(st.integers(0, seq_len))
    flat = [block * block_size + offset for block in table for offset in range(block_size)]
    mapping = appended(*sequence, start_idx)
    assert len(mapping) == seq_len - context_len
    for position, slot in zip(range(context_len, seq_len), mapping, strict=True):
        assert slot == (flat[position] if position >= start_idx else -1)


@given(sequences(), st.data())
def test_two_chunks_are_one(sequence, data):
    block_size, table, context_len, seq_len = sequence
    cut = data.draw(st.integers(context_len, seq_len))
    whole = appended(*sequence)
    assert appended(block_size, table, context_len, cut) + appended(block_size, table, cut, seq_len) == whole


@given(sequences(), st.data())
def test_no_two_tokens_share_a_slot_while_tables_share_no_block(sequence, data):
    block_size = sequence[0]
    others = data.draw(st.lists(st.integers(401, 900), max_size=20, unique=True))
    mapping = appended(*sequence) + appended(block_size, others, 0, len(others) * block_size)
    assert len(set(mapping)) == len(mapping)


@given(sequences(), st.integers(1, 1000))
def test_slots_follow_their_blocks(sequence, shift):
    block_size, table, context_len, seq_len = sequence
    moved = appended(block_size, [block + shift for block in table], context_len, seq_len)
    assert moved == [slot + shift * block_size for slot in appended(*sequence)]


@given(sequences(), st.integers(1, 80))
def test_a_window_masks_no_token_that_is_read_again(sequence, window):
    _, _, context_len, seq_len = sequence
    query_len = seq_len - context_len
    start = compute_slot_mapping_start_idx(True, query_len, context_len, window)
    stored = [slot for slot in appended(*sequence, start) if slot != -1]
    assert len(stored) >= min(window, query_len)
    if context_len == 0:
        assert len(stored) == min(window, query_len)
