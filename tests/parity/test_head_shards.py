"""Heads shared out among processes: each has the bits that one process has for them."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kvq import reference
from kvq.modes import MODES
from kvq.modes import mode as find_mode
from kvq.tier import AttentionFeatures, Layout, PagedKV, new_paged_kv
from tests.attention_cases import Batch, make_batch, same
from tests.compare import assert_bit_exact

QUERY_HEADS, KV_HEADS, LENGTHS = 12, 4, [9, 5]
GENERATOR = torch.Generator().manual_seed(2)
KEYS, VALUES = (
    [torch.randn(length, KV_HEADS, dim, generator=GENERATOR) for length in LENGTHS]
    for dim in (32, 16)
)


def written(batch: Batch, heads: slice, tier: ModuleType, like: tuple[PagedKV, PagedKV]) -> Batch:
    """The batch of some KV heads and the queries of their groups, written anew by this tier."""
    group = QUERY_HEADS // KV_HEADS
    count = len(range(KV_HEADS)[heads])
    caches, slots = [], []
    for cache, rows in zip(like, (KEYS, VALUES), strict=True):
        mine = new_paged_kv(
            len(cache.codes), 4, count, rows[0].shape[-1], cache.mode, layout=cache.layout
        )
        mine.codes.zero_()
        mine.words.zero_()
        caches.append(mine)
    for sequence, length in enumerate(batch.seq_lens):
        blocks = batch.block_table[sequence, torch.arange(length) // 4]
        slots.append(blocks * 4 + torch.arange(length) % 4)
    keys, values = (torch.cat(rows)[:, heads].contiguous() for rows in (KEYS, VALUES))
    tier.reshape_and_cache(keys, values, *caches, torch.cat(slots))
    queries = batch.query.unflatten(1, (KV_HEADS, group))[:, heads].flatten(1, 2).contiguous()
    return replace(batch, query=queries, key_cache=caches[0], value_cache=caches[1])


def check(tier: ModuleType, mode: str, value_mode: str, layout: Layout, parts: int) -> None:
    batch = make_batch(
        LENGTHS,
        [3, 1],
        heads=(QUERY_HEADS, KV_HEADS),
        dims=(32, 16),
        modes=(find_mode(mode), find_mode(value_mode)),
        layout=layout,
        dtype=torch.float32,
        keys=KEYS,
        values=VALUES,
    )
    like = (batch.key_cache, batch.value_cache)
    whole = written(batch, slice(None), tier, like)
    sinks = torch.linspace(-2, 2, QUERY_HEADS)
    expected = whole.run(AttentionFeatures(window=7, sink_logits=sinks), tier=tier)
    axis = 1 if layout is Layout.HND else 2
    for part in range(parts):
        size = KV_HEADS // parts
        heads = slice(part * size, (part + 1) * size)
        mine = written(batch, heads, tier, like)
        for cache, other in (
            (mine.key_cache, whole.key_cache),
            (mine.value_cache, whole.value_cache),
        ):
            assert_bit_exact(cache.codes, other.codes.narrow(axis, heads.start, size))
            assert_bit_exact(cache.words, other.words.narrow(axis, heads.start, size))
        queries = slice(part * QUERY_HEADS // parts, (part + 1) * QUERY_HEADS // parts)
        features = AttentionFeatures(window=7, sink_logits=sinks[queries].clone())
        found = mine.run(features, tier=tier)
        assert same(found, type(found)(*(x[:, queries] for x in expected)))


@pytest.mark.parametrize("mode", MODES)
def test_reference(mode: str) -> None:
    check(reference, mode, mode, Layout.HND, 4)


@pytest.mark.parametrize(
    ("mode", "value_mode", "layout", "parts"),
    [
        ("lloyd3", "int2", Layout.NHD, 4),
        ("int4", "smax4", Layout.HND, 2),
    ],
)
def test_kernels(mode: str, value_mode: str, layout: Layout, parts: int) -> None:
    kernels = pytest.importorskip("kvq.kernels")
    check(kernels, mode, value_mode, layout, parts)
    check(reference, mode, value_mode, layout, parts)
