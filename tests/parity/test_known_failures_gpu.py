"""Failures that others had on a GPU alone: casts, grids, graphs, compilations, memory, devices.

`tests/test_known_failures.py` says where each was reported.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvq import reference
from kvq.analysis.planted_rows import random_rows
from kvq.modes import RANDOM_HADAMARD, Mode
from kvq.modes import mode as find_mode
from kvq.rounding import Rounding
from kvq.tier import AttentionFeatures, AttentionOutput, PagedKV, as_hnd, new_paged_kv
from tests.attention_budget import assert_within_budget
from tests.attention_cases import FP8, INT2, INT4, INT8, Batch, same
from tests.compare import assert_bit_exact
from tests.parity.launches import MOST_VARIANTS, count_compiled
from tests.parity.test_known_failures import KINDS

kernels = pytest.importorskip("kvq.kernels")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LLOYD3 = find_mode("lloyd3")


def randn(*shape: int, seed: int = 0, device: torch.device | str = "cuda") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def pair(mode: Mode, blocks: int, block_size: int, heads: int, head_dim: int) -> list[PagedKV]:
    return [new_paged_kv(blocks, block_size, heads, head_dim, mode, device="cuda") for _ in "kv"]


def rows_at(cache: PagedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[n, H, B]` and words `[n, H]` of slots."""
    codes, words = (side.transpose(1, 2).flatten(0, 1)[slots] for side in as_hnd(cache))
    return codes, words


# ------------------------------------------------------------------------------------ casts


def fp8_rows() -> Tensor:
    """2^20 numbers in [-448, 448], each row with a 448, so that its scale is 1."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.rand(2**16, 16, generator=generator, device="cuda") * 896 - 448
    x[:, :4] = torch.tensor([448.0, 400.199585, 272.156555, 136.002075], device="cuda")
    x[1::2] *= -1
    return x


def test_fp8_rounds_once() -> None:
    """Some hardware goes by way of float16, and is always one step too small then."""
    x = fp8_rows()
    got = kernels.quantize(x, FP8)
    assert (got.words == 1.0).all()
    read = kernels.dequantize(*got, FP8, 16)
    assert read[0, :4].tolist() == [448.0, 416.0, 288.0, 144.0]
    want = reference.quantize(x.cpu(), FP8).codes
    wrong = got.codes.cpu() != want
    smaller = read.cpu().abs()[wrong] < reference.rounding.decode_e4m3(want)[wrong].abs()
    assert not wrong.any(), f"{int(wrong.sum())} differ, {int(smaller.sum())} toward zero"
    assert torch.equal(read.cpu(), x.cpu().to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("rounding", [Rounding.HALF_AWAY, Rounding.TOWARD_ZERO], ids=str)
def test_fp8_rounds_once_otherwise(rounding: Rounding) -> None:
    x, mode = fp8_rows(), FP8.with_rounding(rounding)
    assert_bit_exact(kernels.quantize(x, mode).codes, reference.quantize(x.cpu(), mode).codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp8_saturates_at_every_largest_magnitude(dtype: torch.dtype) -> None:
    last = {torch.float16: 0x7BFF, torch.bfloat16: 0x7F7F}[dtype]
    largest = torch.arange(1, last + 1, dtype=torch.int16, device="cuda").view(dtype)
    x = torch.stack([largest, -largest, 0 * largest, largest / 2], -1)
    got, want = kernels.quantize(x, FP8), reference.quantize(x.cpu(), FP8)
    assert (got.codes & 0x7F).max() == 0x7E
    assert_bit_exact(got.codes, want.codes)
    assert_bit_exact(got.words, want.words)


# ------------------------------------------------------------------------------------ grids

COUNTS = (65_535, 65_536, 70_001)


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("mode", KINDS, ids=str)
def test_more_tokens_than_an_axis_of_the_grid_takes(mode: Mode, tokens: int) -> None:
    """Written, quantized and read; the last tokens are as the reference has them."""
    x = random_rows(0, tokens, 64, device="cuda").view(tokens, 1, 64)
    last = torch.arange(tokens - 40, tokens, device="cuda")
    want = reference.quantize(x[last].cpu(), mode)
    got = kernels.quantize(x, mode)
    assert_bit_exact(got.codes[last], want.codes)
    assert_bit_exact(got.words[last], want.words)
    read = kernels.dequantize(*got, mode, 64)
    assert_bit_exact(read[last], reference.dequantize(*want, mode, 64))
    caches = pair(mode, -(-tokens // 16), 16, 1, 64)
    kernels.reshape_and_cache(x, x, *caches, torch.arange(tokens, device="cuda"))
    for cache in caches:
        codes, words = rows_at(cache, last)
        assert_bit_exact(codes, want.codes)
        assert_bit_exact(words, want.words)
    packed = kernels.pack_codes(reference.unpack_codes(got.codes, mode.bits, 64), mode.bits)
    assert_bit_exact(packed, got.codes)


@pytest.mark.parametrize(("tokens", "heads"), [(70_001, 3), (700, 300), (3, 65_535)])
def test_more_rows_than_an_axis_of_the_grid_takes(tokens: int, heads: int) -> None:
    x = random_rows(0, tokens * heads, 64, device="cuda").view(tokens, heads, 64)
    caches = pair(INT4, -(-tokens // 16), 16, heads, 64)
    kernels.reshape_and_cache(x, x, *caches, torch.arange(tokens, device="cuda"))
    last = torch.tensor([tokens - 1], device="cuda")
    want = reference.quantize(x[-1:].cpu(), INT4)
    for cache in caches:
        codes, words = rows_at(cache, last)
        assert_bit_exact(codes, want.codes)
        assert_bit_exact(words, want.words)
    pairs = torch.tensor([[len(caches[0].words) - 1, 0]], device="cuda")
    kernels.copy_blocks(caches[0], pairs)
    assert_bit_exact(caches[0].codes[0], caches[0].codes[-1])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("decoding", [True, False], ids=["sequences", "one prompt"])
def test_more_queries_than_an_axis_of_the_grid_takes(count: int, decoding: bool) -> None:
    """As many sequences of a query each, and one sequence of as many queries in a window."""
    length = 20 if decoding else count
    blocks = -(-length // 16)
    caches = pair(INT8, blocks, 16, 1, 64)
    key, value = randn(length, 1, 64), randn(length, 1, 64, seed=1)
    kernels.reshape_and_cache(key, value, *caches, torch.arange(length, device="cuda"))
    query = randn(count, 1, 64, seed=2).half()
    table = torch.arange(blocks, device="cuda")[None]
    seq_lens, q_lens = ([length] * count, [1] * count) if decoding else ([count], [count])
    batch = Batch(query, *caches, table.expand(len(seq_lens), -1), seq_lens, q_lens, [], [])
    features = AttentionFeatures(window=16)
    found = batch.run(features, tier=kernels)
    # The last queries alone: a batch of one sequence, whose budget can be had.
    last = replace(
        batch,
        query=query[-1:],
        block_table=table,
        seq_lens=[length],
        q_lens=[1],
    )
    alone = assert_within_budget(last, features, tier=kernels)
    torch.testing.assert_close(found.output[-1:], alone.output, rtol=2e-3, atol=2e-3)
    assert found.output.isfinite().all()


# ----------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("modes", [(INT4, INT2), (FP8, LLOYD3)], ids=lambda p: f"{p[0]}+{p[1]}")
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_captured_write_and_read_sees_what_has_changed(
    modes: tuple[Mode, Mode], q_len: int
) -> None:
    """Keys, values, queries, slots, table and lengths change in place between replays."""
    sequences, heads, block_size, blocks = 3, 2, 16, 40
    caches = [new_paged_kv(blocks, block_size, heads, 64, mode, device="cuda") for mode in modes]
    other = [new_paged_kv(blocks, block_size, heads, 64, mode, device="cuda") for mode in modes]
    past = randn(blocks * block_size, heads, 64)
    for each in (caches, other):
        kernels.reshape_and_cache(past, past, *each, torch.arange(len(past), device="cuda"))
    tokens = sequences * q_len
    key, value = (torch.zeros(tokens, heads, 64, device="cuda").bfloat16() for _ in "kv")
    query = torch.zeros(tokens, 4, 64, device="cuda").bfloat16()
    slots = torch.full((tokens,), -1, device="cuda")
    table = torch.zeros(sequences, 8, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((sequences,), q_len, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, tokens + 1, q_len, dtype=torch.int32, device="cuda")

    def step(pages: list[PagedKV]) -> AttentionOutput:
        kernels.reshape_and_cache(key, value, *pages, slots)
        answer = kernels.paged_attention(
            query, *pages, table, seq_lens, starts, scale=0.125, return_lse=True,
            max_query_len=q_len,
        )  # fmt: skip
        assert isinstance(answer, AttentionOutput)
        return answer

    step(caches)  # Compiles.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = step(caches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([30, 0, 100])
    for turn in range(3):
        lengths += q_len
        order = torch.randperm(blocks, generator=generator)[: sequences * 8].view(sequences, 8)
        places = torch.cat([lengths[s] - q_len + torch.arange(q_len) for s in range(sequences)])
        own = torch.arange(sequences).repeat_interleave(q_len)
        table.copy_(order)
        seq_lens.copy_(lengths)
        slots.copy_(order[own, places // block_size] * block_size + places % block_size)
        for i, buffer in enumerate((key, value, query)):
            buffer.copy_(randn(*buffer.shape, seed=3 * turn + i))
        graph.replay()
        eager = step(other)
        torch.cuda.synchronize()
        assert same(captured, eager)
        for ours, theirs in zip(caches, other, strict=True):
            assert_bit_exact(ours.codes, theirs.codes)
            assert_bit_exact(ours.words, theirs.words)
        batch = Batch(query, *caches, table, lengths.tolist(), [q_len] * sequences, [], [])
        assert_within_budget(replace(batch, scale=0.125), tier=kernels)


# ----------------------------------------------------------------------------- compilations

LENGTHS = (1, 2, 15, 16, 17, 32, 1000)


@pytest.mark.parametrize("mode", [INT8, INT4, LLOYD3, find_mode("trellis2")], ids=str)
def test_few_variants_are_compiled(mode: Mode) -> None:
    """Whatever the numbers of tokens and the lengths."""
    before = count_compiled()
    for count in LENGTHS:
        caches = pair(mode, 63, 16, 1, 64)
        x = randn(count, 1, 64).bfloat16()
        kernels.reshape_and_cache(x, x, *caches, torch.arange(count, device="cuda"))
        kernels.dequantize(*kernels.quantize(x, mode), mode, 64)
        kernels.hadamard_transform(x, RANDOM_HADAMARD)
        table = torch.arange(63, device="cuda")[None]
        for q_len in {1, min(count, 8), count}:
            query = randn(q_len, 2, 64).bfloat16()
            Batch(query, *caches, table, [count], [q_len], [], []).run(tier=kernels)
    after = count_compiled()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown, "no kernel was counted"
    assert all(count <= MOST_VARIANTS[name] for name, count in grown.items()), grown
    # And none when all is run again.
    x = randn(333, 1, 64).bfloat16()
    kernels.quantize(x, mode)
    assert count_compiled() == after


# ------------------------------------------------------------------------ memory and devices


@pytest.mark.parametrize("mode", [INT8, INT4, LLOYD3, find_mode("smax4_search")], ids=str)
def test_a_write_takes_no_memory_beside_the_cache(mode: Mode) -> None:
    """32,768 tokens of 8 heads: 64 MiB a side in float16."""
    tokens = 32_768
    x = randn(tokens, 8, 128).half()
    caches = pair(mode, tokens // 16, 16, 8, 128)
    slots = torch.arange(tokens, device="cuda")
    kernels.reshape_and_cache(x, x, *caches, slots)
    kernels.quantize(x[:1], mode)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.reshape_and_cache(x, x, *caches, slots)
    torch.cuda.synchronize()
    # The claims: an integer of four bytes for each slot.
    assert torch.cuda.max_memory_allocated() - before <= 4 * tokens + 4096
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    got = kernels.quantize(x, mode)
    torch.cuda.synchronize()
    size = got.codes.nbytes + got.words.nbytes
    assert torch.cuda.max_memory_allocated() - before <= size + 4096
    assert torch.cuda.memory_allocated() - before <= size + 4096


@pytest.mark.parametrize("mode", [INT4, LLOYD3, find_mode("trellis2")], ids=str)
def test_tables_of_one_device_do_not_serve_another(mode: Mode) -> None:
    """The same calls on the CPU and on every GPU, and on the first again."""
    x = randn(40, 2, 64, device="cpu")
    want = reference.quantize(x, mode)
    values = reference.dequantize(*want, mode, 64)
    rotated = reference.hadamard_transform(x, RANDOM_HADAMARD)
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    calls: list[tuple[ModuleType, torch.device]] = [(reference, torch.device("cpu"))]
    calls += [(tier, device) for device in (*devices, devices[0]) for tier in (reference, kernels)]
    for tier, device in (*calls, calls[0]):
        here = x.to(device)
        got = tier.quantize(here, mode)
        read = tier.dequantize(*got, mode, 64)
        turned = tier.hadamard_transform(here, RANDOM_HADAMARD)
        for result in (*got, read, turned):
            assert result.device == device
        assert_bit_exact(got.codes, want.codes)
        assert_bit_exact(got.words, want.words)
        assert_bit_exact(read, values)
        assert_bit_exact(turned, rotated)


@pytest.mark.parametrize(
    ("head_dim", "heads", "tokens"), [(64, 1, 42), (128, 1, 42), (64, 4, 7), (64, 1, 1)]
)
@pytest.mark.parametrize("mode", KINDS, ids=str)
def test_small_head_counts_are_written_the_same_every_time(
    mode: Mode, head_dim: int, heads: int, tokens: int
) -> None:
    x = randn(tokens, heads, head_dim).bfloat16()
    want = reference.quantize(x.cpu(), mode)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:tokens].cuda()
    for _ in range(20):
        caches = pair(mode, 3, 16, heads, head_dim)
        kernels.reshape_and_cache(x, x, *caches, slots)
        for cache in caches:
            codes, words = rows_at(cache, slots)
            assert_bit_exact(codes, want.codes)
            assert_bit_exact(words, want.words)
            assert cache.words.count_nonzero() == tokens * heads
