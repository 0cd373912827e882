"""What there is to quantize: offsets, tails, and what the rotation makes of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvq import reference
from kvq.analysis.estimates import Estimate, block_sums, jackknife, ratio
from kvq.modes import Rotation
from kvq.tier import Tier


class ActivationStatistics(NamedTuple):
    """The shape of one tensor of rows, for each head."""

    #: Share of the energy in a constant: `|mean over tokens|^2 / mean |x|^2`.
    mean_energy_share: Estimate
    #: Share of the energy in the first token.
    first_token_share: Estimate
    #: Mean over rows of the largest magnitude over the root mean square.
    peak_to_rms: Estimate
    #: Fourth central moment over the squared variance, all entries together: 3 for a Gaussian.
    kurtosis: Estimate
    #: Mean over rows of `mean x^4 / (mean x^2)^2`: what one row's quantizer meets.
    #: `3 D / (D + 2)` for rows in random directions.
    row_kurtosis: Estimate


def activation_statistics(x: Tensor, blocks: Tensor) -> ActivationStatistics:
    """Describe rows.

    Args:
        x: `[T, H, D]`.
        blocks: `[T]`, the block of each token: the units of the standard errors.

    Returns:
        Estimates of shape `[H]`.
    """
    x = x.to(torch.float64)
    square = x.square()
    energy = square.sum(-1)
    ones = torch.ones_like(energy)
    mean_square = square.mean(-1)
    first = torch.zeros_like(energy)
    first[0] = energy[0]
    # A row of zeros has no direction, and counts for neither of the means over rows.
    alive = (energy > 0).to(torch.float64)
    safe = torch.where(energy > 0, mean_square, 1.0)
    return ActivationStatistics(
        mean_energy_share=jackknife(
            lambda total, squares, count: total.square().sum(-1) / (count * squares),
            block_sums(x, blocks),
            block_sums(energy, blocks),
            block_sums(ones, blocks),
        ),
        first_token_share=ratio(first, energy, blocks),
        peak_to_rms=ratio(x.abs().amax(-1) / safe.sqrt(), alive, blocks),
        kurtosis=jackknife(
            _kurtosis,
            *(block_sums(x.pow(power).sum(-1), blocks) for power in (1, 2, 3, 4)),
            block_sums(ones * x.shape[-1], blocks),
        ),
        row_kurtosis=ratio(square.square().mean(-1) / safe.square(), alive, blocks),
    )


def rotated(x: Tensor, rotation: Rotation, tier: Tier = reference) -> Tensor:
    """Rows turned as a mode would, at their own length.

    Args:
        x: `[T, H, D]` float32, float16 or bfloat16; D divisible by 16.
        rotation: Which.
        tier: Who turns them.

    Returns:
        `[T, H, D]` float64.
    """
    y = tier.hadamard_transform(x, rotation).to(torch.float64)
    return y / math.sqrt(rotation.gain(x.shape[-1]))


def _kurtosis(s1: Tensor, s2: Tensor, s3: Tensor, s4: Tensor, count: Tensor) -> Tensor:
    """Kurtosis from power sums."""
    m1, m2, m3, m4 = s1 / count, s2 / count, s3 / count, s4 / count
    variance = m2 - m1.square()
    return (m4 - 4 * m1 * m3 + 6 * m1.square() * m2 - 3 * m1.pow(4)) / variance.square()
