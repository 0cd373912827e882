"""The loop of `kvq.kernels.attention`: one program takes some queries of a KV head over some keys.

Products are transposed: packed rows are the operand that comes straight from registers, and a few
queries fill the narrow side of the matrix unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvq.kernels.attention_pages import (
    bad_entries,
    find_sequence,
    high_byte,
    key_range,
    load_count,
    load_side,
    load_words,
    look_up_pages,
    moved,
    pages_of_tile,
    plan_splits,
    value_order,
)
from kvq.kernels.attention_queries import load_queries
from kvq.kernels.attention_tile import (
    NO_LOGIT,
    attend_tile,
    by_column,
    room_of,
)
from kvq.kernels.rows import pick
from kvq.kernels.side_spec import SideSpec


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
    #: A query is the sum of so many float16 numbers, an integer of so many digits, or one float64.
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
    #: Products with queries as rows, for many queries.
    query_rows: bool
    #: Float64 throughout, for float32 queries.
    wide: bool
    #: Inline PTX.
    ptx: bool

    @property
    def biased(self) -> bool:
        """Whether logits have a term of their own for each pair of query and key."""
        return self.has_slopes or self.has_query_bias or self.has_logit_bias

    @property
    def transposes(self) -> bool:
        """Whether weights go from result to operand by a transposition between threads.

        Biases come from memory, and with them the compiler lays logits out as it likes.
        """
        return self.ptx and not self.query_rows and not self.biased

    @property
    def interleaves(self) -> bool:
        """Whether columns of an operand are ordered so that a thread's results are neighbors."""
        return self.parts > 1 and self.columns >= 8 and not self.query_rows

    @property
    def one_page(self) -> bool:
        """Whether a piece lies in one block."""
        return self.block_size % self.piece == 0


@triton.jit
def by_channel(x, SPEC: tl.constexpr):
    """A value of each channel of values, to be spread over their keys or over columns."""
    return x[None, :] if pick(SPEC, "query_rows") else x[:, None]


@triton.jit
def by_value(x, SPEC: tl.constexpr):
    """A value of each key of values, to be spread over channels."""
    return x[:, None] if pick(SPEC, "query_rows") else x[None, :]


@triton.constexpr_function
def _stream_unit(side, stream):
    """What an operand of a stream must be multiplied by to be a level."""
    return side.unit * side.weights[stream]


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
    COLUMNS: tl.constexpr = pick(SPEC, "columns")
    HEADS: tl.constexpr = pick(SPEC, "heads")
    TOKENS: tl.constexpr = pick(SPEC, "tokens")
    GROUP: tl.constexpr = pick(SPEC, "group")
    WIDE: tl.constexpr = pick(SPEC, "wide")
    ONE_PAGE: tl.constexpr = pick(SPEC, "one_page")
    SHIFTS: tl.constexpr = pick(VALUE, "shifts")
    FLOAT: tl.constexpr = tl.float64 if WIDE else tl.float32
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = pick(SPEC, "blocks")
    ROWS: tl.constexpr = pick(SPEC, "query_rows")

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
    length = load_count(seq_lens_ptr, sequence)
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
        first_key = tl.minimum(load_count(first_key_ptr, sequence), seq_len)
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
    bad = bad_entries(table, split * share, last_entry, num_blocks)

    # Queries and their columns.
    column = tl.arange(0, COLUMNS)
    token = first_token + column // HEADS
    query_head = head_block * HEADS + column % HEADS
    live = (column < TOKENS * HEADS) & (token < q_len) & (query_head < GROUP)
    query_row = (query_start + token).to(tl.int64) * (kv_heads * GROUP) + head * GROUP + query_head
    # A column that is no query sees nothing.
    position = tl.where(live, context + token, -1)
    if EARLY:
        # Until here nothing was read that the launch before writes.
        tl.extra.cuda.gdc_wait()
    factor = tl.load(column_ptr + 3 * query_row, mask=live, other=0.0)
    query_sum = tl.load(column_ptr + 3 * query_row + 1, mask=live, other=0.0)
    query_extra = tl.load(column_ptr + 3 * query_row + 2, mask=live, other=0.0)

    VS: tl.constexpr = pick(VALUE, "streams")
    KC: tl.constexpr = pick(KEY, "count")
    VC: tl.constexpr = pick(VALUE, "count")
    KP: tl.constexpr = pick(KEY, "padded")
    VP: tl.constexpr = pick(VALUE, "padded")
    # Integers of a row of the partial sums: a power of two.
    VW: tl.constexpr = pick(VALUE, "partial")
    unit = tl.arange(0, KP)
    query = load_queries(
        query_ptr, query_start, first_token, q_len, head_block, head, kv_heads, SPEC
    )

    # Places inside a page.
    inside = tl.arange(0, PIECE)
    value_inside = value_order(inside, pick(SPEC, "transposes"))
    value_unit = tl.arange(0, VP)
    key_at = key_ptr + head.to(tl.int64) * key_head + unit[None, :]
    value_at = value_ptr + head.to(tl.int64) * value_head + by_channel(value_unit, SPEC)
    key_words_at = key_words_ptr + head.to(tl.int64) * key_words_head
    value_words_at = value_words_ptr + head.to(tl.int64) * value_words_head
    KEY_UNIT: tl.constexpr = pick(KEY, "unit_bytes")
    VALUE_UNIT: tl.constexpr = pick(VALUE, "unit_bytes")
    key_high_at = key_high_ptr + head.to(tl.int64) * (key_head * KEY_UNIT)
    key_high_at = key_high_at + high_byte(unit, KEY)[None, :]
    value_high_at = value_high_ptr + head.to(tl.int64) * (value_head * VALUE_UNIT)
    value_high_at = value_high_at + by_channel(high_byte(value_unit, VALUE), SPEC)
    if ONE_PAGE:
        key_at = key_at + inside[:, None] * KEY_TOKEN
        value_at = value_at + by_value(value_inside, SPEC) * VALUE_TOKEN
        key_words_at = key_words_at + inside * KEY_WORDS_TOKEN
        value_words_at = value_words_at + inside * VALUE_WORDS_TOKEN
        key_high_at = key_high_at + inside[:, None] * (KEY_TOKEN * KEY_UNIT)
        value_high_at = value_high_at + by_value(value_inside, SPEC) * (VALUE_TOKEN * VALUE_UNIT)
    key_live = (unit < KC)[None, :]
    value_live = by_channel(value_unit < VC, SPEC)

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

    VALUE_AXIS: tl.constexpr = 0 if ROWS else 1
    peak = tl.full([COLUMNS], NO_LOGIT, FLOAT)
    total = tl.zeros([COLUMNS] if ROWS else [PIECE, COLUMNS], FLOAT)
    shifts = tl.zeros([COLUMNS] if ROWS else [PIECE, COLUMNS], FLOAT)
    largest = tl.full([], 0.0, tl.float32)
    accumulators = ()
    for _j in tl.static_range(VS):
        if ROWS:
            a = tl.zeros([COLUMNS, VP], FLOAT)
        else:
            a = tl.zeros([VP, COLUMNS if WIDE or COLUMNS >= 8 else 2 * COLUMNS], FLOAT)
        accumulators = accumulators + (a,)

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

    key_strides = (KEY_BLOCK, KEY_TOKEN)
    value_strides = (VALUE_BLOCK, VALUE_TOKEN)
    key_words_strides = (KEY_WORDS_BLOCK, KEY_WORDS_TOKEN)
    value_words_strides = (VALUE_WORDS_BLOCK, VALUE_WORDS_TOKEN)
    sides = (
        (key_at, key_high_at, key_live, unit[None, :], ((unit + 1) % KC)[None, :]),
        (
            value_at,
            value_high_at,
            value_live,
            by_channel(value_unit, SPEC),
            by_channel((value_unit + 1) % VC, SPEC),
        ),
    )
    for i in tl.range(0, before + after, num_stages=1):
        t = tl.where(i < before, start + i * TILE, whole_end + (i - before) * TILE)
        pages = look_up_pages(table, t, last, SPEC, True)
        value_pages = pages
        if not ONE_PAGE:
            value_pages = look_up_pages(table, t, last, SPEC, True, True)
        keys = load_side(sides[0], pages, t, num_blocks, key_strides, KEY, 0, SPEC)
        values = load_side(
            sides[1], value_pages, t, num_blocks, value_strides, VALUE, VALUE_AXIS, SPEC
        )
        key_words = load_words(key_words_at, pages, t, num_blocks, key_words_strides, SPEC)
        value_words = load_words(value_words_at, pages, t, num_blocks, value_words_strides, SPEC)
        peak, total, shifts, largest, accumulators = attend_tile(
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
        pages = look_up_pages(table, whole_start, last, SPEC, False)
        key_words = load_words(
            key_words_at, pages, whole_start, num_blocks, key_words_strides, SPEC
        )
        value_words = load_words(
            value_words_at, pages, whole_start, num_blocks, value_words_strides, SPEC
        )
        next_pages = look_up_pages(table, tl.minimum(whole_start + TILE, final), last, SPEC, False)
        for t in tl.range(whole_start, whole_end, TILE, num_stages=pick(SPEC, "stages")):
            next_t = tl.minimum(t + TILE, final)
            later_pages = look_up_pages(table, tl.minimum(t + 2 * TILE, final), last, SPEC, False)
            value_pages = pages
            if not ONE_PAGE:
                value_pages = look_up_pages(table, t, last, SPEC, False, True)
            keys = load_side(sides[0], pages, t, num_blocks, key_strides, KEY, 0, SPEC)
            values = load_side(
                sides[1], value_pages, t, num_blocks, value_strides, VALUE, VALUE_AXIS, SPEC
            )
            next_key_words = load_words(
                key_words_at, next_pages, next_t, num_blocks, key_words_strides, SPEC
            )
            next_value_words = load_words(
                value_words_at, next_pages, next_t, num_blocks, value_words_strides, SPEC
            )
            peak, total, shifts, largest, accumulators = attend_tile(
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
            for k in tl.static_range(pages_of_tile(SPEC)):
                pages = pages + (moved(next_pages[k], SPEC),)
            next_pages = later_pages
            key_words = next_key_words
            value_words = next_value_words

    weight = total
    shift = shifts
    if not ROWS:
        weight = tl.sum(total, 0)
        shift = tl.sum(shifts, 0)
    if not pick(VALUE, "own_shift"):
        shift = shift * (0.0 - pick(VALUE, "unit") * pick(VALUE, "offset"))
    if (tl.max(bad, 0) > 0) | (length > seq_len):
        weight = weight + float("nan")
    # A sum that is NaN stays so.
    some = tl.where(weight == 0, 1.0, weight)
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
        room = room_of(largest)
    for j in tl.static_range(VS):
        a = accumulators[j]
        if COLUMNS < 8 and not WIDE:
            a, _zeros = tl.split(a.reshape(VP, COLUMNS, 2))
        a = a * _stream_unit(VALUE, j)
        if SHIFTS:
            a = a + by_column(shift, SPEC)
        a = a / by_column(some * room, SPEC)
        at = (
            partial_ptr + by_column(slot, SPEC) * (VS * VW) + j * VW + by_channel(value_unit, SPEC)
        )
        tl.store(at, a, mask=by_column(live, SPEC) & by_channel(value_unit < VW, SPEC))
