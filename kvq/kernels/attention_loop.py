"""The loop of `kvq.kernels.attention`: one program takes some queries of a KV head over some keys.

Products are transposed: scores are `[keys, columns]` and the sum of values `[channels, columns]`,
where a column is one query of one head. So packed rows are the operand that comes straight from
registers, and a few queries fill the narrow side of the matrix unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvq.kernels.operands import SideSpec, decode_words, digit_operands, operands
from kvq.kernels.rows import pick

#: Smaller than any logit, and finite: differences with it are not NaN.
NO_LOGIT = tl.constexpr(-3.0e38)
#: Logits are not taken below this, so that a row of them still has a largest one.
LEAST_LOGIT = tl.constexpr(-1.0e37)
LOG2_E = tl.constexpr(1.4426950408889634)
#: Weights times scales are brought to below 2^15, the room of a float16: 14, plus twice the bias.
WEIGHT_BITS = tl.constexpr(254 + 14)


@dataclass(frozen=True)
class LoopSpec:
    """The shape of a program and of what it reads, as compile-time values."""

    key: SideSpec
    value: SideSpec
    block_size: int
    #: Query heads of a KV head, and how many of them a program takes.
    group: int
    heads: int
    #: Query tokens of a program.
    tokens: int
    #: `tokens * heads`, padded to a power of two of at least 4.
    columns: int
    #: A query is the sum of so many float16 numbers.
    parts: int
    #: Keys of an iteration, and of the pieces in which they are read.
    tile: int
    piece: int
    stages: int
    #: Sequences with so many new tokens are this program's, and have so many blocks of queries
    #: (0: as many as they need, and programs search for theirs).
    fewest: int
    most: int
    blocks: int
    #: Keys of a split: at least, at most; and splits that are aimed at between.
    least_split: int
    most_split: int
    splits: int
    window: int
    soft_cap: float
    has_first_key: bool
    has_slopes: bool
    has_query_bias: bool
    has_logit_bias: bool
    #: Float64 throughout, for float32 queries.
    wide: bool
    #: Inline PTX.
    ptx: bool

    @property
    def biased(self) -> bool:
        """Whether logits have a term of their own for each pair of query and key."""
        return self.has_slopes or self.has_query_bias or self.has_logit_bias

    @property
    def one_page(self) -> bool:
        """Whether a piece lies in one block."""
        return self.block_size % self.piece == 0


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
def plan_splits(span, SPEC: tl.constexpr):
    """Keys of a split and the number of splits of `span` keys: of that span alone."""
    TILE: tl.constexpr = pick(SPEC, "tile")
    keys = tl.cdiv(tl.cdiv(span, pick(SPEC, "splits")), TILE) * TILE
    keys = tl.minimum(tl.maximum(keys, pick(SPEC, "least_split")), pick(SPEC, "most_split"))
    return keys, tl.maximum(tl.cdiv(span, keys), 1)


@triton.jit
def key_range(seq_len, context, first_token, q_len, first_key, SPEC: tl.constexpr):
    """The keys that queries from `first_token` on see: start (whole tiles) and end."""
    TILE: tl.constexpr = pick(SPEC, "tile")
    last = tl.minimum(first_token + pick(SPEC, "tokens"), q_len) - 1
    end = tl.minimum(seq_len, context + last + 1)
    start = tl.maximum(first_key, 0)
    if pick(SPEC, "window") > 0:
        start = tl.maximum(start, context + first_token - pick(SPEC, "window") + 1)
    start = tl.minimum(start, tl.maximum(end, 0)) // TILE * TILE
    return start, tl.maximum(end, start)


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
def _load(lanes, row, live, ONE_PAGE: tl.constexpr, AXIS: tl.constexpr, WHOLE: tl.constexpr):
    """Integers at `lanes` plus a row offset: one for all, or one for each key (along `AXIS`)."""
    if ONE_PAGE:
        at = lanes + row
    elif AXIS == 0:
        at = lanes + row[:, None]
    else:
        at = lanes + row[None, :]
    if WHOLE:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=live, other=0)
    return x


@triton.jit
def _offset(page, num_blocks):
    """A block's number as 64 bits; unsigned, which widens for nothing.

    What names no block is read as the last one: the output is NaN then, whatever is read.
    """
    page = tl.minimum(page.to(tl.uint32, bitcast=True), (num_blocks - 1).to(tl.uint32))
    return page.to(tl.int64)


@triton.constexpr_function
def _pages_of_tile(spec):
    """Pages that are looked up for a tile: one, one each so many keys, or one for each piece."""
    if not spec.one_page:
        return spec.tile // spec.piece
    if spec.block_size % spec.tile == 0:
        return 1
    step = spec.block_size if spec.tile % spec.block_size == 0 else spec.piece
    return spec.tile // step


@triton.jit
def _pages(
    table,
    t,
    last,
    SPEC: tl.constexpr,
    PAST: tl.constexpr,
    ORDERED: tl.constexpr = False,
):
    """The pages of the tile at `t`; entries past `last` are replaced by it.

    One by one they are those of keys as they come, or of the rows of a value operand.
    """
    BS: tl.constexpr = pick(SPEC, "block_size")
    STEP: tl.constexpr = pick(SPEC, "tile") // _pages_of_tile(SPEC)
    pages = ()
    for i in tl.static_range(_pages_of_tile(SPEC)):
        if pick(SPEC, "one_page"):
            entry = (t + i * STEP) // BS
        else:
            key = tl.arange(0, STEP)
            if ORDERED:
                key = value_order(key, pick(SPEC, "ptx"))
            entry = (t + i * STEP + key) // BS
        if PAST:
            entry = tl.minimum(entry, last)
        pages = pages + (tl.load(table + entry).to(tl.int32),)
    return pages


@triton.jit
def _rows(
    pages, t, num_blocks, block, token, I: tl.constexpr, SPEC: tl.constexpr, ORDERED: tl.constexpr = False
):
    """The offset of piece `I` of the tile at `t`: of its first key, or of each key."""
    BS: tl.constexpr = pick(SPEC, "block_size")
    TILE: tl.constexpr = pick(SPEC, "tile")
    PIECE: tl.constexpr = pick(SPEC, "piece")
    PAGE: tl.constexpr = I * PIECE // (TILE // _pages_of_tile(SPEC))
    if not pick(SPEC, "one_page"):
        key = tl.arange(0, PIECE)
        if ORDERED:
            key = value_order(key, pick(SPEC, "ptx"))
        inside = (t + I * PIECE + key) % BS
    elif TILE % BS == 0:
        # A tile starts with a page.
        inside = I * PIECE % BS
    elif BS % TILE == 0:
        inside = t % BS + I * PIECE
    else:
        inside = (t + I * PIECE) % BS
    return _offset(pages[PAGE], num_blocks) * block + inside * token


@triton.jit
def _load_side(
    side,
    pages,
    t,
    num_blocks,
    block,
    token,
    SIDE: tl.constexpr,
    AXIS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """The integers of the pieces of a tile, and their high bits: channels along the other axis."""
    WHOLE: tl.constexpr = pick(SIDE, "count") == pick(SIDE, "padded")
    ONE_PAGE: tl.constexpr = pick(SPEC, "one_page")
    UNIT: tl.constexpr = pick(SIDE, "unit_bytes")
    at, high_at, live, unit = side
    tiles = ()
    highs = ()
    for i in tl.static_range(pick(SPEC, "tile") // pick(SPEC, "piece")):
        row = _rows(pages, t, num_blocks, block, token, i, SPEC, AXIS == 1)
        x = _load(at, row, live, ONE_PAGE, AXIS, WHOLE)
        if UNIT == 1 and not pick(SIDE, "digits"):
            x = x.to(tl.int16)
        high = x
        if pick(SIDE, "bits") == 3:
            high = _load(high_at, row * UNIT, live, ONE_PAGE, AXIS, WHOLE).to(tl.int32)
            if UNIT == 1:
                high = high >> (unit % 2 * 4)
        tiles = tiles + (x,)
        highs = highs + (high,)
    return tiles, highs


@triton.jit
def _words(lanes, pages, t, num_blocks, block, token, SPEC: tl.constexpr):
    """The stored words of the pieces of a tile, `[PIECE]` each."""
    words = ()
    for i in tl.static_range(pick(SPEC, "tile") // pick(SPEC, "piece")):
        words = words + (tl.load(lanes + _rows(pages, t, num_blocks, block, token, i, SPEC)),)
    return words


@triton.jit
def _scores(streams, query, SPEC: tl.constexpr):
    """`[PIECE, COLUMNS]`: products of levels and queries."""
    PIECE: tl.constexpr = pick(SPEC, "piece")
    COLUMNS: tl.constexpr = pick(SPEC, "columns")
    PARTS: tl.constexpr = pick(SPEC, "parts")
    WIDE: tl.constexpr = pick(SPEC, "wide")
    if PARTS == 4:
        s = tl.zeros([PIECE, COLUMNS * PARTS], tl.int32)
        for j in tl.static_range(len(streams)):
            s = tl.dot(streams[j], query[j], s, out_dtype=tl.int32)
        low, high = tl.split(s.reshape(PIECE, 2, 2 * COLUMNS).permute(0, 2, 1))
        even, odd = tl.split(low.reshape(PIECE, COLUMNS, 2))
        s = (odd * 128 + even).to(tl.float32)
        even, odd = tl.split(high.reshape(PIECE, COLUMNS, 2))
        s = s + (odd * 128 + even).to(tl.float32) * 16384.0
    else:
        s = tl.zeros([PIECE, COLUMNS * PARTS], tl.float64 if WIDE else tl.float32)
        for j in tl.static_range(len(streams)):
            s = dot(streams[j], query[j], s, WIDE, pick(SPEC, "ptx"))
        if PARTS == 2:
            high, low = tl.split(s.reshape(PIECE, COLUMNS, 2))
            s = high + low
    return s


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
def _query_operand(x, P: tl.constexpr, N: tl.constexpr, NEAR: tl.constexpr):
    """Shares of threads to `[channels, columns]`: a renaming of registers.

    A thread's share of an operand is `NEAR` neighbors (32 bits) of each `4 * NEAR` channels; they
    lie side by side, up to 16 bytes.
    """
    G: tl.constexpr = min(P, 16 * NEAR)
    x = x.reshape(P // G, N, 4, G // (4 * NEAR), NEAR).permute(0, 3, 2, 4, 1)
    return x.reshape(P, N)


@triton.jit
def value_order(key, PTX: tl.constexpr):
    """The key of a piece whose value is row `key` of an operand."""
    if PTX:
        key = key // 16 * 16 + key // 2 % 2 * 8 + key % 16 // 4 * 2 + key % 2
    return key


@triton.jit
def _weigh(accumulators, streams, weights, SPEC: tl.constexpr):
    """Add `values^T @ weights` to each stream's `[channels, columns]`."""
    PIECE: tl.constexpr = pick(SPEC, "piece")
    COLUMNS: tl.constexpr = pick(SPEC, "columns")
    WIDE: tl.constexpr = pick(SPEC, "wide")
    if COLUMNS < 8 and not WIDE:
        # A matrix unit has eight columns: every other one is of zeros.
        weights = tl.join(weights, tl.zeros_like(weights)).reshape(PIECE, 2 * COLUMNS)
    if pick(SPEC, "ptx"):
        weights = _as_operand(weights)
    sums = ()
    for j in tl.static_range(len(streams)):
        sums = sums + (dot(streams[j], weights, accumulators[j], WIDE, pick(SPEC, "ptx")),)
    return sums


@triton.jit
def _logits(scores, words, column, SPEC: tl.constexpr):
    """Logits without biases, times `log2(e)` unless they are capped: from raw products.

    `column` is the factor and the sum of each query, both scaled.
    """
    SIDE: tl.constexpr = pick(SPEC, "key")
    scale, shift = decode_words(words, SIDE)
    factor, total, extra = column
    x = scores * factor[None, :]
    if pick(SIDE, "digits") and pick(SIDE, "bits") == 4 and pick(SIDE, "kind") == "affine":
        x = x + extra[None, :]
    if pick(SIDE, "word") == "float32_zero_point":
        x = x + shift[:, None] * total[None, :]
    elif pick(SIDE, "offset") != 0.0:
        x = x - (total * (pick(SIDE, "unit") * pick(SIDE, "offset")))[None, :]
    x = x * scale[:, None]
    if pick(SIDE, "word") == "float16_pair":
        x = x + shift[:, None] * total[None, :]
    if pick(SPEC, "soft_cap") > 0:
        cap: tl.constexpr = pick(SPEC, "soft_cap")
        x = tanh(x) * (cap * LOG2_E)
    return x


@triton.jit
def _value_scale(words, SPEC: tl.constexpr):
    """Of rows of values `scale * (levels + shift)`: scale, and the shift where rows have their own."""
    SIDE: tl.constexpr = pick(SPEC, "value")
    scale, shift = decode_words(words, SIDE)
    if pick(SPEC, "wide"):
        scale = scale.to(tl.float64)
        shift = shift.to(tl.float64)
    if pick(SIDE, "word") == "float16_pair":
        shift = shift / scale
    return scale, shift


@triton.jit
def _room(scale):
    """The power of two that brings numbers up to `scale` below 2 to `WEIGHT_BITS` plus one."""
    exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(0 - exponent + WEIGHT_BITS, 1), 254)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tile(
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
    """Softmax and sums of one tile. `state` is maxima, sums, shifts, room and accumulators."""
    PIECE: tl.constexpr = pick(SPEC, "piece")
    NUM: tl.constexpr = pick(SPEC, "tile") // PIECE
    WIDE: tl.constexpr = pick(SPEC, "wide")
    PTX: tl.constexpr = pick(SPEC, "ptx")
    SHIFTS: tl.constexpr = pick(pick(SPEC, "value"), "shifts")
    peak, total, shifts, largest, accumulators = state

    logits = ()
    seen = ()
    for i in tl.static_range(NUM):
        if pick(pick(SPEC, "key"), "digits"):
            streams = digit_operands(keys[0][i], pick(SPEC, "key"), PTX)
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
    new_peak = tl.maximum(peak, tl.max(top, 0))
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
        reach = tl.abs(scales[0])
        if MASKED:
            key = t + tl.arange(0, PIECE)
            reach = tl.where((key >= lo) & (key < hi), reach, 0.0)
        for i in tl.static_range(1, NUM):
            size = tl.abs(scales[i])
            if MASKED:
                key = t + i * PIECE + tl.arange(0, PIECE)
                size = tl.where((key >= lo) & (key < hi), size, 0.0)
            reach = tl.maximum(reach, size)
        reach = tl.maximum(largest, tl.max(reach, 0))
        room = _room(reach)
        change = decay * (room / _room(largest))

    sums = accumulators
    if tl.max((change != 1.0).to(tl.int32), 0) > 0:
        total = total * decay[None, :]
        if SHIFTS:
            shifts = shifts * change[None, :]
        changes = change
        if pick(SPEC, "columns") < 8 and not WIDE:
            changes = tl.join(change, change).reshape(2 * pick(SPEC, "columns"))
        scaled = ()
        for j in tl.static_range(len(sums)):
            scaled = scaled + (sums[j] * changes[None, :],)
        sums = scaled
    for i in tl.static_range(NUM):
        p = tl.exp2(logits[i] - new_peak[None, :])
        total = total + p
        weights = p * (scales[i] * room)[:, None]
        if MASKED:
            weights = tl.where(seen[i], weights, 0.0)
        if not WIDE:
            weights = weights.to(tl.float16)
        if SHIFTS:
            # The weights that the levels get: an error of theirs is then no shift of the row.
            moved = weights.to(total.dtype)
            if pick(pick(SPEC, "value"), "word") != "float32":
                moved = moved * moves[i][:, None]
                if MASKED:
                    moved = tl.where(seen[i], moved, 0.0)
            shifts = shifts + moved
        streams = operands(values[0][i], values[1][i], tables[1], pick(SPEC, "value"), PTX, WIDE)
        sums = _weigh(sums, streams, weights, SPEC)
    return new_peak, total, shifts, reach, sums


@triton.jit
def _mask(x, key, lo, hi, position, biases, SPEC: tl.constexpr):
    """Add the biases, and hide the keys that a query does not see."""
    visible = (key >= lo)[:, None] & (key < hi)[:, None] & (key[:, None] <= position[None, :])
    if pick(SPEC, "window") > 0:
        visible = visible & (key[:, None] > position[None, :] - pick(SPEC, "window"))
    if pick(SPEC, "biased"):
        slopes = biases[0]
        query_bias = biases[1]
        query_bias_live = biases[2]
        context = biases[4]
        logit_bias = biases[5]
        bias = tl.zeros(x.shape, tl.float32)
        if pick(SPEC, "has_slopes"):
            away = (key[:, None] - position[None, :]).to(tl.float32)
            bias = bias + slopes[None, :] * away
        if pick(SPEC, "has_query_bias"):
            new = key - context
            live = ((new >= 0) & (new < biases[3]))[:, None] & query_bias_live[None, :]
            at = query_bias[None, :] + new[:, None]
            bias = bias + tl.load(at, mask=visible & live, other=0.0)
        if pick(SPEC, "has_logit_bias"):
            live = (key < biases[7])[:, None] & biases[6][None, :]
            at = logit_bias[None, :] + key[:, None]
            bias = bias + tl.load(at, mask=visible & live, other=0.0)
        visible = visible & (bias != float("-inf"))
        x = x + bias * LOG2_E
        x = tl.where(x < LEAST_LOGIT, LEAST_LOGIT, x)
    return tl.where(visible, x, float("-inf")), visible


@triton.jit
def _bad_entries(table, first, last, num_blocks):
    """Marks, `[128]`, that are not 0 if an entry from `first` to before `last` names no block."""
    WIDTH: tl.constexpr = 128
    bad = tl.zeros([WIDTH], tl.int32)
    for start in range(first, last, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        page = tl.load(table + entry, mask=entry < last, other=0)
        bad = bad | ((page < 0) | (page >= num_blocks)).to(tl.int32)
    return bad


@triton.jit
def find_sequence(query_start_ptr, num_sequences, place, TOKENS: tl.constexpr):
    """The sequence of block `place`, if sequence `i` has its blocks from `start // TOKENS + i` on.

    With no `TOKENS`, the sequence of query `place`.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start_ptr + middle).to(tl.int32)
        if TOKENS > 0:
            start = start // TOKENS + middle
        low = tl.where(start <= place, middle, low)
        high = tl.where(start <= place, high, middle)
    return low


@triton.jit(
    do_not_specialize=[
        "num_sequences",
        "num_slots",
        "num_blocks",
        "table_width",
        "table_stride",
        "kv_heads",
        "query_bias_size",
        "logit_bias_size",
    ]
)
def attend_kernel(
    query_ptr,
    column_ptr,
    key_ptr,
    key_high_ptr,
    key_words_ptr,
    value_ptr,
    value_high_ptr,
    value_words_ptr,
    key_table_ptr,
    value_table_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    first_key_ptr,
    slopes_ptr,
    query_bias_ptr,
    logit_bias_ptr,
    partial_ptr,
    lse_ptr,
    num_sequences,
    num_slots,
    num_blocks,
    table_width,
    table_stride,
    kv_heads,
    key_head,
    key_words_head,
    value_head,
    value_words_head,
    query_bias_sequence,
    query_bias_row,
    query_bias_size,
    logit_bias_token,
    logit_bias_head,
    logit_bias_size,
    KEY_BLOCK: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_WORDS_BLOCK: tl.constexpr,
    KEY_WORDS_TOKEN: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_WORDS_BLOCK: tl.constexpr,
    VALUE_WORDS_TOKEN: tl.constexpr,
    SPEC: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One split of the keys of one sequence, for some queries of one KV head."""
    KEY: tl.constexpr = pick(SPEC, "key")
    VALUE: tl.constexpr = pick(SPEC, "value")
    BS: tl.constexpr = pick(SPEC, "block_size")
    TILE: tl.constexpr = pick(SPEC, "tile")
    PIECE: tl.constexpr = pick(SPEC, "piece")
    NUM: tl.constexpr = TILE // PIECE
    COLUMNS: tl.constexpr = pick(SPEC, "columns")
    PARTS: tl.constexpr = pick(SPEC, "parts")
    HEADS: tl.constexpr = pick(SPEC, "heads")
    TOKENS: tl.constexpr = pick(SPEC, "tokens")
    GROUP: tl.constexpr = pick(SPEC, "group")
    WIDE: tl.constexpr = pick(SPEC, "wide")
    ONE_PAGE: tl.constexpr = pick(SPEC, "one_page")
    SHIFTS: tl.constexpr = pick(VALUE, "shifts")
    FLOAT: tl.constexpr = tl.float64 if WIDE else tl.float32
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = pick(SPEC, "blocks")

    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Heads go round fastest: the heads of a block lie side by side.
    place = tl.program_id(0)
    head_block = place % HEAD_BLOCKS
    head = place // HEAD_BLOCKS % kv_heads
    place = place // (HEAD_BLOCKS * kv_heads)
    split = place % num_slots
    place = place // num_slots
    if BLOCKS == 0:
        sequence = find_sequence(query_start_ptr, num_sequences, place, TOKENS)
    else:
        sequence = place // BLOCKS
    query_start = tl.load(query_start_ptr + sequence).to(tl.int32)
    q_len = tl.load(query_start_ptr + sequence + 1).to(tl.int32) - query_start
    length = tl.load(seq_lens_ptr + sequence).to(tl.int32)
    if BLOCKS == 0:
        first_token = (place - query_start // TOKENS - sequence) * TOKENS
    else:
        first_token = place % BLOCKS * TOKENS
    if (q_len < pick(SPEC, "fewest")) | (q_len > pick(SPEC, "most")) | (first_token >= q_len):
        return
    if length <= 0:
        return
    context = length - q_len
    seq_len = tl.minimum(length, table_width * BS)
    first_key = 0
    if pick(SPEC, "has_first_key"):
        first_key = tl.load(first_key_ptr + sequence).to(tl.int32)
    start, end = key_range(seq_len, context, first_token, q_len, first_key, SPEC)
    split_keys, splits = plan_splits(end - start, SPEC)
    if split >= splits:
        return
    lo = tl.maximum(start, first_key)
    if pick(SPEC, "window") > 0:
        lo = tl.maximum(lo, context + first_token - pick(SPEC, "window") + 1)
    hi = end
    start = start + split * split_keys
    end = tl.minimum(end, start + split_keys)

    # Each split looks at its share of the sequence's entries; it need not know before the end.
    table = block_table_ptr + sequence.to(tl.int64) * table_stride
    entries = tl.cdiv(seq_len, BS)
    share = tl.cdiv(entries, splits)
    last_entry = tl.minimum((split + 1) * share, entries)
    bad = _bad_entries(table, split * share, last_entry, num_blocks)

    # Queries and their columns.
    column = tl.arange(0, COLUMNS)
    token = first_token + column // HEADS
    query_head = head_block * HEADS + column % HEADS
    live = (column < TOKENS * HEADS) & (token < q_len) & (query_head < GROUP)
    query_row = (query_start + token).to(tl.int64) * (kv_heads * GROUP) + head * GROUP + query_head
    position = context + token
    if EARLY:
        # Until here nothing was read that the launch before writes.
        tl.extra.cuda.gdc_wait()
    factor = tl.load(column_ptr + 3 * query_row, mask=live, other=0.0)
    query_sum = tl.load(column_ptr + 3 * query_row + 1, mask=live, other=0.0)
    query_extra = tl.load(column_ptr + 3 * query_row + 2, mask=live, other=0.0)

    KS: tl.constexpr = pick(KEY, "streams")
    VS: tl.constexpr = pick(VALUE, "streams")
    KC: tl.constexpr = pick(KEY, "count")
    VC: tl.constexpr = pick(VALUE, "count")
    KP: tl.constexpr = pick(KEY, "padded")
    VP: tl.constexpr = pick(VALUE, "padded")
    # Integers of a row of the partial sums: a power of two.
    VW: tl.constexpr = pick(VALUE, "partial")
    unit = tl.arange(0, KP)
    # Parts of a query: two neighboring columns, and two more the width of all of those further.
    # A row of this load is what one thread of an operand holds of one part, up to 16 bytes.
    PAIR: tl.constexpr = min(PARTS, 2)
    NEAR: tl.constexpr = 4 if pick(KEY, "digits") else 2
    G: tl.constexpr = min(KP, 16 * NEAR)
    share = tl.arange(0, KP // G * COLUMNS * PARTS * 4)
    part = share // 4 % (COLUMNS * PARTS)
    part_column = part % (PAIR * COLUMNS) // PAIR
    part_number = part // (PAIR * COLUMNS) * PAIR + part % PAIR
    part_row = (query_start + first_token + part_column // HEADS).to(tl.int64)
    part_head = head_block * HEADS + part_column % HEADS
    part_row = part_row * (kv_heads * GROUP) + head * GROUP + part_head
    part_live = (part_column < TOKENS * HEADS) & (part_head < GROUP)
    part_live = part_live & (first_token + part_column // HEADS < q_len)
    part_place = share // (4 * COLUMNS * PARTS) * G + share % 4 * (G // 4)
    at = query_ptr + ((part_row * PARTS + part_number) * (KS * KP) + part_place)[:, None]
    at = at + tl.arange(0, G // 4)[None, :]
    query_live = part_live[:, None]
    query = ()
    for j in tl.static_range(KS):
        x = tl.load(at + j * KP, mask=query_live, other=0.0)
        query = query + (_query_operand(x, KP, COLUMNS * PARTS, NEAR),)

    # Places inside a page.
    inside = tl.arange(0, PIECE)
    value_inside = value_order(inside, pick(SPEC, "ptx"))
    value_unit = tl.arange(0, VP)
    key_at = key_ptr + head.to(tl.int64) * key_head + unit[None, :]
    value_at = value_ptr + head.to(tl.int64) * value_head + value_unit[:, None]
    key_words_at = key_words_ptr + head.to(tl.int64) * key_words_head
    value_words_at = value_words_ptr + head.to(tl.int64) * value_words_head
    KEY_UNIT: tl.constexpr = pick(KEY, "unit_bytes")
    VALUE_UNIT: tl.constexpr = pick(VALUE, "unit_bytes")
    key_high_at = key_high_ptr + head.to(tl.int64) * (key_head * KEY_UNIT)
    key_high_at = key_high_at + (unit * KEY_UNIT // 2)[None, :]
    value_high_at = value_high_ptr + head.to(tl.int64) * (value_head * VALUE_UNIT)
    value_high_at = value_high_at + (value_unit * VALUE_UNIT // 2)[:, None]
    if ONE_PAGE:
        key_at = key_at + inside[:, None] * KEY_TOKEN
        value_at = value_at + value_inside[None, :] * VALUE_TOKEN
        key_words_at = key_words_at + inside * KEY_WORDS_TOKEN
        value_words_at = value_words_at + inside * VALUE_WORDS_TOKEN
        key_high_at = key_high_at + inside[:, None] * (KEY_TOKEN * KEY_UNIT)
        value_high_at = value_high_at + value_inside[None, :] * (VALUE_TOKEN * VALUE_UNIT)
    key_live = (unit < KC)[None, :]
    value_live = (value_unit < VC)[:, None]

    # Biases.
    slopes = position.to(tl.float32) * 0.0
    if pick(SPEC, "has_slopes"):
        slopes = tl.load(slopes_ptr + head * GROUP + query_head, mask=live, other=0.0)
    query_bias = query_bias_ptr + token * 0
    query_bias_live = live
    if pick(SPEC, "has_query_bias"):
        query_bias = query_bias + sequence.to(tl.int64) * query_bias_sequence
        query_bias = query_bias + token.to(tl.int64) * query_bias_row
        query_bias_live = live & (token < query_bias_size)
    logit_bias = logit_bias_ptr + token * 0
    if pick(SPEC, "has_logit_bias"):
        logit_bias = logit_bias + (query_start + token).to(tl.int64) * logit_bias_token
        logit_bias = logit_bias + (head * GROUP + query_head).to(tl.int64) * logit_bias_head
    biases = (
        slopes,
        query_bias,
        query_bias_live,
        query_bias_size,
        context,
        logit_bias,
        live,
        logit_bias_size,
    )
    tables = (key_table_ptr, value_table_ptr)

    peak = tl.full([COLUMNS], NO_LOGIT, FLOAT)
    total = tl.zeros([PIECE, COLUMNS], FLOAT)
    shifts = tl.zeros([PIECE, COLUMNS], FLOAT)
    largest = tl.full([], 0.0, tl.float32)
    accumulators = ()
    for j in tl.static_range(VS):
        accumulators = accumulators + (
            tl.zeros([VP, COLUMNS if WIDE or COLUMNS >= 8 else 2 * COLUMNS], FLOAT),
        )

    # Tiles that every query sees whole, and the others.
    if pick(SPEC, "biased"):
        whole_start = start
        whole_end = start
    else:
        least = tl.maximum(first_key, 0)
        if pick(SPEC, "window") > 0:
            last_token = tl.minimum(first_token + TOKENS, q_len) - 1
            least = tl.maximum(least, context + last_token - pick(SPEC, "window") + 1)
        whole_start = tl.minimum(tl.maximum(start, tl.cdiv(least, TILE) * TILE), end)
        whole_start = tl.cdiv(whole_start - start, TILE) * TILE + start
        whole_end = tl.minimum(end, context + first_token + 1) // TILE * TILE
        whole_end = tl.maximum(whole_end, whole_start)
    before = tl.cdiv(tl.minimum(whole_start, end) - start, TILE)
    after = tl.maximum(tl.cdiv(end - whole_end, TILE), 0)
    last = tl.maximum(tl.cdiv(end, BS) - 1, 0)

    sides = (
        (key_at, key_high_at, key_live, unit[None, :]),
        (value_at, value_high_at, value_live, value_unit[:, None]),
    )
    for i in tl.range(0, before + after, num_stages=1):
        t = tl.where(i < before, start + i * TILE, whole_end + (i - before) * TILE)
        pages = _pages(table, t, last, SPEC, True)
        value_pages = pages
        if not ONE_PAGE:
            value_pages = _pages(table, t, last, SPEC, True, True)
        keys = _load_side(sides[0], pages, t, num_blocks, KEY_BLOCK, KEY_TOKEN, KEY, 0, SPEC)
        values = _load_side(sides[1], value_pages, t, num_blocks, VALUE_BLOCK, VALUE_TOKEN, VALUE, 1, SPEC)
        key_words = _words(key_words_at, pages, t, num_blocks, KEY_WORDS_BLOCK, KEY_WORDS_TOKEN, SPEC)
        value_words = _words(value_words_at, pages, t, num_blocks, VALUE_WORDS_BLOCK, VALUE_WORDS_TOKEN, SPEC)
        peak, total, shifts, largest, accumulators = _tile(
            (peak, total, shifts, largest, accumulators),
            keys,
            values,
            key_words,
            value_words,
            query,
            (factor, query_sum, query_extra),
            tables,
            t,
            lo,
            hi,
            position,
            biases,
            SPEC,
            True,
        )

    if whole_end > whole_start:
        # Page numbers come two tiles ahead, and words one.
        final = whole_end - TILE
        pages = _pages(table, whole_start, last, SPEC, False)
        key_words = _words(
            key_words_at, pages, whole_start, num_blocks, KEY_WORDS_BLOCK, KEY_WORDS_TOKEN, SPEC
        )
        value_words = _words(
            value_words_at, pages, whole_start, num_blocks, VALUE_WORDS_BLOCK, VALUE_WORDS_TOKEN, SPEC
        )
        next_pages = _pages(table, tl.minimum(whole_start + TILE, final), last, SPEC, False)
        for t in tl.range(whole_start, whole_end, TILE, num_stages=pick(SPEC, "stages")):
            next_t = tl.minimum(t + TILE, final)
            later_pages = _pages(table, tl.minimum(t + 2 * TILE, final), last, SPEC, False)
            value_pages = pages
            if not ONE_PAGE:
                value_pages = _pages(table, t, last, SPEC, False, True)
            keys = _load_side(sides[0], pages, t, num_blocks, KEY_BLOCK, KEY_TOKEN, KEY, 0, SPEC)
            values = _load_side(sides[1], value_pages, t, num_blocks, VALUE_BLOCK, VALUE_TOKEN, VALUE, 1, SPEC)
            next_key_words = _words(
                key_words_at, next_pages, next_t, num_blocks, KEY_WORDS_BLOCK, KEY_WORDS_TOKEN, SPEC
            )
            next_value_words = _words(
                value_words_at, next_pages, next_t, num_blocks, VALUE_WORDS_BLOCK, VALUE_WORDS_TOKEN, SPEC
            )
            peak, total, shifts, largest, accumulators = _tile(
                (peak, total, shifts, largest, accumulators),
                keys,
                values,
                key_words,
                value_words,
                query,
                (factor, query_sum, query_extra),
                tables,
                t,
                lo,
                hi,
                position,
                biases,
                SPEC,
                False,
            )
            pages = ()
            for k in tl.static_range(_pages_of_tile(SPEC)):
                pages = pages + (_moved(next_pages[k], SPEC),)
            next_pages = later_pages
            key_words = next_key_words
            value_words = next_value_words

    weight = tl.sum(total, 0)
    shift = tl.sum(shifts, 0)
    if pick(VALUE, "word") == "float32":
        shift = shift * (0.0 - pick(VALUE, "unit") * pick(VALUE, "offset"))
    if (tl.max(bad, 0) > 0) | (length > seq_len):
        weight = weight + float("nan")
    some = tl.where(weight > 0, weight, 1.0)
    some = tl.where(weight != weight, weight, some)
    if BLOCKS == 0:
        row = query_start + token
    else:
        row = sequence * pick(SPEC, "most") + token
    slot = (row.to(tl.int64) * (kv_heads * GROUP) + head * GROUP + query_head) * num_slots + split
    log_sum = tl.where(weight == 0, float("-inf"), peak + tl.log2(some))
    tl.store(lse_ptr + slot, log_sum, mask=live)
    if WIDE:
        room = 1.0
    else:
        room = _room(largest)
    for j in tl.static_range(VS):
        a = accumulators[j]
        if COLUMNS < 8 and not WIDE:
            a, nothing = tl.split(a.reshape(VP, COLUMNS, 2))
        a = a * _stream_unit(VALUE, j)
        if SHIFTS:
            a = a + shift[None, :]
        a = a / (some * room)[None, :]
        at = partial_ptr + slot[None, :] * (VS * VW) + j * VW + value_unit[:, None]
        tl.store(at, a, mask=live[None, :] & (value_unit < VW)[:, None])


@triton.constexpr_function
def _stream_unit(side, stream):
    """What an operand of a stream must be multiplied by to be a level."""
    return side.unit * side.weights[stream]


@triton.jit
def _moved(page, SPEC: tl.constexpr):
    """A page number as it is; carried as it came it would switch software pipelining off."""
    if pick(SPEC, "ptx") and pick(SPEC, "one_page"):
        page = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [page], dtype=tl.int32, is_pure=True, pack=1
        )
    return page
