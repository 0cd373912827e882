"""The kernels against the reference, to the bit: interpreted without a GPU, compiled with one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq import reference
from kvq.analysis.planted_rows import planted_rows
from kvq.codebooks import CODEBOOKS, Codebook, Provenance, Recipe
from kvq.modes import (
    HADAMARD,
    INT4_FIRST_IMPLEMENTATION,
    MODES,
    RANDOM_HADAMARD,
    Mode,
    Rotation,
    ScaleFit,
)
from kvq.modes import mode as find_mode
from kvq.rounding import Rounding
from kvq.scale_word import StoredWord
from tests.cases import (
    VARIANTS,
    _even_levels,
    rows_beside_thresholds,
    rows_beside_zero_point_ties,
)
from tests.compare import assert_bit_exact

kernels = pytest.importorskip("kvq.kernels")
quantize = pytest.importorskip("kvq.kernels.quantize")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_parity(x: Tensor, mode: Mode) -> None:
    want = reference.quantize(x, mode)
    got = kernels.quantize(x, mode)
    assert_bit_exact(got.codes, want.codes, "codes")
    assert_bit_exact(got.words, want.words, "words")
    head_dim = x.shape[-1]
    assert_bit_exact(
        kernels.dequantize(*want, mode, head_dim),
        reference.dequantize(*want, mode, head_dim),
        "values",
    )


@pytest.mark.parametrize("mode", MODES.values(), ids=str)
def test_planted_rows(mode: Mode) -> None:
    # The interpreter searches some 30 rows a second.
    count = 512 if mode.trellis is None or DEVICE == "cuda" else 40
    assert_parity(planted_rows(0, count, 128, device=DEVICE), mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", VARIANTS.values(), ids=str)
def test_modes_that_anybody_can_make(mode: Mode) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_parity(planted_rows(0, 256, 96, device=DEVICE).to(dtype), mode)


def test_no_rows() -> None:
    got = kernels.quantize(torch.zeros(0, 3, 64, device=DEVICE), find_mode("int4"))
    assert got.codes.shape == (0, 3, 32)
    assert got.words.shape == (0, 3)
    assert kernels.dequantize(*got, find_mode("int4"), 64).shape == (0, 3, 64)


@pytest.mark.parametrize(
    "rotation", [HADAMARD, RANDOM_HADAMARD, Rotation(rounds=2), Rotation(seed=7)], ids=repr
)
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
@pytest.mark.parametrize("inverse", [False, True])
def test_hadamard_transform(rotation: Rotation, head_dim: int, inverse: bool) -> None:
    x = planted_rows(0, 96, head_dim, device=DEVICE)
    x = x[torch.isfinite(x).all(1) & (x.abs().amax(1) < 2.0**100)]
    # Below the normal numbers of bfloat16 too.
    x = torch.cat([x, torch.linspace(-1, 1, head_dim, device=DEVICE)[None] * 2.0**-128])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = x.to(dtype).nan_to_num(0.0, 0.0, 0.0)
        assert_bit_exact(
            kernels.hadamard_transform(rows, rotation, inverse=inverse),
            reference.hadamard_transform(rows, rotation, inverse=inverse),
        )


def test_an_inverse_divides_before_the_butterfly() -> None:
    """So that nothing overflows on the way."""
    large = torch.full((1, 64), 2.0**126, device=DEVICE)
    one = torch.zeros(1, 64, device=DEVICE)
    one[0, 0] = 2.0**126
    assert_bit_exact(kernels.hadamard_transform(large, HADAMARD, inverse=True), one)


@pytest.mark.parametrize(
    "book", [None, _even_levels("even_16", 16), _even_levels("even_200", 200, 1 / 128)]
)
def test_thresholds_belong_to_the_level_above(book: Codebook | None) -> None:
    """Numbers on thresholds, and their float32 neighbors: constants, and tables in memory."""
    for stem in ("smax2", "smax3", "smax4") if book is None else ("smax4",):
        mode = find_mode(stem).without_rotation()
        mode = mode if book is None else mode.with_codebook(book)
        assert mode.codebook is not None
        # Divided by a largest entry of 1 they stay what they are.
        thresholds = torch.tensor([t for t in mode.codebook.thresholds if abs(t) < 1])
        x = torch.zeros(3, 256)
        x[:, 0] = 1.0
        x[1, 1 : len(thresholds) + 1] = thresholds
        for row, towards in ((0, torch.inf), (2, -torch.inf)):
            near = torch.nextafter(thresholds, torch.tensor(towards))
            x[row, 1 : len(thresholds) + 1] = near
        packed = kernels.quantize(x.to(DEVICE), mode).codes.cpu()
        codes = reference.unpack_codes(packed, mode.bits, 256)[:, 1 : len(thresholds) + 1]
        below = [mode.codebook.thresholds.index(t) for t in thresholds.tolist()]
        above = [i + 1 for i in below]
        assert codes.tolist() == [above, above, below]


@pytest.mark.parametrize(
    "mode",
    [
        *(find_mode(name) for name in ("int8", "fp8")),
        *(
            find_mode(name).without_rotation()
            for name in ("int4", "affine4", "int2", "lloyd3", "smax4", "smax2_search_w16")
        ),
    ],
    ids=str,
)
def test_a_lane_that_is_not_finite_wherever_it_is(mode: Mode) -> None:
    """Without a rotation, which would spread it over the row."""
    x = planted_rows(0, 1, 32, device=DEVICE).nan_to_num(1.0).repeat(97, 1)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[32 * i : 32 * (i + 1)].fill_diagonal_(value)
    assert_parity(x, mode)
    codes, words = kernels.quantize(x, mode)
    assert not codes[:96].any()
    assert words[:96].isnan().all()
    assert words[96].isfinite()


@pytest.mark.parametrize("name", ["int8", "int4", "affine4", "lloyd2", "lloyd2_norm_match_w16"])
def test_any_word_that_is_not_finite_reads_as_a_nan_row(name: str) -> None:
    mode = find_mode(name)
    if mode.word is StoredWord.FLOAT16:
        bits = torch.tensor([0x7C00, -0x400, 0x7C01, 0x7FFF, -1, 0x3C00], dtype=torch.int16)
        words = bits.view(torch.float16)
    else:
        ends = [0x7C00, 0xFC00, 0x7E01] if mode.word is StoredWord.FLOAT16_PAIR else []
        bits = torch.tensor(
            [
                *(0x7F800000, -0x800000, 0x7F80000F, -0x7FFFF1, 0x7FC0000F, 0x7FFFFFFF, -1),
                *(0x3C000000 | end for end in ends),
                0x3C003C00,
            ],
            dtype=torch.int32,
        )
        words = bits.view(torch.float32)
    codes = torch.full((len(words), mode.bytes_per_row(32)), 0x55, dtype=torch.uint8)
    read = kernels.dequantize(codes.to(DEVICE), words.to(DEVICE), mode, 32).cpu()
    assert (read[:-1].view(torch.int32) == 0x7FC00000).all()
    assert read[-1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_that_are_rounded_to_their_dtype_once_rotated(dtype: torch.dtype) -> None:
    for mode in (INT4_FIRST_IMPLEMENTATION, VARIANTS["lloyd2_per_token_head@rounded"]):
        assert_parity(planted_rows(0, 300, 64, device=DEVICE).to(dtype), mode)


@pytest.mark.parametrize("name", ["int2", "lloyd4", "lloyd2_search", "smax3", "smax3_search"])
def test_numbers_beside_thresholds(name: str) -> None:
    """One more rounding on the way from a number to its threshold gives another code."""
    mode = find_mode(name).without_rotation()
    assert_parity(rows_beside_thresholds(mode).to(DEVICE), mode)


def by_hand(*levels: float) -> Codebook:
    recipe = Recipe("none", len(levels), symmetric=True)
    return Codebook.from_exact("by_hand", levels, recipe, Provenance("by hand"))


def test_of_equal_merits_the_first_wins() -> None:
    """A lane among zeros: a gain that reaches the outer level has the merit of one that does not.

    A gain whose levels are all zero has none.
    """
    book = by_hand(-2.0, -1.0, 0.0, 1.0, 2.0)
    base = find_mode("smax4_search").with_codebook(book).without_rotation()
    x = torch.zeros(1, 32, device=DEVICE)
    x[0, 3] = 7.0
    for gains, code, word in (
        ((1.0, 2.0), 3, 7.0),
        ((2.0, 1.0), 4, 3.5),
        ((0.25, 1.0), 3, 7.0),
        ((0.25, 0.125), 0, 0.0),
    ):
        got = kernels.quantize(x, replace(base, name="five", gains=gains))
        zero = 2 if word else 0
        codes = reference.unpack_codes(got.codes, base.bits, 32)[0, :4]
        assert codes.tolist() == [zero, zero, zero, code]
        assert got.words.tolist() == [word]


def test_a_gain_whose_levels_square_to_zero_has_no_merit() -> None:
    """However large the products with the row: the next gain wins, and without one nothing."""
    book = by_hand(-1.0, -1e-30, 1e-30, 1.0)
    base = find_mode("lloyd2_search").with_codebook(book).without_rotation()
    x = torch.linspace(-1e18, 1e18, 32, device=DEVICE)[None]
    for gains in ((0.125, 1.0), (0.125,)):
        mode = replace(base, name="tiny", gains=gains)
        assert_parity(x, mode)
        got = kernels.quantize(x, mode)
        assert (got.words != 0).item() == (len(gains) > 1)
        assert got.codes.any().item() == (len(gains) > 1)


def test_of_merits_that_overflow_the_first_wins() -> None:
    mode = find_mode("lloyd2_search").without_rotation()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x = x / x.square().sum(1, keepdim=True).sqrt() * 2.0**63.9
    first = replace(mode, name="first", gains=mode.gains[:1])
    for tier in (reference, kernels):
        got = tier.quantize(x, mode)
        assert got.words.isfinite().all()
        assert_bit_exact(got.codes, reference.quantize(x, first).codes)


def test_the_smallest_row_of_a_codebook_mode_and_the_largest_ranges() -> None:
    smallest = torch.zeros(2, 32, device=DEVICE)
    smallest[:, 5] = torch.tensor([2.0**-63, 0.9999 * 2.0**-63])
    for name in ("int2", "lloyd4", "smax3", "lloyd4_search"):
        mode = find_mode(name).without_rotation()
        assert_parity(smallest, mode)
        words = kernels.quantize(smallest, mode).words
        assert words[0] != 0
        assert words[1] == 0
    largest = torch.zeros(2, 32, device=DEVICE)
    largest[:, 0] = 2.0**127
    largest[0, 1] = -(2.0**127)
    for name in ("int4", "affine4"):
        mode = find_mode(name).without_rotation()
        assert_parity(largest, mode)
        assert kernels.quantize(largest, mode).words[0].isnan()
    assert kernels.quantize(largest, find_mode("int4").without_rotation()).words[1].isfinite()


@pytest.mark.parametrize("mode", [find_mode("int4"), INT4_FIRST_IMPLEMENTATION], ids=str)
def test_zero_points_beside_ties(mode: Mode) -> None:
    """The one is a product with a reciprocal, the other a quotient."""
    assert_parity(rows_beside_zero_point_ties().to(DEVICE), mode.without_rotation())


@pytest.mark.parametrize(
    "name",
    ["lloyd4+wide_3", "smax4+wide_3_unbiased", "lloyd4+even_17", "affine4_per_token_head@3_bits"],
)
def test_a_few_modes_that_anybody_can_make(name: str) -> None:
    book = find_mode("smax4").with_codebook(_even_levels("wide_3", 3, 4.0))
    zeros = replace(book, name="smax4+wide_3_unbiased", scale_fit=ScaleFit.UNBIASED)
    assert_parity(planted_rows(0, 200, 96, device=DEVICE), {**VARIANTS, zeros.name: zeros}[name])


@pytest.mark.parametrize("fewest", [4, 5])
@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=str)
def test_a_guess_and_one_comparison_find_the_code(book: Codebook, fewest: int) -> None:
    """What only a GPU runs, in numpy: `search_guess` with the numbers of `guess_index`."""
    guess = quantize.guess_index(book.thresholds, fewest)
    assert len(guess) == (5 if book.num_levels >= fewest else 0)
    if not guess:
        return
    scale, offset, c1, c2, c3 = np.array(guess, dtype=np.float32)
    thresholds = np.array(book.thresholds, dtype=np.float32)
    z = np.concatenate(
        [
            thresholds,
            np.nextafter(thresholds, np.float32(-9)),
            np.linspace(-9, 9, 200_001, dtype=np.float32),
        ]
    )
    place = np.clip(scale * z + offset, 0, 1)
    near = np.rint(place * (c1 + place * (c2 + place * c3))).astype(int)
    assert np.array_equal(near + (z >= thresholds[near]), np.searchsorted(thresholds, z, "right"))


def test_no_guess_where_none_is_good_enough() -> None:
    assert quantize.guess_index(_even_levels("even_32", 32).thresholds)
    assert quantize.guess_index(_even_levels("even_33", 33).thresholds) == ()
    crowded = (0.0, *(10.0 + i / 8 for i in range(8)), 40.0)
    assert quantize.guess_index(crowded) == ()


def test_every_byte_of_e4m3_reads_as_its_number() -> None:
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)[None]
    read = kernels.dequantize(every, torch.ones(1, device=DEVICE), find_mode("fp8"), 256)[0].cpu()
    want = [e4m3(byte) for byte in range(256)]
    assert read.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    finite = [byte for byte in range(256) if byte not in (0x7F, 0xFF)]
    assert_bit_exact(read[finite], torch.tensor(want)[finite])


def e4m3(byte: int) -> float:
    """Sign, four bits of exponent less 7, three of mantissa; subnormal numbers at exponent 0."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte >> 7 else size


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_every_byte(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (37, 48), generator=generator, dtype=torch.uint8).to(DEVICE)
    packed = reference.pack_codes(codes, bits)
    assert torch.equal(kernels.pack_codes(codes, bits), packed)
    assert torch.equal(kernels.unpack_codes(packed, bits, 48), codes)
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(3)[None]
    unpacked = reference.unpack_codes(every, bits, 768 * 8 // bits)
    assert torch.equal(kernels.unpack_codes(every, bits, 768 * 8 // bits), unpacked)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernels.quantize(x.double(), find_mode("int4")), "x must be float32"),
        (lambda x: kernels.quantize(x[:, :40], find_mode("int4")), "divisible by 16"),
        (lambda x: kernels.hadamard_transform(x[:, :40], HADAMARD), "divisible by 16"),
        (
            lambda x: kernels.quantize(
                x, replace(find_mode("int8"), name="s", rounding=Rounding.STOCHASTIC)
            ),
            "rounding must be deterministic",
        ),
        (lambda x: kernels.pack_codes(x.to(torch.uint8), 5), "bits must be one of"),
        (lambda x: kernels.unpack_codes(x.to(torch.uint8), 4, 64), "packed must hold 64"),
        (
            lambda x: kernels.dequantize(
                torch.zeros(2, 64, dtype=torch.uint8, device=DEVICE),
                torch.zeros(3, device=DEVICE),
                find_mode("int4"),
                128,
            ),
            "codes must be",
        ),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(torch.zeros(2, 64, device=DEVICE))  # type: ignore[operator]
