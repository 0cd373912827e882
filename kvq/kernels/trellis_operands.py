"""Operands of a matrix product from the packed codes of a trellis.

A state takes codes of an integer and of the one after it, cyclically. There are two ways to its
level. `labels`: where the masks allow, the labels of sixteen channels are made at once, by shifts
and exclusive ors of whole registers of codes, and looked up by byte permutations. `states`: one
window at a time, looked up in memory.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.byte_tables import TABLE_REGISTERS, choose_bytes
from kvq.kernels.rows import pick
from kvq.trellis import Trellis, state_steps

#: The largest step of a byte that is a subnormal float16 in pairs of zero and itself.
_MOST_BYTE_STEP = 127


@triton.constexpr_function
def plane_shifts(trellis):
    """The right shifts whose exclusive or is the low crumb of every label, and the high crumb.

    `None` unless each crumb's upper bit has the mask of its lower bit, one place on.
    """
    if trellis.bits != 2 or len(trellis.masks) != 4:
        return None
    low, low_next, high, high_next = trellis.masks
    if low_next != low << 1 or high_next != high << 1:
        return None
    return tuple([t for t in range(16) if mask >> t & 1] for mask in (low, high))


def trellis_kind(
    trellis: Trellis, streams: int, unit_bytes: int, ptx: bool
) -> tuple[str, float, float, tuple[float, ...]]:
    """Kind, unit, offset and operands by label (for `labels`) of a side's levels.

    Raises:
        ValueError: A window reaches beyond the next integer.
    """
    if streams - 1 + trellis.window > 2 * streams:
        raise ValueError(
            f"codes must lie in rows of an even number of bytes for a trellis with a window of "
            f"{trellis.window} channels, got rows on odd bytes"
        )
    odd = all(step % 2 and abs(step) <= _MOST_BYTE_STEP for step in trellis.steps)
    if ptx and unit_bytes == 2 and odd and plane_shifts(trellis) is not None:
        # A byte is an integer of 0 to 127, the bits of a subnormal float16.
        integers = tuple(float((step + _MOST_BYTE_STEP) // 2) for step in trellis.steps)
        scale = 2.0**24
        return "labels", 2 * trellis.unit * scale, _MOST_BYTE_STEP / 2 / scale, integers
    return "states", trellis.unit, 0.0, ()


@lru_cache(maxsize=64)
def window_table(trellis: Trellis, device: torch.device) -> Tensor:
    """`[2 ** window_bits]` float16: the step of each window, as `window_index` counts them."""
    steps = state_steps(trellis)
    if trellis.bits == 3:
        m = trellis.window
        steps = tuple(
            steps[
                sum(
                    ((index >> 2 * j & 3) | (index >> (2 * m + j) & 1) << 2) << 3 * j
                    for j in range(m)
                )
            ]
            for index in range(trellis.num_states)
        )
    return torch.tensor(steps, dtype=torch.float16, device=device)


@triton.constexpr_function
def _window(spec):
    return spec.trellis.window


@triton.jit
def window_index(x, high, SPEC: tl.constexpr, J: tl.constexpr):
    """Where the level of the channel of stream `J` is in `window_table`.

    Args:
        x: Codes, or their low crumbs, of an integer and of the next one above it.
        high: The high bits of three-bit codes in the same order.
        SPEC: A `SideSpec`.
        J: The stream.
    """
    M: tl.constexpr = _window(SPEC)
    index = (x >> (2 * J)) & ((1 << (2 * M)) - 1)
    if pick(SPEC, "bits") == 3:
        index = index | (((high >> J) & ((1 << M) - 1)) << (2 * M))
    return index


@triton.constexpr_function
def _shifted(name, shift):
    """Both halves of `$1` moved right, with what follows them in `$2`."""
    if shift == 0:
        return f"mov.b32 {name}, $1; "
    if shift == 8:
        return f"prmt.b32 {name}, $1, $2, 0x6341; "
    kept = (0xFFFF >> shift) * 0x10001
    return (
        f"shr.u32 {name}, $1, {shift}; shl.b32 u, $2, {16 - shift}; "
        f"lop3.b32 {name}, {name}, u, {kept:#x}, 0xe4; "
    )


@triton.constexpr_function
def labels_ptx(spec, stream):
    """Levels of one stream of two integers: bytes that are looked up four at a time.

    `p` and `q` hold the low and the high crumb of the label of every channel, where its code is in
    `$1`; `s` the labels of the channels of one parity as nibbles, and `t` with their highest bit
    turned over; `a` and `b` the bytes of four of them each. A byte has seven bits, so a nibble of
    8 or more chooses 0 for its sign: one half of the table has what the other has not.
    """
    body = "{ .reg .b32 p, q, t, u, s, a, b; " + TABLE_REGISTERS
    for name, shifts in zip("pq", plane_shifts(spec.trellis), strict=True):
        body += _shifted(name, shifts[0])
        for shift in shifts[1:]:
            body += _shifted("t", shift) + f"xor.b32 {name}, {name}, t; "
    # The low crumb, where the mask has bits, and the high one elsewhere.
    if stream % 2:
        body += "shr.u32 p, p, 2; "
    else:
        body += "shl.b32 q, q, 2; "
    body += "lop3.b32 s, p, q, 0x33333333, 0xe4; xor.b32 t, s, 0x88888888; "
    # Four nibbles are one integer; channels of one parity are four.
    nibble = stream // 2
    table = [int(level) for level in spec.levels]
    for word in "ab":
        if word == "b":
            body += "shr.u32 s, s, 16; shr.u32 t, t, 16; "
        body += choose_bytes(word, table[:8], "s") + choose_bytes("u", table[8:], "t")
        body += f"add.u32 {word}, {word}, u; "
    # A byte below 128 chosen by its sign is the zero byte that a subnormal needs.
    last = nibble | 8 + nibble << 4 | 4 + nibble << 8 | 12 + nibble << 12
    return body + f"prmt.b32 $0, a, b, {last:#x}; }}"


@triton.constexpr_function
def next_ptx(side, keys):
    """The integers after those of an operand of 16 tokens by 16, from the threads that hold them.

    `$0` to `$3` become what follows `$4` to `$7`. Of the first 8 integers a thread has one of
    values (of two pairs of tokens) or one pair of keys (of two tokens) in two registers, and of
    the last 8 in two more: `operand_layout.py` sees to it that operands lie so. What follows is
    with the next thread; what follows the last thread's is the first thread's, of the other 8 if
    there are as many.

    Args:
        side: Whose `count` of integers is 8 or 16.
        keys: A row of the operand is a key; else a column is a value.
    """
    body = "{ .reg .pred p; .reg .b32 l, n, t, a0, a1, a2, a3; mov.u32 l, %laneid; "
    if keys:
        body += "add.u32 n, l, 1; lop3.b32 n, n, l, 3, 0xe4; and.b32 l, l, 3; "
        body += "setp.eq.u32 p, l, 3; "
    else:
        body += "add.u32 n, l, 4; and.b32 n, n, 31; setp.ge.u32 p, l, 28; "
    for i in range(4):
        body += f"shfl.sync.idx.b32 a{i}, ${i + 4}, n, 31, 0xffffffff; "
    for i in range(4):
        body += f"selp.b32 t, a{(i + 2) % (side.count // 4)}, a{i}, p; "
        # Keys are pairs of neighbors, of which the second is what follows the first.
        body += f"prmt.b32 ${i}, ${i + 4}, t, 0x5432; " if keys else f"mov.b32 ${i}, t; "
    return body + "}"


@triton.jit
def next_integers(x, SIDE: tl.constexpr, KEYS: tl.constexpr):
    """`next_ptx` of all 16-bit integers of a tile."""
    return tl.inline_asm_elementwise(
        next_ptx(SIDE, KEYS),
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [x],
        dtype=tl.int16,
        is_pure=True,
        pack=8,
    )
