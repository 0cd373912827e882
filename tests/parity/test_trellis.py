"""Trellis codes in the kernel tier: the search, and the operands that attention makes of codes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvq import reference
from kvq.analysis.planted_rows import planted_rows, random_rows
from kvq.modes import MODES, Grid, Mode
from kvq.modes import mode as find_mode
from kvq.tier import new_paged_kv
from kvq.trellis import TRELLISES
from tests.attention_budget import assert_within_budget
from tests.attention_cases import INT4, make_batch, with_odd_rows
from tests.compare import assert_bit_exact
from tests.ptx import halves_of, run_ptx, run_ptx_to

kernels = pytest.importorskip("kvq.kernels")
launch = pytest.importorskip("kvq.kernels.launch")
operands = pytest.importorskip("kvq.kernels.operands")
side_spec = pytest.importorskip("kvq.kernels.side_spec")
trellis_operands = pytest.importorskip("kvq.kernels.trellis_operands")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRELLIS_MODES = [mode for mode in MODES.values() if mode.grid is Grid.TRELLIS]
TRELLIS2, TRELLIS3 = find_mode("trellis2"), find_mode("trellis3")
MASK = np.uint64(0xFFFF)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("head_dim", [16, 48, 64])
@pytest.mark.parametrize("mode", TRELLIS_MODES, ids=str)
def test_search_and_decode(mode: Mode, head_dim: int) -> None:
    rows = torch.cat([planted_rows(0, 20, head_dim), random_rows(0, 9, head_dim)]).to(DEVICE)
    want = reference.quantize(rows, mode)
    got = kernels.quantize(rows, mode)
    assert_bit_exact(got.codes, want.codes, "codes")
    assert_bit_exact(got.words, want.words, "words")
    assert_bit_exact(
        kernels.dequantize(*want, mode, head_dim), reference.dequantize(*want, mode, head_dim)
    )


@pytest.mark.parametrize("bits", [2, 3])
def test_equal_candidates_take_the_lowest(bits: int) -> None:
    """All numbers on a grid and levels too: most costs meet others that are equal."""
    trellis = next(row for row in TRELLISES.values() if row.bits == bits)
    count = len(trellis.steps)
    steps = tuple(2 * (i % 4) - 3 for i in range(count))
    even = replace(trellis, name="even", steps=steps, unit=0.5)
    mode = replace(find_mode(f"trellis{bits}"), name="even", trellis=even, rotation=None)
    signs = torch.tensor([1.0, -1.0])[torch.randint(2, (12, 32), generator=_generator())]
    want = reference.quantize(signs.to(DEVICE), mode)
    assert_bit_exact(kernels.quantize(signs.to(DEVICE), mode).codes, want.codes)


@pytest.mark.parametrize("modes", [("trellis2", "lloyd2"), ("trellis3", "trellis2")], ids=str)
def test_paged_write(modes: tuple[str, str]) -> None:
    tokens, heads, head_dim = 9, 2, 32
    rows = torch.randn(2, heads, tokens, head_dim, generator=_generator()).transpose(1, 2)
    slots = torch.tensor([4, 0, -1, 11, 7, 99, 3, 5, 6])
    answers = []
    for tier in (reference, kernels):
        caches = [new_paged_kv(3, 4, heads, head_dim, find_mode(name)) for name in modes]
        tier.reshape_and_cache(*rows, *caches, slots, check=False)
        answers.append(caches)
    for want, got in zip(*answers, strict=True):
        assert_bit_exact(got.codes, want.codes)
        assert_bit_exact(got.words, want.words)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("modes", "dims"),
    [
        ((TRELLIS2, TRELLIS2), (64, 64)),
        ((TRELLIS3, TRELLIS3), (32, 96)),
        ((TRELLIS2, INT4), (48, 16)),
        ((INT4, find_mode("trellis3_unbiased")), (32, 48)),
    ],
    ids=str,
)
def test_attention(modes: tuple[Mode, Mode], dims: tuple[int, int], dtype: torch.dtype) -> None:
    batch = make_batch([23, 7], [1, 3], heads=(4, 2), dims=dims, modes=modes, dtype=dtype)
    assert_within_budget(batch, tier=kernels)


@pytest.mark.parametrize("mode", [TRELLIS2, TRELLIS3], ids=str)
def test_rows_on_odd_bytes(mode: Mode) -> None:
    batch = make_batch([13], [1], heads=(2, 1), dims=(32, 32), modes=(mode, mode))
    batch = replace(batch, query=batch.query.to(torch.float16))
    assert_within_budget(with_odd_rows(batch), tier=kernels)


def test_a_window_too_wide_for_rows_on_odd_bytes() -> None:
    trellis = replace(TRELLISES["linear_2_10"], name="wide", window_bits=12)
    wide = replace(TRELLIS2, name="wide", trellis=trellis)
    assert side_spec.side_spec(wide, 64, 2, 2.0**-11, False).kind == "states"
    with pytest.raises(ValueError, match="must lie in rows of an even number of bytes"):
        side_spec.side_spec(wide, 64, 1, 2.0**-11, False)


# ------------------------------------------------------- what only a GPU runs, one step at a time


#: Of an operand of 16 x 16 integers, where each bit of a thread's number leads, and each of the
#: number of an integer among a thread's eight: of keys by integers, of integers by values.
KEY_LANES, KEY_PLACES = ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0)), ((0, 1), (8, 0), (0, 8))
VALUE_LANES, VALUE_PLACES = ((0, 4), (0, 8), (1, 0), (2, 0), (4, 0)), ((0, 1), (0, 2), (8, 0))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_what_follows_comes_from_other_threads(keys: bool, head_dim: int) -> None:
    spec = side_spec.side_spec(TRELLIS2, head_dim, 2, 2.0**-11, True)
    integers = np.random.default_rng(0).integers(2**16, size=(16, 16)).astype(np.uint64)
    after = np.roll(integers[:, : spec.count], -1, axis=1)
    lanes, places = (KEY_LANES, KEY_PLACES) if keys else (VALUE_LANES, VALUE_PLACES)
    number = np.arange(2**8)
    lane, place = number % 32, number // 32
    at = np.zeros((2, 2**8), dtype=np.int64)
    for bit, bases in ((lane, lanes), (place, places)):
        for i, basis in enumerate(bases):
            at += (bit >> i & 1) * np.array(basis)[:, None]
    token, integer = at if keys else at[::-1]
    assert len(set(zip(token.tolist(), integer.tolist(), strict=True))) == 2**8
    held = integers[token, integer].reshape(4, 2, 32)
    text = trellis_operands.next_ptx.fn(spec, keys)
    found = run_ptx_to(4, text, *(held[:, 0] | held[:, 1] << np.uint64(16)))
    got = np.stack([np.stack([each & MASK, each >> np.uint64(16)]) for each in found]).reshape(-1)
    live = integer < spec.count
    assert np.array_equal(got[live], after[token[live], integer[live]])


@pytest.mark.parametrize(
    ("step", "width", "version", "right"),
    [(1, 2, 2, True), (4, 4, 2, True), (1, 4, 2, False), (4, 2, 2, False), (1, 2, 3, False)],
)
def test_a_kernel_that_asks_the_wrong_threads_is_refused(
    step: int, width: int, version: int, right: bool
) -> None:
    layout = pytest.importorskip("kvq.kernels.operand_layout")
    operand = f"tensor<16x16xi16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {width}}}>>"
    text = (
        f"#mma = #ttg.nvidia_mma<{{versionMajor = {version}, versionMinor = 0, "
        "warpsPerCTA = [1, 1], instrShape = [16, 8]}>\n"
        f'%a = tt.elementwise_inline_asm "add.u32 n, l, {step}; shfl.sync.idx.b32" %b : {operand} '
        f"-> {operand} loc(#loc1)\n"
    )
    assert (layout.misplaced_neighbors(text) == []) is right
    kernel = SimpleNamespace(hash=f"{step} {width} {version}", asm={"ttgir": text})
    with nullcontext() if right else pytest.raises(RuntimeError, match="must lie as operands"):
        layout.check_operand_layout(kernel)


def test_labels_in_registers() -> None:
    """The instructions for Hopper, in Python: float16 numbers of two integers at a time."""
    spec = side_spec.side_spec(TRELLIS2, 128, 2, 2.0**-11, True)
    assert spec.kind == "labels"
    codes = torch.randint(4, (40, 128), generator=_generator(), dtype=torch.uint8)
    levels = reference.trellis.level_table(TRELLIS2.trellis, torch.device("cpu"))[
        reference.trellis.trellis_states(codes, TRELLIS2.trellis)
    ].view(40, 16, 8)
    units = reference.pack_codes(codes, 2).view(torch.int16).numpy().astype(np.uint64) & MASK
    after = np.roll(units, -1, -1)
    x, near = (table[0::2] | table[1::2] << np.uint64(16) for table in (units, after))
    for stream in range(8):
        pair = halves_of(run_ptx(trellis_operands.labels_ptx.fn(spec, stream), x, near))
        read = spec.unit * (pair - spec.offset)
        want = levels[..., stream].double().numpy().reshape(20, 2, 16).swapaxes(1, 2)
        assert np.array_equal(read, want)
