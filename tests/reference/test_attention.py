"""Attention against loops over tokens, heads and keys, and against closed forms."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq.modes import MODES
from kvq.modes import mode as find_mode
from kvq.reference import attention, merge_attention, paged_attention
from kvq.tier import AttentionFeatures, AttentionOutput, Layout, PagedKV, new_paged_kv
from tests.attention_cases import (
    FP8,
    INT2,
    INT4,
    INT8,
    NAMES,
    NO_BLOCK,
    RAGGED,
    Batch,
    brute_force,
    make_batch,
    make_features,
    same,
)

#: Relative to the largest value: rounding in the sums, and of the output.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 2**-11 + 2e-6,
    torch.bfloat16: 2**-8 + 2e-6,
}


def assert_agree(
    actual: AttentionOutput, expected: AttentionOutput, *, slack: float = 1.0
) -> None:
    dtype = actual.output.dtype
    largest = float(expected.output.nan_to_num().abs().max()) if expected.output.numel() else 0.0
    torch.testing.assert_close(
        actual.output.to(torch.float64),
        expected.output.to(torch.float64),
        rtol=0,
        atol=slack * TOLERANCE[dtype] * max(largest, 1e-30),
        equal_nan=True,
    )
    exact = dtype is torch.float64
    assert actual.log_sum_exp.dtype is (torch.float64 if exact else torch.float32)
    error = slack * (1e-13 if exact else 2e-6)
    torch.testing.assert_close(
        actual.log_sum_exp.to(torch.float64),
        expected.log_sum_exp.to(torch.float64),
        rtol=error,
        atol=error,
        equal_nan=True,
    )


# ------------------------------------------------------------------------ against brute force

SETS = [(), *((name,) for name in NAMES), *combinations(NAMES, 2), NAMES]


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_features_agree_with_brute_force(names):
    batch = make_batch(*RAGGED)
    features = make_features(set(names), batch)
    assert_agree(batch.run(features), brute_force(batch, features))


@given(data=st.data())
def test_any_batch_agrees_with_brute_force(data):
    lengths = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=4))
    q_lens = [data.draw(st.integers(0, 6)) for _ in lengths]
    kv_heads = data.draw(st.integers(1, 3))
    batch = make_batch(
        lengths,
        q_lens,
        heads=(kv_heads * data.draw(st.integers(1, 3)), kv_heads),
        dims=(data.draw(st.sampled_from((16, 32, 48))), data.draw(st.sampled_from((16, 80)))),
        modes=(
            data.draw(st.sampled_from(list(MODES.values()))),
            data.draw(st.sampled_from(list(MODES.values()))),
        ),
        block_size=data.draw(st.integers(1, 5)),
        layout=data.draw(st.sampled_from(Layout)),
        dtype=data.draw(st.sampled_from(list(TOLERANCE))),
        seed=data.draw(st.integers(0, 99)),
    )
    features = make_features(data.draw(st.sets(st.sampled_from(NAMES))), batch)
    if features.window is not None:
        features = replace(features, window=data.draw(st.integers(1, 15)))
    assert_agree(batch.run(features), brute_force(batch, features), slack=4)


@pytest.mark.parametrize("index", range(len(MODES)), ids=list(MODES))
def test_every_mode_on_either_side(index):
    modes = list(MODES.values())
    for pair in (
        (modes[index], modes[(index + 9) % len(modes)]),
        (modes[(index + 4) % len(modes)], modes[index]),
    ):
        for dtype in (torch.float64, torch.float32):
            batch = make_batch([6, 3], [1, 1], dims=(64, 48), modes=pair, dtype=dtype)
            assert_agree(batch.run(), brute_force(batch), slack=2)


@pytest.mark.parametrize(
    "heads", [(6, 1), (24, 4), (28, 4), (5, 1), (40, 2), (7, 7)], ids=lambda h: f"{h[0]}/{h[1]}"
)
def test_any_group_of_query_heads(heads):
    batch = make_batch([6, 2], [2, 1], heads=heads, dims=(64, 64))
    expected = batch.run()
    assert_agree(expected, brute_force(batch))
    # A group depends on its own KV head alone.
    group = heads[0] // heads[1]
    batch.key_cache.words[:, 1:] *= 2
    batch.value_cache.words[:, 1:] *= 2
    changed = batch.run()
    assert torch.equal(changed.output[:, :group], expected.output[:, :group])
    for head in range(group, heads[0]):
        assert not torch.equal(changed.output[:, head], expected.output[:, head])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).removeprefix("torch."))
def test_output_has_the_dtype_of_the_query(dtype):
    batch = make_batch(*RAGGED, dtype=dtype, modes=(INT4, FP8))
    result = batch.run()
    assert result.output.dtype is dtype
    assert_agree(result, brute_force(batch))
    alone = paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        torch.tensor(batch.seq_lens),
        torch.tensor(batch.starts),
        scale=batch.scale,
    )
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, result.output)


def test_float64_is_not_float32_in_disguise():
    batch = make_batch([40], [1], modes=(INT4, INT4))
    single = replace(batch, query=batch.query.to(torch.float32)).run()
    error = (single.output - batch.run().output).abs().max()
    assert 1e-9 < error < 1e-5


def test_long_prompts_are_cut_into_chunks_that_do_not_show(monkeypatch):
    batch = make_batch([9, 4, 23], [7, 6, 20], seed=3)
    features = make_features(set(NAMES), batch)
    for logits in (1, 60, 200):
        monkeypatch.setattr(attention, "LOGITS_AT_ONCE", logits)
        assert_agree(batch.run(features), brute_force(batch, features))


# --------------------------------------------------------------------------------- closed forms


def counting_batch(seq_lens: list[int], q_lens: list[int], **options) -> Batch:
    """Keys 0, so that weights are uniform, and value rows that hold their own index."""
    keys = [torch.zeros(n, 1, 16) for n in seq_lens]
    values = [torch.arange(n).view(n, 1, 1).expand(n, 1, 16).to(torch.float32) for n in seq_lens]
    return make_batch(
        seq_lens,
        q_lens,
        heads=(1, 1),
        dims=(16, 16),
        modes=(INT8, INT8),
        keys=keys,
        values=values,
        **options,
    )


@pytest.mark.parametrize("window", range(1, 46))
def test_a_window_counts_the_query_itself(window):
    batch = counting_batch([40, 40], [1, 3])
    output, lse = batch.run(AttentionFeatures(window=window))
    for row, pos in enumerate((39, 37, 38, 39)):
        oldest = max(0, pos - window + 1)
        assert float(output[row, 0, 0]) == pytest.approx((oldest + pos) / 2, rel=1e-6)
        assert float(lse[row, 0]) == pytest.approx(math.log(pos - oldest + 1))


def test_the_last_queries_stand_at_the_end_of_the_keys():
    batch = counting_batch([12, 12, 12, 5], [5, 1, 12, 2])
    means = [(7 + i) / 2 for i in range(5)] + [5.5] + [i / 2 for i in range(12)] + [1.5, 2.0]
    torch.testing.assert_close(
        batch.run().output[:, 0, 0], torch.tensor(means, dtype=torch.float64), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_tokens_at_once_are_many_calls_of_one(dtype):
    batch = make_batch([12], [5], dtype=dtype)
    together = batch.run()
    for i in range(5):
        one = replace(batch, query=batch.query[i : i + 1], seq_lens=[8 + i], q_lens=[1]).run()
        expected = AttentionOutput(together.output[i : i + 1], together.log_sum_exp[i : i + 1])
        assert_agree(one, expected)


def test_a_sink_adds_to_the_denominator_only():
    batch = counting_batch([8], [1])
    batch.query.fill_(5.0)
    sinks = torch.tensor([math.log(8)])
    output, lse = batch.run(AttentionFeatures(sink_logits=sinks, soft_cap=0.1))
    assert float(output[0, 0, 0]) == pytest.approx(3.5 / 2, rel=1e-6)
    assert float(lse[0, 0]) == pytest.approx(math.log(16))


def test_an_infinitely_low_sink_is_no_sink():
    batch = make_batch(*RAGGED)
    sinks = torch.full((6,), -math.inf)
    assert same(batch.run(AttentionFeatures(sink_logits=sinks)), batch.run())


def test_large_logits_neither_overflow_nor_vanish():
    batch = make_batch([10], [2], dtype=torch.float32)
    batch.scale = 500.0
    assert_agree(batch.run(), brute_force(batch), slack=2000)
    bias = torch.full((1, 1, 10), -1e4)
    lower = batch.run(AttentionFeatures(logit_bias=bias))
    assert torch.isfinite(lower.output).all()


def test_left_padding_is_a_shorter_sequence():
    torch.manual_seed(0)
    keys, values = torch.randn(9, 2, 32), torch.randn(9, 2, 16)
    padded = make_batch([9, 9], [4, 9], keys=[keys] * 2, values=[values] * 2)
    short = make_batch([6, 9], [4, 9], keys=[keys[3:], keys], values=[values[3:], values])
    short.query = padded.query
    features = AttentionFeatures(window=5, alibi_slopes=torch.rand(6), sink_logits=torch.rand(6))
    first = replace(features, first_key=torch.tensor([3, 0], dtype=torch.int32))
    assert_agree(padded.run(first), short.run(features))
    # A query before the first key sees nothing.
    beyond = padded.run(AttentionFeatures(first_key=torch.tensor([7, 12])))
    assert not beyond.output[:2].any()
    assert beyond.output[2:4].any(-1).all()
    assert not beyond.output[4:].any()
    assert (beyond.log_sum_exp[4:] == -math.inf).all()


def test_a_tree_of_new_tokens_is_its_branches():
    """Tokens 0, 1, 2, 3 with parents -, 0, 0, 2: the branches 0-1 and 0-2-3."""
    torch.manual_seed(1)
    keys, values = torch.randn(9, 2, 32), torch.randn(9, 2, 16)
    hide = -math.inf
    tree = torch.tensor(
        [[0, hide, hide, hide], [0, 0, hide, hide], [0, hide, 0, hide], [0, hide, 0, 0]]
    )
    batch = make_batch([9], [4], keys=[keys], values=[values])
    together = batch.run(AttentionFeatures(query_query_bias=tree))
    path = [0, 1, 2, 3, 4, 5, 7, 8]
    branch = make_batch([8], [3], keys=[keys[path]], values=[values[path]])
    branch.query = batch.query[[0, 2, 3]]
    alone = branch.run()
    assert_agree(
        AttentionOutput(together.output[[0, 2, 3]], together.log_sum_exp[[0, 2, 3]]), alone
    )
    # What the tree hides may be NaN.
    block, offset = int(batch.block_table[0, 6 // 4]), 6 % 4
    batch.key_cache.words[block, :, offset] = math.nan
    batch.value_cache.words[block, :, offset] = math.nan
    again = batch.run(AttentionFeatures(query_query_bias=tree))
    assert torch.equal(again.output[[0, 2, 3]], together.output[[0, 2, 3]])
    assert again.output[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES.values(), ids=str)
def test_powers_of_two_pass_through(mode, dtype):
    torch.manual_seed(0)
    keys, values = torch.randn(6, 1, 32), torch.randn(6, 1, 32)

    def run(key_factor: float, value_factor: float) -> AttentionOutput:
        batch = make_batch(
            [6],
            [2],
            heads=(2, 1),
            dims=(32, 32),
            modes=(mode, mode),
            dtype=dtype,
            keys=[keys * key_factor],
            values=[values * value_factor],
        )
        batch.query = batch.query / key_factor
        return batch.run()

    plain = run(1, 1)
    assert torch.equal(run(1, 4).output, plain.output * 4)
    assert same(run(2, 1), plain)


# ------------------------------------------------------------------ lengths, tables, companions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES.values(), ids=str)
def test_a_sequence_of_length_zero(mode, dtype):
    batch = make_batch([7, 0, 3], [1, 1, 1], modes=(mode, mode), dtype=dtype)
    result = batch.run(AttentionFeatures(sink_logits=torch.zeros(6)))
    assert not result.output[1].any()
    assert (result.log_sum_exp[1] == -math.inf).all()
    for sequence in (0, 2):
        alone = batch.only(sequence).run(AttentionFeatures(sink_logits=torch.zeros(6)))
        assert torch.equal(result.output[sequence], alone.output[0])
        assert torch.equal(result.log_sum_exp[sequence], alone.log_sum_exp[0])


def test_nothing_visible_is_zero_even_for_a_nan_query():
    batch = make_batch([5], [2])
    batch.query.fill_(math.nan)
    hidden = AttentionFeatures(first_key=torch.tensor([5]), sink_logits=torch.ones(6))
    result = batch.run(hidden)
    assert not result.output.any()
    assert (result.log_sum_exp == -math.inf).all()
    assert batch.run().output.isnan().all()


def test_empty_batches():
    batch = make_batch([], [], spare_entries=0)
    assert batch.run().output.shape == (0, 6, 16)
    batch = make_batch([5, 0], [0, 0])
    assert batch.run().log_sum_exp.shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mode", "dim"), [(INT4, 48), (INT8, 7)], ids=str)
def test_companions_do_not_change_a_bit(mode, dim, dtype):
    batch = make_batch(
        [37, 5, 120, 64], [3, 1, 2, 9], dims=(dim, 24), modes=(mode, INT8), dtype=dtype
    )
    together = batch.run()
    starts = batch.starts
    orders = ([0], [1], [2, 0], [3, 1, 2, 0], [0, 3], [0, 0, 3])
    for order in orders:
        result = batch.only(*order).run()
        expected = [
            torch.cat([part[starts[s] : starts[s + 1]] for s in order]) for part in together
        ]
        assert same(result, AttentionOutput(*expected))


def test_index_dtypes_agree():
    batch = make_batch(*RAGGED)
    assert same(batch.run(index_dtype=torch.int32), batch.run(index_dtype=torch.int64))


def test_a_wider_table_and_pages_past_the_end_do_not_matter():
    batch = make_batch([32, 20], [2, 1], block_size=16, spare_entries=0)
    narrow = batch.run()
    (nobodys, *_) = set(range(6)) - set(batch.block_table.flatten().tolist())
    batch.key_cache.words[nobodys] = 7.0
    batch.value_cache.words[nobodys] = 7.0
    more = torch.tensor([[nobodys], [-1]])
    batch.block_table = torch.cat((batch.block_table, more), dim=1)
    assert same(batch.run(), narrow)
    # The rest of the last page, too.
    last = int(batch.block_table[1, 1])
    batch.key_cache.words[last, :, 4:] = 1e30
    batch.value_cache.words[last, :, 4:] = 1e30
    assert same(batch.run(), narrow)


@pytest.mark.parametrize("entry", [-1, NO_BLOCK, 2**40])
@pytest.mark.parametrize("features", [(), NAMES], ids=["plain", "all"])
def test_a_block_that_does_not_exist(entry, features):
    batch = make_batch([9, 4, 6], [3, 2, 4])
    for cache in (batch.key_cache, batch.value_cache):
        cache.words.nan_to_num_(1.0)  # so that NaN comes from the table alone
    features = make_features(set(features), batch)
    good = batch.run(features)
    batch.block_table[0, 1] = entry
    with pytest.raises(ValueError, match=f"got {entry} for entry 1 of sequence 0"):
        batch.run(features)
    result = batch.run(features, check=False)
    assert result.output[:3].isnan().all()
    assert result.log_sum_exp[:3].isnan().all()
    assert torch.equal(result.output[3:], good.output[3:])
    assert torch.equal(result.log_sum_exp[3:], good.log_sum_exp[3:])


def test_a_table_that_is_too_narrow():
    batch = make_batch([32, 33], [1, 1], block_size=16, spare_entries=0)
    good = batch.run()
    batch.block_table = batch.block_table[:, :2]
    with pytest.raises(ValueError, match="must have 3 entries for the 33 tokens of sequence 1"):
        batch.run()
    result = batch.run(check=False)
    assert torch.equal(result.output[0], good.output[0])
    assert result.output[1].isnan().all()


def test_unchecked_queries_and_biases_that_reach_too_far():
    batch = make_batch([6, 5], [2, 2])
    good = batch.run()
    batch.query = torch.cat((batch.query, torch.ones_like(batch.query)))
    with pytest.raises(ValueError, match="must end at the number of query tokens"):
        batch.run()
    result = batch.run(check=False)
    assert torch.equal(result.output[:4], good.output)
    assert not result.output[4:].any()
    assert (result.log_sum_exp[4:] == -math.inf).all()

    batch.query = batch.query[:4]
    short, long = torch.randn(1, 1, 4), torch.zeros(1, 1, 6)
    long[..., :4] = short
    result = batch.run(AttentionFeatures(logit_bias=short), check=False)
    assert same(result, batch.run(AttentionFeatures(logit_bias=long)))


# ----------------------------------------------------------------------------------------- NaN


NAN_WORDS = [
    *((mode, bits) for mode in (INT8, INT4, INT2) for bits in (0x7FC00000, 0x7F800000, -(2**23))),
    *((find_mode("affine4"), bits) for bits in (0x7FC00000, 0x7C00, 0x7E00, 0x7C003C00)),
]


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(("mode", "bits"), NAN_WORDS, ids=str)
def test_a_nan_row_reaches_who_sees_it(mode, bits, side):
    """Key 5 of KV head 1; queries at 3 to 8, a window of 3: seen from 5, 6 and 7."""
    for dtype in (torch.float32, torch.float64):
        batch = make_batch([9], [6], modes=(mode, mode), dtype=dtype)
        features = AttentionFeatures(window=3)
        good = batch.run(features)
        cache = batch.key_cache if side == "key" else batch.value_cache
        block = int(batch.block_table[0, 5 // 4])
        cache.words.view(torch.int32)[block, 1, 5 % 4] = bits
        result = batch.run(features)
        seen = torch.zeros(6, 6, dtype=torch.bool)
        seen[2:5, 3:] = True
        assert torch.equal(result.output.isnan().all(-1), seen)
        assert torch.equal(result.output.isnan().any(-1), seen)
        assert torch.equal(result.output[~seen], good.output[~seen])
        if side == "key":
            assert torch.equal(result.log_sum_exp.isnan(), seen)
        else:
            assert torch.equal(result.log_sum_exp, good.log_sum_exp)


def test_a_nan_value_counts_even_where_its_weight_vanishes():
    batch = make_batch([5], [1], dtype=torch.float32)
    batch.value_cache.words[int(batch.block_table[0, 0]), :, 0] = math.nan
    bias = torch.zeros(1, 1, 5)
    bias[..., 0] = -1e30
    assert batch.run(AttentionFeatures(logit_bias=bias)).output.isnan().all()
    bias[..., 0] = -math.inf
    assert not batch.run(AttentionFeatures(logit_bias=bias)).output.isnan().any()


# -------------------------------------------------------------------------------------- strides


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mode", "dim", "kv_heads"), [(INT4, 32, 2), (INT8, 7, 1)], ids=str)
@pytest.mark.parametrize("layout", Layout)
def test_views_are_read_as_they_lie(layout, mode, dim, kv_heads, dtype):
    batch = make_batch(
        *RAGGED,
        heads=(6, kv_heads),
        dims=(dim, dim),
        modes=(mode, mode),
        layout=layout,
        dtype=dtype,
    )
    expected = batch.run()
    codes = torch.stack((batch.key_cache.codes, batch.value_cache.codes), dim=1)
    words = torch.stack((batch.key_cache.words, batch.value_cache.words), dim=1)
    (key_codes, value_codes), (key_words, value_words) = codes.unbind(1), words.unbind(1)
    batch.key_cache = batch.key_cache._replace(codes=key_codes, words=key_words)
    batch.value_cache = batch.value_cache._replace(codes=value_codes, words=value_words)
    assert not key_codes.is_contiguous()
    batch.query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert same(batch.run(), expected)
    wide = torch.zeros(*batch.query.shape[:2], 2 * dim, dtype=dtype)
    wide[..., ::2] = batch.query
    batch.query = wide[..., ::2]
    batch.block_table = batch.block_table.T.contiguous().T
    assert same(batch.run(), expected)


def test_layouts_agree():
    results = [make_batch(*RAGGED, layout=layout).run() for layout in Layout]
    assert same(*results)


# ---------------------------------------------------------------------------------------- merge


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_merged_parts_are_the_whole(dtype, with_sinks):
    batch = make_batch([9, 0, 6, 12], [3, 1, 8, 1], dtype=dtype)
    sinks = torch.randn(6) if with_sinks else None
    whole = batch.run(AttentionFeatures(sink_logits=sinks))
    owner = torch.randint(0, 3, (1, 1, 12))
    owner[..., 0] = 1  # the queries that see one key leave two parts empty
    parts = []
    for part in range(3):
        bias = torch.zeros(1, 1, 12).masked_fill(owner != part, -math.inf)
        parts.append(batch.run(AttentionFeatures(logit_bias=bias)))
    assert_agree(merge_attention(parts, sinks), whole, slack=2)
    assert_agree(merge_attention([parts[2], parts[0], parts[1]], sinks), whole, slack=2)
    if sinks is None:
        pairs = merge_attention([merge_attention(parts[:2]), parts[2]])
        assert_agree(pairs, whole, slack=2)
        assert_agree(merge_attention([whole]), whole)


def test_merge_selects_empty_parts_away():
    full = AttentionOutput(torch.tensor([[[3.0]]]), torch.tensor([[-200.0]]))
    empty = AttentionOutput(torch.tensor([[[math.nan]]]), torch.tensor([[-math.inf]]))
    assert same(merge_attention([empty, full]), full)
    nothing = merge_attention([empty, empty], torch.zeros(1))
    assert nothing.output.item() == 0
    assert nothing.log_sum_exp.item() == -math.inf
    half = merge_attention([full, full, empty], torch.tensor([-200 + math.log(2.0)]))
    assert half.output.item() == pytest.approx(1.5)
    assert half.log_sum_exp.item() == pytest.approx(-200 + math.log(4.0))


def test_merge_passes_nan_on_and_keeps_the_dtype():
    def part(value: float, lse: float = 0.0) -> AttentionOutput:
        return AttentionOutput(
            torch.full((1, 1, 2), value, dtype=torch.bfloat16), torch.full((1, 1), lse)
        )

    merged = merge_attention([part(1), part(3)])
    assert merged.output.dtype is torch.bfloat16
    assert merged.log_sum_exp.dtype is torch.float32
    assert merged.output.tolist() == [[[2.0, 2.0]]]
    assert merge_attention([part(1), part(math.nan)]).output.isnan().all()
    assert merge_attention([part(1), part(1, math.nan)]).log_sum_exp.isnan().all()


# ------------------------------------------------------------------------------------ bad input


def arguments() -> dict:
    batch = make_batch([9, 4], [3, 2], dtype=torch.float32)
    return {
        "query": batch.query,
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "block_table": batch.block_table,
        "seq_lens": torch.tensor(batch.seq_lens),
        "query_start_loc": torch.tensor(batch.starts),
        "scale": 1.0,
    }


def features(**fields) -> dict:
    return {"features": AttentionFeatures(**fields)}


def other_cache(blocks: int = 6, block_size: int = 4, heads: int = 2) -> PagedKV:
    return new_paged_kv(blocks, block_size, heads, 16, INT4)


META = "meta"
BAD = {
    "query no tensor": ({"query": [1.0]}, TypeError, "query must be a torch.Tensor, got list"),
    "query integers": (
        {"query": torch.ones(5, 6, 32, dtype=torch.int64)},
        TypeError,
        "query must be float32 or float16 or bfloat16 or float64, got int64",
    ),
    "query axes": (
        {"query": torch.ones(5, 32)},
        ValueError,
        "query must be [tokens, query heads, head_dim] of shape [any, any, 32], got [5, 32]",
    ),
    "query head_dim": ({"query": torch.ones(5, 6, 16)}, ValueError, "got [5, 6, 16]"),
    "query heads": (
        {"query": torch.ones(5, 5, 32)},
        ValueError,
        "query must have a multiple of the 2 KV heads, got 5 heads",
    ),
    "query device": (
        {"query": torch.ones(5, 6, 32, device=META)},
        ValueError,
        "query must be on the device of key_cache (cpu), got meta",
    ),
    "value blocks": (
        {"value_cache": other_cache(blocks=7)},
        ValueError,
        "value_cache must be [blocks, heads, block_size] of shape [6, 2, 4], got [7, 2, 4]",
    ),
    "value heads": ({"value_cache": other_cache(heads=1)}, ValueError, "got [6, 1, 4]"),
    "value block size": ({"value_cache": other_cache(block_size=5)}, ValueError, "got [6, 2, 5]"),
    "table dtype": (
        {"block_table": torch.zeros(2, 3)},
        TypeError,
        "block_table must be int32 or int64, got float32",
    ),
    "table axes": (
        {"block_table": torch.zeros(3, dtype=torch.int32)},
        ValueError,
        "block_table must be [sequences, blocks] of shape [2, any], got [3]",
    ),
    "table sequences": (
        {"block_table": torch.zeros(3, 5, dtype=torch.int32)},
        ValueError,
        "got [3, 5]",
    ),
    "table device": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32, device=META)},
        ValueError,
        "block_table must be on the device of query (cpu), got meta",
    ),
    "lengths dtype": (
        {"seq_lens": torch.tensor([9.0, 4.0])},
        TypeError,
        "seq_lens must be int32 or int64, got float32",
    ),
    "lengths axes": ({"seq_lens": torch.tensor([[9, 4]])}, ValueError, "seq_lens must be"),
    "length negative": (
        {"seq_lens": torch.tensor([9, -1])},
        ValueError,
        "seq_lens must not be negative, got -1 for sequence 1",
    ),
    "starts dtype": (
        {"query_start_loc": torch.tensor([0, 3, 5], dtype=torch.uint8)},
        TypeError,
        "query_start_loc must be int32 or int64, got uint8",
    ),
    "starts count": (
        {"query_start_loc": torch.tensor([0, 5])},
        ValueError,
        "query_start_loc must be [sequences + 1] of shape [3], got [2]",
    ),
    "starts first": (
        {"query_start_loc": torch.tensor([1, 3, 5])},
        ValueError,
        "query_start_loc must start at 0, got 1",
    ),
    "starts order": (
        {"query_start_loc": torch.tensor([0, 6, 5])},
        ValueError,
        "query_start_loc must not decrease, got 5 after 6",
    ),
    "starts last": (
        {"query_start_loc": torch.tensor([0, 3, 4])},
        ValueError,
        "query_start_loc must end at the number of query tokens (5), got 4",
    ),
    "table narrow": (
        {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
        ValueError,
        "block_table must have 3 entries for the 9 tokens of sequence 0 in blocks of 4, got 2",
    ),
    "table value": (
        {"block_table": torch.tensor([[0, 1, 2], [6, 0, 0]])},
        ValueError,
        "block_table must name blocks from 0 to 5, got 6 for entry 0 of sequence 1",
    ),
    "scale": ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
    "slopes": (
        features(alibi_slopes=torch.ones(5)),
        ValueError,
        "alibi_slopes must be [query heads] of shape [6], got [5]",
    ),
    "sinks": (
        features(sink_logits=torch.ones(6, 1)),
        ValueError,
        "sink_logits must be [query heads] of shape [6], got [6, 1]",
    ),
    "sinks device": (
        features(sink_logits=torch.ones(6, device=META)),
        ValueError,
        "sink_logits must be on the device of query (cpu), got meta",
    ),
    "tree not square": (
        features(query_query_bias=torch.ones(3, 4)),
        ValueError,
        "query_query_bias must be [S, S] or [sequences, S, S] with 2 sequences, got [3, 4]",
    ),
    "trees": (
        features(query_query_bias=torch.ones(3, 4, 4)),
        ValueError,
        "with 2 sequences, got [3, 4, 4]",
    ),
    "tree axes": (features(query_query_bias=torch.ones(4)), ValueError, "got [4]"),
    "bias tokens": (
        features(logit_bias=torch.ones(2, 6, 9)),
        ValueError,
        "logit_bias must be [5 or 1, 6 or 1, keys], got [2, 6, 9]",
    ),
    "bias heads": (features(logit_bias=torch.ones(5, 2, 9)), ValueError, "got [5, 2, 9]"),
    "bias axes": (features(logit_bias=torch.ones(6, 9)), ValueError, "got [6, 9]"),
    "bias keys": (
        features(logit_bias=torch.ones(1, 1, 8)),
        ValueError,
        "logit_bias must be at least as long as the longest sequence (9), got 8",
    ),
    "first_key": (
        features(first_key=torch.tensor([0])),
        ValueError,
        "first_key must be [sequences] of shape [2], got [1]",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(change, error, message):
    good = arguments()
    paged_attention(**good)
    with pytest.raises(error, match=re.escape(message)):
        paged_attention(**(good | change))


BAD_FEATURES = {
    "window type": ({"window": 2.0}, TypeError, "window must be an int, got float"),
    "window bool": ({"window": True}, TypeError, "window must be an int, got bool"),
    "window": ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    "cap": ({"soft_cap": 0.0}, ValueError, "soft_cap must be positive and finite, got 0.0"),
    "cap nan": ({"soft_cap": math.nan}, ValueError, "soft_cap must be positive and finite"),
    "cap inf": ({"soft_cap": math.inf}, ValueError, "soft_cap must be positive and finite"),
    "slopes": ({"alibi_slopes": [0.5]}, TypeError, "alibi_slopes must be a torch.Tensor"),
    "sinks": (
        {"sink_logits": torch.ones(6, dtype=torch.bfloat16)},
        TypeError,
        "sink_logits must be float32, got bfloat16",
    ),
    "tree": (
        {"query_query_bias": torch.ones(2, 2, dtype=torch.bool)},
        TypeError,
        "query_query_bias must be float32, got bool",
    ),
    "bias": (
        {"logit_bias": torch.ones(1, 1, 9, dtype=torch.float64)},
        TypeError,
        "logit_bias must be float32, got float64",
    ),
    "first_key": (
        {"first_key": torch.tensor([1.0])},
        TypeError,
        "first_key must be int32 or int64, got float32",
    ),
}


@pytest.mark.parametrize(("fields", "error", "message"), BAD_FEATURES.values(), ids=BAD_FEATURES)
def test_bad_features(fields, error, message):
    with pytest.raises(error, match=re.escape(message)):
        AttentionFeatures(**fields)


def merge_part(dim: int = 4, lse_shape: tuple = (2, 3), dtype: torch.dtype = torch.float32):
    return AttentionOutput(torch.zeros(2, 3, dim, dtype=dtype), torch.zeros(lse_shape))


BAD_MERGES = {
    "none": ([], None, ValueError, "parts must hold at least one attention output, got none"),
    "log-sum-exp dtype": (
        [AttentionOutput(torch.ones(1, 1, 4), torch.ones(1, 1, dtype=torch.int64))],
        None,
        TypeError,
        "log_sum_exp must be float32 or float64, got int64",
    ),
    "log-sum-exp": (
        [merge_part(lse_shape=(3, 2))],
        None,
        ValueError,
        "log_sum_exp must be [tokens, heads] of shape [2, 3], got [3, 2]",
    ),
    "shape": (
        [merge_part(), merge_part(dim=5)],
        None,
        ValueError,
        "output must be as in the first part, of shape [2, 3, 4], got [2, 3, 5]",
    ),
    "dtype": (
        [merge_part(), merge_part(dtype=torch.float16)],
        None,
        TypeError,
        "output must be float32, got float16",
    ),
    "sinks": (
        [merge_part()],
        torch.ones(2),
        ValueError,
        "sink_logits must be [query heads] of shape [3], got [2]",
    ),
    "sinks dtype": (
        [merge_part()],
        torch.ones(3, dtype=torch.float64),
        TypeError,
        "sink_logits must be float32, got float64",
    ),
}


@pytest.mark.parametrize(
    ("parts", "sinks", "error", "message"), BAD_MERGES.values(), ids=BAD_MERGES
)
def test_bad_merges(parts, sinks, error, message):
    with pytest.raises(error, match=re.escape(message)):
        merge_attention(parts, sinks)


def test_the_first_offender_is_named():
    table = torch.tensor([[0, 9, 8], [7, 0, 0]])
    with pytest.raises(ValueError, match="got 9 for entry 1 of sequence 0"):
        paged_attention(**(arguments() | {"block_table": table}))


@pytest.mark.parametrize(
    ("most", "error", "message"),
    [
        (0, ValueError, "max_query_len must be at least 1, got 0"),
        (True, TypeError, "max_query_len must be an int, got bool"),
        (1.5, TypeError, "max_query_len must be an int, got float"),
        (1, ValueError, "query_start_loc must give a sequence at most max_query_len (1) queries"),
    ],
)
def test_a_promise_of_few_queries(most, error, message):
    batch = make_batch([9, 4], [2, 1])
    same_bits = batch.run(max_query_len=2)
    assert same(same_bits, batch.run())
    with pytest.raises(error, match=re.escape(message)):
        batch.run(max_query_len=most)
