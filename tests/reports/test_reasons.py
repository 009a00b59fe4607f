"""Reasons that differ only in lines of code, or in a figure, are joined."""

import pytest

from attncheck.reports.analysis.phrases import cut
from attncheck.reports.analysis.reasons import joined, listed, without_first_figure

SHAPE = "data-dependent shape: x[...] (aten.index)"


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        (
            f"{SHAPE} at g1.py:72 in forward; {SHAPE} at g1.py:73 in forward; {SHAPE} at g1.py:74 in forward",
            f"{SHAPE} at g1.py:72, 73, 74 in forward",
        ),
        (
            f"not captured (8 tokens): {SHAPE} at a b.py:7 in f; {SHAPE} at a b.py:9 in f; {SHAPE} at a b.py:9 in f",
            f"not captured (8 tokens): {SHAPE} at a b.py:7, 9 in f",
        ),
        (
            ".item() at g.py:1 in f; .tolist() at g.py:2 in f; .item() at g.py:3 in f; why not",
            ".item() at g.py:1, 3 in f; .tolist() at g.py:2 in f; why not",
        ),
    ],
)
def test_what_differs_in_its_line_alone_is_joined(reason, short):
    assert joined(reason) == short


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "a; b; a",
        ".item() at g.py:1 in f",
        ".item() at g.py:1 in f; .item() at g.py:2 in g",
        ".item() at g.py:1 in f; .item() at h.py:2 in f",
        ".item() at g.py:1 in f; .tolist() at g.py:2 in f",
        "host read: .item() at g.py:1 in f; host copy: .item() at g.py:2 in f",
        "without a graph: .item() at g.py:1 in f; with a graph: .item() at g.py:2 in f",
    ],
)
def test_whatever_differs_in_more_stays(reason):
    assert joined(reason) == reason


def test_reasons_that_differ_in_their_first_figure_list_it():
    sizes = [f"block_size {size}: supported are multiples of 32" for size in (16, 8, 128, 8)]
    assert listed(sizes) == "block_size 8, 16, 128: supported are multiples of 32"
    assert len(set(map(without_first_figure, sizes))) == 1
    assert listed(["cap 5.0: no", "cap 30.0: no"]) == "cap 5.0, 30.0: no"
    assert listed(["no figure in it"]) == "no figure in it"
    dtypes = [f"dtype {name}: supported are bfloat16" for name in ("float16", "float32")]
    assert list(map(without_first_figure, dtypes)) == dtypes
    assert without_first_figure("head_size 72: 64, 128") != without_first_figure("head_size 72: 64")


def test_a_text_of_just_the_width_is_not_cut():
    assert (cut("abcdef", 6), cut("abcdefg", 6)) == ("abcdef", "abc...")
