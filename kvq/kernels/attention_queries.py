"""The queries of a program of `kvq.kernels.attention`, as operands."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq.kernels.rows import pick


@triton.jit
def _operand(x, P: tl.constexpr, N: tl.constexpr, NEAR: tl.constexpr):
    """Shares of threads to `[channels, columns]`: a renaming of registers.

    A thread's share of an operand is `NEAR` neighbors (32 bits) of each `4 * NEAR` channels; they
    lie side by side, up to 16 bytes.
    """
    G: tl.constexpr = min(P, 16 * NEAR)
    x = x.reshape(P // G, N, 4, G // (4 * NEAR), NEAR).permute(0, 3, 2, 4, 1)
    return x.reshape(P, N)


@triton.jit
def _load_parts(
    query_ptr,
    query_start,
    first_token,
    q_len,
    head_block,
    head,
    kv_heads,
    SPEC: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
):
    """`[channels, columns * PARTS]` of each stream: so many parts of queries, from `FIRST` on."""
    KEY: tl.constexpr = pick(SPEC, "key")
    KS: tl.constexpr = pick(KEY, "streams")
    KP: tl.constexpr = pick(KEY, "padded")
    ALL: tl.constexpr = pick(SPEC, "parts")
    COLUMNS: tl.constexpr = pick(SPEC, "columns")
    HEADS: tl.constexpr = pick(SPEC, "heads")
    TOKENS: tl.constexpr = pick(SPEC, "tokens")
    GROUP: tl.constexpr = pick(SPEC, "group")
    # Parts of a query: two neighboring columns, and two more the width of all of those further.
    # A row of this load is what one thread of an operand holds of one part, up to 16 bytes.
    PAIR: tl.constexpr = min(PARTS, 2)
    NEAR: tl.constexpr = 4 if pick(KEY, "digits") else 2
    G: tl.constexpr = min(KP, 16 * NEAR)
    share = tl.arange(0, KP // G * COLUMNS * PARTS * 4)
    part = share // 4 % (COLUMNS * PARTS)
    column = part % (PAIR * COLUMNS) // PAIR
    if pick(SPEC, "interleaves"):
        # Column `8 i + 4 j + k` of an operand is of query `8 i + 2 k + j`.
        column = column // 8 * 8 + column % 4 * 2 + column // 4 % 2
    number = FIRST + part // (PAIR * COLUMNS) * PAIR + part % PAIR
    token = first_token + column // HEADS
    query_head = head_block * HEADS + column % HEADS
    row = (query_start + token).to(tl.int64) * (kv_heads * GROUP) + head * GROUP + query_head
    live = (column < TOKENS * HEADS) & (query_head < GROUP) & (token < q_len)
    place = share // (4 * COLUMNS * PARTS) * G + share % 4 * (G // 4)
    at = query_ptr + ((row * ALL + number) * (KS * KP) + place)[:, None]
    at = at + tl.arange(0, G // 4)[None, :]
    query = ()
    for j in tl.static_range(KS):
        x = tl.load(at + j * KP, mask=live[:, None], other=0.0)
        query = query + (_operand(x, KP, COLUMNS * PARTS, NEAR),)
    return query


@triton.jit
def load_queries(
    query_ptr,
    query_start,
    first_token,
    q_len,
    head_block,
    head,
    kv_heads,
    SPEC: tl.constexpr,
):
    """The queries of a program by stream, all parts side by side; or, with queries as rows, the
    streams of one part after those of the other, so that their products add up."""
    PARTS: tl.constexpr = pick(SPEC, "parts")
    if pick(SPEC, "query_rows"):
        query = ()
        for i in tl.static_range(PARTS):
            part = _load_parts(
                query_ptr, query_start, first_token, q_len, head_block, head, kv_heads, SPEC, 1, i
            )
            for j in tl.static_range(len(part)):
                query = query + (part[j].trans(1, 0),)
    else:
        query = _load_parts(
            query_ptr, query_start, first_token, q_len, head_block, head, kv_heads, SPEC, PARTS, 0
        )
    return query
