"""Writes to a cache in any memory, against a few lines of plain Python: every byte of it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq.modes import Mode
from kvq.reference import quantize
from kvq.tier import Layout, PagedKV, word_dtype
from tests.compare import assert_bit_exact
from tests.fuzz.strategies import (
    INDEX_DTYPES,
    TIERS,
    View,
    dtypes,
    examples,
    head_dims,
    inputs,
    modes,
    rows,
    tier_of,
    views,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Side(NamedTuple):
    """One side of a cache, and the memory that its codes and its words lie in."""

    cache: PagedKV
    codes: View
    words: View
    head_dim: int

    def place(self, block: int, offset: int) -> tuple:
        """Where the rows of a slot are."""
        hnd = self.cache.layout is Layout.HND
        return (block, slice(None), offset) if hnd else (block, offset)

    def snapshot(self) -> Side:
        """The same in a copy of the memory."""
        copies = []
        for view in (self.codes, self.words):
            memory = view.memory.clone()
            tensor = memory.as_strided(
                view.tensor.size(), view.tensor.stride(), view.tensor.storage_offset()
            )
            copies.append(View(tensor, memory))
        cache = self.cache._replace(codes=copies[0].tensor, words=copies[1].tensor)
        return Side(cache, copies[0], copies[1], self.head_dim)


@st.composite
def sides(draw: st.DrawFn, blocks: int, block_size: int, heads: int) -> Side:
    """One side, filled with what no test writes."""
    mode: Mode = draw(modes)
    head_dim = draw(head_dims(mode, 64))
    layout = draw(st.sampled_from(Layout))
    shape = (heads, block_size) if layout is Layout.HND else (block_size, heads)
    codes = torch.full((blocks, *shape, mode.bytes_per_row(head_dim)), 0x5C, dtype=torch.uint8)
    words = torch.full((blocks, *shape), -7.0, dtype=word_dtype(mode))
    codes_view = draw(views(codes, dense_last=True))
    words_view = draw(views(words))
    cache = PagedKV(codes_view.tensor, words_view.tensor, mode, layout)
    return Side(cache, codes_view, words_view, head_dim)


@st.composite
def slot_mappings(draw: st.DrawFn, tokens: int, slots: int) -> Tensor:
    """Slots in any order: some twice, some that are padding, some that do not exist."""
    dtype = draw(st.sampled_from(INDEX_DTYPES))
    limits = torch.iinfo(dtype)
    wrong = [-1, -2, slots, slots + 1, limits.min, limits.max]
    if dtype is torch.int64:
        wrong += [2**32, 2**32 + 1, -(2**32) + 1]
    # From a few of them now and then, so that several tokens name one slot.
    slot = st.integers(0, draw(st.sampled_from((slots - 1, min(slots - 1, 1)))))
    entry = st.integers(0, 3).flatmap(lambda n: slot if n else st.sampled_from(wrong))
    entries = draw(st.lists(entry, min_size=draw(st.integers(0, tokens)), max_size=tokens))
    return draw(views(torch.tensor(entries, dtype=dtype))).tensor


def assert_same_memory(got: Side, want: Side, what: str) -> None:
    assert_bit_exact(got.codes.memory, want.codes.memory, f"{what} codes")
    assert_bit_exact(got.words.memory, want.words.memory, f"{what} words")


@st.composite
def writes(draw: st.DrawFn) -> tuple[Tensor, Tensor, Side, Side, Tensor, int, int]:
    """Arguments of `reshape_and_cache`, and the slots in a block and in all."""
    tokens, heads = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    blocks, block_size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    both = [draw(sides(blocks, block_size, heads)) for _ in range(2)]
    x = [draw(inputs(draw(rows(tokens, heads, side.head_dim, draw(dtypes))))) for side in both]
    slots = draw(slot_mappings(tokens, blocks * block_size))
    return (*x, *both, slots, block_size, blocks * block_size)


def written(x: Tensor, side: Side, slots: list[int], block_size: int, num_slots: int) -> Side:
    """What must be there afterwards: of the tokens that name a slot, the last."""
    after = side.snapshot()
    for token, slot in enumerate(slots):
        if 0 <= slot < num_slots:
            place = side.place(slot // block_size, slot % block_size)
            row = quantize(x[token], side.cache.mode)
            after.cache.codes[place], after.cache.words[place] = row
    return after


@pytest.mark.parametrize("name", TIERS)
@examples(40)
@given(data=st.data())
def test_a_write_changes_its_slots_and_no_other_byte(name: str, data: st.DataObject) -> None:
    tier = tier_of(name)
    key, value, keys, values, slots, *sizes = data.draw(writes())
    want = [written(x, side, slots.tolist(), *sizes) for x, side in ((key, keys), (value, values))]
    with pytest.MonkeyPatch.context() as patch:
        if name == "kernels" and data.draw(st.booleans()):
            # As with more tokens than a program looks through by itself.
            patch.setattr("kvq.kernels.cache.MOST_TOKENS_TO_SCAN", 0)
        tier.reshape_and_cache(key, value, keys.cache, values.cache, slots, check=False)
    assert_same_memory(keys, want[0], "key")
    assert_same_memory(values, want[1], "value")


@pytest.mark.parametrize("name", TIERS)
@examples(25)
@given(data=st.data())
def test_a_checked_write_is_done_or_refused_as_a_whole(name: str, data: st.DataObject) -> None:
    tier = tier_of(name)
    key, value, keys, values, slots, block_size, num_slots = data.draw(writes())
    named = [slot for slot in slots.tolist() if slot >= 0]
    wrong = len(set(named)) < len(named) or max(named, default=0) >= num_slots
    want = [side.snapshot() for side in (keys, values)]
    if wrong:
        with pytest.raises(
            ValueError, match=r"^slot_mapping must (be below|not name a slot twice)"
        ):
            tier.reshape_and_cache(key, value, keys.cache, values.cache, slots)
    else:
        tier.reshape_and_cache(key, value, keys.cache, values.cache, slots)
        want = [
            written(x, side, slots.tolist(), block_size, num_slots)
            for x, side in zip((key, value), want, strict=True)
        ]
    assert_same_memory(keys, want[0], "key")
    assert_same_memory(values, want[1], "value")


@pytest.mark.parametrize("name", TIERS)
@examples(40)
@given(data=st.data())
def test_copies_of_blocks_read_before_they_write(name: str, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, 5))
    side = data.draw(sides(blocks, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))))
    for number, tensor in enumerate((side.cache.codes, side.cache.words)):
        tensor.copy_((torch.arange(tensor.numel()).view(tensor.shape) * 7 + number) % 251)
    wrong = st.sampled_from((-1, blocks, 2**31 - 1))
    block = st.integers(0, 7).flatmap(lambda n: st.integers(0, blocks - 1) if n else wrong)
    pairs = data.draw(
        st.lists(st.tuples(block, block), min_size=data.draw(st.integers(0, 6)), max_size=6)
    )
    before, want = side.snapshot(), side.snapshot()
    for source, target in pairs:
        if 0 <= source < blocks and 0 <= target < blocks:
            want.cache.codes[target] = before.cache.codes[source]
            want.cache.words[target] = before.cache.words[source]
    dtype = data.draw(st.sampled_from(INDEX_DTYPES))
    indices = torch.tensor(pairs, dtype=dtype).reshape(len(pairs), 2)
    tier_of(name).copy_blocks(side.cache, data.draw(views(indices)).tensor, check=False)
    assert_same_memory(side, want, "copied")
