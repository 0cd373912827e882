"""A second, independent implementation of the storage formats, in numpy.

Nothing here shares code with the package: it is written from the text of the format page alone,
so that two readings of that page can be compared bit for bit.  Clarity before speed, but a few
hundred thousand rows take seconds.

All arithmetic is IEEE float32, round to nearest even, one operation at a time in the order
written.  Every constant is an ``np.float32`` and every array is float32, so nothing is promoted;
float64 is used only for constants that are rounded once, for the exact comparisons of the e4m3
search, and to make up the sample.
torch is imported in one place, to draw the signs of the rotation.

Axes: ``R`` rows (one token's vector of one KV head), ``D`` head_dim, ``B`` bytes per row.
Words are returned as their bits, uint32, because NaN words must compare equal.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tests import oracle_trellis

DEFAULT_SEED = 0x9E3779B9
ROUND_STRIDE = 0x517CC1B7
NAN_WORD = np.uint32(0x7FC00000)
NAN_WORD_16 = np.uint32(0x7E00)
SMALLEST_BLOCK = 16
ROWS_AT_ONCE = 8192

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
HALF = np.float32(0.5)
FIFTEEN = np.float32(15.0)
SCALE_FLOOR = np.float32(1e-6)
SMALLEST_SQUARE_SUM = np.float32(2.0**-126)
SMALLEST_HALF = np.float32(2.0**-24)
ZERO_POINT_MASK = np.uint32(0xF)

#: N(0,1): bits of the positive levels and the positive thresholds, by number of bits of a code.
_GAUSSIAN_HALVES: dict[int, tuple[str, str]] = {
    1: ("3f4c422a", ""),
    2: ("3ee7d2c9 3fc1555d", "3f7b4a0f"),
    3: ("3e7af9f8 3f418990 3fac0538 4009b97a", "3f002407 3f866500 3fdfbc17"),
    4: (
        "3e0379fd 3ec6ae44 3f28215e 3f713d39 3fa0cc2f 3fcf1c25 40046ac7 402ee2bf",
        "3e8435a1 3f05bc40 3f4caf4b 3f8cb566 3fb7f42a 3febf8da 4019a6c3",
    ),
}


#: The gains of a search, in order, in 32nds; the page leaves the lists to the code.
_GAINS: dict[str, tuple[int, ...]] = {
    "lloyd": (25, 28, 30, 32, 34, 36, 39),
    "smax": (28, 30, 31, 32, 33, 35, 39),
}


class Codebook(NamedTuple):
    """Ascending float32 levels and the float32 thresholds between them."""

    levels: np.ndarray
    thresholds: np.ndarray


class Mode(NamedTuple):
    """What a mode's name says."""

    family: str  # int8, fp8, int4, affine4, lloyd, smax or trellis
    bits: int
    fit: str  # of the codebook and trellis families; empty elsewhere
    gains: tuple[float, ...] = ()  # tried when a row is written
    word16: bool = False  # the word is a float16


# ------------------------------------------------------------------------------------------- modes


def parse_mode(name: str) -> Mode:
    """Read a mode's name; ValueError for one that is not a format of the page."""
    plain = {
        "int8_per_token_head": Mode("int8", 8, ""),
        "fp8_per_token_head": Mode("fp8", 8, ""),
        "int4_per_token_head": Mode("int4", 4, ""),
        "affine4_per_token_head": Mode("affine4", 4, ""),
        "int2_per_token_head": Mode("lloyd", 2, "unit"),
    }
    if name in plain:
        return plain[name]
    found = re.fullmatch(
        r"(lloyd[1-4]|smax[2-4])(_search)?(?:_(unit|least_squares|norm_match|unbiased))?(_w16)?"
        r"_per_token_head",
        name,
    )
    if found:
        family, bits = found[1][:-1], int(found[1][-1])
        gains = tuple(n / 32 for n in _GAINS[family]) if found[2] else ()
        return Mode(family, bits, found[3] or "least_squares", gains, bool(found[4]))
    found = re.fullmatch(r"trellis([23])(?:_(norm_match|unbiased))?(_w16)?_per_token_head", name)
    if found:
        return Mode("trellis", int(found[1]), found[2] or "least_squares", word16=bool(found[3]))
    raise ValueError(f"no such mode: {name!r}")


def gaussian_codebook(bits: int) -> Codebook:
    """The Lloyd-Max codebook of N(0,1) with ``2**bits`` levels, from the literals of the page."""
    levels, thresholds = (
        np.array([int(word, 16) for word in words.split()], dtype=np.uint32).view(np.float32)
        for words in _GAUSSIAN_HALVES[bits]
    )
    middle = np.zeros(1, dtype=np.float32)
    return Codebook(
        np.concatenate([-levels[::-1], levels]),
        np.concatenate([-thresholds[::-1], middle, thresholds]),
    )


def _codebook_of(name: str, codebook: tuple[np.ndarray, np.ndarray] | None) -> Codebook:
    """The caller's codebook, checked, or the default of a ``lloyd`` mode."""
    mode = parse_mode(name)
    if codebook is None:
        if mode.family != "lloyd":
            raise ValueError(f"{name} needs a codebook: (levels, thresholds)")
        return gaussian_codebook(mode.bits)
    levels, thresholds = (np.asarray(part) for part in codebook)
    if levels.dtype != np.float32 or thresholds.dtype != np.float32:
        raise TypeError(f"{name}: levels and thresholds must be float32")
    if levels.shape != (2**mode.bits,) or thresholds.shape != (2**mode.bits - 1,):
        raise ValueError(f"{name}: a codebook has {2**mode.bits} levels, one threshold fewer")
    return Codebook(levels, thresholds)


# -------------------------------------------------------------------------------- small arithmetic


def tree_sum(values: np.ndarray) -> np.ndarray:
    """Sum each row as a balanced binary tree, neighbours first, padded with +0.0."""
    rows, width = values.shape
    padded_width = 1 << max(width - 1, 0).bit_length()
    sums = np.zeros((rows, padded_width), dtype=np.float32)
    sums[:, :width] = values
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


def half_away(values: np.ndarray) -> np.ndarray:
    """Round to an integer as ``trunc(RN(v + copysign(0.5, v)))``, literally."""
    return np.trunc(values + np.copysign(HALF, values))


def _clamp(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.minimum(np.maximum(values, np.float32(low)), np.float32(high))


def _bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def _float_of(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words, dtype=np.uint32).view(np.float32)


def _column(values: np.ndarray) -> np.ndarray:
    """One value per row, ready to meet ``[R, D]``."""
    return values[:, np.newaxis]


def _not_finite(values: np.ndarray) -> np.ndarray:
    """Rows with any lane that is not finite."""
    return ~np.isfinite(values).all(axis=1)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 values rounded to the bfloat16 lattice, nearest even."""
    bits = _bits_of(values)
    last_kept = (bits >> np.uint32(16)) & np.uint32(1)
    widened = _float_of((bits + np.uint32(0x7FFF) + last_kept) & np.uint32(0xFFFF0000))
    return np.where(np.isnan(values), values, widened)


def round_to_float16(values: np.ndarray) -> np.ndarray:
    """Float32 values rounded to the float16 lattice, nearest even; too large is an infinity."""
    with np.errstate(all="ignore"):
        return values.astype(np.float16).astype(np.float32)


# ---------------------------------------------------------------------------------------- rotation


def block_size(head_dim: int) -> int:
    """``b``: the largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


@functools.cache
def _drawn_signs(length: int, round_index: int, seed: int) -> bytes:
    import torch

    generator = torch.Generator(device="cpu")
    generator.manual_seed((seed + round_index * ROUND_STRIDE) % 2**64)
    halves = torch.full((length,), 0.5, dtype=torch.float32)
    return bytes((torch.bernoulli(halves, generator=generator) * 2 - 1).numpy().tobytes())


def sign_table(length: int, round_index: int = 0, seed: int = DEFAULT_SEED) -> np.ndarray:
    """The +-1 signs of one round of ``random_hadamard``, float32 ``[length]``; a fresh copy."""
    return np.frombuffer(_drawn_signs(length, round_index, seed), dtype=np.float32).copy()


def sign_mask(signs: np.ndarray) -> int:
    """The +1 positions as a bit mask, bit i = channel i."""
    return sum(1 << index for index, sign in enumerate(signs) if sign > 0)


def _butterfly(values: np.ndarray) -> np.ndarray:
    """Unnormalised Sylvester-Hadamard on each block, strides ``b/2, ..., 2, 1``."""
    rows, head_dim = values.shape
    stride = block_size(head_dim) // 2
    while stride >= 1:
        pairs = values.reshape(rows, head_dim // (2 * stride), 2, stride)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = np.stack([first + second, first - second], axis=2).reshape(rows, head_dim)
        stride //= 2
    return values


def hadamard(x: np.ndarray, signs: Sequence[np.ndarray], inverse: bool = False) -> np.ndarray:
    """Rotate float32 rows ``[R, D]`` with one ``[D]`` row of signs per round; unnormalised.

    Forward: ``x = H (sign * x)`` for each round in order.  Inverse: ``x = sign * (H x)`` for each
    round from the last to the first, *without* the factor ``1/N``, ``N = b**rounds``, which the
    caller applies first where the word does not hold it.
    """
    with np.errstate(all="ignore"):
        if inverse:
            for sign in reversed(signs):
                x = sign * _butterfly(x)
            return x
        for sign in signs:
            x = _butterfly(sign * x)
        return x


# ----------------------------------------------------------------------------------------- packing


def bytes_per_row(bits: int, head_dim: int) -> int:
    """``B``; ValueError when the codes of a row do not fill whole bytes."""
    codes_in_whole_bytes = {1: 8, 2: 4, 3: 8, 4: 2, 8: 1}[bits]
    if head_dim < 1 or head_dim % codes_in_whole_bytes:
        raise ValueError(f"head_dim={head_dim}: {bits}-bit codes do not fill whole bytes")
    return head_dim * bits // 8


def _pack_even(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes of 1, 2, 4 or 8 bits, the first in the lowest bits."""
    per_byte = 8 // bits
    packed = np.zeros((codes.shape[0], codes.shape[1] // per_byte), dtype=np.uint8)
    for position in range(per_byte):
        packed |= codes[:, position::per_byte] << np.uint8(position * bits)
    return packed


def _unpack_even(packed: np.ndarray, bits: int) -> np.ndarray:
    per_byte = 8 // bits
    codes = np.empty((packed.shape[0], packed.shape[1] * per_byte), dtype=np.uint8)
    for position in range(per_byte):
        codes[:, position::per_byte] = (packed >> np.uint8(position * bits)) & np.uint8(
            2**bits - 1
        )
    return codes


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 codes ``[R, D]`` into bytes ``[R, B]``; 3 bits: low crumbs, then high bits."""
    bytes_per_row(bits, codes.shape[1])
    codes = codes.astype(np.uint8) & np.uint8(2**bits - 1)
    if bits == 3:
        low, high = codes & np.uint8(3), codes >> np.uint8(2)
        return np.concatenate([_pack_even(low, 2), _pack_even(high, 1)], axis=1)
    return _pack_even(codes, bits)


def unpack(packed: np.ndarray, bits: int, head_dim: int) -> np.ndarray:
    """Undo :func:`pack`: uint8 codes ``[R, head_dim]``."""
    if packed.shape[1] != bytes_per_row(bits, head_dim):
        raise ValueError(f"{packed.shape[1]} bytes do not hold {head_dim} codes of {bits} bits")
    if bits == 3:
        low = _unpack_even(packed[:, : head_dim // 4], 2)
        high = _unpack_even(packed[:, head_dim // 4 :], 1)
        return low | (high << np.uint8(2))
    return _unpack_even(packed, bits)


# -------------------------------------------------------------------------------------------- e4m3


def e4m3_table() -> np.ndarray:
    """The value of each of the 256 e4m3fn bytes, float32; 0x7f and 0xff are NaN."""
    values = []
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        if (exponent, mantissa) == (15, 7):
            values.append(math.nan)
        elif exponent == 0:
            values.append(sign * mantissa * 2.0**-9)
        else:
            values.append(sign * (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.array(values, dtype=np.float32)


def e4m3_midpoints() -> np.ndarray:
    """The 126 exact midpoints between neighbouring non-negative e4m3 values, float64."""
    magnitudes = e4m3_table()[:127].astype(np.float64)
    return (magnitudes[:-1] + magnitudes[1:]) / 2


def e4m3_encode(values: np.ndarray) -> np.ndarray:
    """The nearest e4m3fn byte of float32 values within +-448; ties to even, sign of zero kept."""
    midpoints = e4m3_midpoints()
    magnitudes = np.abs(values).astype(np.float64)
    below = np.searchsorted(midpoints, magnitudes, side="left")  # a tie counts as below
    tie = magnitudes == midpoints[np.minimum(below, len(midpoints) - 1)]
    codes = below + (tie & (below % 2 == 1))
    return (codes + np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """Float32 values of e4m3fn bytes."""
    return e4m3_table()[codes]


# ------------------------------------------------------------------------------------------ encode


class Encoded(NamedTuple):
    """Codes before packing, words as bits, and the rows that turned out to be NaN rows."""

    codes: np.ndarray
    words: np.ndarray
    nan_rows: np.ndarray


def _encode_int8(x: np.ndarray) -> Encoded:
    scale = np.maximum(np.abs(x).max(axis=1) / np.float32(127), SCALE_FLOOR)
    inv = ONE / scale
    codes = _clamp(half_away(x * _column(inv)), -128, 127)
    twos_complement = (codes.astype(np.int32) & 0xFF).astype(np.uint8)
    return Encoded(twos_complement, _bits_of(scale), _not_finite(x))


def _encode_fp8(x: np.ndarray) -> Encoded:
    scale = np.maximum(np.abs(x).max(axis=1) / np.float32(448), SCALE_FLOOR)
    inv = ONE / scale
    codes = e4m3_encode(_clamp(x * _column(inv), -448, 448))
    return Encoded(codes, _bits_of(scale), _not_finite(x))


def _encode_int4(y: np.ndarray) -> Encoded:
    low = np.minimum(y.min(axis=1), ZERO)
    high = np.maximum(y.max(axis=1), ZERO)
    span = high - low
    scale = np.maximum(span / FIFTEEN, SCALE_FLOOR)
    scale = _float_of(_bits_of(scale) & ~ZERO_POINT_MASK)
    inv = ONE / scale
    zero_point = _clamp(half_away(-low * inv), 0, 15)
    codes = _clamp(half_away(y * _column(inv) + _column(zero_point)), 0, 15)
    words = _bits_of(scale) | zero_point.astype(np.uint32)
    return Encoded(codes.astype(np.uint8), words, _not_finite(y) | ~np.isfinite(span))


def _encode_int4_first(y: np.ndarray) -> Encoded:
    """As :func:`_encode_int4`, with the range, zero-point and scale of the first one."""
    low = y.min(axis=1)
    span = y.max(axis=1) - low
    scale = np.maximum(span / FIFTEEN, SCALE_FLOOR)
    inv = ONE / scale
    zero_point = _clamp(half_away(-low / scale), 0, 15)
    codes = _clamp(half_away(y * _column(inv) + _column(zero_point)), 0, 15)
    words = (_bits_of(scale) & ~ZERO_POINT_MASK) | zero_point.astype(np.uint32)
    return Encoded(codes.astype(np.uint8), words, _not_finite(y) | ~np.isfinite(span))


def _encode_affine4(y: np.ndarray, size: int) -> Encoded:
    """``size`` is ``N``; the word holds the minimum in its high half and the step in its low."""
    divisor = np.float32(size)
    low = y.min(axis=1)
    span = y.max(axis=1) - low
    minimum = ((low + ZERO) / divisor).astype(np.float16)
    step = np.maximum(((span / FIFTEEN) / divisor).astype(np.float16), np.float16(SMALLEST_HALF))
    inv = ONE / step.astype(np.float32)
    offset = y / divisor - _column(minimum.astype(np.float32))
    codes = _clamp(half_away(offset * _column(inv)), 0, 15)
    words = (minimum.view(np.uint16).astype(np.uint32) << np.uint32(16)) | step.view(
        np.uint16
    ).astype(np.uint32)
    finite = np.isfinite(span) & np.isfinite(minimum) & np.isfinite(step)
    return Encoded(codes.astype(np.uint8), words, _not_finite(y) | ~finite)


def _codes_of(z: np.ndarray, codebook: Codebook) -> np.ndarray:
    codes = np.zeros(z.shape, dtype=np.uint8)
    for threshold in codebook.thresholds:
        codes += z >= threshold
    return codes


def _searched_codes(
    y: np.ndarray, z: np.ndarray, gains: Sequence[float], codebook: Codebook
) -> tuple[np.ndarray, np.ndarray]:
    """The codes of the gain with the first largest merit, and the rows where none has one."""
    every = [_codes_of(z * np.float32(gain), codebook) for gain in gains]
    merits = []
    for codes in every:
        chosen = codebook.levels[codes]
        yc, cc = tree_sum(y * chosen), tree_sum(chosen * chosen)
        merits.append(np.where(cc == ZERO, np.float32(-1.0), (yc * yc) / cc))
    stacked = np.stack(merits)
    ranked = np.where(np.isnan(stacked), np.float32(-1.0), stacked)
    best = ranked.argmax(axis=0)  # the first among equals
    return np.stack(every)[best, np.arange(len(y))], ranked.max(axis=0) < ZERO


def _encode_codebook(y: np.ndarray, size: int, mode: Mode, codebook: Codebook | None) -> Encoded:
    """``size`` is ``N``; a trellis has no codebook."""
    head_dim = y.shape[1]
    square_sum = tree_sum(y * y)
    norm = np.sqrt(square_sum)
    if mode.family == "smax":
        largest = np.take_along_axis(y, np.abs(y).argmax(axis=1)[:, np.newaxis], axis=1)
        z = y * (ONE / largest)
    else:
        z = y * _column(np.float32(math.sqrt(head_dim)) / norm)
    no_merit = np.zeros(len(y), dtype=bool)
    if mode.family == "trellis":
        code = oracle_trellis.CODES[mode.bits]
        codes = oracle_trellis.search(code, z)
        chosen = oracle_trellis.levels_of(code, codes)
    else:
        assert codebook is not None
        if mode.gains:
            codes, no_merit = _searched_codes(y, z, mode.gains, codebook)
        else:
            codes = _codes_of(z, codebook)
        chosen = codebook.levels[codes]

    one_over_size = np.float32(1.0 / size)
    if mode.fit == "unit":
        denominator = np.full_like(norm, np.float32(math.sqrt(head_dim) * size))
        word = norm / denominator
    else:
        if mode.fit == "least_squares":
            numerator, denominator = tree_sum(y * chosen), tree_sum(chosen * chosen)
        elif mode.fit == "norm_match":
            numerator = np.copysign(norm, largest[:, 0]) if mode.family == "smax" else norm
            denominator = np.sqrt(tree_sum(chosen * chosen))
        else:
            numerator, denominator = square_sum, tree_sum(y * chosen)
        word = (numerator / denominator) * one_over_size

    nan_rows = _not_finite(y) | ~np.isfinite(square_sum)
    zero_rows = (square_sum < SMALLEST_SQUARE_SUM) | (denominator == ZERO) | no_merit
    if mode.word16:
        word = word.astype(np.float16)
        zero_rows |= word == np.float16(0.0)
    zero_rows &= ~nan_rows
    codes[zero_rows] = 0
    word = np.where(zero_rows, word.dtype.type(0.0), word)
    bits = word.view(np.uint16).astype(np.uint32) if mode.word16 else _bits_of(word)
    return Encoded(codes, bits, nan_rows | ~np.isfinite(word))


def _check_rows(x: np.ndarray) -> None:
    if x.dtype != np.float32 or x.ndim != 2:
        raise TypeError(f"rows are float32 [R, D], not {x.dtype} with {x.ndim} dimensions")


def _check_head_dim(name: str, mode: Mode, head_dim: int) -> None:
    try:
        bytes_per_row(mode.bits, head_dim)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if mode.bits < 8 and block_size(head_dim) < SMALLEST_BLOCK:
        raise ValueError(
            f"{name}: head_dim={head_dim} has rotation blocks of {block_size(head_dim)}, "
            f"fewer than {SMALLEST_BLOCK}"
        )


def _chunks(rows: int) -> Iterator[slice]:
    """Slices of rows; one empty slice when there are none."""
    for start in range(0, max(rows, 1), ROWS_AT_ONCE):
        yield slice(start, start + ROWS_AT_ONCE)


def _finish(
    x: np.ndarray, encoded: Encoded, bits: int, nan_word: np.uint32 = NAN_WORD
) -> tuple[np.ndarray, np.ndarray]:
    """Apply the rule of NaN rows, then pack."""
    nan_rows = encoded.nan_rows | _not_finite(x)
    codes = np.where(_column(nan_rows), np.uint8(0), encoded.codes)
    words = np.where(nan_rows, nan_word, encoded.words)
    return pack(codes, bits), words


def encode(
    name: str,
    x: np.ndarray,
    codebook: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    signs: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Encode float32 rows ``[R, D]``: packed codes uint8 ``[R, B]``, word bits uint32 ``[R]``.

    The 16 bits of a ``_w16`` mode's words are the low ones of theirs.

    ``codebook`` is ``(levels, thresholds)``, float32: needed by the ``smax`` modes, in place of
    the N(0,1) one in the ``lloyd`` modes.  ``signs`` has one row per round of rotation; left out,
    it is the one round of the default seed.
    """
    _check_rows(x)
    mode = parse_mode(name)
    head_dim = x.shape[1]
    _check_head_dim(name, mode, head_dim)
    if signs is None:
        signs = [sign_table(head_dim)]
    size = block_size(head_dim) ** len(signs)
    book = _codebook_of(name, codebook) if mode.family in ("lloyd", "smax") else None

    parts = []
    with np.errstate(all="ignore"):
        for rows in _chunks(x.shape[0]):
            chunk = x[rows]
            if mode.family == "int8":
                encoded = _encode_int8(chunk)
            elif mode.family == "fp8":
                encoded = _encode_fp8(chunk)
            elif mode.family == "int4":
                encoded = _encode_int4(hadamard(chunk, signs))
            elif mode.family == "affine4":
                encoded = _encode_affine4(hadamard(chunk, signs), size)
            else:
                encoded = _encode_codebook(hadamard(chunk, signs), size, mode, book)
            nan_word = NAN_WORD_16 if mode.word16 else NAN_WORD
            parts.append(_finish(chunk, encoded, mode.bits, nan_word))
    packed, words = zip(*parts, strict=True)
    return np.concatenate(packed), np.concatenate(words)


def first_implementation_signs(head_dim: int) -> np.ndarray:
    """The signs of one block of ``b``, repeated over the row."""
    size = block_size(head_dim)
    return np.tile(sign_table(size), head_dim // size)


def first_implementation_int4(
    x: np.ndarray, input_dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Encode ``int4_per_token_head`` as the first implementation's float32 butterfly path did.

    ``input_dtype`` is the type the caller widened from: ``float32``, ``float16`` or ``bfloat16``;
    the rotated row is rounded to it.  Decode with ``signs=[first_implementation_signs(D)]``.
    """
    _check_rows(x)
    name = "int4_per_token_head"
    head_dim = x.shape[1]
    _check_head_dim(name, parse_mode(name), head_dim)
    if input_dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"input_dtype={input_dtype!r}: float32, float16 or bfloat16")
    signs = [first_implementation_signs(head_dim)]
    parts = []
    with np.errstate(all="ignore"):
        for rows in _chunks(x.shape[0]):
            y = hadamard(x[rows], signs)
            if input_dtype == "float16":
                y = round_to_float16(y)
            elif input_dtype == "bfloat16":
                y = round_to_bfloat16(y)
            parts.append(_finish(x[rows], _encode_int4_first(y), 4))
    packed, words = zip(*parts, strict=True)
    return np.concatenate(packed), np.concatenate(words)


# ------------------------------------------------------------------------------------------ decode


def word_is_nan_row(name: str, words: np.ndarray) -> np.ndarray:
    """Rows whose word is not finite; in ``affine4`` a word is two float16."""
    mode = parse_mode(name)
    if mode.family == "affine4":
        minimum, step = _affine4_halves(words)
        return ~(np.isfinite(minimum) & np.isfinite(step))
    if mode.word16:
        return ~np.isfinite(_widened(words))
    return ~np.isfinite(_float_of(words))


def _widened(words: np.ndarray) -> np.ndarray:
    """The float16 in the low half of words, float32: exact."""
    halves = np.ascontiguousarray(words, dtype=np.uint32).astype(np.uint16)
    return halves.view(np.float16).astype(np.float32)


def _affine4_halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The minimum and the step of ``affine4`` words, float32."""
    words = np.ascontiguousarray(words, dtype=np.uint32)
    high = (words >> np.uint32(16)).astype(np.uint16).view(np.float16)
    low = (words & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
    return high.astype(np.float32), low.astype(np.float32)


def decode(
    name: str,
    packed: np.ndarray,
    words: np.ndarray,
    head_dim: int,
    codebook: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    signs: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Dequantise to the original domain: float32 ``[R, head_dim]``."""
    mode = parse_mode(name)
    _check_head_dim(name, mode, head_dim)
    if signs is None:
        signs = [sign_table(head_dim)]
    size = block_size(head_dim) ** len(signs)
    book = _codebook_of(name, codebook) if mode.family in ("lloyd", "smax") else None

    parts = []
    with np.errstate(all="ignore"):
        for rows in _chunks(packed.shape[0]):
            codes = unpack(packed[rows], mode.bits, head_dim)
            word = np.ascontiguousarray(words[rows], dtype=np.uint32)
            if mode.family == "int8":
                values = codes.view(np.int8).astype(np.float32) * _column(_float_of(word))
            elif mode.family == "fp8":
                values = e4m3_decode(codes) * _column(_float_of(word))
            else:
                if mode.family == "int4":
                    scale = _float_of(word & ~ZERO_POINT_MASK)
                    zero_point = (word & ZERO_POINT_MASK).astype(np.float32)
                    rotated = (codes.astype(np.float32) - _column(zero_point)) * _column(scale)
                    rotated = rotated * np.float32(1.0 / size)
                elif mode.family == "affine4":
                    minimum, step = _affine4_halves(word)
                    rotated = _column(minimum) + codes.astype(np.float32) * _column(step)
                elif mode.family == "trellis":
                    levels = oracle_trellis.levels_of(oracle_trellis.CODES[mode.bits], codes)
                    scale = _widened(word) if mode.word16 else _float_of(word)
                    rotated = _column(scale) * levels
                else:
                    assert book is not None
                    scale = _widened(word) if mode.word16 else _float_of(word)
                    rotated = _column(scale) * book.levels[codes]
                values = hadamard(rotated, signs, inverse=True) + ZERO
            nan_value = _float_of(np.array([NAN_WORD]))[0]
            parts.append(np.where(_column(word_is_nan_row(name, word)), nan_value, values))
    return np.concatenate(parts)


# -------------------------------------------------------------------------------- adversarial rows


def _unrotate(rotated: np.ndarray) -> np.ndarray:
    """Rows whose one-round rotation is ``rotated``; exact for lanes on a coarse dyadic lattice."""
    size = np.float32(block_size(rotated.shape[1]))
    rotated = rotated.astype(np.float32)
    return hadamard(rotated / size, [sign_table(rotated.shape[1])], inverse=True)


def _gaussian_rows(rng: np.random.Generator, head_dim: int) -> list[np.ndarray]:
    """Gaussian and one-sided rows from subnormal to overflowing, also on the 16-bit lattices."""
    exponents = [-45, -43, -40, -38, -30, -22, -20, -19, -12, -9, -8, -7, -6, -5, -4, -3, -2, -1]
    exponents += [0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 18, 19, 20, 25, 30, 34, 35, 36, 37, 38]
    groups = []
    for exponent in exponents:
        rows = (rng.standard_normal((6, head_dim)) * 10.0**exponent).astype(np.float32)
        rows[4], rows[5] = np.abs(rows[4]), -np.abs(rows[5])
        groups += [rows, round_to_bfloat16(rows)]
        if exponent < 5:
            groups.append(round_to_float16(rows))
    groups.append(rng.standard_normal((64, head_dim)).astype(np.float32))
    groups.append(rng.standard_t(2, size=(32, head_dim)).astype(np.float32))
    outliers = rng.standard_normal((16, head_dim)).astype(np.float32)
    outliers[np.arange(16), rng.integers(head_dim, size=16)] *= np.float32(40)
    return [*groups, outliers]


def _simple_rows(rng: np.random.Generator, head_dim: int) -> list[np.ndarray]:
    """Zeros of both signs, constants, alternations, single spikes, the largest of each type."""
    largest = float(np.finfo(np.float32).max)
    bf16_largest = 2.0**127 * (2 - 2.0**-7)
    one = np.ones(head_dim, dtype=np.float32)
    alternating = np.where(np.arange(head_dim) % 2, -one, one)
    random_signs = np.where(rng.random((8, head_dim)) < 0.5, np.float32(-1), ONE)
    groups = [one * ZERO, one * np.float32(-0.0), alternating * ZERO, random_signs * ZERO]
    size = float(block_size(head_dim))
    magnitudes = [2.0**-149, 2.0**-140, 2.0**-126, 2.0**-70, 2.0**-66, 2.0**-63, 1e-20, 1e-12]
    magnitudes += [1e-8, 1e-7, 4.9e-7, 5e-7, 5.1e-7, 1e-6, 7.5e-6, 1.5e-5, 6.35e-5, 1.27e-4]
    magnitudes += [4.48e-4, 6e-8, 6.1e-5, 0.1, 1.0, 3.0, 127.0, 448.0, 1000.0, 65504.0]
    magnitudes += [65504.0 * size, 65519.0 * size, 65520.0 * size, 65535.0 * size, 32752.0 * size]
    magnitudes += [1e17, 1e18, 1.8e19 / size, 1.8e19 / math.sqrt(size), 1.8e19, 2.0**63, 2.0**64]
    magnitudes += [1e30, 2.0**119, 2.0**120, 2.0**121, 1e37, 2.0**126, 2.0**127, 3e38]
    magnitudes += [bf16_largest, largest / size, largest / 2, largest]
    for magnitude in magnitudes:
        value = np.float32(magnitude)
        spikes = np.zeros((8, head_dim), dtype=np.float32)
        for row, channel in enumerate((0, 1, head_dim // 2, head_dim - 1)):
            spikes[2 * row, channel] = value
            spikes[2 * row + 1, channel] = -value
        below_spikes = np.nextafter(spikes[:2], ZERO)
        on_noise = spikes[:4] + value * np.float32(1e-3) * rng.standard_normal(
            (4, head_dim)
        ).astype(np.float32)
        on_noise = np.clip(on_noise, np.float32(-largest), np.float32(largest))
        groups += [spikes, below_spikes, on_noise, one * value, one * -value]
        groups += [alternating * value, random_signs[:2] * value]
    return groups


def _not_finite_rows(rng: np.random.Generator, head_dim: int) -> list[np.ndarray]:
    """Ordinary rows with lanes of NaN and infinity, alone and together."""
    payload_nan = _float_of(np.array([0xFFC12345], dtype=np.uint32))[0]
    signalling_nan = _float_of(np.array([0x7F800001], dtype=np.uint32))[0]
    poisons = [np.float32(np.nan), np.float32(np.inf), np.float32(-np.inf)]
    poisons += [payload_nan, signalling_nan]
    groups = []
    for poison in poisons:
        rows = rng.standard_normal((5, head_dim)).astype(np.float32)
        rows[0, 0] = poison
        rows[1, -1] = poison
        rows[2, rng.integers(head_dim)] = poison
        rows[3, :] = poison
        rows[4, :] = ZERO
        rows[4, head_dim // 2] = poison
        groups.append(rows)
    rows = rng.standard_normal((2, head_dim)).astype(np.float32)
    rows[0, 0], rows[0, -1] = np.float32(np.inf), np.float32(-np.inf)
    rows[1, 0], rows[1, -1] = np.float32(np.nan), np.float32(np.inf)
    return [*groups, rows]


#: Scales that are exact, for rows of ties.  After the powers of two come those where a product
#: with ``RN(1/s)`` and a quotient by ``s`` part: 41, 47, 55, 61 and 83 times a power of two.
_TIE_SCALES = tuple(2.0**exponent for exponent in (-18, -14, -4, 0, 1, 9, 60, 90))
_TIE_SCALES += (41.0, 47 / 16, 55 / 1024, 61.0, 83 / 64)


def _tie_rows_int8(rng: np.random.Generator, head_dim: int) -> list[np.ndarray]:
    """Rows with an exact scale and lanes on, and an ulp beside, half integers."""
    groups = []
    for scale in _TIE_SCALES:
        halves = rng.integers(-127, 127, size=(4, head_dim)).astype(np.float32) + HALF
        halves[1] = np.nextafter(halves[1], ZERO)
        halves[2] = np.nextafter(halves[2], np.float32(1000) * np.sign(halves[2]))
        halves[3, 1::3] = np.nextafter(HALF, ZERO)
        halves[3, 2::3] = -np.nextafter(HALF, ZERO)
        halves[:, 0] = np.array([127, -127, 127, -127], dtype=np.float32)
        groups.append(halves * np.float32(scale))
    return groups


def _tie_rows_fp8(head_dim: int) -> list[np.ndarray]:
    """Rows with an exact scale and lanes on, and an ulp beside, e4m3 midpoints."""
    middle = e4m3_midpoints().astype(np.float32)
    beside = np.concatenate([np.nextafter(middle, ZERO), np.nextafter(middle, np.float32(1000))])
    lanes = np.concatenate([middle, beside, e4m3_table()[:127]])
    lanes = np.concatenate([lanes, -lanes])
    width = max(head_dim - 1, 1)
    lanes = np.resize(lanes, (-(-len(lanes) // width), width)).astype(np.float32)
    groups = []
    for scale in _TIE_SCALES:
        rows = np.zeros((lanes.shape[0], head_dim), dtype=np.float32)
        rows[:, :1] = np.float32(448)
        rows[:, 1:] = lanes[:, : head_dim - 1]
        rows[1::2, :1] *= np.float32(-1)
        groups.append(rows * np.float32(scale))
    return groups


def _tie_rows_four_bits(rng: np.random.Generator, head_dim: int) -> list[np.ndarray]:
    """Rows whose rotation spans 15 steps of an exact scale, with lanes on half steps.

    The rotated rows straddle zero, with a zero-point that is itself a tie, or lie on one side.
    """
    groups = []
    for scale in _TIE_SCALES:
        for low in (-15.0, -14.5, -7.5, -6.5, -6.0, -0.5, 0.0, 0.5, 2.0, -15.5, -20.0):
            rotated = low + rng.integers(0, 31, size=(3, head_dim)) * 0.5
            rotated[:, 0], rotated[:, -1] = low, low + 15
            rotated[1] = rotated[1, ::-1]
            groups.append(_unrotate(rotated) * np.float32(scale))
    return groups


def _rotated_rows(rng: np.random.Generator, head_dim: int) -> list[np.ndarray]:
    """Rows made in the rotated domain: one-sided, equal extremes, one lane, the zero boundary."""
    groups = []
    one_sided = rng.integers(1, 200, size=(8, head_dim)) / 8
    groups += [_unrotate(one_sided), _unrotate(-one_sided), _unrotate(one_sided * 2.0**-12)]
    extremes = rng.integers(-63, 64, size=(16, head_dim)).astype(np.float64)
    for row in extremes:
        first, second = rng.permutation(head_dim)[:2]
        row[first], row[second] = 64, -64
    groups.append(_unrotate(extremes))
    binary = np.where(rng.random((4, head_dim)) < 0.5, -1.0, 1.0)
    groups.append(_unrotate(binary))
    sparse = np.where(rng.random((8, head_dim)) < 0.9, 0.0, rng.integers(-9, 10, (8, head_dim)))
    groups.append(_unrotate(sparse))
    for magnitude in (2.0**-63, 2.0**-62, 2.0**-64, 1.0, 65504.0):
        single = np.zeros((2, head_dim), dtype=np.float32)
        single[0, head_dim // 3] = magnitude
        single[1, 0] = -magnitude
        groups += [_unrotate(single), _unrotate(np.nextafter(single, ZERO))]
        groups.append(_unrotate(np.nextafter(single, np.copysign(np.float32(np.inf), single))))
    return groups


def _integers_with_square_sum(
    rng: np.random.Generator, head_dim: int, planted: list[int], total: int
) -> np.ndarray | None:
    """Integers, ``planted`` among them, whose squares sum to ``total``; None if none was found."""
    tail_lanes = 8
    free = head_dim - len(planted) - tail_lanes
    rest = total - sum(value * value for value in planted)
    if free < 0 or rest < 0:
        return None
    spread = math.sqrt(0.8 * rest / max(free + tail_lanes, 1))
    filler = [int(value) for value in np.rint(rng.standard_normal(free) * spread)]
    rest -= sum(value * value for value in filler)
    tail: list[int] = []
    while rest > 0 and len(tail) < tail_lanes:
        tail.append(math.isqrt(rest))
        rest -= tail[-1] ** 2
    if rest != 0:
        return None
    tail += [0] * (tail_lanes - len(tail))
    return rng.permutation(np.array(planted + filler + tail, dtype=np.float64))


def _tie_rows_codebook(rng: np.random.Generator, head_dim: int) -> list[np.ndarray]:
    """Rows whose rotation has integer lanes that meet thresholds of the N(0,1) codebooks exactly.

    The square sum, an integer below 2^24, is searched so that the normalised planted lanes equal
    the threshold and its negative; the middle threshold is met by the lanes that are zero.
    """
    root = np.float32(math.sqrt(head_dim))
    groups = []
    for bits in (2, 3, 4):
        for threshold in gaussian_codebook(bits).thresholds:
            if not threshold > 0:
                continue
            largest = math.isqrt(int(2**24 / head_dim * float(threshold) ** 2))
            wanted = 2
            for lane in range(largest, max(largest - 200, 0), -1):
                total = round(head_dim * (lane / float(threshold)) ** 2)
                if total >= 2**24:
                    continue
                inv = root / np.sqrt(np.float32(total))
                if np.float32(lane) * inv != threshold:
                    continue
                rotated = _integers_with_square_sum(rng, head_dim, [lane, -lane, 0], total)
                if rotated is None:
                    continue
                groups.append(_unrotate(rotated[np.newaxis]))
                wanted -= 1
                if not wanted:
                    break
    return groups


def planted_rows(head_dim: int, seed: int = 0) -> np.ndarray:
    """An adversarial sample, float32 ``[R, head_dim]``, in a random order fixed by ``seed``.

    Gaussian and one-sided rows at magnitudes from subnormal to overflow, also on the float16 and
    bfloat16 lattices; zeros of both signs; constants; spikes; the extremes of each type; rows with
    NaN and infinite lanes; ties of every rounding, for the rotated modes planted behind the
    default one-round rotation; rows at the floor of the scale and at the limits of zero and NaN
    rows.
    """
    rng = np.random.default_rng([seed, head_dim])
    with np.errstate(all="ignore"):
        groups = _gaussian_rows(rng, head_dim)
        groups += _simple_rows(rng, head_dim)
        groups += _not_finite_rows(rng, head_dim)
        groups += _tie_rows_int8(rng, head_dim)
        groups += _tie_rows_fp8(head_dim)
        groups += _tie_rows_four_bits(rng, head_dim)
        groups += _rotated_rows(rng, head_dim)
        groups += _tie_rows_codebook(rng, head_dim)
    rows = np.concatenate([group.reshape(-1, head_dim) for group in groups])
    assert rows.dtype == np.float32
    return rows[rng.permutation(len(rows))]
