"""Triton mirror of `kvq.reference.rounding`, and the search of a code among thresholds.

There are three searches, and all count the thresholds `t` with `z >= t` exactly:

* `search_digits`, a bisection whose thresholds are constants that comparisons select;
* `search_guess`: a cubic guesses the nearest threshold to within half an index, so one comparison
  with that threshold decides. Thresholds and levels are looked up in the registers of the warp;
* `search_table`, a bisection over a table in memory, for codebooks of many levels.
"""

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
        # Triton 3.6 packs the bytes of its own cast wrongly in some layouts.
        code = tl.inline_asm_elementwise(
            "{ .reg .f32 zero; .reg .b16 pair; mov.f32 zero, 0f00000000; "
            "cvt.rn.satfinite.e4m3x2.f32 pair, zero, $1; cvt.u32.u16 $0, pair; }",
            "=r,f",
            [q],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
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
def search_table(z, thresholds_ptr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """The number of the `COUNT` thresholds in memory with `z >= t`."""
    code = tl.zeros(z.shape, tl.int32)
    for i in tl.static_range(BITS):
        probe = code + (1 << (BITS - 1 - i))
        t = tl.load(thresholds_ptr + probe - 1, mask=probe <= COUNT, other=float("inf"))
        code = tl.where(z >= t, probe, code)
    return code


#: The bits of 1.5 * 2^23, on which `search_guess` counts; its low five bits are clear.
GUESS_BIAS = tl.constexpr(0x4B400000)


@triton.jit
def lane_entry(table_ptr):
    """Entry `lane` of a float32 table of 32: the warp's registers hold the table."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 lane; .reg .u64 address; mov.u32 lane, %laneid; "
        "mad.wide.u32 address, lane, 4, $1; ld.global.nc.f32 $0, [address]; }",
        "=f,l",
        [table_ptr.to(tl.int64)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def lane_lookup(table, index):
    """The entry of the warp's `table` at the low five bits of each index."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        "=f,f,r",
        [table, index],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def search_guess(z, thresholds, GUESS: tl.constexpr):
    """The number of thresholds with `z >= t`, plus `GUESS_BIAS`, as int32; see `guess_index`.

    The place between the lowest and the highest threshold saturates at 0 and 1, and the last sum
    is rounded to an integer, which its low bits hold.
    """
    place = tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [z, tl.full([], GUESS[0], tl.float32), tl.full([], GUESS[1], tl.float32)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    slope = tl.fma(place, tl.fma(place, GUESS[4], GUESS[3]), GUESS[2])
    nearest = bits_of(tl.fma(place, slope, 12582912.0))
    return nearest + (z >= lane_lookup(thresholds, nearest)).to(tl.int32)
