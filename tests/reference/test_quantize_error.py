"""Errors: what theory says of each scale fit, per row and on average, and what the modes reach."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvq.modes import MODES, RANDOM_HADAMARD, Mode, ScaleFit
from kvq.modes import mode as find_mode
from kvq.reference import dequantize, hadamard_transform, quantize, unpack_codes
from kvq.rounding import Rounding
from tests import oracle

BITS = (1, 2, 3, 4)


def gaussian(rows: int, head_dim: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(rows, head_dim, generator=torch.Generator().manual_seed(seed))


def fitted(bits: int, fit: ScaleFit) -> Mode:
    ending = "" if fit is ScaleFit.LEAST_SQUARES else f"_{fit}"
    mode = find_mode(f"lloyd{bits}{ending}")
    assert mode.scale_fit is fit
    return mode


def relative_errors(x: Tensor, mode: Mode) -> Tensor:
    """Squared error over squared length of each row, in float64."""
    values = dequantize(*quantize(x, mode), mode, x.shape[-1]).double()
    return (values - x.double()).square().sum(-1) / x.double().square().sum(-1)


def rotated_pair(x: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
    """The rotated rows as they are encoded and as they are read, in float64 without rounding."""
    assert mode.rotation is not None
    assert mode.codebook is not None
    head_dim = x.shape[-1]
    got = quantize(x, mode)
    levels = torch.tensor(mode.codebook.levels, dtype=torch.float64)
    codes = unpack_codes(got.codes, mode.bits, head_dim).to(torch.int64)
    read = levels[codes] * got.words.double()[:, None] * mode.rotation.gain(head_dim)
    return hadamard_transform(x, mode.rotation).double(), read


# ------------------------------------------------------------------------------- row by row


def hard_rows() -> Tensor:
    """The oracle's rows that are neither zero nor NaN rows in a codebook mode."""
    x = torch.from_numpy(oracle.planted_rows(128))
    squares = hadamard_transform(x, RANDOM_HADAMARD).double().square().sum(-1)
    return x[x.isfinite().all(-1) & (squares > 2.0**-100) & (squares < 2.0**120)]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_row_is_read_as_itself_and_not_as_its_mirror_image(mode: Mode) -> None:
    """Rows that are divided by a negative number too, whatever the fit."""
    assert relative_errors(gaussian(100), mode).max() < 1.0


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ["gaussian", "planted"])
def test_no_fit_has_a_smaller_squared_error_than_least_squares(bits: int, rows: str) -> None:
    x = gaussian(2000) if rows == "gaussian" else hard_rows()
    assert len(x) > 500
    errors = {}
    for fit in ScaleFit:
        y, read = rotated_pair(x, fitted(bits, fit))
        errors[fit] = (read - y).square().sum(-1) / y.square().sum(-1)
    best = errors.pop(ScaleFit.LEAST_SQUARES)
    for fit, error in errors.items():
        assert (best <= error * (1 + 1e-6) + 1e-12).all(), fit
        # It is strictly better nearly everywhere on Gaussian rows.
        if rows == "gaussian":
            assert (best < error).float().mean() > 0.98, fit


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ["gaussian", "planted"])
def test_what_each_fit_keeps(bits: int, rows: str) -> None:
    x = gaussian(2000) if rows == "gaussian" else hard_rows()
    # The projection of a row on what is read, and what it should be.
    y, read = rotated_pair(x, fitted(bits, ScaleFit.UNBIASED))
    assert ((y * read).sum(-1) / y.square().sum(-1) - 1).abs().max() < 1e-5
    y, read = rotated_pair(x, fitted(bits, ScaleFit.NORM_MATCH))
    assert (read.norm(dim=-1) / y.norm(dim=-1) - 1).abs().max() < 1e-5
    y, read = rotated_pair(x, fitted(bits, ScaleFit.LEAST_SQUARES))
    assert ((y * read).sum(-1) / read.square().sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["smax2", "smax3", "smax4"])
def test_signed_max_words_are_those_of_least_squares(name: str) -> None:
    y, read = rotated_pair(gaussian(2000), find_mode(name))
    assert ((y * read).sum(-1) / read.square().sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("bits", BITS)
def test_all_fits_share_their_codes(bits: int) -> None:
    x = gaussian(500)
    codes = [quantize(x, fitted(bits, fit)).codes for fit in ScaleFit]
    assert all(torch.equal(codes[0], other) for other in codes[1:])


# ------------------------------------------------------------------------------- on average

# Relative squared error of Gaussian rows at D = 128, from quadrature over the law of a coordinate
# on the sphere with the N(0,1) codebook (unit), and from simulation (the others, 1 / D corrected).
# The last number is what the value itself may be off by, relatively.
MEAN_ERRORS = [
    (1, ScaleFit.UNIT, 0.36089, 1e-3),
    (2, ScaleFit.UNIT, 0.11600, 1e-3),
    (3, ScaleFit.UNIT, 0.03397, 2e-3),
    (4, ScaleFit.UNIT, 0.0093248, 1e-3),
    (1, ScaleFit.LEAST_SQUARES, 0.36073, 3e-3),
    (2, ScaleFit.LEAST_SQUARES, 0.11539, 3e-3),
    (3, ScaleFit.LEAST_SQUARES, 0.03352, 3e-3),
    (4, ScaleFit.LEAST_SQUARES, 0.00917, 3e-3),
    (2, ScaleFit.UNBIASED, 0.13079, 3e-3),
]


@pytest.mark.parametrize(("bits", "fit", "want", "slack"), MEAN_ERRORS)
def test_mean_error_of_gaussian_rows(bits: int, fit: ScaleFit, want: float, slack: float) -> None:
    errors = relative_errors(gaussian(8192), fitted(bits, fit))
    # n = 8,192, seed 0: five standard errors.
    standard_error = errors.std().item() / math.sqrt(len(errors))
    assert abs(errors.mean().item() - want) <= 5 * standard_error + slack * want


@pytest.mark.parametrize(
    ("bits", "signal_to_noise"), [(1, 4.396), (2, 9.300), (3, 14.616), (4, 20.222)]
)
def test_every_level_is_used_and_the_noise_is_that_of_theory(
    bits: int, signal_to_noise: float
) -> None:
    x = gaussian(2000)
    mode = fitted(bits, ScaleFit.UNIT)
    codes = unpack_codes(quantize(x, mode).codes, bits, 128)
    assert codes.unique().tolist() == list(range(2**bits))
    decibels = -10 * relative_errors(x, mode).mean().log10().item()
    assert abs(decibels - signal_to_noise) < 0.3


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("int8", 4.4e-5),
        ("int4", 0.0102),
        ("affine4", 0.0102),
        ("smax4", 0.0081),
        ("smax3", 0.0322),
        ("smax2", 0.1170),
        ("lloyd4", 0.0093),
        ("lloyd3", 0.0337),
        ("lloyd2", 0.1157),
        ("int2", 0.1166),
    ],
)
def test_error_of_gaussian_rows_stays_below(name: str, most: float) -> None:
    assert relative_errors(gaussian(8192), find_mode(name)).mean() <= most


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_unrotated_modes_err_by_at_most_half_a_step(name: str) -> None:
    x, mode = gaussian(2000), find_mode(name)
    error = (dequantize(*quantize(x, mode), mode, 128) - x).abs()
    scale = x.abs().amax(-1, keepdim=True) / mode.max_code
    if name == "fp8":
        # Half a step is a sixteenth of the number, or half of 2^-9 below the smallest normal.
        scale = x.abs().amax(-1, keepdim=True) / 448
        assert (error <= torch.maximum(x.abs() / 16, scale * 2.0**-10) * (1 + 1e-5)).all()
    else:
        assert (error <= scale / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", ["int4", "affine4"])
def test_four_bit_modes_err_by_at_most_half_a_step_in_the_rotated_domain(name: str) -> None:
    x, mode = gaussian(2000), find_mode(name)
    assert mode.rotation is not None
    y = hadamard_transform(x, mode.rotation)
    read = hadamard_transform(dequantize(*quantize(x, mode), mode, 128), mode.rotation)
    step = (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 15
    # The step and the smallest value of affine4 are rounded to float16.
    slack = 1e-4 if name == "int4" else 2e-2
    assert ((read - y).abs() <= step / 2 * (1 + slack)).all()


# --------------------------------------------------------------------------------- rounding


def test_rounding_does_not_shrink_int8_rows_and_truncation_does() -> None:
    x, mode = gaussian(4096), MODES["int8_per_token_head"]
    scale = x.abs().amax(-1, keepdim=True) / 127

    def drift(rounding: Rounding) -> tuple[float, float, float]:
        rounded = mode.with_rounding(rounding)
        values = dequantize(*quantize(x, rounded), rounded, 128)
        steps = ((values.abs() - x.abs()) / scale).mean().item()
        slope = ((values * x).sum() / x.square().sum()).item()
        return steps, (values.abs().sum() / x.abs().sum()).item(), slope

    steps, ratio, slope = drift(Rounding.HALF_AWAY)
    assert abs(steps) < 0.01
    assert abs(ratio - 1) < 5e-4
    assert abs(slope - 1) < 5e-4
    steps, ratio, slope = drift(Rounding.TOWARD_ZERO)
    # Half a step less: measured -0.496 and 0.986; the slope is 1 - 0.3989 steps per deviation.
    assert abs(steps + 0.496) < 0.003
    assert abs(ratio - 0.9861) < 1e-3
    assert abs(slope - 0.99128) < 5e-4


def test_truncation_shifts_int4_rows_by_half_a_step() -> None:
    x = gaussian(4096)
    mode = MODES["int4_per_token_head"].with_rounding(Rounding.TOWARD_ZERO)
    assert mode.rotation is not None
    y = hadamard_transform(x, mode.rotation)
    read = hadamard_transform(dequantize(*quantize(x, mode), mode, 128), mode.rotation)
    step = (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 15
    assert abs(((read - y) / step).mean().item() + 0.488) < 0.01
    assert abs(relative_errors(x, mode).mean().item() - 0.0402) < 0.001
