"""The roundings, and the 8-bit float that uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from kvq.rounding import Rounding

#: Rounds a float32 tensor to integers, in float32.
Rounder: TypeAlias = Callable[[Tensor], Tensor]

#: The largest finite e4m3fn.
E4M3_MAX = 448.0
#: Exponent of the smallest normal e4m3fn; below it the spacing stays 2^-9.
_E4M3_MIN_EXPONENT = -6
_E4M3_MANTISSA_BITS = 3
#: The byte of 448.
_E4M3_MAX_CODE = 0x7E


def half_away(v: Tensor) -> Tensor:
    """`trunc(RN(v + copysign(0.5, v)))`."""
    return torch.trunc(v + torch.copysign(torch.full_like(v, 0.5), v))


def deterministic(rounding: Rounding) -> Rounder:
    """The function of a rounding.

    Raises:
        ValueError: The rounding is stochastic; see `stochastic`.
    """
    if rounding is Rounding.STOCHASTIC:
        raise ValueError(
            "rounding must be deterministic here, got stochastic "
            "(see kvq.reference.quantize_stochastic)"
        )
    return _ROUNDERS[rounding]


def stochastic(generator: torch.Generator) -> Rounder:
    """`floor(RN(v + u))`, `u` uniform on [0, 1) from the caller's generator."""

    def rounder(v: Tensor) -> Tensor:
        u = torch.rand(v.shape, generator=generator, device=generator.device, dtype=v.dtype)
        return torch.floor(v + u.to(v.device))

    return rounder


_ROUNDERS: dict[Rounding, Rounder] = {
    Rounding.HALF_AWAY: half_away,
    Rounding.HALF_EVEN: torch.round,
    Rounding.TOWARD_ZERO: torch.trunc,
}


def encode_e4m3(q: Tensor, rounder: Rounder) -> Tensor:
    """Round float32 numbers of magnitude at most 448 to e4m3fn, straight from float32.

    The magnitude is scaled by a power of two so that the spacing of e4m3fn becomes 1, and then
    rounded to an integer; a carry into the next binade comes out right by itself.

    Args:
        q: Any shape, float32, in [-448, 448]. The sign of zero is kept.
        rounder: The rounding.

    Returns:
        The same shape, uint8: the bits of the e4m3fn number.

    Exactness: bit-exact across tiers and devices.
    """
    bits = q.view(torch.int32)
    exponent = (((bits >> 23) & 0xFF) - 127).clamp_min(_E4M3_MIN_EXPONENT)
    to_unit_spacing = ((127 + _E4M3_MANTISSA_BITS - exponent) << 23).view(torch.float32)
    magnitude = rounder(q.abs() * to_unit_spacing).to(torch.int32)
    code = magnitude + ((exponent - _E4M3_MIN_EXPONENT) << _E4M3_MANTISSA_BITS)
    # The sum in a stochastic rounding may round 448 up to the next step, whose byte is NaN.
    return (code.clamp_max(_E4M3_MAX_CODE) | ((bits >> 24) & 0x80)).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """The float32 numbers of e4m3fn bits: exact. `0x7F` and `0xFF` are NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)
