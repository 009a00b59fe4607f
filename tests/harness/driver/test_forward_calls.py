"""The calls of a step: pieces of a path, the strides of their operands, and their results put together."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from attncheck.backends.conventions import Conventions
from attncheck.harness.driver.outputs import CallResult, GuardedBuffer, merged, placed
from attncheck.harness.driver.step import ForwardCall, forward_calls_of, make_step, num_builders, operand_views
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import AttentionType
from attncheck.reference.step_spec import (
    DCPOptions,
    FastPrefillOptions,
    MicroBatchOptions,
    RequestSpec,
    SpecDecodeOptions,
    SplitKVOptions,
    StrideForm,
    StridesSpec,
)


def calls(case, *features, threshold=None, **step):
    made = make_step(build_problem(case, 0), torch.device("cpu"), **step)
    return made, forward_calls_of(made, frozenset(features), threshold)


def lengths(call):
    """(query_len, seq_len) of each request of a call, whose metadata must agree."""
    common = call.common
    query_lens, seq_lens = common.query_start_loc.diff().tolist(), common.seq_lens.tolist()
    assert common.query_start_loc_cpu.tolist() == common.query_start_loc.tolist()
    assert common.seq_lens_cpu.tolist() == seq_lens
    assert common.num_computed_tokens_cpu.tolist() == [s - q for q, s in zip(query_lens, seq_lens, strict=True)]
    return list(zip(query_lens, seq_lens, strict=True))


def chunked(make_case, *requests, **padding):
    """Chunks of two pages; request 0 has rows at positions 30 to 34, request 1 at 32."""
    return make_case(*(requests or ((5, 35), (1, 33))), attn_chunk_size=32, path="local", **padding)


def cut(make_case, *cuts, **fields):
    """Twelve rows: seven of a request of 40 tokens, three of a prompt, two of a request of 70."""
    options = MicroBatchOptions(cuts=cuts)
    return make_case((7, 40), (3, 3), (2, 70), path="micro_batch", options=options, **fields)


def cascade(make_case):
    return make_case(*[RequestSpec(query_len=n, seq_len=60, shared_prefix=32) for n in (1, 5)], path="cascade")


def split(make_case):
    return make_case((4, 52), path="split_kv", options=SplitKVOptions(parts=3))


@pytest.mark.parametrize(
    ("make", "arguments", "how", "expected"),
    [
        pytest.param(chunked, (), {}, [[(2, 32), (3, 3), (1, 1)]], id="each chunk is a request"),
        pytest.param(chunked, (), {"threshold": 2}, [[(2, 32), (1, 1), (3, 3)]], id="chunks are ordered"),
        pytest.param(
            cut, (2, 5, 7, 11), {}, [[(2, 35)], [(3, 38)], [(2, 40)], [(3, 3), (1, 69)], [(1, 70)]], id="cuts"
        ),
        pytest.param(cut, (5,), {"threshold": 2}, [[(5, 38)], [(2, 40), (2, 70), (3, 3)]], id="a tail goes forward"),
        pytest.param(cascade, (), {}, [[(1, 32), (5, 32)], [(1, 28), (5, 28)]], id="a cascade"),
        pytest.param(split, (), {}, [[(4, 16)], [(4, 16)], [(4, 20)]], id="runs of keys"),
    ],
)
def test_the_lengths_of_the_calls(make_case, make, arguments, how, expected):
    _, made = calls(make(make_case, *arguments), **how)
    assert [lengths(call) for call in made] == expected


def test_most_paths_and_backends_with_the_feature_get_one_call(make_case):
    step, (call,) = calls(make_case((1, 5), (3, 3), padding=(1, 2)))
    assert call.query is step.query
    assert (call.num_rows, call.num_key_rows) == (4, 4)
    assert (call.rows.tolist(), call.nth.tolist(), call.position.tolist()) == ([0, 1, 2, 3], [0, 0, 1, 2], [4, 0, 1, 2])
    _, (local,) = calls(chunked(make_case), "local")
    assert lengths(local) == [(5, 35), (1, 33)]
    _, (prefix,) = calls(cascade(make_case), "cascade")
    assert (prefix.common_prefix_len, lengths(prefix)) == (32, [(1, 60), (5, 60)])


def test_chunks_have_their_pages_and_positions_and_requests_of_padding_stay_behind(make_case):
    step, (call,) = calls(chunked(make_case, padding=(0, 2)))
    pages = step.block_table.tolist()
    assert call.common.block_table_tensor.tolist() == [pages[0][:2], pages[0][2:4], pages[1][2:4]]
    assert call.query is step.query
    assert torch.equal(call.common.slot_mapping, step.slot_mapping)
    assert call.nth.tolist() == [0, 1, 0, 1, 2, 0]
    assert call.position.tolist() == [30, 31, 0, 1, 2, 0]

    step, (call,) = calls(chunked(make_case, padding=(0, 2)), threshold=2)
    order = [0, 1, 5, 2, 3, 4]
    assert call.rows.tolist() == order
    assert call.position.tolist() == [30, 31, 0, 0, 1, 2]
    assert torch.equal(call.query[:6], step.query[order])
    assert torch.equal(call.key[:6], step.key[order])
    assert call.common.slot_mapping.tolist() == [*step.slot_mapping[order].tolist(), -1, -1]
    assert torch.isnan(call.query[6:]).all()
    assert call.common.block_table_tensor[1].tolist() == step.block_table[1, 2:4].tolist()

    _, (call,) = calls(chunked(make_case, (40, 40), (1, 33), padding=(2, 1)), threshold=8)
    assert lengths(call) == [(8, 8), (1, 1), (32, 32), (0, 0), (0, 0)]


def test_a_request_cut_in_two(make_case):
    step, (first, last) = calls(cut(make_case, 3, padding=(1, 2)))
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
    _, pieces = calls(cut(make_case, 7, causal=False), order=[2, 1, 0])
    assert [lengths(piece) for piece in pieces] == [[(2, 70)], [(3, 3), (7, 40)]]


def test_loose_bounds_are_those_of_the_call_and_do_not_reach_past_the_table(make_case):
    encoder = make_case((4, 4), (2, 2), attn_type=AttentionType.ENCODER_ONLY)
    for case, bounds in (
        (chunked(make_case, padding=(0, 2)), [(8, 32)]),
        (cut(make_case, 3), [(3, 43), (9, 77)]),
        (encoder, [(6, 6)]),
    ):
        _, made = calls(case, loose=("max_query_len", "max_seq_len"))
        assert [(call.common.max_query_len, call.common.max_seq_len) for call in made] == bounds


@pytest.mark.parametrize(
    ("requests", "how", "expected"),
    [
        pytest.param([(1, 20), (5, 40), (9, 9), (1, 1)], {}, [27, 40, 9, 1], id="a decode with a context"),
        pytest.param([(1, 95)], {"cache": {"block_size": 16}}, [102], id="beyond the pages of the request"),
        pytest.param(
            [(4, 20), (4, 4)],
            {"path": "spec_decode", "options": SpecDecodeOptions(num_speculative_tokens=3)},
            [27, 4],
            id="verified drafts",
        ),
        pytest.param(
            [(1, 40), (2, 70)],
            {"path": "micro_batch", "options": MicroBatchOptions(cuts=(2,))},
            [40, 69],
            id="a request that is cut",
        ),
        pytest.param(
            [(1, 33)], {"path": "local", "attn_chunk_size": 32}, [1], id="virtual requests, which the runner makes"
        ),
        pytest.param(
            [RequestSpec(query_len=1, seq_len=9, encoder_len=20)],
            {"path": "cross", "attn_type": AttentionType.ENCODER_DECODER},
            [20],
            id="keys of an encoder",
        ),
    ],
)
def test_lengths_on_the_host_are_upper_bounds_for_decodes(make_case, requests, how, expected):
    _, (exact, *_) = calls(make_case(*requests, padding=(1, 1) if how == {} else (0, 0), **how))
    _, (loose, *_) = calls(make_case(*requests, padding=(1, 1) if how == {} else (0, 0), **how), loose=("host_lens",))
    count = len(expected)
    assert loose.common.seq_lens_cpu.tolist()[:count] == expected[: loose.common.num_reqs]
    more = loose.common.seq_lens_cpu - exact.common.seq_lens_cpu
    assert torch.equal(loose.common.num_computed_tokens_cpu - more, exact.common.num_computed_tokens_cpu)
    assert loose.common.seq_lens.tolist() == exact.common.seq_lens.tolist() == exact.common.seq_lens_cpu.tolist()
    assert loose.common.max_seq_len == max(exact.common.max_seq_len, *expected)
    assert torch.equal(loose.position, exact.position)


def test_upper_bounds_stay_within_the_table(make_case):
    _, (call,) = calls(make_case((1, 15), cache={"block_size": 2}), loose=("host_lens",))
    assert (call.common.seq_lens_cpu.tolist(), call.common.block_table_tensor.shape[1] * 2) == ([20], 20)


def test_parts_are_causal_carry_sinks_and_write_once(make_case):
    step, made = calls(cascade(make_case))
    assert num_builders(step.problem) == 1
    assert [call.common_prefix_len for call in made] == [0, 0]
    assert [call.common.causal for call in made] == [False, True]
    assert [call.carries_sinks for call in made] == [True, False]
    assert [call.common.slot_mapping.tolist() for call in made] == [[-1] * 6, step.slot_mapping.tolist()]
    assert [call.common.causal for call in calls(split(make_case))[1]] == [False, False, True]


def test_ranks_write_their_own_keys(make_case):
    case = make_case((1, 4), (1, 5), path="dcp", options=DCPOptions(size=2, interleave=2), padding=(1, 1))
    step, made = calls(case)
    assert [lengths(call) for call in made] == [[(1, 2), (1, 3), (0, 0)], [(1, 2), (1, 2), (0, 0)]]
    assert all(call.common.causal for call in made)
    # Position 3 lies on rank 1, position 4 on rank 0.
    slots = step.slot_mapping.tolist()
    assert [call.common.slot_mapping.tolist() for call in made] == [[-1, slots[1], -1], [slots[0], -1, -1]]


def test_fast_prefill_hands_over_the_last_rows_and_the_metadata_of_all(make_case):
    case = make_case((6, 40), (1, 9), path="fast_prefill", options=FastPrefillOptions(rows=2), padding=(0, 2))
    step, (call,) = calls(case)
    assert lengths(call) == [(6, 40), (1, 9)]
    assert len(call.query) == 5
    assert call.key is None
    assert call.common.logits_indices_padded.tolist() == [4, 5, 6, 0, 0]
    assert call.common.num_logits_indices == call.num_rows == 3
    assert call.position.tolist() == [38, 39, 8]
    assert (step.slot_mapping >= 0).tolist() == [True] * 7 + [False] * 2


CPU = torch.device("cpu")


def rows(count=5, heads=3, size=4):
    return torch.arange(count * heads * size, dtype=torch.float32).view(count, heads, size)


@pytest.mark.parametrize(
    ("form", "heads", "strides"),
    [
        ("contiguous", 3, (12, 4, 1, False)),
        ("padded", 3, (28, 4, 1, False)),
        ("offset", 3, (12, 4, 1, True)),
        ("transposed", 3, (4, 20, 1, True)),
        ("odd", 1, (4, 7, 1, True)),
    ],
)
def test_each_form_holds_the_values_with_the_strides_it_is_named_for(form, heads, strides):
    given = rows(heads=heads)
    view, *_ = operand_views([given] * 3, StridesSpec(query=form, key="contiguous", value="contiguous"))
    assert torch.equal(view, given)
    assert (*view.stride(), view.storage_offset() > 0) == strides
    if form == "padded":
        whole = view.as_strided((5, 28), (28, 1))
        assert bool(torch.isnan(whole[:, 12:]).all())  # room between rows is no number


def test_fused_operands_share_memory_and_others_do_not():
    given = rows(), rows() + 100, rows() + 200
    views = operand_views(given, StridesSpec(query="fused", key="transposed", value="fused"))
    assert all(torch.equal(view, own) for view, own in zip(views, given, strict=True))
    query, key, value = [each.untyped_storage().data_ptr() for each in views]
    assert query == value != key


@pytest.mark.parametrize("form", get_args(StrideForm))
def test_writes_beside_the_rows_of_a_buffer_are_found_in_any_form(form):
    for shape in ((5, 3, 4), (5, 3)):
        buffer = GuardedBuffer(shape, 4, torch.float32, CPU, form)
        buffer.find_unwritten()
        assert bool(buffer.unwritten[:4].all())
        assert not buffer.touched()
        buffer.handed_out()[:] = 2.0
        assert buffer.touched()
        buffer.find_unwritten()
        assert not bool(buffer.unwritten.any())
        assert not buffer.breached()
        behind = buffer.rows.as_strided(
            shape, buffer.rows.stride(), buffer.rows.storage_offset() + buffer.rows.stride(0)
        )
        behind[:] = 2.0
        assert buffer.breached()


def test_what_lies_between_padded_rows_is_guarded():
    buffer = GuardedBuffer((5, 3, 4), 5, torch.float32, CPU, "padded")
    out = buffer.rows
    out.as_strided((5,), (out.stride(0),), out.storage_offset() + 12).fill_(9.0)
    assert buffer.breached()


def test_a_step_takes_the_strides_of_its_case_before_what_its_inputs_plant(make_case):
    problem = build_problem(make_case(), 0)
    fused = make_step(problem, CPU)
    assert fused.query.stride(0) == (8 + 2 + 2) * 64 + 16
    strided = replace(problem, case=replace(problem.case, strides=StridesSpec(query="transposed", output="padded")))
    step = make_step(strided, CPU)
    assert step.query.stride() == (64, 40 * 64, 1)
    assert step.output_form == "padded"
    assert torch.equal(step.query, fused.query)


PAD, OTHER_PAD = 7.0, 8.0


def result(rows, output, lse, unwritten=-1):
    """One head of size 1; what follows ``rows`` is padding."""
    index = torch.tensor(rows)
    call = ForwardCall(
        common=None,  # not looked at
        query=torch.zeros(len(output), 1, 1),
        key=None,
        value=None,
        rows=index,
        nth=torch.zeros_like(index),
        position=index * 10,
        num_key_rows=0,
    )
    missing = torch.arange(len(output)) == unwritten
    numbers = None if lse is None else torch.tensor(lse)[:, None]
    return CallResult(call, torch.tensor(output)[:, None, None], numbers, missing, None if lse is None else missing)


def flat(rows):
    return [round(x, 6) for x in rows.flatten().tolist()]


def test_rows_go_to_their_places_and_padding_behind_them():
    one = result([2, 0], [20.0, 0.0, PAD], [2.5, 0.5, PAD], unwritten=1)
    whole = placed([one, result([3, 1], [30.0, 10.0, OTHER_PAD], [3.5, 1.5, OTHER_PAD])])
    assert flat(whole.output) == [0.0, 10.0, 20.0, 30.0, PAD, OTHER_PAD]
    assert flat(whole.lse) == [0.5, 1.5, 2.5, 3.5, PAD, OTHER_PAD]
    assert whole.unwritten.tolist() == whole.lse_unwritten.tolist() == [True, False, False, False]
    assert whole.position.tolist() == [0, 10, 20, 30]
    without = placed([result([1, 0], [1.0, 0.0], None)])
    assert flat(without.output) == [0.0, 1.0]
    assert (without.lse, without.lse_unwritten) == (None, None)


@pytest.mark.parametrize(("base", "unit"), [("e", 1.0), ("2", math.log(2))])
def test_parts_are_weighted_by_their_lse(base, unit):
    """Row 0: weights 3 and 1. Row 1: nothing in the second part, whose output is anything finite."""
    first = result([0, 1], [1.0, 5.0, PAD], [math.log(3) / unit, 0.25, PAD], unwritten=1)
    second = result([0, 1], [9.0, 77.0, OTHER_PAD], [0.0, -math.inf, OTHER_PAD])
    whole = merged([first, second], Conventions(lse_base=base))
    assert flat(whole.output) == [3.0, 5.0, PAD, OTHER_PAD]
    assert flat(whole.lse) == [round(math.log(4) / unit, 6), 0.25, PAD, OTHER_PAD]
    assert whole.output.dtype == torch.float64
    assert whole.unwritten.tolist() == [False, True]


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_rubbish_of_a_part_that_saw_nothing_is_seen(rubbish):
    parts = [result([0, 1], [1.0, 1.0], [0.0, 0.0]), result([0, 1], [1.0, rubbish], [0.0, -math.inf])]
    output = merged(parts, Conventions()).output.flatten().tolist()
    assert output[0] == 1.0
    assert math.isnan(output[1])


def test_parts_without_an_lse_cannot_be_merged():
    with pytest.raises(ValueError, match="without an LSE"):
        merged([result([0], [1.0], None)] * 2, Conventions())
