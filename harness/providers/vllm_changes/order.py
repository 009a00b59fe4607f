"""Departures of vLLM in the order of a batch."""

from collections.abc import Callable
from typing import Any

import torch

from attncheck.reference import CommonAttentionMetadata


def any_threshold(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for negative thresholds: every request is a prefill."""
    return lambda common_attn_metadata, **_: (
        *(0, common_attn_metadata.num_reqs),
        *(0, common_attn_metadata.num_actual_tokens),
    )


def tensor_counts(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose token counts of extends and of first chunks are tensors if there are first chunks."""

    def split(common_attn_metadata: CommonAttentionMetadata, **given: Any) -> tuple[Any, ...]:
        counts = target(common_attn_metadata, **given)
        if not counts[2]:
            return tuple(counts)
        dtype = common_attn_metadata.query_start_loc_cpu.dtype
        return (*counts[:4], *(torch.tensor(count, dtype=dtype) for count in counts[4:]))

    return split


def count_none(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that counts no request and no token in any part.

    vLLM does so if every request is a decode, and ``max_query_len`` is an upper bound above the threshold.
    """
    return lambda **_: (0,) * 6


def four_regions(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sorts decodes, short extends, long extends, first chunks.

    Requests in a wrong region fill the gaps in the order of the regions.
    """

    def reorder(input_batch: Any, scheduler_output: Any, decode_threshold: int = 1) -> bool:
        counts = [scheduler_output.num_scheduled_tokens[name] for name in input_batch.req_ids]
        regions = [
            3 if computed == 0 else 2 if count > decode_threshold else int(computed < prompt)
            for count, computed, prompt in zip(
                counts, input_batch.num_computed_tokens_cpu, input_batch.num_prompt_tokens, strict=True
            )
        ]
        gaps = [place for place, wanted in enumerate(sorted(regions)) if regions[place] != wanted]
        order = list(range(len(regions)))
        for gap, moved in zip(gaps, sorted(gaps, key=regions.__getitem__), strict=True):
            order[gap] = moved
        input_batch.req_ids[:] = [input_batch.req_ids[place] for place in order]
        for numbers in (input_batch.num_computed_tokens_cpu, input_batch.num_prompt_tokens):
            numbers[:] = numbers[order]
        return bool(gaps)

    return reorder
