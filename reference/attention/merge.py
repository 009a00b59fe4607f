"""Merging of attention results over disjoint key sets: split KV, cascade, chunked context, context parallelism."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_float, require_same_device, require_shape
from attncheck.reference.attention.params import Precision


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
    tokens, heads, size = _shape_of_first(outs[0])
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


def _shape_of_first(out: Tensor) -> torch.Size:
    require_shape("outs[0]", out, None, None, None, legend="rows, heads, value size")
    return out.shape
