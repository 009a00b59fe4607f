"""Attention of one rank under decode context parallelism: every query row against the keys of this rank.

Ranks take turns at ``I`` consecutive positions, and each rank numbers its own densely. For 2 ranks and ``I = 2``::

    position     0  1  2  3  4  5  6  7  8
    rank         0  0  1  1  0  0  1  1  0
    local index  0  1  0  1  2  3  2  3  4
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.reference.arguments import require_shard
from attncheck.reference.attention.online_softmax import ScoreRule
from attncheck.reference.attention.paged import attend_paged, check_paged
from attncheck.reference.attention.pages import PagedRequest, paged_requests
from attncheck.reference.attention.params import AttentionParams, Precision
from attncheck.reference.attention.visibility import Span, Visibility


@torch.no_grad()
def dcp_rank_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    *,
    dcp_size: int,
    dcp_rank: int,
    cp_kv_cache_interleave_size: int = 1,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    q_scale: float | Tensor = 1.0,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    q_tile: int = 128,
    kv_tile: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return one rank's part of the attention over a paged cache: ``(out [T, H, Dv], lse [T, H])``.

    Arguments are as in :func:`~attncheck.reference.attention.paged.paged_attention`, except as stated below.
    ``I`` is ``cp_kv_cache_interleave_size``. Rank ``(p // I) % dcp_size`` holds position ``p``, as its local token
    ``p // (I * dcp_size) * I + p % I``. That token is in block ``block_table[r, local // BS]``, offset ``local % BS``.
    Visibility and ALiBi use global positions. Only rank 0 includes the sinks, so that
    :func:`~attncheck.reference.attention.merge.merge_many` over all ranks gives the attention over the whole cache. A
    row that sees no key of this rank gets ``out = 0``, ``lse = -inf`` (on rank 0 with a sink: the sink).

    key_cache, value_cache, block_table: of this rank. A row of the table is as wide as this rank's part of the request.
        For latent attention, pass one KV head: ``kv_cache[:, :, None]`` and its first ``L`` channels.
    query, seq_lens, query_start_loc: the same on every rank. ``seq_lens`` counts the tokens of all ranks.
    cp_kv_cache_interleave_size: a divisor of the block size.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for undefined arguments. No argument is modified.

    >>> from attncheck.reference import merge_many, paged_attention
    >>> layer, query, rows = AttentionParams(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([0, 1])
    >>> table, lens, keys = torch.tensor([[0]]), torch.tensor([5]), torch.arange(6.0).view(6, 1, 1)
    >>> shares = [keys[rank::2].view(1, 3, 1, 1) for rank in (0, 1)]  # what two ranks hold; the last key is not owned
    >>> parts = [dcp_rank_attention(query, share, share, table, lens, rows, layer, dcp_size=2, dcp_rank=rank)
    ...          for rank, share in enumerate(shares)]
    >>> whole = paged_attention(query, keys.view(1, 6, 1, 1), keys.view(1, 6, 1, 1), table, lens, rows, layer)
    >>> all(torch.allclose(a, b) for a, b in zip(merge_many(*zip(*parts)), whole))
    True
    """
    tile_sizes, scales = (q_tile, kv_tile), (q_scale, k_scale, v_scale)
    check_paged(query, key_cache, value_cache, params, scales, tile_sizes)
    require_shard(key_cache.shape[1], dcp_size, dcp_rank, cp_kv_cache_interleave_size)
    share = _Share(dcp_size, dcp_rank, cp_kv_cache_interleave_size)
    requests = paged_requests(("query", query), key_cache, block_table, seq_lens, query_start_loc, stored=share.count)

    def sight(request: PagedRequest) -> Visibility:
        return _ShareSight(params, (0, request.seq_len), request.context_len, request.index, share=share)

    rule = ScoreRule(params, precision, query.device, sinks=dcp_rank == 0)
    return attend_paged(query, key_cache, value_cache, requests, sight, rule, scales, tile_sizes)


@dataclass(frozen=True)
class _Share:
    """The positions that one of ``size`` ranks holds: ``interleave`` consecutive positions per turn."""

    size: int
    rank: int
    interleave: int

    def count(self, positions: int) -> int:
        """Return how many of the first ``positions`` positions the rank holds; at most 0 for ``positions <= 0``."""
        rounds, rest = divmod(positions, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def positions(self, local: Tensor) -> Tensor:
        """Return the global positions of local tokens."""
        turn = local.div(self.interleave, rounding_mode="floor") * self.size + self.rank
        return turn * self.interleave + local % self.interleave


@dataclass(frozen=True, kw_only=True)
class _ShareSight(Visibility):
    """Visibility over the rank's local key numbers; ``span`` and the predicates still use global positions."""

    share: _Share

    def reach(self, first: int, last: int) -> Span:
        lo, hi = super().reach(first, last)
        return self.share.count(lo), self.share.count(hi)

    def common(self, first: int, last: int) -> Span:
        lo, hi = super().common(first, last)
        return self.share.count(lo), self.share.count(hi)

    def key_positions(self, lo: int, hi: int, device: torch.device) -> Tensor:
        return self.share.positions(super().key_positions(lo, hi, device))
