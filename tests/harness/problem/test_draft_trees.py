"""Trees as a problem has them, by parents, equal those that a builder reads."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.backends.paged_metadata import tree_mask
from attncheck.harness.problem.queries import ancestors, token_tree


@st.composite
def parents(draw: st.DrawFn) -> tuple[int, ...]:
    """Of up to nine rows, listed by depth."""
    chosen, depths = [-1], [0]
    for row in range(1, draw(st.integers(1, 9))):
        parent = draw(st.sampled_from([i for i in range(row) if depths[i] + 1 >= depths[-1]]))
        chosen.append(parent)
        depths.append(depths[parent] + 1)
    return tuple(chosen)


@settings(max_examples=100, deadline=None)
@given(parents())
def test_a_row_sees_itself_and_its_ancestors_here_and_in_what_a_builder_reads(tree: tuple[int, ...]) -> None:
    mask = ancestors(tree)
    assert torch.equal(tree_mask(token_tree(tree)), mask)
    for row, parent in enumerate(tree):
        line, node = {row}, parent
        while node >= 0:
            line.add(node)
            node = tree[node]
        assert set(mask[row].nonzero().flatten().tolist()) == line
