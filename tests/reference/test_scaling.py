"""Scales, zero-points and the layouts of the stored word, bit by bit."""

from __future__ import annotations

import math
import struct

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq.modes import MODES, Mode
from kvq.reference import scaling
from kvq.scale_word import NAN_WORD, NAN_WORD_16, StoredWord
from kvq.tier import word_dtype
from tests.compare import assert_bit_exact


def floats(*words: int) -> Tensor:
    """Float32 numbers from their bits."""
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.float32))


def bits(numbers: Tensor) -> list[int]:
    assert numbers.dtype is torch.float32
    return [word & 0xFFFFFFFF for word in numbers.flatten().view(torch.int32).tolist()]


def nearest_float32(value: mpmath.mpf) -> float:
    """Ties to even, from 60 digits."""
    exponent = int(mpmath.floor(mpmath.log(value, 2)))
    step = mpmath.mpf(2) ** (max(exponent, -126) - 23)
    return float(mpmath.nint(value / step) * step)


SAMPLE = [2.0, 3.0, 0.1, 1e-38, 1e-44, 3.4e38, 16777213.0, 1.0000001, 0.99999994, 5.0, 7.25e-20]


@pytest.mark.parametrize("value", SAMPLE)
def test_square_root_is_the_nearest_float32(value: float) -> None:
    x = torch.tensor(value, dtype=torch.float32)
    with mpmath.workdps(60):
        want = nearest_float32(mpmath.sqrt(mpmath.mpf(x.item())))
    assert scaling.square_root(x).item() == want


def test_square_roots_where_the_float32_root_of_torch_may_be_wrong() -> None:
    # numpy's float32 root is the processor's, which is correctly rounded.
    x = torch.arange(0, 0x7F800000, 1021, dtype=torch.int32).view(torch.float32)
    got = scaling.square_root(x)
    assert_bit_exact(got, torch.from_numpy(np.sqrt(x.numpy())))


@pytest.mark.parametrize("value", SAMPLE[:3] + SAMPLE[5:])
def test_reciprocal_is_the_nearest_float32(value: float) -> None:
    x = torch.tensor([value, -value], dtype=torch.float32)
    with mpmath.workdps(60):
        want = nearest_float32(1 / mpmath.mpf(x[0].item()))
    assert scaling.reciprocal(x).tolist() == [want, -want]


def test_divisors_are_float32_tensors() -> None:
    divisor = scaling.constant(math.sqrt(80), torch.empty(3, dtype=torch.float64))
    assert divisor.dtype is torch.float32
    assert divisor.shape == ()
    assert divisor.item() == struct.unpack("<f", struct.pack("<f", math.sqrt(80)))[0]


# Extent, largest code, and the bits of the scale.
SCALES = [
    (127.0, 127, 0x3F800000),
    (15.0, 15, 0x3F800000),
    (448.0, 448.0, 0x3F800000),
    (1.0, 127, 0x3C010204),
    (1.0, 15, 0x3D888889),
    # The floor, 1e-6: what falls below it, reaches it, and is just above.
    (0.0, 127, 0x358637BD),
    (1e-12, 15, 0x358637BD),
    (1.5e-5, 15, 0x358637BD),
    (1.5000002e-5, 15, 0x358637BE),
    (1.4999999e-5, 15, 0x358637BD),
    (1e-44, 448.0, 0x358637BD),
    (3e38, 15, 0x7D70BDC2),
    (math.inf, 15, 0x7F800000),
]


@pytest.mark.parametrize(("extent", "largest_code", "word"), SCALES)
def test_scale_of_an_integer_mode(extent: float, largest_code: float, word: int) -> None:
    extents = torch.tensor([extent, extent], dtype=torch.float32)
    assert bits(scaling.floored_scale(extents, largest_code)) == [word, word]


class TestZeroPoint:
    @pytest.mark.parametrize("zero_point", range(16))
    @pytest.mark.parametrize("scale_bits", [0x358637B0, 0x3F800000, 0x3F80000F, 0x7F7FFFFF])
    def test_sits_in_the_low_four_bits(self, scale_bits: int, zero_point: int) -> None:
        word = scaling.encode_zero_point(floats(scale_bits), torch.tensor([float(zero_point)]))
        assert bits(word) == [scale_bits // 16 * 16 + zero_point]
        scale, decoded = scaling.decode_zero_point(word)
        assert bits(scale) == [scale_bits // 16 * 16]
        assert_bit_exact(decoded, torch.tensor([float(zero_point)]))

    def test_truncation_clears_four_bits_and_no_other(self) -> None:
        scale = floats(0x3F80000F, 0x3F800010, 0x358637BD, 0x3FFFFFFF, 0x3F7FFFF0)
        want = [0x3F800000, 0x3F800010, 0x358637B0, 0x3FFFFFF0, 0x3F7FFFF0]
        assert bits(scaling.truncate_scale(scale)) == want

    @given(st.floats(2.0**-20, 2.0**120, width=32))
    def test_truncation_costs_at_most_fifteen_units_in_the_last_place(self, value: float) -> None:
        scale = torch.tensor(value, dtype=torch.float32)
        truncated = scaling.truncate_scale(scale)
        assert truncated <= scale
        assert 1 - truncated.double() / scale.double() <= 15 * 2.0**-23

    def test_words_are_not_changed_by_the_call(self) -> None:
        word = floats(0x3F80000F)
        scaling.decode_zero_point(word)
        scaling.truncate_scale(word)
        scaling.encode_zero_point(word, torch.zeros(1))
        assert bits(word) == [0x3F80000F]


class TestFloat16Pair:
    # The scale, the smallest value, and the word: the smallest value in the high half.
    PAIRS = (
        (1.0, 0.0, 0x00003C00),
        (1.0, -2.0, 0xC0003C00),
        (2.0**-24, 65504.0, 0x7BFF0001),
        (65504.0, -65504.0, 0xFBFF7BFF),
        (2.0**-14, -0.0, 0x80000400),
        (math.inf, 1.0, 0x3C007C00),
        (1.0, -math.inf, 0xFC003C00),
    )

    @pytest.mark.parametrize(("scale", "smallest", "word"), PAIRS)
    def test_layout(self, scale: float, smallest: float, word: int) -> None:
        got = scaling.encode_float16_pair(torch.tensor([scale]), torch.tensor([smallest]))
        assert bits(got) == [word]
        decoded = scaling.decode_float16_pair(got)
        assert_bit_exact(decoded[0], torch.tensor([scale]))
        assert_bit_exact(decoded[1], torch.tensor([smallest]))

    def test_all_float16_numbers_in_either_half(self) -> None:
        every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
        every = every[every.isfinite()].to(torch.float32)
        other = torch.full_like(every, -1.5)
        for scale, smallest in ((every, other), (other, every)):
            decoded = scaling.decode_float16_pair(scaling.encode_float16_pair(scale, smallest))
            assert_bit_exact(decoded[0], scale)
            assert_bit_exact(decoded[1], smallest)

    @pytest.mark.parametrize(
        ("value", "want"),
        [
            (1.0 + 2.0**-11, 1.0),
            (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),
            (65519.99, 65504.0),
            (65520.0, math.inf),
            (-65520.0, -math.inf),
            (2.0**-25, 0.0),
            (1.5 * 2.0**-25, 2.0**-24),
            (-(2.0**-26), -0.0),
        ],
    )
    def test_rounds_to_nearest_even(self, value: float, want: float) -> None:
        assert_bit_exact(scaling.round_to_float16(torch.tensor(value)), torch.tensor(want))

    @pytest.mark.parametrize(
        ("value", "want"),
        [
            (0.0, 2.0**-24),
            (2.0**-25, 2.0**-24),
            (2.0**-24, 2.0**-24),
            (1.5 * 2.0**-24, 2.0**-23),
            (0.1, 0.0999755859375),
            (65520.0, math.inf),
        ],
    )
    def test_the_scale_has_a_floor(self, value: float, want: float) -> None:
        assert_bit_exact(scaling.floored_scale_16(torch.tensor(value)), torch.tensor(want))


class TestNanRows:
    ONE_NUMBER = (
        (0x00000000, False),
        (0x80000000, False),
        (0x7F7FFFFF, False),
        (0xFF7FFFFF, False),
        (0x00000001, False),
        (0x7F800000, True),
        (0xFF800000, True),
        (0x7F800001, True),
        (NAN_WORD, True),
        (0xFFFFFFFF, True),
    )

    @pytest.mark.parametrize("name", ["int8", "fp8", "int4", "int2", "smax4"])
    @pytest.mark.parametrize(("word", "want"), ONE_NUMBER)
    def test_one_number(self, name: str, word: int, want: bool) -> None:
        mode = MODES[f"{name}_per_token_head"]
        assert scaling.is_nan_row(floats(word, 0x3F800000), mode).tolist() == [want, False]

    PAIR = (
        (0x00000000, False),
        (0x7BFF7BFF, False),
        (0xFBFFFBFF, False),
        # Finite as a float32: an infinity in the high half, and minus one.
        (0x7C000000, True),
        (0xFC000000, True),
        (0x00007C00, True),
        (0x0000FC00, True),
        (0x00007E01, True),
        (0x7E010000, True),
        (NAN_WORD, True),
        (0xFFFFFFFF, True),
        # Almost: exponents of 30 in both halves, and mantissas full of ones.
        (0x7BFF3C00, False),
        (0x03FF03FF, False),
    )

    @pytest.mark.parametrize(("word", "want"), PAIR)
    def test_pair(self, word: int, want: bool) -> None:
        mode = MODES["affine4_per_token_head"]
        assert scaling.is_nan_row(floats(word, 0x3C003C00), mode).tolist() == [want, False]

    @pytest.mark.parametrize("mode", MODES.values(), ids=str)
    def test_the_word_of_a_nan_row_marks_one_in_every_mode(self, mode: Mode) -> None:
        words = torch.zeros(3, dtype=word_dtype(mode))
        assert words.element_size() == mode.word.num_bytes
        words = scaling.fill_nan_words(words, torch.tensor([False, True, False]))
        assert scaling.is_nan_row(words, mode).tolist() == [False, True, False]
        if mode.word is StoredWord.FLOAT16:
            assert words.view(torch.int16).tolist() == [0, NAN_WORD_16, 0]
        else:
            assert words.view(torch.int32).tolist() == [0, NAN_WORD, 0]

    HALF = (
        (0x0000, False),
        (0x8000, False),
        (0x7BFF, False),
        (0x03FF, False),
        (0x7C00, True),
        (0xFC00, True),
        (0x7C01, True),
        (0xFFFF, True),
    )

    @pytest.mark.parametrize(("word", "want"), HALF)
    def test_half(self, word: int, want: bool) -> None:
        mode = MODES["lloyd4_w16_per_token_head"]
        words = torch.from_numpy(np.array([word, 0x3C00], dtype=np.uint16).view(np.float16))
        assert scaling.is_nan_row(words, mode).tolist() == [want, False]
