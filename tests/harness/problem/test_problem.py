"""Problems: laid out as an engine would, the same bits everywhere, with queries that reveal faults."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_cases import make_case

from attncheck.backends.paged_metadata import tree_mask
from attncheck.errors import SpecError
from attncheck.harness.problem import queries as inputs
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.problem.queries import CHANNELS, Coordinate, ancestors, decode, sign, token_tree
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reference.step_spec import RequestSpec


def digest(problem):
    tensors = (problem.query.float(), problem.keys.float(), problem.values.float(), problem.block_table)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def test_the_same_case_and_seed_give_the_same_bits_on_every_machine():
    # Pinned: if this changes, GENERATOR_VERSION has to change with it.
    assert digest(build_problem(make_case(sliding_window=16, alibi=True, sinks=True), 3)) == "cfc92ca503f04aa1"
    assert digest(build_problem(make_case(logits_soft_cap=30.0, dtype="float16"), 3)) == "ecfb69a1e29acf43"


def test_rows_of_another_problem_come_in_another_order():
    given, case = build_problem(make_case(name="given"), 0), make_case(name="taken")
    drawn, taken = build_problem(case, 1), build_problem(case, 1, rows_of=given)
    for name in ("query", "keys", "values"):
        own, source = getattr(taken, name), getattr(given, name)
        assert (own.shape, own.dtype) == (getattr(drawn, name).shape, source.dtype)
        found = (own[:, None] == source).flatten(2).all(2).nonzero()[:, 1]
        assert len(found) == len(own) > 20
        assert (found != torch.arange(len(own))).sum() > len(own) / 2
    assert [r.num_keys for r in taken.requests] == [r.num_keys for r in drawn.requests]
    assert torch.equal(taken.block_table, build_problem(case, 1, rows_of=given).block_table)


def test_seed_and_case_both_matter():
    base = digest(build_problem(make_case(), 0))
    assert digest(build_problem(make_case(), 1)) != base
    assert digest(build_problem(make_case(scale=0.3), 0)) != base
    assert digest(build_problem(make_case(name="other"), 0)) == base


@settings(max_examples=60)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 70)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=6
    ),
    block_size=st.sampled_from([1, 4, 16, 33]),
    first_block=st.sampled_from([None, 5, 1000]),
)
def test_layout_invariants(lengths, block_size, first_block):
    layer = LayerSpec(num_heads=2, num_kv_heads=1, head_size=8)
    case = make_case(*lengths, layer=layer, cache={"block_size": block_size, "first_block": first_block})
    problem = build_problem(case, 0)
    pages = [page for r in problem.requests for page in r.pages]
    assert len(set(pages)) == len(pages), "no page has two owners"
    assert min(pages) >= (first_block or 1), "page 0 is the null page, and first_block is a lower bound"
    assert max(pages) < problem.num_blocks
    for index, (request, (query_len, seq_len)) in enumerate(zip(problem.requests, lengths, strict=True)):
        assert (request.rows, request.num_keys, request.cached) == (query_len, seq_len, seq_len - query_len)
        own = problem.block_table[index].tolist()
        for position in range(seq_len):
            slot = own[position // block_size] * block_size + position % block_size
            assert int(problem.key_slots[request.base + position]) == slot
        slack = own[len(request.pages) :]
        assert len(slack) >= 2
        assert not set(slack) & set(request.pages), "a read past the end must not land on an own page"
    written = problem.new_keys.tolist()
    assert sorted(written + problem.old_keys.tolist()) == list(range(len(problem.keys)))


def test_cross_attention_brings_encoder_rows_on_the_first_step_only():
    first = RequestSpec(query_len=4, seq_len=4, encoder_len=30)
    later = RequestSpec(query_len=1, seq_len=9, encoder_len=21)
    problem = build_problem(make_case(first, later, attn_type=AttentionType.ENCODER_DECODER), 0)
    assert [r.num_keys for r in problem.requests] == [30, 21]
    assert problem.new_keys.tolist() == list(range(30))
    assert problem.old_keys.tolist() == list(range(30, 51))


def test_rows_before_position_zero_are_written_nowhere():
    problem = build_problem(make_case((5, 3), (2, 0)), 0)
    assert problem.new_keys.tolist() == [-1, -1, 0, 1, 2, -1, -1]


def test_a_pool_too_small_is_refused_with_what_it_needs():
    with pytest.raises(SpecError, match=r"num_blocks = 3: the batch needs 18 pages from page 1 on; at least 19"):
        build_problem(make_case(cache={"num_blocks": 3}), 0)


def test_names_for_people():
    problem = build_problem(make_case((5, 40), (1, 7)), 0)
    assert problem.row_name(0) == "request 0, position 35"
    assert problem.row_name(5) == "request 1, position 6"
    slot = int(problem.key_slots[41])
    assert problem.slot_name(slot).endswith("request 1, position 1)")
    assert "owned by no request" in problem.slot_name(0)


def weights(problem, request):
    """Dense softmax weights ``[H, rows, keys]`` of one request, and of keys beyond what a row sees."""
    layer, r = problem.layer, problem.requests[request]
    query = problem.query[r.first_row : r.first_row + r.rows].double()
    group = layer.num_heads // layer.num_kv_heads
    keys = problem.keys[r.base : r.base + r.num_keys].double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.softmax_scale
    position = torch.arange(r.rows) + r.first_position
    distance = position[:, None] - torch.arange(r.num_keys)[None, :]
    left, right = layer.window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if layer.is_causal:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)


@pytest.mark.parametrize(("keys", "head_size"), [(37, 64), (1000, 64), (9000, 128), (300, 16), (5000, 256)])
def test_decode_needles_weigh_about_half(keys, head_size):
    problem = build_problem(make_case((1, keys), head_size=head_size, num_heads=16), 0)
    heaviest = weights(problem, 0).amax(dim=-1).flatten()
    # Some heads point at keys of no request, some have large or equal scores; most carry a visible needle.
    assert int((heaviest > 0.15).sum()) >= 8
    assert int(((heaviest > 0.15) & (heaviest < 0.95)).sum()) >= 6


def test_needles_are_at_both_ends_and_at_page_edges():
    problem = build_problem(make_case((1, 1000), num_heads=16), 0)
    heavy = {int(i) for i in weights(problem, 0)[:, 0].argmax(dim=-1)}
    assert {0, 999, 998} <= heavy
    assert heavy & {992, 991}, "the last page begins at 992"


def test_large_and_equal_scores_are_among_the_rows():
    problem = build_problem(make_case((64, 64)), 0)
    scores = torch.einsum("qhd,khd->hqk", problem.query.double(), problem.keys.double().repeat_interleave(4, 1))
    largest = (scores * problem.layer.softmax_scale).abs().amax(dim=-1)
    assert float(largest.max()) > 1000
    assert bool((largest == 0).any())
    plain = build_problem(make_case((64, 64), inputs=("needles",)), 0)
    scores = torch.einsum("qhd,khd->hqk", plain.query.double(), plain.keys.double().repeat_interleave(4, 1))
    assert float((scores * plain.layer.softmax_scale).abs().max()) < 100


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("soft_cap", [None, 5.0, 50.0])
def test_all_scores_of_some_rows_are_negative_and_near_minus_the_cap(dtype, soft_cap):
    inputs = ("needles", "negative_scores", "coordinates")
    problem = build_problem(make_case((20, 60), dtype=dtype, logits_soft_cap=soft_cap, inputs=inputs), 0)
    scores = torch.einsum("qhd,khd->hqk", problem.query.double(), problem.keys.double().repeat_interleave(4, 1))
    scores = scores * problem.layer.softmax_scale
    seen = torch.ones(20, 60, dtype=torch.bool).tril(40)
    largest = scores.masked_fill(~seen, -torch.inf).amax(dim=-1)
    if soft_cap is not None:
        near = soft_cap * torch.tanh(largest / soft_cap) < -0.99 * soft_cap
        assert int(near.sum()) >= 20, "at least one head of every row"
        return
    limit = -10_000 if dtype == "bfloat16" else -5_000
    assert int((largest < limit).sum()) >= 10
    assert int(((largest < -900) & (largest > -1100)).sum()) >= 10
    heavy = (scores - largest[..., None]).masked_fill(~seen, -torch.inf).softmax(dim=-1).amax(dim=-1)
    assert int(((heavy > 0.3) & (largest < -900)).sum()) >= 10, "a needle still has a large share of the weight"


def test_soft_capped_layers_meet_scores_around_and_far_above_the_cap():
    problem = build_problem(make_case((40, 200), logits_soft_cap=50.0), 0)
    scores = torch.einsum("qhd,khd->hqk", problem.query.double(), problem.keys.double().repeat_interleave(4, 1))
    ratio = (scores * problem.layer.softmax_scale).abs().amax(dim=-1) / 50.0
    assert float(ratio.max()) > 50
    assert int(((ratio > 0.9) & (ratio < 1.3)).sum()) > 20


def test_float16_queries_stay_finite():
    problem = build_problem(make_case((9, 100), dtype="float16", scale=1e-4, logits_soft_cap=50.0), 0)
    assert bool(torch.isfinite(problem.query).all())


@pytest.mark.parametrize("layer", [{}, {"sliding_window": 9, "alibi": True}, {"logits_soft_cap": 20.0, "sinks": True}])
def test_how_many_rows_are_taken_at_once_changes_nothing(monkeypatch, layer):
    case = make_case((1, 40), (17, 30), (5, 3), (9, 9), **layer)
    whole = build_problem(case, 0).query
    monkeypatch.setattr(inputs, "_ROWS_AT_ONCE", 4)
    assert torch.equal(build_problem(case, 0).query, whole)


# Signatures


@given(
    kind=st.sampled_from(["key", "value"]),
    request=st.integers(0, 1023),
    position=st.integers(0, 131071),
    heads=st.integers(1, 32),
)
def test_a_signature_reads_back(kind, request, position, heads):
    rows = 0.3 * torch.ones(1, heads, 64, dtype=torch.float64)
    sign(rows, kind, torch.tensor([request]), torch.tensor([position]))
    for head in range(heads):
        assert Coordinate(kind, request, position, head) in decode(rows[0, head])


def test_no_channel_is_constant_and_no_row_repeats():
    rows = 0.3 * torch.ones(512, 2, CHANNELS, dtype=torch.float64)
    sign(rows, "value", torch.arange(512) // 128, torch.arange(512) % 128)
    assert rows.flatten(0, 1).unique(dim=0).shape[0] == 1024
    assert float(rows.sign().mean(dim=(0, 1)).abs().max()) < 0.25


def test_magnitudes_stay_and_short_rows_carry_nothing():
    rows = torch.linspace(-2, 2, CHANNELS, dtype=torch.float64).reshape(1, 1, -1)
    before = rows.clone()
    sign(rows, "key", torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(rows.abs(), before.abs())
    assert decode(torch.ones(CHANNELS - 1)) == ()


# Trees, as a problem has them by parents, equal those that a builder reads.


@st.composite
def parents(draw):
    """Of up to nine rows, listed by depth."""
    chosen, depths = [-1], [0]
    for row in range(1, draw(st.integers(1, 9))):
        parent = draw(st.sampled_from([i for i in range(row) if depths[i] + 1 >= depths[-1]]))
        chosen.append(parent)
        depths.append(depths[parent] + 1)
    return tuple(chosen)


@settings(max_examples=100, deadline=None)
@given(parents())
def test_a_row_sees_itself_and_its_ancestors_here_and_in_what_a_builder_reads(tree):
    mask = ancestors(tree)
    assert torch.equal(tree_mask(token_tree(tree)), mask)
    for row, parent in enumerate(tree):
        line, node = {row}, parent
        while node >= 0:
            line.add(node)
            node = tree[node]
        assert set(mask[row].nonzero().flatten().tolist()) == line
