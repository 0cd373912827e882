"""Exact dequantization against rational arithmetic with dense Hadamard matrices."""

from __future__ import annotations

import math
import re
import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kvq.codebooks import Codebook, Provenance, Recipe
from kvq.modes import INT4_FIRST_IMPLEMENTATION, MODES, Grid, Mode, Rotation
from kvq.reference import dequantize, quantize, signs, unpack_codes
from kvq.reference.exact import dequantize_exact
from kvq.scale_word import StoredWord
from kvq.trellis import Trellis

HEAD_DIM = 48  # blocks of 16
EVERY = [*MODES.values(), INT4_FIRST_IMPLEMENTATION]


def unpack_word(mode: Mode, word: float) -> tuple[Fraction, Fraction]:
    """Scale, and zero-point or smallest value."""
    raw = struct.pack("<f", word)
    if mode.word is StoredWord.FLOAT16_PAIR:
        scale, smallest = struct.unpack("<2e", raw)
        return Fraction(scale), Fraction(smallest)
    if mode.word is StoredWord.FLOAT32_ZERO_POINT:
        zero_point = raw[0] & 15
        (scale,) = struct.unpack("<f", bytes((raw[0] & 0xF0,)) + raw[1:])
        return Fraction(scale), Fraction(zero_point)
    return Fraction(word), Fraction(0)


def rotated_value(mode: Mode, code: int, word: float) -> Fraction:
    scale, other = unpack_word(mode, word)
    if mode.word is StoredWord.FLOAT16_PAIR:
        return other + code * scale
    if mode.word is StoredWord.FLOAT32_ZERO_POINT:
        return (code - other) * scale
    if mode.codebook is not None:
        return Fraction(mode.codebook.levels[code]) * scale
    if mode.grid is Grid.SIGNED:
        return (code - 256 if code > 127 else code) * scale
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    magnitude = (
        Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
        if exponent
        else Fraction(mantissa, 8) / 64
    )
    return (-magnitude if sign else magnitude) * scale


def trellis_value(trellis: Trellis, codes: list[int], channel: int) -> Fraction:
    """Before the scale: the level that the codes from a channel on, cyclically, name."""
    state = sum(
        codes[(channel + j) % len(codes)] << trellis.bits * j for j in range(trellis.window)
    )
    label = sum(((state & mask).bit_count() % 2) << b for b, mask in enumerate(trellis.masks))
    return trellis.steps[label] * Fraction(trellis.unit)


def unrotate(rotation: Rotation, y: list[Fraction]) -> list[Fraction]:
    size = rotation.block_size(len(y))
    row = signs(len(y), rotation).tolist()
    return [
        int(row[channel])
        * sum(
            (-1) ** (channel % size & i).bit_count() * y[channel // size * size + i]
            for i in range(size)
        )
        for channel in range(len(y))
    ]


def exact_row(mode: Mode, codes: Tensor, word: float) -> list[Fraction]:
    if mode.trellis is not None:
        values = [trellis_value(mode.trellis, codes.tolist(), i) for i in range(len(codes))]
        y = [value * Fraction(word) for value in values]
    else:
        y = [rotated_value(mode, code, word) for code in codes.tolist()]
    if mode.rotation is None:
        return y
    fold = 1 if mode.folds_gain else mode.gain(len(y))
    return unrotate(mode.rotation, [value / fold for value in y])


@pytest.mark.parametrize("mode", EVERY, ids=str)
def test_rows_are_exact_to_float64(mode):
    torch.manual_seed(0)
    x = torch.randn(6, HEAD_DIM) * torch.tensor([1, 1e-4, 3e3, 0, 1, 1])[:, None]
    x[4] += 5
    codes, words = quantize(x, mode)
    rows = dequantize_exact(codes, words, mode, HEAD_DIM)
    assert rows.dtype is torch.float64
    for row, packed, word in zip(rows, codes, words.tolist(), strict=True):
        expected = exact_row(mode, unpack_codes(packed, mode.bits, HEAD_DIM), word)
        largest = max(map(abs, expected))
        limit = 0 if mode.rotation is None else largest * Fraction(2) ** -48
        for actual, want in zip(row.tolist(), expected, strict=True):
            assert abs(Fraction(actual) - want) <= limit


@pytest.mark.parametrize("mode", EVERY, ids=str)
def test_dequantize_is_the_float32_of_it(mode):
    torch.manual_seed(1)
    codes, words = quantize(torch.randn(2, 50, 64), mode)
    exact = dequantize_exact(codes, words, mode, 64)
    error = (dequantize(codes, words, mode, 64) - exact).abs().amax(-1)
    assert (error <= exact.abs().amax(-1) * 2**-20).all()
    if mode.rotation is None:
        assert torch.equal(exact.to(torch.float32), dequantize(codes, words, mode, 64))


@pytest.mark.parametrize("word", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", EVERY, ids=str)
def test_a_word_that_is_not_finite_makes_its_row_nan(mode, word):
    codes, words = quantize(torch.ones(3, 32), mode)
    words[1] = word
    rows = dequantize_exact(codes, words, mode, 32)
    assert rows[1].isnan().all()
    assert rows[[0, 2]].isfinite().all()


def test_codes_past_the_last_level_read_as_the_last():
    """Three levels in two bits: whatever lies in memory can be read, as in `dequantize`."""
    three = Codebook(
        "three",
        (-1.0, 0.0, 1.0),
        (-0.5, 0.5),
        Recipe("norm", 3, symmetric=True),
        Provenance("made up"),
    )
    mode = MODES["int2_per_token_head"].with_codebook(three)
    codes, words = torch.full((1, 8), 0xFF, dtype=torch.uint8), torch.ones(1)
    exact = dequantize_exact(codes, words, mode, 32)
    assert torch.equal(exact.to(torch.float32), dequantize(codes, words, mode, 32))
    assert torch.equal(exact, dequantize_exact(codes & 0xAA, words, mode, 32))


CODES, WORDS = torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2)
BAD = {
    "codes dtype": (CODES.float(), WORDS, 32, TypeError, "codes must be uint8, got float32"),
    "words dtype": (CODES, WORDS.double(), 32, TypeError, "words must be float32, got float64"),
    "words shape": (
        CODES,
        torch.ones(3),
        32,
        ValueError,
        "words must be one for each row of codes, of shape [2], got [3]",
    ),
    "head_dim": (CODES, WORDS, 64, ValueError, "codes must hold 64 codes of 4 bits"),
    "rotation": (CODES, WORDS, 40, ValueError, "head_dim must be divisible by 16"),
}


@pytest.mark.parametrize(("codes", "words", "dim", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(codes, words, dim, error, message):
    with pytest.raises(error, match=re.escape(message)):
        dequantize_exact(codes, words, MODES["int4_per_token_head"], dim)
