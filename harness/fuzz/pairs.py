"""Pairwise cover: few choices in which any two values of two keys occur together.

Greedy, as AETG (Cohen et al. 1997): each row begins with a pair that is left, and every other key gets the value that
covers most pairs with those before it. The same seed gives the same rows.
"""

from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations, product
from random import Random
from typing import Any

from attncheck.harness.fuzz.axes import Axes

_Value = tuple[str, Hashable]


class PairwiseCover:
    """The pairs of values of ``axes`` that have not occurred together."""

    def __init__(self, axes: Axes, seed: int) -> None:
        self._axes, self._random = axes, Random(seed)
        self._rank = {key: rank for rank, key in enumerate(axes)}
        self._left: dict[tuple[_Value, _Value], None] = dict.fromkeys(
            ((a, x), (b, y)) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b])
        )

    def __len__(self) -> int:
        return len(self._left)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield rows until no pair is left; the caller calls :meth:`cover` with what it kept of each.

        Each pair is tried among other values, then alone. After that it counts as one that does not go together.
        """
        while self._left:
            pair = next(iter(self._left))
            yield self._filled(dict(pair))
            if pair in self._left:  # other values stood in its way
                yield dict(pair)
                self._left.pop(pair, None)

    def cover(self, kept: Mapping[str, Any]) -> int:
        """Count the pairs of the values that were kept as covered; return how many of them were left."""
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
        """How many pairs with the values of ``row`` are left."""
        rank = self._rank[value[0]]
        return sum(
            ((value, each) if rank < self._rank[each[0]] else (each, value)) in self._left for each in row.items()
        )
