"""Triton mirror of `kvq.reference.rounding`, and the search of a code among thresholds."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq.kernels.rows import bits_of, from_bits


@triton.jit
def round_code(v, ROUNDING: tl.constexpr):
    """Round float32 of magnitude below 2^22 to int32."""
    if ROUNDING == "half_away":
        half = from_bits((bits_of(v) & -2147483648) | 0x3F000000)
        code = (v + half).to(tl.int32)
    elif ROUNDING == "half_even":
        # 1.5 * 2^23: the sum is rounded to an integer, ties to even.
        code = ((v + 12582912.0) - 12582912.0).to(tl.int32)
    else:
        code = v.to(tl.int32)
    return code


@triton.jit
def encode_e4m3(q, ROUNDING: tl.constexpr, HARDWARE: tl.constexpr):
    """Round float32 of magnitude at most 448 to e4m3fn, as int32 of its bits."""
    if HARDWARE and ROUNDING == "half_even":
        code = q.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = bits_of(q)
        exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, -6)
        to_unit_spacing = from_bits((130 - exponent) << 23)
        magnitude = round_code(tl.abs(q) * to_unit_spacing, ROUNDING)
        code = (magnitude + (exponent + 6) * 8) | ((bits >> 24) & 0x80)
    return code


@triton.jit
def decode_e4m3(code):
    """The float32 of e4m3fn bits held in int32: exact. `0x7F` and `0xFF` are NaN."""
    exponent = (code >> 3) & 15
    mantissa = (code & 7).to(tl.float32)
    normal = from_bits((exponent + 120) << 23) * (1.0 + mantissa * 0.125)
    magnitude = tl.where(exponent == 0, mantissa * 0.001953125, normal)
    magnitude = tl.where((code & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where((code & 0x80) != 0, -1.0, 1.0) * magnitude


@triton.constexpr_function
def probes(thresholds, bits, i):
    """The thresholds that decide binary digit `i` (the highest first), by the digits before it.

    Past the last threshold stands infinity, which no number reaches.
    """
    step = 1 << (bits - 1 - i)
    places = [j * 2 * step + step - 1 for j in range(1 << i)]
    return tuple(thresholds[p] if p < len(thresholds) else float("inf") for p in places)


@triton.constexpr_function
def padded_levels(levels, bits):
    """`2 ** bits` levels: the last repeats."""
    return levels + levels[-1:] * ((1 << bits) - len(levels))


@triton.constexpr_function
def half_of(table, upper):
    """The upper or the lower half of a table."""
    middle = len(table) // 2
    return table[middle:] if upper else table[:middle]


@triton.jit
def choose(digits, TABLE: tl.constexpr, FIRST: tl.constexpr):
    """The entry of a table of constants at the binary number `digits[FIRST:]`."""
    if len(TABLE) == 2:
        value = tl.where(digits[FIRST], TABLE[1], TABLE[0])
    else:
        value = tl.where(
            digits[FIRST],
            choose(digits, half_of(TABLE, True), FIRST + 1),
            choose(digits, half_of(TABLE, False), FIRST + 1),
        )
    return value


@triton.jit
def search_digits(z, THRESHOLDS: tl.constexpr, BITS: tl.constexpr):
    """The binary digits, highest first, of the number of thresholds `t` with `z >= t`.

    A bisection whose thresholds are compile-time constants.
    """
    digits = (z >= probes(THRESHOLDS, BITS, 0)[0],)
    for i in tl.static_range(1, BITS):
        digits = digits + (z >= choose(digits, probes(THRESHOLDS, BITS, i), 0),)
    return digits


@triton.jit
def from_digits(digits, BITS: tl.constexpr):
    """The int32 number of binary digits, highest first."""
    code = digits[BITS - 1].to(tl.int32)
    for i in tl.static_range(BITS - 1):
        code = code + tl.where(digits[i], 1 << (BITS - 1 - i), 0)
    return code


@triton.jit
def search_code(z, thresholds_ptr, COUNT: tl.constexpr, STEPS: tl.constexpr):
    """The number of the `COUNT` thresholds in memory with `z >= t`, for codebooks of many levels."""
    code = tl.zeros(z.shape, tl.int32)
    for i in tl.static_range(STEPS):
        step: tl.constexpr = 1 << (STEPS - 1 - i)
        probe = code + step
        t = tl.load(thresholds_ptr + probe - 1, mask=probe <= COUNT, other=float("inf"))
        code = tl.where(z >= t, probe, code)
    return code
