"""Number formats inside kernels: float8 codes by integers, rounding and products that the interpreter gets right, too.

A cache of codes is uint8 to a kernel, and codes are made and read by shifts: GPUs without float8 instructions run it,
and what the interpreter examines is what a GPU runs.
"""

import triton
import triton.language as tl

E4M3FN = 1
E5M2 = 2


@triton.jit
def decode_codes(codes, FORMAT: tl.constexpr):
    """What codes (uint8) of ``FORMAT`` (1: e4m3fn, 2: e5m2) stand for: float32, exactly.

    Codes of NaN are NaN, those of e5m2's infinities infinite.
    """
    # A float16 has room for either, with its sign in front and its mantissa filled up from below. Those of e5m2 it then
    # is; with one more bit of mantissa the exponent is read as 8 lower than it is.
    wide = codes.to(tl.uint16)
    magnitude = wide & 0x7F
    bits = ((wide & 0x80) << 8) | (magnitude << (7 if FORMAT == 1 else 8))
    if FORMAT == 1:
        bits = tl.where(magnitude == 0x7F, bits | 0x7E00, bits)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def encode_codes(x, FORMAT: tl.constexpr):
    """The codes (uint8) of ``x`` (float32) in ``FORMAT`` (1: e4m3fn, 2: e5m2).

    Rounded to nearest, ties to even; beyond the greatest finite number, infinities included, its code; NaN: a NaN's.
    """
    MANTISSA: tl.constexpr = 3 if FORMAT == 1 else 2
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15
    LIMIT: tl.constexpr = 0x43E00000 if FORMAT == 1 else 0x47600000  # bits of 448, of 57344
    DROPPED: tl.constexpr = 23 - MANTISSA
    wide = x.to(tl.uint32, bitcast=True)
    sign = (wide >> 24) & 0x80
    magnitude = wide & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    # Bits of positive floats are in the order of their values.
    magnitude = tl.minimum(magnitude, LIMIT)
    # Normal codes: all but half a step is added, and the other bit of it where the code would be odd. A carry out of
    # the mantissa is the next exponent, as it should be.
    odd = (magnitude >> DROPPED) & 1
    normal = ((magnitude + odd + ((1 << (DROPPED - 1)) - 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Codes below them: the same on the mantissa with its leading one, shifted to steps of the smallest number. From a
    # shift by 25 on nothing is left, so greater ones (zero and float32's own subnormals among them) may stop at 31.
    exponent = magnitude >> 23
    lowest: tl.constexpr = 128 - BIAS  # the first exponent, as float32 writes it, of a normal code
    shift = tl.minimum((DROPPED + lowest) - tl.minimum(exponent, lowest), 31)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    half = (tl.full(shift.shape, 1, tl.uint32) << (shift - 1)) - 1
    small = (significand + half + ((significand >> shift) & 1)) >> shift
    code = tl.where(exponent < lowest, small, normal)
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """``x`` (float32) in ``DTYPE``, rounded to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        # The interpreter would cut off the low half, and change subnormal numbers. A NaN stays one.
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        high = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, up) >> 16
        return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """``acc + a @ b``, added up in float32; operands of float32 are taken as they are, not as tf32."""
    if INTERPRETED:
        # The interpreter multiplies the bits of bfloat16.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision="ieee")
