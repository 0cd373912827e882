"""Attention over any paged cache: within its budget, and the same bits whatever is irrelevant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq.modes import Mode
from kvq.tier import AttentionFeatures, AttentionOutput, Layout, PagedKV
from tests.attention_budget import assert_within_budget
from tests.attention_cases import Batch, make_batch
from tests.compare import assert_bit_exact
from tests.fuzz.strategies import (
    INDEX_DTYPES,
    TIERS,
    dtypes,
    examples,
    head_dims,
    ordinary_modes,
    seeds,
    tier_of,
    views,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FEATURES = tuple(AttentionFeatures.__dataclass_fields__)
LONGEST = 24


@st.composite
def sequences_of_rows(draw: st.DrawFn, lengths: list[int], heads: int, dim: int) -> list[Tensor]:
    """Rows of ordinary size, and now and then one of zeros, of NaN, of one number, tiny, large."""
    generator = np.random.default_rng(draw(seeds))
    special = draw(st.sampled_from((0.0, 0.0, 0.1, 0.4)))
    found = []
    for length in lengths:
        x = generator.standard_normal((length, heads, dim))
        for row in x.reshape(-1, dim):
            if generator.random() < special:
                kind = generator.integers(0, 6)
                row[:] = (0.0, math.nan, row[0], row * 2.0**-12, row * 16.0, row)[kind]
                row[generator.integers(0, dim)] *= 20.0 if kind == 5 else 1.0
        found.append(torch.from_numpy(x.astype("f4")))
    return found


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged sequences in shuffled blocks, in any memory; table entries past the end are junk."""
    lengths = draw(
        st.lists(
            st.tuples(
                st.one_of(st.integers(0, 9), st.integers(0, LONGEST)),
                st.one_of(st.integers(0, 2), st.just(1), st.integers(0, 9)),
            ),
            min_size=1,
            max_size=3,
        )
    )
    seq_lens, q_lens = ([pair[side] for pair in lengths] for side in range(2))
    modes: tuple[Mode, Mode] = (draw(ordinary_modes), draw(ordinary_modes))
    dims = (draw(head_dims(modes[0], 64)), draw(head_dims(modes[1], 64)))
    kv_heads = draw(st.integers(1, 2))
    keys, values = (draw(sequences_of_rows(seq_lens, kv_heads, dim)) for dim in dims)
    batch = make_batch(
        seq_lens,
        q_lens,
        heads=(kv_heads * draw(st.integers(1, 4)), kv_heads),
        dims=dims,
        modes=modes,
        block_size=draw(st.sampled_from((1, 2, 3, 4, 7, 16))),
        layout=draw(st.sampled_from(Layout)),
        dtype=draw(dtypes),
        seed=draw(seeds),
        keys=keys,
        values=values,
        spare_entries=draw(st.integers(0, 2)),
    )
    batch.scale = draw(st.sampled_from((0.0, 0.3, 1.0, 4.0))) / math.sqrt(dims[0])
    return draw(elsewhere(batch))


@st.composite
def elsewhere(draw: st.DrawFn, batch: Batch, align: int = 1) -> Batch:
    """The same in other memory, with rows of codes at multiples of `align` bytes."""

    def side(cache: PagedKV) -> PagedKV:
        codes = draw(views(cache.codes, dense_last=True, align=align)).tensor
        return cache._replace(codes=codes, words=draw(views(cache.words)).tensor)

    return replace(
        batch,
        query=draw(views(batch.query)).tensor,
        key_cache=side(batch.key_cache),
        value_cache=side(batch.value_cache),
        block_table=draw(views(batch.block_table)).tensor,
    )


@st.composite
def features_of(draw: st.DrawFn, batch: Batch) -> AttentionFeatures:
    """Some features of attention, with numbers that matter."""
    names = draw(st.sets(st.sampled_from(FEATURES)))
    generator = np.random.default_rng(draw(seeds))
    tokens, heads, sequences = *batch.query.shape[:2], len(batch.seq_lens)
    longest = max(batch.seq_lens, default=0)

    def tensor(*shape: int, hidden: float = 0.0) -> Tensor:
        x = generator.standard_normal(shape)
        x = np.where(generator.random(shape) < hidden, -math.inf, x)
        return draw(views(torch.from_numpy(x.astype("f4")))).tensor

    fields: dict = {}
    if "window" in names:
        fields["window"] = draw(st.integers(1, LONGEST + 2))
    if "soft_cap" in names:
        fields["soft_cap"] = draw(st.sampled_from((0.5, 3.0, 50.0)))
    if "alibi_slopes" in names:
        fields["alibi_slopes"] = tensor(heads)
    if "sink_logits" in names:
        fields["sink_logits"] = tensor(heads, hidden=0.2)
    if "query_query_bias" in names:
        size = draw(st.integers(1, 6))
        shape = (sequences, size, size) if draw(st.booleans()) else (size, size)
        fields["query_query_bias"] = tensor(*shape, hidden=0.3)
    if "logit_bias" in names:
        # Too short a bias is refused by a check; without it the keys past its end have none.
        keys = max(1, longest + draw(st.integers(-3, 3)))
        rows, columns = draw(st.sampled_from((1, tokens))), draw(st.sampled_from((1, heads)))
        fields["logit_bias"] = tensor(rows, columns, keys, hidden=0.3)
    if "first_key" in names:
        dtype = draw(st.sampled_from(INDEX_DTYPES))
        limits = torch.iinfo(dtype)
        first = st.one_of(
            st.integers(-3, LONGEST + 3),
            st.sampled_from((limits.min, limits.max, limits.max // 3)),
        )
        chosen = draw(st.lists(first, min_size=sequences, max_size=sequences))
        fields["first_key"] = draw(views(torch.tensor(chosen, dtype=dtype))).tensor
    return AttentionFeatures(**fields)


def run(
    name: str,
    batch: Batch,
    features: AttentionFeatures,
    dtype: torch.dtype = torch.int64,
    most: int | None = None,
) -> AttentionOutput:
    tier = tier_of(name)
    return batch.run(features, tier=tier, check=False, index_dtype=dtype, max_query_len=most)


def assert_same(actual: Sequence[Tensor], wanted: Sequence[Tensor], what: str) -> None:
    for got, want in zip(actual, wanted, strict=True):
        assert_bit_exact(
            got.masked_fill(got.isnan(), math.nan), want.masked_fill(want.isnan(), math.nan), what
        )


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences as short as these are split among programs of the kernels."""
    launch = pytest.importorskip("kvq.kernels.launch")
    monkeypatch.setattr(launch, "LEAST_SPLIT", 16)


@pytest.mark.usefixtures("short_splits")
@examples(12)
@given(data=st.data())
def test_the_kernels_are_within_budget(data: st.DataObject) -> None:
    """The reference is compared with loops over keys in `tests/reference/test_attention.py`."""
    batch = data.draw(batches())
    features = data.draw(features_of(batch))
    if batch.block_table.numel() and data.draw(st.integers(0, 3)) == 0:
        # A block that does not exist; if the sequence needs it, all of it is NaN.
        place = data.draw(st.integers(0, batch.block_table.numel() - 1))
        row, column = divmod(place, batch.block_table.shape[1])
        batch.block_table[row, column] = data.draw(st.sampled_from((-1, -(2**31), 2**31 - 1)))
    dtype = data.draw(st.sampled_from(INDEX_DTYPES))
    assert_within_budget(batch, features, tier=tier_of("kernels"), check=False, index_dtype=dtype)


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.usefixtures("short_splits")
@examples(6)
@given(data=st.data())
def test_what_is_irrelevant_changes_no_bit(name: str, data: st.DataObject) -> None:
    """Memory, index type, junk, a promise of few queries.

    The kernels read two bytes at a time where rows lie on even ones, and then sum in another
    order, so all memory is aligned here.
    """
    batch = data.draw(elsewhere(data.draw(batches()), align=2))
    features = data.draw(features_of(batch))
    want = run(name, batch, features)
    moved = data.draw(elsewhere(batch, align=2))
    moved.block_table[batch.block_table >= len(batch.key_cache.codes)] = data.draw(
        st.sampled_from((-1, 2**31 - 1))
    )
    dtype = data.draw(st.sampled_from(INDEX_DTYPES))
    most = max(batch.q_lens) + 1 if data.draw(st.booleans()) else None
    assert_same(run(name, moved, features, dtype, most), want, "elsewhere")


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.usefixtures("short_splits")
@examples(6)
@given(data=st.data())
def test_a_sequence_answers_alike_in_any_batch(name: str, data: st.DataObject) -> None:
    batch = data.draw(batches())
    features = data.draw(features_of(batch))
    want = run(name, batch, features)
    places = st.integers(0, len(batch.seq_lens) - 1)
    order = data.draw(st.lists(places, min_size=1, max_size=4))
    starts = batch.starts
    tokens = [t for s in order for t in range(starts[s], starts[s + 1])]
    changes: dict = {}
    bias = features.logit_bias
    if bias is not None and bias.shape[0] > 1:
        changes["logit_bias"] = bias[tokens]
        if len(tokens) == 0:
            changes["logit_bias"] = bias[:1]
    if features.query_query_bias is not None and features.query_query_bias.ndim == 3:
        changes["query_query_bias"] = features.query_query_bias[order]
    if features.first_key is not None:
        changes["first_key"] = features.first_key[order]
    other = run(name, batch.only(*order), replace(features, **changes))
    assert_same(other, [part[tokens] for part in want], f"of sequences {order}")
