"""What a row is divided by, and the word that remembers it.

Divisors are tensors, never Python numbers: torch on CUDA divides by a number by multiplying with
its reciprocal. Square roots go through float64, since torch's float32 square root on the CPU is
not correctly rounded; rounding the float64 root once more is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvq.modes import Mode
from kvq.scale_word import (
    EXPONENT_MASK,
    EXPONENT_MASK_16,
    NAN_WORD,
    NAN_WORD_16,
    SCALE_FLOOR,
    SCALE_FLOOR_16,
    SCALE_MASK,
    ZERO_POINT_MASK,
    StoredWord,
)


def constant(value: float, like: Tensor) -> Tensor:
    """A float32 number as a tensor on the device of `like`, fit to be a divisor."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def square_root(x: Tensor) -> Tensor:
    """The correctly rounded float32 square root."""
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def reciprocal(x: Tensor) -> Tensor:
    """`RN(1 / x)`."""
    return constant(1.0, x) / x


def floored_scale(extent: Tensor, largest_code: float) -> Tensor:
    """`max(RN(extent / largest_code), 1e-6)`: the scale of an integer mode."""
    return (extent / constant(largest_code, extent)).clamp_min(SCALE_FLOOR)


def truncate_scale(scale: Tensor) -> Tensor:
    """Clear the low 4 mantissa bits, where the zero-point will sit."""
    return (scale.view(torch.int32) & SCALE_MASK).view(torch.float32)


def encode_zero_point(scale: Tensor, zero_point: Tensor) -> Tensor:
    """The word of a scale and a zero-point of 0 to 15 (float32, integral)."""
    bits = scale.view(torch.int32) & SCALE_MASK
    return (bits | zero_point.to(torch.int32)).view(torch.float32)


def decode_zero_point(words: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero-point (both float32) of words made by `encode_zero_point`."""
    bits = words.view(torch.int32)
    scale = (bits & SCALE_MASK).view(torch.float32)
    return scale, (bits & ZERO_POINT_MASK).to(torch.float32)


def round_to_float16(x: Tensor) -> Tensor:
    """`x` rounded to float16 and widened again; too large gives an infinity."""
    return x.to(torch.float16).to(torch.float32)


def floored_scale_16(scale: Tensor) -> Tensor:
    """`max(RN16(scale), 2^-24)`, widened to float32."""
    return round_to_float16(scale).clamp_min(SCALE_FLOOR_16)


def encode_float16_pair(scale: Tensor, smallest: Tensor) -> Tensor:
    """The word of two numbers that are float16 already: `smallest` in the high half."""
    low = scale.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF
    high = smallest.to(torch.float16).view(torch.int16).to(torch.int32) << 16
    return (high | low).view(torch.float32)


def decode_float16_pair(words: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and smallest value (both float32) of words made by `encode_float16_pair`."""
    bits = words.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16).to(torch.int16)
    scale, smallest = (half.view(torch.float16).to(torch.float32) for half in (low, high))
    return scale, smallest


def fill_nan_words(words: Tensor, bad: Tensor) -> Tensor:
    """`words`, float32 or float16, with the word of a NaN row where `bad`."""
    if words.dtype is torch.float16:
        return words.view(torch.int16).masked_fill(bad, NAN_WORD_16).view(torch.float16)
    return words.view(torch.int32).masked_fill(bad, NAN_WORD).view(torch.float32)


def is_nan_row(words: Tensor, mode: Mode) -> Tensor:
    """Whether each word marks a NaN row: a number in it is not finite.

    Args:
        words: `[...]` float32 or float16.
        mode: Says what the words hold.

    Returns:
        `[...]` bool.
    """
    if mode.word is StoredWord.FLOAT16:
        return (words.view(torch.int16) & EXPONENT_MASK_16) == EXPONENT_MASK_16
    bits = words.view(torch.int32)
    if mode.word is StoredWord.FLOAT16_PAIR:
        exponents = torch.stack((bits, bits >> 16)) & EXPONENT_MASK_16
        return (exponents == EXPONENT_MASK_16).any(0)
    return (bits & EXPONENT_MASK) == EXPONENT_MASK
