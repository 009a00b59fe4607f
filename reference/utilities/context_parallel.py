"""Decode context parallelism: the number of a request's tokens that each rank holds.

``N`` ranks hold the K/V of a request in stripes of ``I`` tokens: token ``t`` is on rank ``t // I % N``.
"""

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_index, require_int, require_positive_int


def get_dcp_local_seq_lens(
    seq_lens: Tensor,
    dcp_size: int = 1,
    dcp_rank: int | Tensor | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> Tensor:
    """Return how many of the first ``seq_lens`` tokens each rank, or one rank, holds: int32, new, on the same device.

    seq_lens: any shape, int32 or int64, non-negative.
    dcp_size, cp_kv_cache_interleave_size: ``N`` and ``I``.
    dcp_rank: an integer, or one int32 or int64 element on the device of ``seq_lens``, which the host then reads. The
        result has the shape of ``seq_lens``. ``None``: all ranks, along an added last axis of ``N`` (also if ``N`` is
        1) whose sum is ``seq_lens``.

    Every full round of ``N * I`` tokens gives each rank ``I`` tokens. Of the rest, rank ``r`` holds the tokens beyond
    the first ``r * I``, at most ``I``. Raise :class:`~attncheck.errors.ReferenceArgumentError` for invalid arguments.

    >>> get_dcp_local_seq_lens(torch.tensor([10, 3, 0]), dcp_size=2, cp_kv_cache_interleave_size=4).tolist()
    [[6, 4], [3, 0], [0, 0]]
    """
    require_index("seq_lens", seq_lens)
    dcp_size = require_positive_int("dcp_size", dcp_size)
    stripe = require_positive_int("cp_kv_cache_interleave_size", cp_kv_cache_interleave_size)
    rank = None if dcp_rank is None else _one_rank(dcp_rank, dcp_size, seq_lens.device)
    if seq_lens.numel() and (least := int(seq_lens.min())) < 0:
        raise ReferenceArgumentError("seq_lens", least, "0 or more")

    lens = seq_lens.to(torch.int64)
    ranks: int | Tensor
    if rank is None:
        lens, ranks = lens.unsqueeze(-1), torch.arange(dcp_size, device=lens.device)
    else:
        ranks = rank
    rounds = lens.div(dcp_size * stripe, rounding_mode="floor")
    rest = lens - rounds * (dcp_size * stripe)
    return (rounds * stripe + (rest - ranks * stripe).clamp(0, stripe)).to(torch.int32)


def _one_rank(dcp_rank: int | Tensor, dcp_size: int, device: torch.device) -> int:
    if not isinstance(dcp_rank, Tensor):
        return require_int("dcp_rank", dcp_rank, 0, dcp_size - 1)
    require_index("dcp_rank", dcp_rank)
    if dcp_rank.numel() != 1 or dcp_rank.device != device:
        found = f"{tuple(dcp_rank.shape)} on {dcp_rank.device}"
        raise ReferenceArgumentError("dcp_rank", found, f"an integer, or one element on {device}")
    return require_int("dcp_rank", int(dcp_rank), 0, dcp_size - 1)
