"""Divides the cases of a run into shards of similar cost; shard 2/7 of a run has the same cases on every machine.

Cases of one layer and cache stay in one shard, since they share one CUDA-graph level.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attncheck.cases.model import Case
from attncheck.errors import SelectionError
from attncheck.harness.problem.memory_estimate import needed_bytes

_LEVEL = 3.0
"""Cost of one CUDA-graph level relative to a small case (1.0), measured on a CPU."""

_BYTES = 2**26
"""Size in bytes that adds 1 to the cost of a case."""


@dataclass(frozen=True)
class Shard:
    """Shard ``number`` of ``count``; ``number`` starts at 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def cases(self, cases: Sequence[Case]) -> frozenset[str]:
        """Return the keys of the cases in this shard; ``cases`` are those of the whole run.

        Raises:
            SelectionError: there are more shards than cases.
        """
        if self.count > len(cases):
            raise SelectionError(f"--shard {self}: {len(cases)} cases are selected; give at most as many shards")
        groups: dict[object, list[Case]] = {}
        for case in cases:
            layer = case.layer, replace(case.cache, num_blocks=None, first_block=None)
            groups.setdefault(layer, []).append(case)
        parts = list(groups.values()) if len(groups) >= self.count else [[case] for case in cases]
        costs, members = [0.0] * self.count, [list[str]() for _ in range(self.count)]
        for part in sorted(parts, key=_cost, reverse=True):  # a stable sort: equal costs keep their order
            least = costs.index(min(costs))
            costs[least] += _cost(part)
            members[least] += [case.key for case in part]
        return frozenset(members[self.number - 1])


def read_shard(text: str | None) -> Shard | None:
    """Return the shard that an option gives as ``2/7``, or None for None.

    Raises:
        SelectionError: the text is not of this form, or the number is out of range.
    """
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise SelectionError(f"--shard {text}: give I/N with I from 1 to N, such as 2/7 for the second of seven shards")
    return Shard(int(number), int(count))


def _cost(cases: Sequence[Case]) -> float:
    return _LEVEL + sum(1 + needed_bytes(case) / _BYTES for case in cases)
