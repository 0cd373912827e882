"""How far stored rows are from the rows that went in."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvq.analysis.estimates import Estimate, block_sums, jackknife, ratio


class QuantizationError(NamedTuple):
    """The error of one tensor of rows, for each head."""

    #: Mean square of an entry's error, in the units of the input squared.
    mean_squared_error: Estimate
    #: `sum |x_hat - x|^2 / sum |x|^2`: relative to the energy.
    relative_error: Estimate
    #: `-10 log10` of the relative error.
    snr_db: Estimate


def quantization_error(x: Tensor, x_hat: Tensor, blocks: Tensor) -> QuantizationError:
    """Compare rows with what they read back as.

    Args:
        x: `[T, H, D]`.
        x_hat: The same shape.
        blocks: `[T]`, the block of each token: the units of the standard error.

    Returns:
        Estimates of shape `[H]`.
    """
    exact = x.to(torch.float64)
    error = (x_hat.to(torch.float64) - exact).square().sum(-1)
    energy = exact.square().sum(-1)
    entries = torch.full_like(energy, x.shape[-1])
    return QuantizationError(
        ratio(error, entries, blocks),
        ratio(error, energy, blocks),
        jackknife(
            lambda e, s: decibels(e / s), block_sums(error, blocks), block_sums(energy, blocks)
        ),
    )


def decibels(relative_error: Tensor) -> Tensor:
    """The signal-to-noise ratio that a relative error is."""
    return -10.0 / math.log(10.0) * torch.log(relative_error)
