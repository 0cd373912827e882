"""RoPE, and its inverse, from a `RotarySpec`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq.checks import (
    INPUT_DTYPES,
    check_bool,
    check_dtype,
    check_kind,
    check_same_device,
    check_shape,
    check_tensor,
)
from kvq.rotary import RotarySpec, join_pairs, split_pairs


def apply_rotary(
    x: Tensor, positions: Tensor, spec: RotarySpec, *, inverse: bool = False
) -> Tensor:
    """Turn each pair of channels by its angle, or back.

    Pair `(a, b)` becomes `f (a cos t - b sin t, b cos t + a sin t)` with `t` the position times
    the pair's inverse frequency and `f` the attention factor; the inverse turns by `-t` and
    divides by `f`. The angle is rounded to float32 first, as models do: exact angles would differ
    by up to `2**-24 * position` radians from the ones that made the keys.

    Args:
        x: `[T, H, D]` float32, float64, float16 or bfloat16; D at least `spec.rotary_dim`.
        positions: `[T]` int64.
        spec: How the model applies RoPE.
        inverse: Undo RoPE.

    Returns:
        `[T, H, D]` float32, or float64 for float64, in whose arithmetic it is computed.

    Raises:
        TypeError: `x` or `positions` is not a tensor of such a dtype.
        ValueError: Shapes or devices do not fit.

    Exactness: in float32 it repeats the products and sums of Hugging Face transformers.
    Source: Su et al., RoFormer, arXiv:2104.09864; attention factor: Peng et al., YaRN,
    arXiv:2309.00071.
    """
    check_kind("spec", spec, RotarySpec)
    check_bool("inverse", inverse)
    check_dtype("x", check_tensor("x", x), *INPUT_DTYPES, torch.float64)
    check_shape("x", x, (None, None, None), "[T, H, D]")
    check_dtype("positions", check_tensor("positions", positions), torch.int64)
    check_shape("positions", positions, (x.shape[0],), "[T]")
    check_same_device("positions", positions, "x", x)
    if x.shape[-1] < spec.rotary_dim:
        raise ValueError(
            f"x must have the {spec.rotary_dim} channels that are rotated, got {x.shape[-1]}"
        )
    wide = x if x.dtype is torch.float64 else x.float()
    frequencies = torch.tensor(spec.inverse_frequencies, dtype=torch.float32, device=x.device)
    angles = (positions.float()[:, None, None] * frequencies).to(wide.dtype)  # [T, 1, pairs]
    cosine, sine = angles.cos(), angles.sin()
    if inverse:
        cosine, sine = cosine / spec.attention_factor, -sine / spec.attention_factor
    else:
        cosine, sine = cosine * spec.attention_factor, sine * spec.attention_factor

    first, second, rest = split_pairs(wide, spec)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return join_pairs(*turned, rest, spec)
