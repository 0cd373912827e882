"""Stored rows as exact numbers: what attention in float64 reads.

The arithmetic of `kvq.reference.quantize.dequantize`, without its float32 roundings.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvq.checks import check_dtype, check_kind, check_shape, check_tensor
from kvq.modes import Grid, Mode
from kvq.reference import scaling
from kvq.reference.hadamard import unrotate
from kvq.reference.packing import unpack_codes
from kvq.reference.rounding import decode_e4m3
from kvq.reference.trellis import level_table, trellis_states
from kvq.scale_word import StoredWord
from kvq.tier import word_dtype


def dequantize_exact(codes: Tensor, words: Tensor, mode: Mode, head_dim: int) -> Tensor:
    """Turn packed codes and words back into rows, in float64 from beginning to end.

    Args:
        codes: `[..., B]` uint8.
        words: `[...]` float32 or float16, as the mode has them.
        mode: How they were stored.
        head_dim: D.

    Returns:
        `[..., D]` float64, in the original domain. A row whose word is not finite is NaN.

    Raises:
        TypeError: `codes` is not uint8 or `words` not of the mode's dtype.
        ValueError: D does not suit the mode, or the shapes do not fit together.

    Exactness: in the rotated domain the numbers are exact: a float64 holds the product of two
    float32, and the sum of a float16 and of a 4-bit multiple of another. Undoing the rotation
    then rounds in float64.
    """
    row_bytes = check_kind("mode", mode, Mode).bytes_per_row(head_dim)
    check_dtype("codes", check_tensor("codes", codes), torch.uint8)
    if codes.shape[-1:] != (row_bytes,):
        raise ValueError(
            f"codes must hold {head_dim} codes of {mode.bits} bits along the last axis, "
            f"got shape {list(codes.shape)}"
        )
    c = unpack_codes(codes, mode.bits, head_dim)
    check_dtype("words", check_tensor("words", words), word_dtype(mode))
    check_shape("words", words, tuple(codes.shape[:-1]), "one for each row of codes,")
    if mode.word is StoredWord.FLOAT32_ZERO_POINT:
        scale, zero_point = _columns(*scaling.decode_zero_point(words))
        y = (c - zero_point) * scale
    elif mode.word is StoredWord.FLOAT16_PAIR:
        scale, smallest = _columns(*scaling.decode_float16_pair(words))
        y = smallest + c * scale
    else:
        (scale,) = _columns(words)
        y = _numbers(c, mode) * scale
    if mode.rotation is not None:
        fold = 1.0 if mode.folds_gain else 1.0 / mode.gain(head_dim)
        y = unrotate(y * fold, mode.rotation)
    return y.masked_fill(scaling.is_nan_row(words, mode)[..., None], math.nan)


def _columns(*numbers: Tensor) -> tuple[Tensor, ...]:
    """Numbers of each row, `[...]`, as `[..., 1]` float64."""
    return tuple(number.to(torch.float64)[..., None] for number in numbers)


def _numbers(codes: Tensor, mode: Mode) -> Tensor:
    """What codes stand for before the scale, float64."""
    if mode.grid is Grid.SIGNED:
        return codes.view(torch.int8).to(torch.float64)
    if mode.grid is Grid.E4M3:
        return decode_e4m3(codes).to(torch.float64)
    if mode.trellis is not None:
        table = level_table(mode.trellis, codes.device, torch.float64)
        return table[trellis_states(codes, mode.trellis)]
    assert mode.codebook is not None
    levels = torch.tensor(mode.codebook.levels, dtype=torch.float64, device=codes.device)
    return levels[codes.to(torch.int64).clamp_max(len(levels) - 1)]
