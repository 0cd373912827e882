"""Gains searched when a row is written: what they gain, row by row and on average."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvq.codebooks import Codebook, Provenance, Recipe
from kvq.modes import RANDOM_HADAMARD, Mode, ScaleFit
from kvq.modes import mode as find_mode
from kvq.reference import dequantize, hadamard_transform, quantize, unpack_codes
from tests import oracle
from tests.compare import assert_bit_exact

STEMS = [f"{family}{bits}" for family in ("lloyd", "smax") for bits in (2, 3, 4)]


def gaussian(rows: int) -> Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(7))


def hard_rows() -> Tensor:
    """The oracle's rows that are neither zero nor NaN rows in a codebook mode."""
    x = torch.from_numpy(oracle.planted_rows(128))
    squares = hadamard_transform(x, RANDOM_HADAMARD).double().square().sum(-1)
    return x[x.isfinite().all(-1) & (squares > 2.0**-100) & (squares < 2.0**120)]


def rotated_pair(x: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
    """The rotated rows as they are encoded and as they are read, in float64 without rounding."""
    assert mode.codebook is not None
    got = quantize(x, mode)
    levels = torch.tensor(mode.codebook.levels, dtype=torch.float64)
    codes = unpack_codes(got.codes, mode.bits, 128).to(torch.int64)
    read = levels[codes] * got.words.double()[:, None] * mode.gain(128)
    return hadamard_transform(x, RANDOM_HADAMARD).double(), read


def relative_errors(x: Tensor, mode: Mode) -> Tensor:
    """Squared error over squared length of each row, float64."""
    y, read = rotated_pair(x, mode)
    return (read - y).square().sum(-1) / y.square().sum(-1)


@pytest.mark.parametrize("rows", ["gaussian", "planted"])
@pytest.mark.parametrize("stem", STEMS)
def test_no_row_is_worse_for_the_search(stem: str, rows: str) -> None:
    x = gaussian(2000) if rows == "gaussian" else hard_rows()
    plain, searched = (relative_errors(x, find_mode(name)) for name in (stem, f"{stem}_search"))
    assert (searched <= plain * (1 + 1e-6) + 1e-12).all()
    if rows == "gaussian":
        # Six of seven gains are others than 1.
        assert (searched < plain).double().mean() > 0.6


@pytest.mark.parametrize("stem", STEMS)
def test_the_search_takes_the_first_gain_of_least_error(stem: str) -> None:
    mode = find_mode(f"{stem}_search")
    x = gaussian(500)
    alone = torch.stack(
        [relative_errors(x, replace(mode, name="one", gains=(gain,))) for gain in mode.gains]
    )
    torch.testing.assert_close(relative_errors(x, mode), alone.amin(0), rtol=1e-6, atol=0)
    assert (alone.argmin(0).bincount(minlength=len(mode.gains)) > 0).all()
    # Twice the same list: each gain of the second half is beaten by its equal.
    again = replace(mode, name="twice", gains=mode.gains * 2)
    assert_bit_exact(quantize(x, again).codes, quantize(x, mode).codes)


def test_of_equal_merits_the_first_wins() -> None:
    # One lane among zeros: whatever the gain, its code alone has levels that are not zero, so a
    # gain that reaches the outer of two levels has the merit of one that does not.
    recipe = Recipe("none", 5, symmetric=True)
    book = Codebook.from_exact("five", (-2.0, -1.0, 0.0, 1.0, 2.0), recipe, Provenance("by hand"))
    base = find_mode("smax4_search").with_codebook(book).without_rotation()
    x = torch.zeros(1, 128)
    x[0, 3] = 7.0
    for gains, code, word in (((1.0, 2.0), 3, 7.0), ((2.0, 1.0), 4, 3.5)):
        mode = replace(base, name="five", gains=gains)
        got = quantize(x, mode)
        assert unpack_codes(got.codes, mode.bits, 128)[0, :4].tolist() == [2, 2, 2, code]
        assert got.words.tolist() == [word]
    # A gain without levels has no merit, and if none has one the row is a zero row.
    for fit in (ScaleFit.LEAST_SQUARES, ScaleFit.NORM_MATCH, ScaleFit.UNBIASED):
        mode = replace(base, name="five", gains=(0.25, 1.0), scale_fit=fit)
        assert quantize(x, mode).words.tolist() == [7.0]
        got = quantize(x, replace(mode, gains=(0.25, 0.125)))
        assert got.words.tolist() == [0.0]
        assert not got.codes.any()
        assert not dequantize(*got, mode, 128).any()


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("rows", ["gaussian", "planted"])
def test_what_each_fit_keeps_in_every_mode(stem: str, searched: bool, rows: str) -> None:
    x = gaussian(1000) if rows == "gaussian" else hard_rows()
    base = find_mode(f"{stem}_search" if searched else stem)
    found = {
        fit: rotated_pair(x, replace(base, name="fit", scale_fit=fit))
        for fit in (ScaleFit.LEAST_SQUARES, ScaleFit.NORM_MATCH, ScaleFit.UNBIASED)
    }
    errors = {fit: (read - y).square().sum(-1) for fit, (y, read) in found.items()}
    energy = found[ScaleFit.UNBIASED][0].square().sum(-1)
    for fit in (ScaleFit.NORM_MATCH, ScaleFit.UNBIASED):
        assert (errors[ScaleFit.LEAST_SQUARES] <= errors[fit] * (1 + 1e-6) + 1e-12 * energy).all()
    y, read = found[ScaleFit.UNBIASED]
    assert ((y * read).sum(-1) / energy - 1).abs().max() < 1e-5
    y, read = found[ScaleFit.NORM_MATCH]
    assert (read.norm(dim=-1) / y.norm(dim=-1) - 1).abs().max() < 1e-5
    # The codes are those of least squares, whatever the fit.
    codes = [quantize(x, replace(base, name="fit", scale_fit=fit)).codes for fit in found]
    assert all(torch.equal(codes[0], other) for other in codes[1:])


#: Relative squared error that Gaussian rows at D = 128 may have at most, and how many are taken.
TARGETS = [
    ("smax2", 0.1170, 2**16),
    ("smax3", 0.0322, 2**16),
    ("smax4", 0.0081, 2**15),
    ("smax2_search", 0.1140, 2**16),
    ("smax3_search", 0.0306, 2**17),
    ("smax4_search", 0.0076, 2**15),
    ("lloyd2_search", 0.1150, 2**15),
    ("lloyd3_search", 0.0320, 2**15),
    ("lloyd4_search", 0.0080, 2**15),
]


@pytest.mark.parametrize(("name", "most", "rows"), TARGETS)
def test_mean_error_of_gaussian_rows(name: str, most: float, rows: int) -> None:
    # Seed 7: four standard errors.
    errors = relative_errors(gaussian(rows), find_mode(name))
    standard_error = errors.std().item() / math.sqrt(rows)
    assert errors.mean().item() + 4 * standard_error <= most
