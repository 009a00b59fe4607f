"""Batches drawn by hypothesis: the same for the same seed and the same hypothesis, and no file is left behind.

Must not know: functions, providers.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from attncheck.harness.providers.batches import ProviderBatch

COUNT = 150
"""How many batches are drawn; some come twice."""


def has_hypothesis() -> bool:
    """Whether hypothesis is installed (the extra ``fuzz``)."""
    return importlib.util.find_spec("hypothesis") is not None


def drawn_batches(seed: int, count: int = COUNT) -> list[ProviderBatch]:
    """``count`` distinct batches at most, the small ones first.

    Lengths lie near multiples of the block size, where edges are; some batches are sorted decodes first, some padded,
    a few not causal, a few of int64 indices.
    """
    import hypothesis
    from hypothesis import strategies as st

    T = TypeVar("T")

    def one_of(values: Sequence[T]) -> "st.SearchStrategy[T]":
        """One of few values, drawn as bits: among integers hypothesis mixes numbers it finds in local source files."""
        bits = st.tuples(*[st.booleans()] * 12)
        return bits.map(lambda drawn: values[sum(bit << place for place, bit in enumerate(drawn)) % len(values)])

    @st.composite
    def batches(draw: st.DrawFn) -> ProviderBatch:
        block_size = draw(one_of((1, 2, 4, 16)))
        near_edges = [max(1, pages * block_size + step) for pages in range(1, 7) for step in (-1, 0, 1)]
        lengths = one_of([*near_edges, *(1, 2, 3) * 6])
        contexts = one_of([*near_edges, *[0] * 12, 1, 2, 3])
        requests = [(draw(lengths), draw(contexts)) for _ in range(draw(one_of(range(1, 9))))]
        if draw(st.booleans()):
            requests.sort()
        spare = draw(one_of((0, 0, 1, 3)))
        return ProviderBatch(
            "",
            tuple(new for new, _ in requests) + (0,) * spare,
            tuple(new + context for new, context in requests) + (0,) * spare,
            block_size,
            draw(one_of((0, 0, 1, 8))),
            causal=draw(one_of((True, True, True, False))),
            index_dtype=draw(one_of((torch.int32, torch.int32, torch.int32, torch.int64))),
        )

    drawn: list[ProviderBatch] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(batches())
    def collect(batch: ProviderBatch) -> None:
        drawn.append(batch)

    collect()
    distinct = sorted(dict.fromkeys(drawn), key=lambda batch: batch.size)
    return [replace(batch, name=f"drawn {number}") for number, batch in enumerate(distinct, start=1)]
