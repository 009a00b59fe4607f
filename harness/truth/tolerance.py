"""How far from the truth a correct kernel of a dtype may be: the error budget, in one place.

Fixed ``atol/rtol`` go blind as the context grows, since outputs shrink like ``1/sqrt(n)``. The budget of a row and head
is what an honest low-precision run of the same reference loses (L), a few times over, with two floors: the rounding of
the output itself, and the rounding float32 scores suffer before ``exp``::

    error <= max(k L, 2 u |t|) + c * 2**-24 * (1 + S) * |sum P |V||,    S = scale |q| max|k|

in the 2-norm and likewise in the max norm, with ``u`` half the dtype's epsilon and ``max|k|`` over the keys the row
sees. ``c`` is 8, or a quarter of the head size if that is more: a float32 sum of D products of equal sign, added one
by one, was seen to be off by up to D/8 roundings. Under a soft cap c, ``S`` is at most c. ALiBi adds ``|slope| * n``:
kernels may measure the bias from position 0, so that it is this large, and rounded accordingly, for keys of every
weight. Beside this stands what vanishes in the dtype altogether. Below 8 columns L is a matter of luck, and may be
none; there ``k L`` is at least what rounding each weight the wrong way would lose. The log-sum-exp may be off by the
rounding of one score, of the sum of n exponentials, by what the low-precision run loses, and by ``u``: fast kernels sum
the softmax after rounding it to the dtype. A backend owns no tolerance; a case may multiply the budget, visibly, with a
reason.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams, Precision

K = 3.0
"""How many times the loss of an honest low-precision run is allowed."""

ROUNDINGS = 2
"""How many roundings of the output are allowed in any case; of latent attention more, since more is rounded."""

_FLOAT32 = 2.0**-24

_NARROW = 8
"""Columns of an output from which on what one run loses tells what another may lose."""

_AREA_TOGETHER = 2**14
"""Rows times keys up to which several requests are looked at together: most of this is rows beside others' keys."""

_SCORES_AT_ONCE = 2**22
"""Rows times keys times KV heads of what is looked at together, beyond one row."""

_VANISHING = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-120, torch.float32: 2.0**-120}
"""What may be lost of a number that is almost none: the step between float16's smallest numbers; for the others what
float32 flushes to zero, summed over many keys. A row whose sink outweighs every key by far comes out as zeros."""


@dataclass(frozen=True)
class Budget:
    """Allowed errors, float64 ``[T, H]`` each: of the output in the 2-norm and max norm, and of the LSE."""

    norm: Tensor
    peak: Tensor
    lse: Tensor

    def to(self, device: torch.device) -> "Budget":
        """The same on a device."""
        return Budget(self.norm.to(device), self.peak.to(device), self.lse.to(device))

    def of_rows(self, rows: Tensor | slice) -> "Budget":
        """The budget of some rows."""
        return Budget(self.norm[rows], self.peak[rows], self.lse[rows])

    def scaled(self, factor: float) -> "Budget":
        """The budget of a case that multiplies it."""
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
    """The budget of a kernel in ``dtype`` around a truth: ``out``, ``lse``, ``weighted`` of ``Rows.attend_weighted``.

    ``honest``: what low-precision runs of the question answer (output, LSE), where kernels may go about it in more than
    one way: the largest loss counts. By default one plain run. ``forms``: other questions with the same scores, which
    kernels may ask instead: the largest bound on the scores and the longest products count. ``roundings``: how many of
    the output are allowed in any case.
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
    """The module's formula: allowed 2-norm and max norm of the error of each row and head, float64 ``[T, H]``.

    ``losses`` of honest runs, ``truth`` and ``weighted`` (what would come of absolute values), ``[T, H, Dv]`` each.
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
    """Relative error of weights and sums in float32: exponents up to ``reach``, sums of so many products."""
    return max(8.0, terms / 4) * _FLOAT32 * (1 + reach)


def share_of_budget(error: Tensor, budget: Budget) -> Tensor:
    """The error (float64 ``[T, H, Dv]``) in budgets, per row and head; above 1 is wrong, no error is 0 of anything."""
    shares = [_ratio(_norm(error), budget.norm), _ratio(_peak(error), budget.peak)]
    return torch.maximum(*shares)


def score_bound(rows: UnpagedAttention, params: AttentionParams) -> Tensor:
    """``S`` of the module's formula, float64 ``[T, H]``: how large a score each row and head can meet."""
    key_norm = _norm(rows.keys.double()).t().contiguous()
    longest = torch.zeros(rows.query.shape[:2], dtype=torch.float64, device=rows.query.device)
    for some, keys in _pieces(rows):
        seen = rows.sees_packed(params, some, keys)
        most = torch.where(seen, key_norm[:, None, keys], 0.0).amax(dim=2)
        longest[some] = most.t().repeat_interleave(params.group_size, dim=1)
    bound = abs(params.softmax_scale) * _norm(rows.query.double()) * longest
    if params.logits_soft_cap:
        bound = bound.clamp(max=params.logits_soft_cap)
    if params.alibi_slopes is not None:
        slopes = torch.tensor(params.alibi_slopes, dtype=torch.float64, device=bound.device).abs()
        bound = bound + slopes * rows.places.num_keys.double()[:, None]
    return bound


def _pieces(rows: UnpagedAttention) -> Iterator[tuple[slice, slice]]:
    """Yield rows, and the keys of their requests: short requests together, a long one in pieces.

    Rows of requests without keys are left out, or stand beside keys that they do not see.
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
    """What summing n exponentials in float32, in any sensible order, and rounding the logarithm may cost."""
    growth = torch.sqrt(torch.ceil(rows.places.num_keys.double() / 16)).clamp(min=1)[:, None]
    return 2 * K * _FLOAT32 * growth * lse.abs().nan_to_num(posinf=1.0).clamp(min=1)


def _lse_loss(lse: Tensor, low: Tensor) -> Tensor:
    """What an honest low-precision run loses, a few times over."""
    return K * torch.where(lse == low, 0.0, (lse - low).abs())


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def _peak(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1)


def _ratio(error: Tensor, budget: Tensor) -> Tensor:
    """``error / budget`` with 0/0 = 0; NaN errors count as infinite."""
    share = torch.where(error == 0, torch.zeros_like(error), error / budget)
    return torch.nan_to_num(share, nan=math.inf, posinf=math.inf)
