"""Views between packed rows and one row of equally many queries per request, for verification of speculated tokens."""

from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_positive_int


def reshape_query_for_spec_decode(query: Tensor, batch_size: int) -> Tensor:
    """Return ``[n, H, D]`` as ``[batch_size, n // batch_size, H, D]``: a view, whatever the strides.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for another number of axes, or if ``batch_size`` does not
    divide ``n``.
    """
    if query.dim() != 3:  # tokens, heads, head size
        raise ReferenceArgumentError("query.shape", tuple(query.shape), "[tokens, heads, head_size]")
    batch_size = require_positive_int("batch_size", batch_size)
    tokens, heads, head_size = query.shape
    if tokens % batch_size:
        raise ReferenceArgumentError("batch_size", batch_size, f"a divisor of the {tokens} tokens")
    return query.view(batch_size, tokens // batch_size, heads, head_size)


def reshape_attn_output_for_spec_decode(attn_output: Tensor) -> Tensor:
    """Return ``[b, len, H, D]`` as a view ``[b * len, H, D]``; ``[n, H, D]`` is returned unchanged.

    Callers write through the result, so a copy is not allowed. Raise :class:`~attncheck.errors.ReferenceArgumentError`
    if the strides do not let the first two axes merge, or for another number of axes.
    """
    if attn_output.dim() == 3:  # tokens, heads, head size
        return attn_output
    if attn_output.dim() != 4:  # requests, tokens of each, heads, head size
        raise ReferenceArgumentError("attn_output.shape", tuple(attn_output.shape), "of 3 or 4 axes")
    requests, length, heads, head_size = attn_output.shape
    try:
        return attn_output.view(requests * length, heads, head_size)
    except RuntimeError:
        raise ReferenceArgumentError(
            "attn_output.stride()", attn_output.stride(), "such that the first two axes merge without a copy"
        ) from None
