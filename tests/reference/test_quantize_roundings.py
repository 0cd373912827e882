"""Rows under each rounding: planted ties, and the statistics of the stochastic one."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from kvq.analysis.planted_rows import planted_rows
from kvq.modes import Grid, Mode
from kvq.modes import mode as find_mode
from kvq.reference import dequantize, quantize, quantize_stochastic, unpack_codes
from kvq.reference.rounding import Rounder
from kvq.rounding import Rounding
from tests.compare import assert_bit_exact

INT8, FP8, INT4, AFFINE4 = (find_mode(name) for name in ("int8", "fp8", "int4", "affine4"))

# Unrotated rows and codes under each rounding; the scale is 1.
TIES = {
    # int8: absmax 127.
    INT8: (
        [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, -126.5],
        {
            Rounding.HALF_AWAY: [127, 1, 2, 3, -1, -2, -3, 1, -127],
            Rounding.HALF_EVEN: [127, 0, 2, 2, 0, -2, -2, 0, -126],
            Rounding.TOWARD_ZERO: [127, 0, 1, 2, 0, -1, -2, 0, -126],
        },
    ),
    # int4: range 15 from -7.5, so the zero-point is a tie too: 8, or 7 toward zero.
    INT4.without_rotation(): (
        [7.5, -7.5, 0.0, 0.5, 1.5, -0.5, -1.5, 2.0, -2.25],
        {
            Rounding.HALF_AWAY: [15, 1, 8, 9, 10, 8, 7, 10, 6],
            Rounding.HALF_EVEN: [15, 0, 8, 8, 10, 8, 6, 10, 6],
            Rounding.TOWARD_ZERO: [14, 0, 7, 7, 8, 6, 5, 9, 4],
        },
    ),
    # affine4: from -2 with a step of 1.
    AFFINE4.without_rotation(): (
        [13.0, -2.0, -1.5, -0.5, 0.5, 0.75, 12.5, 1.0],
        {
            Rounding.HALF_AWAY: [15, 0, 1, 2, 3, 3, 15, 3],
            Rounding.HALF_EVEN: [15, 0, 0, 2, 2, 3, 14, 3],
            Rounding.TOWARD_ZERO: [15, 0, 0, 1, 2, 2, 14, 3],
        },
    ),
    # fp8: absmax 448; 17 and 19 lie between 16, 18 and 20.
    FP8: (
        [448.0, 17.0, 19.0, -17.0, -19.0, 432.0, 2.0**-10, 3 * 2.0**-10, 17.5],
        {
            Rounding.HALF_AWAY: [448.0, 18.0, 20.0, -18.0, -20.0, 448.0, 2.0**-9, 2.0**-8, 18.0],
            Rounding.HALF_EVEN: [448.0, 16.0, 20.0, -16.0, -20.0, 448.0, 0.0, 2.0**-8, 18.0],
            Rounding.TOWARD_ZERO: [448.0, 16.0, 18.0, -16.0, -18.0, 416.0, 0.0, 2.0**-9, 16.0],
        },
    ),
}


@pytest.mark.parametrize(
    ("mode", "rounding"),
    [(mode, rounding) for mode, (_, codes) in TIES.items() for rounding in codes],
    ids=str,
)
def test_ties_go_where_the_rounding_says(mode: Mode, rounding: Rounding) -> None:
    lanes, codes = TIES[mode]
    x = torch.zeros(1, 16)
    x[0, : len(lanes)] = torch.tensor(lanes)
    rounded = replace(mode, rounding=rounding)
    got = quantize(x, rounded)
    packed = unpack_codes(got.codes, mode.bits, 16)
    if mode.grid is Grid.E4M3:
        stored = packed.view(torch.float8_e4m3fn).float()
    elif mode.grid is Grid.SIGNED:
        stored = packed.view(torch.int8).float()
    else:
        stored = packed.float()
    assert stored[0, : len(lanes)].tolist() == codes[rounding]


@pytest.mark.parametrize(
    "mode", [INT8, FP8, INT4.without_rotation(), AFFINE4.without_rotation()], ids=str
)
@pytest.mark.parametrize("rounder", [torch.ceil, torch.floor], ids=["up", "down"])
def test_codes_are_clamped_where_a_stochastic_rounding_could_leave_the_grid(
    mode: Mode, rounder: Rounder
) -> None:
    # What it does in the worst case. The largest number of a row, over its scale, may come out a
    # little above the largest code; with the scale cut to 20 bits a one-sided row has a
    # zero-point a little above 15.
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, -x.abs(), x.abs()])
    codes, words = sys.modules["kvq.reference.quantize"]._quantize(x, mode, rounder)
    if mode is INT8:
        scale = x.abs().amax(-1, keepdim=True) / torch.tensor(127.0)
        rounded = rounder(x * (torch.ones(()) / scale))
        assert rounded.abs().max() == 128
        assert torch.equal(codes.view(torch.int8), rounded.clamp(-128, 127).to(torch.int8))
    values = dequantize(codes, words, mode, 64)
    step = (x.amax(-1) - x.amin(-1)).maximum(x.abs().amax(-1)) / (7 if mode is FP8 else 15)
    assert ((values - x).abs() <= 1.01 * step[:, None]).all()


def test_the_shipped_roundings() -> None:
    assert INT8.rounding is Rounding.HALF_AWAY
    assert FP8.rounding is Rounding.HALF_EVEN
    assert INT4.rounding is Rounding.HALF_AWAY
    assert find_mode("affine4").rounding is Rounding.HALF_AWAY


class TestStochastic:
    """Unrotated rows, so that a lane is one number in the whole sample."""

    MODES = (INT8, INT4.without_rotation(), AFFINE4.without_rotation())

    @pytest.mark.parametrize("mode", MODES, ids=str)
    def test_unbiased_with_the_variance_of_its_fraction(self, mode: Mode) -> None:
        n = 20_000
        generator = torch.Generator().manual_seed(0)
        # Integral extremes and zero-point, and a scale of 1 where no code is clamped.
        x = torch.linspace(-5.0, 7.0, 64)
        x[0], x[1] = (-127.0, 127.0) if mode is INT8 else (-6.0, 9.0)
        got = quantize_stochastic(x.expand(n, 64), mode, generator)
        values = dequantize(*got, mode, 64).double()[:, 2:]
        fraction = (x[2:] - x[2:].floor()).double()
        variance = fraction * (1 - fraction)
        bias = values.mean(0) - x[2:].double()
        # n = 20,000, seed 0, 62 lanes: five standard errors.
        assert (bias.abs() <= 5 * (variance / n).sqrt() + 1e-6).all()
        spread = values.var(0)
        assert (spread - variance).abs().max() <= 5 * 0.25 / n**0.5

    def test_mean_squared_error_is_a_sixth_of_the_squared_step(self) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(4000, 128, generator=generator) * 200 - 100
        x[:, 0] = 127.0
        stored = dequantize(*quantize_stochastic(x, INT8, generator), INT8, 128)
        error = (stored - x)[:, 1:].double().square()
        # E f(1-f) = 1/6; n = 508,000, standard error 0.0745 / sqrt(n), seed 1.
        assert abs(error.mean() - 1 / 6) <= 5 * 0.0745 / error.numel() ** 0.5
        nearest = (dequantize(*quantize(x, INT8), INT8, 128) - x)[:, 1:].double().square()
        assert abs(nearest.mean() - 1 / 12) <= 5 * 0.0745 / error.numel() ** 0.5

    @pytest.mark.parametrize("name", ["int8", "fp8", "int4", "affine4"])
    def test_the_same_generator_gives_the_same_bits(self, name: str) -> None:
        x = planted_rows(0, 100, 32)
        mode = find_mode(name)
        draws = [
            quantize_stochastic(x, mode, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
        ]
        assert_bit_exact(draws[0].codes, draws[1].codes)
        assert_bit_exact(draws[0].words, draws[1].words)
        assert not torch.equal(draws[0].codes, draws[2].codes)
        bad = ~x.isfinite().all(-1)
        assert not draws[0].codes[bad].any()

    def test_the_mode_s_own_rounding_has_no_say(self) -> None:
        x = planted_rows(0, 100, 32)
        draws = [
            quantize_stochastic(x, mode, torch.Generator().manual_seed(0))
            for mode in (INT4, INT4.with_rounding(Rounding.STOCHASTIC))
        ]
        assert_bit_exact(draws[0].codes, draws[1].codes)
