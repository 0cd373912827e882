"""The fused write where numbers are large, small or wrong: slots, tokens, offsets, capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq import reference
from kvq.analysis.planted_rows import planted_rows, random_rows
from kvq.modes import Mode
from kvq.modes import mode as find_mode
from kvq.tier import Layout, PagedKV, as_hnd, new_paged_kv
from tests.compare import assert_bit_exact

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("kvq.kernels")
_last_writer = pytest.importorskip("kvq.kernels.cache")._last_writer
_claims = pytest.importorskip("kvq.kernels.cache")._claims

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INT4, INT8, LLOYD3 = (find_mode(name) for name in ("int4", "int8", "lloyd3"))
INDEX_DTYPES = (torch.int32, torch.int64)
#: On either side of the number of tokens from which claims are made in a table.
FEW, MANY = 40, 300


def filled_pair(
    num_blocks: int, block_size: int, head_dim: int = 64, heads: int = 1
) -> list[PagedKV]:
    """Keys and values of sentinel bytes."""
    pair = [
        new_paged_kv(num_blocks, block_size, heads, head_dim, mode, layout=layout, device=DEVICE)
        for mode, layout in ((INT4, Layout.HND), (INT8, Layout.NHD))
    ]
    for cache in pair:
        cache.codes.fill_(0xAB)
        cache.words.fill_(123.0)
    return pair


def assert_same_write(
    key: Tensor, value: Tensor, slot_mapping: Tensor, num_blocks: int, block_size: int
) -> list[PagedKV]:
    """Every byte of the cache, touched or not, as the reference leaves it; the kernels' caches."""
    heads, head_dim = key.shape[1:]
    got, want = (filled_pair(num_blocks, block_size, head_dim, heads) for _ in range(2))
    kernels.reshape_and_cache(key, value, *got, slot_mapping, check=False)
    reference.reshape_and_cache(key, value, *want, slot_mapping, check=False)
    for actual, expected in zip(got, want, strict=True):
        assert_bit_exact(actual.codes, expected.codes, "codes")
        assert_bit_exact(actual.words, expected.words, "words")
    return got


def rows(tokens: int, heads: int = 1, head_dim: int = 64, seed: int = 0) -> Tensor:
    return planted_rows(0, tokens * heads, head_dim, seed=seed, device=DEVICE).view(
        tokens, heads, head_dim
    )


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_more_than_65535_tokens(dtype: torch.dtype) -> None:
    tokens = 70_001
    x = random_rows(0, tokens, 32, device=DEVICE).view(tokens, 1, 32)
    order = torch.randperm(tokens + 15, generator=torch.Generator().manual_seed(1))[:tokens] - 7
    got = assert_same_write(x, x.flip(0), order.to(DEVICE, dtype), 4400, 16)
    assert (got[0].words != 123.0).sum() == (order >= 0).sum()


def test_more_than_65535_rows() -> None:
    x = random_rows(0, 70_001, 32, device=DEVICE)
    got, want = kernels.quantize(x, INT4), reference.quantize(x, INT4)
    assert_bit_exact(got.codes, want.codes)
    assert_bit_exact(got.words, want.words)
    assert_bit_exact(kernels.dequantize(*want, INT4, 32), reference.dequantize(*want, INT4, 32))


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_slots_that_are_no_slots_are_skipped(dtype: torch.dtype, tokens: int) -> None:
    slots = torch.arange(tokens, dtype=dtype)
    last = torch.iinfo(dtype)
    # 5 x 13 slots, or 25 x 13.
    blocks = 5 if tokens == FEW else 25
    wrong = [-1, -2, last.min, last.max, blocks * 13, blocks * 13 + 1, 2**31 - 1]
    if dtype is torch.int64:
        # Low 32 bits that would be slots.
        wrong += [2**32, 2**32 + 3, -(2**32) + 5]
    slots[2 : 2 + len(wrong)] = torch.tensor(wrong, dtype=dtype)
    got = assert_same_write(rows(tokens, 2), rows(tokens, 2, seed=1), slots.to(DEVICE), blocks, 13)
    for cache in got:
        assert (cache.words != 123.0).sum() == 2 * (tokens - len(wrong))


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_of_tokens_with_one_slot_the_last_is_written(dtype: torch.dtype, tokens: int) -> None:
    slots = torch.arange(tokens, dtype=dtype) * 5 % 7
    x, y = rows(tokens, 2), rows(tokens, 2, seed=1)
    got = assert_same_write(x, y, slots.to(DEVICE), 2, 4)
    for cache, inputs in zip(got, (x, y), strict=True):
        winners = reference.quantize(inputs[-7:][slots[-7:].argsort()], cache.mode)
        for side, expected in zip(as_hnd(cache), winners, strict=True):
            assert_bit_exact(side.transpose(1, 2).flatten(0, 1)[:7], expected)


@triton.jit
def _last_writers_kernel(
    slot_ptr,
    claims_ptr,
    out_ptr,
    num_tokens,
    SCAN: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
):
    token = tl.arange(0, R)
    live = token < num_tokens
    slot = tl.load(slot_ptr + token, mask=live, other=-1).to(tl.int64)
    last = _last_writer(slot, token, live, slot_ptr, claims_ptr, num_tokens, SCAN, WIDTH)
    tl.store(out_ptr + token, last.to(tl.int32), mask=live)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "claims"])
def test_scan_and_claims_find_the_last_writers(scan: bool) -> None:
    """The interpreter writes tokens in order, so the caches alone would not tell."""
    slots = torch.arange(FEW, device=DEVICE) * 5 % 7
    claims = _claims(slots, 7)
    found = torch.zeros(FEW, dtype=torch.int32, device=DEVICE)
    _last_writers_kernel[(1,)](slots, claims, found, FEW, SCAN=scan, WIDTH=16, R=64)
    assert found.tolist() == [0] * (FEW - 7) + [1] * 7


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_the_first_and_the_last_slot_and_nothing_beside_them(tokens: int) -> None:
    """Between guards of a block each."""
    slots = torch.full((tokens,), -1, device=DEVICE)
    slots[3:6] = torch.tensor([0, 11, 12], device=DEVICE)
    wide = filled_pair(5, 4)
    x = rows(tokens)
    pair = [cache._replace(codes=cache.codes[1:4], words=cache.words[1:4]) for cache in wide]
    kernels.reshape_and_cache(x, x, *pair, slots, check=False)
    for cache in wide:
        codes, words = as_hnd(cache)
        written = (words[:, 0] != 123.0).nonzero().tolist()
        assert written == [[1, 0], [3, 3]]
        assert (codes[[0, 4]] == 0xAB).all()
        want = reference.quantize(x[3:5, 0], cache.mode)
        assert_bit_exact(codes[[1, 3], 0, [0, 3]], want.codes)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_tokens_past_the_mapping_are_padding(tokens: int) -> None:
    x = rows(tokens + 9, 2)
    x[tokens:] = torch.nan
    got = assert_same_write(x, x, torch.arange(tokens, device=DEVICE), 25, 13)
    assert (got[0].words != 123.0).sum() == 2 * tokens


@pytest.mark.parametrize("heads", [1, 3])
def test_one_token(heads: int) -> None:
    x = random_rows(0, heads, 64, device=DEVICE).view(1, heads, 64)
    got = assert_same_write(x, -x, torch.tensor([5], device=DEVICE), 2, 4)
    assert (got[0].words != 123.0).sum() == heads


@pytest.mark.parametrize("mapped", [False, True])
def test_nothing_to_write(mapped: bool) -> None:
    x = rows(3)
    empty = x[:0] if mapped else x
    assert_same_write(empty, empty, torch.zeros(0, dtype=torch.int64, device=DEVICE), 2, 4)
    pairs = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    cache = filled_pair(2, 4)[0]
    kernels.copy_blocks(cache, pairs)
    assert (cache.codes == 0xAB).all()


def far_cache(
    codes: Tensor, words: Tensor, mode: Mode, blocks: int, block_size: int, stride: int
) -> PagedKV:
    """One head, blocks of codes `stride` bytes apart, blocks of words a quarter of that."""
    length = mode.bytes_per_row(64)
    return PagedKV(
        codes.as_strided(
            (blocks, 1, block_size, length), (stride, block_size * length, length, 1)
        ),
        words.as_strided((blocks, 1, block_size), (stride // 4, block_size, 1)),
        mode,
        Layout.HND,
    )


def assert_far_write(codes: Tensor, words: Tensor, mode: Mode, stride: int) -> None:
    """Writes, copies and reads in the last of blocks that are far apart."""
    blocks, block_size = 4, 3
    far = far_cache(codes, words, mode, blocks, block_size, stride)
    near = new_paged_kv(blocks, block_size, 1, 64, mode, device=DEVICE)
    x, mapping = rows(4), torch.tensor([9, 4, 11, 0], device=DEVICE)
    pairs = torch.tensor([[3, 2], [0, 1]], device=DEVICE)
    for cache in (far, near):
        for block in range(blocks):
            cache.codes[block], cache.words[block] = 7, 5.0
    kernels.reshape_and_cache(x, x, far, far, mapping, check=False)
    kernels.copy_blocks(far, pairs)
    reference.reshape_and_cache(x, x, near, near, mapping, check=False)
    reference.copy_blocks(near, pairs)
    assert_bit_exact(far.codes.contiguous(), near.codes)
    assert_bit_exact(far.words.contiguous(), near.words)
    head = 64
    assert_bit_exact(
        kernels.dequantize(far.codes, far.words, mode, head),
        reference.dequantize(near.codes, near.words, mode, head),
    )


#: Bytes between blocks where codes are stored as integers of 4 bytes, and as bytes. The last of
#: four blocks starts past 2^31 of them; in the first case its words do as well.
STRIDES = {"integers": 3 * 2**30 + 16, "bytes": 2**30 + 1 + 2**20}


def sparse(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a file without content: only the pages that are touched take room."""
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)


@pytest.mark.skipif(DEVICE == "cuda", reason="allocated for real on a GPU")
@pytest.mark.parametrize("mode", [INT4, LLOYD3], ids=str)
@pytest.mark.parametrize("unit", STRIDES)
def test_offsets_past_2_31_in_a_sparse_file(unit: str, mode: Mode, tmp_path: Path) -> None:
    stride = STRIDES[unit]
    codes = sparse(tmp_path / "codes", 3 * stride + 4096, torch.uint8)
    words = sparse(tmp_path / "words", 3 * (stride // 4) + 4096, torch.float32)
    assert_far_write(codes, words, mode, stride)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [INT4, LLOYD3], ids=str)
@pytest.mark.parametrize("unit", STRIDES)
def test_offsets_past_2_31_on_a_gpu(unit: str, mode: Mode) -> None:
    stride = STRIDES[unit]
    codes = torch.empty(3 * stride + 4096, dtype=torch.uint8, device="cuda")
    words = torch.empty(3 * (stride // 4) + 4096, device="cuda")
    assert_far_write(codes, words, mode, stride)


def assert_far_input(buffer: Tensor) -> None:
    """Keys whose tokens, and values whose heads, lie more than 2^31 numbers apart."""
    shape, step = (3, 2, 64), 2**30 + 64
    near = rows(3, 2).to(buffer.dtype)
    for strides in ((step, 64, 1), (64, 2 * step, 1)):
        far = buffer.as_strided(shape, strides)
        for token in range(3):
            far[token] = near[token]
        mapping = torch.tensor([2, 7, 5], device=DEVICE)
        got, want = filled_pair(2, 4, heads=2), filled_pair(2, 4, heads=2)
        kernels.reshape_and_cache(far, far, *got, mapping)
        reference.reshape_and_cache(near, near, *want, mapping)
        for actual, expected in zip(got, want, strict=True):
            assert_bit_exact(actual.codes, expected.codes)
            assert_bit_exact(actual.words, expected.words)


@pytest.mark.skipif(DEVICE == "cuda", reason="allocated for real on a GPU")
def test_inputs_past_2_31_in_a_sparse_file(tmp_path: Path) -> None:
    assert_far_input(sparse(tmp_path / "rows", 2**31 + 4096, torch.bfloat16))


@pytest.mark.gpu
def test_inputs_past_2_31_on_a_gpu() -> None:
    assert_far_input(torch.empty(2**31 + 4096, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
def test_a_full_cache_of_more_than_2_31_bytes() -> None:
    """No gaps: each block of 2^31 bytes and more, in every layout, is written at its end."""
    blocks, block_size, heads, head_dim = 2**31 // (16 * 8 * 128) + 2, 16, 8, 128
    small = new_paged_kv(1, block_size, heads, head_dim, INT8, device="cuda")
    x = rows(block_size, heads, head_dim)
    reference.reshape_and_cache(x, x, small, small, torch.arange(block_size, device="cuda"))
    for layout in Layout:
        cache = new_paged_kv(
            blocks, block_size, heads, head_dim, INT8, layout=layout, device="cuda"
        )
        slots = torch.arange(block_size, device="cuda") + (blocks - 1) * block_size
        kernels.reshape_and_cache(x, x, cache, cache, slots)
        codes, words = cache.codes[-1], cache.words[-1]
        if layout is Layout.NHD:
            codes, words = codes.transpose(0, 1), words.transpose(0, 1)
        assert_bit_exact(codes, small.codes[0])
        assert_bit_exact(words, small.words[0])
        assert not cache.codes[:-1].any()


@contextmanager
def no_synchronization() -> Iterator[None]:
    """A wait for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024])
@pytest.mark.parametrize("names", [("int4", "int4"), ("lloyd4", "fp8"), ("int2", "lloyd3")])
def test_no_call_waits_for_the_device(names: tuple[str, str], tokens: int) -> None:
    pair = [new_paged_kv(80, 16, 8, 128, find_mode(name), device="cuda") for name in names]
    x = random_rows(0, tokens * 8, 128, device="cuda").view(tokens, 8, 128).bfloat16()
    mapping = torch.arange(tokens, device="cuda")
    pairs = torch.tensor([[0, 70], [1, 71]], device="cuda")

    def calls() -> None:
        kernels.reshape_and_cache(x, x, *pair, mapping)
        kernels.copy_blocks(pair[0], pairs)
        stored = kernels.quantize(x, pair[1].mode)
        kernels.dequantize(*stored, pair[1].mode, 128)

    calls()
    torch.cuda.synchronize()
    with no_synchronization():
        calls()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024])
@pytest.mark.parametrize("names", [("int4", "int4"), ("lloyd4", "fp8"), ("int2", "lloyd3")])
def test_a_captured_write_writes_what_is_there_when_it_is_replayed(
    names: tuple[str, str], tokens: int
) -> None:
    got, want = (
        [new_paged_kv(80, 16, 8, 128, find_mode(name), device="cuda") for name in names]
        for _ in range(2)
    )
    x = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
    mapping = torch.full((tokens,), -1, device="cuda")
    kernels.reshape_and_cache(x, x, *got, mapping)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.reshape_and_cache(x, x, *got, mapping)
    for seed in (1, 2):
        x.copy_(random_rows(0, tokens * 8, 128, seed=seed, device="cuda").view_as(x))
        generator = torch.Generator().manual_seed(seed)
        mapping.copy_(torch.randperm(80 * 16, generator=generator)[:tokens] - 3)
        graph.replay()
        reference.reshape_and_cache(x, x, *want, mapping, check=False)
        for actual, expected in zip(got, want, strict=True):
            assert_bit_exact(actual.codes, expected.codes)
            assert_bit_exact(actual.words, expected.words)
