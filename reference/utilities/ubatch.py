"""Splitting a batch into micro-batches, between or within requests, without modifying the batch.

The behaviour is vLLM's without its defects: every part keeps ``computed = seq_len - query_len``.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_index, require_int
from attncheck.reference.utilities.metadata import CommonAttentionMetadata, Integers, host_array, query_bounds


@dataclass
class UBatchSlice:
    """One micro-batch: half-open slices of requests and of flattened query tokens, with explicit bounds.

    A request that is cut belongs to the parts on both sides.
    """

    request_slice: slice
    token_slice: slice

    def is_empty(self) -> bool:
        """Return whether it has no request or no token."""
        return any(part.start == part.stop for part in (self.request_slice, self.token_slice))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return int(self.token_slice.stop - self.token_slice.start)


def is_last_ubatch_empty(orig_num_tokens: int, padded_num_tokens: int, num_ubatches: int) -> bool:
    """Return whether the last of ``num_ubatches`` equal micro-batches of the padded tokens has only padding.

    >>> is_last_ubatch_empty(8, 16, 2), is_last_ubatch_empty(9, 16, 2)
    (True, False)
    """
    return orig_num_tokens <= padded_num_tokens // num_ubatches * (num_ubatches - 1)


def maybe_create_ubatch_slices(
    should_ubatch: bool,
    num_scheduled_tokens: npt.NDArray[np.integer[Any]],
    num_tokens_padded: int,
    num_reqs_padded: int,
    num_ubatches: int,
    split_point: int | None = None,
) -> tuple[list[UBatchSlice] | None, list[UBatchSlice] | None]:
    """Return ``num_ubatches`` parts of the batch, and the same with padding in the last part.

    should_ubatch: if False, the result is ``(None, None)``.
    num_scheduled_tokens: ``[R]``, new tokens of each request. split_point: tokens of each part but the last; by default
        ``num_tokens_padded // num_ubatches``.

    A part includes every request that has a token in it.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` if a part would have no token.

    >>> pieces, padded = maybe_create_ubatch_slices(True, np.array([3, 4, 5]), 14, 4, 2)
    >>> [(each.request_slice, each.token_slice) for each in padded]
    [(slice(0, 2, None), slice(0, 7, None)), (slice(2, 4, None), slice(7, 14, None))]
    """
    if not should_ubatch:
        return None, None
    starts = [0, *accumulate(int(count) for count in num_scheduled_tokens)]
    size = num_tokens_padded // require_int("num_ubatches", num_ubatches, 1) if split_point is None else split_point
    edges = [*(size * piece for piece in range(num_ubatches)), starts[-1]]
    if any(stop <= first for first, stop in pairwise(edges)):
        want = f"pieces of {size} tokens of which the last begins before token {starts[-1]}"
        raise ReferenceArgumentError("num_ubatches", num_ubatches, want)
    pieces = [
        UBatchSlice(slice(bisect_right(starts[1:], first), bisect_left(starts[:-1], stop)), slice(first, stop))
        for first, stop in pairwise(edges)
    ]
    last = pieces[-1]
    padded = UBatchSlice(
        slice(last.request_slice.start, num_reqs_padded), slice(last.token_slice.start, num_tokens_padded)
    )
    return pieces, [*pieces[:-1], padded]


def slice_query_start_locs(query_start_loc: Tensor, request_slice: slice) -> Tensor:
    """Return the start locations of requests ``[a, b)``: ``b - a + 1`` entries from 0, new, with dtype and device kept.

    query_start_loc: ``[R + 1]`` int32 or int64; its first entry need not be 0.
    request_slice: ``0 <= a <= b <= R``. vLLM clips other bounds; this function raises
        :class:`~attncheck.errors.ReferenceArgumentError`.

    >>> import torch
    >>> slice_query_start_locs(torch.tensor([0, 3, 5, 9, 10]), slice(2, 4))
    tensor([0, 4, 5])
    """
    require_index("query_start_loc", query_start_loc)
    if query_start_loc.dim() != 1 or len(query_start_loc) == 0:
        raise ReferenceArgumentError("query_start_loc.shape", tuple(query_start_loc.shape), "[requests + 1]")
    first, end = _bounds("request_slice", request_slice, len(query_start_loc) - 1)
    return query_start_loc[first : end + 1] - query_start_loc[first]


def _make_metadata_with_slice(
    ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """Return the metadata of requests ``[r0, r1)`` and tokens ``[t0, t1)`` alone.

    Tokens cut off the end of the last request shorten its ``seq_len``. Tokens cut off the front of the first request
    belong to the part before; they stay in its ``seq_len`` and count as computed. The end may have padding: requests
    without tokens, and tokens after those of the last request. Start locations are new, block-table rows and slots are
    views, and ``causal`` is kept. The optional fields are None, as in vLLM: logits indices, encoder lengths and local
    lengths of decode context parallelism describe the whole batch, and the caller must set them for a part.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for an empty slice, bounds outside the batch, a first token
    that is not of the first request, a request (except padding) without a token in the slice, or tokens of requests
    outside the slice.
    """
    if ubatch_slice.is_empty():
        raise ReferenceArgumentError("ubatch_slice", ubatch_slice, "of at least one request and one token")
    starts, _ = query_bounds(attn_metadata)
    num_reqs, num_tokens = len(starts) - 1, require_int("num_actual_tokens", attn_metadata.num_actual_tokens, 1)
    r0, r1 = _bounds("ubatch_slice.request_slice", ubatch_slice.request_slice, num_reqs)
    t0, t1 = _bounds("ubatch_slice.token_slice", ubatch_slice.token_slice, num_tokens)
    _check_cut(starts, r0, r1, t0, t1)
    host_array("seq_lens_cpu", attn_metadata.seq_lens_cpu, num_reqs)
    for name, tensor, size in (
        ("query_start_loc", attn_metadata.query_start_loc, num_reqs + 1),
        ("seq_lens", attn_metadata.seq_lens, num_reqs),
        ("block_table_tensor", attn_metadata.block_table_tensor, num_reqs),
        ("slot_mapping", attn_metadata.slot_mapping, t1),
    ):
        if tensor.dim() == 0 or len(tensor) < size:
            raise ReferenceArgumentError(f"{name}.shape", tuple(tensor.shape), f"of at least {size} entries")

    cut = max(0, int(starts[r1]) - t1)
    seq_lens, seq_lens_cpu = attn_metadata.seq_lens[r0:r1], attn_metadata.seq_lens_cpu[r0:r1].clone()
    if cut:
        seq_lens = seq_lens.clone()
        seq_lens[-1] -= cut
        seq_lens_cpu[-1] -= cut
    query_start_loc_cpu = attn_metadata.query_start_loc_cpu[r0 : r1 + 1].clamp(t0, t1) - t0
    query_lens = query_start_loc_cpu.diff()
    return CommonAttentionMetadata(
        query_start_loc=attn_metadata.query_start_loc[r0 : r1 + 1].clamp(t0, t1) - t0,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        num_computed_tokens_cpu=(seq_lens_cpu - query_lens).to(attn_metadata.num_computed_tokens_cpu.dtype),
        num_reqs=r1 - r0,
        num_actual_tokens=t1 - t0,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens_cpu.max()),
        block_table_tensor=attn_metadata.block_table_tensor[r0:r1],
        slot_mapping=attn_metadata.slot_mapping[t0:t1],
        causal=attn_metadata.causal,
    )


def split_attn_metadata(
    ubatch_slices: list[UBatchSlice], common_attn_metadata: CommonAttentionMetadata
) -> list[CommonAttentionMetadata]:
    """Return the metadata of each micro-batch, in order. Slices may overlap and need not cover the batch.

    Raise as ``_make_metadata_with_slice`` does, for any slice. The batch is not modified.
    """
    return [_make_metadata_with_slice(part, common_attn_metadata) for part in ubatch_slices]


def _bounds(name: str, part: slice, size: int) -> tuple[int, int]:
    if part.step not in (None, 1):
        raise ReferenceArgumentError(name, part, "a slice without a step")
    first = require_int(f"{name}.start", part.start, 0, size)
    return first, require_int(f"{name}.stop", part.stop, first, size)


def _check_cut(starts: Integers, r0: int, r1: int, t0: int, t1: int) -> None:
    """Raise if the tokens are not those of the requests: both are within the batch, but may not match each other."""
    if not starts[r0] <= t0 < starts[r0 + 1]:
        raise ReferenceArgumentError(
            "ubatch_slice.token_slice.start", t0, f"a token of request {r0}: {starts[r0]} to before {starts[r0 + 1]}"
        )
    without = (starts[r0:r1] >= t1) & (starts[r0 + 1 : r1 + 1] > starts[r0:r1])
    if without.any():
        request = r0 + int(without.argmax())
        raise ReferenceArgumentError(
            "ubatch_slice.token_slice.stop", t1, f"above {starts[request]}, where request {request} of the slice starts"
        )
    if t1 > starts[r1] != starts[-1]:
        raise ReferenceArgumentError(
            "ubatch_slice.token_slice.stop", t1, f"at most {starts[r1]}: what follows are tokens of request {r1}"
        )
