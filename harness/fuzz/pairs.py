"""Pairwise covering: a small set of choices in which every two values of two keys occur together.

Greedy, like AETG (Cohen et al. 1997): each row starts with an uncovered pair. Every other key gets the value that
covers most pairs with the values before it. The same seed gives the same rows.
"""

from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations, product
from random import Random
from typing import Any

from attncheck.harness.fuzz.axes import Axes

_Value = tuple[str, Hashable]


class PairwiseCover:
    """The pairs of values of ``axes`` that have not occurred together yet."""

    def __init__(self, axes: Axes, seed: int) -> None:
        self._axes, self._random = axes, Random(seed)
        self._rank = {key: rank for rank, key in enumerate(axes)}
        self._left: dict[tuple[_Value, _Value], None] = dict.fromkeys(
            ((a, x), (b, y)) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b])
        )

    def __len__(self) -> int:
        return len(self._left)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield rows until no pair is left; after each, the caller calls :meth:`cover` with the values it kept.

        Each pair is tried among other values, then alone. After that it counts as impossible.
        """
        while self._left:
            pair = next(iter(self._left))
            yield self._filled(dict(pair))
            if pair in self._left:  # not kept, perhaps because of the other values
                yield dict(pair)
                self._left.pop(pair, None)

    def cover(self, kept: Mapping[str, Any]) -> int:
        """Mark the pairs of the kept values as covered, and return how many of them were uncovered."""
        before = len(self._left)
        for one, other in combinations(sorted(kept.items(), key=lambda item: self._rank[item[0]]), 2):
            self._left.pop((one, other), None)
        return before - len(self._left)

    def _filled(self, row: dict[str, Any]) -> dict[str, Any]:
        keys = [key for key in self._axes if key not in row]
        self._random.shuffle(keys)
        for key in keys:
            values = list(self._axes[key])
            self._random.shuffle(values)
            row[key] = max(values, key=lambda value: self._gain((key, value), row))
        return row

    def _gain(self, value: _Value, row: Mapping[str, Any]) -> int:
        rank = self._rank[value[0]]
        return sum(
            ((value, each) if rank < self._rank[each[0]] else (each, value)) in self._left for each in row.items()
        )
