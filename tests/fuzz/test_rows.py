"""Rows of any kind, in any memory, in any mode: three implementations, one answer to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq import reference
from kvq.codebooks import Codebook
from kvq.modes import Mode
from kvq.scale_word import StoredWord
from tests import oracle
from tests.compare import assert_bit_exact
from tests.expected import expected, expected_values, sign_rows
from tests.fuzz.strategies import (
    DEVICE,
    TIERS,
    dtypes,
    examples,
    head_dims,
    inputs,
    modes,
    rotations,
    rows,
    seeds,
    tier_of,
    views,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw_rows(data: st.DataObject, mode: Mode, most: int = 6) -> Tensor:
    """`[T, H, D]` that a mode can take, in some memory."""
    tokens, heads = data.draw(st.integers(1, most)), data.draw(st.integers(1, 3))
    if mode.trellis is not None:
        tokens, heads = min(tokens, 2), 1  # the oracle searches row by row
    head_dim = data.draw(head_dims(mode))
    x = data.draw(rows(tokens, heads, head_dim, data.draw(dtypes)))
    if mode.codebook is not None and data.draw(st.booleans()):
        x[0, 0] = at_thresholds(mode.codebook, head_dim, data.draw(seeds))
    return data.draw(inputs(x))


def at_thresholds(codebook: Codebook, head_dim: int, seed: int) -> Tensor:
    """Numbers on thresholds and beside them, for what divides by a largest entry of 1."""
    generator = np.random.default_rng(seed)
    within = [t for t in codebook.thresholds if abs(t) < 1] or [0.0]
    row = generator.choice(np.array(within, dtype="f4"), head_dim)
    beside = np.nextafter(row, generator.choice(np.array([-2.0, 2.0], dtype="f4"), head_dim))
    row = np.where(generator.random(head_dim) < 0.3, beside, row)
    row[generator.integers(0, head_dim)] = 1.0
    return torch.from_numpy(row)


def assert_same_numbers(actual: Tensor, wanted: Tensor, what: str) -> None:
    """To the bit, but for the bits of a NaN that arithmetic made: they are the machine's."""
    assert_bit_exact(
        actual.masked_fill(actual.isnan(), torch.nan).cpu(),
        wanted.masked_fill(wanted.isnan(), torch.nan),
        what,
    )


@examples(120)
@given(data=st.data())
def test_the_reference_is_the_oracle(data: st.DataObject) -> None:
    mode = data.draw(modes)
    x = draw_rows(data, mode)
    want = expected(x.clone(memory_format=torch.contiguous_format), mode)
    got = reference.quantize(x, mode)
    assert_bit_exact(got.codes, want.codes, "codes")
    assert_bit_exact(got.words, want.words, "words")
    assert_bit_exact(reference.dequantize(*got, mode, x.shape[-1]), want.values, "values")


@examples(40)
@given(data=st.data())
def test_the_kernels_are_the_reference(data: st.DataObject) -> None:
    kernels = tier_of("kernels")
    mode = data.draw(modes)
    x = draw_rows(data, mode)
    want = reference.quantize(x, mode)
    got = kernels.quantize(x, mode)
    assert_bit_exact(got.codes, want.codes, "codes")
    assert_bit_exact(got.words, want.words, "words")
    stored = data.draw(inputs(want.codes)), data.draw(inputs(want.words))
    assert_bit_exact(
        kernels.dequantize(*stored, mode, x.shape[-1]),
        reference.dequantize(*(part.clone() for part in stored), mode, x.shape[-1]),
        "values",
    )


def draw_stored(data: st.DataObject, mode: Mode) -> tuple[Tensor, Tensor, int]:
    """Codes and words that no writer wrote, and their head size."""
    head_dim, count = data.draw(head_dims(mode)), data.draw(st.integers(1, 6))
    generator = np.random.default_rng(data.draw(seeds))
    codes = generator.integers(0, 256, (count, mode.bytes_per_row(head_dim)), dtype=np.uint8)
    half = mode.word is StoredWord.FLOAT16
    words = generator.integers(0, 2**16 if half else 2**32, count).astype("u2" if half else "u4")
    # Any bits are seldom those of a number of ordinary size.
    tame = generator.standard_normal(count).astype("f2" if half else "f4").view(words.dtype)
    words = np.where(generator.random(count) < 0.5, words, tame)
    return torch.from_numpy(codes), torch.from_numpy(words.view("f2" if half else "f4")), head_dim


@pytest.mark.parametrize("name", TIERS)
@examples(40)
@given(data=st.data())
def test_codes_and_words_that_nobody_wrote(name: str, data: st.DataObject) -> None:
    mode = data.draw(modes)
    codes, words, head_dim = draw_stored(data, mode)
    got = tier_of(name).dequantize(
        data.draw(views(codes)).tensor, data.draw(views(words)).tensor, mode, head_dim
    )
    assert_same_numbers(got, expected_values(codes, words, mode, head_dim), "values")


@pytest.mark.parametrize("name", TIERS)
@examples(30)
@given(data=st.data())
def test_a_row_depends_on_itself_alone(name: str, data: st.DataObject) -> None:
    """Whatever its companions, its place among them and the memory that it lies in."""
    tier, mode = tier_of(name), data.draw(modes)
    x = draw_rows(data, mode).flatten(0, 1)
    codes, words = tier.quantize(x, mode)
    chosen = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=4))
    elsewhere = tier.quantize(data.draw(views(x[chosen])).tensor, mode)
    assert_bit_exact(elsewhere.codes, codes[chosen], "codes of a selection")
    assert_bit_exact(elsewhere.words, words[chosen], "words of a selection")
    others = [row for row in range(len(x)) if row not in chosen]
    spoiled = x.clone()
    spoiled[others] = data.draw(st.sampled_from((torch.nan, -torch.inf, 0.0, 1e30)))
    among = tier.quantize(spoiled, mode)
    assert_bit_exact(among.codes[chosen], codes[chosen], "codes in other company")
    assert_bit_exact(among.words[chosen], words[chosen], "words in other company")


@examples(60)
@given(data=st.data())
def test_packing(data: st.DataObject) -> None:
    """Any codes, any bytes, any strides: the oracle's bytes and back, in both tiers."""
    bits = data.draw(st.sampled_from((1, 2, 3, 4, 8)))
    head_dim = data.draw(st.integers(1, 40)) * (8 // np.gcd(8, bits).item())
    shape = (data.draw(st.integers(1, 5)), head_dim)
    generator = np.random.default_rng(data.draw(seeds))
    drawn = generator.integers(0, 2**bits, shape, dtype=np.uint8)
    codes = data.draw(inputs(torch.from_numpy(drawn)))
    packed = torch.from_numpy(oracle.pack(codes.cpu().numpy(), bits))
    everything = generator.integers(0, 256, packed.shape, dtype=np.uint8)
    raw = data.draw(inputs(torch.from_numpy(everything)))
    unpacked = torch.from_numpy(oracle.unpack(raw.cpu().numpy(), bits, head_dim))
    for name in TIERS:
        tier = tier_of(name)
        assert_bit_exact(tier.pack_codes(codes, bits), packed, f"{name} packed")
        back = tier.unpack_codes(packed.to(DEVICE), bits, head_dim)
        assert_bit_exact(back, codes, f"{name} back")
        assert_bit_exact(tier.unpack_codes(raw, bits, head_dim), unpacked, f"{name} unpacked")
        assert_bit_exact(
            tier.pack_codes(tier.unpack_codes(raw, bits, head_dim), bits), raw, f"{name} again"
        )


@pytest.mark.parametrize("name", TIERS)
@examples(30)
@given(data=st.data())
def test_hadamard_transform(name: str, data: st.DataObject) -> None:
    rotation, inverse = data.draw(rotations), data.draw(st.booleans())
    head_dim = 16 * data.draw(st.integers(1, 8))
    x = data.draw(rows(data.draw(st.integers(1, 4)), 1, head_dim, data.draw(dtypes)))
    x = data.draw(inputs(x))
    wide = x.to("cpu", torch.float32).flatten(0, 1).numpy()
    if inverse:
        wide = wide * np.float32(1.0 / rotation.gain(head_dim))
    want = oracle.hadamard(wide, sign_rows(rotation, head_dim), inverse)
    got = tier_of(name).hadamard_transform(x, rotation, inverse=inverse)
    assert_same_numbers(got, torch.from_numpy(want).view(x.shape), "rotated")
