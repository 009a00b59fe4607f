"""The computation shared by all attention paths: softmax over key tiles, one request at a time.

Shape letters, in the order of a tensor's axes. Names end in them, so that a transpose is visible::

    R  requests                       T  query rows of the whole batch
    H  query heads                    N  KV heads             G  query heads per KV head (H = N * G)
    D  head size of query and key     V  head size of value and output
    q  rows of a query tile           k  keys of a key tile   m  rows of a query tile times heads of a group (G * q)

Query head ``h`` reads KV head ``h // G``. Heads are laid out ``[N, G]``, and the group is folded into the rows of a
matrix product, so that K and V are never repeated. For a row at position ``q`` and a key at position ``j``, in this
order::

    s = scale * <Q, K>
    s = cap * tanh(s / cap)                                        if there is a soft cap
    s = s + slope * (j - q)                                        if there is ALiBi
    s = -inf where the row does not see the key                    masking comes last
    m = max s    Z = sum exp(s - m)    out = sum exp(s - m) V / Z    lse = m + ln Z

The sums run over key tiles (Milakov and Gimelshein 2018; Dao et al. 2022). If a tile raises the maximum from ``m`` to
``m'``, the sums so far are multiplied by ``exp(m - m')``. A sink is added to ``Z`` once, at the end, and has no value.
A row that saw no key has ``m = -inf`` and ``Z = 0``; it gets ``out = 0`` and ``lse = -inf`` (with a sink: the sink).

Rows are processed in bands of ``_BAND_TILES`` query tiles. Within a band, keys are the outer loop: each key tile is
fetched and converted once for all query tiles that see any of it. Memory holds one key tile, one tile of scores and the
state of one band, never rows times keys. Query tiles skip key tiles that none of their rows sees, and build masks only
for keys that some rows see and others do not.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_float, require_same_device, require_shape
from attncheck.reference.attention.params import AttentionParams, Precision, Visibility

FetchKeys = Callable[[int, int], tuple[Tensor, Tensor]]
"""``(lo, hi) -> (K [N, k, D], V [N, k, V])`` for the keys ``lo <= j < hi`` of a request: new, in the compute dtype."""

_BAND_TILES = 32
"""Query tiles that share one pass over the keys. More tiles fetch keys less often; fewer tiles hold less state."""


class ScoreRule:
    """The modifiers of a layer as tensors of one device and dtype, created once per call."""

    def __init__(self, params: AttentionParams, precision: Precision, device: torch.device, sinks: bool) -> None:
        self.params, self.precision, self.device = params, precision, device
        self.scale, self.cap = params.softmax_scale, params.soft_cap
        self.slopes_NG11 = self._per_head(params.alibi_slopes)
        self.sinks_NG11 = self._per_head(params.sinks) if sinks else None

    def _per_head(self, values: Sequence[float] | None) -> Tensor | None:
        if values is None:
            return None
        tensor = torch.tensor(values, dtype=self.precision.compute, device=self.device)
        return tensor.view(self.params.num_kv_heads, self.params.group_size, 1, 1)

    def bias_qk(self, q_pos_q1: Tensor, k_pos_1k: Tensor) -> Tensor:
        """Return the factor of the ALiBi slope: ``j - q``, or ``-sqrt(max(q - j, 0))`` with ``alibi_sqrt``."""
        # Subtracted as integers: large positions lose bits in a narrow compute dtype.
        distance_qk = (k_pos_1k - q_pos_q1).to(self.precision.compute)
        return distance_qk.clamp_(max=0).neg_().sqrt_().neg_() if self.params.alibi_sqrt else distance_qk

    def modify(self, s_NGqk: Tensor, q_pos_q1: Tensor, lo: int, sight: Visibility) -> None:
        """Apply the soft cap and the ALiBi bias to scaled scores, in place; ``lo`` is the position of the first key."""
        if self.cap is not None:
            s_NGqk.div_(self.cap).tanh_().mul_(self.cap)
        if self.slopes_NG11 is not None:
            k_pos_1k = sight.key_positions(lo, lo + s_NGqk.shape[-1], self.device)
            s_NGqk.add_(self.slopes_NG11 * self.bias_qk(q_pos_q1, k_pos_1k))

    def finish(self, max_r1: Tensor, sum_r1: Tensor, acc_rV: Tensor, sinks_r1: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``(out [..., V], lse [..., 1])`` from maxima and sums of rows; ``sinks_r1``: the sink of each row."""
        if sinks_r1 is not None:
            top_r1 = torch.maximum(max_r1, sinks_r1)
            pivot_r1 = pivot(top_r1)
            rescale_r1 = torch.exp(max_r1 - pivot_r1)
            sum_r1 = sum_r1 * rescale_r1 + torch.exp(sinks_r1 - pivot_r1)
            max_r1, acc_rV = top_r1, acc_rV * rescale_r1
        # Without keys the sum and the accumulator are 0. Dividing by 1 keeps the output 0, and ln 0 gives lse = -inf.
        out_rV = acc_rV / sum_r1.masked_fill(sum_r1 == 0, 1.0)
        return self.precision.round_out(out_rV), max_r1 + sum_r1.log()


class RowTile:
    """Some consecutive rows of a request, for all heads, with their running maxima and sums."""

    def __init__(self, query_qHD: Tensor, first: int, rule: ScoreRule) -> None:
        self.rule = rule
        params, compute = rule.params, rule.precision.compute
        rows, groups, heads = len(query_qHD), params.group_size, params.num_kv_heads
        self.first, self.last = first, first + rows - 1
        self.shape_NGq = (heads, groups, rows)
        q_qNGD = query_qHD.to(compute).reshape(rows, heads, groups, params.head_size)
        self.q_NmD = q_qNGD.permute(1, 2, 0, 3).reshape(heads, groups * rows, params.head_size)
        self.q_pos_q1 = torch.arange(first, first + rows, device=rule.device).unsqueeze(1)
        self.max_Nm1 = self.q_NmD.new_full((heads, groups * rows, 1), -torch.inf)
        if rule.precision.max_from_sinks and rule.sinks_NG11 is not None:
            self.max_Nm1 = rule.sinks_NG11.expand(heads, groups, rows, 1).reshape(heads, groups * rows, 1)
        self.sum_Nm1 = self.q_NmD.new_zeros((heads, groups * rows, 1))
        self.acc_NmV = self.q_NmD.new_zeros((heads, groups * rows, params.value_head_size))

    def absorb(self, k_NkD: Tensor, v_NkV: Tensor, lo: int, sight: Visibility, room: Tensor) -> None:
        """Add the keys from position ``lo`` on to the sums; ``room`` is scratch memory. K and V are not modified."""
        hi = lo + k_NkD.shape[1]
        masks = self._masks(lo, hi, sight)
        for begin, sees_qk in masks:
            # A key that no row here sees may hold NaN, and 0 * NaN is NaN. So its K and V are set to zero.
            seen_k = sees_qk.any(0)
            if not seen_k.all():
                if len(seen_k) == hi - lo and not seen_k.any():
                    return
                k_NkD, v_NkV = _cleared(k_NkD, v_NkV, begin - lo, seen_k)
        s_Nmk = self._scores(k_NkD, lo, sight, room)
        s_NGqk = s_Nmk.view(*self.shape_NGq, hi - lo)
        for begin, sees_qk in masks:
            part_NGqk = s_NGqk[..., begin - lo : begin - lo + sees_qk.shape[1]]
            part_NGqk.masked_fill_(~sees_qk, -torch.inf)
        self._add(s_Nmk, v_NkV)

    def _masks(self, lo: int, hi: int, sight: Visibility) -> list[tuple[int, Tensor]]:
        """Return the parts of ``lo .. hi`` that need a mask, as (first key, bool [q, k]). Most tiles have none."""
        return [
            (begin, sight.mask(self.q_pos_q1, sight.key_positions(begin, end, self.rule.device)))
            for begin, end in sight.mixed(self.first, self.last, (lo, hi))
        ]

    def _scores(self, k_NkD: Tensor, lo: int, sight: Visibility, room: Tensor) -> Tensor:
        """Return the scores before masking, ``[N, m, k]``, computed in ``room``."""
        rule, keys = self.rule, k_NkD.shape[1]
        heads, rows, _ = self.q_NmD.shape
        s_Nmk = room[: heads * rows * keys].view(heads, rows, keys)
        s_Nmk.baddbmm_(self.q_NmD, k_NkD.transpose(1, 2), beta=0, alpha=rule.scale)  # beta = 0: old values are not read
        rule.modify(s_Nmk.view(*self.shape_NGq, keys), self.q_pos_q1, lo, sight)
        return s_Nmk

    def _add(self, s_Nmk: Tensor, v_NkV: Tensor) -> None:
        """Do one step of the online softmax. ``s_Nmk`` is overwritten."""
        max_Nm1 = torch.maximum(self.max_Nm1, s_Nmk.amax(-1, keepdim=True))
        pivot_Nm1 = pivot(max_Nm1)
        rescale_Nm1 = torch.exp(self.max_Nm1 - pivot_Nm1)
        p_Nmk = s_Nmk.sub_(pivot_Nm1).exp_()
        self.max_Nm1 = max_Nm1
        self.sum_Nm1.mul_(rescale_Nm1).add_(p_Nmk.sum(-1, keepdim=True))
        self.acc_NmV.mul_(rescale_Nm1).baddbmm_(self.rule.precision.round_prob(p_Nmk), v_NkV)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return ``(out [q, H, V], lse [q, H])`` over all absorbed keys, sinks included."""
        heads, groups, rows = self.shape_NGq
        out_NGqV, lse_NGq1 = self.rule.finish(
            self.max_Nm1.view(heads, groups, rows, 1),
            self.sum_Nm1.view(heads, groups, rows, 1),
            self.acc_NmV.view(heads, groups, rows, -1),
            self.rule.sinks_NG11,
        )
        out_qHV = out_NGqV.permute(2, 0, 1, 3).reshape(rows, heads * groups, -1)
        return out_qHV, lse_NGq1.permute(2, 0, 1, 3).reshape(rows, heads * groups)


def attend(
    query_qHD: Tensor,
    fetch: FetchKeys,
    sight: Visibility,
    rule: ScoreRule,
    tile_sizes: tuple[int, int],
    out_qHV: Tensor,
    lse_qH: Tensor,
) -> None:
    """Compute attention of all rows of one request and write it into ``out_qHV`` and ``lse_qH``.

    Row ``i`` is at position ``sight.context_len + i``. ``fetch`` is called only for keys within ``sight.span``.
    ``tile_sizes``: rows and keys of a tile.
    """
    q_tile, kv_tile = tile_sizes
    for begin in range(0, len(query_qHD), q_tile * _BAND_TILES):
        starts = range(begin, min(begin + q_tile * _BAND_TILES, len(query_qHD)), q_tile)
        tiles = [RowTile(query_qHD[at : at + q_tile], sight.context_len + at, rule) for at in starts]
        _attend_band(tiles, fetch, sight, kv_tile)
        for at, tile in zip(starts, tiles, strict=True):
            out_qHV[at : at + q_tile], lse_qH[at : at + q_tile] = tile.result()


def _attend_band(tiles: Sequence[RowTile], fetch: FetchKeys, sight: Visibility, kv_tile: int) -> None:
    """Process the keys that any of the tiles can see, in one pass."""
    reaches = [sight.reach(tile.first, tile.last) for tile in tiles]
    begin = min((lo for lo, hi in reaches if lo < hi), default=0)
    end = max((hi for lo, hi in reaches if lo < hi), default=0)
    scores = max(len(tile.q_NmD) * tile.q_NmD.shape[1] for tile in tiles) * max(0, min(kv_tile, end - begin))
    room = tiles[0].q_NmD.new_empty(scores)
    for tile_lo in range(begin, end, kv_tile):
        tile_hi = min(tile_lo + kv_tile, end)
        k_NkD, v_NkV = fetch(tile_lo, tile_hi)
        for tile, reach in zip(tiles, reaches, strict=True):
            lo, hi = max(reach[0], tile_lo), min(reach[1], tile_hi)
            if lo < hi:
                keys = slice(lo - tile_lo, hi - tile_lo)
                tile.absorb(k_NkD[:, keys], v_NkV[:, keys], lo, sight, room)


def pivot(max_r1: Tensor) -> Tensor:
    """Return what is subtracted from scores before ``exp``: their maximum, or 0 for a row that has seen no key.

    For such a row the maximum would give ``-inf - -inf = NaN``. With any finite pivot all weights are
    ``exp(-inf) = 0``.
    """
    return max_r1.masked_fill(max_r1 == -torch.inf, 0.0)


def heads_first(x_kNC: Tensor, compute: torch.dtype) -> Tensor:
    """Return keys or values ``[k, N, C]`` as a new ``[N, k, C]`` tensor in the compute dtype."""
    keys, heads, size = x_kNC.shape
    # One pass over memory converts and transposes.
    return torch.empty((heads, keys, size), dtype=compute, device=x_kNC.device).copy_(x_kNC.transpose(0, 1))


def _cleared(k_NkD: Tensor, v_NkV: Tensor, at: int, seen_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of K and V with zeros for the keys, counted from ``at``, where ``seen_k`` is False."""
    keep_1k1 = torch.ones(k_NkD.shape[1], dtype=torch.bool, device=seen_k.device)
    keep_1k1[at : at + len(seen_k)] = seen_k
    gone_1k1 = ~keep_1k1[None, :, None]
    return k_NkD.masked_fill(gone_1k1, 0.0), v_NkV.masked_fill(gone_1k1, 0.0)


def merge_attn_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
) -> tuple[Tensor, Tensor]:
    """Return the merge of two states; see :func:`merge_many`."""
    return merge_many([out_a, out_b], [lse_a, lse_b], precision=precision)


@torch.no_grad()
def merge_many(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
) -> tuple[Tensor, Tensor]:
    """Return attention ``(out, lse)`` over the union of disjoint key sets, from the state ``(out_i, lse_i)`` of each.

    Per row and head, over the states that are not empty::

        m = max lse_i    w_i = exp(lse_i - m)    lse = m + ln(sum w_i)    out = sum w_i out_i / sum w_i

    outs, lses: one or more ``[T, H, Dv]`` and as many ``[T, H]``, natural logarithms, any float dtype but float8.
    A state is empty if its lse is ``-inf``, or ``+inf`` (one kernel family marks it so). An empty state is ignored even
    if its out holds NaN. If all states are empty, ``out = 0`` and ``lse = -inf``. A state with a NaN lse is not empty;
    it makes the result NaN.
    precision: the results are new tensors in ``precision.compute``, the output rounded to ``precision.out``.

    >>> out, lse = merge_many([torch.ones(1, 1, 1), torch.zeros(1, 1, 1)], [torch.zeros(1, 1), torch.zeros(1, 1)])
    >>> out.item(), round(lse.item(), 6)
    (0.5, 0.693147)
    """
    if not outs or len(outs) != len(lses):
        raise ReferenceArgumentError("outs, lses", (len(outs), len(lses)), "one or more states, as many outs as lses")
    require_shape("outs[0]", outs[0], None, None, None, legend="rows, heads, value size")
    tokens, heads, size = outs[0].shape
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        require_float(f"outs[{index}]", out)
        require_float(f"lses[{index}]", lse)
        require_shape(f"outs[{index}]", out, tokens, heads, size, legend="as the first")
        require_shape(f"lses[{index}]", lse, tokens, heads, legend="rows, heads")
        require_same_device("outs[0]", outs[0], **{f"outs[{index}]": out, f"lses[{index}]": lse})

    lse_STH = torch.stack([lse.to(precision.compute) for lse in lses])
    empty_STH = lse_STH.isinf()
    lse_STH = lse_STH.masked_fill(empty_STH, -torch.inf)
    max_TH = lse_STH.amax(0)
    weights_STH = torch.exp(lse_STH - max_TH.masked_fill(max_TH == -torch.inf, 0.0))
    total_TH = weights_STH.sum(0)
    merged_THV = torch.zeros(tokens, heads, size, dtype=precision.compute, device=outs[0].device)
    for out, empty_TH, weight_TH in zip(outs, empty_STH, weights_STH, strict=True):
        part_THV = out.to(precision.compute).masked_fill(empty_TH.unsqueeze(-1), 0.0)
        merged_THV += part_THV * weight_TH.unsqueeze(-1)
    merged_THV /= total_TH.masked_fill(total_TH == 0, 1.0).unsqueeze(-1)
    return precision.round_out(merged_THV), max_TH + total_TH.log()
