"""Attention over pages against a dense formulation in float64: parameters, who sees whom, foreign memory, roundings."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import TILES, dense, drawn_batches, drawn_layers, make_batch, same_bits, same_state, seen_keys

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionParams,
    AttentionType,
    LayerSpec,
    MLAParams,
    Precision,
    layer_params,
    mla_params,
    varlen_attention,
    visible,
    window_pair,
)
from attncheck.reference.attention.params import Visibility, row_span
from attncheck.reference.spec import MLASpec


@st.composite
def parts(draw):
    """Which keys count: a range of positions, sinks, and a tree over the new keys."""
    low = draw(st.integers(0, 26))
    seed = draw(st.none() | st.integers(0, 99))
    return {
        "kv_range": draw(st.none() | st.just((low, low + draw(st.integers(0, 12)))) | st.just((low, 10**12))),
        "include_sinks": draw(st.booleans()),
        "tree_mask": None if seed is None else torch.rand(10, 10, generator=torch.Generator().manual_seed(seed)) < 0.6,
    }


@settings(max_examples=120)
@given(data=st.data(), part=parts())
def test_random_questions(data, part):
    params = data.draw(drawn_layers())
    batch = data.draw(drawn_batches(params, fitting=False))
    same_state(batch.attend(params, **part, **data.draw(TILES)), dense(batch, params, **part))


@settings(max_examples=60)
@given(data=st.data(), include_sinks=st.booleans())
def test_random_packed_sequences(data, include_sinks):
    params = data.draw(drawn_layers())
    batch = data.draw(drawn_batches(params, fitting=False))
    ends = torch.tensor([0, *map(len, batch.keys)]).cumsum(0).int()
    behind = [x[0].new_full((3, *x[0].shape[1:]), torch.nan) for x in (batch.keys, batch.values)]
    keys, values = torch.cat([*batch.keys, behind[0]]), torch.cat([*batch.values, behind[1]])
    packed = (batch.query, keys, values, batch.query_start_loc.int(), ends, params)
    state = varlen_attention(*packed, include_sinks=include_sinks, **data.draw(TILES))
    same_state(state, dense(batch, params, include_sinks=include_sinks))


@settings(max_examples=40)
@given(data=st.data(), modulus=st.integers(1, 4))
def test_a_mask_function_replaces_the_rule(data, modulus):
    """It gets the request and the absolute position of every key once, also of keys outside of window and chunk."""
    params = data.draw(drawn_layers())
    batch = data.draw(drawn_batches(params, fitting=False))
    pairs = []

    def mask_fn(request, q_pos, k_pos):
        pairs.extend((request, q, k) for q in q_pos[:, 0].tolist() for k in k_pos[0].tolist())
        return (q_pos + k_pos + request) % modulus == 0

    state = batch.attend(params, mask_fn=mask_fn, **data.draw(TILES))
    same_state(state, dense(batch, params, sees=lambda request, q, k: (q + k + request) % modulus == 0))
    assert sorted(pairs) == sorted((r, q, k) for _, r, q in batch.places() for k in range(len(batch.keys[r])))


def test_no_requests_at_all():
    params = AttentionParams(4, 2, 8)
    batch = make_batch((1,), (4,), params)
    none = torch.zeros(0, dtype=torch.int32)
    empty = replace(batch, block_table=none.view(0, 1), seq_lens=none, query_start_loc=none.new_zeros(1))
    out, lse = empty.attend(params)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -torch.inf).all()


def test_a_nan_that_is_data_is_not_hidden():
    params = AttentionParams(4, 2, 8)
    batch = make_batch((2, 2), (8, 8), params, unowned_rows=0)
    batch.key_cache[batch.block_table[0, 0], 1] = torch.nan
    out, lse = batch.attend(params)
    assert out[:2].isnan().all()
    assert lse[:2].isnan().all()
    assert out[2:].isfinite().all()


def test_scores_up_to_ten_thousand():
    params = AttentionParams(4, 2, 8, scale=1.0)
    batch = make_batch((30, 2), (60, 47), params, gain=900.0)
    scores = torch.einsum("ihd,jhd->hij", batch.query[:30, ::2], batch.keys[0])
    assert scores.abs().max() > 1e4
    same_state(batch.attend(params, q_tile=8, kv_tile=16), dense(batch, params), tolerance=1e-10)


POISON = st.sampled_from((torch.nan, torch.inf, -torch.inf, 1e30))
CACHES = st.sampled_from((["key_cache"], ["value_cache"], ["key_cache", "value_cache"]))


def filled(batch, names, mask, value):
    """The batch with ``value`` in the masked slots ``[NB, BS]`` of the named caches."""
    place = mask[..., None, None]
    return replace(batch, **{n: getattr(batch, n).masked_fill(place, value) for n in names})


def slots_of(batch, positions):
    """Bool ``[NB, BS]``: the slots of these positions, given for each request."""
    size = batch.key_cache.shape[1]
    slots = torch.zeros(batch.key_cache.shape[:2], dtype=torch.bool)
    for r, own in enumerate(positions):
        for p in own:
            slots[batch.block_table[r, p // size], p % size] = True
    return slots


@settings(max_examples=80)
@given(data=st.data(), names=CACHES, poison=POISON, period=st.none() | st.integers(2, 6))
def test_containment_keys_no_row_of_the_request_sees_change_no_bit(data, names, poison, period):
    """Before every window, in earlier chunks, behind every row; holes that a mask function cuts (every ``period``).

    Blocks that lie wholly out of sight are handed to others, one id even twice in one row.
    """
    params, sizes = data.draw(drawn_layers()), data.draw(TILES)
    batch = data.draw(drawn_batches(params, shared_pages=st.just(0)))
    options = {}
    if period is not None:
        options["mask_fn"] = lambda _, q_pos, k_pos: visible(params, q_pos, k_pos) & (k_pos % period != 0)
    unseen = [set(range(len(keys))) for keys in batch.keys]
    for _, r, q in batch.places():
        unseen[r] -= {j for j in seen_keys(params, q, len(batch.keys[r])) if period is None or j % period}
    poisoned = filled(batch, names, slots_of(batch, unseen), poison)
    size, table = batch.key_cache.shape[1], batch.block_table.clone()
    for r, keys in enumerate(batch.keys):
        for page in range(-(-len(keys) // size)):
            if set(range(page * size, min((page + 1) * size, len(keys)))) <= unseen[r]:
                table[r, page] = data.draw(st.integers(0, len(batch.key_cache) - 1))
    poisoned = replace(poisoned, block_table=table)
    same_bits(poisoned.attend(params, **options, **sizes), batch.attend(params, **options, **sizes))


@settings(max_examples=50)
@given(data=st.data(), stale=st.sampled_from((0, 1, -1, 2**31 - 1)))
def test_composition_any_requests_in_any_order_give_their_rows(data, stale):
    """Alone, permuted, without some, or twice; a request of no rows among them, whatever its length and table hold."""
    params, sizes = data.draw(drawn_layers()), data.draw(TILES)
    batch = data.draw(drawn_batches(params, fitting=False))
    chosen = data.draw(st.lists(st.integers(0, len(batch.keys) - 1), min_size=1, max_size=5))
    out, lse = batch.attend(params, **sizes)
    rows = [row for r in chosen for row in range(batch.rows(r).start, batch.rows(r).stop)]
    some, at = batch.only(chosen), data.draw(st.integers(0, len(chosen)))
    starts, lens, table = some.query_start_loc.tolist(), some.seq_lens.tolist(), some.block_table
    padded = replace(
        some,
        query_start_loc=torch.tensor([*starts[: at + 1], *starts[at:]]),
        seq_lens=torch.tensor([*lens[:at], stale, *lens[at:]]),
        block_table=torch.cat([table[:at], torch.full_like(table[:1], -9), table[at:]]),
    )
    same_bits(padded.attend(params, **sizes), (out[rows], lse[rows]))


@st.composite
def layers(draw):
    return AttentionParams(
        1,
        1,
        4,
        causal=draw(st.booleans()),
        window=draw(st.tuples(st.integers(-2, 9), st.integers(-2, 9))),
        attn_chunk_size=draw(st.none() | st.integers(1, 9)),
        attn_chunk_lookback=draw(st.integers(0, 3)),
    )


@given(layers(), st.integers(-15, 30), st.integers(0, 25))
def test_predicate_and_span_are_the_struck_out_set(params, q, num_keys):
    want = seen_keys(params, q, num_keys)
    positions = torch.arange(num_keys)
    assert set(positions[visible(params, torch.tensor(q), positions)].tolist()) == want
    assert set(range(*row_span(params, q, (0, num_keys)))) == want


@given(layers(), st.integers(-15, 30), st.integers(0, 8), st.integers(0, 25))
def test_reach_holds_all_and_common_only_what_all_rows_see(params, first, more, num_keys):
    rows = [seen_keys(params, q, num_keys) for q in range(first, first + more + 1)]
    sight = Visibility(params, (0, num_keys), first)
    reach, common = set(range(*sight.reach(first, first + more))), set(range(*sight.common(first, first + more)))
    assert set.union(*rows) <= reach
    assert common == set.intersection(*rows)
    if set.union(*rows):
        assert (min(set.union(*rows)), max(set.union(*rows))) == (min(reach), max(reach))


LAYER = AttentionParams(num_heads=8, num_kv_heads=2, head_size=64)
SPEC = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)


def test_defaults():
    assert (LAYER.value_head_size, LAYER.softmax_scale, LAYER.group_size, LAYER.soft_cap) == (64, 0.125, 4, None)
    assert (LAYER.causal, LAYER.window, LAYER.alibi_slopes, LAYER.sinks) == (True, (-1, -1), None, None)
    assert AttentionParams(8, 2, 64, head_size_v=32).softmax_scale == 0.125
    assert replace(LAYER, logits_soft_cap=0).soft_cap is None
    assert replace(LAYER, scale=2).softmax_scale == 2.0


def test_hashable_and_equal_by_value_even_from_lists():
    given = [0.5] * 8
    listed = replace(LAYER, alibi_slopes=given, sinks=given, window=[3, 0])
    assert hash(listed) == hash(replace(LAYER, alibi_slopes=tuple(given), sinks=tuple(given), window=(3, 0)))
    given[0] = 9.0
    assert listed.alibi_slopes == (0.5,) * 8


def test_window_pair():
    assert window_pair(2048) == (2047, 0)
    assert window_pair(2048, bidirectional=True) == (2047, 2047)
    assert window_pair(1) == (0, 0)
    assert window_pair(None) == window_pair(None, bidirectional=True) == (-1, -1)


def test_layer_params_resolve_a_spec():
    fields = {"head_size_v": 32, "scale": 0.3, "logits_soft_cap": 20.0}
    spec = replace(SPEC, **fields, sliding_window=128, alibi=tuple(x / 10 for x in range(8)), sinks=True)
    params = layer_params(spec)
    of_spec = {"alibi_slopes": spec.alibi_slopes, "sinks": spec.sink_logits}
    assert params == replace(LAYER, **fields, **of_spec, window=(127, 0))
    assert params.alibi_slopes == tuple((torch.arange(8) / 10).tolist())  # as a float32 kernel has them
    assert layer_params(replace(SPEC, attn_chunk_size=32)).attn_chunk_size == 32


@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_a_window_follows_the_causal_flag_of_the_call(causal, attn_type):
    spec = replace(SPEC, attn_type=attn_type, sliding_window=16)
    params = layer_params(spec, causal=causal)
    assert params.causal == (attn_type == AttentionType.DECODER if causal is None else causal)
    assert params.window == ((15, 0) if params.causal else (15, 15))
    assert layer_params(SPEC, causal=causal).window == (-1, -1)


SIZES = {"kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 2}
LATENT = MLAParams(3, **SIZES)
LATENT_SPEC = LayerSpec(num_heads=3, num_kv_heads=1, head_size=10, mla=MLASpec(**SIZES))


def test_params_of_a_latent_layer():
    assert mla_params(LATENT_SPEC) == replace(LATENT, scale=1 / 3)
    assert mla_params(LATENT_SPEC, causal=False) == replace(LATENT, scale=1 / 3, causal=False)
    assert mla_params(replace(LATENT_SPEC, scale=0.5, causal=False)) == replace(LATENT, scale=0.5, causal=False)
    assert len({LATENT, replace(LATENT), replace(LATENT, scale=0.5)}) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"head_size_v": 6},
        {"sliding_window": 4},
        {"logits_soft_cap": 5.0},
        {"alibi": True},
        {"sinks": (0.0, 1.0, 2.0)},
        {"attn_chunk_size": 4},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"mla": None},
    ],
)
def test_a_layer_that_is_not_latent_attention(change):
    with pytest.raises(ReferenceArgumentError) as refusal:
        mla_params(replace(LATENT_SPEC, **change))
    assert refusal.value.argument == f"layer.{next(iter(change))}"


def test_latent_attention_has_no_other_parameters():
    with pytest.raises(ReferenceArgumentError, match=r"layer\.mla"):
        layer_params(LATENT_SPEC)


PARAMS = AttentionParams(4, 2, 16, window=(40, 0), logits_soft_cap=5.0, sinks=(1.0, 0.0, -1.0, 2.0))
DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_is_near_the_truth_and_its_output_is_rounded(dtype):
    batch = make_batch((30, 1, 7), (90, 64, 7), PARAMS, dtype=dtype, unowned_rows=0)
    truth, truth_lse = batch.attend(PARAMS)
    out, lse = batch.attend(PARAMS, precision=Precision.kernel(dtype))
    assert truth.dtype == truth_lse.dtype == torch.float64
    assert out.dtype == lse.dtype == torch.float32
    assert torch.equal(out.to(dtype).float(), out)
    error = (out - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert (error <= 3 * DTYPES[dtype] + 1e-6).all()
    assert error.max() >= DTYPES[dtype] / 16
    assert torch.allclose(lse.double(), truth_lse, rtol=1e-6, atol=1e-6)


def test_probabilities_are_rounded_but_not_their_sum():
    """Three keys of weights 1, w, w: the numerators are rounded where they meet V, the denominator is not."""
    w = 0.3  # not a bfloat16
    keys = torch.tensor([0.0, w, w], dtype=torch.float64).log().view(3, 1, 1)
    keys[0] = 0.0
    values = torch.eye(3, dtype=torch.float64).view(3, 1, 3)
    query, ends = torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([0, 1])
    params = AttentionParams(1, 1, 1, head_size_v=3, causal=False, scale=1.0)
    state = (query, keys, values, ends, torch.tensor([0, 3]), params)
    out, lse = varlen_attention(*state, precision=Precision(prob=torch.bfloat16))
    rounded = float(torch.tensor(w).bfloat16())
    assert rounded != w
    want = torch.tensor([1.0, rounded, rounded], dtype=torch.float64) / (1 + 2 * w)
    assert torch.allclose(out.flatten(), want, rtol=1e-15, atol=0)
    assert torch.allclose(lse, torch.tensor([[1 + 2 * w]], dtype=torch.float64).log(), rtol=1e-15, atol=0)


def test_output_rounding_alone():
    batch = make_batch((5,), (20,), PARAMS)
    truth, truth_lse = batch.attend(PARAMS)
    out, lse = batch.attend(PARAMS, precision=Precision(out=torch.float16))
    assert torch.equal(out, truth.half().double())
    assert torch.equal(lse, truth_lse)


def test_positions_stay_exact_where_a_half_float_would_lose_them():
    """ALiBi between keys beyond 2048 (float16) and 256 (bfloat16): positions are subtracted as integers."""
    count = 5000
    zeros = torch.zeros(count, 1, 1)
    params = AttentionParams(1, 1, 1, alibi_slopes=(1.0,))
    ends = torch.tensor([0, count])
    _, lse = varlen_attention(zeros, zeros, zeros, ends, ends, params, precision=Precision(compute=torch.float32))
    want = torch.tensor([float(-d) for d in range(200)], dtype=torch.float64).logsumexp(0)
    assert torch.allclose(lse[-1].double(), want, rtol=1e-6, atol=0)
