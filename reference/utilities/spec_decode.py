"""Between packed rows and one row of equal queries a request, as verifying speculated tokens wants them; views only."""

from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_positive_int


def reshape_query_for_spec_decode(query: Tensor, batch_size: int) -> Tensor:
    """``[n, H, D]`` as ``[batch_size, n // batch_size, H, D]``: a view, whatever the strides.

    Raises :class:`~attncheck.errors.ReferenceArgumentError` for other ranks, and where ``batch_size`` does not divide
    ``n``.
    """
    if query.dim() != 3:  # tokens, heads, head size
        raise ReferenceArgumentError("query.shape", tuple(query.shape), "[tokens, heads, head_size]")
    batch_size = require_positive_int("batch_size", batch_size)
    tokens, heads, head_size = query.shape
    if tokens % batch_size:
        raise ReferenceArgumentError("batch_size", batch_size, f"a divisor of the {tokens} tokens")
    return query.view(batch_size, tokens // batch_size, heads, head_size)


def reshape_attn_output_for_spec_decode(attn_output: Tensor) -> Tensor:
    """``[b, len, H, D]`` as ``[b * len, H, D]``, a view; ``[n, H, D]`` is returned as it is.

    Callers write through the result, so that strides whose first two axes do not merge are refused, as other ranks
    are, with :class:`~attncheck.errors.ReferenceArgumentError`.
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
