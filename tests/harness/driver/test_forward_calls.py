"""Which calls a path is played by: hand-made pieces, their order, and bounds that stay true."""

from typing import Any

import pytest
import torch

from attncheck.harness.driver.step import forward_calls_of, make_step, num_builders
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import (
    AttentionType,
    DCPOptions,
    FastPrefillOptions,
    MicroBatchOptions,
    RequestSpec,
    SplitKVOptions,
)

CPU = torch.device("cpu")


def calls(case: Any, *features: str, threshold: int | None = None, **step: Any) -> Any:
    made = make_step(build_problem(case, 0), CPU, **step)
    return made, forward_calls_of(made, frozenset(features), threshold)


def lengths(call: Any) -> list[tuple[int, int]]:
    """(query_len, seq_len) of each request of a call."""
    query_lens = call.common.query_start_loc.diff().tolist()
    assert call.common.query_start_loc_cpu.tolist() == call.common.query_start_loc.tolist()
    assert call.common.seq_lens_cpu.tolist() == call.common.seq_lens.tolist()
    computed = [s - q for q, s in zip(query_lens, call.common.seq_lens.tolist(), strict=True)]
    assert call.common.num_computed_tokens_cpu.tolist() == computed
    return list(zip(query_lens, call.common.seq_lens.tolist(), strict=True))


def test_most_paths_are_one_call(make_case: Any) -> None:
    step, (call,) = calls(make_case((1, 5), (3, 3), padding=(1, 2)))
    assert call.query is step.query
    assert (call.num_rows, call.num_key_rows) == (4, 4)
    assert (call.rows.tolist(), call.nth.tolist(), call.position.tolist()) == ([0, 1, 2, 3], [0, 0, 1, 2], [4, 0, 1, 2])


class TestChunks:
    """A chunk of two pages; request 0 has rows at positions 30 to 34, request 1 at 32."""

    def case(self, make_case: Any) -> Any:
        return make_case((5, 35), (1, 33), attn_chunk_size=32, path="local", padding=(0, 2))

    def test_each_chunk_is_a_request(self, make_case: Any) -> None:
        step, (call,) = calls(self.case(make_case))
        assert lengths(call) == [(2, 32), (3, 3), (1, 1)]
        pages = step.block_table.tolist()
        assert call.common.block_table_tensor.tolist() == [pages[0][:2], pages[0][2:4], pages[1][2:4]]
        assert call.query is step.query
        assert torch.equal(call.common.slot_mapping, step.slot_mapping)
        assert call.nth.tolist() == [0, 1, 0, 1, 2, 0]
        assert call.position.tolist() == [30, 31, 0, 1, 2, 0]

    def test_a_backend_with_chunks_gets_the_batch(self, make_case: Any) -> None:
        _, (call,) = calls(self.case(make_case), "local")
        assert lengths(call) == [(5, 35), (1, 33)]

    def test_chunks_are_in_the_order_that_the_threshold_requires(self, make_case: Any) -> None:
        step, (call,) = calls(self.case(make_case), threshold=2)
        assert lengths(call) == [(2, 32), (1, 1), (3, 3)]
        order = [0, 1, 5, 2, 3, 4]
        assert call.rows.tolist() == order
        assert call.position.tolist() == [30, 31, 0, 0, 1, 2]
        assert torch.equal(call.query[:6], step.query[order])
        assert torch.equal(call.key[:6], step.key[order])
        assert call.common.slot_mapping.tolist() == [*step.slot_mapping[order].tolist(), -1, -1]
        assert torch.isnan(call.query[6:]).all()
        assert call.common.block_table_tensor[1].tolist() == step.block_table[1, 2:4].tolist()

    def test_requests_of_padding_stay_behind(self, make_case: Any) -> None:
        case = make_case((40, 40), (1, 33), attn_chunk_size=32, path="local", padding=(2, 1))
        _, (call,) = calls(case, threshold=8)
        assert lengths(call) == [(8, 8), (1, 1), (32, 32), (0, 0), (0, 0)]

    def test_bounds_do_not_reach_past_the_table(self, make_case: Any) -> None:
        _, (call,) = calls(self.case(make_case), loose=("max_query_len", "max_seq_len"))
        assert (call.common.max_query_len, call.common.max_seq_len) == (8, 32)


class TestMicroBatches:
    """Twelve rows: seven of a request of 40 tokens, three of a prompt, two of a request of 70."""

    def case(self, make_case: Any, *cuts: int, **fields: Any) -> Any:
        options = MicroBatchOptions(cuts=cuts)
        return make_case((7, 40), (3, 3), (2, 70), path="micro_batch", options=options, **fields)

    def test_a_request_cut_in_two(self, make_case: Any) -> None:
        step, (first, last) = calls(self.case(make_case, 3, padding=(1, 2)))
        assert num_builders(step.problem) == 2
        assert (first.builder, last.builder) == (0, 1)
        assert (lengths(first), lengths(last)) == ([(3, 36)], [(4, 40), (3, 3), (2, 70), (0, 0)])
        assert (first.rows.tolist(), last.rows.tolist()) == ([0, 1, 2], list(range(3, 12)))
        assert first.position.tolist() == [33, 34, 35]
        assert last.position.tolist() == [36, 37, 38, 39, 0, 1, 2, 68, 69]
        assert last.nth.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
        assert (len(first.query), len(last.query), last.num_rows) == (3, 11, 9)
        assert (first.common.num_actual_tokens, last.common.num_actual_tokens) == (3, 11)
        assert torch.equal(torch.cat([c.common.slot_mapping for c in (first, last)]), step.slot_mapping)

    def test_cuts_at_requests_and_inside_of_one(self, make_case: Any) -> None:
        _, pieces = calls(self.case(make_case, 2, 5, 7, 11))
        assert [lengths(piece) for piece in pieces] == [[(2, 35)], [(3, 38)], [(2, 40)], [(3, 3), (1, 69)], [(1, 70)]]

    def test_a_tail_left_by_a_cut_goes_where_the_threshold_wants_it(self, make_case: Any) -> None:
        _, (first, last) = calls(self.case(make_case, 5), threshold=2)
        assert lengths(first) == [(5, 38)]
        assert lengths(last) == [(2, 40), (2, 70), (3, 3)]
        assert last.rows.tolist() == [5, 6, 10, 11, 7, 8, 9]

    def test_bounds_are_those_of_the_piece(self, make_case: Any) -> None:
        _, (first, last) = calls(self.case(make_case, 3), loose=("max_query_len", "max_seq_len"))
        assert (first.common.max_query_len, first.common.max_seq_len) == (3, 43)
        assert (last.common.max_query_len, last.common.max_seq_len) == (9, 77)

    def test_cuts_between_requests_stay_there_in_another_order(self, make_case: Any) -> None:
        case = self.case(make_case, 7, causal=False)
        _, pieces = calls(case, order=[2, 1, 0])
        assert [lengths(piece) for piece in pieces] == [[(2, 70)], [(3, 3), (7, 40)]]


class TestParts:
    """Calls over a part of the keys each, to be merged."""

    @pytest.mark.parametrize("features", [(), ("cascade",)])
    def test_a_cascade(self, make_case: Any, features: tuple[str, ...]) -> None:
        requests = [RequestSpec(query_len=n, seq_len=60, shared_prefix=32) for n in (1, 5)]
        step, made = calls(make_case(*requests, path="cascade"), *features)
        assert num_builders(step.problem) == 1
        if features:
            assert [(call.common_prefix_len, lengths(call)) for call in made] == [(32, [(1, 60), (5, 60)])]
            return
        assert [call.common_prefix_len for call in made] == [0, 0]
        assert [lengths(call) for call in made] == [[(1, 32), (5, 32)], [(1, 28), (5, 28)]]
        assert [call.common.causal for call in made] == [False, True]
        assert [call.carries_sinks for call in made] == [True, False]
        written = [call.common.slot_mapping.tolist() for call in made]
        assert written == [[-1] * 6, step.slot_mapping.tolist()]

    def test_ranks_write_their_own_keys(self, make_case: Any) -> None:
        case = make_case((1, 4), (1, 5), path="dcp", options=DCPOptions(size=2, interleave=2), padding=(1, 1))
        step, made = calls(case)
        assert [lengths(call) for call in made] == [[(1, 2), (1, 3), (0, 0)], [(1, 2), (1, 2), (0, 0)]]
        assert all(call.common.causal for call in made)
        # Position 3 lies on rank 1, position 4 on rank 0.
        slots = step.slot_mapping.tolist()
        assert [call.common.slot_mapping.tolist() for call in made] == [[-1, slots[1], -1], [slots[0], -1, -1]]

    def test_runs_before_the_last_are_not_causal(self, make_case: Any) -> None:
        case = make_case((4, 52), path="split_kv", options=SplitKVOptions(parts=3))
        _, made = calls(case)
        assert [(lengths(call), call.common.causal) for call in made] == [
            ([(4, 16)], False),
            ([(4, 16)], False),
            ([(4, 20)], True),
        ]


def test_fast_prefill_hands_over_the_last_rows_and_the_metadata_of_all(make_case: Any) -> None:
    case = make_case((6, 40), (1, 9), path="fast_prefill", options=FastPrefillOptions(rows=2), padding=(0, 2))
    step, (call,) = calls(case)
    assert lengths(call) == [(6, 40), (1, 9)]
    assert len(call.query) == 5
    assert call.key is None
    assert call.common.logits_indices_padded.tolist() == [4, 5, 6, 0, 0]
    assert call.common.num_logits_indices == call.num_rows == 3
    assert call.position.tolist() == [38, 39, 8]
    assert (step.slot_mapping >= 0).tolist() == [True] * 7 + [False] * 2


def test_bounds_of_sequences_without_a_table(make_case: Any) -> None:
    _, (call,) = calls(
        make_case((4, 4), (2, 2), attn_type=AttentionType.ENCODER_ONLY), loose=("max_query_len", "max_seq_len")
    )
    assert (call.common.max_query_len, call.common.max_seq_len) == (6, 6)
