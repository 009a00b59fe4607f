"""Batches drawn by hypothesis: the same for the same seed and the same hypothesis, nothing kept between runs.

Must not know: functions, providers.
"""

import importlib.util

import torch

from attncheck.harness.providers.batches import Batch

COUNT = 100
"""How many batches are drawn."""


def has_hypothesis() -> bool:
    """Whether hypothesis is installed (the extra ``fuzz``)."""
    return importlib.util.find_spec("hypothesis") is not None


def drawn_batches(seed: int, count: int = COUNT) -> list[Batch]:
    """``count`` distinct batches at most, the small ones first.

    Lengths lie near multiples of the block size, where edges are; some batches are sorted decodes first, some padded,
    a few not causal, a few of int64 indices.
    """
    import hypothesis
    from hypothesis import strategies as st

    @st.composite
    def batches(draw: st.DrawFn) -> Batch:
        block_size = draw(st.sampled_from((1, 2, 4, 16)))
        lengths = st.one_of(
            st.integers(1, 3),
            st.builds(lambda n, edge: max(1, n * block_size + edge), st.integers(1, 6), st.integers(-1, 1)),
        )
        requests = draw(st.lists(st.tuples(lengths, st.one_of(st.just(0), lengths)), min_size=1, max_size=8))
        if draw(st.booleans()):
            requests.sort()
        spare = draw(st.sampled_from((0, 0, 1, 3)))
        return Batch(
            "",
            tuple(new for new, _ in requests) + (0,) * spare,
            tuple(new + context for new, context in requests) + (0,) * spare,
            block_size,
            draw(st.sampled_from((0, 0, 1, 8))),
            causal=draw(st.sampled_from((True, True, True, False))),
            index_dtype=draw(st.sampled_from((torch.int32, torch.int32, torch.int32, torch.int64))),
        )

    drawn: list[Batch] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(batches())
    def collect(batch: Batch) -> None:
        drawn.append(batch)

    collect()
    distinct = sorted(dict.fromkeys(drawn), key=lambda batch: batch.size)
    return [_named(batch, f"drawn {number}") for number, batch in enumerate(distinct, start=1)]


def _named(batch: Batch, name: str) -> Batch:
    from dataclasses import replace

    return replace(batch, name=name)
