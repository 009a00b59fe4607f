"""The error budget: how far from the truth a correct kernel of a dtype may be. It is defined in this module alone.

Fixed ``atol/rtol`` go blind as the context grows, since outputs shrink like ``1/sqrt(n)``. The budget of a row and head
is a multiple of the loss L of an honest low-precision run of the same reference. It is at least the rounding of the
output itself. To this is added the rounding of float32 scores before ``exp``::

    error <= max(k L, 2 u |t|) + c * 2**-24 * (1 + S) * |sum P |V||,    S = scale |q| max|k|

This holds in the 2-norm and in the max norm. ``t`` is the truth, ``u`` half the dtype's epsilon, and ``max|k|`` is
taken over the keys the row sees.

``c`` is 8, or a quarter of the head size if that is more: a float32 sum of D products of equal sign, added one by one,
was observed to be off by up to D/8 roundings. A soft cap passes the error of a product on by the slope of its tanh, so
``|q| |k|`` is multiplied by it. There ``S`` is at least the cap: a tanh made of exponentials, such as
``2 sigmoid(2x) - 1``, is off by some roundings of 1 for every ``x``, which the cap multiplies. ALiBi adds
``|slope| * n``: kernels may measure the bias from position 0, so that it is this large, and rounded accordingly, for
keys of every weight. A last term, not in the formula, allows for numbers that vanish in the dtype (``_VANISHING``).
Below 8 columns, L is random and may be zero; there, ``k L`` is at least the loss from rounding every weight the wrong
way.

The LSE may be off by the rounding of one score, the rounding of the sum of n exponentials, ``k`` times the loss of the
low-precision run, and ``u``: fast kernels sum the softmax after rounding it to the dtype.

A backend has no tolerance of its own. A case may multiply the budget, visibly and with a reason.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams, Precision

K = 3.0
"""``k`` of the formula: the multiple of an honest low-precision run's loss that is allowed."""

ROUNDINGS = 2
"""Roundings of the output that are always allowed; latent attention has more, since it rounds more results."""

_FLOAT32 = 2.0**-24

_NARROW = 8
"""Columns of an output from which on the loss of one run predicts that of another."""

_AREA_TOGETHER = 2**14
"""Rows times keys up to which several requests share one block, most of which pairs rows with other requests' keys."""

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
