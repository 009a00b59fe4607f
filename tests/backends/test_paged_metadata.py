"""Metadata of a step: trees of draft tokens, what the string means, and strings that are no tree."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.paged_metadata import refuse_tree, tree_mask, tree_of

CPU = torch.device("cpu")


def test_branches_do_not_see_each_other():
    """Two drafts after the root; the second has a child, whose choice has number 3."""
    assert tree_mask("[(0,), (1,), (1, 3)]").tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=7))
def test_a_row_sees_those_whose_choices_begin_its_own(steps):
    """Nodes grown one by one: each appends a choice to an earlier one."""
    nodes = [()]
    for number, back in enumerate(steps):
        nodes.append((*nodes[max(0, len(nodes) - 1 - back)], number))
    mask = tree_mask(str(nodes[1:]))
    assert mask.tolist() == [[node[: len(other)] == other for other in nodes] for node in nodes]


def test_what_is_no_tree_is_refused(refusals):
    reasons = {
        "[(0,), (1, 0)]": "[(0,), (1, 0)]: (1, 0) comes before its parent",
        "[(0, 0), (0,)]": "[(0, 0), (0,)]: (0, 0) comes before its parent",
        "[(0,), (0,)]": "'[(0,), (0,)]' lists a node twice",
        "[(), (0,)]": "'[(), (0,)]' lists the root (); the tree has it without being listed",
        "[0, 1]": "'[0, 1]' is no list of tuples of choices",
        "[(0,), (1,)": "'[(0,), (1,)' is no list of tuples of choices",
        "__import__('os')": "\"__import__('os')\" is no list of tuples of choices",
    }
    assert refusals(tree_mask, list(reasons)) == [f"speculative_token_tree {reason}" for reason in reasons.values()]


def test_a_backend_that_does_not_declare_trees_refuses_them():
    for speculative in (None, SimpleNamespace(speculative_token_tree=None)):
        assert tree_of(SimpleNamespace(speculative_config=speculative), CPU) is None
    assert tree_of(SimpleNamespace(), CPU) is None
    config = SimpleNamespace(speculative_config=SimpleNamespace(speculative_token_tree="[(0,), (1,)]"))
    bare = type("Bare", (FlexBackend,), {"features": FlexBackend.features - {"tree"}})
    refuse_tree(FlexBackend, tree_of(config, CPU))
    refuse_tree(bare, None)
    with pytest.raises(NotImplementedError, match="FLEX_ATTENTION: a tree of 2 draft tokens is not supported"):
        refuse_tree(bare, tree_of(config, CPU))
