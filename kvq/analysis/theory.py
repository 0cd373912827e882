"""What a mode's error should be on rows that point in uniformly random directions.

Gaussian rows do, and so does any row after a Haar rotation; real keys only come near. A coordinate
of such a row, divided by the row's root mean square, has the density `(1 - z^2/D)^((D-3)/2)` on
`[-sqrt(D), sqrt(D)]`: the marginal law of the sphere, N(0,1) as D grows.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from kvq import reference
from kvq.analysis.estimates import over_units
from kvq.analysis.samples import gaussian
from kvq.checks import check_int, check_kind, check_number, check_seed
from kvq.codebooks import Codebook
from kvq.modes import Grid, Mode, Normalization, ScaleFit
from kvq.reference.laws import Law, cell_moments, law, sphere
from kvq.tier import Tier, check_tier

#: Half the mean magnitude of N(0,1), which is its density at 0: 0.3989.
HALF_MEAN_MAGNITUDE = 1.0 / math.sqrt(2.0 * math.pi)


class Kind(Enum):
    """Where a predicted number comes from."""

    #: A closed form of the law at this head size.
    EXACT = "exact"
    #: A mean over seeded random rows, with a standard error.
    MONTE_CARLO = "monte_carlo"
    #: A closed form for D going to infinity.
    LIMIT = "limit"

    def __str__(self) -> str:
        return self.value


class Prediction(NamedTuple):
    """The error of a mode on isotropic rows."""

    #: `E |x_hat - x|^2 / |x|^2`.
    relative_error: float
    #: Its standard error; 0 if the value is exact.
    relative_error_se: float
    #: `g = E <x, x_hat> / |x|^2`: the slope of the scores.
    gain: float
    #: Its standard error; 0 if the value is exact.
    gain_se: float
    #: Where the numbers come from.
    kind: Kind


class CodebookMoments(NamedTuple):
    """Moments of a codebook `Q` under the law of `z`, which has variance 1."""

    #: `E[z Q(z)]`.
    cross: float
    #: `E[Q(z)^2]`.
    square: float
    #: `E[(z - Q(z))^2]`.
    distortion: float


def codebook_moments(codebook: Codebook, law: Law) -> CodebookMoments:
    """The moments of a codebook under a law of variance 1.

    Args:
        codebook: Which; thresholds outside the support of the law do no harm.
        law: Such as `kvq.reference.laws.sphere(128)`.
    """
    levels = np.array(codebook.levels)
    low, high = law.support
    edges = np.array((low, *np.clip(codebook.thresholds, low, high), high))
    cells = cell_moments(law, edges, levels)
    centroids = cells.first + levels * cells.mass
    return CodebookMoments(
        float(levels @ centroids), float(levels**2 @ cells.mass), float(cells.second.sum())
    )


def rate_distortion(bits: float) -> float:
    """`4^-bits`: no code of that many bits a value has a smaller error on Gaussian values."""
    if check_number("bits", bits) < 0:
        raise ValueError(f"bits must not be negative, got {bits}")
    return math.pow(4.0, -bits)


def truncation_gain(step: float, deviation: float = 1.0) -> float:
    """Slope of the scores of Gaussian keys under truncation: `1 - 0.3989 step / deviation`."""
    return 1.0 - HALF_MEAN_MAGNITUDE * step / deviation


def limit(mode: Mode) -> Prediction | None:
    """The law for D going to infinity, of modes that divide by the root mean square; else `None`.

    With `a = E[z Q(z)]` and `b = E[Q(z)^2]`, equal to `1 - D` at a Lloyd-Max codebook.
    """
    if mode.codebook is None or mode.normalization is not Normalization.RMS:
        return None
    a, b, distortion = codebook_moments(mode.codebook, law("norm"))
    error, gain = {
        ScaleFit.UNIT: (distortion, a),
        ScaleFit.LEAST_SQUARES: (1.0 - a * a / b, a * a / b),
        ScaleFit.NORM_MATCH: (2.0 - 2.0 * a / math.sqrt(b), a / math.sqrt(b)),
        ScaleFit.UNBIASED: (b / (a * a) - 1.0, 1.0),
    }[mode.scale_fit or ScaleFit.UNIT]
    return Prediction(error, 0.0, gain, 0.0, Kind.LIMIT)


def is_exact(mode: Mode) -> bool:
    """Whether `predict` has a closed form: the root mean square itself is the scale."""
    return (
        mode.grid is Grid.CODEBOOK
        and mode.normalization is Normalization.RMS
        and mode.scale_fit is ScaleFit.UNIT
    )


def predict(
    mode: Mode, head_dim: int, *, rows: int = 2**14, seed: int = 0, tier: Tier = reference
) -> Prediction:
    """The error of a mode on isotropic rows of this head size.

    Exact where the law is known in closed form, else a Monte Carlo mean over `rows` Gaussian rows.

    Args:
        mode: Which.
        head_dim: D.
        rows: Of the Monte Carlo.
        seed: Of the Monte Carlo; equal seeds give all modes the same rows.
        tier: Who quantizes.
    """
    check_kind("mode", mode, Mode).check_head_dim(head_dim)
    check_int("rows", rows, 1)
    check_seed(seed)
    check_tier(tier)
    if is_exact(mode):
        assert mode.codebook is not None
        moments = codebook_moments(mode.codebook, sphere(head_dim))
        return Prediction(moments.distortion, 0.0, moments.cross, 0.0, Kind.EXACT)
    x = gaussian(rows, 1, head_dim, seed)[:, 0]
    x_hat = tier.dequantize(*tier.quantize(x, mode), mode, head_dim).to(torch.float64)
    exact = x.to(torch.float64)
    energy = exact.square().sum(-1)
    error = over_units((x_hat - exact).square().sum(-1) / energy)
    gain = over_units((x_hat * exact).sum(-1) / energy)
    return Prediction(
        float(error.value),
        float(error.standard_error),
        float(gain.value),
        float(gain.standard_error),
        Kind.MONTE_CARLO,
    )
