"""The numbers that a codebook mode compares with its thresholds: what a codebook is fitted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvq.activations import Activations
from kvq.checks import check_input, check_kind
from kvq.modes import Mode, Normalization
from kvq.reference import scaling
from kvq.reference.hadamard import rotate, tree_sum
from kvq.scale_word import SMALLEST_NORMAL

_T = TypeVar("_T")


class NormalizedValues(NamedTuple):
    """Rotated, normalized rows. Zero rows and NaN rows meet no threshold and are left out."""

    #: `[R, D]` float32.
    values: Tensor
    #: `[R]` float32: the square of what each row was divided by. As the weight of its values it
    #: turns their squared error into that of the rows.
    weights: Tensor


def normalized_values(x: Tensor, mode: Mode) -> NormalizedValues:
    """Rotate and normalize rows exactly as `kvq.reference.quantize` does, before any gain.

    Args:
        x: `[..., D]` float32, float16 or bfloat16.
        mode: A codebook mode; its codebook does not matter.

    Raises:
        ValueError: The mode has no codebook, or D does not suit it.
    """
    rows = check_input("x", x).reshape(-1, x.shape[-1]).to(torch.float32)
    head_dim = rows.shape[-1]
    check_kind("mode", mode, Mode).check_head_dim(head_dim)
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


def activation_values(
    activations: Activations,
    mode: Mode,
    *,
    sides: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> NormalizedValues:
    """The normalized values of the chosen keys and values, in one row of numbers.

    Args:
        activations: Where from.
        mode: As for `normalized_values`.
        sides: `"key"`, `"value"`; by default both.
        layers: By default all.
        heads: KV heads; by default all.

    Returns:
        Values `[n]` and weights `[n]`: what `kvq.reference.lloyd_max.fit_samples` takes.

    Raises:
        ValueError: A side, layer or head is not there, or as for `normalized_values`.
    """
    check_kind("activations", activations, Activations)
    check_kind("mode", mode, Mode)
    values, weights = [], []
    for index in choose("layer", layers, tuple(activations.layers)):
        layer = activations.layers[index]
        chosen = choose("head", heads, range(layer.key.shape[1]))
        for side in choose("side", sides, ("key", "value")):
            rows = (layer.key if side == "key" else layer.value)[:, list(chosen)]
            found = normalized_values(rows, mode)
            values.append(found.values.reshape(-1))
            weights.append(found.weights.repeat_interleave(rows.shape[2]))
    return NormalizedValues(torch.cat(values), torch.cat(weights))


def choose(argument: str, asked: Sequence[_T] | None, there: Sequence[_T]) -> Sequence[_T]:
    """What was asked for, once each; all that is there by default.

    Raises:
        ValueError: It is not there; the message begins with `argument`.
    """
    for item in asked or ():
        if item not in there:
            valid = ", ".join(map(str, there))
            raise ValueError(f"{argument} must be one of {valid}, got {item}")
    return list(dict.fromkeys(asked)) if asked else there
