"""Questions about the launch arguments of kernels: programs, blocks of states, lengths, prefix ranges, reshapes."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.providers.batches import ProviderBatch
from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, are_apart, subject_call


def _programs(target: Any, *, query_start_loc_p: Tensor) -> dict[str, Any]:
    by_block, batch_ptr, token_chunk_offset_ptr = target(query_start_loc_p)
    return {
        "block sizes": list(by_block),
        "programs": {str(size): dict(entries) for size, entries in by_block.items()},
        "batch_ptr": batch_ptr,
        "token_chunk_offset_ptr": token_chunk_offset_ptr,
        "both are those of the dictionary": [
            all(entries["batch_ptr"] is batch_ptr for entries in by_block.values()),
            all(entries["token_chunk_offset_ptr"] is token_chunk_offset_ptr for entries in by_block.values()),
        ],
    }


def _conv1d(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        yield subject_call(str(batch), query_start_loc_p=batch.offsets().to(setting.device))

    def call(*starts: int, tags: tuple[str, ...] = ()) -> SubjectCall:
        given = torch.tensor(starts, dtype=torch.int32, device=setting.device)
        text = f"start locations {' '.join(map(str, starts)) or 'none'}"
        return subject_call(text, *tags, refused=bool(tags), query_start_loc_p=given)

    yield call(0)
    yield call(0, 17)
    yield call(0, 5, 21, 29, 29)
    yield call(0, 9000)
    yield call(0, 5, 3, tags=("malformed",))
    yield call(tags=("malformed",))


RANKS: tuple[tuple[int, int | None, int], ...] = (
    (1, None, 1),
    (1, 0, 1),
    (2, None, 1),
    (2, None, 4),
    (4, 2, 1),
    (4, None, 16),
    (3, 1, 2),
)
"""World size, rank (None for all), interleave."""

IMPOSSIBLE = ((5, 0, None, 1), (5, 4, 4, 1), (5, 4, -1, 1), (5, 4, 0, 0), (-5, 4, 0, 1))
"""A length, world size, rank, interleave: at least one of them is invalid."""


def _local_lens(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(lens: Tensor, text: str, size: int, rank: Any, stripe: int, *tags: str) -> SubjectCall:
        return subject_call(
            f"{text}: rank {'all' if rank is None else rank} of {size}, interleave {stripe}",
            *tags,
            refused=bool(tags),
            seq_lens=lens,
            dcp_size=size,
            dcp_rank=rank,
            cp_kv_cache_interleave_size=stripe,
        )

    one = torch.tensor([1], dtype=torch.int32, device=setting.device)
    for batch in setting.batches:
        lens = batch.metadata(setting.device).seq_lens
        for size, rank, stripe in RANKS:
            yield call(lens, str(batch), size, rank, stripe)
        yield call(lens, str(batch), 4, one, 2)
        yield subject_call(f"{batch}: by default", seq_lens=lens)
    for length, size, rank, stripe in IMPOSSIBLE:
        lens = torch.tensor([length], dtype=torch.int32, device=setting.device)
        yield call(lens, f"length {length}", size, rank, stripe, "malformed")
    yield call(lens.abs(), "length 5", 1, one, 1, "malformed")


def _numbered(*shape: int) -> Tensor:
    """Return a tensor whose elements all differ, so that a wrong order shows."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def _viewed(target: Any, **arguments: Any) -> dict[str, Any]:
    """Return the result and whether it is a view, since callers write through it."""
    given = next(value for value in arguments.values() if isinstance(value, Tensor))
    made = target(**arguments)
    return {
        "result": made,
        "strides": list(made.stride()),
        "is a view": not are_apart(made, given),
    }


def _queries(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(query: Tensor, size: int, *, text: str = "", refused: bool = False) -> SubjectCall:
        text = f"{list(query.shape)}{text}, batch size {size}"
        return subject_call(text, refused=refused, query=query.to(setting.device), batch_size=size)

    for shape, size in [((6, 2, 8), 3), ((4, 2, 8), 1), ((0, 2, 8), 3), ((8, 1, 4), 8)]:
        yield call(_numbered(*shape), size)
    yield call(_numbered(6, 2, 16)[..., :8], 3, text=", half of wider rows")
    yield call(_numbered(7, 2, 8), 3, refused=True)
    yield call(_numbered(7, 8), 7, refused=True)
    yield call(_numbered(7, 2, 8), 0, refused=True)


def _outputs(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(output: Tensor, *, text: str = "", refused: bool = False) -> SubjectCall:
        return subject_call(f"{list(output.shape)}{text}", refused=refused, attn_output=output.to(setting.device))

    yield call(_numbered(3, 2, 2, 8))
    yield call(_numbered(6, 2, 8))
    yield call(_numbered(5, 1, 2, 8).transpose(0, 1), text=", first axes swapped")
    yield call(_numbered(6, 8), refused=True)
    yield call(_numbered(2, 3, 2, 8).transpose(0, 1), text=", first axes swapped", refused=True)


def _state_blocks(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(
        lens: Tensor, text: str, mode: str, page: int, drafts: int, width: int, *, refused: bool = False
    ) -> SubjectCall:
        table = _numbered(len(lens), width).to(setting.device, torch.int32)
        return subject_call(
            f"{text}: mode {mode}, blocks of {page}, {drafts} speculative blocks, {width} columns",
            refused=refused,
            block_table=table,
            seq_lens=lens,
            kv_cache_spec=SimpleNamespace(block_size=page, num_speculative_blocks=drafts),
            mamba_cache_mode=mode,
        )

    for batch in setting.batches:
        lens, page = batch.metadata(setting.device).seq_lens, batch.block_size
        blocks = max(1, -(-max(batch.seq_lens) // page))
        yield call(lens, str(batch), "none", page, 1, 2)
        for drafts in (0, 2):
            yield call(lens, str(batch), "align", page, drafts, blocks + drafts)
            yield call(lens, str(batch), "align", page, drafts, blocks + drafts + 3)
    lens = torch.tensor([9], dtype=torch.int32, device=setting.device)
    yield call(lens, "length 9", "align", 4, 1, 3, refused=True)


def _same_object(target: Any, *, block_table: Tensor, **arguments: Any) -> dict[str, Any]:
    made = target(block_table=block_table, **arguments)
    return {"blocks": made, "is the table": made is block_table}


def _prefix_ranges(batch: ProviderBatch) -> Iterator[tuple[str, dict[int, list[tuple[int, int]]] | None]]:
    """Yield bidirectional ranges, in words and as an argument: none, one per request, several, one past all tokens."""
    ends = [s for s in batch.seq_lens if s]
    yield "no ranges", None
    yield "no request with a range", {}
    yield "all but the last token", {request: [(0, end - 2)] for request, end in enumerate(ends) if end > 2}
    yield "the last two tokens and more", {request: [(end - 2, end + 5)] for request, end in enumerate(ends) if end > 1}
    yield (
        "two ranges of every second request",
        {request: [(0, 1), (2, end - 1)] for request, end in enumerate(ends) if end > 3 and not request % 2},
    )
    yield "a range of one token, and none", {0: [(ends[0] - 1, ends[0] - 1)], len(ends) - 1: []}
    yield "a range behind all tokens", {0: [(ends[0] + 3, ends[0] + 9)]}


def _range_tables(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        for text, ranges in _prefix_ranges(batch):
            yield subject_call(
                f"{batch}: {text}", mm_prefix_range=ranges, num_seqs=batch.num_reqs, device=setting.device
            )


def _range_rows(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(batch: ProviderBatch, text: str, ranges: Any, rows: int, *, refused: bool = False) -> SubjectCall:
        return subject_call(
            f"{batch}: {text}, a buffer of {rows} rows",
            refused=refused,
            out=np.full((rows, 2), 77, dtype=np.int32),
            mm_prefix_range=ranges,
            query_start_loc_cpu=batch.offsets(),
            seq_lens_cpu=batch.metadata(torch.device("cpu")).seq_lens_cpu,
        )

    for batch in setting.batches:
        for text, ranges in _prefix_ranges(batch):
            yield call(batch, text, ranges, batch.num_tokens + batch.num_reqs % 3)
        yield call(batch, "a range of all", {0: [(0, 99)]}, batch.num_tokens - 1, refused=True)


SUBJECTS = (
    Subject("compute_causal_conv1d_metadata", _conv1d, _programs),
    Subject("mamba_get_block_table_tensor", _state_blocks, _same_object),
    Subject("get_dcp_local_seq_lens", _local_lens),
    Subject("compute_mm_prefix_range_tensor", _range_tables),
    Subject("fill_mm_prefix_query_ranges", _range_rows),
    Subject("reshape_query_for_spec_decode", _queries, _viewed),
    Subject("reshape_attn_output_for_spec_decode", _outputs, _viewed),
)
