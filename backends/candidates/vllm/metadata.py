"""Converts the common metadata of one step to the dataclass of the installed vLLM, field by field.

Fields with the same name are passed unchanged, as the same tensors. Other fields of vLLM's version are derived from
them. Fields that this version lacks are left out.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.reference.utilities.metadata import CommonAttentionMetadata


def their_fields(metadata: CommonAttentionMetadata, theirs: type[Any]) -> dict[str, Any]:
    """Return constructor arguments of ``theirs``, vLLM's ``CommonAttentionMetadata``, from ``metadata`` alone."""
    there = {field.name for field in fields(theirs)}
    shared = {field.name: getattr(metadata, field.name) for field in fields(metadata) if field.name in there}
    derived = {
        "seq_lens_cpu_upper_bound": metadata.seq_lens_cpu,
        "max_logits_per_req": _max_logits(metadata),
    }
    return shared | {name: value for name, value in derived.items() if name in there}


def step_fields(
    metadata: CommonAttentionMetadata, theirs: type[Any], *, positions: Tensor, num_drafts: int = 0
) -> dict[str, Any]:
    """Return constructor arguments for a step given to a builder, including what only a model runner has.

    positions: int64 ``[num_actual_tokens]``, the position of every token in its request. num_drafts: draft tokens that
    a decoding request may have besides its own.
    """
    there = {field.name for field in fields(theirs)}
    known: dict[str, Any] = {
        "positions": positions,
        "is_prefilling": _is_prefilling(metadata, num_drafts),
        "_seq_lens_cpu": metadata.seq_lens_cpu,
        "_num_computed_tokens_cpu": metadata.num_computed_tokens_cpu,
    }
    if "encoder_seq_lens_cpu" in there and metadata.encoder_seq_lens is not None:
        # In versions with both, the name without suffix is the device's; in versions with one, it is the host's.
        on_device = torch.from_numpy(metadata.encoder_seq_lens).to(metadata.seq_lens.device)
        known |= {"encoder_seq_lens": on_device, "encoder_seq_lens_cpu": metadata.encoder_seq_lens}
    return their_fields(metadata, theirs) | {name: value for name, value in known.items() if name in there}


def fill_positions(metadata: CommonAttentionMetadata, buffer: Tensor) -> Tensor:
    """Write each token's position in its request to the front of ``buffer`` (int64), 0 for padding; return the view."""
    starts = metadata.query_start_loc_cpu.long()
    query_lens, computed = starts.diff(), metadata.num_computed_tokens_cpu.long()
    within = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(query_lens)
    positions = torch.zeros(metadata.num_actual_tokens, dtype=torch.int64)
    # If a decoder attends to an encoder's keys, the lengths are the encoder's, and may be shorter.
    positions[: len(within)] = (within + computed.repeat_interleave(query_lens)).clamp(min=0)
    view = buffer[: len(positions)]
    view.copy_(positions, non_blocking=True)
    return view


def _is_prefilling(metadata: CommonAttentionMetadata, num_drafts: int) -> Tensor:
    """Return bool ``[R]``, host: requests without context, and those with more rows than a decode; padding is False.

    A runner compares with the length of the prompt, which the metadata lack. So the last token of a prompt, if it is a
    chunk of its own, counts as a decode.
    """
    query_lens = metadata.query_start_loc_cpu.diff()
    fresh = metadata.num_computed_tokens_cpu[: len(query_lens)] <= 0
    return (query_lens > 0) & (fresh | (query_lens > 1 + num_drafts))


def _max_logits(metadata: CommonAttentionMetadata) -> int | None:
    """Return the maximum number of logits indices of a request, or None if the batch has none set."""
    if metadata.logits_indices_padded is None or metadata.num_logits_indices is None:
        return None
    indices = metadata.logits_indices_padded[: metadata.num_logits_indices].tolist()
    owners = np.searchsorted(metadata.query_start_loc_cpu[1:].numpy(), np.array(indices), side="right")
    return int(np.bincount(owners).max(initial=0)) if indices else 0
