"""Questions about cutting a batch: start locations and micro-batches."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from attncheck.harness.providers.batches import ALWAYS, ProviderBatch
from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, are_apart, subject_call
from attncheck.reference import CommonAttentionMetadata, UBatchSlice

MIXED = next(batch for batch in ALWAYS if batch.name == "mixed")

Cut = tuple[int, int, int, int]
"""First request, end of the requests, first token, end of the tokens; the ends are exclusive."""


def _slice(target: Any, *, query_start_loc: torch.Tensor, request_slice: slice) -> dict[str, Any]:
    made = target(query_start_loc, request_slice)
    return {"start locations": made, "are new": are_apart(made, query_start_loc)}


def _slices(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(starts: torch.Tensor, text: str, first: int, stop: int, *tags: str, refused: bool = False) -> SubjectCall:
        return subject_call(
            f"{text}: requests {first}:{stop}",
            *tags,
            refused=refused,
            query_start_loc=starts.to(setting.device),
            request_slice=slice(first, stop),
        )

    for batch in setting.batches:
        half, last = batch.num_reqs // 2, batch.num_reqs
        for first, stop in dict.fromkeys([(0, last), (0, half), (half, last), (half, half)]):
            yield call(batch.offsets(), str(batch), first, stop)
    yield call(torch.tensor([5, 8, 10]), "start locations 5 8 10", 0, 2)
    five = torch.tensor([0, 3, 5, 9, 10])
    yield call(five, "start locations 0 3 5 9 10", 3, 9, "beyond the batch", refused=True)
    yield call(five, "start locations 0 3 5 9 10", 7, 7, refused=True)


def _slice_facts(target: Any, *, request_slice: slice, token_slice: slice) -> dict[str, Any]:
    one, twin = (target(request_slice, token_slice) for _ in range(2))
    return {
        "request_slice": one.request_slice,
        "token_slice": one.token_slice,
        "is_empty": one.is_empty(),
        "num_tokens": one.num_tokens,
        "equal to its twin": one == twin,
        "equal to another": one == target(request_slice, slice(0, 99)),
    }


def _slice_questions(_: SubjectSetting) -> Iterator[SubjectCall]:
    for cut in ((0, 2, 0, 5), (1, 1, 0, 5), (0, 2, 4, 4), (0, 2, 3, 8)):
        yield subject_call(_format(cut), request_slice=slice(*cut[:2]), token_slice=slice(*cut[2:]))


def _cut_at(batch: ProviderBatch, first: int, stop: int) -> Cut:
    """Return the cut with these tokens; requests after the last token are left out."""
    return (bisect_right(batch.starts, first) - 1, bisect_right(batch.starts, stop - 1), first, stop)


def _whole(batch: ProviderBatch) -> Cut:
    return (0, batch.num_reqs, 0, batch.num_tokens + batch.padding_tokens)


def _pieces(batch: ProviderBatch, count: int) -> list[Cut]:
    """Return the batch as ``count`` pieces of about equal length; the last one contains the padding."""
    edges = [batch.num_tokens * piece // count for piece in range(count + 1)]
    pieces = [_cut_at(batch, first, stop) for first, stop in pairwise(edges)]
    _, last_request, _, last_token = _whole(batch)
    return [*pieces[:-1], (pieces[-1][0], last_request, pieces[-1][2], last_token)]


def _ubatch(cut: Cut) -> UBatchSlice:
    return UBatchSlice(slice(cut[0], cut[1]), slice(cut[2], cut[3]))


def _format(cut: Cut) -> str:
    return f"requests {cut[0]}:{cut[1]}, tokens {cut[2]}:{cut[3]}"


def _tags(batch: ProviderBatch) -> list[str]:
    return [] if batch.causal else ["not causal"]


MEANINGLESS: tuple[tuple[Cut, str], ...] = (
    ((1, 1, 3, 5), "empty"),
    ((0, 2, 3, 7), "wrong start"),
    ((0, 1, 0, 5), "wrong end"),
    ((0, 2, 0, 3), "wrong end"),
)
"""Cuts of the batch ``mixed``: empty, starting after request 0, ending inside request 1, ending before request 1."""


def _piece(target: Any, *, ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata) -> dict[str, Any]:
    made = target(ubatch_slice, attn_metadata)
    names = ("query_start_loc", "query_start_loc_cpu")
    return {"metadata": made, "new": {name: _is_new(name, made, attn_metadata) for name in names}}


def _is_new(name: str, made: CommonAttentionMetadata, given: CommonAttentionMetadata) -> bool:
    return are_apart(getattr(made, name), getattr(given, name))


def _one_piece(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        metadata = batch.metadata(setting.device)
        third, half, end = batch.num_tokens // 3, batch.num_tokens // 2, batch.num_tokens
        edges = [(0, end), (0, half), (half, end), (third, end - third), (half, half + 1)]
        cuts = [_cut_at(batch, first, stop) for first, stop in edges if first < stop <= end]
        for cut in dict.fromkeys([*cuts, _whole(batch), *_pieces(batch, min(2, end))]):
            text = f"{batch}: {_format(cut)}"
            yield subject_call(text, *_tags(batch), ubatch_slice=_ubatch(cut), attn_metadata=metadata)
    metadata = MIXED.metadata(setting.device)
    for cut, tag in MEANINGLESS:
        text = f"{MIXED}: {_format(cut)}"
        yield subject_call(text, tag, refused=True, ubatch_slice=_ubatch(cut), attn_metadata=metadata)
    dummy = replace(
        metadata,
        query_start_loc=torch.zeros_like(metadata.query_start_loc),
        query_start_loc_cpu=torch.zeros_like(metadata.query_start_loc_cpu),
    )
    cut = (0, 3, 0, 12)
    text = f"start locations all 0: {_format(cut)}"
    yield subject_call(text, refused=True, ubatch_slice=_ubatch(cut), attn_metadata=dummy)


def _many_pieces(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(batch: ProviderBatch, cuts: list[Cut], *tags: str, refused: bool = False) -> SubjectCall:
        return subject_call(
            f"{batch}: {'; '.join(map(_format, cuts)) or 'no piece'}",
            *tags,
            *_tags(batch),
            refused=refused,
            ubatch_slices=[_ubatch(cut) for cut in cuts],
            common_attn_metadata=batch.metadata(setting.device),
        )

    for batch in setting.batches:
        for count in range(1, min(3, batch.num_tokens) + 1):
            yield call(batch, _pieces(batch, count))
    yield call(MIXED, [])
    yield call(MIXED, [(0, 2, 0, 7), (1, 1, 3, 5)], "empty", refused=True)
    yield call(MIXED, [(0, 2, 0, 7), (0, 1, 0, 5)], "wrong end", refused=True)


def _plans(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(batch: ProviderBatch, count: int, spare: int, size: int | None = None) -> SubjectCall:
        counts = np.array([tokens for tokens in batch.query_lens if tokens], dtype=np.int32)
        return subject_call(
            f"{batch}: {count} pieces{f' of {size} tokens' if size else ''}, {spare} padding tokens",
            "cut",
            should_ubatch=True,
            num_scheduled_tokens=counts,
            num_tokens_padded=batch.num_tokens + spare,
            num_reqs_padded=batch.num_reqs + spare,
            num_ubatches=count,
            split_point=size,
        )

    for batch in setting.batches:
        for count, spare in ((1, 0), (1, 3), (2, 0), (2, 1), (3, 2)):
            size = (batch.num_tokens + spare) // count
            if size and size * (count - 1) < batch.num_tokens:
                yield call(batch, count, spare)
        if batch.num_tokens > 2:
            yield call(batch, 2, 3, size=batch.num_tokens - 1)
            yield call(batch, 3, 0, size=1)
    by_default: dict[str, Any] = {
        "num_scheduled_tokens": np.array([3, 4]),
        "num_tokens_padded": 7,
        "num_reqs_padded": 2,
        "num_ubatches": 2,
    }
    yield subject_call("no micro-batches", should_ubatch=False, **by_default)
    yield subject_call("two requests, by default", "cut", should_ubatch=True, **by_default)


def _emptiness(_: SubjectSetting) -> Iterator[SubjectCall]:
    for real, padded, count in product((1, 7, 8, 9, 11, 12, 13, 16), (8, 12, 16, 17, 24), (1, 2, 3, 4)):
        yield subject_call(
            f"{real} of {padded} tokens in {count}",
            orig_num_tokens=real,
            padded_num_tokens=padded,
            num_ubatches=count,
        )


SUBJECTS = (
    Subject("slice_query_start_locs", _slices, _slice),
    Subject("UBatchSlice", _slice_questions, _slice_facts, is_function=False),
    Subject("_make_metadata_with_slice", _one_piece, _piece),
    Subject("split_attn_metadata", _many_pieces),
    Subject("is_last_ubatch_empty", _emptiness),
    Subject("maybe_create_ubatch_slices", _plans),
)
