"""Keys and values out of their pages into packed rows, for calls that take no page table or no pages of this size.

Lengths are read on the host, so that no such step can stand in a CUDA graph. Must not know: which function is called.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.base.gathering import pieces
from attncheck.backends.impl import AttentionLayer
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.attention.params import AttentionParams


@dataclass(frozen=True)
class Packed:
    """A step's keys, request by request: those that some row sees, up to the request's last.

    key, value: ``[keys, num_kv_heads, head size]``. ends: int32 ``[R + 1]``, 0 and where each request's keys end; a
    request without rows has none. longest: the most keys of one request.
    """

    key: Tensor
    value: Tensor
    ends: Tensor
    longest: int


def packed(
    params: AttentionParams,
    metadata: PagedMetadata,
    layer: AttentionLayer,
    caches: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Packed:
    """The step's keys and values as rows; the step has rows."""
    found = list(pieces(params, metadata, layer, None, None, caches, dtype))
    lens = iter([len(piece.key) for piece in found])
    counts = [next(lens) if query_len else 0 for query_len in metadata.query_lens]
    ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=found[0].key.device)
    return Packed(
        key=torch.cat([piece.key for piece in found]),
        value=torch.cat([piece.value for piece in found]),
        ends=ends,
        longest=max(counts),
    )
