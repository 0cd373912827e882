"""Rows that meet a codebook: what they are divided by, their codes, the gain and the fit.

The part of `kvq.kernels.quantize` that has levels and thresholds.
"""

from __future__ import annotations

import math

import numpy as np
import triton
import triton.language as tl

from kvq.codebooks import to_float32
from kvq.kernels import launch
from kvq.kernels.rounding import (
    choose,
    from_digits,
    lane_entry,
    lane_lookup,
    padded_levels,
    search_digits,
    search_guess,
    search_table,
)
from kvq.kernels.rows import fold_signed_max, pick
from kvq.kernels.scaling import constant, divide, reciprocal

#: From this many levels on, a guess and a look-up in the warp's registers beat constants; in a
#: search, which keeps the row, a guess takes fewer registers from four levels on.
FEWEST_GUESSED_LEVELS = 5
FEWEST_SEARCHED_LEVELS = 4
#: How far a guessed index may be from its threshold's own; half an index is the limit.
GUESS_ERROR = 0.4


def guess_index(
    thresholds: tuple[float, ...], fewest: int = FEWEST_GUESSED_LEVELS
) -> tuple[float, ...]:
    """How to guess the index of the nearest threshold, for `search_guess`.

    Returns:
        `(scale, offset, c1, c2, c3)`: the place `w = scale * z + offset` is 0 at the lowest
        threshold and 1 at the highest, and `w * (c1 + w * (c2 + w * c3))` rises between them and
        comes within `GUESS_ERROR` of `i` at threshold `i`. So a number whose guess rounds to `i`
        is above threshold `i - 1` and below threshold `i + 1`, with room for rounding. Empty if no
        cubic does in float32, with fewer than `fewest` levels, or if the thresholds do not fit a
        warp.
    """
    count = len(thresholds)
    if not fewest <= count + 1 <= launch.WARP:
        return ()
    exact = 1.0 / (thresholds[-1] - thresholds[0])
    scale, offset = to_float32(exact), to_float32(-thresholds[0] * exact)
    if not (math.isfinite(scale) and math.isfinite(offset)):
        return ()
    powers = np.arange(1, 4)
    wanted = np.arange(count)
    places = (np.array(thresholds) - thresholds[0]) * exact
    cubic, *_ = np.linalg.lstsq(places[:, None] ** powers, wanted, rcond=None)
    cubic = np.array([to_float32(float(v)) for v in cubic])
    # Judged with the rounded numbers.
    found = np.array(thresholds) * scale + offset
    errors = np.abs(found[:, None] ** powers @ cubic - wanted)
    between = np.linspace(0.0, 1.0, 4096)[:, None] ** powers @ cubic
    if errors.max() > GUESS_ERROR or np.diff(between).min() <= 0:
        return ()
    return (scale, offset, *cubic.tolist())


@triton.constexpr_function
def table_size(bits):
    """Entries of a table of levels or thresholds: one for each code, and for each lane."""
    return max(launch.WARP, 1 << bits)


@triton.jit
def codebook_scale(y, squares, SPEC: tl.constexpr, R: tl.constexpr):
    """Multiplier and `unit` word of rows that meet a codebook."""
    if pick(SPEC, "normalization") == "rms":
        norm = tl.math.sqrt_rn(squares)
        multiplier = divide(constant(norm, pick(SPEC, "root")), norm)
        unit = divide(norm, constant(norm, pick(SPEC, "root_gain")))
    else:
        signed_max = fold_signed_max(y, pick(SPEC, "padded"), R)
        multiplier = reciprocal(signed_max)
        unit = signed_max * pick(SPEC, "fold")
    return multiplier, unit


@triton.constexpr_function
def count_gains(spec):
    """Gains that a row tries; 0 without a search."""
    return len(spec.gains)


@triton.constexpr_function
def _gain(spec, i):
    return spec.gains[i]


@triton.jit
def codebook_codes(
    y,
    multiplier,
    gain,
    table_ptr,
    SPEC: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
):
    """Codes of part `I`, and their levels if the scale is fitted to them (else the codes again).

    Guessed codes come with a bias above their low five bits, which packing takes off. Channels
    past the head size have a level of 0.
    """
    BITS: tl.constexpr = pick(SPEC, "bits")
    PART: tl.constexpr = pick(SPEC, "part")
    FITTED: tl.constexpr = pick(SPEC, "scale_fit") != "unit"
    z = y * multiplier[None, :]
    if count_gains(SPEC) > 0:
        z = z * gain
    if len(pick(SPEC, "guess")) > 0:
        thresholds = lane_entry(table_ptr + table_size(BITS))
        codes = search_guess(z, thresholds, pick(SPEC, "guess"))
        levels = lane_lookup(lane_entry(table_ptr), codes) if FITTED else codes
    elif len(pick(SPEC, "levels")) > 0:
        digits = search_digits(z, pick(SPEC, "thresholds"), BITS)
        codes = from_digits(digits, BITS)
        levels = choose(digits, padded_levels(pick(SPEC, "levels"), BITS), 0) if FITTED else codes
    else:
        count: tl.constexpr = pick(SPEC, "num_levels") - 1
        codes = search_table(z, table_ptr + table_size(BITS), count, BITS)
        levels = tl.load(table_ptr + codes) if FITTED else codes
    if FITTED and pick(SPEC, "head_dim") < PART * (I + 1):
        live = PART * I + tl.arange(0, PART)[:, None] < pick(SPEC, "head_dim")
        levels = tl.where(live, levels, 0.0)
    return codes, levels


@triton.jit
def renewed(x, SPEC: tl.constexpr):
    """A number as it is, which the compiler takes for another one.

    It would otherwise move products with it out of a loop, and keep a register for each.
    """
    if pick(SPEC, "ptx"):
        x = tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 0, 31, 0xffffffff;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
    return x


@triton.jit
def made_here(x, SPEC: tl.constexpr):
    """A float32 or int32 as it is, which the compiler makes before what the next call takes."""
    if pick(SPEC, "ptx"):
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
        )
    return x


@triton.jit
def gain_at(i, SPEC: tl.constexpr):
    """The gain of index `i`, which is known at run time only."""
    gain = tl.full([], _gain(SPEC, 0), tl.float32)
    for j in tl.static_range(1, count_gains(SPEC)):
        # A constant below 2^-126 would be a float64.
        gain = tl.where(i == j, tl.full([], _gain(SPEC, j), tl.float32), gain)
    return gain


@triton.jit
def choose_each(condition, left, right):
    """`tl.where` of two tuples of int32 `[words, R]`, tensor by tensor; `condition` is `[R]`."""
    chosen = ()
    for i in tl.static_range(len(left)):
        chosen = chosen + (tl.where(condition[None, :], left[i], right[i]),)
    return chosen


@triton.jit
def fitted_scale(squares, unit, yc, cc, SPEC: tl.constexpr):
    """The scale, and whether the fit has no denominator; `yc` and `cc` are sums over the row."""
    FIT: tl.constexpr = pick(SPEC, "scale_fit")
    if FIT == "unit":
        scale = unit
        empty = squares < 0.0
    else:
        if FIT == "least_squares":
            numerator = yc
            denominator = cc
        elif FIT == "norm_match":
            numerator = tl.math.sqrt_rn(squares)
            if pick(SPEC, "normalization") == "signed_max":
                # A row that was divided by a negative number keeps its sign.
                numerator = tl.where(unit < 0.0, -numerator, numerator)
            denominator = tl.math.sqrt_rn(cc)
        else:
            numerator = squares
            denominator = yc
        scale = divide(numerator, denominator) * pick(SPEC, "fold")
        empty = denominator == 0.0
    return scale, empty
