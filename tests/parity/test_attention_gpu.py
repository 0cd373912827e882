"""Packed attention on a GPU: long contexts, large caches, graphs, and every way to read a code."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kvq.modes import Mode
from kvq.modes import mode as find_mode
from kvq.tier import AttentionOutput, Layout, PagedKV, new_paged_kv
from tests.attention_budget import assert_within_budget
from tests.attention_cases import INT2, INT4, INT8, NO_BLOCK, Batch, poisoned, same
from tests.parity.test_attention import (
    EVERY_MODE,
    FEATURES,
    FRESH,
    covering,
    make_features,
)

kernels = pytest.importorskip("kvq.kernels")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BF16, FP16 = torch.bfloat16, torch.float16


def on_gpu(cache: PagedKV) -> PagedKV:
    return cache._replace(codes=cache.codes.cuda(), words=cache.words.cuda())


def large_batch(
    seq_lens: list[int],
    q_lens: list[int],
    modes: tuple[Mode, Mode],
    *,
    heads: tuple[int, int] = (8, 2),
    dims: tuple[int, int] = (128, 128),
    block_size: int = 16,
    layout: Layout = Layout.HND,
    dtype: torch.dtype = BF16,
    spread: float = 1.0,
    seed: int = 0,
    key_factor: float = 1.0,
) -> Batch:
    """Gaussian sequences in shuffled blocks, written by the kernels, which have the bits."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    needed = [-(-length // block_size) for length in seq_lens]
    blocks = torch.randperm(sum(needed) + 2, generator=generator, device="cuda")
    caches = [
        poisoned(new_paged_kv(len(blocks), block_size, heads[1], dim, mode, layout=layout,
                              device="cuda"))
        for dim, mode in zip(dims, modes, strict=True)
    ]  # fmt: skip
    table = torch.full((len(seq_lens), max(needed) + 2), NO_BLOCK, device="cuda")
    for sequence, (length, end) in enumerate(zip(seq_lens, accumulate(needed), strict=True)):
        own = blocks[end - needed[sequence] : end]
        table[sequence, : len(own)] = own
        token = torch.arange(length, device="cuda")
        slots = own[token // block_size] * block_size + token % block_size
        key = randn(length, heads[1], dims[0]) * key_factor
        kernels.reshape_and_cache(key, randn(length, heads[1], dims[1]), *caches, slots)
    query = randn(sum(q_lens), heads[0], dims[0]).to(dtype)
    batch = Batch(query, caches[0], caches[1], table, seq_lens, q_lens, [], [])
    batch.scale = spread / math.sqrt(dims[0])
    return batch


PAIRS = [
    (INT4, INT4),
    (INT2, INT2),
    (INT8, INT8),
    (find_mode("fp8"), find_mode("fp8")),
    (find_mode("lloyd4"), find_mode("lloyd3")),
    (INT8, find_mode("lloyd2_unbiased")),
    (find_mode("affine4"), find_mode("smax4")),
]


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 30.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("modes", PAIRS, ids=lambda pair: f"{pair[0]}+{pair[1]}")
def test_a_long_context(modes: tuple[Mode, Mode], dtype: torch.dtype, spread: float) -> None:
    batch = large_batch([131_072], [1], modes, heads=(4, 1), dtype=dtype, spread=spread)
    assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("modes", [(INT4, INT4), (INT8, INT8)], ids=str)
def test_a_long_context_of_values_that_agree(modes: tuple[Mode, Mode]) -> None:
    """Sums of 131,072 positive terms: an accumulator that loses bits shows."""
    batch = large_batch([131_072], [1], modes, heads=(4, 1), dtype=FP16, spread=0.0)
    words = batch.value_cache.words
    words.copy_(words.abs())
    batch.value_cache.codes.fill_(0x77)
    assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("mode", EVERY_MODE, ids=str)
def test_every_mode(mode: Mode) -> None:
    for dtype in (BF16, FP16):
        batch = large_batch([700, 333], [1, 1], (mode, mode), heads=(8, 2), dtype=dtype)
        assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (80, 80), (256, 256), (128, 64)], ids=str)
@pytest.mark.parametrize(
    "mode", [INT4, INT8, INT2, "fp8", "affine4", "lloyd4", "lloyd3", "lloyd1", FRESH[0]], ids=str
)
def test_every_kind_of_code_and_head_size(mode: Mode | str, dims: tuple[int, int]) -> None:
    mode = find_mode(mode)
    batch = large_batch([300, 129, 77], [1, 5, 40], (mode, mode), heads=(8, 2), dims=dims)
    assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("names", FEATURES, ids="+".join)
@pytest.mark.parametrize(
    "modes", [(INT4, INT2), (INT8, find_mode("lloyd4"))], ids=lambda p: f"{p[0]}+{p[1]}"
)
def test_every_feature(modes: tuple[Mode, Mode], names: tuple[str, ...]) -> None:
    batch = large_batch([700, 40, 333], [1, 4, 30], modes, heads=(8, 2), dims=(128, 64))
    assert_within_budget(batch, make_features(names, batch), tier=kernels)


@pytest.mark.parametrize("case", covering(24, 99), ids=str)
def test_a_covering_array(case) -> None:
    batch = case.batch()
    batch = replace(
        batch,
        query=batch.query.cuda(),
        key_cache=on_gpu(batch.key_cache),
        value_cache=on_gpu(batch.value_cache),
        block_table=batch.block_table.cuda(),
    )
    features = make_features(case.features, batch)
    assert_within_budget(batch, features, tier=kernels, index_dtype=case.index_dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16, 71])
def test_every_ratio_of_heads(group: int) -> None:
    batch = large_batch([500, 60], [1, 6], (INT4, INT4), heads=(group * 2, 2))
    assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 32, 48, 64, 128])
@pytest.mark.parametrize("layout", Layout)
def test_every_block_size(block_size: int, layout: Layout) -> None:
    batch = large_batch(
        [500, 60], [1, 6], (INT8, INT4), block_size=block_size, layout=layout, spread=8.0
    )
    assert_within_budget(batch, tier=kernels)


def test_offsets_past_two_to_the_31() -> None:
    """Codes of 5 GB a side: offsets pass 2^31 in bytes and in integers of two bytes."""
    batch = large_batch([900], [1], (INT8, INT8), heads=(32, 8))
    expected = batch.run(tier=kernels)
    used = batch.block_table[0, :57]
    blocks = 5 * 2**30 // batch.key_cache.codes[0].numel()
    far = torch.arange(57, device="cuda") * 7 + blocks - 400
    for name in ("key_cache", "value_cache"):
        cache = getattr(batch, name)
        codes = torch.zeros(blocks, *cache.codes.shape[1:], dtype=torch.uint8, device="cuda")
        words = torch.full((blocks, *cache.words.shape[1:]), math.nan, device="cuda")
        codes[far], words[far] = cache.codes[used], cache.words[used]
        assert far.min() * codes.stride(0) > 2**32
        setattr(batch, name, cache._replace(codes=codes, words=words))
    batch.block_table[0, :57] = far
    assert same(batch.run(tier=kernels), expected)


MANY = [1 + (i * 7919) % 5000 for i in range(64)]


@pytest.mark.parametrize("modes", PAIRS, ids=lambda pair: f"{pair[0]}+{pair[1]}")
def test_sixty_four_companions_do_not_change_a_bit(modes: tuple[Mode, Mode]) -> None:
    q_lens = [(1, 1, 1, 4, 20)[i % 5] for i in range(64)]
    batch = large_batch(MANY, q_lens, modes)
    together = batch.run(tier=kernels)
    assert same(batch.run(tier=kernels), together)
    starts = batch.starts
    batch.keys = batch.values = [batch.query] * 64  # not looked at
    for order in (*([i] for i in range(0, 64, 7)), list(range(63, -1, -1)), [5, 5, 9]):
        result = batch.only(*order).run(tier=kernels)
        expected = [
            torch.cat([part[starts[s] : starts[s + 1]] for s in order]) for part in together
        ]
        assert same(result, AttentionOutput(*expected))
    wider = torch.full((64, 500), NO_BLOCK, device="cuda")
    batch.block_table = torch.cat((batch.block_table, wider), dim=1)
    assert same(batch.run(tier=kernels), together)


@pytest.mark.parametrize("q_len", [1, 4])
def test_a_graph_whose_lengths_change(q_len: int) -> None:
    batch = large_batch([3000] * 4, [q_len] * 4, (INT4, INT2))
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int32, device="cuda")
    starts = torch.tensor(batch.starts, dtype=torch.int32, device="cuda")
    table = batch.block_table.int()

    def call() -> AttentionOutput:
        result = kernels.paged_attention(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            table,
            lengths,
            starts,
            scale=batch.scale,
            return_lse=True,
            max_query_len=q_len,
        )
        assert isinstance(result, AttentionOutput)
        return result

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for change in ([3000, 1, 17, 2999], [5, 600, 0, 64], [2048, 2049, 255, 256]):
        lengths.copy_(torch.tensor(change, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, call())
        assert_within_budget(replace(batch, seq_lens=change), tier=kernels)


def test_nothing_waits_for_the_device() -> None:
    batch = large_batch([700, 40, 333], [1, 4, 30], (INT4, INT2))
    features = make_features(FEATURES[-1], batch)
    index = [torch.tensor(x, device="cuda") for x in (batch.seq_lens, batch.starts)]

    def call() -> Tensor | AttentionOutput:
        return kernels.paged_attention(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            *index,
            scale=1.0,
            features=features,
            return_lse=True,
        )

    part = call()
    kernels.merge_attention([part, part])
    try:
        torch.cuda.set_sync_debug_mode("error")
        part = call()
        kernels.merge_attention([part, part])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_halves_merge_to_the_whole() -> None:
    batch = large_batch([1000], [1], (INT4, INT4))
    whole = batch.run(tier=kernels)
    parts = []
    for part in range(2):
        bias = torch.zeros(1, 1, 1000, device="cuda")
        bias[..., part::2] = -math.inf
        features = make_features(("key_bias",), batch)
        parts.append(batch.run(replace(features, logit_bias=bias), tier=kernels))
    merged = kernels.merge_attention(parts)
    torch.testing.assert_close(merged.log_sum_exp, whole.log_sum_exp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.output, whole.output, rtol=2**-6, atol=2**-9)
