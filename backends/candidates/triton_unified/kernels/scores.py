"""Scores in kernels: the keys that a row sees, and the soft cap."""

import triton
import triton.language as tl


@triton.jit
def row_span(position, seq_len, left, right, chunk, HAS_LEFT: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """Return the range ``lo <= j < hi`` of keys that the row at ``position`` sees; empty if ``lo >= hi``.

    Both ends never decrease with ``position``. left, right: inclusive distances; right: 0 for causal attention. left is
    read only with HAS_LEFT, chunk only with HAS_CHUNK.
    """
    lo = position * 0
    hi = tl.minimum(lo + seq_len, position + right + 1)
    if HAS_LEFT:
        lo = tl.maximum(lo, position - left)
    if HAS_CHUNK:
        # Triton's division rounds towards zero, and the position of a row may be negative.
        back = -((chunk - 1 - tl.minimum(position, 0)) // chunk)
        number = tl.where(position < 0, back, tl.maximum(position, 0) // chunk)
        lo = tl.maximum(lo, number * chunk)
        hi = tl.minimum(hi, (number + 1) * chunk)
    return lo, hi


@triton.jit
def tanh(x):
    """Return the float32 hyperbolic tangent, accurate to a few units in the last place; 1 or -1 for large arguments."""
    size = tl.abs(x)
    # exp(-2|x|) cannot overflow, and an underflow gives 1.
    fall = tl.exp2(size * -2.8853900817779268)
    large = (1.0 - fall) / (1.0 + fall)
    # Near 0 the difference cancels, so use the series up to the ninth power.
    square = x * x
    series = 1.0 + square * (
        -0.3333333333333333
        + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203))
    )
    return tl.where(size < 0.25, x * series, tl.where(x < 0, -large, large))
