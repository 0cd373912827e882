"""The table of modes: numbers derived by hand, rules, and how a new mode is made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from itertools import pairwise

import pytest

import kvq
from kvq.codebooks import Codebook, Provenance, Recipe
from kvq.modes import (
    DEFAULT_SEED,
    INT4_FIRST_IMPLEMENTATION,
    SUFFIX,
    Grid,
    Normalization,
    short_name,
)
from kvq.scale_word import StoredWord

# By short name: bits, levels, bytes per row and bits per value at head size 128, codes per byte.
BY_HAND = {
    "int8": (8, 256, 128, "8.25", "1"),
    "fp8": (8, 256, 128, "8.25", "1"),
    "int4": (4, 16, 64, "4.25", "2"),
    "int2": (2, 4, 32, "2.25", "4"),
    "lloyd1": (1, 2, 16, "1.25", "8"),
    "lloyd2": (2, 4, 32, "2.25", "4"),
    "lloyd3": (3, 8, 48, "3.25", "8/3"),
    "lloyd4": (4, 16, 64, "4.25", "2"),
    "smax2": (2, 4, 32, "2.25", "4"),
    "smax3": (3, 8, 48, "3.25", "8/3"),
    "smax4": (4, 16, 64, "4.25", "2"),
    "affine4": (4, 16, 64, "4.25", "2"),
    "trellis2": (2, 4, 32, "2.25", "4"),
    "trellis3": (3, 8, 48, "3.25", "8/3"),
}
FITS = ("", "_unit", "_norm_match", "_unbiased")
# What a 16-bit word takes off the bits per value at head size 128.
HALF_A_WORD = Fraction(16, 128)
SEARCHED = {f"{family}{bits}_search" for family in ("lloyd", "smax") for bits in (2, 3, 4)}
NARROW = {
    *(f"lloyd{bits}_{fit}_w16" for bits in (2, 3) for fit in ("norm_match", "unbiased")),
    *(f"smax{bits}_search{fit}_w16" for bits in (2, 3) for fit in ("", *FITS[2:])),
    *(f"trellis{bits}_{fit}_w16" for bits in (2, 3) for fit in ("norm_match", "unbiased")),
    "lloyd4_w16",
    "smax4_search_w16",
}

ROWS = [pytest.param(mode, id=name) for name, mode in kvq.MODES.items()]
INT8, INT4, LLOYD2 = (kvq.mode(name) for name in ("int8", "int4", "lloyd2"))


def by_hand(mode: kvq.Mode) -> tuple[int, int, int, str, str]:
    name = short_name(mode.name).removesuffix("_w16")
    for ending in (*FITS[1:], "_search"):
        if name.startswith(("lloyd", "smax", "trellis")):
            name = name.removesuffix(ending)
    return BY_HAND[name]


def codebook(num_levels: int, name: str = "mine") -> Codebook:
    levels = tuple(float(level) for level in range(num_levels))
    recipe = Recipe("samples", num_levels, symmetric=False)
    return Codebook.from_exact(name, levels, recipe, Provenance("by hand"))


def test_the_table_has_the_seed_and_every_fit() -> None:
    expected = {name for name in BY_HAND if not name.startswith("lloyd")}
    expected |= {f"lloyd{bits}{fit}" for bits in (1, 2, 3, 4) for fit in FITS}
    expected |= {f"trellis{bits}{fit}" for bits in (2, 3) for fit in FITS if fit != "_unit"}
    names = {short_name(name) for name in kvq.MODES}
    assert names >= expected | SEARCHED | NARROW
    for mode in kvq.MODES.values():
        name = short_name(mode.name)
        assert (name in NARROW) == (mode.word is StoredWord.FLOAT16)
        assert ("_search" in name) == bool(mode.gains)
        assert not mode.gains or 1.0 in mode.gains


@pytest.mark.parametrize("mode", ROWS)
def test_derived_numbers(mode: kvq.Mode) -> None:
    bits, levels, row_bytes, bits_per_value, codes_per_byte = by_hand(mode)
    assert mode.bits == bits
    assert mode.levels == levels
    assert mode.bytes_per_row(128) == row_bytes
    narrow = short_name(mode.name) in NARROW
    assert mode.bytes_per_token_head(128) == row_bytes + (2 if narrow else 4)
    assert mode.bits_per_value(128) == Fraction(bits_per_value) - (HALF_A_WORD if narrow else 0)
    assert mode.codes_per_byte == Fraction(codes_per_byte)
    assert isinstance(mode.codes_per_byte, Fraction)
    assert mode.head_dim(row_bytes) == 128


@pytest.mark.parametrize("mode", ROWS)
def test_head_dim_is_the_inverse_of_bytes_per_row(mode: kvq.Mode) -> None:
    for head_dim in (16, 32, 48, 64, 80, 96, 112, 128, 256, 512):
        assert mode.head_dim(mode.bytes_per_row(head_dim)) == head_dim


@pytest.mark.parametrize("mode", ROWS)
def test_a_row_is_frozen_and_named_for_its_key(mode: kvq.Mode) -> None:
    assert kvq.MODES[mode.name] is mode
    assert str(mode) == mode.name
    assert mode.name.endswith(SUFFIX)
    with pytest.raises(FrozenInstanceError):
        mode.bits = 5  # type: ignore[misc]
    assert hash(mode) == hash(replace(mode))


def test_the_table_is_read_only() -> None:
    with pytest.raises(TypeError):
        kvq.MODES["mine"] = INT8  # type: ignore[index]


@pytest.mark.parametrize("mode", ROWS)
def test_only_the_zero_point_word_leaves_the_gain_out(mode: kvq.Mode) -> None:
    assert mode.folds_gain == (short_name(mode.name) != "int4")
    assert mode.gain(96) == (1 if mode.rotation is None else 32)


def test_largest_codes() -> None:
    assert INT8.max_code == 127
    assert INT4.max_code == 15


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (INT8, {"name": ""}, "name must not be empty"),
        (INT4, {"bits": 5}, "bits must be one of"),
        (INT4, {"bits": 0}, "bits must be one of"),
        (INT4, {"bits": 8}, "bits must be at most 4 for the grid unsigned"),
        (INT8, {"bits": 4}, "bits must be 8 for the grid signed"),
        (INT8, {"grid": Grid.E4M3, "bits": 4}, "bits must be 8 for the grid e4m3"),
        (INT8, {"grid": Grid.UNSIGNED}, "grid must be signed or e4m3 for absmax"),
        (INT4, {"grid": Grid.SIGNED}, "grid must be unsigned for zero_range"),
        (LLOYD2, {"grid": Grid.UNSIGNED}, "grid must be codebook or trellis for rms"),
        (INT8, {"word": StoredWord.FLOAT32_ZERO_POINT}, "word must be float32 for absmax"),
        (INT4, {"word": StoredWord.FLOAT32}, "word must be float32_zero_point for zero_range"),
        (INT4, {"normalization": Normalization.MIN_RANGE}, "word must be float16_pair for"),
        (INT4, {"codebook": codebook(4)}, "codebook must be given for the grid codebook"),
        (LLOYD2, {"codebook": None}, "codebook must be given for the grid codebook"),
        (INT4, {"scale_fit": kvq.ScaleFit.UNIT}, "scale_fit must be given for the grids"),
        (LLOYD2, {"scale_fit": None}, "scale_fit must be given for the grids"),
        (INT4, {"rounding": None}, "rounding must be given for every grid but codebook"),
        (LLOYD2, {"rounding": kvq.Rounding.HALF_EVEN}, "rounding must be given for every grid"),
        (INT8, {"word": StoredWord.FLOAT16}, "word must be float32 for absmax"),
        (LLOYD2, {"word": StoredWord.FLOAT16_PAIR}, "word must be float32 or float16 for rms"),
        (LLOYD2, {"gains": (1.0, 0.9)}, "gains must hold positive float32 numbers, got 0.9"),
        (LLOYD2, {"gains": (0.0,)}, "gains must hold positive float32 numbers, got 0.0"),
        (LLOYD2, {"gains": (float("inf"),)}, "gains must hold positive float32 numbers, got inf"),
        (INT8, {"gains": (1.0,)}, "gains must be empty unless the word is fitted to the codes"),
        (kvq.mode("int2"), {"gains": (1.0,)}, "gains must be empty unless the word is fitted"),
        (LLOYD2, {"codebook": codebook(5)}, "codebook must have at most 4 levels for 2 bits"),
    ],
    ids=lambda value: value.name if isinstance(value, kvq.Mode) else None,
)
def test_parts_that_do_not_go_together(
    base: kvq.Mode, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(base, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "head_dim", "message"),
    [
        ("int8", 0, "head_dim must be a positive multiple of 1"),
        ("lloyd3", 12, "head_dim must be a positive multiple of 8"),
        ("lloyd1", -8, "head_dim must be a positive multiple of 8"),
        ("int4", 72, "head_dim must be divisible by 16 for a Hadamard rotation, got 72"),
    ],
)
def test_head_sizes_refused(name: str, head_dim: int, message: str) -> None:
    mode = kvq.mode(name)
    for ask in (mode.check_head_dim, mode.bytes_per_row, mode.bits_per_value):
        with pytest.raises(ValueError, match=message):
            ask(head_dim)


@pytest.mark.parametrize("row_bytes", [0, -3, 1])
def test_row_sizes_refused(row_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"must (hold whole|be a positive|be divisible)"):
        kvq.mode("lloyd3").head_dim(row_bytes)


@pytest.mark.parametrize("mode", ROWS)
def test_lookup(mode: kvq.Mode) -> None:
    assert kvq.mode(mode.name) is mode
    assert kvq.mode(short_name(mode.name)) is mode
    assert kvq.mode(mode) is mode


def test_lookup_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"mode must be one of int8, fp8, .*, got 'int5'"):
        kvq.mode("int5")
    with pytest.raises(TypeError, match="mode must be a name or a Mode, got int"):
        kvq.mode(4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_levels", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (16, 4), (17, 8)]
)
def test_with_codebook_takes_the_smallest_packing(num_levels: int, bits: int) -> None:
    mode = LLOYD2.with_codebook(codebook(num_levels))
    assert (mode.bits, mode.levels) == (bits, num_levels)
    assert mode.name == "lloyd2+mine"
    assert replace(mode, name=LLOYD2.name, bits=2, codebook=LLOYD2.codebook) == LLOYD2


def test_with_codebook_names() -> None:
    assert LLOYD2.with_codebook(codebook(4), name="keys").name == "keys"
    assert LLOYD2.with_codebook(codebook(4)).name not in kvq.MODES
    with pytest.raises(ValueError, match="name must not be that of a shipped mode"):
        LLOYD2.with_codebook(codebook(4), name=INT4.name)
    with pytest.raises(ValueError, match="mode must be a codebook mode"):
        INT4.with_codebook(codebook(4))


def test_with_rounding() -> None:
    mode = INT4.with_rounding(kvq.Rounding.TOWARD_ZERO)
    assert mode.name == "int4@toward_zero"
    assert replace(mode, name=INT4.name, rounding=INT4.rounding) == INT4
    assert INT4.with_rounding(kvq.Rounding.HALF_AWAY) is INT4
    with pytest.raises(ValueError, match="mode must round to take another rounding"):
        LLOYD2.with_rounding(kvq.Rounding.HALF_AWAY)


def test_without_rotation() -> None:
    mode = INT4.without_rotation()
    assert (mode.name, mode.rotation) == ("int4@unrotated", None)
    assert INT8.without_rotation() is INT8
    assert mode.bytes_per_row(72) == 36


def test_the_first_implementation_of_int4_is_no_shipped_mode() -> None:
    assert INT4_FIRST_IMPLEMENTATION.name not in kvq.MODES
    assert INT4_FIRST_IMPLEMENTATION.bytes_per_row(128) == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 0}, "rounds must be 1 or 2"),
        ({"rounds": 3}, "rounds must be 1 or 2"),
        ({"seed": -1}, "seed must be between 0"),
        ({"seed": 2**64}, "seed must be between 0"),
    ],
)
def test_rotations_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvq.Rotation(**change)  # type: ignore[arg-type]


def test_rotations() -> None:
    assert kvq.Rotation(1, True, DEFAULT_SEED) == kvq.RANDOM_HADAMARD
    assert not kvq.HADAMARD.random_signs
    assert [kvq.Rotation.block_size(d) for d in (16, 48, 80, 96, 128, 192)] == [
        16, 16, 16, 32, 128, 64,
    ]  # fmt: skip
    assert kvq.Rotation(rounds=2).gain(48) == 256


@pytest.mark.parametrize("book", kvq.CODEBOOKS.values(), ids=str)
def test_a_shipped_codebook_brackets_its_thresholds(book: Codebook) -> None:
    edges = (book.levels[0], *book.thresholds, book.levels[-1])
    assert all(low < high for low, high in pairwise(edges))
    assert book.symmetric == book.recipe.symmetric
