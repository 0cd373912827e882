"""Packed attention: the kernels within their error budget, and the same bits in any company."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvq.modes import MODES, Mode
from kvq.modes import mode as find_mode
from kvq.tier import AttentionFeatures, AttentionOutput, Layout, PagedKV
from tests.attention_budget import assert_within_budget
from tests.attention_cases import (
    INT2,
    INT4,
    INT8,
    NO_BLOCK,
    Batch,
    make_batch,
    same,
    with_odd_rows,
)
from tests.cases import VARIANTS, _even_levels

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("kvq.kernels")
tanh = pytest.importorskip("kvq.kernels.attention_tile").tanh
launch = pytest.importorskip("kvq.kernels.launch")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Fitted a moment ago: tables of 8 bits, of 3, 2 and 1; and one with levels far apart.
FRESH = [
    find_mode(base).with_codebook(_even_levels(f"fresh_{n}", n, step))
    for base, n, step in (
        ("lloyd4", 200, 1 / 32),
        ("smax4", 200, 1 / 128),
        ("lloyd3", 5, 0.6),
        ("lloyd2", 3, 1.2),
        ("smax2", 3, 0.9),
        ("lloyd1", 2, 1.5),
        ("lloyd4", 11, 0.3),
    )
]
#: Other roundings, rotations and widths.
OTHERS = [
    VARIANTS[name]
    for name in VARIANTS
    if "two_rounds" in name or "_bits" in name or "@unrotated" in name or "@rotated" in name
]
EVERY_MODE = (*MODES.values(), *FRESH, *OTHERS)
FEATURES: tuple[tuple[str, ...], ...] = (
    (),
    ("window",),
    ("soft_cap",),
    ("alibi",),
    ("sinks",),
    ("tree",),
    ("trees",),
    ("bias",),
    ("token_bias",),
    ("head_bias",),
    ("key_bias",),
    ("least_bias",),
    ("padding",),
    ("window", "padding"),
    ("window", "soft_cap", "alibi", "sinks", "tree", "bias", "padding"),
    ("window", "soft_cap", "alibi", "sinks", "trees", "token_bias", "padding"),
)


def make_features(names: Sequence[str], batch: Batch, seed: int = 0) -> AttentionFeatures:
    """The named features, with numbers that matter."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def holes(x: Tensor, value: float = -math.inf) -> Tensor:
        return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.3, value)

    tokens, heads, sequences = *batch.query.shape[:2], len(batch.seq_lens)
    longest = max(batch.seq_lens, default=0)
    least = torch.finfo(torch.float32).min
    every = {
        "window": {"window": 11},
        "soft_cap": {"soft_cap": 1.7},
        "alibi": {"alibi_slopes": randn(heads) / 3},
        "sinks": {"sink_logits": randn(heads) * 3},
        "tree": {"query_query_bias": holes(randn(5, 5))},
        "trees": {"query_query_bias": holes(randn(sequences, 4, 4)).transpose(1, 2)},
        "bias": {"logit_bias": holes(randn(tokens, heads, longest + 3))},
        "token_bias": {"logit_bias": holes(randn(tokens, 1, longest))},
        "head_bias": {"logit_bias": holes(randn(longest, heads, 1)).permute(2, 1, 0)},
        "key_bias": {"logit_bias": randn(1, 1, longest)},
        "least_bias": {"logit_bias": holes(randn(tokens, heads, longest), least)},
        "padding": {"first_key": torch.tensor([(3, 0, 30, -2)[i % 4] for i in range(sequences)])},
    }
    fields: dict = {}
    for name in names:
        fields |= every[name]
    moved = {
        k: v.to(batch.query.device) if isinstance(v, Tensor) else v for k, v in fields.items()
    }
    return AttentionFeatures(**moved)


# ------------------------------------------------------------------------------ a covering array


def interleaved(batch: Batch, gap: int) -> Batch:
    """The same caches as views of one buffer: codes of both sides, then `gap` bytes; and words."""
    codes = torch.cat(
        (
            batch.key_cache.codes,
            batch.value_cache.codes,
            batch.key_cache.codes[..., :1].expand(*batch.key_cache.codes.shape[:3], gap),
        ),
        dim=-1,
    )
    # Words of two dtypes have a buffer each, with the same gaps.
    key_words, value_words = (cache.words for cache in (batch.key_cache, batch.value_cache))
    other = value_words if value_words.dtype is key_words.dtype else key_words
    words = torch.stack((key_words, other), dim=1)
    if value_words.dtype is not key_words.dtype:
        value_words = torch.stack((value_words, value_words), dim=1)[:, 1]
    else:
        value_words = words[:, 1]
    split = batch.key_cache.codes.shape[-1]
    end = split + batch.value_cache.codes.shape[-1]
    return replace(
        batch,
        key_cache=batch.key_cache._replace(codes=codes[..., :split], words=words[:, 0]),
        value_cache=batch.value_cache._replace(codes=codes[..., split:end], words=value_words),
    )


LENGTHS = (
    ((37, 0), (1, 1)),
    ((70,), (1,)),
    ((9, 40), (2, 1)),
    ((21,), (5,)),
    ((5, 16), (9, 1)),
    ((30, 3), (11, 0)),
    ((44,), (40,)),
    ((4, 33), (7, 2)),
)
FACTORS: dict[str, tuple] = {
    "key_mode": EVERY_MODE,
    "value_mode": EVERY_MODE,
    "features": FEATURES,
    "dtype": DTYPES,
    "dims": ((32, 64), (64, 64), (80, 80), (96, 32), (128, 128), (64, 96), (256, 32), (32, 512)),
    "heads": ((1, 1), (3, 1), (4, 1), (5, 1), (4, 2), (7, 1), (8, 1), (16, 1)),
    "block_size": (1, 5, 16, 24, 32, 48, 64),
    "layout": ("HND", "NHD", "interleaved HND", "odd NHD"),
    "lengths": LENGTHS,
    "spread": (0.0, 1.0, 8.0, 30.0),
    "index_dtype": (torch.int32, torch.int64),
    "split": (16, 64, 256),
}


@dataclass(frozen=True)
class Case:
    key_mode: Mode
    value_mode: Mode
    features: tuple[str, ...]
    dtype: torch.dtype
    dims: tuple[int, int]
    heads: tuple[int, int]
    block_size: int
    layout: str
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    spread: float
    index_dtype: torch.dtype
    split: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.key_mode}-{self.value_mode}-{'+'.join(self.features) or 'plain'}-{dtype}"

    def batch(self) -> Batch:
        seq_lens, q_lens = self.lengths
        batch = make_batch(
            list(seq_lens),
            list(q_lens),
            heads=self.heads if sum(q_lens) < 12 else (2, 1),
            dims=self.dims,
            modes=(self.key_mode, self.value_mode),
            block_size=self.block_size,
            layout=Layout.NHD if "NHD" in self.layout else Layout.HND,
            dtype=self.dtype,
            seed=len(str(self)),
        )
        batch.scale = self.spread / math.sqrt(self.dims[0])
        if "odd" in self.layout:
            width = batch.key_cache.codes.shape[-1] + batch.value_cache.codes.shape[-1]
            batch = interleaved(batch, 1 + width % 2)
        elif "interleaved" in self.layout:
            batch = interleaved(batch, 0)
        return batch


def covering(number: int, seed: int) -> list[Case]:
    """Cases in which every value of every factor occurs as often as any other, shuffled."""
    rng = random.Random(seed)
    columns = {}
    for name, values in FACTORS.items():
        column: list = []
        while len(column) < number:
            column += rng.sample(values, len(values))
        columns[name] = column[:number]
    return [Case(**{name: columns[name][i] for name in FACTORS}) for i in range(number)]


def check_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LEAST_SPLIT", case.split)
    batch = case.batch()
    features = make_features(case.features, batch)
    assert_within_budget(batch, features, tier=kernels, index_dtype=case.index_dtype)


@pytest.mark.parametrize("case", covering(len(EVERY_MODE), 0), ids=str)
def test_a_covering_array(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, monkeypatch)


def test_the_covering_array_covers() -> None:
    cases = covering(len(EVERY_MODE), 0)
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in cases} == set(values)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_more_covering_arrays(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in covering(len(EVERY_MODE), seed):
        check_case(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("names", FEATURES, ids="+".join)
@pytest.mark.parametrize("mode", EVERY_MODE, ids=str)
def test_every_mode_and_feature(mode: Mode, names: tuple[str, ...]) -> None:
    batch = make_batch(
        [23, 7], [1, 3], heads=(4, 2), dims=(32, 64), modes=(mode, mode), dtype=torch.float16
    )
    assert_within_budget(batch, make_features(names, batch), tier=kernels)


def test_seventy_one_queries_of_a_head() -> None:
    batch = make_batch([20], [1], heads=(71, 1), dims=(64, 64), dtype=torch.bfloat16)
    assert_within_budget(batch, tier=kernels)


# ---------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 30.0])
@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("smax4", "smax2"), torch.bfloat16),
        (("int8", "int8"), torch.float16),
        (("affine4", "affine4"), torch.float16),
        (("int4", "int4"), torch.bfloat16),
        (("int2", "lloyd4_unbiased"), torch.float16),
        (("fp8", "fp8"), torch.float32),
    ],
    ids=str,
)
def test_scales_far_apart_and_outliers(
    names: tuple[str, str], dtype: torch.dtype, spread: float
) -> None:
    """Rows from 10^-2 to 10^2 and rows of zeros, keys that point both ways, one large channel."""
    torch.manual_seed(3)
    sides = []
    for dim in (64, 32):
        rows = torch.randn(90, 1, dim) * 10 ** (torch.rand(90, 1, 1) * 4 - 2)
        rows[torch.rand(90) < 0.1] = 0.0
        rows[..., 3] *= 20
        sides.append([rows])
    modes = (find_mode(names[0]), find_mode(names[1]))
    batch = make_batch(
        [90], [2], heads=(2, 1), dims=(64, 32), modes=modes, dtype=dtype,
        keys=sides[0], values=sides[1],
    )  # fmt: skip
    batch.query[:, 0, 5] *= 50
    scores = batch.query.double() @ batch.keys[0][:, 0].T
    batch.scale = spread / float(scores.std())
    if names[0].startswith("smax"):
        assert 20 < (batch.key_cache.words < 0).sum() < 70
    assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("grows", [True, False], ids=["growing", "shrinking"])
@pytest.mark.parametrize("names", [(), ("bias",)], ids=["plain", "bias"])
def test_scales_that_change_from_tile_to_tile(grows: bool, names: tuple[str, ...]) -> None:
    """Uniform weights, so that every row counts."""
    torch.manual_seed(4)
    sizes = torch.logspace(-2, 2, 200)[:, None, None]
    rows = torch.randn(200, 1, 32).abs() * (sizes if grows else sizes.flip(0))
    for modes in ((INT8, INT4), (INT4, INT8), (INT2, find_mode("affine4"))):
        batch = make_batch(
            [200], [1], heads=(2, 1), dims=(32, 32), modes=modes, dtype=torch.float16,
            values=[rows],
        )  # fmt: skip
        batch.scale = 0.0
        features = make_features(names, batch)
        if features.logit_bias is not None:
            features = replace(features, logit_bias=features.logit_bias.clamp(max=0))
        assert_within_budget(batch, features, tier=kernels)


def test_large_queries_and_small_ones() -> None:
    for factor in (1e-30, 1e-6, 2e4):
        batch = make_batch([30], [1], heads=(2, 1), dtype=torch.bfloat16, modes=(INT4, INT8))
        batch.query *= factor
        batch.scale = 0.3 / factor
        assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("mode", [INT4, find_mode("lloyd1"), find_mode("lloyd3")], ids=str)
def test_rotated_queries_keep_more_bits_than_one_float16(mode: Mode, q_len: int) -> None:
    """Logits of standard deviation 30: their error is that of levels, not of queries."""
    batch = make_batch(
        [90], [q_len], heads=(4, 1), dims=(64, 64), modes=(mode, INT8), dtype=torch.bfloat16
    )  # fmt: skip
    batch.scale = 30 / float((batch.query.double() @ batch.keys[0][:, 0].T).std())
    exact = replace(batch, query=batch.query.double()).run()
    error = batch.run(tier=kernels).log_sum_exp.double() - exact.log_sum_exp
    assert error.abs().max() < 30 * 2.0**-14


@pytest.mark.parametrize("mode", [INT4, find_mode("affine4")], ids=str)
def test_float32_queries_see_the_last_bits_of_a_scale(mode: Mode) -> None:
    """Where the zero-point lies, and the bits beside it."""
    batch = make_batch([50], [1], heads=(2, 1), dims=(32, 32), modes=(mode,) * 2, dtype=DTYPES[2])
    for scale in (0.0, batch.scale):
        batch.scale = scale
        assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("sizes", [(64, 64, 1), (64, 64, 3), (64, 128, 2)], ids=str)
@pytest.mark.parametrize("names", [(), ("window", "padding"), ("sinks", "bias")], ids="+".join)
def test_many_splits(
    sizes: tuple[int, int, int], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, size in zip(("LEAST_SPLIT", "MOST_SPLIT", "SPLITS"), sizes, strict=True):
        monkeypatch.setattr(launch, constant, size)
    monkeypatch.setattr(launch, "PREFILL_SPLIT", 128)
    batch = make_batch(
        [300, 131], [1, 9], heads=(2, 1), dims=(32, 32), modes=(INT4, INT2),
        block_size=16, dtype=torch.float16,
    )  # fmt: skip
    features = make_features(names, batch)
    if features.window is not None:
        features = replace(features, window=150)
    assert_within_budget(batch, features, tier=kernels)


# ----------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("modes", "dtype"),
    [((INT4, INT2), torch.bfloat16), ((find_mode("fp8"), find_mode("lloyd3")), torch.float32)],
    ids=str,
)
def test_companions_do_not_change_a_bit(
    modes: tuple[Mode, Mode], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LEAST_SPLIT", 16)
    batch = make_batch(
        [37, 5, 140, 20, 30],
        [3, 1, 1, 9, 0],
        heads=(2, 1),
        dims=(32, 32),
        modes=modes,
        dtype=dtype,
    )
    together = batch.run(tier=kernels)
    assert same(batch.run(tier=kernels), together)
    starts = batch.starts
    for order in ([0], [2], [3, 1, 2, 0], [2, 2]):
        result = batch.only(*order).run(tier=kernels)
        expected = [
            torch.cat([part[starts[s] : starts[s + 1]] for s in order]) for part in together
        ]
        assert same(result, AttentionOutput(*expected))
    wider = torch.full((5, 300), NO_BLOCK)
    wide = replace(batch, block_table=torch.cat((batch.block_table, wider), dim=1))
    assert same(wide.run(tier=kernels), together)
    assert same(batch.run(tier=kernels, max_query_len=9), together)


def test_views_and_index_dtypes_change_no_bit() -> None:
    batch = make_batch([20, 9], [1, 2], heads=(4, 2), dims=(64, 32), dtype=torch.float16)
    expected = batch.run(tier=kernels)
    assert same(batch.run(tier=kernels, index_dtype=torch.int32), expected)
    batch.query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    batch.block_table = batch.block_table.T.contiguous().T
    assert same(batch.run(tier=kernels), expected)
    wide = torch.zeros(3, 4, 128, dtype=torch.float16)
    wide[..., ::2] = batch.query
    batch.query = wide[..., ::2]
    assert same(interleaved(batch, 0).run(tier=kernels), expected)
    assert same(interleaved(batch, 16).run(tier=kernels), expected)


def test_layouts_change_no_bit() -> None:
    results = [
        make_batch([20, 9], [1, 2], heads=(4, 2), dtype=torch.bfloat16, layout=layout).run(
            tier=kernels
        )
        for layout in Layout
    ]
    assert same(*results)


def test_the_output_alone() -> None:
    batch = make_batch([20], [1], heads=(2, 1), dtype=torch.float16)
    alone = kernels.paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        torch.tensor([20]),
        torch.tensor([0, 1]),
        scale=batch.scale,
    )
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, batch.run(tier=kernels).output)


# ------------------------------------------------------------------------- what is not a number

WORDS = {
    "float": (0x7FC00000, 0x7F800000, -(2**23), 0x7FFFFFFF),
    "pair": (0x7FC00000, 0x7C00, 0x7E00, 0x7C003C00),
}


def row_of(cache: PagedKV, batch: Batch, key: int, head: int) -> tuple[Tensor, Tensor]:
    """Codes and word of one key of sequence 0, to write to."""
    block_size = cache.words.shape[2 if cache.layout is Layout.HND else 1]
    block, offset = int(batch.block_table[0, key // block_size]), key % block_size
    place = (block, head, offset) if cache.layout is Layout.HND else (block, offset, head)
    return cache.codes[place], cache.words.view(torch.int32)[place]


@pytest.mark.parametrize("mode", [INT8, INT4, "fp8", "affine4", "lloyd3", FRESH[0]], ids=str)
def test_a_nan_row_reaches_who_sees_it(mode: Mode | str) -> None:
    mode = find_mode(mode)
    dtype = DTYPES[len(mode.name) % 3]
    batch = make_batch(
        [9], [6], heads=(2, 2), dims=(32, 32), modes=(mode, mode), dtype=dtype, block_size=4
    )
    features = AttentionFeatures(window=3)
    good = batch.run(features, tier=kernels)
    words = WORDS["pair" if mode.name.startswith("affine") else "float"]
    # Never seen: before the window of the first query.
    places = ((2, 0), (5, 1), (4, 0), (7, 1), (0, 0), (0, 1))
    for i, (key, head) in enumerate(places):
        cache = batch.key_cache if i % 4 < 2 else batch.value_cache
        codes, word = row_of(cache, batch, key, head)
        codes.zero_()
        word.fill_(words[i % 4])
    result = assert_within_budget(batch, features, tier=kernels)
    whole = ~result.output.isnan()
    assert whole[..., 0].sum() == 12 - 3 - 3 - 2 - 2 + 1 + 1
    assert torch.equal(result.output[whole], good.output[whole])


@pytest.mark.parametrize("mode", [INT8, INT4, "affine4", INT2], ids=str)
def test_what_is_hidden_may_be_anything(mode: Mode | str) -> None:
    mode = find_mode(mode)
    batch = make_batch(
        [21], [1], heads=(2, 1), dims=(32, 32), modes=(mode, mode), dtype=torch.bfloat16
    )
    first = AttentionFeatures(first_key=torch.tensor([5]))
    bias = torch.zeros(1, 1, 21)
    bias[..., 11] = -math.inf
    masked = AttentionFeatures(logit_bias=bias)
    good = batch.run(first, tier=kernels), batch.run(masked, tier=kernels)
    for word in (0x7FC00000, 0x7F800000, 0x7F7FFFFF):
        for features, key, expected in zip((first, masked), (2, 11), good, strict=True):
            caches = [
                cache._replace(codes=cache.codes.clone(), words=cache.words.clone())
                for cache in (batch.key_cache, batch.value_cache)
            ]
            other = replace(batch, key_cache=caches[0], value_cache=caches[1])
            for cache in caches:
                codes, words = row_of(cache, other, key, 0)
                codes.fill_(255)
                words.fill_(word)
            assert same(other.run(features, tier=kernels), expected)


def test_a_nan_value_counts_even_where_its_weight_vanishes() -> None:
    batch = make_batch([5], [1], heads=(2, 1), dtype=torch.float16)
    row_of(batch.value_cache, batch, 0, 0)[1].fill_(0x7FC00000)
    bias = torch.zeros(1, 1, 5)
    bias[..., 0] = -1e30
    features = AttentionFeatures(logit_bias=bias)
    assert batch.run(features, tier=kernels).output.isnan().all()


def test_nothing_visible_is_zero_even_for_a_nan_query() -> None:
    batch = make_batch([5, 0], [2, 1], heads=(2, 1), dtype=torch.float16)
    batch.query.fill_(math.nan)
    hidden = AttentionFeatures(first_key=torch.tensor([5, 0]), sink_logits=torch.ones(2))
    result = batch.run(hidden, tier=kernels)
    assert not result.output.any()
    assert (result.log_sum_exp == -math.inf).all()
    assert batch.run(tier=kernels).output[:2].isnan().all()


# ------------------------------------------------------------------------- lengths and tables


def test_empty_batches() -> None:
    batch = make_batch([], [], spare_entries=0, dtype=torch.float16)
    assert batch.run(tier=kernels).output.shape == (0, 6, 16)
    batch = make_batch([5, 0], [0, 0], dtype=torch.float16)
    assert batch.run(tier=kernels).log_sum_exp.shape == (0, 6)


@pytest.mark.parametrize("entry", [-1, None, NO_BLOCK, 2**40])
def test_a_block_that_does_not_exist(entry: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LEAST_SPLIT", 64)
    batch = make_batch([90, 4, 16], [1, 2, 9], heads=(2, 1), dtype=torch.float16)
    if entry is None:  # the first past the last
        entry = len(batch.key_cache.words)
    for cache in (batch.key_cache, batch.value_cache):
        cache.words.nan_to_num_(1.0)  # so that NaN comes from the table alone
    good = batch.run(tier=kernels)
    assert not good.output.isnan().any()
    for sequence, place in ((0, 1), (0, 22), (2, 3)):
        table = batch.block_table.clone()
        table[sequence, place] = entry
        bad = replace(batch, block_table=table)
        with pytest.raises(ValueError, match=f"got {entry} for entry {place}"):
            bad.run(tier=kernels)
        result = bad.run(tier=kernels, check=False)
        own = torch.zeros(12, dtype=torch.bool)
        own[batch.starts[sequence] : batch.starts[sequence + 1]] = True
        for found, right in zip(result, good, strict=True):
            assert found[own].isnan().all()
            assert torch.equal(found[~own], right[~own])


def test_a_table_that_is_too_narrow() -> None:
    batch = make_batch(
        [32, 33], [1, 1], heads=(2, 1), block_size=16, spare_entries=0, dtype=torch.float16
    )
    good = batch.run(tier=kernels)
    batch.block_table = batch.block_table[:, :2]
    result = batch.run(tier=kernels, check=False)
    assert torch.equal(result.output[0], good.output[0])
    assert result.output[1].isnan().all()
    assert result.log_sum_exp[1].isnan().all()


def test_queries_of_no_sequence_see_nothing() -> None:
    batch = make_batch([6, 5], [2, 2], heads=(2, 1), dtype=torch.float16)
    good = batch.run(tier=kernels)
    rows = torch.full_like(batch.query[:3], math.nan)
    result = kernels.paged_attention(
        torch.cat((rows, batch.query, rows)),
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        torch.tensor([6, 5]),
        torch.tensor([3, 5, 7]),
        scale=batch.scale,
        return_lse=True,
        check=False,
    )
    assert torch.equal(result.output[3:7], good.output)
    for alone in (slice(0, 3), slice(7, 10)):
        assert not result.output[alone].any()
        assert (result.log_sum_exp[alone] == -math.inf).all()


def test_a_short_bias_ends() -> None:
    batch = make_batch([6, 5], [2, 2], heads=(2, 1), dtype=torch.float16)
    short, long = torch.randn(1, 1, 4), torch.zeros(1, 1, 6)
    long[..., :4] = short
    result = batch.run(AttentionFeatures(logit_bias=short), tier=kernels, check=False)
    assert same(result, batch.run(AttentionFeatures(logit_bias=long), tier=kernels))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16, 71])
def test_every_number_of_new_tokens_has_one_launch(group: int) -> None:
    plans = launch.attention_plans(
        group, 10**6, 64, 128, (64, 64), wide=False, crowded=False, in_memory=False
    )
    for tokens in (*range(1, 20), 500, 10**6):
        (plan,) = [plan for plan in plans if plan.fewest <= tokens <= plan.most]
        if 1 < tokens <= 8 // min(group, 16):
            assert (plan.columns, plan.blocks) == (8, 1)
        elif 1 < tokens <= 8:
            assert plan.columns == 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_keys_whose_biases_are_all_the_least_number_are_seen(dtype: torch.dtype) -> None:
    batch = make_batch([37], [2], heads=(2, 1), dtype=dtype)
    bias = torch.full((1, 1, 37), torch.finfo(torch.float32).min)
    assert_within_budget(batch, AttentionFeatures(logit_bias=bias), tier=kernels)
    result = batch.run(AttentionFeatures(logit_bias=bias), tier=kernels)
    mean = batch.values[0].mean(0).expand(2, -1)
    torch.testing.assert_close(result.output[1].double(), mean, atol=2e-3, rtol=0.0)


def test_windows_of_a_program_begin_in_different_tiles() -> None:
    """The first of eight queries sees keys of a tile before that of the last one's window."""
    lengths = list(range(100, 132, 4))
    batch = make_batch(lengths, [8] * len(lengths), heads=(2, 1), dtype=torch.float16)
    assert_within_budget(batch, AttentionFeatures(window=40), tier=kernels)


def test_rows_of_an_odd_number_of_bytes() -> None:
    """Beside each other, and with a gap that makes their strides even."""
    batch = make_batch([21], [1], heads=(2, 1), dims=(17, 19), modes=(INT8, INT8))
    batch = replace(batch, query=batch.query.to(torch.float16))
    assert_within_budget(batch, tier=kernels)
    assert same(with_odd_rows(batch).run(tier=kernels), batch.run(tier=kernels))


@triton.jit
def _tanh_kernel(x_ptr, out_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out_ptr + place, tanh(tl.load(x_ptr + place)))


def test_the_hyperbolic_tangent_is_accurate_relative_to_its_value() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.logspace(-20, 4, 1024, base=2.0, device=device)
    x = torch.cat([x, -x])
    got = torch.empty_like(x)
    _tanh_kernel[(1,)](x, got, len(x))
    error = (got.double() / x.double().tanh() - 1).abs()
    # Where the two ways meet the value is 0.2: some ulps of 1 over that.
    assert error.max() <= 2.0**-19


@pytest.mark.parametrize("side", ["key", "value"])
def test_a_head_size_of_sixteen(side: str) -> None:
    dims = (16, 32) if side == "key" else (32, 16)
    batch = make_batch([20], [1], heads=(2, 1), dims=dims, modes=(INT4, INT2), dtype=torch.float16)
    assert_within_budget(batch, tier=kernels)


def test_no_blocks_at_all() -> None:
    batch = make_batch([0], [1], heads=(2, 1), dtype=torch.float16)
    for name in ("key_cache", "value_cache"):
        cache = getattr(batch, name)
        setattr(batch, name, cache._replace(codes=cache.codes[:0], words=cache.words[:0]))
    with pytest.raises(ValueError, match=r"^key_cache must have at least one block, got 0$"):
        batch.run(tier=kernels)
