"""Triton mirror of `kvq.reference.scaling`: scales, and the words that remember them.

Divisors are tensors and division is `div_rn`: `/` is approximate on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq.kernels.rows import bits_of, from_bits, not_finite


@triton.jit
def divide(x, y):
    """`RN(x / y)`."""
    return tl.math.div_rn(x, y)


@triton.jit
def constant(like, VALUE: tl.constexpr):
    """A float32 number in the shape of `like`, fit to be a divisor."""
    return tl.full(like.shape, VALUE, tl.float32)


@triton.jit
def reciprocal(x):
    """`RN(1 / x)`."""
    return divide(constant(x, 1.0), x)


@triton.jit
def floored_scale(extent, LARGEST: tl.constexpr):
    """`max(RN(extent / LARGEST), 1e-6)`: the scale of an integer mode."""
    return tl.maximum(divide(extent, constant(extent, LARGEST)), 1e-6)


@triton.jit
def truncate_scale(scale):
    """Clear the low 4 mantissa bits, where the zero-point will sit."""
    return from_bits(bits_of(scale) & -16)


@triton.jit
def encode_zero_point(scale, zero_point):
    """The bits of the word of a scale and an int32 zero-point."""
    return (bits_of(scale) & -16) | zero_point


@triton.jit
def round_to_float16(x):
    """`x` rounded to float16 and widened again; too large gives an infinity."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def round_to_bfloat16(x):
    """`x` rounded to bfloat16 and widened, on the bits (the interpreter's cast truncates)."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(not_finite(x), x, from_bits(rounded))


@triton.jit
def half_bits(x):
    """The 16 bits of a float32 that is a float16 already, as int32."""
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def encode_float16_pair(scale, smallest):
    """The bits of the word of two numbers that are float16 already: `smallest` above."""
    return (half_bits(smallest) << 16) | half_bits(scale)


@triton.jit
def _from_half_bits(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_scale(bits, WORD: tl.constexpr):
    """Scale, offset and NaN mark of the bits of words, int32 or int16.

    The offset is the zero-point of a word that has one, or the smallest value of a pair.
    """
    if WORD == "float16":
        scale = _from_half_bits(bits)
        offset = scale * 0.0
        nan = (bits & 0x7C00) == 0x7C00
    elif WORD == "float32_zero_point":
        scale = from_bits(bits & -16)
        offset = (bits & 15).to(tl.float32)
        nan = not_finite(scale)
    elif WORD == "float16_pair":
        scale = _from_half_bits(bits)
        offset = _from_half_bits(bits >> 16)
        nan = ((bits & 0x7C00) == 0x7C00) | (((bits >> 16) & 0x7C00) == 0x7C00)
    else:
        scale = from_bits(bits)
        offset = scale * 0.0
        nan = not_finite(scale)
    return scale, offset, nan
