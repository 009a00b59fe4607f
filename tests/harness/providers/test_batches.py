"""The batches that providers get: laid out as a scheduler would, drawn the same each time."""

import pytest
import torch

from attncheck.cases.loader import load_suite
from attncheck.harness.providers.batches import ALWAYS, MAX_REQUESTS, ProviderBatch, batches_of, drawn_batches

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def drawn():
    return drawn_batches(0)


def test_what_is_drawn_is_the_same_each_time_distinct_small_first_and_covers_every_dimension(drawn):
    assert drawn_batches(0) == drawn != drawn_batches(1)
    assert len({(b.query_lens, b.seq_lens, b.block_size, b.padding_tokens, b.causal) for b in drawn}) > 50
    assert [batch.size for batch in drawn] == sorted(batch.size for batch in drawn)
    for holds in (
        lambda batch: batch.has_padding_requests,
        lambda batch: batch.padding_tokens,
        lambda batch: not batch.causal,
        lambda batch: batch.index_dtype == torch.int64,
        lambda batch: max(batch.query_lens) == 1,
        lambda batch: list(batch.query_lens) != sorted(batch.query_lens),
    ):
        assert any(map(holds, drawn))


def test_metadata_match_the_batch(drawn):
    for batch in (*ALWAYS, *drawn):
        made = batch.metadata(CPU)
        assert made.query_start_loc_cpu.diff().tolist() == list(batch.query_lens)
        assert torch.equal(made.seq_lens_cpu - made.query_start_loc_cpu.diff(), made.num_computed_tokens_cpu)
        assert made.num_actual_tokens == len(made.slot_mapping) == batch.num_tokens + batch.padding_tokens
        assert (made.max_query_len, made.max_seq_len) == (max(batch.query_lens), max(batch.seq_lens))
        assert made.query_start_loc.data_ptr() != made.query_start_loc_cpu.data_ptr()
        assert made.seq_lens.data_ptr() != made.seq_lens_cpu.data_ptr()


def test_slots_follow_from_the_table_and_no_block_has_two_owners():
    for batch in ALWAYS:
        made = batch.metadata(CPU)
        assert made.block_table_tensor.unique().numel() == made.block_table_tensor.numel()
        slots = []
        for row, (new, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            for position in range(total - new, total):
                block = int(made.block_table_tensor[row, position // batch.block_size])
                slots.append(block * batch.block_size + position % batch.block_size)
        assert made.slot_mapping.tolist() == slots + [-1] * batch.padding_tokens


def test_batches_of_a_suite_are_distinct_keep_padding_and_lack_impossible_and_huge_ones(make_case):
    cases = load_suite("padding").cases
    found = batches_of([*cases, *cases])
    assert len(found) < len(cases)
    assert len({(b.query_lens, b.seq_lens, b.block_size, b.padding_tokens) for b in found}) == len(found)
    padded = next(batch for batch in found if batch.name == "padding/one-padding")
    assert (padded.query_lens, padded.seq_lens, padded.padding_tokens) == ((1, 1, 1, 0), (40, 40, 40, 0), 1)
    short, huge = make_case((5, 3)), make_case(*[(1, 2)] * (MAX_REQUESTS + 1))
    assert [batch.query_lens for batch in batches_of([short, huge, make_case((2, 3))])] == [(2,)]


def test_a_batch_states_how_to_repeat_it():
    batch = ProviderBatch("mine", (2, 0), (5, 0), padding_tokens=3, causal=False, index_dtype=torch.int64)
    assert str(batch) == "mine (q 2 0 / s 5 0, 3 padding tokens, not causal, int64)"
    many = ProviderBatch("many", (1,) * 20, (2,) * 20)
    assert "20 in all" in str(many)
