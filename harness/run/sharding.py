"""A part of a run's cases: shard 2/7 of a run is the same on every machine, and each takes about as long.

Cases of one layer and cache stay together, since they share one CUDA-graph level.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attncheck.cases.model import Case
from attncheck.errors import SelectionError
from attncheck.harness.problem.memory_estimate import needed_bytes

_LEVEL = 3.0
"""What one CUDA-graph level costs, where a small case costs 1; measured on a CPU."""

_BYTES = 2**26
"""Bytes that a case of cost 2 needs."""


@dataclass(frozen=True)
class Shard:
    """Shard ``number`` of ``count``; numbers begin with 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def cases(self, cases: Sequence[Case]) -> frozenset[str]:
        """Return the keys of the cases of this shard, among the ``cases`` of the whole run.

        Raises:
            SelectionError: there are more shards than cases.
        """
        if self.count > len(cases):
            raise SelectionError(f"--shard {self}: {len(cases)} cases are selected; ask for at most as many shards")
        groups: dict[object, list[Case]] = {}
        for case in cases:
            layer = case.layer, replace(case.cache, num_blocks=None, first_block=None)
            groups.setdefault(layer, []).append(case)
        parts = list(groups.values()) if len(groups) >= self.count else [[case] for case in cases]
        costs, members = [0.0] * self.count, [list[str]() for _ in range(self.count)]
        for part in sorted(parts, key=_cost, reverse=True):  # stable, so that equal ones keep their order
            least = costs.index(min(costs))
            costs[least] += _cost(part)
            members[least] += [case.key for case in part]
        return frozenset(members[self.number - 1])


def read_shard(text: str | None) -> Shard | None:
    """Return the shard that an option names, as ``2/7``; None for None.

    Raises:
        SelectionError: it names none.
    """
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise SelectionError(f"--shard {text}: give two numbers as 2/7, for the second of seven shards")
    return Shard(int(number), int(count))


def _cost(cases: Sequence[Case]) -> float:
    return _LEVEL + sum(1 + needed_bytes(case) / _BYTES for case in cases)
