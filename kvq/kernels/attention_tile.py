"""The arithmetic of one tile of keys: logits, softmax so far, and the sum of values so far.

Scores are `[keys, columns]` and sums of values `[channels, columns]`, where a column is one query
of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq.kernels.operands import decode_words, digit_operands, operands, plane_operands
from kvq.kernels.rows import pick

#: Smaller than any logit, and finite: differences with it are not NaN.
NO_LOGIT = tl.constexpr(-3.0e38)
#: Logits are not taken below this, so that a row of them still has a largest one.
LEAST_LOGIT = tl.constexpr(-1.0e37)
LOG2_E = tl.constexpr(1.4426950408889634)
#: Weights times scales are brought to below 2^15, the room of a float16: 14, plus twice the bias.
WEIGHT_BITS = tl.constexpr(254 + 14)


@triton.jit
def dot(a, b, c, WIDE: tl.constexpr, PTX: tl.constexpr):
    """`a @ b + c`."""
    if WIDE:
        r = c + tl.sum(a[:, :, None] * b[None, :, :], 1)
    elif PTX:
        r = tl.dot(a, b, c)
    else:
        r = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    return r


@triton.jit
def tanh(x):
    """Hyperbolic tangent, accurate relative to its value."""
    square = x * x
    small = x * (
        1.0
        + square
        * (
            -0.3333333333333333
            + square
            * (
                0.13333333333333333
                + square * (-0.05396825396825397 + square * 0.021869488536155203)
            )
        )
    )
    large = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
    return tl.where(tl.abs(x) < 0.2, small, large)


@triton.jit
def by_key(x, SPEC: tl.constexpr):
    """A value of each key, to be spread over columns."""
    return x[None, :] if pick(SPEC, "query_rows") else x[:, None]


@triton.jit
def by_column(x, SPEC: tl.constexpr):
    """A value of each column, to be spread over keys or channels."""
    return x[:, None] if pick(SPEC, "query_rows") else x[None, :]


@triton.jit
def _as_operand(weights):
    """The same float16 `[keys, columns]`, from the registers of a result to those of an operand.

    The matrix unit gives a thread neighbors along columns and wants neighbors along keys: blocks
    of 8 x 8 are transposed between threads, and named anew. Keys come out in the order of
    `value_order`, in which Triton counts those of a thread's operand.
    """
    KEYS: tl.constexpr = weights.shape[0]
    COLUMNS: tl.constexpr = weights.shape[1]
    y = tl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [weights],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )
    # Register b of a thread with neighbors 2c and 2c + 1 holds keys 8b + 2c and the next.
    y = y.reshape(KEYS // 16, 2, 8, COLUMNS // 8, 4, 2).permute(0, 4, 1, 5, 3, 2)
    return y.reshape(KEYS, COLUMNS)


@triton.jit
def _integer_products(streams, query, SPEC: tl.constexpr):
    """`[PIECE, 4 * COLUMNS]` int32: levels times digits of queries."""
    s = tl.zeros([pick(SPEC, "piece"), pick(SPEC, "columns") * pick(SPEC, "parts")], tl.int32)
    for j in tl.static_range(len(streams)):
        s = tl.dot(streams[j], query[j], s, out_dtype=tl.int32)
    return s


@triton.jit
def _two_digits(odd, even, SPEC: tl.constexpr):
    """`128 * odd + even` as float32: products with two planes leave integers no room for it."""
    if pick(pick(SPEC, "key"), "kind") == "planes":
        x = odd.to(tl.float32) * 128.0 + even.to(tl.float32)
    else:
        x = (odd * 128 + even).to(tl.float32)
    return x


@triton.jit
def _scores(streams, query, SPEC: tl.constexpr):
    """`[PIECE, COLUMNS]` (or, with queries as rows, the transpose): levels times queries."""
    PIECE: tl.constexpr = pick(SPEC, "piece")
    COLUMNS: tl.constexpr = pick(SPEC, "columns")
    PARTS: tl.constexpr = pick(SPEC, "parts")
    WIDE: tl.constexpr = pick(SPEC, "wide")
    if PARTS == 4:
        s = _integer_products(streams[0], query, SPEC)
        for plane in tl.static_range(1, len(streams)):
            s = s + _integer_products(streams[plane], query, SPEC) * (1 << (7 * plane))
        low, high = tl.split(s.reshape(PIECE, 2, 2 * COLUMNS).permute(0, 2, 1))
        even, odd = tl.split(low.reshape(PIECE, COLUMNS, 2))
        s = _two_digits(odd, even, SPEC)
        even, odd = tl.split(high.reshape(PIECE, COLUMNS, 2))
        s = s + _two_digits(odd, even, SPEC) * 16384.0
    elif pick(SPEC, "query_rows"):
        # The streams of one part of the queries after those of the other.
        s = tl.zeros([COLUMNS, PIECE], tl.float32)
        for j in tl.static_range(len(query)):
            levels = streams[j % len(streams)].trans(1, 0)
            s = dot(query[j], levels, s, WIDE, pick(SPEC, "ptx"))
    else:
        s = tl.zeros([PIECE, COLUMNS * PARTS], tl.float64 if WIDE else tl.float32)
        for j in tl.static_range(len(streams)):
            s = dot(streams[j], query[j], s, WIDE, pick(SPEC, "ptx"))
        if PARTS == 2:
            high, low = tl.split(s.reshape(PIECE, COLUMNS, 2))
            s = high + low
    if pick(SPEC, "interleaves"):
        # A thread has columns `4 j + k` of all `j`; named `2 k + j`, two of them are neighbors.
        even, odd = tl.split(s.reshape(PIECE, COLUMNS // 8, 2, 4).permute(0, 1, 3, 2))
        s = tl.join(even, odd).reshape(PIECE, COLUMNS)
    return s


@triton.jit
def _weigh(accumulators, streams, weights, SPEC: tl.constexpr):
    """Add `values^T @ weights` to each stream's `[channels, columns]` (or the transpose)."""
    PIECE: tl.constexpr = pick(SPEC, "piece")
    COLUMNS: tl.constexpr = pick(SPEC, "columns")
    WIDE: tl.constexpr = pick(SPEC, "wide")
    if COLUMNS < 8 and not WIDE:
        # A matrix unit has eight columns: every other one is of zeros.
        weights = tl.join(weights, tl.zeros_like(weights)).reshape(PIECE, 2 * COLUMNS)
    if pick(SPEC, "transposes"):
        weights = _as_operand(weights)
    sums = ()
    for j in tl.static_range(len(streams)):
        if pick(SPEC, "query_rows"):
            x = dot(weights, streams[j], accumulators[j], WIDE, pick(SPEC, "ptx"))
        else:
            x = dot(streams[j], weights, accumulators[j], WIDE, pick(SPEC, "ptx"))
        sums = sums + (x,)
    return sums


@triton.jit
def _logits(scores, words, column, SPEC: tl.constexpr):
    """Logits without biases, times `log2(e)` unless they are capped: from raw products.

    `column` is of each query the factor of its products, its sum, and what is added for codes that
    come less 8, all scaled.
    """
    SIDE: tl.constexpr = pick(SPEC, "key")
    scale, shift = decode_words(words, SIDE)
    factor, total, extra = column
    x = scores * by_column(factor, SPEC)
    if pick(SIDE, "digits") and pick(SIDE, "bits") == 4 and pick(SIDE, "kind") == "affine":
        x = x + by_column(extra, SPEC)
    if pick(SIDE, "word") == "float32_zero_point":
        x = x + by_key(shift, SPEC) * by_column(total, SPEC)
    elif pick(SIDE, "offset") != 0.0:
        x = x - by_column(total * (pick(SIDE, "unit") * pick(SIDE, "offset")), SPEC)
    x = x * by_key(scale, SPEC)
    if pick(SIDE, "word") == "float16_pair":
        x = x + by_key(shift, SPEC) * by_column(total, SPEC)
    if pick(SPEC, "soft_cap") > 0:
        cap: tl.constexpr = pick(SPEC, "soft_cap")
        x = tanh(x) * (cap * LOG2_E)
    return x


@triton.jit
def _mask(x, key, lo, hi, position, biases, SPEC: tl.constexpr):
    """Add the biases, and hide the keys that a query does not see."""
    visible = by_key((key >= lo) & (key < hi), SPEC) & (
        by_key(key, SPEC) <= by_column(position, SPEC)
    )
    if pick(SPEC, "window") > 0:
        visible = visible & (by_key(key, SPEC) > by_column(position, SPEC) - pick(SPEC, "window"))
    if pick(SPEC, "biased"):
        slopes = biases[0]
        query_bias = biases[1]
        query_bias_live = biases[2]
        context = biases[4]
        logit_bias = biases[5]
        bias = tl.zeros(x.shape, tl.float32)
        if pick(SPEC, "has_slopes"):
            away = (by_key(key, SPEC) - by_column(position, SPEC)).to(tl.float32)
            bias = bias + by_column(slopes, SPEC) * away
        if pick(SPEC, "has_query_bias"):
            new = key - context
            live = by_key((new >= 0) & (new < biases[3]), SPEC) & by_column(query_bias_live, SPEC)
            at = by_column(query_bias, SPEC) + by_key(new, SPEC)
            bias = bias + tl.load(at, mask=visible & live, other=0.0)
        if pick(SPEC, "has_logit_bias"):
            live = by_key(key < biases[7], SPEC) & by_column(biases[6], SPEC)
            at = by_column(logit_bias, SPEC) + by_key(key, SPEC)
            bias = bias + tl.load(at, mask=visible & live, other=0.0)
        visible = visible & (bias != float("-inf"))
        x = x + bias * LOG2_E
        x = tl.where(x < LEAST_LOGIT, LEAST_LOGIT, x)
    return tl.where(visible, x, float("-inf")), visible


@triton.jit
def _value_scale(words, SPEC: tl.constexpr):
    """Rows are `scale * (levels + shift)`: the scale, and the shift where rows have their own."""
    SIDE: tl.constexpr = pick(SPEC, "value")
    scale, shift = decode_words(words, SIDE)
    if pick(SPEC, "wide"):
        scale = scale.to(tl.float64)
        shift = shift.to(tl.float64)
    if pick(SIDE, "word") == "float16_pair":
        shift = shift / scale
    return scale, shift


@triton.jit
def room_of(scale):
    """The power of two that brings numbers up to `scale` below 2^15."""
    exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(0 - exponent + WEIGHT_BITS, 1), 254)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def attend_tile(
    state,
    keys,
    values,
    key_words,
    value_words,
    query,
    column,
    tables,
    t,
    lo,
    hi,
    position,
    biases,
    SPEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Softmax and sums of one tile. `state` is maxima, sums, shifts, the largest scale so far
    and accumulators.

    Sums and shifts stay `[PIECE, COLUMNS]` from tile to tile, without a sum over threads; with
    queries as rows, where that would be many registers, they are `[COLUMNS]`.
    """
    PIECE: tl.constexpr = pick(SPEC, "piece")
    NUM: tl.constexpr = pick(SPEC, "tile") // PIECE
    WIDE: tl.constexpr = pick(SPEC, "wide")
    PTX: tl.constexpr = pick(SPEC, "ptx")
    SHIFTS: tl.constexpr = pick(pick(SPEC, "value"), "shifts")
    ROWS: tl.constexpr = pick(SPEC, "query_rows")
    KEYS: tl.constexpr = 1 if ROWS else 0
    peak, total, shifts, largest, accumulators = state

    logits = ()
    seen = ()
    for i in tl.static_range(NUM):
        if pick(pick(SPEC, "key"), "kind") == "planes":
            streams = (
                plane_operands(keys[0][i], pick(SPEC, "key"), PTX, 0),
                plane_operands(keys[0][i], pick(SPEC, "key"), PTX, 1),
            )
        elif pick(pick(SPEC, "key"), "digits"):
            streams = (digit_operands(keys[0][i], pick(SPEC, "key"), PTX),)
        else:
            streams = operands(keys[0][i], keys[1][i], tables[0], pick(SPEC, "key"), PTX, WIDE)
        x = _logits(_scores(streams, query, SPEC), key_words[i], column, SPEC)
        if MASKED:
            key = t + i * PIECE + tl.arange(0, PIECE)
            x, visible = _mask(x, key, lo, hi, position, biases, SPEC)
            seen = seen + (visible,)
        logits = logits + (x,)

    top = logits[0]
    for i in tl.static_range(1, NUM):
        top = tl.maximum(top, logits[i])
    new_peak = tl.maximum(peak, tl.max(top, KEYS))
    decay = tl.exp2(peak - new_peak)

    scales = ()
    moves = ()
    reach = largest
    for i in tl.static_range(NUM):
        scale, shift = _value_scale(value_words[i], SPEC)
        scales = scales + (scale,)
        moves = moves + (shift,)
    if WIDE:
        room = 1.0
        change = decay
    else:
        reach = tl.zeros([PIECE], tl.float32)
        for i in tl.static_range(NUM):
            size = tl.abs(scales[i])
            if MASKED:
                # What no query sees may be large.
                if pick(SPEC, "biased"):
                    some = tl.max(seen[i].to(tl.int32), 1 - KEYS) > 0
                else:
                    key = t + i * PIECE + tl.arange(0, PIECE)
                    some = (key >= lo) & (key < hi)
                size = tl.where(some, size, 0.0)
            reach = tl.maximum(reach, size)
        reach = tl.maximum(largest, tl.max(reach, 0))
        room = room_of(reach)
        change = decay * (room / room_of(largest))

    sums = accumulators
    if tl.max((change != 1.0).to(tl.int32), 0) > 0:
        total = total * (decay if ROWS else decay[None, :])
        if SHIFTS:
            shifts = shifts * (change if ROWS else change[None, :])
        changes = change
        if pick(SPEC, "columns") < 8 and not WIDE:
            changes = tl.join(change, change).reshape(2 * pick(SPEC, "columns"))
        scaled = ()
        for j in tl.static_range(len(sums)):
            scaled = scaled + (sums[j] * by_column(changes, SPEC),)
        sums = scaled
    for i in tl.static_range(NUM):
        p = tl.exp2(logits[i] - by_column(new_peak, SPEC))
        total = total + (tl.sum(p, 1) if ROWS else p)
        weights = p * by_key(scales[i] * room, SPEC)
        if MASKED:
            weights = tl.where(seen[i], weights, 0.0)
        if not WIDE:
            weights = weights.to(tl.float16)
        if SHIFTS:
            # The weights that the levels get: an error of theirs is then no shift of the row.
            moved = weights.to(total.dtype)
            if pick(pick(SPEC, "value"), "own_shift"):
                moved = moved * by_key(moves[i], SPEC)
                if MASKED:
                    moved = tl.where(seen[i], moved, 0.0)
            shifts = shifts + (tl.sum(moved, 1) if ROWS else moved)
        streams = operands(values[0][i], values[1][i], tables[1], pick(SPEC, "value"), PTX, WIDE)
        sums = _weigh(sums, streams, weights, SPEC)
    return new_peak, total, shifts, reach, sums
