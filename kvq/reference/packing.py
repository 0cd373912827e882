"""Codes to bytes and back: nibbles, crumbs, three bits, one bit, bytes.

The first code sits in the lowest bits. Two nibbles, four crumbs or eight bits of consecutive
channels share a byte. Three-bit codes are stored as `D/4` bytes of their low crumbs, followed by
`D/8` bytes of their high bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvq.checks import check_dtype, check_int, check_tensor, check_values_are_there
from kvq.modes import PACKINGS


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis.

    Args:
        codes: `[..., D]` uint8, each below `2 ** bits`.
        bits: 1, 2, 3, 4 or 8.

    Returns:
        `[..., D * bits / 8]` uint8, first code in the lowest bits; for 8 bits `codes` itself.

    Raises:
        TypeError: `codes` is not a uint8 tensor.
        ValueError: `bits` has no packing, D does not fill whole bytes, or (on the CPU) a code is
            too large.

    Exactness: bit-exact across tiers.
    """
    _check_bits(bits)
    check_dtype("codes", check_tensor("codes", codes), torch.uint8)
    check_values_are_there("codes", codes)
    if codes.ndim == 0 or (codes.shape[-1] * bits) % 8:
        raise ValueError(
            f"codes must fill whole bytes with {bits}-bit codes along the last axis, "
            f"got shape {list(codes.shape)}"
        )
    if bits == 8:
        return codes
    if codes.device.type == "cpu" and codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"codes must be below {2**bits} for {bits} bits, got {int(codes.max())}")
    if bits == 3:
        return torch.cat((_pack(codes & 3, 2), _pack(codes >> 2, 1)), dim=-1)
    return _pack(codes, bits)


def unpack_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Undo `pack_codes`.

    Args:
        packed: `[..., head_dim * bits / 8]` uint8.
        bits: 1, 2, 3, 4 or 8.
        head_dim: D, the number of codes in a row.

    Returns:
        `[..., D]` uint8.

    Raises:
        TypeError: `packed` is not a uint8 tensor.
        ValueError: `bits` has no packing, or the last axis does not hold `head_dim` codes.

    Exactness: bit-exact across tiers.
    """
    _check_bits(bits)
    check_dtype("packed", check_tensor("packed", packed), torch.uint8)
    check_values_are_there("packed", packed)
    check_int("head_dim", head_dim)
    if packed.ndim == 0 or head_dim <= 0 or packed.shape[-1] * 8 != head_dim * bits:
        raise ValueError(
            f"packed must hold {head_dim} codes of {bits} bits along the last axis, "
            f"got shape {list(packed.shape)}"
        )
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed[..., : head_dim // 4], packed[..., head_dim // 4 :]
        return _unpack(low, 2) | (_unpack(high, 1) << 2)
    return _unpack(packed, bits)


def _check_bits(bits: int) -> None:
    if check_int("bits", bits) not in PACKINGS:
        raise ValueError(f"bits must be one of {PACKINGS}, got {bits!r}")


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes whose bits divide 8."""
    per_byte = 8 // bits
    packed = codes[..., 0::per_byte].clone()
    for i in range(1, per_byte):
        packed |= codes[..., i::per_byte] << (i * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes whose bits divide 8."""
    mask = 2**bits - 1
    columns = [(packed >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(columns, dim=-1).flatten(-2)
