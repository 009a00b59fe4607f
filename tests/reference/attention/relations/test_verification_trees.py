"""Verification of draft tokens, in a chain or a tree."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import visible


@st.composite
def parents(draw, size):
    """A parent for every node, before it; node 0 is the root."""
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def line_of(tree, node):
    """The ancestors of a node and itself, the root first."""
    line = []
    while node >= 0:
        line.insert(0, node)
        node = tree[node]
    return line


def mask_of(tree):
    mask = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for node in range(len(tree)):
        mask[node, line_of(tree, node)] = True
    return mask


@pytest.fixture(scope="module")
def verified(batches):
    """``(data, params, **options) -> (tree, batch)``: every request brings the nodes of one tree as its new rows."""

    def draw(data, params, **options):
        tree = data.draw(parents(data.draw(st.integers(1, 7))))
        return tree, data.draw(batches(params, query_lens=st.just(len(tree)), requests=(1, 3), **options))

    return draw


@settings(max_examples=40)
@given(data=st.data())
def test_a_chain_is_causal(data, layers, batches, tiles, agree):
    """The lower-triangular tree, also a larger one cut to the rows there are, equals causal attention."""
    params = data.draw(layers(causal=True))
    batch = data.draw(batches(params, query_lens=st.integers(0, 7)))
    chain = torch.ones(7, 7).tril().bool()
    state = batch.attend(params, tree_mask=chain, **data.draw(tiles))
    agree(state, batch.attend(params))
    agree(batch.attend(params, tree_mask=torch.ones(9, 9, dtype=torch.bool)), state)


@settings(max_examples=40)
@given(data=st.data())
def test_a_row_of_a_tree_is_the_chain_of_its_ancestors(data, layers, verified, tiles, agree, with_tokens):
    """Row i equals a decode step over the context and its ancestors' keys, gathered (no window, chunk, bias)."""
    params = data.draw(layers(causal=True, window=(-1, -1), attn_chunk_size=None, alibi_slopes=None))
    tree, batch = verified(data, params)
    out, lse = batch.attend(params, tree_mask=mask_of(tree), **data.draw(tiles))
    rows, keys, values = [], [], []
    for r in range(len(batch.keys)):
        context = len(batch.keys[r]) - len(tree)
        for node in range(len(tree)):
            line = [*range(context), *(context + a for a in line_of(tree, node))]
            rows.append(batch.rows(r).start + node)
            keys.append(batch.keys[r][line])
            values.append(batch.values[r][line])
    steps = replace(batch, query=batch.query[rows], query_start_loc=torch.arange(len(rows) + 1))
    agree(with_tokens(steps, keys, values).attend(params), (out[rows], lse[rows]))


@settings(max_examples=40)
@given(data=st.data())
def test_a_node_reaches_itself_and_its_descendants_alone(data, layers, verified, tiles):
    """K and V of a leaf do not influence its siblings; of a node, none but its own branch; no other request."""
    params = data.draw(layers(causal=True, window=(-1, -1), attn_chunk_size=None, scale=None, sinks=None))
    tree, batch = verified(data, params, shared_pages=st.just(0), gain=1.0)
    sizes, mask = data.draw(tiles), mask_of(tree)
    node, request = data.draw(st.integers(0, len(tree) - 1)), data.draw(st.integers(0, len(batch.keys) - 1))
    before = batch.attend(params, tree_mask=mask, **sizes)
    position, size = len(batch.keys[request]) - len(tree) + node, batch.key_cache.shape[1]
    for cache in (batch.key_cache, batch.value_cache):
        cache[batch.block_table[request, position // size], position % size] += 1.0
    after = batch.attend(params, tree_mask=mask, **sizes)
    branch = [batch.rows(request).start + other for other in range(len(tree)) if node in line_of(tree, other)]
    for row in range(len(batch.query)):
        moved = (after[0][row] != before[0][row]).any(dim=-1)
        assert moved.all() if row in branch else not moved.any()
        assert row in branch or torch.equal(after[1][row], before[1][row])


@settings(max_examples=40)
@given(data=st.data())
def test_a_tree_is_anded_with_the_layer(data, layers, verified, tiles, agree):
    """Under windows, chunks and biases of flat positions a node sees what both admit, the context unrestricted."""
    params = data.draw(layers())
    tree, batch = verified(data, params)
    lines = [set(line_of(tree, node)) for node in range(len(tree))]
    out, lse = batch.attend(params, tree_mask=mask_of(tree), **data.draw(tiles))
    for node in range(len(tree)):

        def admitted(request, q_pos, k_pos, node=node):
            context = len(batch.keys[request]) - len(tree)
            allowed = [j < context or j - context in lines[node] for j in k_pos[0].tolist()]
            sees = torch.tensor([allowed], dtype=torch.bool).expand(len(q_pos), -1)
            return sees & visible(params, q_pos, k_pos)

        rows = [batch.rows(r).start + node for r in range(len(batch.keys))]
        one = batch.attend(params, mask_fn=admitted)
        agree((out[rows], lse[rows]), (one[0][rows], one[1][rows]))


@settings(max_examples=40)
@given(data=st.data())
def test_verification_rows_are_successive_decode_steps(data, layers, batches, rows_of, tiles, agree):
    """A uniform batch of 1 + K rows each equals K + 1 decode steps of the whole batch, any layer."""
    params = data.draw(layers(causal=True))
    count = data.draw(st.integers(1, 7))
    batch = data.draw(batches(params, query_lens=st.just(count)))
    out, lse = batch.attend(params, **data.draw(tiles))
    for i in range(count):
        step, rows = rows_of(batch, [(i, i + 1)] * len(batch.keys))
        agree(step.attend(params), (out[rows], lse[rows]))


@settings(max_examples=40)
@given(data=st.data())
def test_decode_or_prefill_is_a_label(data, layers, batches, tiles, agree, requests_rows):
    """Prompts of exactly 1 + K tokens, one-token prompt tails: in one call, or in two split at a threshold."""
    params = data.draw(layers(causal=True))
    threshold = data.draw(st.integers(1, 4))
    lens = st.sampled_from((1, threshold, threshold + 1))
    batch = data.draw(batches(params, requests=(1, 5), query_lens=lens, context_lens=st.sampled_from((0, 1, 9))))
    out, lse = batch.attend(params, **data.draw(tiles))
    sizes = [batch.rows(r).stop - batch.rows(r).start for r in range(len(batch.keys))]
    for decode in (True, False):
        if chosen := [r for r, n in enumerate(sizes) if (n <= threshold) == decode]:
            rows = requests_rows(batch, chosen)
            agree(batch.only(chosen).attend(params, **data.draw(tiles)), (out[rows], lse[rows]))
