"""Attention without pages in float64, and the error budget around its output."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attncheck.reference import AttentionParams, Precision, PrefixMask, paged_attention, varlen_attention, visible

# Attention without pages: contiguous rows, keys and values, and which row sees which key.
#
# Truths, budgets and hypotheses are computed from it, by a formulation independent of the paged one that backends are
# driven through.

HiddenKeys = Callable[[int, Tensor, Tensor], Tensor]
"""``(request, row positions [a, 1], key positions [1, b])`` -> bool, True for lost keys; broadcasts to ``[a, b]``."""


class RowPlaces(NamedTuple):
    """The place of each row, int64 ``[T]`` each.

    num_keys: keys of its request. first_key: index of the request's first key among all keys. node: index of the row
    within its request. context_len: position of the first row of its request.
    """

    num_keys: Tensor
    first_key: Tensor
    node: Tensor
    context_len: Tensor


@dataclass(frozen=True)
class UnpagedAttention:
    """The arguments of one unpaged attention: ``query [T, H, D]``, ``keys [N, Hkv, D]``, ``values [N, Hkv, Dv]``.

    ``tree``: bool ``[Q, Q]``; row ``i`` of a request sees its new key ``m`` only if ``tree[i, m]``. None for no tree.
    ``prefixes``: the image spans and first keys of each request; empty if none has any.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    tree: Tensor | None = None
    prefixes: tuple[PrefixMask, ...] = ()

    def to(self, device: torch.device) -> "UnpagedAttention":
        """Return the same arguments on ``device``."""
        return UnpagedAttention(
            self.query.to(device),
            self.keys.to(device),
            self.values.to(device),
            self.cu_seqlens_q.to(device),
            self.cu_seqlens_k.to(device),
            None if self.tree is None else self.tree.to(device),
            self.prefixes,
        )

    def of_requests(self, first: int, end: int) -> "UnpagedAttention":
        """Return the arguments of requests ``first .. end - 1``; the tensors share memory."""
        rows = self.cu_seqlens_q[first : end + 1]
        keys = self.cu_seqlens_k[first : end + 1]
        own_rows = slice(int(rows[0]), int(rows[-1]))
        own_keys = slice(int(keys[0]), int(keys[-1]))
        return replace(
            self,
            query=self.query[own_rows],
            keys=self.keys[own_keys],
            values=self.values[own_keys],
            cu_seqlens_q=rows - rows[0],
            cu_seqlens_k=keys - keys[0],
            prefixes=self.prefixes[first:end],
        )

    def attend(
        self, params: AttentionParams, precision: Precision | None = None, hidden: HiddenKeys | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output ``[T, H, Dv]`` and LSE ``[T, H]`` of the reference, in float64 unless ``precision`` is given.

        Keys for which ``hidden`` is True are not seen; positions do not change.
        """
        precision = precision or Precision()
        if self.tree is None and hidden is None and not self.prefixes:
            return varlen_attention(
                self.query, self.keys, self.values, self.cu_seqlens_q, self.cu_seqlens_k, params, precision=precision
            )
        starts, lens = self.cu_seqlens_k[:-1], self.num_keys
        width = max(int(lens.max()), 1)
        # Use pages of one token: the contiguous keys are then a cache, and its block table is simple arithmetic.
        table = torch.minimum(starts[:, None] + torch.arange(width, device=starts.device), self.cu_seqlens_k[-1] - 1)

        def seen(request: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            sees = self._sees_without_tree(params, request, q_pos, k_pos)
            return sees if hidden is None else sees & ~hidden(request, q_pos, k_pos)

        is_plain = hidden is None and not self.prefixes
        return paged_attention(
            self.query,
            self.keys[:, None],
            self.values[:, None],
            table,
            lens,
            self.cu_seqlens_q,
            params,
            tree_mask=self.tree,
            mask_fn=None if is_plain else seen,
            precision=precision,
        )

    def attend_weighted(self, params: AttentionParams) -> tuple[Tensor, Tensor, Tensor]:
        """Return output and LSE in float64, and the output for absolute values, ``sum P |V|``, ``[T, H, Dv]``.

        ``sum P |V|`` bounds the effect of rounding the products; it has the weights of the output.
        """
        size = params.value_head_size
        both = replace(self, values=torch.cat([self.values, self.values.abs()], dim=-1))
        out, lse = both.attend(replace(params, head_size_v=2 * size))
        return out[..., :size].contiguous(), lse, out[..., size:].contiguous()

    @cached_property
    def num_keys(self) -> Tensor:
        """int64 ``[R]``: keys of each request."""
        return self.cu_seqlens_k[1:] - self.cu_seqlens_k[:-1]

    @cached_property
    def num_rows(self) -> Tensor:
        """int64 ``[R]``: rows of each request."""
        return self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]

    @property
    def has_first_keys(self) -> bool:
        """Whether some request has first keys that rows see beyond the window."""
        return any(prefix.rswa_prefix_len for prefix in self.prefixes)

    @cached_property
    def places(self) -> RowPlaces:
        """The place of each row."""
        fields = torch.stack([self.num_keys, self.cu_seqlens_k[:-1], self.cu_seqlens_q[:-1], self.num_rows])
        num_keys, first_key, first_row, num_rows = fields.repeat_interleave(self.num_rows, dim=1)
        node = torch.arange(len(num_keys), device=num_keys.device) - first_row
        return RowPlaces(num_keys, first_key, node, num_keys - num_rows)

    def sees(self, params: AttentionParams, request: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return a bool tensor, True where a row of ``request`` sees a key: by params, prefixes and tree.

        It has the broadcast shape of the positions.
        """
        context_len = int(self.num_keys[request] - self.num_rows[request])
        seen = self._sees_without_tree(params, request, q_pos, k_pos)
        return seen & self._tree_shows(q_pos - context_len, k_pos - context_len)

    def _sees_without_tree(self, params: AttentionParams, request: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen = visible(params, q_pos, k_pos)
        return seen | self.prefixes[request].sees(q_pos, k_pos) if self.prefixes else seen

    def _tree_shows(self, row: Tensor, node: Tensor) -> Tensor:
        """Return where the tree lets a row see a key, by their places behind the context; all keys without a tree."""
        if self.tree is None:
            return torch.ones((), dtype=torch.bool, device=row.device)
        return self.tree[row, node.clamp(0, len(self.tree) - 1)] | (node < 0)

    def sees_packed(self, params: AttentionParams, rows: slice, keys: slice) -> Tensor:
        """Return bool ``[rows, keys]``: which of these keys each of these rows sees; none of another request."""
        num_keys, first_key, node, context_len = (field[rows, None] for field in self.places)
        k_pos = torch.arange(keys.start, keys.stop, device=first_key.device) - first_key
        own = (k_pos >= 0) & (k_pos < num_keys)
        q_pos = context_len + node
        seen = visible(params, q_pos, k_pos) & self._tree_shows(node, k_pos - context_len)
        if self.prefixes:
            of_request = torch.searchsorted(self.cu_seqlens_k, first_key.contiguous(), right=True) - 1
            for request, prefix in enumerate(self.prefixes):
                seen = seen | ((of_request == request) & prefix.sees(q_pos, k_pos))
        return own & seen

    def count_seen(self, params: AttentionParams) -> Tensor:
        """Return int64 ``[T]``: how many keys each row sees, counted one by one."""
        starts_q: list[int] = self.cu_seqlens_q.tolist()
        starts_k: list[int] = self.cu_seqlens_k.tolist()
        counts = [
            self.sees_packed(params, slice(*of_rows), slice(*of_keys)).sum(dim=1)
            for of_rows, of_keys in zip(pairwise(starts_q), pairwise(starts_k), strict=True)
        ]
        return torch.cat(counts)


# The error budget: how far from the truth a correct kernel of a dtype may be. It is defined in this module alone.
#
# Fixed `atol/rtol` go blind as the context grows, since outputs shrink like `1/sqrt(n)`. The budget of a row and head
# is a multiple of the loss L of an honest low-precision run of the same reference. It is at least the rounding of the
# output itself. To this is added the rounding of float32 scores before `exp`::
#
#     error <= max(k L, 2 u |t|) + c * 2**-24 * (1 + S) * |sum P |V||,    S = scale |q| max|k|
#
# This holds in the 2-norm and in the max norm. `t` is the truth, `u` half the dtype's epsilon, and `max|k|` is taken
# over the keys the row sees.
#
# `c` is 8, or a quarter of the head size if that is more: a float32 sum of D products of equal sign, added one by one,
# was observed to be off by up to D/8 roundings. A soft cap passes the error of a product on by the slope of its tanh,
# so `|q| |k|` is multiplied by it. There `S` is at least the cap: a tanh made of exponentials, such as `2 sigmoid(2x) -
# 1`, is off by some roundings of 1 for every `x`, which the cap multiplies. ALiBi adds `|slope| * n`: kernels may
# measure the bias from position 0, so that it is this large, and rounded accordingly, for keys of every weight. A last
# term, not in the formula, allows for numbers that vanish in the dtype (`_VANISHING`). Below 8 columns, L is random and
# may be zero; there, `k L` is at least the loss from rounding every weight the wrong way.
#
# The LSE may be off by the rounding of one score, the rounding of the sum of n exponentials, `k` times the loss of the
# low-precision run, and `u`: fast kernels sum the softmax after rounding it to the dtype.
#
# A backend has no tolerance of its own. A case may multiply the budget, visibly and with a reason.

K = 3.0
"""``k`` of the formula: the multiple of an honest low-precision run's loss that is allowed."""

USUAL = 6.0
"""The multiple of the usual loss of a recurrence that is allowed. It exceeds ``K``, because rows differ."""

ROUNDINGS = 2
"""Roundings of the output that are always allowed; latent attention has more, since it rounds more results."""

_FLOAT32 = 2.0**-24

_NARROW = 8
"""Columns of an output from which on the loss of one run predicts that of another."""

_AREA_TOGETHER = 2**14
"""Rows times keys up to which several requests share one block. Most of a block pairs rows with keys of others."""

_SCORES_AT_ONCE = 2**22
"""Rows times keys times KV heads up to which a block has more than one row."""

_VANISHING = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-120, torch.float32: 2.0**-120}
"""What may be lost of a number close to zero.

It is the smallest positive number of float16. For the other dtypes, it is what float32 flushes to zero, summed over
many keys. For example, a row whose sink far outweighs every key comes out as zeros.
"""


@dataclass(frozen=True)
class Budget:
    """Allowed errors, float64 ``[T, H]`` each: of the output in the 2-norm and max norm, and of the LSE."""

    norm: Tensor
    peak: Tensor
    lse: Tensor

    def to(self, device: torch.device) -> "Budget":
        """Return the budget on ``device``."""
        return Budget(self.norm.to(device), self.peak.to(device), self.lse.to(device))

    def of_rows(self, rows: Tensor | slice) -> "Budget":
        """Return the budget of some rows."""
        return Budget(self.norm[rows], self.peak[rows], self.lse[rows])

    def scaled(self, factor: float) -> "Budget":
        """Return the budget times the factor of a case."""
        return Budget(self.norm * factor, self.peak * factor, self.lse * factor)


def budget_of(
    rows: UnpagedAttention,
    params: AttentionParams,
    dtype: torch.dtype,
    out: Tensor,
    lse: Tensor,
    weighted: Tensor,
    honest: Iterable[tuple[Tensor, Tensor]] = (),
    forms: Iterable[tuple[UnpagedAttention, AttentionParams]] = (),
    roundings: int = ROUNDINGS,
) -> Budget:
    """Return the budget of a kernel in ``dtype`` around a truth.

    ``out``, ``lse``, ``weighted``: from :meth:`UnpagedAttention.attend_weighted`. ``honest``: outputs and LSEs of
    low-precision runs, one for each way in which kernels may compute the problem; the largest loss counts. Default: one
    plain run. ``forms``: other formulations with the same scores, which kernels may use; the largest bound on scores
    and sums counts. ``roundings``: roundings of the output that are always allowed.
    """
    runs = list(honest) or [rows.attend(params, Precision.kernel(dtype))]
    losses = [low_out.double() - out for low_out, _ in runs]
    u = torch.finfo(dtype).eps / 2
    if out.shape[-1] < _NARROW:
        losses.append(roundings / ROUNDINGS * u / K * weighted)
    bracket = torch.stack(
        [float32_bracket(score_bound(*form), form[1].head_size) for form in ((rows, params), *forms)]
    ).amax(0)
    norm, peak = allowed_errors(losses, out, bracket, weighted, dtype, roundings)
    lse_loss = torch.stack([_lse_loss(lse, low_lse.double()) for _, low_lse in runs]).amax(0)
    return Budget(norm, peak, bracket + u + _sum_rounding(rows, lse) + lse_loss)


def allowed_errors(
    losses: Sequence[Tensor],
    truth: Tensor,
    bracket: Tensor,
    weighted: Tensor,
    dtype: torch.dtype,
    roundings: int = ROUNDINGS,
) -> tuple[Tensor, Tensor]:
    """Return the module's formula: allowed 2-norm and max norm of the error per row and head, float64 ``[T, H]`` each.

    ``losses`` of honest runs, ``truth`` and ``weighted`` (the output if all values were absolute): ``[T, H, Dv]`` each.
    """
    u = torch.finfo(dtype).eps / 2
    vanishing = truth.new_full((1, 1, truth.shape[-1]), _VANISHING[dtype])
    norm, peak = (
        torch.maximum(K * torch.stack([size(loss) for loss in losses]).amax(0), roundings * u * size(truth))
        + bracket * size(weighted)
        + size(vanishing)
        for size in (_norm, _peak)
    )
    return norm, peak


def usual_losses(losses: Sequence[Tensor], spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return the usual quotients of loss and spread of a recurrence, in 2-norm and max norm, float64 ``[1, H]`` each.

    ``spread [T, H, D]``: the root of the sum of the squares of a row's summands. Usual is the root mean square over all
    rows of the head.
    """

    def usual(size: Callable[[Tensor], Tensor]) -> Tensor:
        quotient = torch.stack([size(loss) for loss in losses]).amax(0) / size(spread).clamp(min=1e-30)
        return quotient.square().mean(dim=0, keepdim=True).sqrt()

    return usual(_norm), usual(_peak)


def usual_errors(usual: tuple[Tensor, Tensor], spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least allowed 2-norm and max norm of an error of a recurrence, float64 ``[T, H]`` each.

    The loss of one run is small in some rows by chance, as where few summands matter. So each row may at least lose
    ``USUAL`` times what is ``usual`` for its ``spread``, both as of :func:`usual_losses`.
    """
    norm, peak = usual
    return USUAL * norm * _norm(spread), USUAL * peak * _peak(spread)


def float32_bracket(reach: Tensor, terms: int) -> Tensor:
    """Return the relative error of float32 weights and sums, for exponents up to ``reach`` and sums of ``terms``."""
    return max(8.0, terms / 4) * _FLOAT32 * (1 + reach)


def share_of_budget(error: Tensor, budget: Budget) -> Tensor:
    """Return the error (float64 ``[T, H, Dv]``) in budgets, ``[T, H]``; above 1 is wrong, and an error of 0 is 0."""
    shares = [_ratio(_norm(error), budget.norm), _ratio(_peak(error), budget.peak)]
    return torch.maximum(*shares)


def score_bound(rows: UnpagedAttention, params: AttentionParams) -> Tensor:
    """Return ``S`` of the module's formula, float64 ``[T, H]``: a bound on the scores of each row and head."""
    key_norm = _norm(rows.keys.double()).t().contiguous()
    longest = torch.zeros(rows.query.shape[:2], dtype=torch.float64, device=rows.query.device)
    for some, keys in _pieces(rows):
        seen = rows.sees_packed(params, some, keys)
        if params.logits_soft_cap:
            for head in range(params.num_heads):
                kv_head = head // params.group_size
                scores = params.softmax_scale * (
                    rows.query[some, head].double() @ rows.keys[keys, kv_head].double().t()
                )
                slope = 1 - torch.tanh(scores / params.logits_soft_cap).square()
                longest[some, head] = (key_norm[kv_head, keys] * slope).masked_fill(~seen, 0.0).amax(dim=1)
        else:
            most = torch.where(seen, key_norm[:, None, keys], 0.0).amax(dim=2)
            longest[some] = most.t().repeat_interleave(params.group_size, dim=1)
    bound = abs(params.softmax_scale) * _norm(rows.query.double()) * longest
    if params.logits_soft_cap:
        bound = bound.clamp(min=params.logits_soft_cap)
    if params.alibi_slopes is not None:
        slopes = torch.tensor(params.alibi_slopes, dtype=torch.float64, device=bound.device).abs()
        bound = bound + slopes * rows.places.num_keys.double()[:, None]
    return bound


def _pieces(rows: UnpagedAttention) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of rows and the keys of their requests: short requests together, a long one in pieces.

    Rows of requests without keys are left out, or share a block with keys that they do not see.
    """

    def area(first: int, end: int) -> int:
        return (starts_q[end] - starts_q[first]) * (starts_k[end] - starts_k[first])

    starts_q: list[int] = rows.cu_seqlens_q.tolist()
    starts_k: list[int] = rows.cu_seqlens_k.tolist()
    first = 0
    for end in range(1, len(starts_q)):
        if end + 1 < len(starts_q) and area(first, end + 1) <= _AREA_TOGETHER:
            continue
        keys = slice(starts_k[first], starts_k[end])
        if keys.start < keys.stop:
            step = max(1, _SCORES_AT_ONCE // (rows.keys.shape[1] * (keys.stop - keys.start)))
            for row in range(starts_q[first], starts_q[end], step):
                yield slice(row, min(row + step, starts_q[end])), keys
        first = end


def _sum_rounding(rows: UnpagedAttention, lse: Tensor) -> Tensor:
    """Return the LSE error from summing n exponentials in float32 in any sensible order, and rounding the logarithm."""
    growth = torch.sqrt(torch.ceil(rows.places.num_keys.double() / 16)).clamp(min=1)[:, None]
    return 2 * K * _FLOAT32 * growth * lse.abs().nan_to_num(posinf=1.0).clamp(min=1)


def _lse_loss(lse: Tensor, low: Tensor) -> Tensor:
    """Return ``K`` times the LSE error of an honest low-precision run."""
    return K * torch.where(lse == low, 0.0, (lse - low).abs())


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def _peak(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1)


def _ratio(error: Tensor, budget: Tensor) -> Tensor:
    """Return ``error / budget`` with 0/0 = 0; NaN errors count as infinite."""
    share = torch.where(error == 0, torch.zeros_like(error), error / budget)
    return torch.nan_to_num(share, nan=math.inf, posinf=math.inf)
