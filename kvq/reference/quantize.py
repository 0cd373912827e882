"""The write path (rotate, scale, encode, pack) and its inverse, one row at a time.

Every step is one float32 operation, rounded to nearest even, in the order written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvq.checks import (
    check_dtype,
    check_input,
    check_kind,
    check_same_device,
    check_tensor,
    check_values_are_there,
)
from kvq.codebooks import Codebook
from kvq.modes import LEVEL_GRIDS, Grid, Mode, Normalization, ScaleFit
from kvq.reference import scaling
from kvq.reference.hadamard import rotate, tree_sum, unrotate
from kvq.reference.packing import pack_codes, unpack_codes
from kvq.reference.rounding import (
    E4M3_MAX,
    Rounder,
    decode_e4m3,
    deterministic,
    encode_e4m3,
    half_away,
    stochastic,
)
from kvq.reference.trellis import level_table, trellis_codes, trellis_states
from kvq.scale_word import NAN_WORD, SMALLEST_NORMAL, StoredWord
from kvq.tier import QuantizedKV, word_dtype

#: Values worked on at once: on the CPU what stays in a core's cache, on a GPU what bounds memory.
_CHUNK_CPU = 2**18
_CHUNK_GPU = 2**26


def quantize(x: Tensor, mode: Mode) -> QuantizedKV:
    """Quantize each row of `x` to packed codes and one stored word.

    A row of zeros reads back as zeros. A row with a NaN or an infinity in it (or one that
    overflows on the way) becomes a NaN row: codes 0, word `0x7fc00000` (`0x7e00` where words are
    float16); other rows do not change.

    With float16 words a row whose word rounds to 0 reads as zeros too, and one whose word rounds
    to infinity is a NaN row. See `StoredWord.FLOAT16` for the lengths of rows that survive.

    Args:
        x: `[..., D]` float32, float16 or bfloat16, any strides; for rotated modes D divisible
            by 16.
        mode: How to store it.

    Returns:
        codes `[..., B]` uint8, first code in the low bits; words `[...]` float32 or float16 (see
        `kvq.tier.word_dtype`).

    Raises:
        TypeError: `x` has another dtype (float64 would be rounded first).
        ValueError: D does not suit the mode, or the mode rounds stochastically.

    Exactness: bit-exact across tiers and devices.
    Source: the int8, fp8, int4 and int2 modes follow vLLM #40633.
    """
    check_kind("mode", mode, Mode)
    return _quantize(x, mode, half_away if mode.rounding is None else deterministic(mode.rounding))


def quantize_stochastic(x: Tensor, mode: Mode, generator: torch.Generator) -> QuantizedKV:
    """`quantize` with stochastic rounding in place of the mode's own.

    Unbiased wherever no code is clamped, at twice the squared error. It stays in this tier: its
    bits depend on the generator and on nothing else that a kernel could reproduce.

    Args:
        x: As for `quantize`.
        mode: A mode that rounds, so not one with a codebook.
        generator: Where the uniform numbers come from.

    Raises:
        ValueError: The mode has a codebook.
    """
    check_kind("generator", generator, torch.Generator)
    if check_kind("mode", mode, Mode).rounding is None:
        raise ValueError(f"mode must round to do so stochastically, got {mode.name}")
    return _quantize(x, mode, stochastic(generator))


def dequantize(codes: Tensor, words: Tensor, mode: Mode, head_dim: int) -> Tensor:
    """Turn packed codes and words back into rows, in the original domain.

    Args:
        codes: `[..., B]` uint8.
        words: `[...]` float32 or float16, as the mode has them.
        mode: How they were stored.
        head_dim: D.

    Returns:
        `[..., D]` float32. A row whose word is not finite reads `0x7fc00000` in every lane.

    Raises:
        TypeError: `codes` is not uint8 or `words` not of the mode's dtype.
        ValueError: D does not suit the mode, or the shapes do not fit together.

    Exactness: bit-exact across tiers and devices.
    """
    check_kind("mode", mode, Mode)
    check_dtype("codes", check_tensor("codes", codes), torch.uint8)
    check_dtype("words", check_tensor("words", words), word_dtype(mode))
    check_same_device("words", words, "codes", codes)
    check_values_are_there("codes", codes)
    row_bytes = mode.bytes_per_row(head_dim)
    if codes.shape != (*words.shape, row_bytes):
        raise ValueError(
            f"codes must be {[*words.shape, row_bytes]} to go with words {list(words.shape)} "
            f"and head_dim {head_dim}, got {list(codes.shape)}"
        )
    flat_codes, flat_words = codes.reshape(-1, row_bytes), words.reshape(-1)
    out = torch.empty((len(flat_words), head_dim), dtype=torch.float32, device=codes.device)
    for rows in _chunks(out):
        out[rows] = _decode_rows(
            unpack_codes(flat_codes[rows], mode.bits, head_dim), flat_words[rows], mode
        )
    return out.reshape(*words.shape, head_dim)


def _quantize(x: Tensor, mode: Mode, rounder: Rounder) -> QuantizedKV:
    check_values_are_there("x", check_input("x", x))
    head_dim = x.shape[-1]
    row_bytes = mode.bytes_per_row(head_dim)
    flat = x.detach().reshape(-1, head_dim)
    codes = torch.empty((len(flat), row_bytes), dtype=torch.uint8, device=x.device)
    words = torch.empty(len(flat), dtype=word_dtype(mode), device=x.device)
    for rows in _chunks(flat):
        row_codes, words[rows] = _encode_rows(flat[rows], mode, rounder)
        codes[rows] = pack_codes(row_codes, mode.bits)
    return QuantizedKV(codes.reshape(*x.shape[:-1], row_bytes), words.reshape(x.shape[:-1]))


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Slices of whole rows. No row depends on another, so the cut cannot be seen."""
    values = _CHUNK_CPU if rows.device.type == "cpu" else _CHUNK_GPU
    step = max(1, values // rows.shape[1])
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _encode_rows(x: Tensor, mode: Mode, rounder: Rounder) -> tuple[Tensor, Tensor]:
    """Codes `[R, D]` (one each byte) and words `[R]` of rows `[R, D]`."""
    y = x.to(torch.float32)
    if mode.rotation is not None:
        y = rotate(y, mode.rotation)
        if mode.rotation.round_to_input:
            y = y.to(x.dtype).to(torch.float32)
    # An infinity or NaN in x reaches every lane of its block of y, so y tells of both.
    bad = ~torch.isfinite(y).all(-1)
    codes, words = _ENCODERS[mode.normalization](y.masked_fill(bad[:, None], 0.0), mode, rounder)
    bad |= scaling.is_nan_row(words, mode)
    return codes.masked_fill(bad[:, None], 0), scaling.fill_nan_words(words, bad)


def _encode_absmax(y: Tensor, mode: Mode, rounder: Rounder) -> tuple[Tensor, Tensor]:
    floating = mode.grid is Grid.E4M3
    absmax = y.abs().amax(-1)
    scale = scaling.floored_scale(absmax, E4M3_MAX if floating else mode.max_code)
    q = y * scaling.reciprocal(scale)[:, None]
    if floating:
        return encode_e4m3(q.clamp(-E4M3_MAX, E4M3_MAX), rounder), scale
    codes = rounder(q).clamp(-mode.max_code - 1, mode.max_code)
    return codes.to(torch.int8).view(torch.uint8), scale


def _encode_zero_range(y: Tensor, mode: Mode, rounder: Rounder) -> tuple[Tensor, Tensor]:
    low, high = y.amin(-1).clamp_max(0.0), y.amax(-1).clamp_min(0.0)
    scale = scaling.truncate_scale(scaling.floored_scale(high - low, mode.max_code))
    inverse = scaling.reciprocal(scale)
    zero_point = rounder(-low * inverse).clamp(0, mode.max_code)
    codes = rounder(y * inverse[:, None] + zero_point[:, None]).clamp(0, mode.max_code)
    return codes.to(torch.uint8), scaling.encode_zero_point(scale, zero_point)


def _encode_clamped_range(y: Tensor, mode: Mode, rounder: Rounder) -> tuple[Tensor, Tensor]:
    low, high = y.amin(-1), y.amax(-1)
    scale = scaling.floored_scale(high - low, mode.max_code)
    zero_point = rounder(-low / scale).clamp(0, mode.max_code)
    q = y * scaling.reciprocal(scale)[:, None] + zero_point[:, None]
    codes = rounder(q).clamp(0, mode.max_code)
    return codes.to(torch.uint8), scaling.encode_zero_point(scale, zero_point)


def _encode_min_range(y: Tensor, mode: Mode, rounder: Rounder) -> tuple[Tensor, Tensor]:
    fold = 1.0 / mode.gain(y.shape[-1])
    low, high = y.amin(-1), y.amax(-1)
    smallest = scaling.round_to_float16((low + 0.0) * fold)
    step = (high - low) / scaling.constant(mode.max_code, y)
    scale = scaling.floored_scale_16(step * fold)
    q = (y * fold - smallest[:, None]) * scaling.reciprocal(scale)[:, None]
    codes = rounder(q).nan_to_num(0.0).clamp(0, mode.max_code)
    return codes.to(torch.uint8), scaling.encode_float16_pair(scale, smallest)


def _encode_codebook(y: Tensor, mode: Mode, rounder: Rounder) -> tuple[Tensor, Tensor]:
    del rounder  # a codebook compares with thresholds, a trellis is searched
    head_dim = y.shape[-1]
    squares = tree_sum(y * y)
    norm = scaling.square_root(squares)
    gain = mode.gain(head_dim)
    if mode.normalization is Normalization.RMS:
        inverse = scaling.constant(math.sqrt(head_dim), y) / norm
        unit = norm / scaling.constant(math.sqrt(head_dim) * gain, y)
    else:
        signed_max = y.gather(-1, y.abs().argmax(-1, keepdim=True))[..., 0]
        inverse = scaling.reciprocal(signed_max)
        unit = signed_max * (1.0 / gain)
    z = y * inverse[:, None]
    zero = squares < SMALLEST_NORMAL
    if mode.gains:
        gains, none = _best_gains(y, z, mode)
        z, zero = z * gains[:, None], zero | none
    if mode.trellis is not None:
        codes = trellis_codes(z, mode.trellis)
    else:
        codes = _count_thresholds(z, mode.codebook)
    words, denominator = _fit_word(y, codes, squares, norm, unit, mode)
    zero |= denominator == 0.0
    if mode.word is StoredWord.FLOAT16:
        words = words.to(torch.float16)
        zero |= words == 0.0
    words = words.masked_fill(zero, 0.0).masked_fill(~torch.isfinite(squares), math.nan)
    return codes.masked_fill(zero[:, None], 0), words


def _best_gains(y: Tensor, z: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
    """The gain of each row `[R]` whose codes leave the smallest squared error, and if none does.

    With `c` the levels of the codes of `z * gain`, least squares leaves `|y|^2` less the merit
    `<y, c>^2 / <c, c>`, and the first of the largest merits wins. The word has no part in it, so
    16-bit words have the codes of 32-bit ones. A gain has no merit where `<c, c>` is 0, nor where
    both sums overflow.
    """
    assert mode.codebook is not None
    levels = _levels(mode, y.device)
    best = torch.full(y.shape[:1], -1.0, dtype=torch.float32, device=y.device)
    gains = torch.full_like(best, mode.gains[0])
    for gain in mode.gains:
        c = levels[_count_thresholds(z * gain, mode.codebook).to(torch.int32)]
        yc, cc = tree_sum(y * c), tree_sum(c * c)
        merit = (yc * yc) / cc
        better = (merit > best) & (cc != 0.0)
        best, gains = merit.where(better, best), gains.masked_fill(better, gain)
    return gains, best < 0.0


def _fit_word(
    y: Tensor, codes: Tensor, squares: Tensor, norm: Tensor, unit: Tensor, mode: Mode
) -> tuple[Tensor, Tensor]:
    """The words of rows of levels, 1/N folded in, and the denominators of the fit."""
    fold = 1.0 / mode.gain(y.shape[-1])
    if mode.scale_fit is ScaleFit.UNIT:
        return unit, torch.ones_like(unit)
    c = _numbers(codes, mode)
    if mode.scale_fit is ScaleFit.LEAST_SQUARES:
        numerator, denominator = tree_sum(y * c), tree_sum(c * c)
    elif mode.scale_fit is ScaleFit.NORM_MATCH:
        # A row that was divided by a negative number keeps its sign.
        numerator = torch.copysign(norm, unit)
        denominator = scaling.square_root(tree_sum(c * c))
    else:
        numerator, denominator = squares, tree_sum(y * c)
    return (numerator / denominator) * fold, denominator


def _count_thresholds(z: Tensor, codebook: Codebook | None) -> Tensor:
    """For each `z` the number of thresholds `t` with `z >= t`: its code, uint8."""
    assert codebook is not None
    thresholds = torch.tensor(codebook.thresholds, dtype=torch.float32, device=z.device)
    return torch.bucketize(z, thresholds, out_int32=True, right=True).to(torch.uint8)


def _levels(mode: Mode, device: torch.device) -> Tensor:
    """`[2 ** bits]` float32: the level of every code; codes past the last read as the last."""
    assert mode.codebook is not None
    levels = mode.codebook.levels
    padded = levels + levels[-1:] * (2**mode.bits - len(levels))
    return torch.tensor(padded, dtype=torch.float32, device=device)


def _decode_rows(codes: Tensor, words: Tensor, mode: Mode) -> Tensor:
    """Rows `[R, D]` float32 of codes `[R, D]` and words `[R]`."""
    if mode.word is StoredWord.FLOAT32_ZERO_POINT:
        scale, zero_point = scaling.decode_zero_point(words)
        y = (codes.to(torch.float32) - zero_point[:, None]) * scale[:, None]
    elif mode.word is StoredWord.FLOAT16_PAIR:
        scale, smallest = scaling.decode_float16_pair(words)
        y = smallest[:, None] + codes.to(torch.float32) * scale[:, None]
    else:
        y = _numbers(codes, mode) * words.to(torch.float32)[:, None]
    if mode.rotation is not None:
        if not mode.folds_gain:
            y = y * (1.0 / mode.gain(y.shape[-1]))
        y = unrotate(y, mode.rotation)
    if mode.rotation is not None or mode.grid in LEVEL_GRIDS:
        y = y + 0.0
    nan = torch.full((), NAN_WORD, dtype=torch.int32, device=y.device).view(torch.float32)
    return torch.where(scaling.is_nan_row(words, mode)[:, None], nan, y)


def _numbers(codes: Tensor, mode: Mode) -> Tensor:
    """What codes stand for before the scale, float32."""
    if mode.grid is Grid.SIGNED:
        return codes.view(torch.int8).to(torch.float32)
    if mode.grid is Grid.E4M3:
        return decode_e4m3(codes)
    if mode.trellis is not None:
        return level_table(mode.trellis, codes.device)[trellis_states(codes, mode.trellis)]
    return _levels(mode, codes.device)[codes.to(torch.int32)]


_ENCODERS: dict[Normalization, Callable[[Tensor, Mode, Rounder], tuple[Tensor, Tensor]]] = {
    Normalization.ABSMAX: _encode_absmax,
    Normalization.ZERO_RANGE: _encode_zero_range,
    Normalization.CLAMPED_RANGE: _encode_clamped_range,
    Normalization.MIN_RANGE: _encode_min_range,
    Normalization.RMS: _encode_codebook,
    Normalization.SIGNED_MAX: _encode_codebook,
}
