"""Triton mirror of `kvq.reference.hadamard`.

A stage of the butterfly is one addition and one subtraction of whole tensors; with a row in one
thread, all of it happens in registers. Signs are compile-time bits, so a sign costs nothing: it
becomes the sign of an operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.checks import check_bool, check_input, check_kind
from kvq.kernels import launch
from kvq.kernels.rows import (
    join_stride,
    load_rows,
    log2,
    pick,
    split_stride,
    store_rows,
)
from kvq.modes import Rotation

#: Added to the seed, once per round: the sign tables of the rounds differ.
ROUND_SEED_STEP = 0x517CC1B7


@lru_cache(maxsize=256)
def sign_words(head_dim: int, rotation: Rotation, padded: int) -> tuple[tuple[int, ...], ...]:
    """The signs of each round as 32-bit words: bit `i % 32` of word `i // 32` is set for +1.

    Channels past the head size are +1. The tables are those of `kvq.reference.signs`.
    """
    words = []
    for round_index in range(rotation.rounds):
        positive = [True] * max(32, padded)
        if rotation.random_signs:
            generator = torch.Generator(device="cpu")
            generator.manual_seed((rotation.seed + round_index * ROUND_SEED_STEP) % 2**64)
            length = rotation.block_size(head_dim) if rotation.repeat_block_signs else head_dim
            half = torch.full((length,), 0.5, dtype=torch.float32, device="cpu")
            drawn = torch.bernoulli(half, generator=generator).to(torch.bool).tolist()
            positive[:head_dim] = drawn * (head_dim // length)
        words.append(
            tuple(
                sum(1 << i for i in range(32) if positive[start + i])
                for start in range(0, len(positive), 32)
            )
        )
    return tuple(words)


@triton.constexpr_function
def _sign_word(spec, round_index, i):
    """Word `i` of the signs of a round, as a signed 32-bit integer."""
    word = spec.signs[round_index][i]
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def _times_signs(t, SPEC: tl.constexpr, ROUND: tl.constexpr):
    """Multiply by the signs of one round."""
    C: tl.constexpr = pick(SPEC, "padded")
    channel = tl.arange(0, C)
    word = channel * 0 + _sign_word(SPEC, ROUND, 0)
    for i in tl.static_range(1, C // 32):
        word = tl.where(channel // 32 == i, _sign_word(SPEC, ROUND, i), word)
    return t * (((word >> (channel % 32)) & 1) * 2 - 1).to(tl.float32)[:, None]


@triton.jit
def butterfly(t, B: tl.constexpr, C: tl.constexpr, R: tl.constexpr):
    """`H t` on blocks of `B` channels: strides B/2, ..., 2, 1 of `(u, v) -> (u + v, u - v)`."""
    for i in tl.static_range(log2(B)):
        u, v = split_stride(t, B >> (i + 1), C, R)
        t = join_stride(u + v, u - v, C, R)
    return t


@triton.jit
def rotate(t, SPEC: tl.constexpr, R: tl.constexpr):
    """`H (s0 * t)`, or `H (s1 * H (s0 * t))`."""
    for i in tl.static_range(pick(SPEC, "rounds")):
        t = butterfly(_times_signs(t, SPEC, i), pick(SPEC, "block"), pick(SPEC, "padded"), R)
    return t


@triton.jit
def unrotate(t, SPEC: tl.constexpr, R: tl.constexpr):
    """The transpose of `rotate`: its inverse, but for the factor N."""
    ROUNDS: tl.constexpr = pick(SPEC, "rounds")
    for i in tl.static_range(ROUNDS):
        t = butterfly(t, pick(SPEC, "block"), pick(SPEC, "padded"), R)
        t = _times_signs(t, SPEC, ROUNDS - 1 - i)
    return t


@triton.jit(do_not_specialize=["num_rows"])
def _hadamard_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    row_stride,
    SPEC: tl.constexpr,
    R: tl.constexpr,
    INVERSE: tl.constexpr,
):
    D: tl.constexpr = pick(SPEC, "head_dim")
    C: tl.constexpr = pick(SPEC, "padded")
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < num_rows
    x = load_rows(x_ptr + row * row_stride, live, D, C)
    if INVERSE:
        x = unrotate(x * pick(SPEC, "fold"), SPEC, R)
    else:
        x = rotate(x, SPEC, R)
    store_rows(out_ptr + row * D, x, live, D, C)


@dataclass(frozen=True)
class RotationSpec:
    """A rotation at one head size, as compile-time values."""

    head_dim: int
    padded: int
    rounds: int
    block: int
    signs: tuple[tuple[int, ...], ...]
    #: `1 / N`
    fold: float


def hadamard_transform(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Triton mirror of `kvq.reference.hadamard_transform`; the same bits."""
    check_input("x", x)
    launch.check_device("x", x)
    head_dim = x.shape[-1]
    check_kind("rotation", rotation, Rotation).check(head_dim)
    check_bool("inverse", inverse)
    flat = x.reshape(-1, head_dim)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(flat.shape, dtype=torch.float32, device=x.device)
    if len(flat):
        tile = launch.row_tile(None, head_dim, len(flat))
        _hadamard_kernel[(triton.cdiv(len(flat), tile.rows),)](
            flat,
            out,
            len(flat),
            flat.stride(0),
            SPEC=RotationSpec(
                head_dim,
                tile.padded,
                rotation.rounds,
                Rotation.block_size(head_dim),
                sign_words(head_dim, rotation, tile.padded),
                1.0 / rotation.gain(head_dim),
            ),
            R=tile.rows,
            INVERSE=inverse,
            **launch.options(tile),
        )
    return out.reshape(x.shape)
