"""Faults of the LSE alone: another base, a term left out, or the LSE of another row or head."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attncheck.harness.truth.score_hypotheses import largest_scores
from attncheck.harness.truth.truth import Truth


def lse_explanations(truth: Truth, got: Tensor, *, output_holds: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, LSE ``[T, H]``) of faults of the LSE alone. ``got``: the wrong LSE.

    ``output_holds``: whether the output is right. If not, both may be wrong for the same reason, and few faults are
    tried.
    """
    right = truth.lse
    yield "the LSE is -inf, as if no key were seen", torch.full_like(right, -math.inf)
    for base, name in ((2, "2"), (10, "10")):
        yield (
            f"the logarithm is to base {name} (declare lse_base, or multiply by ln {name})",
            right / math.log(base),
        )
    if truth.params.sinks is not None and output_holds:
        sinks = torch.tensor(truth.params.sinks, dtype=torch.float64, device=right.device)
        yield "the sinks are in the output but not in the LSE", right + torch.log1p(-torch.exp(sinks - right))
    if not output_holds:
        return
    top = largest_scores(truth.params, truth.rows)
    if top is not None:
        yield "the LSE is the largest score: the sum of the weights is missing", top
        rest = torch.nan_to_num(right - top, nan=-math.inf)
        yield "the largest score is missing: the LSE is the logarithm of the sum alone", rest
        yield "the logarithm of the sum is subtracted, not added", torch.nan_to_num(2 * top - right, nan=-math.inf)
        yield "the logarithm of the sum is to base 2, the largest score natural", top + rest / math.log(2)
        yield "the largest score is not scaled", top / truth.params.softmax_scale + rest
    yield "the LSE has the wrong sign", -right
    yield "the LSE is the sum of the weights, without its logarithm", right.exp()
    yield "the LSE is multiplied by the scale", right * truth.params.softmax_scale
    yield "the LSE is divided by the scale", right / truth.params.softmax_scale
    yield "the LSE is multiplied by ln(2)", right * math.log(2)
    number = truth.params.num_heads
    heads = torch.arange(number, device=right.device)
    source = (got[:, :, None] - right[:, None]).abs().nan_to_num(nan=0.0).sum(dim=0).argmin(dim=1)
    named = [f"head {head} has that of head {int(of)}" for head, of in enumerate(source.tolist()) if head != of][:3]
    yield "every head has the LSE of head 0", right[:, :1].expand_as(right)
    yield (
        "every head has the LSE of the first of its group",
        right[:, heads // truth.params.group_size * truth.params.group_size],
    )
    yield "the LSEs are in reversed order of heads", right.flip(1)
    yield f"LSEs are those of other heads: {', '.join(named)}", right[:, source]
    yield "the LSEs are laid out heads first", right.T.reshape(right.shape)
    if len(right) > 1:
        yield "every row has the LSE of the next row", right.roll(-1, 0)
        yield "every row has the LSE of the row before", right.roll(1, 0)
        yield "every row has the LSE of row 0", right[:1].expand_as(right)
