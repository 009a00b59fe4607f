"""Inputs of the relations: random layers, random paged batches over them, and parts of those batches.

A relation compares two answers of the reference; no right answer is written down here. Everything a request does not
own is NaN. Strategies are handed out by fixtures, because tests are no packages and cannot import each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from attncheck.reference import AttentionParams

INF = float("inf")


@st.composite
def _layers(draw: DrawFn, **fixed: Any) -> AttentionParams:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kv_heads = fixed.pop("num_kv_heads", kv_heads)
    heads = fixed.pop("num_heads", kv_heads * group)
    unbounded = st.just(-1)
    choices: dict[str, SearchStrategy[Any]] = {
        "head_size": st.sampled_from((3, 8, 1)),
        "head_size_v": st.sampled_from((None, 1, 5)),
        "scale": st.none() | st.floats(-2, 2),
        "causal": st.booleans(),
        "window": st.tuples(unbounded | st.integers(0, 9), unbounded | st.integers(0, 9)),
        "logits_soft_cap": st.none() | st.floats(0.25, 20),
        "alibi_slopes": st.none() | st.tuples(*[st.floats(-1, 1)] * heads),
        "alibi_sqrt": st.booleans(),
        "sinks": st.none() | st.tuples(*[st.floats(-3, 3) | st.just(-INF)] * heads),
        "attn_chunk_size": st.none() | st.integers(1, 9),
        "attn_chunk_lookback": st.integers(0, 2),
    }
    drawn = {name: draw(choice) for name, choice in choices.items() if name not in fixed}
    return AttentionParams(heads, kv_heads, **drawn, **fixed)


@st.composite
def _batches(
    draw: DrawFn,
    make: Callable[..., Any],
    params: AttentionParams,
    *,
    requests: tuple[int, int] = (1, 4),
    query_lens: SearchStrategy[int] | None = None,
    context_lens: SearchStrategy[int] | None = None,
    fitting: bool = True,
    shared_pages: SearchStrategy[int] = st.integers(0, 3),  # noqa: B008 (immutable)
    block_size: int | None = None,
    gain: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Any:
    new = st.integers(0, 7) if query_lens is None else query_lens
    old = st.integers(0, 17) if context_lens is None else context_lens
    pairs = draw(st.lists(st.tuples(new, old), min_size=requests[0], max_size=requests[1]))
    pairs = [(q, q + c) for q, c in pairs]
    if not fitting:
        pairs = [(q, draw(st.sampled_from((s, s % 6, 0)))) for q, s in pairs]
    batch = make(
        [q for q, _ in pairs],
        [s for _, s in pairs],
        params,
        block_size=block_size or draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 10**6)),
        gain=gain or draw(st.sampled_from((1.0, 4.0))),
        dtype=dtype,
        unowned_rows=draw(st.integers(0, 2)),
    )
    return _with_shared_pages(batch, draw(shared_pages))


def _with_shared_pages(batch: Any, pages: int) -> Any:
    """The first pages of request 0 are in the tables of all requests that are long enough; theirs become unowned."""
    size = batch.key_cache.shape[1]
    keys, values, table = list(batch.keys), list(batch.values), batch.block_table.clone()
    caches = [batch.key_cache.clone(), batch.value_cache.clone()]
    for r in range(1, len(keys)):
        count = min(pages, len(keys[0]) // size, len(keys[r]) // size)
        for cache in caches:
            cache[table[r, :count].long()] = torch.nan
        table[r, :count] = table[0, :count]
        keys[r] = torch.cat([keys[0][: count * size], keys[r][count * size :]])
        values[r] = torch.cat([values[0][: count * size], values[r][count * size :]])
    return replace(
        batch,
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        keys=tuple(keys),
        values=tuple(values),
    )


@pytest.fixture(scope="session")
def layers() -> Callable[..., SearchStrategy[AttentionParams]]:
    """``(**fixed) -> strategy`` of layers: GQA, sizes, scale, and every modifier that is not fixed by name."""
    return _layers


@pytest.fixture(scope="session")
def batches(make_batch: Callable[..., Any]) -> Callable[..., SearchStrategy[Any]]:
    """``(params, ...) -> strategy`` of batches: any residues, empty rows, shuffled tables, shared first pages.

    ``fitting=False`` also draws requests with more rows than keys, and with none.
    """
    return lambda params, **options: _batches(make_batch, params, **options)


@pytest.fixture(scope="session")
def tiles() -> SearchStrategy[dict[str, int]]:
    """Small tiles, so that their edges fall anywhere."""
    return st.fixed_dictionaries({"q_tile": st.integers(1, 9), "kv_tile": st.integers(1, 25)})


@pytest.fixture(scope="session")
def row_places() -> Callable[[Any], list[tuple[int, int, int]]]:
    """``batch -> (row, request, position)`` of every row of a request."""

    def places(batch: Any) -> list[tuple[int, int, int]]:
        spans = [batch.rows(r) for r in range(len(batch.keys))]
        return [
            (row, r, int(batch.seq_lens[r]) - span.stop + row)
            for r, span in enumerate(spans)
            for row in range(span.start, span.stop)
        ]

    return places


@pytest.fixture(scope="session")
def agree(same_state: Callable[..., None]) -> Callable[..., None]:
    """``(state, expected)``: what real arithmetic makes equal is equal to 1e-10."""
    return lambda state, expected: same_state(state, expected, tolerance=1e-10)


@pytest.fixture(scope="session")
def same_bits() -> Callable[..., None]:
    """``(tensors, expected)``: the same bits, NaNs and signs of zeros included."""

    def check(state: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        assert len(state) == len(expected)
        for a, b in zip(state, expected, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))

    return check
