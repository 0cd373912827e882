"""The numbers that a codebook mode compares with its thresholds: what a codebook is fitted to."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvq.checks import check_input
from kvq.modes import Mode, Normalization
from kvq.reference import scaling
from kvq.reference.hadamard import rotate, tree_sum
from kvq.scale_word import SMALLEST_NORMAL


class NormalizedValues(NamedTuple):
    """Rotated, normalized rows. Zero rows and NaN rows meet no threshold and are left out."""

    #: `[R, D]` float32.
    values: Tensor
    #: `[R]` float32: the square of what each row was divided by. As the weight of its values it
    #: turns their squared error into that of the rows.
    weights: Tensor


def normalized_values(x: Tensor, mode: Mode) -> NormalizedValues:
    """Rotate and normalize rows exactly as `kvq.reference.quantize` does for this mode.

    Args:
        x: `[..., D]` float32, float16 or bfloat16.
        mode: A codebook mode; its codebook does not matter.

    Raises:
        ValueError: The mode has no codebook, or D does not suit it.
    """
    rows = check_input("x", x).reshape(-1, x.shape[-1]).to(torch.float32)
    head_dim = rows.shape[-1]
    mode.check_head_dim(head_dim)
    if mode.codebook is None:
        raise ValueError(f"mode must be a codebook mode, got {mode.name}")
    y = rows if mode.rotation is None else rotate(rows, mode.rotation)
    squares = tree_sum(y * y)
    kept = torch.isfinite(squares) & (squares >= SMALLEST_NORMAL)
    y, squares = y[kept], squares[kept]
    if mode.normalization is Normalization.RMS:
        inverse = scaling.constant(math.sqrt(head_dim), y) / scaling.square_root(squares)
        weights = squares / head_dim
    else:
        signed_max = y.gather(-1, y.abs().argmax(-1, keepdim=True))[..., 0]
        inverse = scaling.reciprocal(signed_max)
        weights = signed_max * signed_max
    return NormalizedValues(y * inverse[:, None], weights)
