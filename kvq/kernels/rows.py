"""How a row lies in the threads of a program, and the moves within it.

A program works on R rows of C channels (a power of two; channels past the head size are zeros).
Its values form one tensor `[C / E, R, E]`: the channel of an entry is `h * E + e`, and E is
`lanes * width` of the `RowTile`. With one lane a thread holds a whole row, so everything below but
the load and the store renames registers, and nothing moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def pick(spec, name):
    """A field of a `RowSpec`."""
    return getattr(spec, name)


@triton.constexpr_function
def log2(n):
    """The exponent of a power of two."""
    return n.bit_length() - 1


@triton.jit
def channels(C: tl.constexpr, E: tl.constexpr):
    """`[C / E, 1, E]` int32: the channel of each entry."""
    return (tl.arange(0, C // E)[:, None] * E + tl.arange(0, E)[None, :])[:, None, :]


@triton.jit
def piece_rows(C: tl.constexpr, R: tl.constexpr, E: tl.constexpr, W: tl.constexpr):
    """`[C * R / W]` int32: the row of each piece of `W` channels, in the order of `load_rows`."""
    return (tl.arange(0, C * R // W) // (E // W)) % R


@triton.jit
def load_rows(
    base,
    live,
    D: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
):
    """`[C / E, R, E]` float32 from rows that start at `base`, where `live`.

    `base` and `live` are `[C * R / W]`, one for each piece of `piece_rows`: a thread takes 16 bytes
    of one row at a time, in one load whose alignment the compiler can see.
    """
    piece = tl.arange(0, C * R // W)
    channel = ((piece // (R * (E // W))) * (E // W) + piece % (E // W)) * W
    columns = tl.arange(0, W)[None, :]
    if D % W == 0:
        mask = (live & (channel < D))[:, None]
    else:
        mask = live[:, None] & (channel[:, None] + columns < D)
    x = tl.load(base[:, None] + channel[:, None] + columns, mask=mask, other=0.0)
    return x.to(tl.float32).reshape(C // E, R, E)


@triton.jit
def split_stride(t, S: tl.constexpr, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """The entries whose channel has bit `S` clear, and those that have it set."""
    B: tl.constexpr = S if S < E else S * R
    u, v = tl.split(t.reshape(C * R // (2 * B), 2, B).permute(0, 2, 1))
    return u, v


@triton.jit
def join_stride(u, v, S: tl.constexpr, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """Undo `split_stride` of the stride `S`."""
    return tl.join(u, v).permute(0, 2, 1).reshape(C // E, R, E)


@triton.jit
def fold_add(t, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """`[C / E, R, E]` to `[R]`: a balanced binary tree of sums, neighbors first."""
    t = t.reshape(C * R)
    for i in tl.static_range(log2(E)):
        u, v = tl.split(t.reshape(C * R // (2 << i), 2))
        t = u + v
    for i in tl.static_range(log2(C // E)):
        u, v = tl.split(t.reshape((C // E) // (2 << i), 2, R).permute(0, 2, 1))
        t = (u + v).reshape((C // E) // (2 << i) * R)
    return t


@triton.jit
def fold_max(t, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """`[C / E, R, E]` to `[R]`: the maximum; a NaN anywhere in a row gives NaN."""
    t = t.reshape(C * R)
    for i in tl.static_range(log2(C // E)):
        u, v = tl.split(t.reshape(2, C * R // (2 << i)).permute(1, 0))
        t = tl.maximum(u, v, propagate_nan=tl.PropagateNan.ALL)
    for i in tl.static_range(log2(E)):
        u, v = tl.split(t.reshape(E * R // (2 << i), 2))
        t = tl.maximum(u, v, propagate_nan=tl.PropagateNan.ALL)
    return t


@triton.jit
def fold_min(t, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """`[C / E, R, E]` to `[R]`: the minimum; it does not look for NaN."""
    t = t.reshape(C * R)
    for i in tl.static_range(log2(C // E)):
        u, v = tl.split(t.reshape(2, C * R // (2 << i)).permute(1, 0))
        t = tl.minimum(u, v)
    for i in tl.static_range(log2(E)):
        u, v = tl.split(t.reshape(E * R // (2 << i), 2))
        t = tl.minimum(u, v)
    return t


@triton.jit
def bits_of(x):
    """The bits of a float32, as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(x):
    """The float32 of int32 bits."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def not_finite(x):
    """Whether a float32 is an infinity or NaN, asked of its bits."""
    return (bits_of(x) & 0x7FFFFFFF) >= 0x7F800000


@triton.jit
def store_words(base, words, mask, NBYTES: tl.constexpr, NW: tl.constexpr, UNIT: tl.constexpr):
    """Store the first `NBYTES` bytes of int32 `words` `[R, NW]` at `base` `[R]`.

    `base` points to integers of `UNIT` bytes, the largest that keeps every row aligned.
    """
    R: tl.constexpr = words.shape[0]
    n: tl.constexpr = NW * (4 // UNIT)
    i = tl.arange(0, n)[None, :]
    if UNIT == 4:
        units = words
    else:
        shift = tl.arange(0, 4 // UNIT)[None, None, :] * (8 * UNIT)
        units = (words[:, :, None] >> shift).reshape(R, n).to(base.dtype.element_ty)
    tl.store(base[:, None] + i, units, mask=mask[:, None] & (i < NBYTES // UNIT))


@triton.jit
def store_rows(
    out_ptr,
    start,
    num_rows,
    x,
    D: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
):
    """Store `[C / E, R, E]` float32 as contiguous rows of `D` channels from row `start` on.

    A thread stores 16 bytes of one row at a time, as it holds them.
    """
    W: tl.constexpr = 4
    piece = tl.arange(0, C * R // W)
    channel = ((piece // (R * (E // W))) * (E // W) + piece % (E // W)) * W
    row = start + piece_rows(C, R, E, W)
    columns = tl.arange(0, W)[None, :]
    mask = (row < num_rows)[:, None]
    if D % W == 0:
        mask = mask & (channel < D)[:, None]
    else:
        mask = mask & (channel[:, None] + columns < D)
    values = x.reshape(C * R // W, W)
    tl.store(out_ptr + (row * D + channel)[:, None] + columns, values, mask=mask)
