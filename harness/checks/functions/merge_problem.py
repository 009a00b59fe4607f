"""Two attention states to merge, as split KV, cascade and chunked context produce them, and the right result.

The states result from a cut between each request's context and its new tokens. A row's log-sum-exp is about the
logarithm of the number of keys that it sees on its side, and a side without keys is empty. Some rows and heads have
states that merges often get wrong: equal weights, weights that underflow, log-sum-exps at the limits of ``exp`` in
float32, one empty side, or two.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.harness.problem.rows import planted_inputs
from attncheck.harness.truth.tolerance import Budget, K, allowed_errors, float32_bracket
from attncheck.reference import Precision, merge_attn_states

RUBBISH = 3072.0
"""Magnitude of the values in the output of an empty state, with alternating signs. Every dtype can represent it."""

_KINDS = (
    ("cut", None),
    ("equal", "equal_scores"),
    ("no a", None),
    ("far below a", "large_scores"),
    ("cut", None),
    ("high", "large_scores"),
    ("no b", None),
    ("neither", None),
    ("needle in a", "needles"),
    ("low", "large_scores"),
    ("far below b", "large_scores"),
    ("cut", None),
    ("needle in b", "needles"),
    ("over", "large_scores"),
    ("opposite", "large_scores"),
    ("under", "large_scores"),
)
"""Kinds of states, assigned to rows and heads in turn, each with the value of a case's ``inputs`` that enables it.

Without that value, the state is that of the cut.
"""

_EDGE, _BEYOND = 80.0, 95.0
"""float32 ``exp`` is finite up to 88 and keeps full precision down to -87."""

_SPARE = 8
"""Columns of a wider output that a view omits."""


@dataclass(frozen=True)
class MergeProblem:
    """Two states, each with ``out`` ``[T, H, Dv]`` in the layer's dtype and float32 ``lse`` ``[T, H]``, on the CPU."""

    case: Case
    positions: tuple[tuple[int, int], ...]
    """(request, position) of each row."""
    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return DTYPES[self.case.layer.dtype]

    @cached_property
    def has_empty(self) -> bool:
        """Whether at least one state of a row and head is empty."""
        return bool((torch.isinf(self.lse_a) | torch.isinf(self.lse_b)).any())

    def row_name(self, row: int) -> str:
        """Return a readable name for a row."""
        request, position = self.positions[row]
        return f"request {request}, position {position}"

    def arguments(self, device: torch.device, rubbish: float = RUBBISH, *, swapped: bool = False) -> dict[str, Tensor]:
        """Return the four arguments in order, as new tensors, with ``rubbish`` in the outputs of empty states.

        With the input ``views``, the second state consists of views: columns of a wider output, and a transposed LSE.
        """
        states = [(self.out_a, self.lse_a), (self.out_b, self.lse_b)]
        (out_a, lse_a), (out_b, lse_b) = (
            (_littered(out, lse, rubbish).to(device), lse.to(device, copy=True))
            for out, lse in (reversed(states) if swapped else states)
        )
        if "views" in planted_inputs(self.case):
            wide = torch.full((*out_b.shape[:2], out_b.shape[2] + _SPARE), RUBBISH, dtype=out_b.dtype, device=device)
            wide[:, :, : out_b.shape[2]] = out_b
            out_b = wide[:, :, : out_b.shape[2]]
            lse_b = lse_b.t().contiguous().t()
        return {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


@dataclass(frozen=True)
class MergeTruth:
    """The merged state: ``out`` float64 ``[T, H, Dv]``, ``lse`` float64 ``[T, H]``, and the budget around them."""

    out: Tensor
    lse: Tensor
    budget: Budget


def build_merge(case: Case, seed: int) -> MergeProblem:
    """Return the states of ``case`` under ``seed``, with the same bits on every machine."""
    stream = RandomStream(seed, case.hash, "merge")
    layer, rows = case.layer, [(r, i) for r, spec in enumerate(case.batch) for i in range(spec.query_len)]
    contexts = [spec.context_len for spec in case.batch]
    shape = (len(rows), layer.num_heads)
    before = torch.tensor([max(contexts[r], 0) for r, _ in rows])[:, None].expand(shape)
    new = torch.tensor([max(i + 1 + min(contexts[r], 0), 0) for r, i in rows])[:, None].expand(shape)
    noise_a, noise_b = stream.uniform(*shape), stream.uniform(*shape)
    lse_a, lse_b = _log(before) + noise_a, _log(new) + noise_b
    inputs = planted_inputs(case)
    turn = (torch.arange(shape[0])[:, None] * 5 + torch.arange(shape[1])) % len(_KINDS)
    for number, (kind, needed) in enumerate(_KINDS):
        if needed is None or needed in inputs:
            here = turn == number
            a, b = _states_of(kind, noise_a[here], noise_b[here], lse_a[here], lse_b[here])
            lse_a[here], lse_b[here] = a, b
    dtype = DTYPES[layer.dtype]
    out_a, out_b = (stream.uniform(*shape, layer.value_head_size).to(dtype) for _ in range(2))
    positions = tuple((r, contexts[r] + i) for r, i in rows)
    return MergeProblem(case, positions, out_a, lse_a.float(), out_b, lse_b.float())


def merge_truth(problem: MergeProblem, device: torch.device) -> MergeTruth:
    """Return the merged state, and the error that a correct kernel may have.

    A correct kernel computes in float32 and rounds once. ``exp`` inherits the rounding of the largest log-sum-exp,
    because kernels that use powers of two first multiply it.
    """
    out_a, lse_a, out_b, lse_b = problem.arguments(device).values()
    out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    honest = Precision(torch.float32, None, problem.dtype)
    low_out, low_lse = merge_attn_states(out_a, lse_a, out_b, lse_b, precision=honest)
    weighted, _ = merge_attn_states(out_a.abs(), lse_a, out_b.abs(), lse_b)
    reach = torch.maximum(_finite_size(lse_a), _finite_size(lse_b))
    bracket = float32_bracket(reach, terms=2)
    norm, peak = allowed_errors([low_out.double() - out], out, bracket, weighted, problem.dtype)
    lse_loss = torch.where(lse == low_lse, 0.0, (lse - low_lse).abs())
    budget = Budget(norm, peak, bracket + K * lse_loss)
    if problem.case.tolerance is not None:
        budget = budget.scaled(problem.case.tolerance.factor)
    return MergeTruth(out, lse, budget)


def _states_of(kind: str, noise_a: Tensor, noise_b: Tensor, lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two log-sum-exps of the given kind, from those at the cut and from noise in [-2, 2)."""
    nothing = torch.full_like(noise_a, -torch.inf)
    needle = noise_a.abs() + 2
    match kind:
        case "equal":
            return noise_a, noise_a
        case "no a":
            return nothing, noise_b
        case "no b":
            return noise_a, nothing
        case "neither":
            return nothing, nothing
        case "far below a":
            return noise_a, noise_b - _BEYOND
        case "far below b":
            return noise_a - _BEYOND, noise_b
        case "high":
            return noise_a + _EDGE, noise_b + _EDGE
        case "low":
            return noise_a - _EDGE, noise_b - _EDGE
        case "over":
            return noise_a + _BEYOND, noise_b + _BEYOND
        case "under":
            return noise_a - _BEYOND, noise_b - _BEYOND
        case "opposite":
            return noise_a + _EDGE, noise_b - _EDGE
        case "needle in a":
            return noise_b + needle, noise_b
        case "needle in b":
            return noise_a, noise_a + needle
        case _:
            return lse_a, lse_b


def _littered(out: Tensor, lse: Tensor, rubbish: float) -> Tensor:
    signs = 1.0 - 2.0 * (torch.arange(out.shape[2]) % 2)
    litter = (signs * rubbish).to(out.dtype).expand_as(out)
    return torch.where(torch.isinf(lse)[:, :, None], litter, out)


def _log(counts: Tensor) -> Tensor:
    """Return logarithms in steps of 1/64, for equal bits on every machine; -inf for a count of 0."""
    logs = torch.log(counts.double().clamp(min=1))
    return torch.where(counts > 0, torch.round(logs * 64) / 64, -torch.inf)


def _finite_size(lse: Tensor) -> Tensor:
    return torch.where(torch.isinf(lse), 0.0, lse.double().abs())
