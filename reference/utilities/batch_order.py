"""Batches with decodes first: reordering short requests to the front, and finding the boundary.

The behaviour is vLLM's. For the verification of speculated tokens, two functions convert between packed rows and one
row of equally many queries per request.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_int, require_positive_int
from attncheck.reference.utilities.metadata import CommonAttentionMetadata, host_array, query_bounds


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1, require_uniform: bool = False
) -> tuple[int, int, int, int]:
    """Return ``(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)`` of a batch ordered decodes first.

    A decode has at most ``decode_threshold`` new tokens. The first longer request and all requests after it count as
    prefills, so an unordered batch goes unnoticed. With ``require_uniform``, and a threshold above 1 or a longer
    ``max_query_len``, decodes are the leading requests with as many tokens as the first, or none. Padding tokens count
    as prefill tokens if there is a prefill, else as decode tokens.

    common_attn_metadata: ``max_query_len``, ``num_reqs``, ``num_actual_tokens`` and ``query_start_loc_cpu`` are read.
        If ``max_query_len`` is within the threshold and the uniform rule does not apply, all requests count as decodes.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for an empty batch, decreasing start locations, a wrong
    number of them (not ``num_reqs + 1``), or a negative threshold.
    """
    return split_finished_prompts(common_attn_metadata, decode_threshold, require_uniform)


def split_finished_prompts(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> tuple[int, int, int, int]:
    """Return :func:`split_decodes_and_prefills` with the additional parameter of newer vLLM versions.

    treat_short_extends_as_decodes: if False, a request whose prompt is not fully computed is a prefill, however short,
        and ``max_query_len`` is not used. ``is_prefilling`` (bool ``[R]``) of
        :class:`~attncheck.reference.utilities.metadata.PrefillingMetadata` marks such requests, and is then required.
    """
    starts, query_lens = query_bounds(common_attn_metadata)
    threshold = require_int("decode_threshold", decode_threshold, 0)
    num_reqs, num_tokens = len(query_lens), int(common_attn_metadata.num_actual_tokens)
    all_decodes = num_reqs, 0, num_tokens, 0
    if (
        treat_short_extends_as_decodes
        and common_attn_metadata.max_query_len <= threshold
        and not (require_uniform and threshold > 1)
    ):
        return all_decodes
    first_len = int(query_lens[0])
    if first_len > threshold:
        return 0, num_reqs, 0, num_tokens
    is_prefill = (query_lens != first_len) & (query_lens != 0) if require_uniform else query_lens > threshold
    if not treat_short_extends_as_decodes:
        is_prefill = is_prefill | _prefilling(common_attn_metadata, num_reqs)
    num_decodes = int(is_prefill.argmax())
    if not is_prefill[num_decodes]:
        return all_decodes
    num_decode_tokens = int(starts[num_decodes])
    return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens


def _prefilling(metadata: CommonAttentionMetadata, num_reqs: int) -> npt.NDArray[np.bool_]:
    """Return the flags of requests whose prompt is not fully computed."""
    flags: Tensor | None = getattr(metadata, "is_prefilling", None)
    if flags is None or flags.dtype != torch.bool or tuple(flags.shape) != (num_reqs,):
        raise ReferenceArgumentError("is_prefilling", flags, f"bool, [{num_reqs}]: short extends count as prefills")
    return np.asarray(flags)


def split_decodes_prefills_and_extends(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int, int, int]:
    """Return ``(decodes, extends, prefills)`` of a batch in that order: numbers of requests, then numbers of tokens.

    A decode has at most ``decode_threshold`` new tokens. The first longer request ends the decodes. From it on, the
    first request above the threshold without context (``query_len == seq_len``) starts the prefills. Padding tokens
    count as tokens of the last non-empty part.

    common_attn_metadata: ``max_query_len``, ``num_reqs``, ``num_actual_tokens``, ``query_start_loc_cpu`` and
        ``seq_lens_cpu`` are read. If ``max_query_len`` is within the threshold, all requests count as decodes.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` as :func:`split_decodes_and_prefills` does.
    """
    starts, query_lens = query_bounds(common_attn_metadata)
    seq_lens = host_array("seq_lens_cpu", common_attn_metadata.seq_lens_cpu, len(query_lens))
    decodes, rest, decode_tokens, rest_tokens = split_decodes_and_prefills(common_attn_metadata, decode_threshold)
    is_prefill = (query_lens == seq_lens) & (query_lens > decode_threshold)
    if not rest or not is_prefill.any():
        return decodes, rest, 0, decode_tokens, rest_tokens, 0
    first = int(is_prefill.argmax())
    extend_tokens = int(starts[first]) - decode_tokens
    return decodes, first - decodes, decodes + rest - first, decode_tokens, extend_tokens, rest_tokens - extend_tokens


def split_prefill_chunks(seq_lens_cpu: Tensor, workspace_size: int, request_offset: int = 0) -> list[tuple[int, int]]:
    """Return ``(first, end)`` of greedy chunks of consecutive requests, each of at most ``workspace_size`` tokens.

    seq_lens_cpu: ``[N]``, host: the lengths of the prefills. request_offset: added to both indices of each chunk.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for a length that is negative or above ``workspace_size``.

    >>> split_prefill_chunks(torch.tensor([3, 4, 5, 1, 9]), 9, request_offset=2)
    [(2, 4), (4, 6), (6, 7)]
    """
    lens = host_array("seq_lens_cpu", seq_lens_cpu)
    if len(lens) and not 0 <= lens.min() <= lens.max() <= workspace_size:
        raise ReferenceArgumentError("seq_lens_cpu", lens.tolist(), f"lengths of 0 to {workspace_size}")
    ends = np.concatenate([[0], lens.cumsum(dtype=np.int64)])
    bounds = [0]
    while bounds[-1] < len(lens):
        bounds.append(int(np.searchsorted(ends, ends[bounds[-1]] + workspace_size, side="right")) - 1)
    return [(first + request_offset, stop + request_offset) for first, stop in pairwise(bounds)]


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: Any, scheduler_output: Any, decode_threshold: int = 1
) -> bool:
    """Move requests of at most ``decode_threshold`` scheduled tokens to the front, in place; return whether any moved.

    input_batch: has ``req_ids``, ids in order, and ``swap_states(i, j)``, which exchanges two positions.
    scheduler_output: has ``num_scheduled_tokens``, tokens by id, possibly with further ids; it is only read.

    With ``D`` short requests, the first ``D`` positions are the front. The long requests in it, first to last, are
    swapped with the short ones after it, last to first. This is the smallest number of swaps; all other requests stay.
    Raise :class:`~attncheck.errors.ReferenceArgumentError` for an id without a count, before any swap.
    """
    req_ids, scheduled = input_batch.req_ids, scheduler_output.num_scheduled_tokens
    # .get, because a subscript would insert missing ids into a defaultdict.
    counts = list(map(scheduled.get, req_ids))
    if None in counts:
        without = req_ids[counts.index(None)]
        raise ReferenceArgumentError(
            "scheduler_output.num_scheduled_tokens", without, "a mapping with this id of req_ids"
        )
    short = np.array(counts, dtype=np.int64) <= decode_threshold
    front = np.count_nonzero(short)
    (long_in_front,) = (~short[:front]).nonzero()
    (short_behind,) = short[front:].nonzero()
    # Lists made before the first swap, because swaps move the ids. They also give swap_states Python integers.
    for i, j in zip(long_in_front.tolist(), (short_behind[::-1] + front).tolist(), strict=True):
        input_batch.swap_states(i, j)
    return len(long_in_front) > 0


def reshape_query_for_spec_decode(query: Tensor, batch_size: int) -> Tensor:
    """Return ``[n, H, D]`` as ``[batch_size, n // batch_size, H, D]``: a view, whatever the strides.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for another number of axes, or if ``batch_size`` does not
    divide ``n``.
    """
    if query.dim() != 3:  # tokens, heads, head size
        raise ReferenceArgumentError("query.shape", tuple(query.shape), "[tokens, heads, head_size]")
    batch_size = require_positive_int("batch_size", batch_size)
    tokens, heads, head_size = query.shape
    if tokens % batch_size:
        raise ReferenceArgumentError("batch_size", batch_size, f"a divisor of the {tokens} tokens")
    return query.view(batch_size, tokens // batch_size, heads, head_size)


def reshape_attn_output_for_spec_decode(attn_output: Tensor) -> Tensor:
    """Return ``[b, len, H, D]`` as a view ``[b * len, H, D]``; ``[n, H, D]`` is returned unchanged.

    Callers write through the result, so a copy is not allowed. Raise :class:`~attncheck.errors.ReferenceArgumentError`
    if the strides do not let the first two axes merge, or for another number of axes.
    """
    if attn_output.dim() == 3:  # tokens, heads, head size
        return attn_output
    if attn_output.dim() != 4:  # requests, tokens of each, heads, head size
        raise ReferenceArgumentError("attn_output.shape", tuple(attn_output.shape), "of 3 or 4 axes")
    requests, length, heads, head_size = attn_output.shape
    try:
        return attn_output.view(requests * length, heads, head_size)
    except RuntimeError:
        raise ReferenceArgumentError(
            "attn_output.stride()", attn_output.stride(), "such that the first two axes merge without a copy"
        ) from None
