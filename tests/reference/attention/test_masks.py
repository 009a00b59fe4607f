"""Trees of draft tokens and masks beyond the base predicate."""

from dataclasses import replace

import pytest
import torch

from attncheck.reference import AttentionParams, visible

PLAIN = AttentionParams(4, 2, 8)
#        0 root, 1 and 2 its children, 3 child of 1, 4 child of 3, 5 child of 2
PARENTS = (-1, 0, 0, 1, 3, 2)


def ancestors(row):
    line = []
    while row >= 0:
        line.insert(0, row)
        row = PARENTS[row]
    return line


def tree_mask():
    mask = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for row in range(len(PARENTS)):
        mask[row, ancestors(row)] = True
    return mask


def test_each_row_equals_the_chain_of_its_ancestors(make_batch, same_state):
    batch = make_batch((6, 6), (17, 6), PLAIN, unowned_rows=0)
    out, lse = batch.attend(PLAIN, tree_mask=tree_mask(), q_tile=4, kv_tile=5)
    for r in range(2):
        rows, context = batch.rows(r), len(batch.keys[r]) - 6
        for row in range(6):
            line = [*range(context), *(context + a for a in ancestors(row))]
            keys, values = (x[r][line].repeat_interleave(2, dim=1) for x in (batch.keys, batch.values))
            scores = torch.einsum("hd,jhd->hj", batch.query[rows][row], keys) * 8**-0.5
            want = torch.einsum("hj,jhd->hd", scores.softmax(-1), values)
            at = rows.start + row
            same_state((out[at : at + 1], lse[at : at + 1]), (want[None], scores.logsumexp(-1)[None]))


def test_a_chain_is_causal_and_a_larger_tree_is_cut(make_batch, same_state):
    batch = make_batch((5, 3, 1), (12, 9, 4), PLAIN)
    for size in (5, 9):
        chain = torch.ones(size, size).tril().bool()
        same_state(batch.attend(PLAIN, tree_mask=chain), batch.attend(PLAIN), tolerance=0)
    everything = torch.ones(5, 5, dtype=torch.bool)
    same_state(batch.attend(PLAIN, tree_mask=everything), batch.attend(PLAIN), tolerance=0)


def test_the_tree_is_anded_with_the_base_predicate(make_batch, dense, same_state):
    params = replace(PLAIN, window=(3, 0), alibi_slopes=(0.5, 0.06, 0.25, 0.125))
    batch = make_batch((6,), (17,), params, unowned_rows=0)
    state = batch.attend(params, tree_mask=tree_mask())

    def both(request, q_pos, k_pos):
        allowed = torch.tensor(
            [[k < 11 or (k - 11) in ancestors(q - 11) for k in k_pos[0].tolist()] for q in q_pos[:, 0].tolist()]
        )
        return allowed & visible(params, q_pos, k_pos)

    same_state(state, batch.attend(params, mask_fn=both))
    assert (state[0] - batch.attend(params)[0]).abs().max() > 1e-3


def test_siblings_do_not_influence_each_other(make_batch):
    """What a leaf's key and value are reaches the leaf alone."""
    batch = make_batch((6,), (17,), PLAIN, unowned_rows=0)
    expected, _ = batch.attend(PLAIN, tree_mask=tree_mask())
    batch.key_cache[batch.block_table[0, 16 // 4], 16 % 4] += 5.0
    batch.value_cache[batch.block_table[0, 16 // 4], 16 % 4] += 5.0
    out, _ = batch.attend(PLAIN, tree_mask=tree_mask())
    moved = (out != expected).any(dim=-1).any(dim=-1)
    assert moved.tolist() == [False, False, False, False, False, True]


def test_a_row_that_no_tree_entry_admits_sees_its_context_only(make_batch, same_state):
    batch = make_batch((3, 2), (9, 2), PLAIN, unowned_rows=0)
    out, lse = batch.attend(PLAIN, tree_mask=torch.zeros(3, 3, dtype=torch.bool))
    context = batch.attend(replace(PLAIN, causal=False), kv_range=(0, 6))
    same_state((out[:3], lse[:3]), (context[0][:3], context[1][:3]))
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))
    assert (lse[3:] == -torch.inf).all()


@pytest.mark.parametrize("wrong", ["transposed", "without offset", "or"])
def test_wrong_readings_of_a_tree_would_show(make_batch, wrong):
    batch = make_batch((6,), (17,), PLAIN, unowned_rows=0)
    tree, (right, _) = tree_mask(), batch.attend(PLAIN, tree_mask=tree_mask())

    def reading(request, q_pos, k_pos):
        row, node, causal = q_pos - 11, (k_pos - 11).clamp(min=0), k_pos <= q_pos
        if wrong == "transposed":
            return causal & (tree.T[row, node] | (k_pos < 11))
        if wrong == "or":
            return causal | tree[row, node]
        return causal & (tree[row, k_pos.clamp(max=5)] | (k_pos > 5))

    other, _ = batch.attend(PLAIN, mask_fn=reading)
    assert (other - right).abs().max() > 1e-3


def test_prefix_lm_ranges(make_batch, same_state):
    """Causal, or both in one range, ends included; against a dense mask written out."""
    ranges = [(3, 7), (10, 12)]
    batch = make_batch((9,), (15,), PLAIN, unowned_rows=0)

    def mask_fn(request, q_pos, k_pos):
        sees = visible(PLAIN, q_pos, k_pos)
        for a, b in ranges:
            sees = sees | ((q_pos >= a) & (q_pos <= b) & (k_pos >= a) & (k_pos <= b))
        return sees

    scores = torch.einsum("ihd,jhd->hij", batch.query, batch.keys[0].repeat_interleave(2, dim=1)) * 8**-0.5
    for i in range(9):
        for j in range(15):
            q = 6 + i
            if j > q and not any(a <= q <= b and a <= j <= b for a, b in ranges):
                scores[:, i, j] = -torch.inf
    want = torch.einsum("hij,jhd->ihd", scores.softmax(-1), batch.values[0].repeat_interleave(2, dim=1))
    same_state(batch.attend(PLAIN, mask_fn=mask_fn, q_tile=4, kv_tile=6), (want, scores.logsumexp(-1).T))
    ranges[:] = [(0, 14)]
    same_state(batch.attend(PLAIN, mask_fn=mask_fn), batch.attend(replace(PLAIN, causal=False)))
    ranges[:] = [(100, 200)]
    same_state(batch.attend(PLAIN, mask_fn=mask_fn), batch.attend(PLAIN))


def test_a_reference_window_keeps_the_prefix(make_batch, same_state):
    batch = make_batch((4,), (20,), PLAIN, unowned_rows=0)

    def mask_fn(request, q_pos, k_pos):
        return (k_pos <= q_pos) & ((k_pos < 5) | (q_pos - k_pos < 3))

    out, lse = batch.attend(PLAIN, mask_fn=mask_fn, kv_tile=4)
    for i in range(4):
        keys = [*range(5), *range(16 + i - 2, 16 + i + 1)]
        scores = torch.einsum("hd,jhd->hj", batch.query[i], batch.keys[0][keys].repeat_interleave(2, dim=1)) * 8**-0.5
        want = torch.einsum("hj,jhd->hd", scores.softmax(-1), batch.values[0][keys].repeat_interleave(2, dim=1))
        same_state((out[i : i + 1], lse[i : i + 1]), (want[None], scores.logsumexp(-1)[None]))


def test_a_mask_function_gets_request_and_absolute_positions(make_batch):
    batch = make_batch((5, 0, 3), (9, 0, 12), PLAIN)
    positions = {}

    def spy(request, q_pos, k_pos):
        assert q_pos.shape[1] == k_pos.shape[0] == 1
        rows, keys = positions.setdefault(request, (set(), set()))
        rows.update(q_pos.flatten().tolist())
        keys.update(k_pos.flatten().tolist())
        return visible(PLAIN, q_pos, k_pos)

    batch.attend(PLAIN, mask_fn=spy, q_tile=2, kv_tile=5)
    assert positions == {0: ({4, 5, 6, 7, 8}, set(range(9))), 2: ({9, 10, 11}, set(range(12)))}
    positions.clear()
    batch.attend(PLAIN, mask_fn=spy, kv_range=(3, 7))
    assert positions[0][1] == positions[2][1] == {3, 4, 5, 6}
