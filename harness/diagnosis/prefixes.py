"""Faults of image spans, and of first keys that are seen beyond a window."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.faults import Answer, ChangePrefix, Hypothesis, altered, with_first_keys, with_prefixes
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams, PrefixMask, visible

_TILES = (16, 32, 64, 128)
"""Numbers of keys in a tile; kernels read whole tiles."""


def prefix_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults that image spans and first keys can have, besides those that a case must notice."""
    params, rows = truth.params, truth.rows
    if any(own.mm_req_doc_ranges for own in rows.prefixes):
        yield from _span_explanations(params, rows)
        yield from _keys_behind_explanations(params, rows)
    if rows.has_first_keys:
        yield from _first_key_explanations(params, rows, problem.cache.block_size)


def _span_explanations(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    left = params.window[0]
    if left >= 0:
        meaning = "the image spans are clipped at the window"
        yield altered(meaning, rows, params, "mm_prefix", hidden=lambda _r, q, k: q - k > left)
    meaning = "rows are compared with image spans by their index in the step, not by their position"
    yield _with_local_rows(meaning, params, rows)
    for meaning, others in _of_other_requests(rows, "image spans"):
        yield altered(meaning, others, params, "mm_prefix")


def _keys_behind_explanations(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults of counting keys of a span that do not exist yet, up to the end of a tile, as zeros."""
    if params.alibi_slopes is not None:
        return  # the bias gives such keys other scores than 0
    tried: list[Tensor] = []
    for tile in _TILES:
        counts = [_keys_behind(own, tile, *sizes) for own, *sizes in _sizes(rows)]
        extra = torch.cat(counts).double().to(rows.query.device)[:, None]
        if bool(extra.any()) and not any(torch.equal(extra, other) for other in tried):
            tried.append(extra)
            meaning = f"image spans cut by a chunk have keys behind it, with score 0, to the end of a tile of {tile}"
            yield Hypothesis(meaning, partial(_with_zeros, params, rows, extra), ("mm_prefix",))


def _sizes(rows: UnpagedAttention) -> Iterator[tuple[PrefixMask, int, int]]:
    return zip(rows.prefixes, rows.num_rows.tolist(), rows.num_keys.tolist(), strict=True)


def _keys_behind(prefix: PrefixMask, tile: int, num_rows: int, num_keys: int) -> Tensor:
    """Return for each row of a request how many keys behind its last one, in the same tile, are in the row's span."""
    q_pos = torch.arange(num_keys - num_rows, num_keys)[:, None]
    behind = torch.arange(num_keys, -(-num_keys // tile) * tile)[None]
    in_span = replace(prefix, rswa_prefix_len=0).sees(q_pos, behind)
    return in_span.sum(dim=1)


def _with_zeros(params: AttentionParams, rows: UnpagedAttention, extra: Tensor) -> Answer:
    """Return output and LSE with ``extra`` more keys a row, whose score and value are 0."""
    out, lse = rows.attend(params)
    share = torch.sigmoid(lse - extra.log())
    return out * share[..., None], torch.logaddexp(lse, extra.log())


def _with_local_rows(meaning: str, params: AttentionParams, rows: UnpagedAttention) -> Hypothesis:
    """Return the fault of a mask that gets the row's number among the new rows of its request as its position."""
    context = (rows.num_keys - rows.num_rows).tolist()

    def hidden(request: int, q: Tensor, k: Tensor) -> Tensor:
        in_span = rows.prefixes[request].sees(q - context[request], k)
        return ~(visible(params, q, k) | in_span)

    every = replace(params, causal=False, window=(-1, -1))
    return altered(meaning, replace(rows, prefixes=()), every, "mm_prefix", hidden=hidden)


def _first_key_explanations(params: AttentionParams, rows: UnpagedAttention, block_size: int) -> Iterator[Hypothesis]:
    changes: dict[str, ChangePrefix] = {
        "the first keys are counted in pages": with_first_keys(lambda own: own * block_size),
        "only whole pages of first keys are visible": with_first_keys(lambda own: own // block_size * block_size),
        "the last page of first keys is visible to its end": with_first_keys(
            lambda own: -(-own // block_size) * block_size
        ),
    }
    for meaning, change in changes.items():
        yield altered(meaning, with_prefixes(rows, change), params, "rswa")
    for meaning, others in _of_other_requests(rows, "number of first keys"):
        yield altered(meaning, others, params, "rswa")


def _of_other_requests(rows: UnpagedAttention, what: str) -> Iterator[tuple[str, UnpagedAttention]]:
    """Yield the fault of reading the masks of other requests, and the rows with these masks."""
    own = rows.prefixes
    masks = {
        "request 0": own[:1] * len(own),
        "the request before it": (own[-1], *own[:-1]),
        "the request behind it": (*own[1:], own[0]),
    }
    for which, others in masks.items():
        yield f"every request has the {what} of {which}", replace(rows, prefixes=others)
