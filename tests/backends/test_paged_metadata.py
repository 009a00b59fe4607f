"""Metadata of a step: trees of draft tokens, what the string means, and strings that are no tree."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.paged_metadata import refuse_tree, tree_mask, tree_of

CPU = torch.device("cpu")


def test_a_chain_is_the_causal_mask() -> None:
    assert torch.equal(tree_mask("[(0,), (0, 0), (0, 0, 0)]"), torch.ones(4, 4).tril().bool())


def test_branches_do_not_see_each_other() -> None:
    """Two drafts after the root; the second has a child, whose choice has number 3."""
    assert tree_mask("[(0,), (1,), (1, 3)]").tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]


def test_no_drafts_leave_the_root() -> None:
    assert tree_mask("[]").tolist() == [[True]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=7))
def test_a_row_sees_those_whose_choices_begin_its_own(steps: list[int]) -> None:
    """Nodes grown one by one: each appends a choice to an earlier one."""
    nodes: list[tuple[int, ...]] = [()]
    for number, back in enumerate(steps):
        nodes.append((*nodes[max(0, len(nodes) - 1 - back)], number))
    mask = tree_mask(str(nodes[1:]))
    assert mask.tolist() == [[node[: len(other)] == other for other in nodes] for node in nodes]


def test_what_is_no_tree_is_refused(refusals: Callable[..., list[str]]) -> None:
    written = [
        "[(0,), (1, 0)]",
        "[(0, 0), (0,)]",
        "[(0,), (0,)]",
        "[(), (0,)]",
        "[0, 1]",
        "[(0,), (1,)",
        "__import__('os')",
    ]
    found = refusals(tree_mask, written)
    assert [message.removeprefix("speculative_token_tree ") for message in found] == snapshot(
        [
            "[(0,), (1, 0)]: (1, 0) comes before its parent",
            "[(0, 0), (0,)]: (0, 0) comes before its parent",
            "'[(0,), (0,)]' lists a node twice",
            "'[(), (0,)]' lists the root (); the tree has it without being listed",
            "'[0, 1]' is no list of tuples of choices",
            "'[(0,), (1,)' is no list of tuples of choices",
            "\"__import__('os')\" is no list of tuples of choices",
        ]
    )


@pytest.mark.parametrize("speculative", [None, SimpleNamespace(speculative_token_tree=None)])
def test_a_step_without_a_tree(speculative: Any) -> None:
    assert tree_of(SimpleNamespace(speculative_config=speculative), CPU) is None
    assert tree_of(SimpleNamespace(), CPU) is None


def test_a_backend_that_does_not_declare_trees_refuses_them() -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace(speculative_token_tree="[(0,), (1,)]"))
    bare = type("Bare", (FlexBackend,), {"features": FlexBackend.features - {"tree"}})
    refuse_tree(FlexBackend, tree_of(config, CPU))
    refuse_tree(bare, None)
    with pytest.raises(NotImplementedError) as refused:
        refuse_tree(bare, tree_of(config, CPU))
    assert str(refused.value) == snapshot("FLEX_ATTENTION: a tree of 2 draft tokens is not supported")
