"""Attention over runs of short packed sequences: bitwise equal to ``attend`` on each, with fewer torch operations.

``attend`` runs some 40 operations for a decode of a few keys, and each takes longer to launch than to compute. A short
sequence is one tile, so nothing is rescaled, and elementwise operations process the whole run at once. Products and
sums over keys stay per sequence, because the order of a sum decides its last bit. Axes are named as in
:mod:`~attncheck.reference.attention.online_softmax`. ``r`` is rows times heads of the run: sequence by sequence, then
head by head, then row by row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.reference.attention.online_softmax import ScoreRule, heads_first, pivot
from attncheck.reference.attention.params import AttentionParams, Span, Visibility

_MOST_ELEMENTS = 2**20
"""Most elements of a run: its scores, plus its keys and values."""


@dataclass(frozen=True)
class PackedSequence:
    """The query rows and key rows of one sequence in a packed batch."""

    first_row: int
    end_row: int
    first_key: int
    end_key: int

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return self.end_row - self.first_row

    @property
    def rows(self) -> slice:
        """Query rows."""
        return slice(self.first_row, self.end_row)

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self.end_key - self.first_key

    @property
    def keys(self) -> slice:
        """Key rows."""
        return slice(self.first_key, self.end_key)

    def sight(self, params: AttentionParams) -> Visibility:
        """Return the visibility within the sequence."""
        return Visibility(params, (0, self.num_keys), self.num_keys - self.num_rows)


def runs_of(
    sequences: Sequence[PackedSequence], params: AttentionParams, tile_sizes: tuple[int, int]
) -> Iterator[list[PackedSequence]]:
    """Yield the sequences that have rows as runs, in order: adjacent sequences of one tile each, or one alone."""
    q_tile, kv_tile = tile_sizes
    size = params.num_kv_heads * (params.head_size + params.value_head_size)
    run: list[PackedSequence] = []
    elements = 0
    for each in sequences:
        if not each.num_rows:
            continue
        is_short = each.num_rows <= q_tile and each.num_keys <= kv_tile
        own = each.num_keys * (params.num_heads * each.num_rows + size)
        is_neighbour = bool(run) and run[-1].end_key == each.first_key
        if run and not (is_short and is_neighbour and elements + own <= _MOST_ELEMENTS):
            yield run
            run, elements = [], 0
        run.append(each)
        elements += own
        if not is_short:
            yield run
            run, elements = [], 0
    if run:
        yield run


def attend_run(
    query_THD: Tensor,
    key_KND: Tensor,
    value_KNV: Tensor,
    run: Sequence[PackedSequence],
    rule: ScoreRule,
    out_THV: Tensor,
    lse_TH: Tensor,
) -> None:
    """Compute attention of all rows of a run and write it into ``out_THV`` and ``lse_TH``."""
    params, compute = rule.params, rule.precision.compute
    heads = params.num_kv_heads
    rows, keys = slice(run[0].first_row, run[-1].end_row), slice(run[0].first_key, run[-1].end_key)
    query_tHD = query_THD[rows].to(compute)
    # With one row per sequence, rows and heads are already in the order of r.
    place_tH = None if len(run) == len(query_tHD) else _places(run, params.num_heads, rule.device)
    query_rD = _placed(query_tHD, place_tH)
    k_NKD, v_NKV = heads_first(key_KND[keys], compute), heads_first(value_KNV[keys], compute)
    max_r1 = query_rD.new_full((len(query_rD), 1), -torch.inf)
    sum_r1, acc_rV = torch.zeros_like(max_r1), query_rD.new_zeros(len(query_rD), params.value_head_size)

    sights = [each.sight(params) for each in run]
    reaches = [sight.reach(sight.context_len, sight.span[1] - 1) for sight in sights]
    counts = [each.num_rows * params.num_heads for each in run]
    widths = [max(hi - lo, 0) for lo, hi in reaches]
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    room = query_rD.new_empty(sum(sizes))

    def by_sequence(x_rC: Tensor) -> Sequence[Tensor]:
        """Return a view ``[N, m, C]`` per sequence."""
        if len(set(counts)) == 1:
            return x_rC.view(len(run), heads, counts[0] // heads, -1).unbind()
        return [part.view(heads, count // heads, -1) for part, count in zip(x_rC.split(counts), counts, strict=True)]

    def by_scores(x: Tensor) -> Sequence[Tensor]:
        """Return a view ``[N, m, k]`` per sequence."""
        parts = zip(x.split(sizes), counts, widths, strict=True)
        return [part.view(heads, count // heads, width) for part, count, width in parts]

    def seen(x_NKC: Tensor) -> Sequence[Tensor]:
        """Return ``[N, k, C]`` per sequence: the keys or values within its reach."""
        parts = zip(x_NKC.split([each.num_keys for each in run], 1), reaches, widths, strict=True)
        return [part if part.shape[1] == width else part[:, lo:hi] for part, (lo, hi), width in parts]

    seeing = [i for i, width in enumerate(widths) if width]
    s_Nmk, q_NmD, k_NkD, max_Nm1 = by_scores(room), by_sequence(query_rD), seen(k_NKD), by_sequence(max_r1)
    for i in seeing:
        s_Nmk[i].baddbmm_(q_NmD[i], k_NkD[i].mT, beta=0, alpha=rule.scale)
        _modify(s_Nmk[i], sights[i], reaches[i], rule)
        torch.amax(s_Nmk[i], -1, keepdim=True, out=max_Nm1[i])
    pivot_Nm1 = by_sequence(pivot(max_r1))
    for i in seeing:
        s_Nmk[i].sub_(pivot_Nm1[i])
    room.exp_()
    p_Nmk, v_NkV = by_scores(rule.precision.round_prob(room)), seen(v_NKV)
    sum_Nm1, acc_NmV = by_sequence(sum_r1), by_sequence(acc_rV)
    for i in seeing:
        torch.sum(s_Nmk[i], -1, keepdim=True, out=sum_Nm1[i])
        torch.bmm(p_Nmk[i], v_NkV[i], out=acc_NmV[i])

    sinks_r1 = None
    if rule.sinks_NG11 is not None:
        sinks_r1 = _placed(rule.sinks_NG11.view(1, -1, 1).expand(len(query_tHD), -1, 1), place_tH)
    out_rV, lse_r1 = rule.finish(max_r1, sum_r1, acc_rV, sinks_r1)
    if place_tH is None:
        out_THV[rows], lse_TH[rows] = out_rV.view(*query_tHD.shape[:2], -1), lse_r1.view(query_tHD.shape[:2])
    else:
        out_THV[rows], lse_TH[rows] = out_rV[place_tH], lse_r1[place_tH, 0]


def _modify(s_Nmk: Tensor, sight: Visibility, reach: Span, rule: ScoreRule) -> None:
    """Apply the layer's modifiers to scaled scores of the keys in ``reach``, in place; masking comes last."""
    first, last = sight.context_len, sight.span[1] - 1
    mixed = sight.mixed(first, last, reach)
    if not mixed and rule.cap is None and rule.slopes_NG11 is None:
        return
    s_NGqk = s_Nmk.view(-1, rule.params.group_size, last + 1 - first, s_Nmk.shape[2])
    q_pos_q1 = torch.arange(first, last + 1, device=rule.device).unsqueeze(1)
    rule.modify(s_NGqk, q_pos_q1, reach[0], sight)
    for begin, end in mixed:
        sees_qk = sight.mask(q_pos_q1, sight.key_positions(begin, end, rule.device))
        s_NGqk[..., begin - reach[0] : end - reach[0]].masked_fill_(~sees_qk, -torch.inf)


def _places(run: Sequence[PackedSequence], heads: int, device: torch.device) -> Tensor:
    """Return int64 ``[t, H]``: the index along ``r`` of each row and head of the run."""
    first = run[0].first_row
    fields = [(each.first_row - first, each.num_rows) for each in run]
    counts = torch.tensor([each.num_rows for each in run], device=device)
    begin_t1, stride_t1 = torch.tensor(fields, device=device).repeat_interleave(counts, 0).split(1, dim=1)
    row_t1 = torch.arange(len(begin_t1), device=device)[:, None]
    place_tH: Tensor = begin_t1 * (heads - 1) + row_t1 + stride_t1 * torch.arange(heads, device=device)
    return place_tH


def _placed(x_tHC: Tensor, place_tH: Tensor | None) -> Tensor:
    """Return ``[r, C]``: rows and heads moved to their index along ``r``."""
    x_rC = x_tHC.reshape(-1, x_tHC.shape[-1])
    return x_rC if place_tH is None else torch.empty_like(x_rC).index_copy_(0, place_tH.view(-1), x_rC)
