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

from kvq.checks import (
    check_dtype,
    check_input,
    check_kind,
    check_same_device,
    check_tensor,
)
from kvq.codebooks import to_float32
from kvq.kernels import launch
from kvq.kernels.codebook import (
    FEWEST_GUESSED_LEVELS,
    FEWEST_SEARCHED_LEVELS,
    choose_each,
    codebook_codes,
    codebook_scale,
    count_gains,
    fitted_scale,
    gain_at,
    guess_index,
    made_here,
    renewed,
    table_size,
)
from kvq.kernels.hadamard import sign_words, unrotate
from kvq.kernels.packing import join_words, load_code, pack_words, words_of
from kvq.kernels.rounding import (
    GUESS_BIAS,
    decode_e4m3,
    encode_e4m3,
    round_code,
)
from kvq.kernels.rows import (
    bits_of,
    fold_add,
    fold_max,
    fold_min,
    fold_parts,
    from_bits,
    load_rows,
    not_finite,
    pick,
    split_parts,
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
    half_bits,
    reciprocal,
    round_to_float16,
    truncate_scale,
)
from kvq.kernels.trellis import (
    level_table,
    rotate_input,
    trellis_codes,
    trellis_states_of,
)
from kvq.modes import LEVEL_GRIDS, Mode, Rotation
from kvq.rounding import Rounding
from kvq.scale_word import SMALLEST_NORMAL
from kvq.tier import QuantizedKV, word_dtype

#: Codebooks of at most this many levels are compiled into the kernel; larger ones are tables.
MOST_CONSTANT_LEVELS = 16


@dataclass(frozen=True)
class RowSpec:
    """The parts of a mode at one head size, as compile-time values."""

    head_dim: int
    padded: int
    #: Channels that are encoded at a time.
    part: int
    bits: int
    grid: str
    normalization: str
    rounding: str
    word: str
    scale_fit: str
    #: Empty without a search.
    gains: tuple[float, ...]
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
    #: See `guess_index`; empty when constants or a table are searched.
    guess: tuple[float, ...]
    #: Inline PTX.
    ptx: bool
    #: Channels of a state of a trellis.
    window: int


@lru_cache(maxsize=1024)
def row_spec(mode: Mode, head_dim: int, padded: int, dtype: torch.dtype) -> RowSpec:
    """The compile-time values of a mode."""
    rotation = mode.rotation
    gain = mode.gain(head_dim)
    levels = () if mode.codebook is None else mode.codebook.levels
    thresholds = () if mode.codebook is None else mode.codebook.thresholds
    # Triton takes a subnormal constant for a float64.
    normal = all(n == 0.0 or abs(n) >= SMALLEST_NORMAL for n in levels + thresholds)
    inline = normal and len(levels) <= MOST_CONSTANT_LEVELS
    fewest = FEWEST_SEARCHED_LEVELS if mode.gains else FEWEST_GUESSED_LEVELS
    guess = guess_index(thresholds, fewest) if launch.has_shuffle() else ()
    rounds_input = rotation is not None and rotation.round_to_input and dtype != torch.float32
    return RowSpec(
        head_dim=head_dim,
        padded=padded,
        part=launch.part_of(mode, padded, bool(guess)),
        bits=mode.bits,
        grid=str(mode.grid),
        normalization=str(mode.normalization),
        rounding=str(mode.rounding),
        word=str(mode.word),
        scale_fit=str(mode.scale_fit),
        gains=mode.gains,
        max_code=mode.max_code,
        rounds=0 if rotation is None else rotation.rounds,
        block=Rotation.block_size(head_dim),
        signs=() if rotation is None else sign_words(head_dim, rotation, padded),
        round_to=str(dtype).removeprefix("torch.") if rounds_input else "",
        folds_gain=mode.folds_gain,
        signed_zero=rotation is None and mode.grid not in LEVEL_GRIDS,
        fold=1.0 / gain,
        root=to_float32(math.sqrt(head_dim)),
        root_gain=to_float32(math.sqrt(head_dim) * gain),
        levels=levels if inline else (),
        thresholds=thresholds if inline else (),
        num_levels=len(levels),
        guess=guess,
        ptx=launch.has_shuffle(),
        window=0 if mode.trellis is None else mode.trellis.window,
    )


@lru_cache(maxsize=256)
def codebook_table(mode: Mode, device: torch.device) -> Tensor:
    """`[2, table_size]` float32: the levels, and then the thresholds; the last repeats.

    Of a trellis, the levels by state.
    """
    if mode.trellis is not None:
        return level_table(mode.trellis, device)
    if mode.codebook is None:
        return torch.zeros(1, dtype=torch.float32, device=device)
    size = table_size(mode.bits)
    levels, thresholds = mode.codebook.levels, mode.codebook.thresholds
    rows = [row + row[-1:] * (size - len(row)) for row in (levels, thresholds)]
    return torch.tensor(rows, dtype=torch.float32, device=device)


@triton.jit
def _absmax_scale(y, SPEC: tl.constexpr):
    """Scale, word, multiplier and NaN mark of rows that are divided by their largest magnitude."""
    LARGEST: tl.constexpr = 448.0 if pick(SPEC, "grid") == "e4m3" else 127.0
    # On the bits, where a NaN is larger than every number.
    absmax = from_bits(tl.max(bits_of(y) & 0x7FFFFFFF, 0))
    scale = floored_scale(absmax, LARGEST)
    return reciprocal(scale), bits_of(scale), not_finite(absmax)


@triton.jit
def _absmax_codes(y, multiplier, SPEC: tl.constexpr, CAST: tl.constexpr):
    ROUNDING: tl.constexpr = pick(SPEC, "rounding")
    q = y * multiplier[None, :]
    if pick(SPEC, "grid") == "e4m3":
        codes = encode_e4m3(tl.minimum(tl.maximum(q, -448.0), 448.0), ROUNDING, CAST)
    else:
        codes = round_code(tl.minimum(tl.maximum(q, -128.0), 127.0), ROUNDING) & 255
    return codes


@triton.jit
def _clamped_code(q, SPEC: tl.constexpr):
    """Clamp, then round: the same as rounding first, since the bounds are integers."""
    return round_code(
        tl.minimum(tl.maximum(q, 0.0), pick(SPEC, "max_code")), pick(SPEC, "rounding")
    )


@triton.jit
def _range_scale(y, SPEC: tl.constexpr, R: tl.constexpr):
    """Multiplier, offset, word and NaN mark of rows that are divided by their range."""
    C: tl.constexpr = pick(SPEC, "padded")
    LARGEST: tl.constexpr = pick(SPEC, "max_code")
    FOLD: tl.constexpr = pick(SPEC, "fold")
    NORMALIZATION: tl.constexpr = pick(SPEC, "normalization")
    if NORMALIZATION == "zero_range" or pick(SPEC, "head_dim") == C:
        low = fold_min(y, C, R)
        high = fold_max(y, C, R)
    else:
        live = tl.arange(0, C)[:, None] < pick(SPEC, "head_dim")
        low = fold_min(tl.where(live, y, float("inf")), C, R)
        high = fold_max(tl.where(live, y, float("-inf")), C, R)
    bad = not_finite(high) | not_finite(low)
    if NORMALIZATION == "zero_range":
        low = tl.minimum(low, 0.0)
        high = tl.maximum(high, 0.0)
    bad = bad | not_finite(high - low)
    if NORMALIZATION == "min_range":
        offset = round_to_float16((low + 0.0) * FOLD)
        step = divide(high - low, constant(low, LARGEST))
        scale = tl.maximum(round_to_float16(step * FOLD), 5.9604644775390625e-08)
        word = encode_float16_pair(scale, offset)
        bad = bad | not_finite(offset) | not_finite(scale)
    else:
        scale = floored_scale(high - low, LARGEST)
        if NORMALIZATION == "zero_range":
            scale = truncate_scale(scale)
            zero_point = _clamped_code((-low) * reciprocal(scale), SPEC)
        else:
            zero_point = _clamped_code(divide(-low, scale), SPEC)
        offset = zero_point.to(tl.float32)
        word = encode_zero_point(scale, zero_point)
    return reciprocal(scale), offset, word, bad


@triton.jit
def _range_codes(y, multiplier, offset, SPEC: tl.constexpr):
    if pick(SPEC, "normalization") == "min_range":
        q = (y * pick(SPEC, "fold") - offset[None, :]) * multiplier[None, :]
    else:
        q = y * multiplier[None, :] + offset[None, :]
    return _clamped_code(q, SPEC)


@triton.jit
def _encode_parts(
    parts,
    states,
    written,
    multiplier,
    offset,
    gain,
    table_ptr,
    SPEC: tl.constexpr,
    R: tl.constexpr,
    CAST: tl.constexpr,
):
    """Words of packed codes of each part, and the sums over the row that choose a scale.

    Of three bits there are two words, of every other packing one, the second tuple empty. Sums are
    of `y * c` and `c * c`, with `c` the levels of the codes; what is not needed is `multiplier`.
    `states` and `written` are as `encode_rows` has them.
    """
    PART: tl.constexpr = pick(SPEC, "part")
    N: tl.constexpr = pick(SPEC, "padded") // PART
    BITS: tl.constexpr = pick(SPEC, "bits")
    BIAS: tl.constexpr = GUESS_BIAS if len(pick(SPEC, "guess")) > 0 else 0
    GRID: tl.constexpr = pick(SPEC, "grid")
    FIT: tl.constexpr = pick(SPEC, "scale_fit")
    LEVELS: tl.constexpr = FIT != "None"
    SEARCHES: tl.constexpr = count_gains(SPEC) > 0
    first = ()
    second = ()
    yc = ()
    cc = ()
    for i in tl.static_range(N):
        y = parts[i]
        if LEVELS:
            if GRID == "trellis":
                codes, levels = trellis_codes(states, written, table_ptr, SPEC, i)
            else:
                codes, levels = codebook_codes(y, multiplier, gain, table_ptr, SPEC, i)
            if SEARCHES:
                yc = yc + (made_here(fold_add(y * levels, PART, R), SPEC),)
                cc = cc + (made_here(fold_add(levels * levels, PART, R), SPEC),)
            elif FIT != "unit":
                if FIT != "norm_match":
                    yc = yc + (fold_add(y * levels, PART, R),)
                if FIT != "unbiased":
                    cc = cc + (fold_add(levels * levels, PART, R),)
        elif GRID == "unsigned":
            codes = _range_codes(y, multiplier, offset, SPEC)
        else:
            codes = _absmax_codes(y, multiplier, SPEC, CAST)
        if BITS == 3:
            low = pack_words(codes & 3, 2, 0, PART, i, R)
            high = pack_words((codes >> 2) & 1, 1, 0, PART, i, R)
            second = second + (made_here(high, SPEC) if SEARCHES else high,)
        else:
            low = pack_words(codes, BITS, BIAS, PART, i, R)
        first = first + (made_here(low, SPEC) if SEARCHES else low,)
    yc_sum = fold_parts(yc, N) if len(yc) > 0 else multiplier
    cc_sum = fold_parts(cc, N) if len(cc) > 0 else multiplier
    return first, second, yc_sum, cc_sum


@triton.jit
def _search_gains(
    parts, multiplier, table_ptr, SPEC: tl.constexpr, R: tl.constexpr, CAST: tl.constexpr
):
    """`_encode_parts` at the gain of largest merit, the first among equals.

    Where no gain has merit the sums stay zero, and no fit has a denominator. The loop is not
    unrolled: the instructions of all gains would not stay in their cache.
    """
    PART: tl.constexpr = pick(SPEC, "part")
    N: tl.constexpr = pick(SPEC, "padded") // PART
    BITS: tl.constexpr = pick(SPEC, "bits")
    best = tl.full([R], -1.0, tl.float32)
    yc = tl.zeros([R], tl.float32)
    cc = tl.zeros([R], tl.float32)
    first = ()
    second = ()
    for _i in tl.static_range(N):
        if BITS == 3:
            first = first + (tl.zeros([words_of(PART, 2), R], tl.int32),)
            second = second + (tl.zeros([words_of(PART, 1), R], tl.int32),)
        else:
            first = first + (tl.zeros([words_of(PART, BITS), R], tl.int32),)
    for i in tl.range(0, count_gains(SPEC), num_stages=1, loop_unroll_factor=1):
        factor = renewed(multiplier, SPEC)
        new_first, new_second, new_yc, new_cc = _encode_parts(
            parts, factor, factor, factor, factor, gain_at(i, SPEC), table_ptr, SPEC, R, CAST
        )
        merit = divide(new_yc * new_yc, new_cc)
        better = (merit > best) & (new_cc != 0.0)
        best = tl.where(better, merit, best)
        yc = tl.where(better, new_yc, yc)
        cc = tl.where(better, new_cc, cc)
        first = choose_each(better, new_first, first)
        if BITS == 3:
            second = choose_each(better, new_second, second)
    return first, second, yc, cc


@triton.jit
def encode_rows(
    x, states, written, table_ptr, SPEC: tl.constexpr, R: tl.constexpr, CAST: tl.constexpr
):
    """Words of packed codes and the bits of the stored words of rows `[C, R]`.

    `states` `[R]` points to those of a trellis, of rows that are `written`; else anything.

    Returns:
        For each stored segment `[R, segment words]` int32 (three bits have two segments, every
        other packing one, handed back twice), and the stored word's bits `[R]`.
    """
    C: tl.constexpr = pick(SPEC, "padded")
    PART: tl.constexpr = pick(SPEC, "part")
    N: tl.constexpr = C // PART
    BITS: tl.constexpr = pick(SPEC, "bits")
    SEARCHES: tl.constexpr = count_gains(SPEC) > 0
    GRID: tl.constexpr = pick(SPEC, "grid")
    LEVELS: tl.constexpr = pick(SPEC, "scale_fit") != "None"
    x = rotate_input(x, SPEC, R)
    if LEVELS:
        squares = fold_add(x * x, C, R)
        multiplier, unit = codebook_scale(x, squares, SPEC, R)
    elif GRID == "unsigned":
        multiplier, offset, word, bad = _range_scale(x, SPEC, R)
    else:
        multiplier, word, bad = _absmax_scale(x, SPEC)
    if GRID != "unsigned":
        offset = multiplier
    parts = split_parts(x, PART, C, R)
    if SEARCHES:
        first, second, yc, cc = _search_gains(parts, multiplier, table_ptr, SPEC, R, CAST)
    else:
        first, second, yc, cc = _encode_parts(
            parts, states, written, multiplier, offset, 1.0, table_ptr, SPEC, R, CAST
        )
    if LEVELS:
        scale, empty = fitted_scale(squares, unit, yc, cc, SPEC)
        if pick(SPEC, "word") == "float16":
            scale = round_to_float16(scale)
            empty = empty | (scale == 0.0)
        bad = not_finite(squares)
        zero = (((bits_of(squares) & 0x7FFFFFFF) < 0x00800000) | empty) & (bad == 0)
        bad = bad | (not_finite(scale) & (zero == 0))
        word = half_bits(scale) if pick(SPEC, "word") == "float16" else bits_of(scale)
        word = tl.where(zero, 0, word)
        cleared = bad | zero
    else:
        cleared = bad
    word = tl.where(bad, 0x7E00 if pick(SPEC, "word") == "float16" else 0x7FC00000, word)
    kept = (cleared == 0)[:, None]
    if BITS == 3:
        first_words = tl.where(kept, join_words(first, N, PART, 2, R), 0)
        second_words = tl.where(kept, join_words(second, N, PART, 1, R), 0)
    else:
        first_words = tl.where(kept, join_words(first, N, PART, BITS, R), 0)
        second_words = first_words
    return first_words, second_words, word


@triton.jit
def store_codes(base, first, second, mask, SPEC: tl.constexpr, UNIT: tl.constexpr):
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
    states_ptr,
    num_rows,
    row_stride,
    SPEC: tl.constexpr,
    R: tl.constexpr,
    UNIT: tl.constexpr,
    CAST: tl.constexpr,
):
    D: tl.constexpr = pick(SPEC, "head_dim")
    BITS: tl.constexpr = pick(SPEC, "bits")
    C: tl.constexpr = pick(SPEC, "padded")
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < num_rows
    x = load_rows(x_ptr + row * row_stride, live, D, C)
    states = states_ptr + row * D
    first, second, word = encode_rows(x, states, live, table_ptr, SPEC, R, CAST)
    store_codes(codes_ptr + row * (D * BITS // 8 // UNIT), first, second, live, SPEC, UNIT)
    tl.store(words_ptr + row, word.to(words_ptr.dtype.element_ty), mask=live)


def quantize(x: Tensor, mode: Mode) -> QuantizedKV:
    """Triton mirror of `kvq.reference.quantize`; the same bits."""
    check_input("x", x)
    launch.check_device("x", x)
    check_kind("mode", mode, Mode)
    check_rounding(mode)
    head_dim = x.shape[-1]
    row_bytes = mode.bytes_per_row(head_dim)
    flat = x.detach().reshape(-1, head_dim)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    codes = torch.empty((len(flat), row_bytes), dtype=torch.uint8, device=x.device)
    words = torch.empty(len(flat), dtype=word_dtype(mode), device=x.device)
    if len(flat):
        tile = launch.row_tile(mode, head_dim, len(flat))
        spec = row_spec(mode, head_dim, tile.padded, x.dtype)
        unit = launch.store_unit(mode, head_dim, codes)
        _quantize_kernel[(triton.cdiv(len(flat), tile.rows),)](
            flat,
            codes.view(launch.UNIT_DTYPES[unit]),
            launch.word_bits(words),
            codebook_table(mode, x.device),
            trellis_states_of(flat[:, None], mode, spec),
            len(flat),
            flat.stride(0),
            SPEC=spec,
            R=tile.rows,
            UNIT=unit,
            CAST=launch.has_e4m3_cast(x.device),
            **launch.options(tile, mode),
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
):
    D: tl.constexpr = pick(SPEC, "head_dim")
    C: tl.constexpr = pick(SPEC, "padded")
    GRID: tl.constexpr = pick(SPEC, "grid")
    BITS: tl.constexpr = pick(SPEC, "bits")
    WORD: tl.constexpr = pick(SPEC, "word")
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < num_rows
    bits = tl.load(words_ptr + row * words_stride, mask=live, other=0)
    scale, offset, nan = decode_scale(bits, WORD)
    channel = tl.arange(0, C)[:, None]
    code = load_code(
        codes_ptr + (row * codes_stride)[None, :],
        channel,
        live[None, :] & (channel < D),
        BITS,
        D,
    )
    if WORD == "float32_zero_point":
        y = (code.to(tl.float32) - offset[None, :]) * scale[None, :]
    elif WORD == "float16_pair":
        y = offset[None, :] + code.to(tl.float32) * scale[None, :]
    elif GRID == "signed":
        y = ((code << 24) >> 24).to(tl.float32) * scale[None, :]
    elif GRID == "e4m3":
        y = decode_e4m3(code) * scale[None, :]
    elif GRID == "trellis":
        state = code
        for j in tl.static_range(1, pick(SPEC, "window")):
            after = load_code(
                codes_ptr + (row * codes_stride)[None, :],
                (channel + j) % D,
                live[None, :] & (channel < D),
                BITS,
                D,
            )
            state = state + (after << (BITS * j))
        y = tl.load(table_ptr + state) * scale[None, :]
    else:
        y = tl.load(table_ptr + code) * scale[None, :]
    if pick(SPEC, "rounds") > 0:
        if not pick(SPEC, "folds_gain"):
            y = y * pick(SPEC, "fold")
        y = unrotate(y, SPEC, R)
    if not pick(SPEC, "signed_zero"):
        y = y + 0.0
    y = tl.where(nan[None, :], from_bits(tl.full(y.shape, 0x7FC00000, tl.int32)), y)
    store_rows(out_ptr + row * D, y, live, D, C)


def dequantize(codes: Tensor, words: Tensor, mode: Mode, head_dim: int) -> Tensor:
    """Triton mirror of `kvq.reference.dequantize`; the same bits."""
    check_kind("mode", mode, Mode)
    check_dtype("codes", check_tensor("codes", codes), torch.uint8)
    check_dtype("words", check_tensor("words", words), word_dtype(mode))
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
        tile = launch.row_tile(mode, head_dim, len(flat_words))
        _dequantize_kernel[(triton.cdiv(len(flat_words), tile.rows),)](
            flat_codes,
            launch.word_bits(flat_words),
            out,
            codebook_table(mode, codes.device),
            len(flat_words),
            flat_codes.stride(0),
            flat_words.stride(0),
            SPEC=row_spec(mode, head_dim, tile.padded, torch.float32),
            R=tile.rows,
            **launch.options(tile, mode),
        )
    return out.reshape(*words.shape, head_dim)
