"""Decoding, prefilling in chunks and prefilling at once agree."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attncheck.reference import AttentionParams, visible

LAYERS = {
    "plain": AttentionParams(4, 2, 8),
    "window": AttentionParams(4, 2, 8, window=(6, 0)),
    "chunks": AttentionParams(4, 2, 8, attn_chunk_size=7, attn_chunk_lookback=1),
    "alibi": AttentionParams(4, 2, 8, alibi_slopes=(0.5, 0.25, 0.125, -0.3), logits_soft_cap=2.0),
    "alibi_sqrt": AttentionParams(4, 2, 8, alibi_slopes=(0.5, 0.25, 0.125, 0.3), alibi_sqrt=True),
    "sinks": AttentionParams(4, 2, 8, sinks=(0.5, 0.25, 2.0, -1.0)),
}


def step(batch, begin, end):
    """The rows ``begin .. end`` of request 0, when its cache holds ``end`` tokens."""
    return replace(
        batch,
        query=batch.query[begin:end],
        query_start_loc=torch.tensor([0, end - begin]),
        seq_lens=torch.tensor([end]),
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_every_decode_step_is_a_row_of_the_prefill(make_batch, same_state, layer):
    params = LAYERS[layer]
    batch = make_batch((30,), (30,), params, unowned_rows=0)
    out, lse = batch.attend(params)
    for n in range(1, 31):
        same_state(step(batch, n - 1, n).attend(params), (out[n - 1 : n], lse[n - 1 : n]))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("cuts", [(0, 1, 30), (0, 8, 16, 24, 30), (0, 29, 30), (0, 3, 4, 11, 30)], ids=str)
def test_prefill_in_chunks_is_prefill_at_once(make_batch, same_state, layer, cuts):
    params = LAYERS[layer]
    batch = make_batch((30,), (30,), params, unowned_rows=0)
    parts = [step(batch, a, b).attend(params, q_tile=4, kv_tile=8) for a, b in pairwise(cuts)]
    whole = batch.attend(params)
    same_state((torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])), whole)


def test_causal_by_slices(make_batch, same_state):
    """A causal row equals the same row without a mask over the keys up to it."""
    causal, full = AttentionParams(4, 2, 8), AttentionParams(4, 2, 8, causal=False)
    batch = make_batch((5,), (17,), causal, unowned_rows=0)
    out, lse = batch.attend(causal)
    for i in range(5):
        row = replace(
            batch,
            query=batch.query[i : i + 1],
            query_start_loc=torch.tensor([0, 1]),
            seq_lens=torch.tensor([17 - 5 + i + 1]),
        )
        same_state(row.attend(full), (out[i : i + 1], lse[i : i + 1]))


def test_keys_ahead_have_no_effect_and_the_own_key_has(make_batch):
    params = AttentionParams(4, 2, 8)
    batch = make_batch((6,), (15,), params, unowned_rows=0)
    out, lse = batch.attend(params)
    for i in range(6):
        position = 15 - 6 + i
        for j in range(15):
            changed = replace(batch, key_cache=batch.key_cache.clone(), value_cache=batch.value_cache.clone())
            block, offset = batch.block_table[0, j // 4], j % 4
            changed.key_cache[block, offset] += 1.0
            changed.value_cache[block, offset] -= 1.0
            new_out, new_lse = changed.attend(params)
            moved = bool((new_out[i] != out[i]).any() and (new_lse[i] != lse[i]).any())
            untouched = torch.equal(new_out[i], out[i]) and torch.equal(new_lse[i], lse[i])
            assert (moved, untouched) == ((True, False) if j <= position else (False, True))


def test_causal_is_the_window_without_right_side(make_batch, same_state):
    batch = make_batch((4, 9), (20, 9), LAYERS["plain"])
    literal = AttentionParams(4, 2, 8, causal=False, window=(19, 0))
    same_state(batch.attend(literal), batch.attend(LAYERS["plain"]))


def test_one_row_sees_the_same_causal_or_not(make_batch, same_state):
    batch = make_batch((1, 1), (20, 9), LAYERS["plain"])
    same_state(batch.attend(AttentionParams(4, 2, 8, causal=False)), batch.attend(LAYERS["plain"]))


def test_without_a_mask_permuting_rows_permutes_outputs(make_batch, same_state):
    params = AttentionParams(4, 2, 8, causal=False, sinks=(0.1, 0.2, 0.3, 0.4))
    batch = make_batch((7,), (20,), params, unowned_rows=0)
    out, lse = batch.attend(params)
    order = torch.tensor([3, 6, 0, 2, 5, 1, 4])
    same_state(replace(batch, query=batch.query[order]).attend(params), (out[order], lse[order]))


def test_a_causal_flag_per_request(make_batch, same_state):
    causal, full = AttentionParams(4, 2, 8), AttentionParams(4, 2, 8, causal=False)
    flags = (1, 0, 1)
    batch = make_batch((4, 4, 4), (9, 9, 9), causal)

    def per_request(request, q_pos, k_pos):
        return visible(causal if flags[request] else full, q_pos, k_pos)

    out, lse = batch.attend(causal, mask_fn=per_request)
    for r, flag in enumerate(flags):
        rows = batch.rows(r)
        same_state((out[rows], lse[rows]), batch.only([r]).attend(causal if flag else full))


def test_top_left_alignment_would_differ(make_batch):
    """The wrong rule ``j <= i`` is another function: it shows in every row of an extend."""
    params = AttentionParams(4, 2, 8)
    batch = make_batch((4,), (12,), params, unowned_rows=0)
    wrong, _ = batch.attend(params, mask_fn=lambda _, q_pos, k_pos: k_pos <= q_pos - 8)
    right, _ = batch.attend(params)
    assert ((wrong - right).abs().amax(dim=(1, 2)) > 1e-3).all()


@pytest.mark.parametrize("cut", [1, 4, 5, 7, 12])
def test_micro_batches(make_batch, same_state, cut):
    """The rows cut at a token: the first part's keys end where its rows do, the second part's stay."""
    params = AttentionParams(4, 2, 8, window=(9, 0))
    lens, totals = (5, 1, 8), (12, 20, 8)
    batch = make_batch(lens, totals, params, unowned_rows=0)
    parts = []
    for low, high in ((0, cut), (cut, sum(lens))):
        requests, starts, seq_lens = [], [0], []
        for r in range(3):
            rows = batch.rows(r)
            a, b = max(rows.start, low), min(rows.stop, high)
            if a < b:
                requests.append(r)
                starts.append(starts[-1] + b - a)
                seq_lens.append(totals[r] - (rows.stop - b))
        part = replace(
            batch.only(requests),
            query=batch.query[low:high],
            query_start_loc=torch.tensor(starts),
            seq_lens=torch.tensor(seq_lens),
        )
        parts.append(part.attend(params))
    same_state(tuple(torch.cat(x) for x in zip(*parts, strict=True)), batch.attend(params))


def test_fast_prefill(make_batch, same_state):
    """Only the last rows of each request are computed; lengths and table stay."""
    params = AttentionParams(4, 2, 8, attn_chunk_size=6)
    batch = make_batch((5, 1, 8), (12, 20, 8), params, unowned_rows=0)
    out, lse = batch.attend(params)
    rows = [3, 4, 5, 13]
    fast = replace(batch, query=batch.query[rows], query_start_loc=torch.tensor([0, 2, 3, 4]))
    same_state(fast.attend(params), (out[rows], lse[rows]))
