"""Rows that are not ordinary: zero, tiny, huge, one-sided; by hand and at their limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvq.codebooks import Codebook, Provenance, Recipe
from kvq.modes import (
    HADAMARD,
    INT4_FIRST_IMPLEMENTATION,
    MODES,
    RANDOM_HADAMARD,
    Grid,
    Mode,
    Normalization,
    Rotation,
)
from kvq.modes import mode as find_mode
from kvq.reference import dequantize, hadamard_transform, quantize, signs, unpack_codes
from kvq.scale_word import StoredWord
from tests.cases import CODEBOOK_MODES, HEAD_DIMS, ROTATED_MODES
from tests.compare import assert_bit_exact

WIDE_WORDS = [mode for mode in CODEBOOK_MODES if mode.word is StoredWord.FLOAT32]
NARROW_WORDS = [mode for mode in CODEBOOK_MODES if mode.word is StoredWord.FLOAT16]
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=str)
INT8, FP8, INT4, INT2, AFFINE4 = (
    find_mode(name) for name in ("int8", "fp8", "int4", "int2", "affine4")
)
BARE_INT4, BARE_AFFINE4 = INT4.without_rotation(), AFFINE4.without_rotation()


def word_bits(words: Tensor) -> list[int]:
    if words.dtype is torch.float16:
        return [word & 0xFFFF for word in words.flatten().view(torch.int16).tolist()]
    return [word & 0xFFFFFFFF for word in words.flatten().view(torch.int32).tolist()]


def row(*lanes: float, length: int = 16) -> Tensor:
    """One row: the lanes, then zeros."""
    x = torch.zeros(1, length)
    x[0, : len(lanes)] = torch.tensor(lanes)
    return x


def codes_of(x: Tensor, mode: Mode) -> list[int]:
    return unpack_codes(quantize(x, mode).codes, mode.bits, x.shape[-1]).flatten().tolist()


def round_trip(x: Tensor, mode: Mode) -> Tensor:
    return dequantize(*quantize(x, mode), mode, x.shape[-1])


# -------------------------------------------------------------------------------------- by hand


def test_int8_by_hand() -> None:
    x = row(-127.0, -2.6, -2.4, -1.6, -1.4, -0.6, -0.4, 127.0)
    got = quantize(x, INT8)
    assert word_bits(got.words) == [0x3F800000]
    want = [-127, -3, -2, -2, -1, -1, 0, 127, *[0] * 8]
    assert got.codes.view(torch.int8).tolist() == [want]
    assert dequantize(*got, INT8, 16).tolist() == [want]


def test_fp8_by_hand() -> None:
    got = quantize(row(448.0, 17.0, -0.0, 2.0**-9, -1.0), FP8)
    assert word_bits(got.words) == [0x3F800000]
    assert got.codes[0, :6].tolist() == [0x7E, 0x58, 0x80, 0x01, 0xB8, 0x00]
    assert_bit_exact(
        dequantize(*got, FP8, 16)[0, :6], torch.tensor([448.0, 16.0, -0.0, 2.0**-9, -1.0, 0.0])
    )


def test_int4_by_hand() -> None:
    # The range is 15 from -5, so the scale is 1 and the zero-point 5.
    got = quantize(row(-5.0, 10.0, 0.4, 0.6, -1.6), BARE_INT4)
    assert word_bits(got.words) == [0x3F800005]
    assert unpack_codes(got.codes, 4, 16)[0, :6].tolist() == [0, 15, 5, 6, 3, 5]
    assert dequantize(*got, BARE_INT4, 16)[0, :6].tolist() == [-5.0, 10.0, 0.0, 1.0, -2.0, 0.0]


def test_affine4_by_hand() -> None:
    # The smallest value -5 (0xC500 as a float16) in the high half, the step 1 (0x3C00) in the low.
    got = quantize(row(-5.0, 10.0, 0.4, 0.6, -1.6), BARE_AFFINE4)
    assert word_bits(got.words) == [0xC5003C00]
    assert unpack_codes(got.codes, 4, 16)[0, :6].tolist() == [0, 15, 5, 6, 3, 5]
    assert dequantize(*got, BARE_AFFINE4, 16)[0, :6].tolist() == [-5.0, 10.0, 0.0, 1.0, -2.0, 0.0]


def test_int2_by_hand() -> None:
    # Rotated without signs, 3 in channel 0 is 3 in all 16 lanes: a norm of 12, z = 1, the highest
    # level; the word is 12 / (4 * 16).
    mode = Mode(
        "int2@hadamard",
        2,
        Grid.CODEBOOK,
        Normalization.RMS,
        StoredWord.FLOAT32,
        HADAMARD,
        codebook=INT2.codebook,
        scale_fit=INT2.scale_fit,
    )
    got = quantize(row(3.0), mode)
    assert got.words.tolist() == [0.1875]
    assert got.codes.tolist() == [[0xFF] * 4]
    top = torch.tensor(0x3FC1555D, dtype=torch.int32).view(torch.float32)
    assert_bit_exact(dequantize(*got, mode, 16), row(float(16 * (top * 0.1875))))
    got = quantize(row(-3.0), mode)
    assert got.codes.tolist() == [[0x00] * 4]


def test_the_word_of_int2_is_the_norm_over_d_to_the_3_2() -> None:
    x = row(3.0, 4.0, length=64)
    assert quantize(x, INT2).words.item() == pytest.approx(5.0 * 8 / 64**1.5, rel=1e-7)


# ------------------------------------------------------------------------------- zero and tiny


@every_mode
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_read_as_plus_zero_among_other_rows(mode: Mode, zero: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.full((5, 2, 64), zero, dtype=torch.float16)
    x[2] = torch.randn(2, 64, generator=generator).to(torch.float16)
    got = quantize(x, mode)
    assert got.words.isfinite().all()
    values = dequantize(*got, mode, 64)
    others = values[[0, 1, 3, 4]]
    sign_kept = mode.grid is Grid.E4M3
    assert_bit_exact(others, torch.full_like(others, zero if sign_kept else 0.0))
    alone = quantize(x[2], mode)
    assert_bit_exact(got.codes[2], alone.codes)
    assert_bit_exact(got.words[2], alone.words)


@pytest.mark.parametrize("mode", WIDE_WORDS, ids=str)
def test_the_smallest_row_of_a_codebook_mode(mode: Mode) -> None:
    # One lane of 2^-66 in 64 channels makes 64 rotated lanes of it, and a sum of squares of
    # 2^-126: the smallest that is no zero row.
    for lane, stored in ((2.0**-65, True), (2.0**-66, True), (0.9999 * 2.0**-66, False)):
        for sign in (1.0, -1.0):
            got = quantize(row(sign * lane, length=64), mode)
            assert bool(got.words != 0) == stored
            if not stored:
                assert not got.codes.any()
                assert word_bits(got.words) == [0]


@pytest.mark.parametrize(
    ("mode", "tiny", "small", "word"),
    [
        # Half a step of 1e-6 is where an integer row begins to be read as something.
        (INT8, 4.9e-7, 5.1e-7, 0x358637BD),
        (BARE_INT4, 4.8e-7, 5.1e-7, 0x358637B0),
        # Half the smallest e4m3fn.
        (FP8, 9.7e-10, 9.8e-10, 0x358637BD),
        # Half of 2^-24.
        (BARE_AFFINE4, 2.9e-8, 3.0e-8, 0x00000001),
    ],
    ids=str,
)
def test_the_floor_of_the_scale_flushes_smaller_rows(
    mode: Mode, tiny: float, small: float, word: int
) -> None:
    got = quantize(row(tiny), mode)
    assert word_bits(got.words) == [word]
    assert not dequantize(*got, mode, 16).any()
    got = quantize(row(small), mode)
    assert word_bits(got.words) == [word]
    assert dequantize(*got, mode, 16)[0].tolist().count(0.0) == 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_mode
def test_subnormal_rows_stay_finite(mode: Mode, dtype: torch.dtype) -> None:
    x = row(*[torch.finfo(dtype).smallest_normal / 4] * 5, length=64).to(dtype)
    got = quantize(x, mode)
    assert got.words.isfinite().all()
    assert dequantize(*got, mode, 64).isfinite().all()


# ------------------------------------------------------------------------------- signs of zero


@pytest.mark.parametrize("mode", ROTATED_MODES, ids=str)
def test_a_rotated_mode_never_reads_minus_zero(mode: Mode) -> None:
    # Rotated rows of few lanes, so that whole butterflies are zero.
    y = torch.zeros(64, 64)
    y[torch.arange(64), torch.arange(64)] = -1.0
    x = hadamard_transform(y, RANDOM_HADAMARD, inverse=True)
    values = round_trip(torch.cat([x, -x, y, torch.zeros(1, 64)]), mode)
    assert not (values.signbit() & (values == 0)).any()


def test_int8_and_fp8_keep_the_sign_of_their_product() -> None:
    lanes = torch.tensor([[0.0, -0.0, 1.0, -1.0]])
    assert_bit_exact(round_trip(lanes * 448, FP8), lanes * 448)
    assert codes_of(lanes * 127, INT8) == [0, 0, 127, 129]
    assert_bit_exact(round_trip(lanes * 127, INT8), torch.tensor([[0.0, 0.0, 127.0, -127.0]]))


# ------------------------------------------------------------------------------------ one-sided


def one_sided_rows() -> Tensor:
    """Eight rows of one sign and eight of the other, in the domain of the codes."""
    generator = torch.Generator().manual_seed(1)
    y = 10 + 2 * torch.rand(8, 128, generator=generator)
    return torch.cat([y, -y])


@pytest.mark.parametrize("rotation", [None, RANDOM_HADAMARD], ids=["unrotated", "rotated"])
def test_one_sided_rows_keep_their_offset(rotation: Rotation | None) -> None:
    y = one_sided_rows()
    mode, x = INT4, y
    if rotation is None:
        mode = BARE_INT4
    else:
        x = hadamard_transform(y, rotation, inverse=True)
    read = round_trip(x, mode)
    if rotation is not None:
        read = hadamard_transform(read, rotation)
    reach = y.abs().amax(-1, keepdim=True)
    assert ((read - y).abs() <= reach / 30 * (1 + 1e-5)).all()


def test_the_first_implementation_loses_one_sided_rows() -> None:
    # What the range with zero in it is for: their zero-point saturates.
    x = hadamard_transform(one_sided_rows(), RANDOM_HADAMARD, inverse=True)
    assert (round_trip(x, INT4_FIRST_IMPLEMENTATION) - x).abs().max() > 9


@pytest.mark.parametrize(
    ("mode", "least", "most"),
    [(INT4_FIRST_IMPLEMENTATION, 0.9, 1.1), (INT4, 0.2, 0.5), (AFFINE4, 0.05, 0.15)],
    ids=str,
)
def test_an_outlier_in_channel_0_shifts_the_rotated_row(
    mode: Mode, least: float, most: float
) -> None:
    # Column 0 of H is all ones. Relative error of the other 127 channels.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 128, generator=generator)
    x[:, 0] += 100
    error = (round_trip(x, mode) - x)[:, 1:].norm() / x[:, 1:].norm()
    assert least < error < most


def test_codes_stay_in_range_whatever_the_offset() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, 64, generator=generator)
    x = x * (0.01 + 9.99 * torch.rand(10_000, 1, generator=generator))
    x += 40 * torch.rand(10_000, 1, generator=generator) - 20
    for mode in (BARE_INT4, BARE_AFFINE4, INT4, AFFINE4):
        got = quantize(x, mode)
        # A code beyond 15 would spill into its neighbor: both would be read far off.
        error = (dequantize(*got, mode, 64) - x).norm(dim=-1) / x.norm(dim=-1)
        assert error.max() < 0.2
        if mode.rotation is None:
            codes = unpack_codes(got.codes, 4, 64)
            assert ((codes.amin(-1) == 0) | (codes.amax(-1) == 15)).all()


def test_int8_codes_keep_their_sign_and_stop_at_127() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        # From 1.3e-4, just above where the floor of the scale is felt, to 6.5e4.
        largest = 1.3e-4 * 10 ** (8.7 * torch.rand(20_000, 1, generator=generator))
        sign = torch.where(torch.rand(20_000, 8, generator=generator) < 0.5, -1.0, 1.0)
        x = (largest * sign).to(dtype)
        codes = quantize(x, INT8).codes.view(torch.int8)
        assert torch.equal(codes, (127 * sign).to(torch.int8))


def test_fp8_saturates_at_448_and_never_makes_a_nan() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20_000, 4, generator=generator) * 1e4
    codes = quantize(torch.cat([x, -x]), FP8).codes
    assert int((codes & 0x7F).max()) == 0x7E


# --------------------------------------------------------------------------------------- limits


@every_mode
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_finite_float16_row_has_a_finite_word(mode: Mode, head_dim: int) -> None:
    ones = torch.full((head_dim,), 65504.0)
    first = torch.zeros(head_dim)
    first[0] = 65504.0
    alternating = ones * torch.where(torch.arange(head_dim) % 2 == 0, 1.0, -1.0)
    # Times its own signs a row comes out of the rotation in one lane of each block.
    own = ones if mode.rotation is None else ones * signs(head_dim, mode.rotation)
    x = torch.stack([ones, -ones, first, -first, alternating, own, -own, own * 2.0**-30])
    if mode.word is StoredWord.FLOAT16:
        # A row in one lane may have a word up to twice that lane over N.
        x = x / 4
    got = quantize(x.to(torch.float16), mode)
    assert got.words.isfinite().all()
    assert dequantize(*got, mode, head_dim).isfinite().all()


@pytest.mark.parametrize("mode", WIDE_WORDS, ids=str)
def test_the_largest_row_of_a_codebook_mode(mode: Mode) -> None:
    # Its sum of squares, 64 x^2, must stay below 2^128.
    finite = torch.nextafter(torch.tensor(2.0**61), torch.tensor(0.0)).item()
    x = torch.cat([row(finite, length=64), row(2.0**61, length=64), row(1e30, length=64)])
    assert quantize(x, mode).words.isfinite().tolist() == [True, False, False]
    assert word_bits(quantize(x, mode).words)[1:] == [0x7FC00000] * 2


def test_the_largest_row_of_affine4() -> None:
    # From 65,520 on a float16 is infinite. The smallest value of these rows is that of lane 0, or
    # the step is a fifteenth of it.
    largest = (-65519.0, -65520.0, 15 * 65519.0, 15 * 65520.0)
    got = quantize(torch.cat([row(value) for value in largest]), BARE_AFFINE4)
    assert got.words.view(torch.int32)[[0, 2]].bitwise_and(0xFFFF).tolist() == [0x6C44, 0x7BFF]
    assert word_bits(got.words)[0] >> 16 == 0xFBFF
    assert [word_bits(got.words)[i] for i in (1, 3)] == [0x7FC00000] * 2
    assert not got.codes[[1, 3]].any()
    # Rotated, the smallest value is divided by N first: this row comes out in lane 0.
    x = signs(64, RANDOM_HADAMARD) * torch.tensor([[-65519.0], [-65520.0]])
    assert quantize(x, AFFINE4).words.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("mode", [INT8, FP8, INT4, BARE_INT4], ids=str)
def test_rows_of_integer_modes_below_2_to_the_120_are_finite(mode: Mode) -> None:
    largest = math.nextafter(2.0**120, 0.0)
    for head_dim in (32, 96, 128):
        x = torch.full((2, head_dim), float(torch.tensor(largest)))
        if mode.rotation is not None:
            x[0] *= signs(head_dim, mode.rotation)
        assert quantize(x, mode).words.isfinite().all()


def test_a_range_that_is_not_finite_makes_a_nan_row() -> None:
    x = torch.cat([row(3e38, -3e38), row(3e38, 3e38), row(-3e38)])
    for mode in (BARE_INT4, BARE_AFFINE4):
        got = quantize(x, mode)
        assert word_bits(got.words)[0] == 0x7FC00000
        assert not got.codes[0].any()
    assert quantize(x, BARE_INT4).words.isfinite().tolist() == [False, True, True]


@pytest.mark.parametrize("mode", NARROW_WORDS, ids=str)
def test_the_range_of_a_float16_word(mode: Mode) -> None:
    # From rounding to 0, over subnormal numbers, to rounding to infinity: the word is that of the
    # same mode with 32 bits, rounded, and so are the codes of every row that has one.
    wide = replace(mode, name="wide", word=StoredWord.FLOAT32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 128, generator=generator) * 2.0 ** torch.linspace(-30, 30, 400)[:, None]
    want, got = quantize(x, wide), quantize(x, mode)
    rounded = want.words.to(torch.float16)
    zero, infinite = rounded == 0, rounded.isinf()
    assert 40 < zero.sum() < 200
    assert 40 < infinite.sum() < 200
    assert (want.words[zero] != 0).all()
    words = rounded.masked_fill(zero, 0.0).view(torch.int16).masked_fill(infinite, 0x7E00)
    assert_bit_exact(got.words.view(torch.int16), words)
    assert_bit_exact(got.codes, want.codes.masked_fill((zero | infinite)[:, None], 0))
    ordinary = ~zero & ~infinite
    values = dequantize(*got, mode, 128)
    widened = dequantize(want.codes, rounded.float(), wide, 128)
    assert_bit_exact(values[ordinary], widened[ordinary])
    assert_bit_exact(values[zero], torch.zeros_like(values[zero]))
    assert set(values[infinite].view(torch.int32).flatten().tolist()) == {0x7FC00000}
    # What the docstring of the word says of rows of ordinary shape at this head size.
    length = x.norm(dim=-1)
    assert ordinary[(length >= 1e-5) & (length <= 1e6)].all()
    exact = (got.words.float() / want.words - 1).abs() <= 2.0**-11
    assert exact[(length >= 0.01) & (length <= 1e6)].all()


def test_a_word_of_minus_zero_is_a_zero_row() -> None:
    # The word of a signed maximum has its sign.
    mode = find_mode("smax4_search_w16")
    got = quantize(row(-1e-7, -2e-8, 3e-8, length=128), mode)
    assert word_bits(got.words) == [0]
    assert not got.codes.any()


@every_mode
@pytest.mark.parametrize("word", [0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345])
def test_any_word_that_is_not_finite_reads_as_a_nan_row(mode: Mode, word: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 32, generator=generator)
    got = quantize(x, mode)
    words = got.words.clone()
    if mode.word is StoredWord.FLOAT16:
        # Sign, exponent and the highest bits of the mantissa, or its lowest.
        word = (word >> 16) & 0x8000 | 0x7C00 | (word >> 13) & 0x3FF | word & 1
        words.view(torch.int16)[1] = word - 2**16 if word >= 2**15 else word
    else:
        words.view(torch.int32)[1] = word - 2**32 if word >= 2**31 else word
    values = dequantize(got.codes, words, mode, 32)
    assert set(values[1].view(torch.int32).tolist()) == {0x7FC00000}
    want = dequantize(*got, mode, 32)
    assert_bit_exact(values[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00, 0x7C01])
def test_either_half_of_a_pair_that_is_not_finite_reads_as_a_nan_row(half: int) -> None:
    codes = torch.zeros((2, 16), dtype=torch.uint8)
    words = torch.tensor([half << 16 | 0x3C00, 0xC000 << 16 | half], dtype=torch.int64)
    words = words.to(torch.int32).view(torch.float32)
    values = dequantize(codes, words, AFFINE4, 32)
    assert set(values.view(torch.int32).flatten().tolist()) == {0x7FC00000}


def test_codes_past_the_last_level_read_as_the_last_level() -> None:
    book = Codebook.from_exact(
        "three", (-1.0, 0.0, 1.0), Recipe("none", 3, symmetric=True), Provenance("by hand")
    )
    three = INT2.with_codebook(book).without_rotation()
    codes = torch.tensor([[0b11_10_01_00] * 4], dtype=torch.uint8)
    values = dequantize(codes, torch.tensor([2.0]), three, 16)
    assert values[0, :4].tolist() == [-2.0, 0.0, 2.0, 2.0]
    # In a byte each, most codes stand for nothing of their own.
    wide = replace(three, name="wide", bits=8)
    codes = torch.tensor([[0, 1, 2, 3, 4, 17, 254, 255] * 2], dtype=torch.uint8)
    values = dequantize(codes, torch.tensor([2.0]), wide, 16)
    assert values[0, :8].tolist() == [-2.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]


# ------------------------------------------------------------------- the stored scale encodes


def test_codes_are_those_of_the_stored_scale() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20_000, 128, generator=generator)
    got = quantize(x, BARE_INT4)
    word = got.words.view(torch.int32)
    zero_point = (word & 15).float()[:, None]
    scale = (word & ~15).view(torch.float32)[:, None]
    q = x * (torch.ones(()) / scale) + zero_point
    again = torch.trunc(q + torch.copysign(torch.tensor(0.5), q)).clamp(0, 15)
    assert torch.equal(unpack_codes(got.codes, 4, 128), again.to(torch.uint8))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    exact = (high - low) / torch.tensor(15.0)
    assert (scale <= exact).all()
    assert (scale / exact - 1).abs().max() <= 1.8e-6
    # With the scale before its low bits are cleared some codes differ.
    other = x * (torch.ones(()) / exact) + zero_point
    wrong = torch.trunc(other + torch.copysign(torch.tensor(0.5), other)).clamp(0, 15)
    assert not torch.equal(wrong, again)
