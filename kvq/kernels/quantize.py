"""Triton mirror of `kvq.reference.quantize`: rotate, scale, encode, pack, and back.

A mode reaches the kernels as a `RowSpec`, a value made of its parts; no kernel knows its name.
Every float32 operation that the storage formats fix is one IEEE operation here: launches forbid
contraction (`enable_fp_fusion=False`), division and square root are `div_rn` and `sqrt_rn`, and
sums are explicit trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.checks import check_dtype, check_input, check_same_device, check_tensor
from kvq.codebooks import to_float32
from kvq.kernels import launch
from kvq.kernels.hadamard import rotate, sign_words, unrotate
from kvq.kernels.packing import load_code, pack_words
from kvq.kernels.rounding import (
    decode_e4m3,
    encode_e4m3,
    choose,
    from_digits,
    padded_levels,
    round_code,
    search_code,
    search_digits,
)
from kvq.kernels.rows import (
    bits_of,
    channels,
    fold_add,
    fold_max,
    fold_min,
    from_bits,
    load_rows,
    not_finite,
    pick,
    piece_rows,
    store_rows,
    store_words,
)
from kvq.kernels.scaling import (
    constant,
    decode_scale,
    divide,
    encode_float16_pair,
    encode_zero_point,
    floored_scale,
    reciprocal,
    round_to_bfloat16,
    round_to_float16,
    truncate_scale,
)
from kvq.modes import Mode, Rotation
from kvq.rounding import Rounding
from kvq.tier import QuantizedKV

#: Codebooks of at most this many levels are compiled into the kernel; larger ones are tables.
MOST_CONSTANT_LEVELS = 16


@dataclass(frozen=True)
class RowSpec:
    """The parts of a mode at one head size, as compile-time values."""

    head_dim: int
    padded: int
    bits: int
    grid: str
    normalization: str
    rounding: str
    word: str
    scale_fit: str
    max_code: int
    rounds: int
    block: int
    signs: tuple[tuple[int, ...], ...]
    round_to: str
    folds_gain: bool
    signed_zero: bool
    #: `1 / N`
    fold: float
    #: `sqrt(D)` and `sqrt(D) * N`, each rounded once.
    root: float
    root_gain: float
    #: Empty when the codebook is read from memory.
    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    num_levels: int


@lru_cache(maxsize=1024)
def row_spec(mode: Mode, head_dim: int, padded: int, dtype: torch.dtype) -> RowSpec:
    """The compile-time values of a mode."""
    rotation = mode.rotation
    gain = mode.gain(head_dim)
    levels = () if mode.codebook is None else mode.codebook.levels
    thresholds = () if mode.codebook is None else mode.codebook.thresholds
    inline = len(levels) <= MOST_CONSTANT_LEVELS
    rounds_input = rotation is not None and rotation.round_to_input and dtype != torch.float32
    return RowSpec(
        head_dim=head_dim,
        padded=padded,
        bits=mode.bits,
        grid=str(mode.grid),
        normalization=str(mode.normalization),
        rounding=str(mode.rounding),
        word=str(mode.word),
        scale_fit=str(mode.scale_fit),
        max_code=mode.max_code,
        rounds=0 if rotation is None else rotation.rounds,
        block=Rotation.block_size(head_dim),
        signs=() if rotation is None else sign_words(head_dim, rotation, padded),
        round_to=str(dtype).removeprefix("torch.") if rounds_input else "",
        folds_gain=mode.folds_gain,
        signed_zero=rotation is None and mode.codebook is None,
        fold=1.0 / gain,
        root=to_float32(math.sqrt(head_dim)),
        root_gain=to_float32(math.sqrt(head_dim) * gain),
        levels=levels if inline else (),
        thresholds=thresholds if inline else (),
        num_levels=len(levels),
    )


@lru_cache(maxsize=256)
def codebook_table(mode: Mode, device: torch.device) -> Tensor:
    """`[2 * 2^bits]` float32: the levels, the last repeated, and then the thresholds."""
    if mode.codebook is None:
        return torch.zeros(1, dtype=torch.float32, device=device)
    size = 2**mode.bits
    levels, thresholds = mode.codebook.levels, mode.codebook.thresholds
    table = (*levels, *levels[-1:] * (size - len(levels)), *thresholds)
    return torch.tensor(table, dtype=torch.float32, device=device)


@triton.jit
def _encode_absmax(y, SPEC: tl.constexpr, R: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr):
    C: tl.constexpr = pick(SPEC, "padded")
    ROUNDING: tl.constexpr = pick(SPEC, "rounding")
    LARGEST: tl.constexpr = 448.0 if pick(SPEC, "grid") == "e4m3" else 127.0
    absmax = fold_max(tl.abs(y), C, R, E)
    scale = floored_scale(absmax, LARGEST)
    q = y * reciprocal(scale)[None, :, None]
    if pick(SPEC, "grid") == "e4m3":
        codes = encode_e4m3(tl.minimum(tl.maximum(q, -448.0), 448.0), ROUNDING, CAST)
    else:
        codes = round_code(tl.minimum(tl.maximum(q, -128.0), 127.0), ROUNDING) & 255
    return codes, bits_of(scale), not_finite(absmax)


@triton.jit
def _clamped_code(q, SPEC: tl.constexpr):
    """Clamp, then round: the same as rounding first, since the bounds are integers."""
    return round_code(
        tl.minimum(tl.maximum(q, 0.0), pick(SPEC, "max_code")), pick(SPEC, "rounding")
    )


@triton.jit
def _encode_range(y, SPEC: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    C: tl.constexpr = pick(SPEC, "padded")
    D: tl.constexpr = pick(SPEC, "head_dim")
    LARGEST: tl.constexpr = pick(SPEC, "max_code")
    FOLD: tl.constexpr = pick(SPEC, "fold")
    NORMALIZATION: tl.constexpr = pick(SPEC, "normalization")
    if NORMALIZATION == "zero_range" or D == C:
        low = fold_min(y, C, R, E)
        high = fold_max(y, C, R, E)
    else:
        live = channels(C, E) < D
        low = fold_min(tl.where(live, y, float("inf")), C, R, E)
        high = fold_max(tl.where(live, y, float("-inf")), C, R, E)
    bad = not_finite(high) | not_finite(low)
    if NORMALIZATION == "zero_range":
        low = tl.minimum(low, 0.0)
        high = tl.maximum(high, 0.0)
    bad = bad | not_finite(high - low)
    if NORMALIZATION == "min_range":
        smallest = round_to_float16((low + 0.0) * FOLD)
        step = divide(high - low, constant(low, LARGEST))
        scale = tl.maximum(round_to_float16(step * FOLD), 5.9604644775390625e-08)
        q = (y * FOLD - smallest[None, :, None]) * reciprocal(scale)[None, :, None]
        codes = _clamped_code(q, SPEC)
        word = encode_float16_pair(scale, smallest)
        bad = bad | not_finite(smallest) | not_finite(scale)
    else:
        scale = floored_scale(high - low, LARGEST)
        if NORMALIZATION == "zero_range":
            scale = truncate_scale(scale)
            zero_point = _clamped_code((-low) * reciprocal(scale), SPEC)
        else:
            zero_point = _clamped_code(divide(-low, scale), SPEC)
        q = y * reciprocal(scale)[None, :, None] + zero_point.to(tl.float32)[None, :, None]
        codes = _clamped_code(q, SPEC)
        word = encode_zero_point(scale, zero_point)
    return codes, word, bad


@triton.jit
def _signed_max(y, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """The entry of largest magnitude of each row, of the lowest channel among equals."""
    largest = fold_max(tl.abs(y), C, R, E)
    place = tl.where(tl.abs(y) == largest[None, :, None], channels(C, E), C)
    lowest = tl.min(tl.min(place, 2), 0)
    hit = channels(C, E) == lowest[None, :, None]
    negative = tl.max(tl.max(tl.where(hit & (y < 0.0), 1, 0), 2), 0)
    return tl.where(negative != 0, -largest, largest)


@triton.jit
def _encode_codebook(y, table_ptr, SPEC: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    C: tl.constexpr = pick(SPEC, "padded")
    D: tl.constexpr = pick(SPEC, "head_dim")
    BITS: tl.constexpr = pick(SPEC, "bits")
    FIT: tl.constexpr = pick(SPEC, "scale_fit")
    squares = fold_add(y * y, C, R, E)
    norm = tl.math.sqrt_rn(squares)
    if pick(SPEC, "normalization") == "rms":
        inverse = divide(constant(norm, pick(SPEC, "root")), norm)
        unit = divide(norm, constant(norm, pick(SPEC, "root_gain")))
    else:
        signed_max = _signed_max(y, C, R, E)
        inverse = reciprocal(signed_max)
        unit = signed_max * pick(SPEC, "fold")
    z = y * inverse[None, :, None]
    if len(pick(SPEC, "levels")) > 0:
        digits = search_digits(z, pick(SPEC, "thresholds"), BITS)
        codes = from_digits(digits, BITS)
    else:
        codes = search_code(z, table_ptr + (1 << BITS), pick(SPEC, "num_levels") - 1, BITS)
    zero = (bits_of(squares) & 0x7FFFFFFF) < 0x00800000
    if FIT == "unit":
        scale = unit
    else:
        if len(pick(SPEC, "levels")) > 0:
            c = choose(digits, padded_levels(pick(SPEC, "levels"), BITS), 0)
        else:
            c = tl.load(table_ptr + codes)
        if D != C:
            c = tl.where(channels(C, E) < D, c, 0.0)
        if FIT == "least_squares":
            numerator = fold_add(y * c, C, R, E)
            denominator = fold_add(c * c, C, R, E)
        elif FIT == "norm_match":
            numerator = norm
            denominator = tl.math.sqrt_rn(fold_add(c * c, C, R, E))
        else:
            numerator = squares
            denominator = fold_add(y * c, C, R, E)
        scale = divide(numerator, denominator) * pick(SPEC, "fold")
        zero = zero | (denominator == 0.0)
    bad = not_finite(squares)
    zero = zero & (bad == 0)
    bad = bad | (not_finite(scale) & (zero == 0))
    return codes, tl.where(zero, 0, bits_of(scale)), bad, zero


@triton.jit
def encode_rows(
    x, table_ptr, SPEC: tl.constexpr, R: tl.constexpr, E: tl.constexpr, CAST: tl.constexpr
):
    """Words of packed codes and the bits of the stored words of rows `[C / E, R, E]`.

    Returns:
        For each stored segment `[R, segment words]` int32 (three bits have two segments, every
        other packing one and an unused scalar), and the stored word's bits `[R]`.
    """
    C: tl.constexpr = pick(SPEC, "padded")
    BITS: tl.constexpr = pick(SPEC, "bits")
    if pick(SPEC, "rounds") > 0:
        x = rotate(x, SPEC, R, E)
    if pick(SPEC, "round_to") == "float16":
        x = round_to_float16(x)
    elif pick(SPEC, "round_to") == "bfloat16":
        x = round_to_bfloat16(x)
    if pick(SPEC, "grid") == "codebook":
        codes, word, bad, zero = _encode_codebook(x, table_ptr, SPEC, R, E)
        cleared = bad | zero
    elif pick(SPEC, "grid") == "unsigned":
        codes, word, bad = _encode_range(x, SPEC, R, E)
        cleared = bad
    else:
        codes, word, bad = _encode_absmax(x, SPEC, R, E, CAST)
        cleared = bad
    word = tl.where(bad, 0x7FC00000, word)
    kept = (cleared == 0)[:, None]
    if BITS == 3:
        first = tl.where(kept, pack_words(codes & 3, 2, C, R, E), 0)
        second = tl.where(kept, pack_words(codes >> 2, 1, C, R, E), 0)
    else:
        first = tl.where(kept, pack_words(codes, BITS, C, R, E), 0)
        second = word
    return first, second, word


@triton.jit
def store_codes(
    base, first, second, mask, SPEC: tl.constexpr, UNIT: tl.constexpr
):
    """Store the segments of packed rows at `base` `[R]`, pointers to integers of `UNIT` bytes."""
    C: tl.constexpr = pick(SPEC, "padded")
    D: tl.constexpr = pick(SPEC, "head_dim")
    BITS: tl.constexpr = pick(SPEC, "bits")
    if BITS == 3:
        store_words(base, first, mask, D // 4, C // 16, UNIT)
        store_words(base + D // 4 // UNIT, second, mask, D // 8, C // 32, UNIT)
    else:
        store_words(base, first, mask, D * BITS // 8, C * BITS // 32, UNIT)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    words_ptr,
    table_ptr,
    num_rows,
    row_stride,
    SPEC: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    UNIT: tl.constexpr,
    CAST: tl.constexpr,
):
    D: tl.constexpr = pick(SPEC, "head_dim")
    BITS: tl.constexpr = pick(SPEC, "bits")
    C: tl.constexpr = pick(SPEC, "padded")
    start = tl.program_id(0).to(tl.int64) * R
    piece_row = start + piece_rows(C, R, E, W)
    x = load_rows(x_ptr + piece_row * row_stride, piece_row < num_rows, D, C, R, E, W)
    row = start + tl.arange(0, R)
    live = row < num_rows
    first, second, word = encode_rows(x, table_ptr, SPEC, R, E, CAST)
    store_codes(codes_ptr + row * (D * BITS // 8 // UNIT), first, second, live, SPEC, UNIT)
    tl.store(words_ptr + row, word, mask=live)


def quantize(x: Tensor, mode: Mode) -> QuantizedKV:
    """Triton mirror of `kvq.reference.quantize`; the same bits."""
    check_input("x", x)
    launch.check_device("x", x)
    check_rounding(mode)
    head_dim = x.shape[-1]
    row_bytes = mode.bytes_per_row(head_dim)
    flat = x.detach().reshape(-1, head_dim)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    codes = torch.empty((len(flat), row_bytes), dtype=torch.uint8, device=x.device)
    words = torch.empty(len(flat), dtype=torch.float32, device=x.device)
    if len(flat):
        tile = launch.row_tile(head_dim, x.element_size(), len(flat))
        spec = row_spec(mode, head_dim, tile.padded, x.dtype)
        unit = launch.store_unit(mode, head_dim, codes)
        _quantize_kernel[(triton.cdiv(len(flat), tile.rows),)](
            flat,
            codes.view(launch.UNIT_DTYPES[unit]),
            words.view(torch.int32),
            codebook_table(mode, x.device),
            len(flat),
            flat.stride(0),
            SPEC=spec,
            R=tile.rows,
            E=tile.lanes * tile.width,
            W=tile.width,
            UNIT=unit,
            CAST=launch.has_e4m3_cast(x.device),
            **launch.options(tile),
        )
    return QuantizedKV(codes.reshape(*x.shape[:-1], row_bytes), words.reshape(x.shape[:-1]))


def check_rounding(mode: Mode) -> None:
    """Stochastic rounding stays in the reference tier."""
    if mode.rounding is Rounding.STOCHASTIC:
        raise ValueError(
            "rounding must be deterministic here, got stochastic "
            "(see kvq.reference.quantize_stochastic)"
        )


@triton.jit(do_not_specialize=["num_rows"])
def _dequantize_kernel(
    codes_ptr,
    words_ptr,
    out_ptr,
    table_ptr,
    num_rows,
    codes_stride,
    words_stride,
    SPEC: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
):
    D: tl.constexpr = pick(SPEC, "head_dim")
    C: tl.constexpr = pick(SPEC, "padded")
    GRID: tl.constexpr = pick(SPEC, "grid")
    WORD: tl.constexpr = pick(SPEC, "word")
    start = tl.program_id(0).to(tl.int64) * R
    row = start + tl.arange(0, R)
    live = row < num_rows
    bits = tl.load(words_ptr + row * words_stride, mask=live, other=0)
    scale, offset, nan = decode_scale(bits, WORD)
    channel = channels(C, E)
    code = load_code(
        codes_ptr + (row * codes_stride)[None, :, None],
        channel,
        live[None, :, None] & (channel < D),
        pick(SPEC, "bits"),
        D,
    )
    if WORD == "float32_zero_point":
        y = (code.to(tl.float32) - offset[None, :, None]) * scale[None, :, None]
    elif WORD == "float16_pair":
        y = offset[None, :, None] + code.to(tl.float32) * scale[None, :, None]
    elif GRID == "signed":
        y = ((code << 24) >> 24).to(tl.float32) * scale[None, :, None]
    elif GRID == "e4m3":
        y = decode_e4m3(code) * scale[None, :, None]
    else:
        y = tl.load(table_ptr + code) * scale[None, :, None]
    if pick(SPEC, "rounds") > 0:
        if not pick(SPEC, "folds_gain"):
            y = y * pick(SPEC, "fold")
        y = unrotate(y, SPEC, R, E)
    if not pick(SPEC, "signed_zero"):
        y = y + 0.0
    y = tl.where(nan[None, :, None], from_bits(tl.full(y.shape, 0x7FC00000, tl.int32)), y)
    store_rows(out_ptr, start, num_rows, y, D, C, R, E)


def dequantize(codes: Tensor, words: Tensor, mode: Mode, head_dim: int) -> Tensor:
    """Triton mirror of `kvq.reference.dequantize`; the same bits."""
    check_dtype("codes", check_tensor("codes", codes), torch.uint8)
    check_dtype("words", check_tensor("words", words), torch.float32)
    launch.check_device("codes", codes)
    check_same_device("words", words, "codes", codes)
    row_bytes = mode.bytes_per_row(head_dim)
    if codes.shape != (*words.shape, row_bytes):
        raise ValueError(
            f"codes must be {[*words.shape, row_bytes]} to go with words {list(words.shape)} "
            f"and head_dim {head_dim}, got {list(codes.shape)}"
        )
    flat_codes, flat_words = codes.reshape(-1, row_bytes), words.reshape(-1)
    if flat_codes.stride(1) != 1:
        flat_codes = flat_codes.contiguous()
    out = torch.empty((len(flat_words), head_dim), dtype=torch.float32, device=codes.device)
    if len(flat_words):
        tile = launch.row_tile(head_dim, 4, len(flat_words))
        _dequantize_kernel[(triton.cdiv(len(flat_words), tile.rows),)](
            flat_codes,
            flat_words.view(torch.int32),
            out,
            codebook_table(mode, codes.device),
            len(flat_words),
            flat_codes.stride(0),
            flat_words.stride(0),
            SPEC=row_spec(mode, head_dim, tile.padded, torch.float32),
            R=tile.rows,
            E=tile.lanes * tile.width,
            **launch.options(tile),
        )
    return out.reshape(*words.shape, head_dim)
