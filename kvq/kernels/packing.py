"""Triton mirror of `kvq.reference.packing`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.checks import check_dtype, check_int, check_tensor
from kvq.kernels import launch
from kvq.kernels.rows import log2
from kvq.modes import PACKINGS


@triton.constexpr_function
def words_of(channels, bits):
    """Words that the codes of so many channels fill, at least the one that they share."""
    return max(1, channels * bits // 32)


@triton.constexpr_function
def _bias_of_word(bias, bits, count, place):
    """What a bias of each of `count` codes adds to a word, as a signed 32-bit integer."""
    total = sum(bias << (bits * (place + i)) for i in range(count)) % 2**32
    return total - 2**32 if total >= 2**31 else total


@triton.jit
def pack_words(
    codes,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    PART: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
):
    """The words of part `I` of `PART` channels: `[PART, R]` int32 codes plus `BIAS`, first lowest.

    The codes of a word are disjoint bits, so their sum is their union, here and over the parts
    that share a word. Sums are modulo 2^32.
    """
    W: tl.constexpr = words_of(PART, BITS)
    PER: tl.constexpr = PART // W
    PLACE: tl.constexpr = (I * PART) % (32 // BITS) if PART * BITS < 32 else 0
    shift = (BITS * (PLACE + tl.arange(0, PER)))[None, :, None]
    return tl.sum(codes.reshape(W, PER, R) << shift, 1) - _bias_of_word(BIAS, BITS, PER, PLACE)


@triton.jit
def join_words(parts, N: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr):
    """`[R, N * PART * BITS / 32]` words from the words of N parts."""
    W: tl.constexpr = words_of(PART, BITS)
    SHARED: tl.constexpr = 32 // (PART * BITS) if PART * BITS < 32 else 1
    for i in tl.static_range(log2(SHARED)):
        sums = ()
        for j in tl.static_range(N >> (i + 1)):
            sums = sums + (parts[2 * j] + parts[2 * j + 1],)
        parts = sums
    for i in tl.static_range(log2(N // SHARED)):
        pairs = ()
        for j in tl.static_range((N // SHARED) >> (i + 1)):
            pair = tl.join(parts[2 * j], parts[2 * j + 1])
            pairs = pairs + (pair.permute(2, 0, 1).reshape(W << (i + 1), R),)
        parts = pairs
    return parts[0].permute(1, 0)


@triton.jit
def load_code(row, channel, live, BITS: tl.constexpr, D: tl.constexpr):
    """The int32 code of each channel of the packed row that starts at `row`."""
    if BITS == 3:
        low = tl.load(row + channel // 4, mask=live, other=0).to(tl.int32)
        high = tl.load(row + D // 4 + channel // 8, mask=live, other=0).to(tl.int32)
        code = ((low >> (2 * (channel % 4))) & 3) | (((high >> (channel % 8)) & 1) << 2)
    else:
        PER: tl.constexpr = 8 // BITS
        byte = tl.load(row + channel // PER, mask=live, other=0).to(tl.int32)
        code = (byte >> (BITS * (channel % PER))) & ((1 << BITS) - 1)
    return code


@triton.jit
def _pack_kernel(
    codes_ptr, out_ptr, total, ROW: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """One byte of the packed rows for each entry; a three-bit row has two kinds of bytes."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    NBYTES: tl.constexpr = ROW * BITS // 8
    LOW: tl.constexpr = ROW // 4
    row = codes_ptr + i // NBYTES * ROW
    at = i % NBYTES
    byte = tl.zeros([BLOCK], tl.int32)
    if BITS == 3:
        is_low = at < LOW
        for j in tl.static_range(8):
            low = tl.load(row + at * 4 + j, mask=(i < total) & is_low & (j < 4), other=0)
            high = tl.load(row + (at - LOW) * 8 + j, mask=(i < total) & ~is_low, other=0)
            byte |= (low.to(tl.int32) & 3) << (2 * j)
            byte |= ((high.to(tl.int32) >> 2) & 1) << j
    else:
        for j in tl.static_range(8 // BITS):
            code = tl.load(row + at * (8 // BITS) + j, mask=i < total, other=0)
            byte |= code.to(tl.int32) << (BITS * j)
    tl.store(out_ptr + i, byte.to(tl.uint8), mask=i < total)


@triton.jit
def _unpack_kernel(
    packed_ptr, out_ptr, total, ROW: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """One code of the rows for each entry."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = packed_ptr + i // ROW * (ROW * BITS // 8)
    code = load_code(row, (i % ROW).to(tl.int32), i < total, BITS, ROW)
    tl.store(out_ptr + i, code.to(tl.uint8), mask=i < total)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Triton mirror of `kvq.reference.pack_codes`; a code that is too large is not looked for."""
    check_bits(bits)
    check_dtype("codes", check_tensor("codes", codes), torch.uint8)
    launch.check_device("codes", codes)
    if codes.ndim == 0 or (codes.shape[-1] * bits) % 8:
        raise ValueError(
            f"codes must fill whole bytes with {bits}-bit codes along the last axis, "
            f"got shape {list(codes.shape)}"
        )
    if bits == 8:
        return codes
    row = codes.shape[-1]
    out = torch.empty((*codes.shape[:-1], row * bits // 8), dtype=torch.uint8, device=codes.device)
    _run(_pack_kernel, codes.contiguous(), out, row, bits)
    return out


def unpack_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Triton mirror of `kvq.reference.unpack_codes`."""
    check_bits(bits)
    check_dtype("packed", check_tensor("packed", packed), torch.uint8)
    launch.check_device("packed", packed)
    check_int("head_dim", head_dim)
    if packed.ndim == 0 or head_dim <= 0 or packed.shape[-1] * 8 != head_dim * bits:
        raise ValueError(
            f"packed must hold {head_dim} codes of {bits} bits along the last axis, "
            f"got shape {list(packed.shape)}"
        )
    if bits == 8:
        return packed
    out = torch.empty((*packed.shape[:-1], head_dim), dtype=torch.uint8, device=packed.device)
    _run(_unpack_kernel, packed.contiguous(), out, head_dim, bits)
    return out


def check_bits(bits: int) -> None:
    """Bits must have a packing."""
    if check_int("bits", bits) not in PACKINGS:
        raise ValueError(f"bits must be one of {PACKINGS}, got {bits!r}")


def _run(kernel: triton.JITFunction, source: Tensor, out: Tensor, row: int, bits: int) -> None:
    block = 1024
    if out.numel():
        grid = (triton.cdiv(out.numel(), block),)
        kernel[grid](source, out, out.numel(), ROW=row, BITS=bits, BLOCK=block)
