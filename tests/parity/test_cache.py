"""The fused write against the reference: every byte of the cache, touched or not."""

from __future__ import annotations

import pytest
import torch

from kvq import reference
from kvq.analysis.planted_rows import planted_rows
from kvq.modes import MODES
from kvq.modes import mode as find_mode
from kvq.tier import Layout, PagedKV, new_paged_kv
from tests.compare import assert_bit_exact

kernels = pytest.importorskip("kvq.kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HEADS, BLOCKS, BLOCK_SIZE, TOKENS = 3, 5, 13, 50
NAMES = tuple(MODES)


def sentinel_cache(mode: str, head_dim: int, layout: Layout) -> PagedKV:
    cache = new_paged_kv(
        BLOCKS, BLOCK_SIZE, HEADS, head_dim, find_mode(mode), layout=layout, device=DEVICE
    )
    cache.codes.fill_(0xAB)
    cache.words.fill_(123.0)
    return cache


def slots() -> torch.Tensor:
    """In no order; with padding, a slot past the end, and a slot that two tokens name."""
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))[:TOKENS] - 5
    order[3], order[7] = 10_000, order[9]
    return order.to(DEVICE)


def assert_same_write(
    key: torch.Tensor,
    value: torch.Tensor,
    caches: list[tuple[PagedKV, PagedKV]],
    slot_mapping: torch.Tensor,
) -> None:
    for tier, (key_cache, value_cache) in zip((kernels, reference), caches, strict=True):
        tier.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, check=False)
    for got, want in zip(*caches, strict=True):
        assert_bit_exact(got.codes, want.codes, "codes")
        assert_bit_exact(got.words, want.words, "words")


@pytest.mark.parametrize("i", range(len(NAMES)), ids=lambda i: NAMES[i])
def test_every_mode_as_keys_with_another_as_values(i: int) -> None:
    names = NAMES[i], NAMES[(7 * i + 3) % len(NAMES)]
    layout = (Layout.HND, Layout.NHD)[i % 2]
    dims = (32, 48) if i % 3 else (64, 64)
    key, value = (
        planted_rows(0, TOKENS * HEADS, dim, seed=i, device=DEVICE).view(TOKENS, HEADS, dim)
        for dim in dims
    )
    caches = [
        tuple(sentinel_cache(name, dim, layout) for name, dim in zip(names, dims, strict=True))
        for _ in range(2)
    ]
    assert_same_write(key.to(torch.float16), value.to(torch.bfloat16), caches, slots())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_mapping_shorter_than_the_tokens(dtype: torch.dtype) -> None:
    x = planted_rows(0, 8 * HEADS, 64, device=DEVICE).view(8, HEADS, 64)
    x[5:] = torch.nan
    caches = [
        (sentinel_cache("int4", 64, Layout.HND), sentinel_cache("int4", 64, Layout.HND))
        for _ in range(2)
    ]
    mapping = torch.tensor([3, -1, 17, -1, 0], dtype=dtype, device=DEVICE)
    assert_same_write(x, x, caches, mapping)
    assert (caches[0][0].words != 123.0).sum() == 3 * HEADS


def test_an_interleaved_view_of_one_buffer() -> None:
    x = planted_rows(0, TOKENS * HEADS, 64, device=DEVICE).view(TOKENS, HEADS, 64)
    caches = []
    for _ in range(2):
        codes = torch.full(
            (BLOCKS, 2, BLOCK_SIZE, HEADS, 34), 0xAB, dtype=torch.uint8, device=DEVICE
        )
        words = torch.full((BLOCKS, 2, BLOCK_SIZE, HEADS), 123.0, device=DEVICE)
        caches.append(
            tuple(
                PagedKV(codes[:, side, ..., 1:33], words[:, side], find_mode("int4"), Layout.NHD)
                for side in range(2)
            )
        )
    assert_same_write(x, x.flip(0), caches, slots())


def test_more_tokens_than_a_program_scans() -> None:
    tokens = 300
    x = planted_rows(0, tokens, 64, device=DEVICE).view(tokens, 1, 64)
    mode = find_mode("int8")
    caches = [
        tuple(new_paged_kv(20, 16, 1, 64, mode, device=DEVICE) for _ in range(2)) for _ in range(2)
    ]
    mapping = torch.arange(tokens, device=DEVICE) % 290
    assert_same_write(x, x, caches, mapping)


def test_no_tokens() -> None:
    cache = sentinel_cache("int4", 64, Layout.HND)
    empty = torch.zeros(0, HEADS, 64, device=DEVICE)
    mapping = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    kernels.reshape_and_cache(empty, empty, cache, cache, mapping)
    assert (cache.codes == 0xAB).all()


def test_copy_blocks_can_swap() -> None:
    pairs = torch.tensor([[0, 3], [3, 0], [1, 99], [-1, 2], [2, 4], [1, 4]], device=DEVICE)
    got, want = (sentinel_cache("int4", 64, Layout.NHD) for _ in range(2))
    for cache in (got, want):
        cache.codes.copy_(torch.arange(cache.codes.numel()).view_as(cache.codes) % 251)
        cache.words.copy_(torch.arange(cache.words.numel()).view_as(cache.words))
    kernels.copy_blocks(got, pairs, check=False)
    reference.copy_blocks(want, pairs, check=False)
    assert_bit_exact(got.codes, want.codes)
    assert_bit_exact(got.words, want.words)
