"""All pairs of values occur, in few rows, the same ones for the same seed."""

import os
import subprocess
import sys
from itertools import combinations
from math import prod

from attncheck.harness.fuzz.search import PairwiseCover

AXES = {"a": (1, 2, 3), "b": ("x", "y"), "c": (None, True, False), "d": (0.5, 1.5), "e": (7, 8, 9)}


def rows_of(seed: int) -> list[dict[str, object]]:
    cover, rows = PairwiseCover(AXES, seed), []
    for row in cover.rows():
        cover.cover(row)
        rows.append(dict(row))
    return rows


def test_every_two_values_of_two_keys_meet_in_few_rows() -> None:
    rows = rows_of(0)
    met = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    wanted = {frozenset(((a, x), (b, y))) for a, b in combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    assert wanted <= met
    assert len(rows) < prod(map(len, AXES.values())) / 5


def test_a_pair_that_never_goes_together_is_tried_alone_and_given_up() -> None:
    cover, tried = PairwiseCover(AXES, 0), []
    for row in cover.rows():
        tried.append(dict(row))
        if row.get("a") == 1 and row.get("b") == "x":
            continue
        cover.cover(row)
    assert {"a": 1, "b": "x"} in tried
    assert not len(cover)


def test_a_row_without_new_pairs_counts_0() -> None:
    cover = PairwiseCover(AXES, 0)
    row = next(cover.rows())
    assert cover.cover(row) == 10  # pairs of five keys
    assert cover.cover(row) == 0


def test_rows_do_not_depend_on_the_hashes_of_texts() -> None:
    code = (
        "from attncheck.harness.fuzz.search import PairwiseCover\n"
        f"print([list(row.items()) for row in PairwiseCover({AXES!r}, 3).rows()])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1
