"""Failures that other quantizers had when they wrote: neither tier has one, in any mode.

`tests/test_known_failures.py` says where each was reported. A mode for each kind of code, word and
rotation stands for all where the interpreter would take long; the reference takes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq import reference
from kvq.modes import (
    HADAMARD,
    INT4_FIRST_IMPLEMENTATION,
    MODES,
    RANDOM_HADAMARD,
    Grid,
    Mode,
    Normalization,
)
from kvq.modes import mode as find_mode
from kvq.reference import scaling
from kvq.reference.lloyd_max import fit_samples
from kvq.rounding import Rounding
from kvq.scale_word import StoredWord
from kvq.tier import Layout, PagedKV, as_hnd, new_paged_kv
from tests.cases import DTYPES, VARIANTS
from tests.compare import assert_bit_exact

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INT8, FP8, INT4, INT2, AFFINE4 = (
    find_mode(name) for name in ("int8", "fp8", "int4", "int2", "affine4")
)
#: Every width, grid, normalization and stored word.
KINDS = [
    find_mode(name)
    for name in (
        *("int8", "fp8", "int4", "affine4", "int2", "lloyd1", "lloyd3", "lloyd4_w16"),
        *("smax3", "smax2_search_w16", "trellis2", "trellis3_unbiased_w16"),
    )
]
BOTH = ("reference", "kernels")
#: Each kind in both tiers, and every mode in the reference.
TIERS_AND_MODES = [
    pytest.param(tier, mode, id=f"{tier}-{mode}")
    for tier, modes in (("reference", MODES.values()), ("kernels", KINDS))
    for mode in modes
]


both_tiers = pytest.mark.parametrize("tier", BOTH, indirect=True)
every_mode = pytest.mark.parametrize(("tier", "mode"), TIERS_AND_MODES, indirect=["tier"])


def is_searched(mode: Mode) -> bool:
    """The interpreter searches some 30 rows of a trellis a second, and twice as many gains."""
    return mode.trellis is not None or bool(mode.gains)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rotated(x: Tensor, mode: Mode) -> Tensor:
    """Rows as they are when codes are chosen, by the reference."""
    return x if mode.rotation is None else reference.hadamard_transform(x, mode.rotation)


def codes_of(tier: ModuleType, x: Tensor, mode: Mode) -> Tensor:
    return reference.unpack_codes(tier.quantize(x, mode).codes, mode.bits, x.shape[-1])


def round_trip(tier: ModuleType, x: Tensor, mode: Mode) -> Tensor:
    return tier.dequantize(*tier.quantize(x, mode), mode, x.shape[-1])


def test_every_mode_is_of_one_of_the_kinds() -> None:
    def kinds(modes: Iterable[Mode]) -> list[set[object]]:
        parts = ("grid", "normalization", "word", "rotation", "rounding")
        return [
            {(mode.bits, mode.grid) for mode in modes},
            *({getattr(mode, part) for mode in modes} for part in parts),
        ]

    assert kinds(KINDS) == kinds(list(MODES.values()))


# --------------------------------------------------------------------- rounding and the scale


@both_tiers
@pytest.mark.parametrize("mode", [INT8, FP8, INT4, AFFINE4], ids=str)
def test_a_store_rounds_and_does_not_truncate(tier: ModuleType, mode: Mode) -> None:
    """A cast that truncates shrinks signed codes, and moves unsigned ones by half a step."""
    x = randn(1024, 128)
    y = rotated(x, mode)
    for rounding, truncates in ((mode.rounding, False), (Rounding.TOWARD_ZERO, True)):
        each = mode.with_rounding(rounding)
        read = rotated(round_trip(tier, x, each), mode)
        if mode.grid is Grid.UNSIGNED:
            step = (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / mode.max_code
            moved = float(((read - y) / step).mean())
            assert moved == pytest.approx(-0.485 if truncates else 0.0, abs=0.015)
        else:
            slope = float((read * y).double().sum() / y.double().square().sum())
            ratio = float(read.double().abs().sum() / y.double().abs().sum())
            assert (slope < 0.993) == (ratio < 0.99) == truncates
            assert truncates or (abs(slope - 1) < 5e-4 and abs(ratio - 1) < 5e-4)


def codes_by_the_word(y: Tensor, words: Tensor, mode: Mode) -> Tensor:
    """Codes of rotated rows by what their stored words decode to, and by nothing else."""

    def half_away(v: Tensor) -> Tensor:
        return torch.trunc(v + torch.copysign(torch.full_like(v, 0.5), v))

    if mode.word is StoredWord.FLOAT32_ZERO_POINT:
        scale, zero_point = scaling.decode_zero_point(words)
        q = y * (1 / scale)[:, None] + zero_point[:, None]
        return half_away(q).clamp(0, mode.max_code).to(torch.uint8)
    if mode.word is StoredWord.FLOAT16_PAIR:
        scale, smallest = scaling.decode_float16_pair(words)
        q = (y / mode.gain(y.shape[-1]) - smallest[:, None]) * (1 / scale)[:, None]
        return half_away(q).clamp(0, mode.max_code).to(torch.uint8)
    q = y * (1 / words)[:, None]
    if mode.grid is Grid.E4M3:
        return q.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return half_away(q).clamp(-128, 127).to(torch.int8).view(torch.uint8)


@both_tiers
@pytest.mark.parametrize("mode", [INT8, FP8, INT4, INT4.without_rotation(), AFFINE4], ids=str)
def test_codes_are_those_of_the_stored_scale(tier: ModuleType, mode: Mode) -> None:
    """Codes of levels are none of a word's business: those of searches and fits come first."""
    # Of 2.56 million codes two differ when the exact scale encodes.
    x = randn(20_000, 128, seed=3)
    got = tier.quantize(x, mode)
    assert_bit_exact(
        reference.unpack_codes(got.codes, mode.bits, 128),
        codes_by_the_word(rotated(x, mode), got.words, mode),
    )


def test_an_exact_scale_that_encodes_would_be_seen() -> None:
    """The probe above on an encoder that truncates its scale when it stores it."""
    mode = replace(INT4_FIRST_IMPLEMENTATION, rotation=None)
    x = randn(20_000, 128, seed=3)
    got = reference.quantize(x, mode)
    codes = reference.unpack_codes(got.codes, 4, 128)
    assert 0 < (codes != codes_by_the_word(x, got.words, mode)).sum() < 50


UNSIGNED = [
    mode
    for mode in (*MODES.values(), *VARIANTS.values())
    if mode.grid is Grid.UNSIGNED
    and mode.normalization is not Normalization.CLAMPED_RANGE
    and mode.rounding is Rounding.HALF_AWAY
    and mode.rotation in (None, RANDOM_HADAMARD)
]


@both_tiers
@pytest.mark.parametrize("mode", [INT8, *UNSIGNED], ids=str)
def test_one_sided_rows_are_not_saturated(tier: ModuleType, mode: Mode) -> None:
    """All positive or all negative where codes are chosen: no zero-point may lose the offset."""
    y = 10 + 2 * rand(8, 128, seed=1)
    y = torch.cat([y, -y])
    x = (
        y
        if mode.rotation is None
        else reference.hadamard_transform(y, mode.rotation, inverse=True)
    )
    read = rotated(round_trip(tier, x, mode), mode)
    reach = y.abs().amax(-1, keepdim=True)
    if mode.grid is Grid.SIGNED:
        allowed = reach / 254
    elif mode.word is StoredWord.FLOAT32_ZERO_POINT:
        allowed = reach / (2 * mode.max_code)
    else:
        # Smallest value and step are float16: each within one part in 2^11.
        span = y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)
        allowed = span / (2 * mode.max_code) + (reach + span) * 2.0**-11
    assert ((read - y).abs() <= allowed * (1 + 1e-5)).all()


@both_tiers
@pytest.mark.parametrize(
    "mode", [mode for mode in UNSIGNED if mode.rotation is None or mode.bits < 4], ids=str
)
def test_no_code_spills_into_its_neighbor(tier: ModuleType, mode: Mode) -> None:
    """Rows far from zero, where a zero-point that is added after the clamp leaves the range."""
    rows = 10_000 if tier is reference else 1000
    x = randn(rows, 64) * (0.01 + 9.99 * rand(rows, 1, seed=1)) + 40 * rand(rows, 1, seed=2) - 20
    got = tier.quantize(x, mode)
    codes = codes_by_the_word(rotated(x, mode), got.words, mode)
    assert codes.max() == mode.max_code
    assert codes.min() == 0
    assert_bit_exact(got.codes, reference.pack_codes(codes, mode.bits))


# ------------------------------------------------------------------------------- eight bits


@both_tiers
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_saturates_and_never_makes_a_nan(tier: ModuleType, dtype: torch.dtype) -> None:
    """Every largest magnitude of 16-bit rows, and so every quotient just above 448."""
    if dtype is torch.float32:
        largest = torch.exp(rand(20_000, seed=4) * 180 - 95)
    else:
        last = {torch.float16: 0x7BFF, torch.bfloat16: 0x7F7F}[dtype]
        bits = torch.arange(1, last + 1, dtype=torch.int16, device=DEVICE)
        largest = bits.view(dtype).float()
    x = torch.stack([largest, -largest, 0 * largest, -0.4 * largest], -1).to(dtype)
    got = tier.quantize(x, FP8)
    assert got.words.isfinite().all()
    assert (got.codes & 0x7F).max() == 0x7E
    # Where the floor of the scale is not felt the largest is always 448.
    ordinary = x[:, 0].float() > 448e-6
    assert ordinary.sum() > 10_000
    assert (got.codes[ordinary][:, :3] == torch.tensor([0x7E, 0xFE, 0], device=DEVICE)).all()
    # There is no static scale: an infinity makes its row NaN on every tier, as a NaN does.
    for bad in (torch.nan, torch.inf, -torch.inf):
        row = torch.tensor([[448.0, 464.0, 1000.0, bad]], device=DEVICE).to(dtype)
        assert round_trip(tier, row, FP8).isnan().all()


@both_tiers
def test_fp8_rounds_once(tier: ModuleType) -> None:
    """Numbers that a stop at half precision would round twice, always toward zero."""
    x = (rand(4096, 16, seed=5) * 2 - 1) * 448
    x[:, :4] = torch.tensor([448.0, 400.199585, 272.156555, 136.002075])
    x[1::2] *= -1
    got = tier.quantize(x, FP8)
    assert (got.words == 1.0).all()
    read = tier.dequantize(*got, FP8, 16)
    assert read[0, :4].tolist() == [448.0, 416.0, 288.0, 144.0]
    assert torch.equal(read, x.to(torch.float8_e4m3fn).float())


OTHER_FLOATS = (torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


@both_tiers
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, *OTHER_FLOATS], ids=str)
def test_another_dialect_of_fp8_is_refused_by_name(tier: ModuleType, dtype: torch.dtype) -> None:
    """Codes are bytes, whose mode says what they mean; nothing else passes for them."""
    name = str(dtype).removeprefix("torch.")
    cache = new_paged_kv(2, 4, 1, 16, FP8, device=DEVICE)
    other = cache._replace(codes=cache.codes.view(dtype))
    x, slots = randn(3, 1, 16), torch.arange(3, device=DEVICE)
    index = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), slots[1:2], slots[:2]
    got = tier.quantize(x, FP8)
    for call in (
        lambda: tier.quantize(x.to(dtype), FP8),
        lambda: tier.dequantize(got.codes.view(dtype), got.words, FP8, 16),
        lambda: tier.reshape_and_cache(x.to(dtype), x, cache, cache, slots),
        lambda: tier.reshape_and_cache(x, x, cache, other, slots),
        lambda: tier.paged_attention(x[:1].to(dtype), cache, cache, *index, scale=1.0),
        lambda: tier.paged_attention(x[:1], other, other, *index, scale=1.0),
    ):
        with pytest.raises(TypeError, match=rf"must be .*got (torch\.)?{name}"):
            call()
    with pytest.raises(ValueError, match=rf"mode must be one of .*got 'fp8_{name}'"):
        find_mode(f"fp8_{name}")


@both_tiers
def test_fp8_bytes_are_those_of_e4m3fn(tier: ModuleType) -> None:
    """In e4m3fnuz values are half as large, and 0x80 is NaN."""
    codes = torch.arange(256, device=DEVICE).to(torch.uint8)[:, None]
    read = tier.dequantize(codes, torch.ones(256, device=DEVICE), FP8, 1)[:, 0]
    assert read.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    numbers = ~read.isnan()
    assert_bit_exact(read[numbers], codes.view(torch.float8_e4m3fn)[:, 0].float()[numbers])
    assert read[0x38] == 1.0
    assert read[0x7E] == 448.0
    assert bool(read[0x80] == 0)
    assert bool(read[0x80].signbit())


@both_tiers
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "mode", [INT8, *(INT8.with_rounding(r) for r in (Rounding.HALF_EVEN, Rounding.TOWARD_ZERO))],
    ids=str,
)  # fmt: skip
def test_int8_never_wraps(tier: ModuleType, mode: Mode, dtype: torch.dtype) -> None:
    largest = 1e-6 * 10 ** (10.77 * rand(20_000, 1, seed=6))
    sign = 1 - 2 * (rand(20_000, 8, seed=7) < 0.5).float()
    x = (largest * sign).to(dtype)
    codes = tier.quantize(x, mode).codes.view(torch.int8)
    assert (codes * sign >= 0).all()
    assert codes.abs().max() == codes.max() == 127
    assert codes.min() == -127
    # A quotient just below 127, cut to 126, is what truncation is for.
    ordinary = (x[:, 0].abs() > 1.3e-4) & (mode.rounding is not Rounding.TOWARD_ZERO)
    assert (codes[ordinary].abs() == 127).all()


# ---------------------------------------------------------------------- memory and packing

Lay = Callable[[Tensor], Tensor]
VIEWS: dict[str, Lay] = {
    "fused": lambda x: torch.stack([x.flip(0), x, x.flip(0)], 1)[:, 1],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda x: torch.stack([x, x.flip(0)], -1).flatten(-2)[..., ::2],
    "expanded": lambda x: x[:, :1].clone().expand_as(x),
    "offset": lambda x: torch.cat([x.flatten()[:3], x.flatten()])[3:].view(x.shape),
}


@both_tiers
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_not_read_as_if_they_were_packed(tier: ModuleType, view: str) -> None:
    """What `tests/cases.py` does with rows that are quantized, for everything else."""
    lay = VIEWS[view]

    def check(function: Callable[..., Tensor], *inputs: Tensor) -> None:
        views = [lay(x) for x in inputs]
        kept = [x.clone() for x in views]
        found = function(tier, *views)
        assert_bit_exact(found, function(reference, *(x.contiguous() for x in kept)))
        for x, before in zip(views, kept, strict=True):
            assert torch.equal(x, before)

    x = randn(7, 3, 32)
    check(lambda t, x: t.hadamard_transform(x, RANDOM_HADAMARD), x)
    check(lambda t, x: t.hadamard_transform(x, RANDOM_HADAMARD, inverse=True), x)
    for bits in (1, 2, 3, 4, 8):
        codes = (rand(7, 3, 32, seed=bits) * 2**bits).to(torch.uint8)
        check(lambda t, c, bits=bits: t.pack_codes(c, bits), codes)
        packed = reference.pack_codes(codes, bits)
        check(lambda t, p, bits=bits: t.unpack_codes(p, bits, 32), packed)
    for mode in (INT8, INT4, find_mode("lloyd3"), find_mode("lloyd4_w16")):
        codes, words = reference.quantize(x, mode)
        check(
            lambda t, c, w, mode=mode: t.dequantize(c, w[..., 0], mode, 32),
            codes,
            words[..., None].expand(-1, -1, 4),
        )
        check(lambda t, x, mode=mode: t.quantize(x, mode).codes, x)


@both_tiers
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [2, 6, 8, 63, 66, 100, 126, 130, 136])
def test_the_last_codes_are_packed(tier: ModuleType, bits: int, head_dim: int) -> None:
    codes = torch.zeros(3, head_dim, dtype=torch.uint8, device=DEVICE)
    codes[:, -3:] = 2**bits - 1
    if head_dim * bits % 8 or (bits == 3 and head_dim % 8):
        with pytest.raises(ValueError, match=f"codes must fill whole bytes with {bits}-bit codes"):
            tier.pack_codes(codes, bits)
        return
    packed = tier.pack_codes(codes, bits)
    assert packed.shape == (3, head_dim * bits // 8)
    assert_bit_exact(packed, reference.pack_codes(codes, bits))
    assert torch.equal(tier.unpack_codes(packed, bits, head_dim), codes)


UNROTATED = [INT8, FP8] + [
    find_mode(name).without_rotation()
    for name in ("int4", "affine4", "int2", "lloyd1", "lloyd3", "lloyd4_w16", "smax2_search")
]


@both_tiers
@pytest.mark.parametrize("mode", UNROTATED, ids=str)
def test_the_last_channels_of_a_row_are_stored(tier: ModuleType, mode: Mode) -> None:
    for head_dim in (2, 6, 8, 63, 66, 100, 126, 130, 136):
        x = torch.zeros(5, head_dim, device=DEVICE)
        x[:, -3:] = torch.tensor([-4.0, 4.0, 4.0], device=DEVICE)[-head_dim:]
        if head_dim % mode.codes_per_byte.numerator:
            with pytest.raises(ValueError, match="head_dim must be a positive multiple of"):
                tier.quantize(x, mode)
            continue
        got = tier.quantize(x, mode)
        assert got.codes.shape == (5, head_dim * mode.bits // 8)
        read = tier.dequantize(*got, mode, head_dim)
        assert torch.equal(read[:, -3:].sign(), x[:, -3:].sign())
        assert_bit_exact(read, round_trip(reference, x, mode))


@both_tiers
@pytest.mark.parametrize(
    ("bits", "decibels"), [(1, 4.40), (2, 9.30), (3, 14.62), (4, 20.22)], ids=str
)
def test_no_width_is_hard_coded(tier: ModuleType, bits: int, decibels: float) -> None:
    mode = find_mode(f"lloyd{bits}_unit")
    x = randn(2000, 128)
    assert codes_of(tier, x, mode).unique().tolist() == list(range(2**bits))
    error = (round_trip(tier, x, mode) - x).double().square().sum() / x.double().square().sum()
    assert float(-10 * error.log10()) == pytest.approx(decibels, abs=0.3)


@every_mode
def test_every_code_is_used(tier: ModuleType, mode: Mode) -> None:
    if mode.bits == 8:
        # From the largest down to where one row in 16 still has a number.
        x, codes = randn(400, 128), {Grid.SIGNED: 255, Grid.E4M3: 2 * 80}[mode.grid]
    else:
        x, codes = randn(3 if mode.trellis else 60, 128), mode.levels
    assert len(codes_of(tier, x, mode).unique()) >= codes


# ----------------------------------------------------------------------------- rotation


@both_tiers
@pytest.mark.parametrize("head_dim", [80, 96, 112, 192, 320, 576])
def test_head_sizes_that_are_no_power_of_two(tier: ModuleType, head_dim: int) -> None:
    """The transform of each block is orthogonal; rotated lengths are `sqrt(N)` times as long."""
    q, k = ((rand(16, head_dim, seed=seed) * 31).floor() - 15 for seed in (8, 9))
    gain = RANDOM_HADAMARD.gain(head_dim)
    rows = [tier.hadamard_transform(x, RANDOM_HADAMARD) for x in (q, k)]
    for a, b in ((0, 0), (0, 1), (1, 1)):
        product = (rows[a].double() * rows[b].double()).sum(-1)
        assert torch.equal(product, ((q, k)[a].double() * (q, k)[b].double()).sum(-1) * gain)
    assert torch.equal(tier.hadamard_transform(rows[0], RANDOM_HADAMARD, inverse=True), q)
    for mode in (INT4, INT2, AFFINE4, find_mode("lloyd3")):
        x = randn(8, head_dim)
        got = tier.quantize(x, mode)
        want = reference.quantize(x, mode)
        assert_bit_exact(got.codes, want.codes)
        assert_bit_exact(got.words, want.words)
        read = tier.dequantize(*got, mode, head_dim)
        assert ((read - x).norm(dim=-1) / x.norm(dim=-1)).max() < 0.5


@both_tiers
def test_sums_that_float16_cannot_hold(tier: ModuleType) -> None:
    for value in (600.0, 60_000.0):
        x = torch.full((1, 128), value, dtype=torch.float16, device=DEVICE)
        y = tier.hadamard_transform(x, HADAMARD)
        assert y.dtype is torch.float32
        # Unnormalized: sqrt(128) times 6,788.2, or 678,823.
        assert y[0].tolist() == [128 * value] + [0.0] * 127
        assert torch.equal(tier.hadamard_transform(y, HADAMARD, inverse=True), x.float())
    x = (randn(64, 256) * 1000).half()
    exact = reference.hadamard.rotate(x.double(), RANDOM_HADAMARD)
    error = (tier.hadamard_transform(x, RANDOM_HADAMARD) - exact).norm() / exact.norm()
    assert error < 1e-6


@every_mode
def test_large_float16_rows_come_back(tier: ModuleType, mode: Mode) -> None:
    x = torch.stack([torch.full((128,), 60_000.0), 1000 * randn(128).cpu(), torch.ones(128) * 600])
    x = x.to(DEVICE, torch.float16)
    if mode.word is StoredWord.FLOAT16:
        x[0] /= 4  # Its word would be infinite, which makes a NaN row.
    read = round_trip(tier, x, mode)
    assert read.isfinite().all()
    assert ((read - x).norm(dim=-1) / x.float().norm(dim=-1)).max() < 0.9


@every_mode
def test_tokens_one_by_one_are_tokens_at_once(tier: ModuleType, mode: Mode) -> None:
    """A way of its own for single tokens could rotate otherwise."""
    few = is_searched(mode)
    for head_dim in (32,) if few else (64,) if tier is not reference else (64, 128):
        tokens = 4 if few else 17
        k = randn(tokens, 2, head_dim, seed=99)
        whole = tier.quantize(k, mode)
        values = reference.dequantize(*whole, mode, head_dim)
        assert_bit_exact(tier.dequantize(*whole, mode, head_dim), values)
        ones = range(tokens if tier is reference else 2)
        for start, end in [(0, tokens - 1), (tokens - 1, tokens), *((i, i + 1) for i in ones)]:
            part = tier.quantize(k[start:end], mode)
            assert_bit_exact(part.codes, whole.codes[start:end])
            assert_bit_exact(part.words, whole.words[start:end])
            read = tier.dequantize(*part, mode, head_dim)
            assert_bit_exact(read, values[start:end])


@both_tiers
@pytest.mark.parametrize("mode", [INT4, find_mode("lloyd3"), find_mode("smax4")], ids=str)
def test_tables_of_one_dtype_do_not_serve_another(tier: ModuleType, mode: Mode) -> None:
    """The order of the calls decides nothing, and nobody can write to a table."""
    x = (rand(4, 2, 32, seed=3) * 31).floor() - 15
    rotated_x, want = tier.hadamard_transform(x, RANDOM_HADAMARD), tier.quantize(x, mode)
    want_values = tier.dequantize(*want, mode, 32)
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.float16):
        if dtype is torch.float64:
            with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16"):
                tier.quantize(x.to(dtype), mode)
            continue
        reference.signs(32, RANDOM_HADAMARD, dtype=dtype, device=DEVICE).zero_()
        y = tier.hadamard_transform(x.to(dtype), RANDOM_HADAMARD)
        assert_bit_exact(y, rotated_x)
        got = tier.quantize(x.to(dtype), mode)
        assert_bit_exact(got.codes, want.codes)
        assert_bit_exact(got.words, want.words)
        values = tier.dequantize(*got, mode, 32)
        assert_bit_exact(values, want_values)
        for result in (y, *got, values):
            result.zero_()
        want, want_values = (
            tier.quantize(x, mode),
            tier.dequantize(*tier.quantize(x, mode), mode, 32),
        )
        rotated_x = tier.hadamard_transform(x, RANDOM_HADAMARD)
    assert rotated_x.any()
    assert want_values.any()


@both_tiers
@pytest.mark.parametrize("num_levels", [3, 16, 40])
def test_a_codebook_of_a_heavy_tail_finds_the_nearest_level(
    tier: ModuleType, num_levels: int
) -> None:
    samples = np.random.default_rng(0).standard_cauchy(10_000)
    book = fit_samples(samples, num_levels).codebook
    mode = find_mode("lloyd4_unit").without_rotation().with_codebook(book)
    x = torch.from_numpy(np.resize(samples, (200, 64))).float().to(DEVICE)
    codes = codes_of(tier, x, mode).long()
    read = round_trip(tier, x, mode)
    assert read.isfinite().all()
    levels = torch.tensor(book.levels, dtype=torch.float64, device=DEVICE)
    z = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    distance = (z[..., None] - levels).abs()
    own = distance.gather(-1, codes[..., None])[..., 0]
    assert (own <= distance.amin(-1) * (1 + 1e-5) + 1e-6).all()


# --------------------------------------------------------------------------- the paged write

BLOCKS, BLOCK_SIZE = 5, 4
SLOTS = BLOCKS * BLOCK_SIZE
BYTE, WORD = 0xAB, 123.0


def guarded(mode: Mode, heads: int, head_dim: int) -> tuple[PagedKV, PagedKV]:
    """A cache of sentinels, and the wider one of which it leaves the first and last block."""
    whole = new_paged_kv(BLOCKS + 2, BLOCK_SIZE, heads, head_dim, mode, device=DEVICE)
    whole.codes.fill_(BYTE)
    whole.words.fill_(WORD)
    return whole._replace(codes=whole.codes[1:-1], words=whole.words[1:-1]), whole


def assert_only(whole: PagedKV, rows: dict[int, Tensor]) -> None:
    """The guarded cache holds these rows, slot by slot, and sentinels everywhere else."""
    codes, words = (side.transpose(1, 2).flatten(0, 1) for side in as_hnd(whole))
    for place in range(len(words)):
        slot = place - BLOCK_SIZE
        if slot in rows:
            stored = reference.quantize(rows[slot], whole.mode)
            assert_bit_exact(codes[place], stored.codes, f"codes of slot {slot}")
            assert_bit_exact(words[place], stored.words, f"words of slot {slot}")
            assert not words[place].isnan().any()
        else:
            assert (codes[place] == BYTE).all(), slot
            assert (words[place] == WORD).all(), slot


@every_mode
def test_nothing_is_written_but_the_mapped_tokens(tier: ModuleType, mode: Mode) -> None:
    """Padding of a graph: rows past the mapping, and slots that are none, on guarded pages."""
    x = randn(9, 2, 32)
    x[5:] = torch.nan
    for index, tail in ((torch.int32, [-1] * 4), (torch.int64, []), (torch.int64, [SLOTS, -2])):
        cache, whole = guarded(mode, 2, 32)
        slots = torch.tensor([3, -1, 17, SLOTS + 3, 0, *tail], dtype=index, device=DEVICE)
        tier.reshape_and_cache(x, x, cache, cache, slots, check=False)
        assert_only(whole, {3: x[0], 17: x[2], 0: x[4]})
        if tail[:1] == [SLOTS]:
            with pytest.raises(ValueError, match=f"must be below {SLOTS} .*, got {SLOTS + 3}"):
                tier.reshape_and_cache(x, x, cache, cache, slots, check=True)
            pairs = torch.tensor([[0, BLOCKS], [BLOCKS, 1], [-1, 2], [0, -1]], device=DEVICE)
            tier.copy_blocks(cache, pairs, check=False)
            assert_only(whole, {3: x[0], 17: x[2], 0: x[4]})
        if is_searched(mode) and tier is not reference:
            break


@every_mode
def test_a_second_view_clears_nothing(tier: ModuleType, mode: Mode) -> None:
    """A layer that shares the cache of another comes late."""
    x = randn(2, 1, 32)
    (cache, whole), late = guarded(mode, 1, 32), randn(1, 1, 32, seed=1)
    tier.reshape_and_cache(x, x, cache, cache, torch.arange(2, device=DEVICE))
    view = PagedKV(whole.codes[1:-1], whole.words[1:-1], mode, Layout.HND)
    assert_only(whole, dict(enumerate(x)))
    tier.reshape_and_cache(late, late, view, view, torch.tensor([9], device=DEVICE))
    assert_only(whole, {**dict(enumerate(x)), 9: late[0]})
    codes, words = (side[0, :, :2].transpose(0, 1) for side in as_hnd(view))
    assert_bit_exact(tier.dequantize(codes, words, mode, 32), round_trip(reference, x, mode))


@every_mode
def test_keys_and_values_are_treated_alike(tier: ModuleType, mode: Mode) -> None:
    heads_of = (1,) if is_searched(mode) and tier is not reference else (1, 2, 8)
    for heads, layout in zip(heads_of, (Layout.HND, Layout.NHD, Layout.NHD), strict=False):
        x = randn(3, heads, 32, seed=heads)
        sides = [new_paged_kv(3, 4, heads, 32, mode, layout=layout, device=DEVICE) for _ in "kv"]
        slots = torch.tensor([7, 2, 11], device=DEVICE)
        tier.reshape_and_cache(x, x, *sides, slots)
        assert_bit_exact(sides[0].codes, sides[1].codes)
        assert_bit_exact(sides[0].words, sides[1].words)
        for side in sides:
            codes, words = (part.transpose(1, 2).flatten(0, 1)[slots] for part in as_hnd(side))
            read = reference.dequantize(codes, words, mode, 32)
            assert_bit_exact(read, round_trip(reference, x, mode))


@both_tiers
@pytest.mark.parametrize(
    ("head_dim", "heads", "tokens"), [(64, 1, 42), (128, 1, 42), (64, 4, 7), (64, 1, 1)]
)
def test_small_head_counts_are_written_the_same_every_time(
    tier: ModuleType, head_dim: int, heads: int, tokens: int
) -> None:
    """Twenty writes to slots in no order; of every kind on a GPU, where it was seen."""
    x = randn(tokens, heads, head_dim)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)
    want = reference.quantize(x, INT4)
    error = (reference.dequantize(*want, INT4, head_dim) - x).norm(dim=-1) / x.norm(dim=-1)
    assert error.max() <= 0.25
    for _ in range(20):
        caches = [new_paged_kv(3, 16, heads, head_dim, INT4, device=DEVICE) for _ in "kv"]
        tier.reshape_and_cache(x, x, *caches, slots)
        for cache in caches:
            codes, words = (side.transpose(1, 2).flatten(0, 1) for side in as_hnd(cache))
            assert_bit_exact(codes[slots], want.codes)
            assert_bit_exact(words[slots], want.words)
            assert words.count_nonzero() == tokens * heads
