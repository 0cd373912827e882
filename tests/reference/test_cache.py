"""The paged write: which bytes change, and what they hold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvq.modes import MODES
from kvq.modes import mode as find_mode
from kvq.reference import (
    copy_blocks,
    dequantize,
    paged_attention,
    quantize,
    reshape_and_cache,
)
from kvq.tier import Layout, PagedKV, as_hnd, new_paged_kv

INT8, INT4, INT2 = (find_mode(name) for name in ("int8", "int4", "int2"))
BLOCKS, BLOCK_SIZE, HEADS = 6, 5, 3
SLOTS = BLOCKS * BLOCK_SIZE
SENTINEL_BYTE, SENTINEL_WORD = 0xAB, 123.0


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def sentinel_cache(mode=INT4, head_dim=32, layout=Layout.HND, *, blocks=BLOCKS) -> PagedKV:
    cache = new_paged_kv(blocks, BLOCK_SIZE, HEADS, head_dim, mode, layout=layout)
    cache.codes.fill_(SENTINEL_BYTE)
    cache.words.fill_(SENTINEL_WORD)
    return cache


def row_of(cache: PagedKV, slot: int) -> tuple[Tensor, Tensor]:
    """Codes `[H, B]` and words `[H]` of a slot."""
    block, offset = divmod(slot, BLOCK_SIZE)
    if cache.layout is Layout.HND:
        return cache.codes[block, :, offset], cache.words[block, :, offset]
    return cache.codes[block, offset], cache.words[block, offset]


def bits(words: Tensor) -> Tensor:
    words = words.contiguous()
    return words.view(torch.int16 if words.dtype is torch.float16 else torch.int32)


def assert_holds(cache: PagedKV, rows: dict[int, Tensor]) -> None:
    """The cache holds these rows, slot by slot, and the sentinel everywhere else."""
    for slot in range(cache.words.numel() // HEADS):
        codes, words = row_of(cache, slot)
        if slot in rows:
            stored = quantize(rows[slot], cache.mode)
            assert torch.equal(codes, stored.codes), slot
            assert torch.equal(bits(words), bits(stored.words)), slot
        else:
            assert (codes == SENTINEL_BYTE).all(), slot
            assert (words == SENTINEL_WORD).all(), slot


def rows(tokens: int = 8, head_dim: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, HEADS, head_dim).to(dtype)


# -------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("index", range(len(MODES)), ids=list(MODES))
def test_every_pair_of_modes(index, layout):
    modes = list(MODES.values())
    key_cache = sentinel_cache(modes[index], 48, layout)
    value_cache = sentinel_cache(modes[(index + 7) % len(modes)], 64, layout)
    key, value = rows(3, 48), rows(3, 64)
    reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([29, 0, 13]))
    assert_holds(key_cache, {29: key[0], 0: key[1], 13: key[2]})
    assert_holds(value_cache, {29: value[0], 0: value[1], 13: value[2]})


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tail", [0, 3])
def test_padding_is_not_written(index_dtype, tail):
    """Rows 5 to 7 are what graph padding leaves: NaN, with no slot or the slot -1."""
    key, value = rows(), rows()
    key[5:], value[5:] = math.nan, math.nan
    slots = torch.tensor([3, -1, 17, -7, 0] + [-1] * tail, dtype=index_dtype)
    key_cache, value_cache = sentinel_cache(), sentinel_cache(INT8)
    reshape_and_cache(key, value, key_cache, value_cache, slots)
    assert_holds(key_cache, {3: key[0], 17: key[2], 0: key[4]})
    assert_holds(value_cache, {3: value[0], 17: value[2], 0: value[4]})


@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_write(tokens):
    cache, other = sentinel_cache(), sentinel_cache(INT8)
    empty = torch.zeros(0, dtype=torch.int64)
    reshape_and_cache(rows(tokens), rows(tokens), cache, other, empty)
    reshape_and_cache(rows(tokens), rows(tokens), cache, other, torch.full((tokens,), -1))
    assert_holds(cache, {})
    assert_holds(other, {})


def test_a_nan_row_changes_no_neighbor():
    key = rows(2)
    key[0, 1, 7] = math.inf
    cache, other = sentinel_cache(INT2), sentinel_cache(INT8)
    reshape_and_cache(key, key, cache, other, torch.tensor([4, 5]))
    assert_holds(cache, {4: key[0], 5: key[1]})
    assert bits(row_of(cache, 4)[1])[1] == 0x7FC00000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inputs_of_any_stride(dtype):
    key, value = rows(4, 32, dtype), rows(4, 32, dtype)
    slots = torch.tensor([9, 2, 20, 11])
    apart = torch.zeros(8, dtype=torch.int64)
    apart[::2] = slots
    fused = torch.stack((key, value), dim=-1)  # the last axis strided
    strided_key, strided_value = fused.unbind(-1)
    head_first = value.transpose(0, 1).contiguous().transpose(0, 1)
    for k, v in ((strided_key, strided_value), (key, head_first)):
        key_cache, value_cache = sentinel_cache(), sentinel_cache(INT8)
        reshape_and_cache(k, v, key_cache, value_cache, apart[::2])
        assert_holds(key_cache, dict(zip(slots.tolist(), key, strict=True)))
        assert_holds(value_cache, dict(zip(slots.tolist(), value, strict=True)))


@pytest.mark.parametrize("heads_first", [True, False])
def test_interleaved_views_with_guard_pages(heads_first):
    """Keys and values share one buffer; the first and the last block belong to somebody else."""
    inner = (HEADS, BLOCK_SIZE) if heads_first else (BLOCK_SIZE, HEADS)
    layout = Layout.HND if heads_first else Layout.NHD
    codes = torch.full((BLOCKS + 2, 2, *inner, 16), SENTINEL_BYTE, dtype=torch.uint8)
    words = torch.full((BLOCKS + 2, 2, *inner), SENTINEL_WORD)
    caches = [PagedKV(codes[1:-1, i], words[1:-1, i], INT4, layout) for i in (0, 1)]
    key, value = rows(4), rows(4)
    slots = torch.tensor([SLOTS - 1, 0, SLOTS, 12])
    reshape_and_cache(key, value, *caches, slots, check=False)
    reshape_and_cache(key, value, *caches, torch.tensor([-2, SLOTS + 3, 2**40]), check=False)
    for cache, x in zip(caches, (key, value), strict=True):
        assert_holds(cache, {SLOTS - 1: x[0], 0: x[1], 12: x[3]})
    for guard in (0, -1):
        assert (codes[guard] == SENTINEL_BYTE).all()
        assert (words[guard] == SENTINEL_WORD).all()


def test_the_last_of_duplicate_slots_wins_with_code_and_word():
    key = rows(6) * torch.tensor([1.0, 8, 64, 512, 4096, 2**15])[:, None, None]
    slots = torch.tensor([7, 2, 7, SLOTS + 7, 7, 2])
    for _ in range(3):
        cache, other = sentinel_cache(), sentinel_cache(INT8)
        reshape_and_cache(key, -key, cache, other, slots, check=False)
        assert_holds(cache, {7: key[4], 2: key[5]})
        assert_holds(other, {7: -key[4], 2: -key[5]})


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_many_duplicates_never_mix():
    """Enough rows, often enough, that threads would race for the slots."""
    key, slots = rows(40_000, 16), torch.randint(0, 3, (40_000,))
    last = {slot: key[token] for token, slot in enumerate(slots.tolist())}
    for _ in range(4):
        cache, other = sentinel_cache(INT8, 16), sentinel_cache(INT2, 16)
        reshape_and_cache(key, key, cache, other, slots, check=False)
        assert_holds(cache, last)
        assert_holds(other, last)


def test_keys_and_values_are_written_alike():
    for heads_layout in Layout:
        cache, other = sentinel_cache(layout=heads_layout), sentinel_cache(layout=heads_layout)
        x = rows(8)
        reshape_and_cache(x, x, cache, other, torch.arange(8) * 3)
        assert torch.equal(cache.codes, other.codes)
        assert torch.equal(bits(cache.words), bits(other.words))


def test_a_second_view_of_a_buffer_sees_the_first_ones_rows():
    cache, other = sentinel_cache(), sentinel_cache(INT8)
    key, late = rows(4), rows(1)
    reshape_and_cache(key, key, cache, other, torch.arange(4))
    view = PagedKV(cache.codes, cache.words, INT4, Layout.HND)
    assert_holds(view, dict(enumerate(key)))
    reshape_and_cache(late, late, view, other, torch.tensor([8]))
    assert_holds(cache, {**dict(enumerate(key)), 8: late[0]})


def test_writing_in_pieces_is_writing_at_once():
    key, slots = rows(12), torch.randperm(SLOTS)[:12]
    whole, pieces, other = sentinel_cache(), sentinel_cache(), sentinel_cache(INT8)
    reshape_and_cache(key, key, whole, other, slots)
    for part in (slice(0, 1), slice(1, 7), slice(7, 12)):
        reshape_and_cache(key[part], key[part], pieces, other, slots[part])
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(bits(whole.words), bits(pieces.words))


def test_no_gradient_enters_the_cache():
    key = rows(2).requires_grad_()
    cache, other = sentinel_cache(), sentinel_cache(INT8)
    reshape_and_cache(key, key, cache, other, torch.tensor([0, 1]))
    assert not cache.words.requires_grad
    assert not other.words.requires_grad


def test_a_cache_of_more_than_two_gigabytes():
    """The last block starts past 2^31 bytes. Only the pages that are touched take memory."""
    block_bytes = 16 * 256
    blocks = 2**31 // block_bytes + 2
    codes = torch.empty((blocks, 1, 16, 256), dtype=torch.uint8)
    words = torch.empty((blocks, 1, 16), dtype=torch.float32)
    big, small = PagedKV(codes, words, INT8, Layout.HND), new_paged_kv(1, 16, 1, 256, INT8)
    x = torch.randn(3, 1, 256)
    first = (blocks - 1) * 16
    reshape_and_cache(x, x, big, big, torch.arange(first, first + 3))
    reshape_and_cache(x, x, small, small, torch.arange(3))
    results = [
        paged_attention(
            x[:1],
            cache,
            cache,
            torch.tensor([[block]], dtype=torch.int32),
            torch.tensor([3]),
            torch.tensor([0, 1]),
            scale=0.1,
        )
        for cache, block in ((big, blocks - 1), (small, 0))
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("layout", Layout)
def test_attention_reads_what_was_written(layout):
    """A sequence that grows over a block boundary, written and read token by token."""
    key_cache, value_cache = sentinel_cache(INT8, 32, layout), sentinel_cache(INT4, 16, layout)
    key, value, query = rows(7), rows(7, 16), rows(7)
    table = torch.tensor([[4, 1]])
    for t in range(7):
        slot = int(table[0, t // BLOCK_SIZE]) * BLOCK_SIZE + t % BLOCK_SIZE
        token = slice(t, t + 1)
        reshape_and_cache(key[token], value[token], key_cache, value_cache, torch.tensor([slot]))
        output = paged_attention(
            query[token],
            key_cache,
            value_cache,
            table,
            torch.tensor([t + 1]),
            torch.tensor([0, 1]),
            scale=0.2,
        )
        k = dequantize(*quantize(key[: t + 1], INT8), INT8, 32)
        v = dequantize(*quantize(value[: t + 1], INT4), INT4, 16)
        weights = (0.2 * torch.einsum("hd,thd->ht", query[t], k)).softmax(-1)
        torch.testing.assert_close(output[0], torch.einsum("ht,thd->hd", weights, v))


# -------------------------------------------------------------------------------------- copies


def numbered_cache(layout: Layout) -> PagedKV:
    """Block `n` holds the byte and the word `n`."""
    cache = sentinel_cache(layout=layout)
    for block in range(BLOCKS):
        cache.codes[block], cache.words[block] = block, block
    return cache


def block_numbers(cache: PagedKV) -> list[int]:
    codes, words = as_hnd(cache)
    numbers = codes[:, 0, 0, 0].tolist()
    for block, number in enumerate(numbers):
        assert (codes[block] == number).all()
        assert (words[block] == number).all()
    return numbers


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copied_blocks(layout, dtype):
    cache = numbered_cache(layout)
    copy_blocks(cache, torch.tensor([[0, 3], [0, 5]], dtype=dtype))
    assert block_numbers(cache) == [0, 1, 2, 0, 4, 0]
    copy_blocks(cache, torch.zeros(0, 2, dtype=dtype))
    assert block_numbers(cache) == [0, 1, 2, 0, 4, 0]


def test_blocks_can_be_exchanged():
    cache = numbered_cache(Layout.HND)
    copy_blocks(cache, torch.tensor([[1, 2], [2, 1], [4, 4]]))
    assert block_numbers(cache) == [0, 2, 1, 3, 4, 5]


def test_unchecked_copies():
    cache = numbered_cache(Layout.HND)
    pairs = torch.tensor([[0, BLOCKS], [BLOCKS, 1], [-1, 2], [0, -1], [4, 3], [5, 3]])
    copy_blocks(cache, pairs, check=False)
    assert block_numbers(cache) == [0, 1, 2, 5, 4, 5]


def test_copies_through_a_view_leave_the_rest():
    codes = torch.full((BLOCKS, 2, HEADS, BLOCK_SIZE, 16), SENTINEL_BYTE, dtype=torch.uint8)
    words = torch.full((BLOCKS, 2, HEADS, BLOCK_SIZE), SENTINEL_WORD)
    cache = PagedKV(codes[:, 0], words[:, 0], INT4, Layout.HND)
    for block in range(BLOCKS):
        cache.codes[block], cache.words[block] = block, block
    copy_blocks(cache, torch.tensor([[2, 0]]))
    assert block_numbers(cache) == [2, 1, 2, 3, 4, 5]
    assert (codes[:, 1] == SENTINEL_BYTE).all()
    assert (words[:, 1] == SENTINEL_WORD).all()


# ----------------------------------------------------------------------------------- bad input


def arguments() -> dict:
    return {
        "key": torch.ones(4, HEADS, 32),
        "value": torch.ones(4, HEADS, 32),
        "key_cache": sentinel_cache(),
        "value_cache": sentinel_cache(INT8),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }


META = "meta"
NARROW = PagedKV(
    torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 3, dtype=torch.uint8),
    torch.zeros(BLOCKS, HEADS, BLOCK_SIZE),
    INT4,
    Layout.HND,
)
BAD = {
    "key no tensor": ({"key": [1.0]}, TypeError, "key must be a torch.Tensor, got list"),
    "key float64": (
        {"key": torch.ones(4, HEADS, 32, dtype=torch.float64)},
        TypeError,
        "key must be float32, float16 or bfloat16, got float64",
    ),
    "value float64": (
        {"value": torch.ones(4, HEADS, 32, dtype=torch.float64)},
        TypeError,
        "value must be float32, float16 or bfloat16, got float64",
    ),
    "key axes": (
        {"key": torch.ones(4, 32)},
        ValueError,
        "key must be [tokens, heads, head_dim] of shape [any, 3, 32], got [4, 32]",
    ),
    "key scalar": ({"key": torch.tensor(1.0)}, ValueError, "key must have at least one axis"),
    "key heads": ({"key": torch.ones(4, 2, 32)}, ValueError, "got [4, 2, 32]"),
    "key head_dim": ({"key": torch.ones(4, HEADS, 64)}, ValueError, "got [4, 3, 64]"),
    "value tokens": (
        {"value": torch.ones(5, HEADS, 32)},
        ValueError,
        "value must be [tokens, heads, head_dim] of shape [4, 3, 32], got [5, 3, 32]",
    ),
    "value head_dim": ({"value": torch.ones(4, HEADS, 16)}, ValueError, "got [4, 3, 16]"),
    "key device": (
        {"key": torch.ones(4, HEADS, 32, device=META)},
        ValueError,
        "key must be on the device of its cache (cpu), got meta",
    ),
    "cache blocks": (
        {"value_cache": sentinel_cache(blocks=5)},
        ValueError,
        "value_cache must be [blocks, heads, block_size] of shape [6, 3, 5], got [5, 3, 5]",
    ),
    "cache bytes": ({"key_cache": NARROW}, ValueError, "head_dim must be divisible by 16"),
    "cache words": (
        {"key_cache": sentinel_cache()._replace(words=torch.zeros(BLOCKS, HEADS, 4))},
        ValueError,
        "cache.codes must be [blocks, heads, block_size, bytes]",
    ),
    "slots dtype": (
        {"slot_mapping": torch.tensor([0.0])},
        TypeError,
        "slot_mapping must be int32 or int64, got float32",
    ),
    "slots axes": (
        {"slot_mapping": torch.tensor([[0]])},
        ValueError,
        "slot_mapping must be [tokens] of shape [any], got [1, 1]",
    ),
    "slots device": (
        {"slot_mapping": torch.zeros(1, dtype=torch.int64, device=META)},
        ValueError,
        "slot_mapping must be on the device of key (cpu), got meta",
    ),
    "slots too many": (
        {"slot_mapping": torch.arange(5)},
        ValueError,
        "slot_mapping must have at most one entry for each of the 4 tokens, got 5",
    ),
    "slot past the end": (
        {"slot_mapping": torch.tensor([1, SLOTS, SLOTS + 1])},
        ValueError,
        "slot_mapping must be below 30 (blocks x block_size), got 30 for token 1",
    ),
    "slot twice": (
        {"slot_mapping": torch.tensor([-1, 8, -1, 8])},
        ValueError,
        "slot_mapping must not name a slot twice, got 8 for token 1 and token 3",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(change, error, message):
    reshape_and_cache(**arguments())
    bad = arguments() | change
    before = bad["value_cache"].codes.clone()
    with pytest.raises(error, match=re.escape(message)):
        reshape_and_cache(**bad)
    assert torch.equal(bad["value_cache"].codes, before)


BAD_PAIRS = {
    "dtype": (torch.zeros(1, 2), TypeError, "pairs must be int32 or int64, got float32"),
    "axes": (
        torch.tensor([0, 1]),
        ValueError,
        "pairs must be [pairs, source and target] of shape [any, 2], got [2]",
    ),
    "device": (
        torch.zeros(1, 2, dtype=torch.int64, device=META),
        ValueError,
        "pairs must be on the device of cache (cpu), got meta",
    ),
    "source": (
        torch.tensor([[0, 1], [6, 2]]),
        ValueError,
        "pairs must name blocks from 0 to 5, got 6 in pair 1",
    ),
    "target": (
        torch.tensor([[0, -1]]),
        ValueError,
        "pairs must name blocks from 0 to 5, got -1 in pair 0",
    ),
    "target twice": (
        torch.tensor([[0, 1], [2, 1]]),
        ValueError,
        "pairs must not name a target twice, got 1 again in pair 1",
    ),
}


@pytest.mark.parametrize(("pairs", "error", "message"), BAD_PAIRS.values(), ids=BAD_PAIRS)
def test_bad_pairs(pairs, error, message):
    cache = numbered_cache(Layout.HND)
    with pytest.raises(error, match=re.escape(message)):
        copy_blocks(cache, pairs)
    assert block_numbers(cache) == list(range(BLOCKS))
