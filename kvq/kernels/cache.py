"""Triton mirror of `kvq.reference.cache`: one fused write of keys and values, in one pass.

A program takes tokens of one head of one side: tokens, heads and sides are the axes of the grid.
With keys and values of one mode, dtype and head size there is one path through the kernel, else
one for each side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels import launch
from kvq.kernels.quantize import (
    check_rounding,
    codebook_table,
    encode_rows,
    row_spec,
    store_codes,
)
from kvq.kernels.rows import load_rows, pick
from kvq.kernels.trellis import trellis_states_of
from kvq.tier import PagedKV, as_hnd, check_block_pairs, check_cache_write

#: Up to this many tokens a program looks for a later token with its slot by itself, and the write
#: is one launch; beyond it a table of claims is made first.
MOST_TOKENS_TO_SCAN = 256
#: Slots that a program compares at a time.
SCAN_WIDTH = 32


@triton.jit
def _claim_kernel(slot_ptr, claims_ptr, num_tokens, num_slots, BLOCK: tl.constexpr):
    """The last token to name a slot claims it."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    tl.atomic_max(claims_ptr + slot, token, mask=(slot >= 0) & (slot < num_slots))


@triton.jit
def _last_writer(
    slot, token, live, slot_ptr, claims_ptr, num_tokens, SCAN: tl.constexpr, WIDTH: tl.constexpr
):
    """Whether no later token names the slot."""
    if SCAN:
        beaten = tl.zeros(slot.shape, tl.int32)
        for start in range(0, num_tokens, WIDTH):
            other = start + tl.arange(0, WIDTH)
            named = tl.load(slot_ptr + other, mask=other < num_tokens, other=-1).to(tl.int64)
            same = (named[None, :] == slot[:, None]) & (other[None, :] > token[:, None])
            beaten = beaten | tl.max(same.to(tl.int32), 1)
        last = beaten == 0
    else:
        last = tl.load(claims_ptr + slot, mask=live, other=-1) == token
    return last


@triton.jit
def _write_side(
    x_ptr,
    codes_ptr,
    words_ptr,
    table_ptr,
    states_ptr,
    slot_ptr,
    claims_ptr,
    x_token,
    x_head,
    codes_block,
    codes_head,
    codes_slot,
    words_block,
    words_head,
    words_slot,
    num_tokens,
    num_slots,
    block_size,
    SPEC: tl.constexpr,
    R: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    CAST: tl.constexpr,
    SCAN: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):
    D: tl.constexpr = pick(SPEC, "head_dim")
    C: tl.constexpr = pick(SPEC, "padded")
    head = tl.program_id(1).to(tl.int64)
    # Not pipelined: an asynchronous copy would land where a thread cannot read its row at once.
    for tile in tl.range(0, TILES, num_stages=1):
        token = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        live = token < num_tokens
        base = x_ptr + token.to(tl.int64) * x_token + head * x_head
        x = load_rows(base, live, D, C)
        slot = tl.load(slot_ptr + token, mask=live, other=-1).to(tl.int64)
        live = live & (slot >= 0) & (slot < num_slots)
        live = live & _last_writer(
            slot, token, live, slot_ptr, claims_ptr, num_tokens, SCAN, WIDTH
        )
        states = states_ptr + (token.to(tl.int64) * tl.num_programs(1) + head) * D
        first, second, word = encode_rows(x, states, live, table_ptr, SPEC, R, CAST)
        # In range, so 32 bits hold it; offsets take 64.
        place = tl.where(live, slot, 0).to(tl.int32)
        block = (place // block_size).to(tl.int64)
        offset = (place % block_size).to(tl.int64)
        target = block * codes_block + head * codes_head + offset * codes_slot
        store_codes(codes_ptr + tl.multiple_of(target, ALIGN), first, second, live, SPEC, UNIT)
        tl.store(
            words_ptr + block * words_block + head * words_head + offset * words_slot,
            word.to(words_ptr.dtype.element_ty),
            mask=live,
        )


@triton.jit(
    do_not_specialize=[
        "key_codes_block",
        "key_codes_head",
        "key_codes_slot",
        "key_words_block",
        "key_words_head",
        "key_words_slot",
        "value_codes_block",
        "value_codes_head",
        "value_codes_slot",
        "value_words_block",
        "value_words_head",
        "value_words_slot",
        "num_tokens",
        "num_slots",
        "block_size",
    ]
)
def _reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    key_codes_ptr,
    value_codes_ptr,
    key_words_ptr,
    value_words_ptr,
    key_table_ptr,
    value_table_ptr,
    key_states_ptr,
    value_states_ptr,
    slot_ptr,
    claims_ptr,
    key_token,
    key_head,
    value_token,
    value_head,
    key_codes_block,
    key_codes_head,
    key_codes_slot,
    key_words_block,
    key_words_head,
    key_words_slot,
    value_codes_block,
    value_codes_head,
    value_codes_slot,
    value_words_block,
    value_words_head,
    value_words_slot,
    num_tokens,
    num_slots,
    block_size,
    KEY_SPEC: tl.constexpr,
    VALUE_SPEC: tl.constexpr,
    KEY_R: tl.constexpr,
    VALUE_R: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    CAST: tl.constexpr,
    ONE_PATH: tl.constexpr,
    SCAN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    is_key = tl.program_id(2) == 0
    if ONE_PATH:
        _write_side(
            key_ptr if is_key else value_ptr,
            key_codes_ptr if is_key else value_codes_ptr,
            key_words_ptr if is_key else value_words_ptr,
            key_table_ptr,
            key_states_ptr if is_key else value_states_ptr,
            slot_ptr,
            claims_ptr,
            key_token if is_key else value_token,
            key_head if is_key else value_head,
            key_codes_block if is_key else value_codes_block,
            key_codes_head if is_key else value_codes_head,
            key_codes_slot if is_key else value_codes_slot,
            key_words_block if is_key else value_words_block,
            key_words_head if is_key else value_words_head,
            key_words_slot if is_key else value_words_slot,
            num_tokens,
            num_slots,
            block_size,
            KEY_SPEC,
            KEY_R,
            KEY_UNIT,
            KEY_ALIGN,
            CAST,
            SCAN,
            WIDTH,
            TOKENS // KEY_R,
        )
    elif is_key:
        _write_side(
            key_ptr,
            key_codes_ptr,
            key_words_ptr,
            key_table_ptr,
            key_states_ptr,
            slot_ptr,
            claims_ptr,
            key_token,
            key_head,
            key_codes_block,
            key_codes_head,
            key_codes_slot,
            key_words_block,
            key_words_head,
            key_words_slot,
            num_tokens,
            num_slots,
            block_size,
            KEY_SPEC,
            KEY_R,
            KEY_UNIT,
            KEY_ALIGN,
            CAST,
            SCAN,
            WIDTH,
            TOKENS // KEY_R,
        )
    else:
        _write_side(
            value_ptr,
            value_codes_ptr,
            value_words_ptr,
            value_table_ptr,
            value_states_ptr,
            slot_ptr,
            claims_ptr,
            value_token,
            value_head,
            value_codes_block,
            value_codes_head,
            value_codes_slot,
            value_words_block,
            value_words_head,
            value_words_slot,
            num_tokens,
            num_slots,
            block_size,
            VALUE_SPEC,
            VALUE_R,
            VALUE_UNIT,
            VALUE_ALIGN,
            CAST,
            SCAN,
            WIDTH,
            TOKENS // VALUE_R,
        )


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    slot_mapping: Tensor,
    *,
    check: bool | None = None,
) -> None:
    """Triton mirror of `kvq.reference.reshape_and_cache`; the same bits.

    One launch for up to 256 tokens, three beyond it, and two more for each side with a trellis. No
    host synchronization unless `check` is on, so it can be captured in a CUDA graph.
    """
    check_cache_write(key, value, key_cache, value_cache, slot_mapping, check)
    launch.check_device("key", key)
    num_tokens, num_heads = len(slot_mapping), key.shape[1]
    num_blocks, _, block_size = as_hnd(key_cache)[1].shape
    num_slots = num_blocks * block_size
    launch.check_below_2_31("slot_mapping", "tokens", num_tokens)
    launch.check_below_2_31("key_cache", "slots", num_slots)
    if num_tokens == 0:
        return
    sides = [
        _Side(rows, cache, num_tokens) for rows, cache in ((key, key_cache), (value, value_cache))
    ]
    slot_mapping = slot_mapping.contiguous()
    tokens = max(side.tile.rows for side in sides)
    scan = num_tokens <= MOST_TOKENS_TO_SCAN
    claims = slot_mapping if scan else _claims(slot_mapping, num_slots)
    keys, values = sides
    one_path = keys.fixed == values.fixed and keys.tables == values.tables
    _reshape_and_cache_kernel[(triton.cdiv(num_tokens, tokens), num_heads, 2)](
        *(side.rows for side in sides),
        *(side.codes.view(launch.UNIT_DTYPES[side.unit]) for side in sides),
        *(launch.word_bits(side.words) for side in sides),
        *(codebook_table(side.mode, key.device) for side in sides),
        *(trellis_states_of(side.rows, side.mode, side.spec) for side in sides),
        slot_mapping,
        claims,
        *(stride for side in sides for stride in side.rows.stride()[:2]),
        *(stride for side in sides for stride in side.cache_strides()),
        num_tokens,
        num_slots,
        block_size,
        KEY_SPEC=keys.spec,
        VALUE_SPEC=values.spec,
        KEY_R=keys.tile.rows,
        VALUE_R=values.tile.rows,
        KEY_UNIT=keys.unit,
        VALUE_UNIT=values.unit,
        KEY_ALIGN=keys.align,
        VALUE_ALIGN=values.align,
        CAST=launch.has_e4m3_cast(key.device),
        ONE_PATH=one_path,
        SCAN=scan,
        WIDTH=SCAN_WIDTH,
        TOKENS=tokens,
        **launch.options(keys.tile, key_cache.mode, value_cache.mode),
    )


class _Side:
    """One side of a write: its rows, its cache as `[blocks, heads, block_size, ...]`, its tile."""

    def __init__(self, rows: Tensor, cache: PagedKV, num_tokens: int) -> None:
        check_rounding(cache.mode)
        self.mode = cache.mode
        self.rows = rows.detach() if rows.stride(2) == 1 else rows.detach().contiguous()
        self.codes, self.words = as_hnd(cache)
        head_dim = rows.shape[2]
        self.tile = launch.row_tile(cache.mode, head_dim, num_tokens)
        self.spec = row_spec(cache.mode, head_dim, self.tile.padded, rows.dtype)
        self.unit = launch.store_unit(cache.mode, head_dim, self.codes)
        self.align = launch.store_alignment(self.codes, self.unit)
        self.tables = (cache.mode.codebook, cache.mode.trellis)
        self.fixed = (self.spec, self.tile, self.unit, self.align, rows.dtype)

    def cache_strides(self) -> tuple[int, ...]:
        """Block, head and slot strides of the codes in units, and of the words."""
        codes = (stride // self.unit for stride in self.codes.stride()[:3])
        return (*codes, *self.words.stride()[:3])


def _claims(slot_mapping: Tensor, num_slots: int) -> Tensor:
    """`[num_slots]` int32: the last token to name each slot."""
    claims = torch.full((num_slots,), -1, dtype=torch.int32, device=slot_mapping.device)
    block = 1024
    _claim_kernel[(triton.cdiv(len(slot_mapping), block),)](
        slot_mapping, claims, len(slot_mapping), num_slots, BLOCK=block
    )
    return claims


@triton.jit
def _scatter_blocks_kernel(
    from_ptr,
    to_ptr,
    target_ptr,
    claims_ptr,
    to_block,
    to_head,
    to_slot,
    block_size,
    row_length,
    rows_per_block,
    COLUMNS: tl.constexpr,
):
    """Copy one row of the `pair`-th block of `from` to its target, if the pair claims it."""
    pair = tl.program_id(0) // rows_per_block
    row = tl.program_id(0) % rows_per_block
    head = (row // block_size).to(tl.int64)
    slot = (row % block_size).to(tl.int64)
    target = tl.load(target_ptr + pair)
    last = tl.load(claims_ptr + target, mask=target >= 0, other=-1) == pair
    column = tl.arange(0, COLUMNS)
    mask = (column < row_length) & (target >= 0) & last
    source = from_ptr + tl.program_id(0).to(tl.int64) * row_length
    values = tl.load(source + column, mask=mask)
    to_row = to_ptr + target * to_block + head * to_head + slot * to_slot
    tl.store(to_row + column, values, mask=mask)


def copy_blocks(cache: PagedKV, pairs: Tensor, *, check: bool | None = None) -> None:
    """Triton mirror of `kvq.reference.copy_blocks`; no synchronization unless `check` is on."""
    check_block_pairs(cache, pairs, check)
    launch.check_device("cache.codes", cache.codes)
    if len(pairs) == 0:
        return
    codes, words = as_hnd(cache)
    sources, targets = pairs.to(torch.int64).unbind(1)
    inside = (sources >= 0) & (sources < len(words)) & (targets >= 0) & (targets < len(words))
    targets = targets.where(inside, -1)
    claims = _claims(targets, len(words))
    for side in (codes, launch.word_bits(words)[..., None]):
        # All sources are read before any target is written.
        block = side[sources.where(inside, 0)].contiguous()
        _, heads, block_size, length = side.shape
        _scatter_blocks_kernel[(len(pairs) * heads * block_size,)](
            block,
            side,
            targets,
            claims,
            *side.stride()[:3],
            block_size,
            length,
            heads * block_size,
            COLUMNS=triton.next_power_of_2(length),
        )
