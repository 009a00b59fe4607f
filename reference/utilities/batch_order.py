"""Decodes first: moving short requests to the front of a batch, and finding where the long ones begin.

The behaviour is vLLM's.
"""

from typing import Any

import numpy as np

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_int
from attncheck.reference.utilities.host_batch import query_bounds
from attncheck.reference.utilities.metadata import CommonAttentionMetadata


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1, require_uniform: bool = False
) -> tuple[int, int, int, int]:
    """``(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)`` of a batch ordered decodes first.

    A decode has at most ``decode_threshold`` new tokens. The first request that is none, and all behind it, count as
    prefills: an unordered batch is not noticed. With ``require_uniform`` (and a threshold above 1) the decodes are
    those in front with as many tokens as the first, or none: padding does not end them. Padding tokens count as
    prefill tokens where there is a prefill, else as decode tokens.

    common_attn_metadata: read are ``max_query_len``, ``num_reqs``, ``num_actual_tokens`` and ``query_start_loc_cpu``.
        A ``max_query_len`` within the threshold is believed: then all are decodes.

    Raises :class:`~attncheck.errors.ReferenceArgumentError` for an empty batch, start locations that fall or are not
    one more than the requests, and a negative threshold.
    """
    starts, query_lens = query_bounds(common_attn_metadata)
    threshold = require_int("decode_threshold", decode_threshold, 0)
    num_reqs, num_tokens = len(query_lens), int(common_attn_metadata.num_actual_tokens)
    all_decodes = num_reqs, 0, num_tokens, 0
    if common_attn_metadata.max_query_len <= threshold and not (require_uniform and threshold > 1):
        return all_decodes
    first_len = int(query_lens[0])
    if first_len > threshold:
        return 0, num_reqs, 0, num_tokens
    is_prefill = (query_lens != first_len) & (query_lens != 0) if require_uniform else query_lens > threshold
    num_decodes = int(is_prefill.argmax())
    if not is_prefill[num_decodes]:
        return all_decodes
    num_decode_tokens = int(starts[num_decodes])
    return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: Any, scheduler_output: Any, decode_threshold: int = 1
) -> bool:
    """Moves requests of at most ``decode_threshold`` scheduled tokens to the front, in place; whether any moved.

    input_batch: ``req_ids``, ids in order; ``swap_states(i, j)`` exchanges two positions.
    scheduler_output: ``num_scheduled_tokens``, tokens by id, possibly of other ids too; read only.

    With ``D`` short requests the first ``D`` positions are the front. The long requests in it, first to last, change
    places with the short ones behind it, last to first: the fewest swaps there can be, and whoever stands on the right
    side stays. Raises :class:`~attncheck.errors.ReferenceArgumentError` for an id without a count, before any swap.
    """
    req_ids, scheduled = input_batch.req_ids, scheduler_output.num_scheduled_tokens
    # Not by subscript, which writes into a mapping with defaults.
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
    # As lists, made before the first swap: ids move, and swap_states gets Python integers.
    for i, j in zip(long_in_front.tolist(), (short_behind[::-1] + front).tolist(), strict=True):
        input_batch.swap_states(i, j)
    return len(long_in_front) > 0
