"""Where keys and values lie: splits of a sequence, pages of a tile, and the loads from them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq.kernels.rows import pick
from kvq.kernels.trellis_operands import next_integers


@triton.jit
def plan_splits(span, SPEC: tl.constexpr):
    """Keys of a split and the number of splits of `span` keys: of that span alone."""
    TILE: tl.constexpr = pick(SPEC, "tile")
    keys = tl.cdiv(tl.cdiv(span, pick(SPEC, "splits")), TILE) * TILE
    keys = tl.minimum(tl.maximum(keys, pick(SPEC, "least_split")), pick(SPEC, "most_split"))
    return keys, tl.maximum(tl.cdiv(span, keys), 1)


@triton.jit
def load_count(ptr, place):
    """A number of keys as int32, or the nearest that int32 holds; -1 for all below 0."""
    return tl.minimum(tl.maximum(tl.load(ptr + place), -1), 2147483647).to(tl.int32)


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


@triton.jit
def bad_entries(table, first, last, num_blocks):
    """Marks, `[128]`, that are not 0 if an entry from `first` to before `last` names no block."""
    WIDTH: tl.constexpr = 128
    bad = tl.zeros([WIDTH], tl.int32)
    for start in range(first, last, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        page = tl.load(table + entry, mask=entry < last, other=0)
        bad = bad | ((page < 0) | (page >= num_blocks)).to(tl.int32)
    return bad


@triton.jit
def value_order(key, TRANSPOSES: tl.constexpr):
    """The key of a piece whose value is row `key` of an operand."""
    if TRANSPOSES:
        key = key // 16 * 16 + key // 2 % 2 * 8 + key % 16 // 4 * 2 + key % 2
    return key


@triton.constexpr_function
def pages_of_tile(spec):
    """Pages that are looked up for a tile: one, one each so many keys, or one for each piece."""
    if not spec.one_page:
        return spec.tile // spec.piece
    if spec.block_size % spec.tile == 0:
        return 1
    step = spec.block_size if spec.tile % spec.block_size == 0 else spec.piece
    return spec.tile // step


@triton.jit
def look_up_pages(
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
    STEP: tl.constexpr = pick(SPEC, "tile") // pages_of_tile(SPEC)
    pages = ()
    for i in tl.static_range(pages_of_tile(SPEC)):
        if pick(SPEC, "one_page"):
            entry = (t + i * STEP) // BS
        else:
            key = tl.arange(0, STEP)
            if ORDERED:
                key = value_order(key, pick(SPEC, "transposes"))
            entry = (t + i * STEP + key) // BS
        if PAST:
            entry = tl.minimum(entry, last)
        pages = pages + (tl.load(table + entry).to(tl.int32),)
    return pages


@triton.jit
def _offset(page, num_blocks):
    """A block's number as 64 bits; unsigned, which widens for nothing.

    What names no block is read as the last one: the output is NaN then, whatever is read.
    """
    page = tl.minimum(page.to(tl.uint32, bitcast=True), (num_blocks - 1).to(tl.uint32))
    return page.to(tl.int64)


@triton.jit
def _rows(
    pages,
    t,
    num_blocks,
    strides,
    PIECE_NUMBER: tl.constexpr,
    SPEC: tl.constexpr,
    ORDERED: tl.constexpr = False,
):
    """The offset of one piece of the tile at `t`: of its first key, or of each key."""
    BS: tl.constexpr = pick(SPEC, "block_size")
    TILE: tl.constexpr = pick(SPEC, "tile")
    PIECE: tl.constexpr = pick(SPEC, "piece")
    PAGE: tl.constexpr = PIECE_NUMBER * PIECE // (TILE // pages_of_tile(SPEC))
    if not pick(SPEC, "one_page"):
        key = tl.arange(0, PIECE)
        if ORDERED:
            key = value_order(key, pick(SPEC, "transposes"))
        inside = (t + PIECE_NUMBER * PIECE + key) % BS
    elif TILE % BS == 0:
        # A tile starts with a page.
        inside = PIECE_NUMBER * PIECE % BS
    elif BS % TILE == 0:
        inside = t % BS + PIECE_NUMBER * PIECE
    else:
        inside = (t + PIECE_NUMBER * PIECE) % BS
    block, token = strides
    return _offset(pages[PAGE], num_blocks) * block + inside * token


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
def high_byte(unit, SIDE: tl.constexpr):
    """Where the high bits of an integer of three-bit codes are: as a product and a quotient of two
    the compiler does not see that they are neighbors, and loads them one by one."""
    if pick(SIDE, "unit_bytes") == 1:
        byte = unit // 2
    else:
        byte = unit
    return byte


@triton.constexpr_function
def _asks_threads(spec, side):
    """Whether what follows an integer comes from another thread. Loads of single integers cannot
    run ahead, and would keep those of the tile from it."""
    return spec.transposes and side.padded == 16 and side.count % 8 == 0


@triton.jit
def load_side(
    side,
    pages,
    t,
    num_blocks,
    strides,
    SIDE: tl.constexpr,
    AXIS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """The integers of the pieces of a tile, and their high bits: channels along the other axis."""
    WHOLE: tl.constexpr = pick(SIDE, "count") == pick(SIDE, "padded")
    ONE_PAGE: tl.constexpr = pick(SPEC, "one_page")
    UNIT: tl.constexpr = pick(SIDE, "unit_bytes")
    at, high_at, live, unit, next_unit = side
    KIND: tl.constexpr = pick(SIDE, "kind")
    BELOW: tl.constexpr = (1 << pick(SIDE, "streams")) - 1
    step = next_unit - unit
    high_step = high_byte(next_unit, SIDE) - high_byte(unit, SIDE)
    tiles = ()
    highs = ()
    for i in tl.static_range(pick(SPEC, "tile") // pick(SPEC, "piece")):
        row = _rows(pages, t, num_blocks, strides, i, SPEC, AXIS == 1)
        x = _load(at, row, live, ONE_PAGE, AXIS, WHOLE)
        if UNIT == 1 and not pick(SIDE, "digits"):
            x = x.to(tl.int16)
        high = x
        if pick(SIDE, "bits") == 3:
            high = _load(high_at, row * UNIT, live, ONE_PAGE, AXIS, WHOLE).to(tl.int16)
            if UNIT == 1:
                high = high >> (unit % 2 * 4)
        if KIND == "labels" and _asks_threads(SPEC, SIDE):
            high = next_integers(x, SIDE, AXIS == 0)
        elif KIND == "labels":
            high = _load(at + step, row, live, ONE_PAGE, AXIS, WHOLE)
        if KIND == "states":
            # Each integer with the one after it above.
            near = _load(at + step, row, live, ONE_PAGE, AXIS, WHOLE)
            x = (x.to(tl.int32) & ((1 << 8 * UNIT) - 1)) | (near.to(tl.int32) << (8 * UNIT))
            if pick(SIDE, "bits") == 3:
                near = _load(high_at + high_step, row * UNIT, live, ONE_PAGE, AXIS, WHOLE)
                near = near.to(tl.int32)
                if UNIT == 1:
                    near = near >> (next_unit % 2 * 4)
                high = (high.to(tl.int32) & BELOW) | (near << pick(SIDE, "streams"))
        tiles = tiles + (x,)
        highs = highs + (high,)
    return tiles, highs


@triton.jit
def load_words(lanes, pages, t, num_blocks, strides, SPEC: tl.constexpr):
    """The stored words of the pieces of a tile, `[PIECE]` each."""
    words = ()
    for i in tl.static_range(pick(SPEC, "tile") // pick(SPEC, "piece")):
        words = words + (tl.load(lanes + _rows(pages, t, num_blocks, strides, i, SPEC)),)
    return words


@triton.jit
def moved(page, SPEC: tl.constexpr):
    """A page number as it is; carried as it came it would switch software pipelining off."""
    if pick(SPEC, "ptx") and pick(SPEC, "one_page"):
        page = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [page], dtype=tl.int32, is_pure=True, pack=1
        )
    return page
