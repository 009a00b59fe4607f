"""What kernels share: number formats, lookups of requests and slots, and the keys that a row sees.

A cache of codes is uint8 to a kernel, which encodes and decodes float8 codes by shifts. So GPUs without float8
instructions can run it, and the interpreter examines the code that a GPU runs. Rounding and products also work
interpreted.
"""

import torch
import triton
import triton.language as tl

E4M3FN = 1
E5M2 = 2


@triton.jit
def decode_codes(codes, FORMAT: tl.constexpr):
    """Return the exact float32 values of uint8 codes in ``FORMAT`` (1: e4m3fn, 2: e5m2).

    Codes of NaN give NaN, and those of e5m2's infinities give infinities.
    """
    # A float16 can hold either format, with the sign first and the mantissa padded with zeros. For e5m2 that is the
    # value. For e4m3fn, with one more mantissa bit, the exponent is read as 8 too low.
    wide = codes.to(tl.uint16)
    magnitude = wide & 0x7F
    bits = ((wide & 0x80) << 8) | (magnitude << (7 if FORMAT == 1 else 8))
    if FORMAT == 1:
        bits = tl.where(magnitude == 0x7F, bits | 0x7E00, bits)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def encode_codes(x, FORMAT: tl.constexpr):
    """Return the uint8 codes of ``x`` (float32) in ``FORMAT`` (1: e4m3fn, 2: e5m2).

    Rounding is to nearest, ties to even. Values beyond the largest finite number, infinities included, saturate to its
    code; NaN gives the code of a NaN.
    """
    MANTISSA: tl.constexpr = 3 if FORMAT == 1 else 2
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15
    LIMIT: tl.constexpr = 0x43E00000 if FORMAT == 1 else 0x47600000  # bits of 448, of 57344
    DROPPED: tl.constexpr = 23 - MANTISSA
    wide = x.to(tl.uint32, bitcast=True)
    sign = (wide >> 24) & 0x80
    magnitude = wide & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    # Bits of positive floats have the same order as their values.
    magnitude = tl.minimum(magnitude, LIMIT)
    # Normal codes: add just under half a step, and one more unit if the code would be odd (ties to even). A carry out
    # of the mantissa correctly increments the exponent.
    odd = (magnitude >> DROPPED) & 1
    normal = ((magnitude + odd + ((1 << (DROPPED - 1)) - 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Subnormal codes: the same on the mantissa with its leading one, shifted to steps of the smallest number. A shift
    # of 25 or more leaves nothing, so larger ones (for zero and float32's subnormals) may be capped at 31.
    exponent = magnitude >> 23
    lowest: tl.constexpr = 128 - BIAS  # the smallest float32 exponent of a normal code
    shift = tl.minimum((DROPPED + lowest) - tl.minimum(exponent, lowest), 31)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    half = (tl.full(shift.shape, 1, tl.uint32) << (shift - 1)) - 1
    small = (significand + half + ((significand >> shift) & 1)) >> shift
    code = tl.where(exponent < lowest, small, normal)
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return ``x`` (float32) in ``DTYPE``, rounded to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        # The interpreter would truncate the low half, and change subnormal numbers. A NaN stays NaN.
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        high = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, up) >> 16
        return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """Return ``acc + a @ b``, accumulated in float32; float32 operands keep full precision, not tf32."""
    if INTERPRETED:
        # The interpreter multiplies the bits of bfloat16 as integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def find_request(block, query_start_loc, num_reqs, block_q):
    """Return the request of the ``block``-th block of rows, and the block's index within that request.

    Each request reserves one more number for a partial block: request ``r`` begins at number ``query_start_loc[r] //
    block_q + r``. Some numbers therefore have no row: they lie after the request's last row.
    """
    low = block * 0
    high = low + num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // block_q + middle <= block:
            low = middle
        else:
            high = middle
    return low, block - (tl.load(query_start_loc + low) // block_q + low)


@triton.jit
def find_slot(position, page_size, IS_SHIFT: tl.constexpr):
    """Return the page of a request that holds ``position``, and the slot in that page.

    IS_SHIFT: ``page_size`` is the binary logarithm of the page size, which avoids a division.
    """
    if IS_SHIFT:
        page = position >> page_size
        return page, position - (page << page_size)
    page = position // page_size
    return page, position - page * page_size


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


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""The float dtypes that the kernels read and write."""

CODE_FORMATS = {torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}
"""Float8 dtypes, and their formats in kernels; other dtypes are 0 there."""
