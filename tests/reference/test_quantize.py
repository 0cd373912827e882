"""The write path and its inverse: the oracle's bits, whatever else is in the call."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq.analysis.planted_rows import KINDS, planted_rows
from kvq.modes import INT4_FIRST_IMPLEMENTATION, MODES, Mode
from kvq.modes import mode as find_mode
from kvq.reference import dequantize, quantize, quantize_stochastic, unpack_codes
from kvq.rounding import Rounding
from kvq.scale_word import StoredWord
from kvq.tier import word_dtype
from tests import oracle
from tests.cases import (
    CASES,
    DTYPES,
    VARIANTS,
    Case,
    rows_beside_thresholds,
    rows_beside_zero_point_ties,
)
from tests.compare import assert_bit_exact
from tests.expected import expected, sign_rows

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=str)
INT8, FP8, INT4, INT2 = (find_mode(name) for name in ("int8", "fp8", "int4", "int2"))


def assert_as_expected(x: Tensor, mode: Mode) -> None:
    if mode.trellis is not None:
        # The oracle searches some hundred rows a second.
        x = x[:8, :2] if x.ndim == 3 else x[::20]
    want = expected(x, mode)
    got = quantize(x, mode)
    assert_bit_exact(got.codes.cpu(), want.codes, "codes")
    assert_bit_exact(got.words.cpu(), want.words, "words")
    values = dequantize(*got, mode, x.shape[-1])
    assert values.device == x.device
    assert_bit_exact(values.cpu(), want.values, "values")


def oracle_rows(head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(oracle.planted_rows(head_dim)).to(dtype)


# ---------------------------------------------------------------------------------- the oracle


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_the_oracles_bits(case: Case, device: torch.device) -> None:
    assert_as_expected(case.x(device), case.mode)


@every_mode
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.float32), (96, torch.float16), (96, torch.bfloat16)],
    ids=str,
)
def test_planted_rows_have_the_oracles_bits(mode: Mode, head_dim: int, dtype: torch.dtype) -> None:
    assert_as_expected(oracle_rows(head_dim, dtype), mode)


@pytest.mark.parametrize("mode", VARIANTS.values(), ids=str)
def test_modes_that_anybody_can_make_have_the_oracles_bits(mode: Mode) -> None:
    assert_as_expected(oracle_rows(96), mode)
    rounds_to_input = mode.rotation is not None and mode.rotation.round_to_input
    for dtype in (torch.float16, torch.bfloat16) if rounds_to_input else ():
        assert_as_expected(oracle_rows(96, dtype), mode)


@pytest.mark.parametrize("name", ["int2", "lloyd4", "lloyd2_search", "smax3", "smax3_search"])
def test_numbers_beside_thresholds(name: str) -> None:
    mode = find_mode(name).without_rotation()
    assert_as_expected(rows_beside_thresholds(mode), mode)


@pytest.mark.parametrize("mode", [INT4, INT4_FIRST_IMPLEMENTATION], ids=str)
def test_zero_points_beside_ties(mode: Mode) -> None:
    assert_as_expected(rows_beside_zero_point_ties(), mode.without_rotation())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_int4_as_its_first_implementation_encoded_it(head_dim: int, dtype: torch.dtype) -> None:
    x = oracle_rows(head_dim, dtype)
    rows = x.float().numpy()
    codes, words = oracle.first_implementation_int4(rows, str(dtype).removeprefix("torch."))
    got = quantize(x, INT4_FIRST_IMPLEMENTATION)
    assert_bit_exact(got.codes, torch.from_numpy(codes), "codes")
    assert_bit_exact(got.words, torch.from_numpy(words.view(np.float32)), "words")
    values = oracle.decode(
        INT4.name, codes, words, head_dim, signs=[oracle.first_implementation_signs(head_dim)]
    )
    read = dequantize(*got, INT4_FIRST_IMPLEMENTATION, head_dim)
    assert_bit_exact(read, torch.from_numpy(values), "values")


@pytest.mark.parametrize("name", ["smax2", "smax3", "smax4"])
def test_thresholds_belong_to_the_level_above(name: str) -> None:
    # Unrotated rows with a largest entry of 1 meet the thresholds of a signed-max codebook
    # exactly; their float32 neighbors fall to either side.
    mode = find_mode(name).without_rotation()
    assert mode.codebook is not None
    thresholds = torch.tensor(mode.codebook.thresholds)
    lanes = slice(1, 1 + len(thresholds))
    x = torch.zeros(3, 64)
    x[:, 0] = 1.0
    x[0, lanes] = torch.nextafter(thresholds, torch.tensor(torch.inf))
    x[1, lanes] = thresholds
    x[2, lanes] = torch.nextafter(thresholds, torch.tensor(-torch.inf))
    codes = unpack_codes(quantize(x, mode).codes, mode.bits, 64)[:, lanes]
    index = list(range(len(thresholds)))
    above = [i + 1 for i in index]
    assert codes.tolist() == [above, above, index]


@pytest.mark.parametrize("name", ["smax2", "smax3", "smax4"])
def test_a_row_is_multiplied_by_the_reciprocal_of_its_signed_maximum(name: str) -> None:
    # Numbers about each threshold times a maximum: some fall to its other side when divided.
    mode = find_mode(name).without_rotation()
    assert mode.codebook is not None
    thresholds = np.array(mode.codebook.thresholds, dtype=np.float32)
    x, products, quotients = [], [], []
    for largest in np.arange(3, 203, 2, dtype=np.float32):
        middle = thresholds * largest
        lanes = np.concatenate(
            [middle, np.nextafter(middle, -largest), np.nextafter(middle, largest)]
        )
        x.append(np.resize(np.concatenate([[largest], lanes]), 64).astype(np.float32))
        for z, out in (
            (x[-1] * (np.float32(1) / largest), products),
            (x[-1] / largest, quotients),
        ):
            out.append((z[:, None] >= thresholds).sum(-1).tolist())
    assert products != quotients
    got = quantize(torch.from_numpy(np.stack(x)), mode)
    assert unpack_codes(got.codes, mode.bits, 64).tolist() == products


# ------------------------------------------------------------------------- each row for itself


@every_mode
def test_rows_alone_equal_rows_together(mode: Mode) -> None:
    x = planted_rows(0, len(KINDS), 96)
    together = quantize(x, mode)
    values = dequantize(*together, mode, 96)
    for i, row in enumerate(x):
        alone = quantize(row, mode)
        assert alone.words.shape == ()
        assert_bit_exact(alone.codes, together.codes[i], f"codes of row {i}")
        assert_bit_exact(alone.words, together.words[i], f"word of row {i}")
        assert_bit_exact(dequantize(*alone, mode, 96), values[i], f"values of row {i}")


@every_mode
@pytest.mark.parametrize("chunk", [1, 96, 96 * 7 + 5])
def test_the_size_of_a_chunk_cannot_be_seen(
    mode: Mode, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = planted_rows(0, 2 * len(KINDS) + 3, 96)
    whole = quantize(x, mode)
    values = dequantize(*whole, mode, 96)
    monkeypatch.setattr(sys.modules["kvq.reference.quantize"], "_CHUNK_CPU", chunk)
    parts = quantize(x, mode)
    assert_bit_exact(parts.codes, whole.codes)
    assert_bit_exact(parts.words, whole.words)
    assert_bit_exact(dequantize(*whole, mode, 96), values)


def test_a_batch_larger_than_a_chunk_equals_its_parts() -> None:
    x = torch.cat([planted_rows(0, 1500, 128)] * 2)
    whole = quantize(x, INT4)
    values = dequantize(*whole, INT4, 128)
    for rows in (slice(0, 1500), slice(1500, 3000)):
        part = quantize(x[:1500], INT4)
        assert_bit_exact(whole.codes[rows], part.codes)
        assert_bit_exact(whole.words[rows], part.words)
        assert_bit_exact(values[rows], dequantize(*part, INT4, 128))


@every_mode
def test_a_token_with_a_large_norm_changes_no_other_token(mode: Mode) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, 128, generator=generator)
    loud = x.clone()
    loud[:, 0] *= 25
    quiet, with_loud = quantize(x[:, 1:], mode), quantize(loud, mode)
    assert_bit_exact(with_loud.codes[:, 1:], quiet.codes)
    assert_bit_exact(with_loud.words[:, 1:], quiet.words)
    assert not torch.equal(with_loud.words[:, 0], quantize(x, mode).words[:, 0])


@every_mode
@pytest.mark.parametrize(
    ("bad", "channel"), [(torch.nan, 0), (torch.inf, 50), (-torch.inf, 95)], ids=str
)
def test_a_lane_that_is_not_finite_makes_its_own_row_nan_and_no_other(
    mode: Mode, bad: float, channel: int
) -> None:
    x = planted_rows(0, 5, 96)
    before = quantize(x, mode)
    poisoned = x.clone()
    poisoned[3, channel] = bad
    after = quantize(poisoned, mode)
    others = [0, 1, 2, 4]
    assert_bit_exact(after.codes[others], before.codes[others])
    assert_bit_exact(after.words[others], before.words[others])
    assert not after.codes[3].any()
    nan = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    nan_word = nan
    if mode.word is StoredWord.FLOAT16:
        nan_word = torch.tensor([0x7E00], dtype=torch.int16).view(torch.float16)
    assert_bit_exact(after.words[3:4], nan_word)
    values = dequantize(*after, mode, 96)
    assert_bit_exact(values[3], nan.expand(96))
    assert_bit_exact(values[others], dequantize(*before, mode, 96)[others])


# ----------------------------------------------------------------------- shapes, memory, state


@every_mode
@pytest.mark.parametrize("shape", [(32,), (0, 32), (3, 0, 32), (2, 3, 4, 32)], ids=str)
def test_any_leading_axes(mode: Mode, shape: tuple[int, ...]) -> None:
    rows = torch.Size(shape).numel() // 32
    x = planted_rows(0, rows, 32)
    got = quantize(x.view(shape), mode)
    assert got.codes.shape == (*shape[:-1], 4 * mode.bits)
    assert got.words.shape == shape[:-1]
    assert got.codes.dtype is torch.uint8
    assert got.words.dtype is word_dtype(mode)
    flat = quantize(x, mode)
    assert_bit_exact(got.codes.reshape(flat.codes.shape), flat.codes)
    assert_bit_exact(got.words.reshape(rows), flat.words)
    values = dequantize(*got, mode, 32)
    assert values.shape == shape
    assert values.dtype is torch.float32
    assert_bit_exact(values.reshape(rows, 32), dequantize(*flat, mode, 32))


@every_mode
def test_the_input_is_left_alone_and_shares_no_memory_with_the_result(mode: Mode) -> None:
    x = planted_rows(0, len(KINDS), 32)
    kept = x.clone()
    got = quantize(x, mode)
    codes, words = got.codes.clone(), got.words.clone()
    values = dequantize(*got, mode, 32)
    again = values.clone()
    assert_bit_exact(x, kept, "quantize changed its input")
    assert_bit_exact(got.codes, codes, "dequantize changed its input")
    assert_bit_exact(got.words, words, "dequantize changed its input")
    got.codes.fill_(77)
    got.words.fill_(7.0)
    assert_bit_exact(x, kept, "the result is a view of the input")
    assert_bit_exact(values, again, "the values are a view of the codes")


@every_mode
def test_strided_codes_and_words_read_like_contiguous_ones(mode: Mode) -> None:
    got = quantize(planted_rows(0, 40, 32).view(20, 2, 32), mode)
    want = dequantize(*got, mode, 32).transpose(0, 1)
    assert_bit_exact(
        dequantize(got.codes.transpose(0, 1), got.words.transpose(0, 1), mode, 32), want
    )
    buffer = torch.full((40, 4 * mode.bits + 5), 255, dtype=torch.uint8)
    codes = buffer[:, 3 : 3 + 4 * mode.bits].copy_(got.codes.view(40, -1))
    words = torch.full((40, 2), torch.nan, dtype=word_dtype(mode))[:, 1].copy_(got.words.view(40))
    assert_bit_exact(dequantize(codes, words, mode, 32), want.transpose(0, 1).reshape(40, 32))


def test_a_tensor_that_requires_grad_is_stored_without_its_graph() -> None:
    x = torch.ones(2, 32, requires_grad=True)
    got = quantize(x, INT2)
    assert not got.words.requires_grad
    assert not dequantize(*got, INT2, 32).requires_grad


@every_mode
def test_the_default_dtype_of_torch_changes_no_bit(mode: Mode) -> None:
    x = planted_rows(0, len(KINDS), 32)
    want = quantize(x, mode)
    values = dequantize(*want, mode, 32)
    torch.set_default_dtype(torch.float64)
    try:
        got = quantize(x, mode)
        read = dequantize(*got, mode, 32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_bit_exact(got.codes, want.codes)
    assert_bit_exact(got.words, want.words)
    assert_bit_exact(read, values)


@pytest.mark.parametrize(
    ("head_dim", "heads", "tokens"), [(64, 1, 42), (128, 1, 42), (64, 4, 7), (64, 1, 1)]
)
def test_small_head_counts_give_the_same_bytes_every_time(
    head_dim: int, heads: int, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, heads, head_dim, generator=generator)
    first = quantize(x, INT4)
    for _ in range(20):
        again = quantize(x, INT4)
        assert_bit_exact(again.codes, first.codes)
        assert_bit_exact(again.words, first.words)
    error = (dequantize(*first, INT4, head_dim) - x).norm(dim=-1) / x.norm(dim=-1)
    assert error.max() <= 0.25


@pytest.mark.parametrize("mode", [INT4, INT2], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_token_at_a_time_equals_all_at_once(mode: Mode, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(99)
    x = torch.randn(8, 17, head_dim, generator=generator)
    whole = quantize(x, mode)
    for cuts in ([16, 1], [1] * 17):
        parts = [quantize(part, mode) for part in x.split(cuts, dim=1)]
        assert_bit_exact(torch.cat([part.codes for part in parts], 1), whole.codes)
        assert_bit_exact(torch.cat([part.words for part in parts], 1), whole.words)


def test_changing_one_lane_changes_one_nibble() -> None:
    generator = torch.Generator().manual_seed(0)
    mode = INT4.without_rotation()
    x = torch.randn(1, 64, generator=generator)
    x[0, 0], x[0, 1] = 4.0, -4.0
    before = unpack_codes(quantize(x, mode).codes, 4, 64)
    for channel in range(2, 64):
        changed = x.clone()
        changed[0, channel] += 2.0 if x[0, channel] < 0 else -2.0
        after = unpack_codes(quantize(changed, mode).codes, 4, 64)
        assert (after != before).nonzero().tolist() == [[0, channel]]


# ----------------------------------------------------------------------------------- refusals


def rows(head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones((2, head_dim), dtype=dtype)


def read(name: str, head_dim: int, **changes: Tensor) -> Tensor:
    mode = find_mode(name)
    codes = torch.zeros((2, mode.bytes_per_row(16)), dtype=torch.uint8)
    arguments = {"codes": codes, "words": torch.zeros(2), **changes}
    return dequantize(arguments["codes"], arguments["words"], mode, head_dim)


def whole_bytes(multiple: int, bits: int, head_dim: int) -> str:
    return (
        f"head_dim must be a positive multiple of {multiple} to fill whole bytes with "
        f"{bits}-bit codes, got {head_dim}"
    )


def mixes(head_dim: int) -> str:
    return f"head_dim must be divisible by 16 for a Hadamard rotation, got {head_dim}"


REFUSALS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: quantize(rows(32, torch.float64), INT8),
        TypeError,
        "x must be float32, float16 or bfloat16, got float64",
    ),
    (
        lambda: quantize(rows(32, torch.int8), INT8),
        TypeError,
        "x must be float32, float16 or bfloat16, got int8",
    ),
    (
        lambda: quantize([1.0], INT8),  # type: ignore[arg-type]
        TypeError,
        "x must be a torch.Tensor, got list",
    ),
    (
        lambda: quantize(torch.tensor(1.0), INT8),
        ValueError,
        "x must have at least one axis, got a scalar",
    ),
    (lambda: quantize(rows(0), INT8), ValueError, whole_bytes(1, 8, 0)),
    (lambda: quantize(rows(63), INT4), ValueError, whole_bytes(2, 4, 63)),
    (lambda: quantize(rows(66), INT2), ValueError, whole_bytes(4, 2, 66)),
    (lambda: quantize(rows(100), find_mode("lloyd3")), ValueError, whole_bytes(8, 3, 100)),
    (lambda: quantize(rows(12), find_mode("lloyd1")), ValueError, whole_bytes(8, 1, 12)),
    (lambda: quantize(rows(72), INT4), ValueError, mixes(72)),
    (lambda: quantize(rows(8), find_mode("smax3")), ValueError, mixes(8)),
    (lambda: quantize(rows(40), find_mode("affine4")), ValueError, mixes(40)),
    (
        lambda: quantize(rows(32), INT8.with_rounding(Rounding.STOCHASTIC)),
        ValueError,
        "rounding must be deterministic here, got stochastic "
        "(see kvq.reference.quantize_stochastic)",
    ),
    (
        lambda: quantize_stochastic(rows(32), INT2, torch.Generator()),
        ValueError,
        "mode must round to do so stochastically, got int2_per_token_head",
    ),
    (
        lambda: quantize_stochastic(rows(32, torch.float64), INT8, torch.Generator()),
        TypeError,
        "x must be float32, float16 or bfloat16, got float64",
    ),
    *(
        (
            lambda mode=mode, size=size: mode.head_dim(size),
            ValueError,
            f"bytes_per_row must hold whole {mode.bits}-bit codes, got {size}",
        )
        for mode, size in ((INT4, 0), (INT8, -1), (find_mode("lloyd3"), 4))
    ),
    (lambda: read("int4", 63), ValueError, whole_bytes(2, 4, 63)),
    (lambda: read("int4", 0), ValueError, whole_bytes(2, 4, 0)),
    (lambda: read("int4", 40), ValueError, mixes(40)),
    (
        lambda: read("int4", 32),
        ValueError,
        "codes must be [2, 16] to go with words [2] and head_dim 32, got [2, 8]",
    ),
    (
        lambda: read("int8", 16, words=torch.zeros(3)),
        ValueError,
        "codes must be [3, 16] to go with words [3] and head_dim 16, got [2, 16]",
    ),
    (
        lambda: read("int8", 16, words=torch.zeros(2, 1)),
        ValueError,
        "codes must be [2, 1, 16] to go with words [2, 1] and head_dim 16, got [2, 16]",
    ),
    (
        lambda: read("int8", 16, codes=torch.zeros(2, 16, dtype=torch.int8)),
        TypeError,
        "codes must be uint8, got int8",
    ),
    (
        lambda: read("int8", 16, words=torch.zeros(2, dtype=torch.float16)),
        TypeError,
        "words must be float32, got float16",
    ),
    (
        lambda: dequantize(torch.zeros(1, 16, dtype=torch.uint8), 1.0, INT8, 16),  # type: ignore[arg-type]
        TypeError,
        "words must be a torch.Tensor, got float",
    ),
    (
        lambda: dequantize("codes", torch.zeros(1), INT8, 16),  # type: ignore[arg-type]
        TypeError,
        "codes must be a torch.Tensor, got str",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS)
def test_refusals(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()


def test_a_mode_without_rotation_takes_any_head_size_that_fills_bytes() -> None:
    for head_dim in (2, 6, 66, 72):
        assert_as_expected(oracle_rows(128)[:50, :head_dim], INT4.without_rotation())
    assert sign_rows(None, 6) == []
    assert INT4.without_rotation().head_dim(1) == 2
    for head_dim in (1, 7, 63):
        x = oracle_rows(128)[:50, :head_dim]
        assert_as_expected(x, INT8)
        assert_as_expected(x, FP8)
