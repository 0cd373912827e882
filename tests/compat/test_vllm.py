"""vLLM's caches: their bytes worked out by hand, views and copies, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvq
from kvq import kernels, reference
from kvq.analysis.planted_rows import planted_rows
from kvq.compat import vllm
from kvq.modes import INT4_FIRST_IMPLEMENTATION, MODES
from kvq.tier import Layout, PagedKV, as_hnd, new_paged_kv
from tests import oracle
from tests.compare import assert_bit_exact

INT8, FP8, INT4 = vllm.FORMATS
#: Without a CUDA device the kernels run interpreted.
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The first implementation draws the signs of one block of the rotation and repeats them. Bit i of
# a mask is set where channel i has +1.
BLOCK_MASKS = {
    32: 0x6573590D,
    64: 0x808035B16573590D,
    128: 0x6B7F5438A6443D6C808035B16573590D,
    256: 0xFA2043A0320B9848ABAFC4414AA48B816B7F5438A6443D6C808035B16573590D,
}


def mask_of(signs: Tensor) -> int:
    return sum(1 << i for i, sign in enumerate(signs.tolist()) if sign > 0)


def signs_of(mask: int, head_dim: int) -> Tensor:
    return torch.tensor([1.0 if mask >> i & 1 else -1.0 for i in range(head_dim)])


@pytest.mark.parametrize("head_dim", BLOCK_MASKS)
def test_sign_masks(head_dim: int) -> None:
    assert (
        mask_of(reference.signs(head_dim, vllm.FORMATS[INT4].mode.rotation))
        == (BLOCK_MASKS[head_dim])
    )
    assert mask_of(reference.signs(head_dim, MODES[INT4].rotation)) == BLOCK_MASKS[head_dim]


def test_sign_masks_of_several_blocks() -> None:
    # 96 = 3 x 32: vLLM repeats the mask of 32; this package draws 96 signs.
    theirs = reference.signs(96, vllm.FORMATS[INT4].mode.rotation)
    assert mask_of(theirs) == 0x6573590D_6573590D_6573590D
    assert mask_of(reference.signs(96, MODES[INT4].rotation)) == 0xA6443D6C_808035B1_6573590D


# Rows of `int4`, planted in the rotated domain and worked by hand from the formulas:
#     scale = max((max - min) / 15, 1e-6), zp = clamp(half_away(-min / scale), 0, 15),
#     q = clamp(half_away(y * (1 / scale) + zp), 0, 15), byte i = q[2i] | q[2i + 1] << 4,
#     word = scale with its low 4 bits replaced by zp.
# y has 32 channels; a list is repeated until it fills them.
HALF_TIES = [-5, 10, -4.5, -3.5, 0.5, 1.5, -0.5, 9.5]
PLANTED = {
    # max - min = 15: scale 1 = 0x3f800000, zp 5. q = y + 5 = 0, 1, ..., 15.
    "zero inside": ([i - 5 for i in range(16)], "1032547698badcfe" * 2, 0x3F800005),
    # zp = 35 is clamped to 15; y + 15 is at most -5: every code is 0.
    "all below zero": ([i - 35 for i in range(16)], "00" * 16, 0x3F80000F),
    # zp = -20 is clamped to 0; y is at least 20: every code is 15.
    "all above zero": ([i + 20 for i in range(16)], "ff" * 16, 0x3F800000),
    # scale 1, zp 5; y + 5 = 0, 15, 0.5, 1.5, 5.5, 6.5, 4.5, 14.5: ties go away from zero.
    # q = 0, 15, 1, 2, 6, 7, 5, 15.
    "ties": (HALF_TIES, "f02176f5" * 4, 0x3F800005),
    # min -4.5, max 10.5: scale 1; the zero-point 4.5 is a tie and becomes 5.
    # y + 5 = 0.5, 15.5, 5, 6: q = 1, 16 clamped to 15, 5, 6.
    "zero-point tie": ([-4.5, 10.5, 0, 1], "f165" * 8, 0x3F800005),
    # max - min = 1: scale RN(1 / 15) = 0x3d888889. 0.5 / scale is just below 7.5, so zp = 7; a
    # scale cut to 0x3d888880 first would have given 8. 1 / scale = 14.999999, 0.5 * 14.999999 + 7
    # = 14.4999995, a tie between float32 numbers that rounds to 14.5, so q = 15; -7.4999995 + 7
    # gives -0.99999952 after the half is taken away, which is cut to 0. Stored: 0x3d888880 + 7.
    "the whole scale encodes": ([-0.5, 0.5], "f0" * 16, 0x3D888887),
    # max - min = 0: the floor, 1e-6 = 0x358637bd, whose last digit makes room for zp = 0.
    "zeros": ([0], "00" * 16, 0x358637B0),
}


def planted(values: list[float]) -> Tensor:
    """The row whose signed Hadamard transform is `values`: `s * (H y) / 32`, exact here."""
    y = torch.tensor(values, dtype=torch.float64).repeat(32 // len(values))
    parity = [[bin(i & j).count("1") % 2 for j in range(32)] for i in range(32)]
    hadamard = 1.0 - 2.0 * torch.tensor(parity, dtype=torch.float64)
    x = signs_of(BLOCK_MASKS[32], 32) * (hadamard @ y) / 32
    assert torch.equal(x, x.float().double())
    return x.float()


@pytest.mark.parametrize("name", PLANTED)
def test_int4_rows_by_hand(name: str) -> None:
    values, expected_codes, expected_word = PLANTED[name]
    x = planted(values)[None, None]  # one token, one head
    cache = vllm.new_kv_cache(1, 16, 1, 32, INT4)
    vllm.reshape_and_cache(x, -x, cache, torch.tensor([3]), INT4)
    content = bytes(cache[0, 0, 3].tolist())
    assert content[:16].hex() == expected_codes
    assert content[16:20] == expected_word.to_bytes(4, "little")
    assert not cache[0, 0, 4:].any()
    assert not cache[0, 0, :3].any()


def test_int4_rounds_the_rotated_row_to_the_input() -> None:
    # s * x = (256, 1, 0, ...): y is 257 in even channels, 255 in odd ones. 257 is a tie in
    # bfloat16 and becomes 256: the range is 1, not 2. scale = RN(1 / 15) = 0x3d888889; zp is
    # clamped to 0, every code to 15. In float32: RN(2 / 15) = 0x3e088889.
    signs = signs_of(BLOCK_MASKS[32], 32)
    x = torch.zeros(1, 1, 32)
    x[..., :2] = torch.tensor([256.0, 1.0]) * signs[:2]
    for dtype, word in ((torch.bfloat16, 0x3D888880), (torch.float32, 0x3E088880)):
        cache = vllm.new_kv_cache(1, 16, 1, 32, INT4)
        vllm.reshape_and_cache(x.to(dtype), x.to(dtype), cache, torch.tensor([0]), INT4)
        row = bytes(cache[0, 0, 0, :20].tolist())
        assert row == bytes([0xFF] * 16) + word.to_bytes(4, "little"), dtype


def test_int4_repeats_the_signs_of_a_block() -> None:
    # Three blocks of 32, each holding the planted row "zero inside": the codes repeat, too.
    values, codes, word = PLANTED["zero inside"]
    x = planted(values).repeat(3)[None, None]
    cache = vllm.new_kv_cache(1, 16, 1, 96, INT4)
    vllm.reshape_and_cache(x, x, cache, torch.tensor([0]), INT4)
    row = bytes(cache[0, 0, 0].tolist())
    assert row.hex() == (codes * 3 + word.to_bytes(4, "little").hex()) * 2


# 127 is the largest: scale 1. Halves go away from zero; without rounding -2.6 would be -2.
INT8_ROW = [-127, -2.6, -2.4, -1.6, -1.4, -0.6, -0.4, 127, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0, 126]
INT8_CODES = [-127, -3, -2, -2, -1, -1, 0, 127, 1, -1, 2, -2, 3, -3, 0, 126]
# 448 is the largest: scale 1. 1 = 0x38, 0.5 = 0x30, 448 = 0x7e; 17 lies between 16 = 0x58 and
# 18 = 0x59, and 2^-10 between 0 and 2^-9 = 0x01: ties go to the even one. Zero keeps its sign.
FP8_ROW = [448, 1, -1, 0.5, 17, 2**-9, 2**-10, -(2**-10), -0.0, 0, -448, 16, 18, -17, 2, 4]
FP8_CODES = "7e38b8305801008080" + "00fe5859d84048"


def test_int8_and_fp8_rows_by_hand() -> None:
    for name, row, codes in (
        (INT8, INT8_ROW, bytes(code & 0xFF for code in INT8_CODES)),
        (FP8, FP8_ROW, bytes.fromhex(FP8_CODES)),
    ):
        x = torch.tensor(row)[None, None]
        cache = vllm.new_kv_cache(2, 16, 1, 16, name)
        vllm.reshape_and_cache(x, 2 * x, cache, torch.tensor([17]), name)
        content = bytes(cache[1, 0, 1].view(torch.uint8).tolist())
        # Twice the row has twice the scale and the same codes: 1.0 and 2.0, little endian.
        assert content == codes + bytes.fromhex("0000803f") + codes + bytes.fromhex("00000040")


def test_where_the_bytes_lie() -> None:
    # Three blocks of 16 slots and two heads in NHD: [block][slot][head][K 16, 4, V 8, 4].
    cache = vllm.new_kv_cache(3, 16, 2, 16, INT8, head_dim_v=8)
    assert cache.shape == (3, 2, 16, 32)
    assert cache.dtype is torch.int8
    assert cache.stride() == (16 * 2 * 32, 32, 2 * 32, 1)
    memory = torch.as_strided(cache, (3 * 16 * 2 * 32,), (1,))
    key, value = torch.zeros(1, 2, 16), torch.zeros(1, 2, 8)
    key[0, 1, 5], value[0, 1, 7] = 127.0, -127.0
    vllm.reshape_and_cache(key, value, cache, torch.tensor([2 * 16 + 9]), INT8)
    start = ((2 * 16 + 9) * 2 + 1) * 32
    row = memory[start : start + 32]
    expected = torch.zeros(32, dtype=torch.int8)
    expected[5], expected[20 + 7] = 127, -127
    expected[16:20] = expected[28:32] = torch.tensor([0, 0, -128, 63])  # 1.0
    assert torch.equal(row, expected)


def filled(name: str, head_dim: int, head_dim_v: int, layout: Layout) -> Tensor:
    """A cache of 4 blocks of 16, 2 heads, with 50 tokens in it."""
    tokens, heads = 50, 2
    key, value = (
        planted_rows(0, tokens * heads, dim, seed=dim).view(tokens, heads, dim).to(torch.float16)
        for dim in (head_dim, head_dim_v)
    )
    cache = vllm.new_kv_cache(4, 16, heads, head_dim, name, head_dim_v=head_dim_v, layout=layout)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:tokens]
    vllm.reshape_and_cache(key, value, cache, slots, name)
    return cache


@pytest.mark.parametrize("layout", Layout, ids=str)
@pytest.mark.parametrize("name", vllm.FORMATS)
def test_views_copies_and_back(name: str, layout: Layout) -> None:
    cache = filled(name, 96, 32, layout)
    views = vllm.from_vllm(cache, name, 96, head_dim_v=32)
    copies = vllm.from_vllm(cache, name, 96, head_dim_v=32, copy=True)
    for view, copy in zip(views, copies, strict=True):
        assert view.mode is copy.mode is vllm.FORMATS[name].mode
        assert_bit_exact(view.codes, copy.codes)
        assert_bit_exact(view.words.contiguous(), copy.words)
        storage = cache.untyped_storage().data_ptr()
        assert view.codes.untyped_storage().data_ptr() == storage
        assert view.words.untyped_storage().data_ptr() == storage
        assert copy.codes.untyped_storage().data_ptr() != storage
    for sides in (views, copies):
        back = vllm.to_vllm(*sides, layout=layout)
        assert back.dtype is cache.dtype
        assert back.stride() == cache.stride()
        assert torch.equal(back.view(torch.uint8), cache.view(torch.uint8))


def test_a_write_through_the_views_is_a_write_to_the_cache() -> None:
    x = planted_rows(0, 40, 64).view(20, 2, 64)
    direct, viewed = (vllm.new_kv_cache(2, 16, 2, 64, INT4) for _ in range(2))
    vllm.reshape_and_cache(x, x.flip(0), direct, torch.arange(20) - 1, INT4)
    kvq.reshape_and_cache(x, x.flip(0), *vllm.from_vllm(viewed, INT4, 64), torch.arange(20) - 1)
    assert torch.equal(direct, viewed)
    # Slot -1 is padding: slot 0 holds the second token.
    codes, words = oracle.first_implementation_int4(x[1].numpy())
    assert_bit_exact(direct[0, :, 0, :32], torch.from_numpy(codes))
    word_bytes = torch.from_numpy(words.view("uint8").reshape(2, 4))
    assert_bit_exact(direct[0, :, 0, 32:36], word_bytes)


def padded(cache: Tensor, offset: int, gap: int) -> Tensor:
    """The same cache in a larger buffer: pages `gap` bytes apart, after `offset` bytes."""
    blocks, heads, block_size, content = cache.shape
    page = block_size * heads * content
    memory = torch.full(
        (offset + blocks * (page + gap),), 0x7F, dtype=torch.uint8, device=cache.device
    )
    strides = (page + gap, content, heads * content, 1)
    view = torch.as_strided(memory, cache.shape, strides, offset)
    return view.copy_(cache.view(torch.uint8))


def attention(tier: object, key: PagedKV, value: PagedKV, dtype: torch.dtype) -> Tensor:
    head_dim = key.mode.head_dim(as_hnd(key)[0].shape[3])
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(3, 4, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    table, lengths, starts = (
        torch.tensor(numbers, device=key.codes.device)
        for numbers in ([[2, 0, 3], [1, 3, 0]], [37, 20], [0, 1, 3])
    )
    scale = head_dim**-0.5
    return tier.paged_attention(
        query.to(key.codes.device), key, value, table, lengths, starts, scale=scale
    )


@pytest.mark.parametrize("tier", [reference, kernels], ids=["reference", "kernels"])
@pytest.mark.parametrize("name", vllm.FORMATS)
def test_attention_over_views_is_attention_over_copies(name: str, tier: object) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 2, 32, generator=generator)
    cache = vllm.new_kv_cache(4, 16, 2, 32, name)
    vllm.reshape_and_cache(x, x.flip(0), cache, torch.arange(64), name)
    if tier is kernels:
        cache = cache.to(KERNEL_DEVICE)
    expected = attention(tier, *vllm.from_vllm(cache, name, 32, copy=True), torch.float32)
    assert expected.isfinite().all()
    assert expected.abs().max() > 0.1
    for page in (cache, padded(cache, 12, 20)):
        found = attention(tier, *vllm.from_vllm(page, name, 32), torch.float32)
        assert_bit_exact(found, expected)


def test_attention_in_the_rotated_domain_with_the_factors_of_vllm() -> None:
    # vLLM rotates the query without normalizing, divides the softmax scale by d, averages rotated
    # values, and divides the inversely rotated output by d once more. The words are not folded.
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 2, 32, generator=generator)
    cache = vllm.new_kv_cache(4, 16, 2, 32, INT4)
    vllm.reshape_and_cache(x, x.flip(0), cache, torch.arange(64), INT4)
    key, value = vllm.from_vllm(cache, INT4, 32)
    assert not key.mode.folds_gain
    expected = attention(reference, key, value, torch.float64)

    def rotated(side: PagedKV) -> Tensor:  # the first 37 keys of sequence 0, KV head 0
        codes, words = (part[[2, 0, 3], 0].flatten(0, 1)[:37] for part in as_hnd(side))
        bits = words.contiguous().view(torch.int32)
        scale, zero_point = (bits & -16).view(torch.float32).double(), (bits & 15).double()
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).double()
        return (nibbles - zero_point[:, None]) * scale[:, None]

    parity = [[bin(i & j).count("1") % 2 for j in range(32)] for i in range(32)]
    hadamard = 1.0 - 2.0 * torch.tensor(parity, dtype=torch.float64)
    signs = signs_of(BLOCK_MASKS[32], 32).double()
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    q = (query[0, 0] * signs) @ hadamard
    weights = ((32**-0.5 / 32) * (rotated(key) @ q)).softmax(0)
    output = (hadamard @ (weights @ rotated(value))) * signs / 32
    torch.testing.assert_close(output, expected[0, 0], rtol=1e-12, atol=1e-14)


def test_int4_of_this_package_where_the_signs_agree() -> None:
    x = planted_rows(0, 32, 64).view(16, 2, 64)
    key, value = (new_paged_kv(1, 16, 2, 64, "int4") for _ in range(2))
    kvq.reshape_and_cache(x, x, key, value, torch.arange(16))
    cache = vllm.to_vllm(key, value)
    theirs, _ = vllm.from_vllm(cache, INT4, 64)
    ours = reference.dequantize(key.codes, key.words, key.mode, 64)
    read = reference.dequantize(theirs.codes, theirs.words, INT4_FIRST_IMPLEMENTATION, 64)
    assert_bit_exact(read, ours)


@pytest.mark.parametrize(
    ("key_mode", "value_mode", "head_dim", "message"),
    [
        ("lloyd4", "lloyd4", 64, "key_cache must be of a mode that vLLM can read at head size 64"),
        ("affine4", "int4", 64, "key_cache must be of a mode that vLLM can read"),
        ("int4", "int4", 96, "key_cache must be of a mode that vLLM can read at head size 96"),
        ("int8", "int4", 64, "value_cache must be stored as int8_per_token_head like its keys"),
        ("int8", "int2", 64, "value_cache must be of a mode that vLLM can read at head size 64"),
    ],
)
def test_what_vllm_cannot_read(
    key_mode: str, value_mode: str, head_dim: int, message: str
) -> None:
    key, value = (new_paged_kv(1, 16, 1, head_dim, mode) for mode in (key_mode, value_mode))
    with pytest.raises(ValueError, match=re.escape(message)):
        vllm.to_vllm(key, value)


def test_rotated_int8_is_not_the_int8_of_vllm() -> None:
    mode = replace(MODES[INT8], name="int8@rotated", rotation=MODES[INT4].rotation)
    cache = new_paged_kv(1, 16, 1, 64, mode)
    with pytest.raises(ValueError, match="got int8@rotated"):
        vllm.to_vllm(cache, cache)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("int2_per_token_head", "never merged"),
        ("fp8_e4m3fnuz", "another 8-bit float"),
        ("turboquant_4bit_nc", "TurboQuant rows hold norms"),
        ("auto", "got 'auto'"),
        (None, "got None"),
    ],
)
def test_formats_that_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of int8_per_token_head") as e:
        vllm.content_bytes(name, 64)
    assert reason in str(e.value)


def test_tensors_that_are_refused() -> None:
    cache = vllm.new_kv_cache(1, 16, 1, 64, FP8)
    with pytest.raises(TypeError, match="or float8_e4m3fn, got float8_e4m3fnuz"):
        vllm.from_vllm(cache.view(torch.float8_e4m3fnuz), FP8, 64)
    with pytest.raises(TypeError, match="got float32"):
        vllm.from_vllm(cache.float(), FP8, 64)
    with pytest.raises(ValueError, match=r"of shape \[any, any, any, 72\], got \[1, 1, 16, 136\]"):
        vllm.from_vllm(cache, INT4, 64)
    with pytest.raises(ValueError, match="divisible by 16 for a Hadamard rotation, got 72"):
        vllm.new_kv_cache(1, 16, 1, 72, INT4)
    with pytest.raises(ValueError, match="layout must be one of"):
        vllm.new_kv_cache(1, 16, 1, 64, INT8, layout="DNH")
    # What float8_e4m3fn sees are the same bytes.
    key, _ = vllm.from_vllm(cache.view(torch.float8_e4m3fn), FP8, 64)
    assert key.codes.dtype is torch.uint8


@pytest.mark.parametrize(("offset", "gap"), [(2, 0), (0, 3)])
def test_words_that_are_not_aligned_are_copied(offset: int, gap: int) -> None:
    cache = filled(INT4, 64, 64, Layout.NHD)
    odd = padded(cache, offset, gap)
    with pytest.raises(ValueError, match="kv_cache must have its words at multiples of 4 bytes"):
        vllm.from_vllm(odd, INT4, 64)
    for found, expected in zip(
        vllm.from_vllm(odd, INT4, 64, copy=True), vllm.from_vllm(cache, INT4, 64), strict=True
    ):
        assert_bit_exact(found.codes, expected.codes)
        assert_bit_exact(found.words, expected.words.contiguous())
