"""The Hadamard transform with signs, and its inverse.

Everything is one float32 operation at a time in the order of the storage formats, so the same
bits come out on every device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvq.checks import (
    check_bool,
    check_device,
    check_input,
    check_int,
    check_kind,
    check_values_are_there,
)
from kvq.modes import Rotation

#: Added to the seed, once per round: the sign tables of the rounds differ.
ROUND_SEED_STEP = 0x517CC1B7


def hadamard_transform(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Rotate each row of `x`: `H (s0 * x)`, or `H (s1 * H (s0 * x))` with two rounds.

    `H` is the unnormalized Sylvester-Hadamard matrix of size `b`, the largest power of two that
    divides D, on each of the D/b consecutive blocks. A rotation multiplies squared lengths by
    `N = b ** rounds`; the inverse divides by N first, so nothing overflows on the way.

    Args:
        x: `[..., D]` float32, float16 or bfloat16; D divisible by 16. Widened to float32 first.
        rotation: Rounds and signs.
        inverse: Undo the rotation.

    Returns:
        `[..., D]` float32.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: D is not divisible by 16.

    Exactness: bit-exact across tiers and devices.
    """
    check_values_are_there("x", check_input("x", x))
    head_dim = x.shape[-1]
    check_kind("rotation", rotation, Rotation).check(head_dim)
    check_bool("inverse", inverse)
    y = x.to(torch.float32)
    if inverse:
        return unrotate(y * (1.0 / rotation.gain(head_dim)), rotation)
    return rotate(y, rotation)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """`H (s0 * x)`, or `H (s1 * H (s0 * x))`, of float32 or float64 rows `[..., D]`."""
    for round_index in range(rotation.rounds):
        if rotation.random_signs:
            x = x * _signs_like(x, rotation, round_index)
        x = _butterfly(x)
    return x


def unrotate(y: Tensor, rotation: Rotation) -> Tensor:
    """The transpose of `rotate`: its inverse, but for the factor N."""
    for round_index in reversed(range(rotation.rounds)):
        y = _butterfly(y)
        if rotation.random_signs:
            y = y * _signs_like(y, rotation, round_index)
    return y


def signs(
    head_dim: int,
    rotation: Rotation,
    round_index: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The row of signs of one round, as a copy that the caller may change.

    Drawn on the CPU by `torch.bernoulli` from a generator seeded with
    `seed + round * 0x517CC1B7` modulo 2^64, then moved.

    Args:
        head_dim: D.
        rotation: Its seed, and whether the signs are random and repeat per block.
        round_index: 0, or 1 in a rotation of two rounds.
        dtype: Of the result.
        device: Of the result.

    Returns:
        `[D]` of +1 and -1.

    Raises:
        ValueError: The rotation has no such round, or `head_dim` does not suit a rotation.

    Exactness: bit-exact across tiers and devices.
    """
    check_kind("rotation", rotation, Rotation).check(head_dim)
    check_kind("dtype", dtype, torch.dtype)
    if not 0 <= check_int("round_index", round_index) < rotation.rounds:
        raise ValueError(f"round_index must be below {rotation.rounds}, got {round_index}")
    where = str(check_device("device", device))
    return _signs(head_dim, rotation, round_index, dtype, where).clone()


def _signs_like(x: Tensor, rotation: Rotation, round_index: int) -> Tensor:
    return _signs(x.shape[-1], rotation, round_index, x.dtype, str(x.device))


@lru_cache(maxsize=256)
def _signs(
    head_dim: int, rotation: Rotation, round_index: int, dtype: torch.dtype, device: str
) -> Tensor:
    """The one shared table; nobody outside this module sees it."""
    # A table made inside inference mode could not be used outside it.
    with torch.inference_mode(mode=False):
        return _draw_signs(head_dim, rotation, round_index).to(dtype).to(device)


def _draw_signs(head_dim: int, rotation: Rotation, round_index: int) -> Tensor:
    if not rotation.random_signs:
        return torch.ones(head_dim, device="cpu")
    generator = torch.Generator(device="cpu")
    generator.manual_seed((rotation.seed + round_index * ROUND_SEED_STEP) % 2**64)
    length = rotation.block_size(head_dim) if rotation.repeat_block_signs else head_dim
    half = torch.full((length,), 0.5, dtype=torch.float32, device="cpu")
    table = torch.bernoulli(half, generator=generator) * 2 - 1
    return table.repeat(head_dim // length)


def _butterfly(x: Tensor) -> Tensor:
    """`H x` on each block: stages with strides b/2, ..., 2, 1 of `(u, v) -> (u + v, u - v)`."""
    stride = Rotation.block_size(x.shape[-1]) // 2
    shape = x.shape
    while stride:
        u, v = x.reshape(*shape[:-1], shape[-1] // (2 * stride), 2, stride).unbind(-2)
        x = torch.stack((u + v, u - v), dim=-2).reshape(shape)
        stride //= 2
    return x


def tree_sum(x: Tensor) -> Tensor:
    """Sum each row of `x` as a balanced binary tree, neighbors first.

    Args:
        x: `[..., D]` float32; padded with +0.0 to a power of two.

    Returns:
        `[...]` float32.

    Exactness: bit-exact across tiers and devices.
    """
    length = x.shape[-1]
    x = F.pad(x, (0, (1 << (length - 1).bit_length()) - length))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
