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

from kvq.checks import check_input
from kvq.kernels import launch
from kvq.kernels.rows import (
    channels,
    join_stride,
    load_rows,
    log2,
    pick,
    piece_rows,
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
        positive = [True] * padded
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
                for start in range(0, padded, 32)
            )
        )
    return tuple(words)


@triton.constexpr_function
def _sign_word(spec, round_index, i):
    """Word `i` of the signs of a round, as a signed 32-bit integer."""
    word = spec.signs[round_index][i]
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def _times_signs(t, SPEC: tl.constexpr, ROUND: tl.constexpr, E: tl.constexpr):
    """Multiply by the signs of one round."""
    C: tl.constexpr = pick(SPEC, "padded")
    channel = channels(C, E)
    word = channel * 0 + _sign_word(SPEC, ROUND, 0)
    for i in tl.static_range(1, C // 32):
        word = tl.where(channel // 32 == i, _sign_word(SPEC, ROUND, i), word)
    return t * (((word >> (channel % 32)) & 1) * 2 - 1).to(tl.float32)


@triton.jit
def butterfly(t, B: tl.constexpr, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """`H t` on blocks of `B` channels: strides B/2, ..., 2, 1 of `(u, v) -> (u + v, u - v)`."""
    for i in tl.static_range(log2(B)):
        u, v = split_stride(t, B >> (i + 1), C, R, E)
        t = join_stride(u + v, u - v, B >> (i + 1), C, R, E)
    return t


@triton.jit
def rotate(t, SPEC: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """`H (s0 * t)`, or `H (s1 * H (s0 * t))`."""
    for i in tl.static_range(pick(SPEC, "rounds")):
        t = butterfly(_times_signs(t, SPEC, i, E), pick(SPEC, "block"), pick(SPEC, "padded"), R, E)
    return t


@triton.jit
def unrotate(t, SPEC: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """The transpose of `rotate`: its inverse, but for the factor N."""
    ROUNDS: tl.constexpr = pick(SPEC, "rounds")
    for i in tl.static_range(ROUNDS):
        t = butterfly(t, pick(SPEC, "block"), pick(SPEC, "padded"), R, E)
        t = _times_signs(t, SPEC, ROUNDS - 1 - i, E)
    return t


@triton.jit(do_not_specialize=["num_rows"])
def _hadamard_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    row_stride,
    SPEC: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    INVERSE: tl.constexpr,
):
    D: tl.constexpr = pick(SPEC, "head_dim")
    C: tl.constexpr = pick(SPEC, "padded")
    start = tl.program_id(0).to(tl.int64) * R
    piece_row = start + piece_rows(C, R, E, W)
    x = load_rows(x_ptr + piece_row * row_stride, piece_row < num_rows, D, C, R, E, W)
    if INVERSE:
        x = unrotate(x * pick(SPEC, "fold"), SPEC, R, E)
    else:
        x = rotate(x, SPEC, R, E)
    store_rows(out_ptr, start, num_rows, x, D, C, R, E)


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
    rotation.check(head_dim)
    flat = x.reshape(-1, head_dim)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(flat.shape, dtype=torch.float32, device=x.device)
    if len(flat):
        tile = launch.row_tile(head_dim, x.element_size(), len(flat))
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
            E=tile.lanes * tile.width,
            W=tile.width,
            INVERSE=inverse,
            **launch.options(tile),
        )
    return out.reshape(x.shape)
