"""What a tier must answer: `tests/oracle.py`, asked about any `Mode`.

A shipped mode goes to the oracle by its name alone, so its row in the table is tested too. Any
other is taken apart here, and the oracle's pieces put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvq.modes import MODES, Grid, Mode, Normalization, Rotation
from kvq.rounding import Rounding
from kvq.scale_word import StoredWord
from tests import oracle, oracle_trellis

_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class Expected(NamedTuple):
    """What `quantize` and then `dequantize` must give."""

    codes: Tensor
    words: Tensor
    values: Tensor


def expected(x: Tensor, mode: Mode) -> Expected:
    """Codes, words and values of `x` `[..., D]` in any layout, on the CPU."""
    rows = x.detach().to("cpu", torch.float32).reshape(-1, x.shape[-1]).numpy()
    with np.errstate(all="ignore"):
        if mode.name in MODES:
            codes, words = oracle.encode(mode.name, rows, _shipped_book(mode))
        else:
            with _rounding(mode):
                codes, words = _encode(rows, mode, _DTYPE_NAMES[x.dtype])
    shape = x.shape[:-1]
    stored = (
        torch.from_numpy(codes).reshape(*shape, -1),
        torch.from_numpy(_words(words, mode)).reshape(shape),
    )
    return Expected(*stored, expected_values(*stored, mode, x.shape[-1]))


def expected_values(codes: Tensor, words: Tensor, mode: Mode, head_dim: int) -> Tensor:
    """Values `[..., D]` of any codes `[..., B]` and words `[...]`, written by a tier or not."""
    packed = codes.reshape(-1, codes.shape[-1]).numpy()
    half = words.dtype is torch.float16
    bits = words.reshape(-1).numpy().view(np.uint16 if half else np.uint32).astype(np.uint32)
    with np.errstate(all="ignore"):
        if mode.name in MODES:
            values = oracle.decode(mode.name, packed, bits, head_dim, _shipped_book(mode))
        else:
            values = _decode(packed, bits, mode, head_dim)
    values = values.astype(np.float32, copy=False)
    return torch.from_numpy(values).reshape(*words.shape, head_dim)


def _shipped_book(mode: Mode) -> oracle.Codebook | None:
    """The codebook that the oracle does not know by the mode's name."""
    return _book(mode) if mode.name.startswith("smax") else None


def _words(bits: np.ndarray, mode: Mode) -> np.ndarray:
    """The oracle's bits in the dtype of the mode's words."""
    if mode.word is StoredWord.FLOAT16:
        return bits.astype(np.uint16).view(np.float16)
    return bits.view(np.float32)


def sign_rows(rotation: Rotation | None, head_dim: int) -> list[np.ndarray]:
    """The rows of signs of a rotation, one for each round."""
    if rotation is None:
        return []
    size = oracle.block_size(head_dim)
    length = size if rotation.repeat_block_signs else head_dim
    if not rotation.random_signs:
        return [np.ones(head_dim, dtype=np.float32)] * rotation.rounds
    return [
        np.tile(oracle.sign_table(length, i, rotation.seed), head_dim // length)
        for i in range(rotation.rounds)
    ]


def _book(mode: Mode) -> oracle.Codebook:
    """The codebook, filled up to `2 ** bits` levels that no number reaches."""
    assert mode.codebook is not None
    levels, thresholds = mode.codebook.levels, mode.codebook.thresholds
    extra = 2**mode.bits - len(levels)
    return oracle.Codebook(
        np.array(levels + levels[-1:] * extra, dtype=np.float32),
        np.array(thresholds + (float("inf"),) * extra, dtype=np.float32),
    )


@contextmanager
def _rounding(mode: Mode) -> Iterator[None]:
    """The oracle's pieces call `half_away` and `e4m3_encode`: let them be the mode's own."""
    rounders = {
        None: oracle.half_away,
        Rounding.HALF_AWAY: oracle.half_away,
        Rounding.HALF_EVEN: np.rint,
        Rounding.TOWARD_ZERO: np.trunc,
    }
    kept = oracle.half_away, oracle.e4m3_encode
    oracle.half_away = rounders[mode.rounding]
    if mode.rounding is not Rounding.HALF_EVEN:
        oracle.e4m3_encode = lambda values: _e4m3_bytes(values, rounders[mode.rounding])
    try:
        yield
    finally:
        oracle.half_away, oracle.e4m3_encode = kept


def _e4m3_bytes(values: np.ndarray, rounder: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Bytes of e4m3fn: `rounder` counts the steps of each binade, the table has the values."""
    magnitudes = np.abs(values).astype(np.float64)
    step = np.full_like(magnitudes, 2.0**-9)
    for exponent in range(-6, 9):
        step[magnitudes >= 2.0**exponent] = 2.0 ** (exponent - 3)
    with np.errstate(invalid="ignore"):
        rounded = rounder((magnitudes / step).astype(np.float32)) * step
    table = oracle.e4m3_table()[:127].astype(np.float64)
    codes = np.searchsorted(table, np.nan_to_num(rounded, nan=0.0, posinf=0.0))
    return (codes + np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def _encode(rows: np.ndarray, mode: Mode, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    signs = sign_rows(mode.rotation, rows.shape[1])
    size = oracle.block_size(rows.shape[1]) ** len(signs)
    y = oracle.hadamard(rows, signs)
    if mode.rotation is not None and mode.rotation.round_to_input:
        y = {
            "float32": lambda v: v,
            "float16": oracle.round_to_float16,
            "bfloat16": oracle.round_to_bfloat16,
        }[dtype](y)
    largest = np.float32(2**mode.bits - 1)
    if mode.grid is Grid.SIGNED:
        encoded = oracle._encode_int8(y)
    elif mode.grid is Grid.E4M3:
        encoded = oracle._encode_fp8(y)
    elif mode.normalization is Normalization.CLAMPED_RANGE:
        encoded = oracle._encode_int4_first(y)
    elif mode.grid is Grid.UNSIGNED and mode.bits < 4:
        encoded = _encode_narrow(y, mode, size, largest)
    elif mode.normalization is Normalization.ZERO_RANGE:
        encoded = oracle._encode_int4(y)
    elif mode.normalization is Normalization.MIN_RANGE:
        encoded = oracle._encode_affine4(y, size)
    else:
        family = "smax" if mode.normalization is Normalization.SIGNED_MAX else "lloyd"
        unit = str(mode.scale_fit) == "unit"
        parts = oracle.Mode(
            family,
            mode.bits,
            str(mode.scale_fit),
            mode.gains,
            mode.word is StoredWord.FLOAT16,
        )
        if family == "smax" and unit:
            encoded = _encode_signed_max_unit(y, size, mode)
        elif mode.grid is Grid.TRELLIS:
            parts = parts._replace(family="trellis")
            encoded = oracle._encode_codebook(y, size, parts, None)
        else:
            encoded = oracle._encode_codebook(y, size, parts, _book(mode))
    nan_word = oracle.NAN_WORD_16 if mode.word is StoredWord.FLOAT16 else oracle.NAN_WORD
    return oracle._finish(rows, encoded, mode.bits, nan_word)


def _encode_narrow(y: np.ndarray, mode: Mode, size: int, largest: np.float32) -> oracle.Encoded:
    """`int4` or `affine4` with fewer bits, hence another largest code."""
    low, high = y.min(axis=1), y.max(axis=1)
    if mode.normalization is Normalization.ZERO_RANGE:
        low, high = np.minimum(low, oracle.ZERO), np.maximum(high, oracle.ZERO)
        bits = np.maximum((high - low) / largest, oracle.SCALE_FLOOR).view(np.uint32)
        scale = (bits & np.uint32(0xFFFFFFF0)).view(np.float32)
        inv = oracle.ONE / scale
        zero_point = np.clip(oracle.half_away(-low * inv), oracle.ZERO, largest)
        codes = oracle.half_away(y * inv[:, None] + zero_point[:, None])
        words = scale.view(np.uint32) + np.nan_to_num(zero_point).astype(np.uint32)
        finite = np.isfinite(high - low)
    else:
        minimum = ((low + oracle.ZERO) / np.float32(size)).astype(np.float16)
        step = ((high - low) / largest / np.float32(size)).astype(np.float16)
        step = np.maximum(step, np.float16(2.0**-24))
        offset = y / np.float32(size) - minimum.astype(np.float32)[:, None]
        codes = oracle.half_away(offset * (oracle.ONE / step.astype(np.float32))[:, None])
        words = minimum.view(np.uint16).astype(np.uint32) * np.uint32(65536) + step.view(np.uint16)
        finite = np.isfinite(minimum) & np.isfinite(step) & np.isfinite(high - low)
    codes = np.clip(np.nan_to_num(codes), oracle.ZERO, largest).astype(np.uint8)
    return oracle.Encoded(codes, words, ~np.isfinite(y).all(axis=1) | ~finite)


def _encode_signed_max_unit(y: np.ndarray, size: int, mode: Mode) -> oracle.Encoded:
    """A signed-max row whose word is its maximum over N: the page leaves this fit to the code."""
    parts = oracle.Mode("smax", mode.bits, "unit")
    encoded = oracle._encode_codebook(y, size, parts, _book(mode))
    largest = y[np.arange(len(y)), np.abs(y).argmax(axis=1)]
    words = largest / np.float32(size)
    zero = oracle.tree_sum(y * y) < oracle.SMALLEST_SQUARE_SUM
    words = np.where(zero, oracle.ZERO, words)
    return encoded._replace(words=words.view(np.uint32))


def _decode(codes: np.ndarray, words: np.ndarray, mode: Mode, head_dim: int) -> np.ndarray:
    if mode.grid in (Grid.SIGNED, Grid.E4M3):
        name = "int8" if mode.grid is Grid.SIGNED else "fp8"
        values = oracle.decode(f"{name}_per_token_head", codes, words, head_dim)
        signs = sign_rows(mode.rotation, head_dim)
        if signs:
            gain = np.float32(1.0 / oracle.block_size(head_dim) ** len(signs))
            values = oracle.hadamard(values * gain, signs, inverse=True) + oracle.ZERO
        nan = oracle.word_is_nan_row(f"{name}_per_token_head", words)
        return np.where(nan[:, None], np.uint32(0x7FC00000).view(np.float32), values)
    signs = sign_rows(mode.rotation, head_dim)
    unpacked = oracle.unpack(codes, mode.bits, head_dim).astype(np.float32)
    size = oracle.block_size(head_dim) ** len(signs)
    name = "affine4_per_token_head"
    if mode.normalization is Normalization.MIN_RANGE:
        minimum, step = oracle._affine4_halves(words)
        rotated = minimum[:, None] + unpacked * step[:, None]
    elif mode.grid is Grid.UNSIGNED:
        name = "int4_per_token_head"
        scale = (words & np.uint32(0xFFFFFFF0)).view(np.float32)
        zero_point = (words & np.uint32(15)).astype(np.float32)
        rotated = (unpacked - zero_point[:, None]) * scale[:, None] / np.float32(size)
    elif mode.trellis is not None:
        name = "int2_per_token_head"
        levels = oracle_trellis.levels_of(oracle_trellis.CODES[mode.bits], unpacked)
        if mode.word is StoredWord.FLOAT16:
            words = oracle._widened(words).view(np.uint32)
        rotated = words.view(np.float32)[:, None] * levels
    else:
        name = "int2_per_token_head"
        if mode.word is StoredWord.FLOAT16:
            # Widened, a word that is not finite stays so.
            words = oracle._widened(words).view(np.uint32)
        rotated = words.view(np.float32)[:, None] * _book(mode).levels[unpacked.astype(np.int64)]
    values = oracle.hadamard(rotated, signs, inverse=True)
    if signs or mode.grid is not Grid.UNSIGNED:
        # Of negative scales, which nobody writes, the plain product keeps the sign of a zero.
        values = values + oracle.ZERO
    nan = oracle.word_is_nan_row(name, words)
    return np.where(nan[:, None], np.uint32(0x7FC00000).view(np.float32), values)
