"""How rows lie in the threads of a program, and the moves within them.

A program works on R rows of C channels (a power of two; channels past the head size are zeros) as
one tensor `[C, R]`, channels first. Triton gives the last axis to the threads, so with R threads a
thread holds a whole row: splitting and joining channels renames registers, and the only data that
moves between threads are the coalesced load and store, each transposed once in shared memory.
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
def widen(x):
    """`x` as float32: a bfloat16 on its bits, since the interpreter's cast loses subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def load_rows(base, live, D: tl.constexpr, C: tl.constexpr):
    """`[C, R]` float32 of the rows that start at `base` `[R]`, where `live` `[R]`."""
    channel = tl.arange(0, C)[None, :]
    mask = live[:, None]
    if D != C:
        mask = mask & (channel < D)
    return widen(tl.load(base[:, None] + channel, mask=mask, other=0.0).permute(1, 0))


@triton.jit
def store_rows(base, x, live, D: tl.constexpr, C: tl.constexpr):
    """Store `[C, R]` as the rows that start at `base` `[R]`, where `live` `[R]`."""
    channel = tl.arange(0, C)[None, :]
    mask = live[:, None]
    if D != C:
        mask = mask & (channel < D)
    tl.store(base[:, None] + channel, x.permute(1, 0), mask=mask)


@triton.jit
def split_stride(t, S: tl.constexpr, C: tl.constexpr, R: tl.constexpr):
    """The entries whose channel has bit `S` clear, and those that have it set."""
    u, v = tl.split(t.reshape(C // (2 * S), 2, S * R).permute(0, 2, 1))
    return u, v


@triton.jit
def join_stride(u, v, C: tl.constexpr, R: tl.constexpr):
    """Undo `split_stride`."""
    return tl.join(u, v).permute(0, 2, 1).reshape(C, R)


@triton.jit
def split_parts(t, PART: tl.constexpr, C: tl.constexpr, R: tl.constexpr):
    """The `[C, R]` rows as a tuple of parts of `PART` channels, `[PART, R]` each.

    A value that is made and used up part by part does not take a register for every channel.
    """
    parts = (t,)
    for i in tl.static_range(log2(C // PART)):
        halves = ()
        for j in tl.static_range(1 << i):
            u, v = split_stride(parts[j], C >> (i + 1), C >> i, R)
            halves = halves + (u.reshape(C >> (i + 1), R), v.reshape(C >> (i + 1), R))
        parts = halves
    return parts


@triton.jit
def fold_parts(parts, N: tl.constexpr):
    """The sum of a tuple of N sums of parts: the rest of the balanced tree."""
    for i in tl.static_range(log2(N)):
        sums = ()
        for j in tl.static_range(N >> (i + 1)):
            sums = sums + (parts[2 * j] + parts[2 * j + 1],)
        parts = sums
    return parts[0]


@triton.jit
def fold_add(t, C: tl.constexpr, R: tl.constexpr):
    """`[C, R]` to `[R]`: a balanced binary tree of sums, neighbors first."""
    for i in tl.static_range(log2(C)):
        u, v = tl.split(t.reshape(C // (2 << i), 2, R).permute(0, 2, 1))
        t = u + v
    return t.reshape(R)


@triton.jit
def fold_max(t, C: tl.constexpr, R: tl.constexpr):
    """`[C, R]` to `[R]`: the maximum; a NaN anywhere in a row gives NaN."""
    for i in tl.static_range(log2(C)):
        u, v = tl.split(t.reshape(C // (2 << i), 2, R).permute(0, 2, 1))
        t = tl.maximum(u, v, propagate_nan=tl.PropagateNan.ALL)
    return t.reshape(R)


@triton.jit
def fold_min(t, C: tl.constexpr, R: tl.constexpr):
    """`[C, R]` to `[R]`: the minimum; it does not look for NaN."""
    for i in tl.static_range(log2(C)):
        u, v = tl.split(t.reshape(C // (2 << i), 2, R).permute(0, 2, 1))
        t = tl.minimum(u, v)
    return t.reshape(R)


@triton.jit
def fold_signed_max(t, C: tl.constexpr, R: tl.constexpr):
    """`[C, R]` to `[R]`: the entry of largest magnitude, of the lowest channel among equals."""
    for i in tl.static_range(log2(C)):
        u, v = tl.split(t.reshape(C // (2 << i), 2, R).permute(0, 2, 1))
        t = tl.where(tl.abs(v) > tl.abs(u), v, u)
    return t.reshape(R)


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
def store_words(base, words, live, NBYTES: tl.constexpr, NW: tl.constexpr, UNIT: tl.constexpr):
    """Store the first `NBYTES` bytes of int32 `words` `[R, NW]` at `base` `[R]`, where `live`.

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
    mask = live[:, None]
    if n != NBYTES // UNIT:
        mask = mask & (i < NBYTES // UNIT)
    tl.store(base[:, None] + i, units, mask=mask)
