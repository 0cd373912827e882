"""Failures that others had when they read a packed cache: the kernels have none.

`tests/test_known_failures.py` says where each was reported. Most of the same is asked of the
reference in `tests/reference/test_attention.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvq import reference
from kvq.modes import MODES, RANDOM_HADAMARD, Grid, Mode
from kvq.modes import mode as find_mode
from kvq.reference import scaling
from kvq.scale_word import StoredWord
from kvq.tier import AttentionFeatures, AttentionOutput, Layout, PagedKV, as_hnd, new_paged_kv
from tests.attention_budget import assert_within_budget
from tests.attention_cases import FP8, INT4, INT8, NO_BLOCK, Batch, make_batch, poisoned, same
from tests.cases import DTYPES
from tests.parity.launches import MOST_VARIANTS, recorded_launches
from tests.parity.test_known_failures import KINDS, every_mode

kernels = pytest.importorskip("kvq.kernels")
launch = pytest.importorskip("kvq.kernels.launch")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EVERY_MODE = list(MODES.values())
every_kind = pytest.mark.parametrize("mode", KINDS, ids=str)
FOUR_KINDS = [INT8, INT4, find_mode("lloyd3"), find_mode("affine4")]
#: A dtype for each mode, in turn.
DTYPE_OF = {mode: DTYPES[i % 3] for i, mode in enumerate(EVERY_MODE)}


def here(batch: Batch) -> Batch:
    """The batch on the device that runs the kernels."""
    caches = [
        cache._replace(codes=cache.codes.to(DEVICE), words=cache.words.to(DEVICE))
        for cache in (batch.key_cache, batch.value_cache)
    ]
    return replace(
        batch,
        query=batch.query.to(DEVICE),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=batch.block_table.to(DEVICE),
    )


def rows_of(answer: AttentionOutput, rows: slice) -> AttentionOutput:
    return AttentionOutput(*(part[rows] for part in answer))


def counting_batch(seq_lens: list[int], q_lens: list[int], dtype: torch.dtype) -> Batch:
    """Keys of 0, so that weights are uniform, and value rows that hold their own index."""
    keys = [torch.zeros(n, 1, 16) for n in seq_lens]
    values = [torch.arange(n).view(n, 1, 1).expand(n, 1, 16).float() for n in seq_lens]
    batch = make_batch(
        seq_lens, q_lens, heads=(1, 1), dims=(16, 16), modes=(INT8, INT8), dtype=dtype,
        block_size=16, keys=keys, values=values,
    )  # fmt: skip
    return here(batch)


def assert_means(batch: Batch, windows: list[tuple[int, int]], **features: int) -> None:
    """Each query's answer is the mean of the indices that it sees, from and to."""
    found = batch.run(AttentionFeatures(**features), tier=kernels)
    means = torch.tensor([(first + last) / 2 for first, last in windows], device=DEVICE)
    # A step of int8 is exact at the largest value of a row, and every row is constant.
    slack = torch.finfo(batch.query.dtype).eps
    assert ((found.output[:, 0, 0] - means).abs() <= slack * means.clamp(min=1)).all()
    counts = torch.tensor([float(last - first + 1) for first, last in windows], device=DEVICE)
    torch.testing.assert_close(found.log_sum_exp[:, 0], counts.log(), rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------- what is seen


@pytest.mark.parametrize("window", range(1, 46))
def test_no_window_is_off_by_one(window: int) -> None:
    """The query itself is one of the window: 16 from position 39 are 24 to 39, mean 31.5."""
    for q_len in (1, 3) if window in (1, 16, 39, 40, 41) else (1 + 2 * (window % 2),):
        batch = counting_batch([40], [q_len], DTYPES[window % 3])
        seen = [(max(0, last - window + 1), last) for last in range(40 - q_len, 40)]
        assert_means(batch, seen, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_last_queries_stand_at_the_end_of_the_keys(dtype: torch.dtype) -> None:
    """Queries fewer than keys see the history, in a ragged batch of all kinds."""
    batch = counting_batch([12, 12, 12, 5], [5, 1, 12, 2], dtype)
    ends = [*range(7, 12), 11, *range(12), 3, 4]
    assert_means(batch, [(0, end) for end in ends])


@pytest.mark.parametrize("mode", FOUR_KINDS, ids=str)
def test_many_tokens_at_once_are_many_calls_of_one(mode: Mode) -> None:
    batch = here(
        make_batch([12], [5], heads=(2, 1), dims=(32, 32), modes=(mode, mode), dtype=torch.float32)
    )
    together = batch.run(tier=kernels)
    # One call for the five: a sequence for each, over the same pages.
    ones = replace(
        batch,
        block_table=batch.block_table.expand(5, -1),
        seq_lens=[8, 9, 10, 11, 12],
        q_lens=[1] * 5,
    )
    for one, all_of_them in zip(ones.run(tier=kernels), together, strict=True):
        torch.testing.assert_close(one, all_of_them, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", [FP8, *FOUR_KINDS, find_mode("trellis2")], ids=str)
def test_a_sequence_of_length_zero_is_zero(mode: Mode) -> None:
    dtype, sinks = DTYPE_OF[mode], mode.rotation is None
    batch = here(
        make_batch(
            [7, 0, 3], [1, 1, 1], heads=(2, 1), dims=(32, 32), modes=(mode, mode), dtype=dtype
        )
    )
    features = AttentionFeatures(sink_logits=torch.zeros(2, device=DEVICE) if sinks else None)
    result = batch.run(features, tier=kernels)
    assert not result.output[1].any()
    assert (result.log_sum_exp[1] == -math.inf).all()
    assert result.output.isfinite().all()
    # The others alone, in one call, without the empty one between them.
    others = batch.only(0, 2).run(features, tier=kernels)
    for found, right in zip(result, others, strict=True):
        assert torch.equal(found[[0, 2]], right)


@pytest.mark.parametrize("mode", [INT4, FP8], ids=str)
def test_a_sequence_of_length_zero_among_splits(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LEAST_SPLIT", 16)
    batch = here(
        make_batch(
            [70, 0, 33], [1, 1, 1], heads=(2, 1), dims=(32, 32), modes=(mode, mode),
            dtype=torch.float16,
        )
    )  # fmt: skip
    result = batch.run(tier=kernels)
    assert not result.output[1].any()
    others = batch.only(0, 2).run(tier=kernels)
    assert torch.equal(result.output[[0, 2]], others.output)


# ----------------------------------------------------------------- what the numbers are


def stored_scale(words: Tensor, mode: Mode) -> Tensor:
    if mode.word is StoredWord.FLOAT32_ZERO_POINT:
        return scaling.decode_zero_point(words)[0]
    return scaling.decode_float16_pair(words)[0] if mode.grid is Grid.UNSIGNED else words


@every_mode
def test_a_row_of_zeros_is_no_division_by_zero(tier: ModuleType, mode: Mode) -> None:
    """Zero rows beside one that is not, written and read: no scale of 0 / 0, and no NaN."""
    tokens = 3 if mode.trellis else 5
    dtype = DTYPE_OF[mode]
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(tokens, 1, 64, dtype=dtype)
    x[2] = torch.randn(1, 64, generator=generator).to(dtype)
    x = x.to(DEVICE)
    caches = [poisoned(new_paged_kv(2, 3, 1, 64, mode, device=DEVICE)) for _ in "kv"]
    tier.reshape_and_cache(x, x, *caches, torch.arange(tokens, device=DEVICE))
    codes, words = (side.transpose(1, 2).flatten(0, 1)[:tokens] for side in as_hnd(caches[0]))
    assert words.isfinite().all()
    if mode.rounding is not None:  # Where codes are divided by the scale it has a floor.
        assert (stored_scale(words, mode) > 0).all()
    alone = reference.quantize(x[2], mode)
    assert torch.equal(codes[2], alone.codes)
    assert torch.equal(words[2], alone.words)
    read = tier.dequantize(codes, words, mode, 64)
    zeros = [i for i in range(tokens) if i != 2]
    assert torch.equal(read[zeros].view(torch.int32), torch.zeros_like(read[zeros]).int())
    query = torch.randn(1, 2, 64, generator=generator).to(DEVICE, dtype)
    table = torch.tensor([[0, 1]], device=DEVICE)
    batch = Batch(query, caches[0], caches[1], table, [tokens], [1], [], [])
    found = batch.run(tier=tier)
    assert found.output.isfinite().all()
    if tier is kernels:  # The reference has no budget.
        assert_within_budget(batch, tier=kernels)
    # Every zero key has a logit of 0, and a value of 0.
    logit = 0.3 * query[0].double() @ read[2, 0].double()
    weight = logit.exp() / (logit.exp() + tokens - 1)
    like = weight[:, None] * read[2, 0].double()
    torch.testing.assert_close(found.output[0].double(), like, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "32 bits"])
@every_kind
def test_no_scale_is_dropped_or_applied_twice(mode: Mode, wide: bool) -> None:
    """Powers of two pass through exactly: values times 4, and keys times 2 by half a query."""
    dtype = torch.float32 if wide else DTYPES[1 + KINDS.index(mode) % 2]
    torch.manual_seed(0)
    keys, values = torch.randn(6, 1, 32), torch.randn(6, 1, 32)
    batch = make_batch(
        [6, 6], [1, 1], heads=(2, 1), dims=(32, 32), modes=(mode, mode), dtype=dtype,
        keys=[keys, keys * 2], values=[values, values * 4],
    )  # fmt: skip
    batch.query[1] = batch.query[0] / 2
    output, lse = here(batch).run(tier=kernels)
    assert torch.equal(output[1], output[0] * 4)
    assert torch.equal(lse[1], lse[0])
    assert output[0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [INT8, INT4], ids=str)
def test_a_scale_that_is_given_is_the_one_that_counts(mode: Mode, dtype: torch.dtype) -> None:
    batch = here(
        make_batch([6], [1], heads=(2, 1), dims=(32, 32), modes=(mode, mode), dtype=dtype)
    )
    halved = replace(batch, query=batch.query / 2, scale=batch.scale * 2)
    assert same(halved.run(tier=kernels), batch.run(tier=kernels))


@every_kind
def test_bfloat16_is_multiplied_as_numbers(mode: Mode) -> None:
    """The interpreter once multiplied the bits of bfloat16: errors of 1e10."""
    batch = make_batch(
        [20], [1], heads=(2, 1), dims=(64, 64), modes=(mode, mode), dtype=torch.bfloat16
    )
    batch = here(batch)
    found = assert_within_budget(batch, tier=kernels)
    wide = replace(batch, query=batch.query.float()).run(tier=reference)
    torch.testing.assert_close(found.output.float(), wide.output, rtol=2e-2, atol=2e-2)


# -------------------------------------------------------------------------- heads and batches


@pytest.mark.parametrize(
    "heads", [(6, 1), (24, 4), (28, 4), (5, 1), (40, 2), (7, 7)], ids=lambda h: f"{h[0]}/{h[1]}"
)
def test_any_group_of_query_heads(heads: tuple[int, int]) -> None:
    """Two sequences that share KV head 0 alone: its group has the same bits in both."""
    modes = (INT8, INT4) if heads[0] % 2 else (INT4, INT8)
    torch.manual_seed(0)
    sides = []
    for _ in range(2):
        first = torch.randn(6, heads[1], 64)
        second = torch.randn(6, heads[1], 64)
        second[:, 0] = first[:, 0]
        sides.append([first, second])
    batch = make_batch(
        [6, 6], [1, 1], heads=heads, dims=(64, 64), modes=modes, dtype=torch.float32,
        keys=sides[0], values=sides[1],
    )  # fmt: skip
    batch.query[1] = batch.query[0]
    found = assert_within_budget(here(batch), tier=kernels)
    group = heads[0] // heads[1]
    assert torch.equal(found.output[0, :group], found.output[1, :group])
    for head in range(group, heads[0]):
        assert not torch.equal(found.output[0, head], found.output[1, head])


PAIRS = [
    ("int8", "affine4"),
    ("smax3", "trellis2"),
    ("lloyd4_w16", "lloyd1"),
    ("trellis3_unbiased_w16", "smax2_search_w16"),
]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_companions_and_splits_decide_nothing(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind what `test_attention.py` asks of two pairs; and 1, 2, 4 and 8 splits agree."""
    modes = find_mode(names[0]), find_mode(names[1])
    dtype = DTYPES[PAIRS.index(names) % 3]
    monkeypatch.setattr(launch, "LEAST_SPLIT", 16)
    batch = here(
        make_batch([37, 5, 20], [1, 2, 1], heads=(2, 1), dims=(32, 32), modes=modes, dtype=dtype)
    )
    together = batch.run(tier=kernels)
    starts = batch.starts
    for order in ([0], [2, 0, 1]):
        result = batch.only(*order).run(tier=kernels)
        expected = [
            torch.cat([part[starts[s] : starts[s + 1]] for s in order]) for part in together
        ]
        assert same(result, AttentionOutput(*expected))
    alone = batch.only(0)
    for size in (8, 32, 64) if names == PAIRS[0] else ():
        monkeypatch.setattr(launch, "LEAST_SPLIT", size)
        found = assert_within_budget(alone, tier=kernels)
        close = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
        right = rows_of(together, slice(0, 1)).output
        torch.testing.assert_close(found.output, right, rtol=close, atol=close)


# --------------------------------------------------------------------------- pages and tables


def test_a_table_that_is_too_narrow_is_refused() -> None:
    batch = here(
        make_batch(
            [32, 33], [1, 1], heads=(2, 1), dims=(32, 32), block_size=16, spare_entries=0,
            dtype=torch.float16,
        )
    )  # fmt: skip
    batch.block_table = batch.block_table[:, :2]
    message = "must have 3 entries for the 33 tokens of sequence 1"
    with pytest.raises(ValueError, match=message):
        batch.run(tier=kernels, check=True)


@pytest.mark.parametrize("mode", FOUR_KINDS, ids=str)
def test_a_page_past_the_end_is_not_read(mode: Mode) -> None:
    """32 tokens in blocks of 16 are two pages, whatever the third entry names."""
    batch = make_batch(
        [32, 20], [1, 1], heads=(2, 1), dims=(32, 32), modes=(mode, mode), block_size=16,
        spare_entries=0, dtype=DTYPE_OF[mode],
    )  # fmt: skip
    (nobodys, *_) = set(range(6)) - set(batch.block_table.flatten().tolist())
    for cache in (batch.key_cache, batch.value_cache):
        cache.codes[nobodys], cache.words[nobodys] = 0x77, 1e4
        # And the rest of the last page of the shorter one.
        last = int(batch.block_table[1, 1])
        cache.codes[last, :, 4:], cache.words[last, :, 4:] = 0x77, 1e4
    narrow = here(batch).run(tier=kernels)
    wide = torch.cat((batch.block_table, torch.tensor([[nobodys], [NO_BLOCK]])), dim=1)
    assert same(here(replace(batch, block_table=wide)).run(tier=kernels), narrow)


@pytest.mark.parametrize("mode", FOUR_KINDS, ids=str)
def test_an_interleaved_cache_is_written_and_read(mode: Mode) -> None:
    """Keys and values as views of one buffer, whose stride of blocks is that of both."""
    layout = tuple(Layout)[FOUR_KINDS.index(mode) % 2]
    heads, block_size, head_dim, tokens = 2, 4, 32, 11
    inner = (heads, block_size) if layout is Layout.HND else (block_size, heads)
    codes = torch.zeros(4, 2, *inner, mode.bytes_per_row(head_dim), dtype=torch.uint8)
    words = torch.full((4, 2, *inner), math.nan)
    codes, words = codes.to(DEVICE), words.to(DEVICE)
    views = [PagedKV(codes[:, side], words[:, side], mode, layout) for side in range(2)]
    near = [
        poisoned(new_paged_kv(4, block_size, heads, head_dim, mode, layout=layout, device=DEVICE))
        for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(0)
    key, value = (
        torch.randn(tokens, heads, head_dim, generator=generator).to(DEVICE) for _ in range(2)
    )
    blocks = torch.tensor([2, 0, 3], device=DEVICE)
    token = torch.arange(tokens, device=DEVICE)
    slots = blocks[token // block_size] * block_size + token % block_size
    query = torch.randn(1, 4, head_dim, generator=generator).to(DEVICE, torch.float16)
    answers = []
    for caches in (views, near):
        kernels.reshape_and_cache(key, value, *caches, slots)
        batch = Batch(query, caches[0], caches[1], blocks[None], [tokens], [1], [], [])
        answers.append(batch.run(tier=kernels))
    assert same(*answers)


#: Bytes between blocks: the last of four starts past 2^31 of them, and past 2^31 integers of two.
STRIDES = {"bytes": 2**30 + 2**20, "integers of two bytes": 3 * 2**29 + 2**20}


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/parity/test_attention_gpu.py has it there")
@pytest.mark.parametrize("mode", [INT8, find_mode("lloyd3")], ids=str)
@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
def test_offsets_past_two_to_the_31(stride: int, mode: Mode, tmp_path: Path) -> None:
    """In a file without content. An offset that wraps stays within it, and finds zeros.

    So a fault is a wrong answer here, and no end of the process.
    """
    unit, index = (1, torch.int32) if stride == STRIDES["bytes"] else (2, torch.int64)
    base, size = 2**31 * unit, 2**31 * unit + 3 * stride + 2**16
    shape = (4, 1, 16, mode.bytes_per_row(64))
    near = poisoned(new_paged_kv(4, 16, 1, 64, mode))
    codes = torch.from_file(str(tmp_path / "codes"), shared=True, size=size, dtype=torch.uint8)
    words = torch.from_file(
        str(tmp_path / "words"), shared=True, size=size // 4, dtype=torch.float32
    )
    far = PagedKV(
        codes[base:].as_strided(shape, (stride, 16 * shape[3], shape[3], 1)),
        words[base // 4 :].as_strided(shape[:3], (stride // 4, 16, 1)),
        mode,
        Layout.HND,
    )
    assert 3 * stride // unit > 2**31
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 1, 64, generator=generator)
    slots = torch.cat((torch.arange(48, 64), torch.arange(4))).to(index)
    query = torch.randn(1, 2, 64, generator=generator).half()
    table = torch.tensor([[3, 0]], dtype=index)
    answers = []
    for tier, cache in ((kernels, near), (kernels, far), (reference, far)):
        tier.reshape_and_cache(x, x, cache, cache, slots)
        batch = Batch(query, cache, cache, table, [20], [1], [], [])
        answers.append(batch.run(tier=tier, index_dtype=index))
    assert same(answers[0], answers[1])
    torch.testing.assert_close(answers[2].output, answers[0].output, rtol=2e-3, atol=2e-3)


# ------------------------------------------------------------------------------- variants

#: Numbers of tokens and lengths: 1, divisible by 16, and neither.
COUNTS = (1, 2, 15, 16, 17, 32, 333, 1000)


@pytest.mark.skipif(DEVICE == "cuda", reason="the compiled ones are counted there")
@pytest.mark.parametrize("mode", EVERY_MODE, ids=str)
def test_few_variants_would_be_compiled(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the numbers of tokens and the lengths."""
    with recorded_launches(monkeypatch) as found:
        for count in COUNTS:
            caches = [new_paged_kv(63, 16, 1, 64, mode) for _ in "kv"]
            x = torch.zeros(count, 1, 64, dtype=torch.bfloat16)
            kernels.reshape_and_cache(x, x, *caches, torch.arange(count), check=False)
            kernels.dequantize(*kernels.quantize(x, mode), mode, 64)
            kernels.hadamard_transform(x, RANDOM_HADAMARD)
            table = torch.arange(63)[None]
            for q_len in {1, min(count, 8), count}:
                query = torch.zeros(q_len, 2, 64, dtype=torch.bfloat16)
                batch = Batch(query, *caches, table, [count], [q_len], [], [])
                batch.run(tier=kernels, check=False)
    expected = {"_reshape_and_cache_kernel", "_quantize_kernel", "_dequantize_kernel"}
    expected |= {"_hadamard_kernel", "attend_kernel", "combine_kernel"}
    assert {each.kernel for each in found} >= expected
    variants = Counter(name for name, _ in {each[:2] for each in found})
    assert {name: count for name, count in variants.items() if count > MOST_VARIANTS[name]} == {}


@pytest.mark.parametrize("mode", KINDS, ids=str)
@pytest.mark.skipif(DEVICE == "cuda", reason="graphs are replayed there")
def test_no_launch_depends_on_a_number_that_is_on_the_device(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CUDA graph would bake in: lengths, slots and tables change, and no launch does."""
    caches = [new_paged_kv(9, 16, 2, 32, mode) for _ in "kv"]
    x, query = torch.zeros(4, 2, 32), torch.zeros(4, 4, 32, dtype=torch.float16)
    with recorded_launches(monkeypatch) as found:
        for slots, lengths, q_lens, block in (
            ([-1, -1, -1, -1], [2, 2], [2, 2], 0),
            ([3, 8, 200, 1], [1000, 0], [4, 0], 8),
            ([7, 7, 7, 7], [17, 400], [1, 3], 3),
        ):
            kernels.reshape_and_cache(x, x, *caches, torch.tensor(slots), check=False)
            table = torch.full((2, 64), block)
            Batch(query, *caches, table, lengths, q_lens, [], []).run(tier=kernels, check=False)
            kernels.copy_blocks(caches[0], torch.tensor([[block, 1]]), check=False)
    each = len(found) // 3
    assert each >= 5
    assert found[:each] == found[each : 2 * each] == found[2 * each :]


@pytest.mark.parametrize("mode", KINDS, ids=str)
@pytest.mark.skipif(DEVICE == "cuda", reason="such numbers of tokens are launched there")
def test_tokens_are_on_the_first_axis_of_every_grid(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other axes end at 65,535: nothing on them grows with tokens, sequences or blocks."""
    grids = []
    for count in (270, 810):
        x, query = torch.zeros(count, 2, 32), torch.zeros(count, 4, 32, dtype=torch.float16)
        caches = [new_paged_kv(count // 16 + 1, 16, 2, 32, mode) for _ in "kv"]
        with recorded_launches(monkeypatch) as found:
            kernels.reshape_and_cache(x, x, *caches, torch.arange(count), check=False)
            kernels.dequantize(*kernels.quantize(x, mode), mode, 32)
            kernels.hadamard_transform(x, RANDOM_HADAMARD)
            pairs = torch.zeros(count // 10, 2, dtype=torch.int64)
            kernels.copy_blocks(caches[0], pairs, check=False)
            for seq_lens, q_lens in (([16] * count, [1] * count), ([count], [count])):
                table = torch.zeros(len(seq_lens), 1 + seq_lens[0] // 16, dtype=torch.int64)
                batch = Batch(query, *caches, table, seq_lens, q_lens, [], [])
                batch.run(tier=kernels, check=False)
        grids.append([(each.kernel, each.numbers[0]) for each in found])
    few, many = grids
    assert [(name, grid[1:]) for name, grid in few] == [(name, grid[1:]) for name, grid in many]
    assert any(a[1][0] < b[1][0] for a, b in zip(few, many, strict=True))
