"""The rotation: against scipy's matrix, known signs, the order of the butterfly, the tables."""

from __future__ import annotations

import re

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq.modes import DEFAULT_SEED, HADAMARD, RANDOM_HADAMARD, Rotation
from kvq.reference import hadamard_transform, signs
from kvq.reference.hadamard import rotate, tree_sum, unrotate
from tests import oracle
from tests.cases import DTYPES, HEAD_DIMS
from tests.compare import assert_bit_exact
from tests.expected import sign_rows

# The block of each head size, by hand.
BLOCKS = {
    **{16: 16, 32: 32, 48: 16, 64: 64, 80: 16, 96: 32, 112: 16, 128: 128, 192: 64},
    **{256: 256, 320: 64, 512: 512, 576: 64},
}
ROTATIONS = {
    "hadamard": HADAMARD,
    "random_hadamard": RANDOM_HADAMARD,
    "two_rounds": Rotation(rounds=2),
    "two_plain_rounds": Rotation(rounds=2, random_signs=False),
    "seed_0": Rotation(seed=0),
    "largest_seed": Rotation(rounds=2, seed=2**64 - 1),
    "repeated_signs": Rotation(rounds=2, repeat_block_signs=True),
}
# Positions of +1, bit i = channel i, for the default seed and round 0.
SIGN_MASKS = {
    32: 0x6573590D,
    64: 0x808035B16573590D,
    96: 0xA6443D6C808035B16573590D,
    128: 0x6B7F5438A6443D6C808035B16573590D,
    256: 0xFA2043A0320B9848ABAFC4414AA48B816B7F5438A6443D6C808035B16573590D,
}

rotations = pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)


def mask(row: Tensor) -> int:
    assert set(row.tolist()) <= {1.0, -1.0}
    return sum(1 << i for i, sign in enumerate(row.tolist()) if sign > 0)


def matrix(head_dim: int, rotation: Rotation) -> np.ndarray:
    """The whole rotation as a float64 matrix, from scipy's blocks."""
    size = BLOCKS[head_dim]
    blocks = scipy.linalg.block_diag(*[scipy.linalg.hadamard(size)] * (head_dim // size))
    whole = np.eye(head_dim)
    for row in sign_rows(rotation, head_dim):
        whole = blocks @ (row.astype(np.float64)[:, None] * whole)
    return whole


def integers(rows: int, head_dim: int, seed: int = 0) -> Tensor:
    """Small integers: every sum on the way is exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-15, 16, (rows, head_dim), generator=generator).to(torch.float32)


@rotations
@pytest.mark.parametrize("head_dim", BLOCKS)
def test_equals_scipys_matrix(head_dim: int, rotation: Rotation) -> None:
    x = integers(8, head_dim)
    want = x.to(torch.float64).numpy() @ matrix(head_dim, rotation).T
    assert np.array_equal(hadamard_transform(x, rotation).numpy(), want)
    assert np.array_equal(rotate(x.to(torch.float64), rotation).numpy(), want)


@rotations
@pytest.mark.parametrize("head_dim", BLOCKS)
def test_inverse_equals_scipys_inverse(head_dim: int, rotation: Rotation) -> None:
    y = integers(8, head_dim)
    gain = BLOCKS[head_dim] ** rotation.rounds
    # The rows of the matrix are orthogonal, of squared length N: its inverse is its transpose / N.
    want = y.to(torch.float64).numpy() @ matrix(head_dim, rotation) / gain
    assert np.array_equal(hadamard_transform(y, rotation, inverse=True).numpy(), want)
    assert np.array_equal(unrotate(y.to(torch.float64), rotation).numpy(), want * gain)


@rotations
@pytest.mark.parametrize("head_dim", BLOCKS)
def test_rows_of_the_rotation_are_orthogonal(head_dim: int, rotation: Rotation) -> None:
    columns = hadamard_transform(torch.eye(head_dim), rotation)
    gain = BLOCKS[head_dim] ** rotation.rounds
    assert rotation.gain(head_dim) == gain
    assert rotation.block_size(head_dim) == BLOCKS[head_dim]
    assert torch.equal(columns @ columns.T, gain * torch.eye(head_dim))


@rotations
@pytest.mark.parametrize("head_dim", BLOCKS)
def test_keeps_lengths_and_products_and_comes_back(head_dim: int, rotation: Rotation) -> None:
    q, k = integers(8, head_dim), integers(8, head_dim, seed=1)
    rotated_q, rotated_k = hadamard_transform(q, rotation), hadamard_transform(k, rotation)
    gain = BLOCKS[head_dim] ** rotation.rounds
    assert torch.equal((rotated_q.double() * rotated_k).sum(-1), (q.double() * k).sum(-1) * gain)
    assert torch.equal(rotated_q.double().square().sum(-1), q.double().square().sum(-1) * gain)
    assert torch.equal(hadamard_transform(rotated_q, rotation, inverse=True), q)


@rotations
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((head_dim, torch.float32) for head_dim in HEAD_DIMS), *((96, dtype) for dtype in DTYPES)],
    ids=str,
)
def test_every_rounding_falls_as_in_the_oracle(
    head_dim: int, dtype: torch.dtype, rotation: Rotation
) -> None:
    x = torch.from_numpy(oracle.planted_rows(head_dim)[:60]).to(dtype)
    rows, want_signs = x.to(torch.float32).numpy(), sign_rows(rotation, head_dim)
    want = torch.from_numpy(oracle.hadamard(rows, want_signs))
    got = hadamard_transform(x, rotation)
    assert got.dtype is torch.float32
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert_bit_exact(got[finite], want[finite], "forward")
    gain = np.float32(1.0 / BLOCKS[head_dim] ** rotation.rounds)
    with np.errstate(all="ignore"):
        back = torch.from_numpy(oracle.hadamard(rows * gain, want_signs, inverse=True))
    got, finite = hadamard_transform(x, rotation, inverse=True), back.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert_bit_exact(got[finite], back[finite], "inverse")


def test_stages_run_from_the_longest_stride_to_the_shortest() -> None:
    # Stride 8 first: 2^24 meets its negative at distance 8 before it meets the 1 at distance 1.
    x = torch.zeros(16)
    x[0], x[1], x[8] = 2.0**24, 1.0, -(2.0**24)
    assert hadamard_transform(x, HADAMARD)[0] == 1.0
    # Here it meets the 1 at distance 8 first, and the 1 is lost.
    x = torch.zeros(16)
    x[0], x[8], x[1] = 2.0**24, 1.0, -(2.0**24)
    assert hadamard_transform(x, HADAMARD)[0] == 0.0


@pytest.mark.parametrize("head_dim", SIGN_MASKS)
def test_signs_of_the_default_seed_are_the_known_ones(head_dim: int) -> None:
    assert mask(signs(head_dim, RANDOM_HADAMARD)) == SIGN_MASKS[head_dim]


@pytest.mark.parametrize("head_dim", [96, 112])
def test_repeated_signs_are_those_of_one_block(head_dim: int) -> None:
    size = BLOCKS[head_dim]
    row = signs(head_dim, Rotation(repeat_block_signs=True))
    assert torch.equal(row, signs(size, RANDOM_HADAMARD).repeat(head_dim // size))
    if size == 32:
        assert mask(row[:32]) == SIGN_MASKS[32]
    assert not torch.equal(row, signs(head_dim, RANDOM_HADAMARD))


def test_signs_of_all_ones() -> None:
    for round_index in (0, 1):
        row = signs(96, Rotation(rounds=2, random_signs=False), round_index)
        assert torch.equal(row, torch.ones(96))


@pytest.mark.parametrize("seed", [0, 1, DEFAULT_SEED, 2**32, 2**63, 2**64 - 0x517CC1B7, 2**64 - 1])
def test_each_seed_and_round_draws_its_own_signs(seed: int) -> None:
    rotation = Rotation(rounds=2, seed=seed)
    for round_index in (0, 1):
        want = torch.from_numpy(oracle.sign_table(128, round_index, seed))
        assert torch.equal(signs(128, rotation, round_index), want)
    assert not torch.equal(signs(128, rotation, 0), signs(128, rotation, 1))
    other = Rotation(seed=(seed + 1) % 2**64)
    assert not torch.equal(signs(128, rotation), signs(128, other))


def test_the_second_round_adds_the_step_to_the_seed_modulo_2_to_the_64() -> None:
    stepped = Rotation(seed=(DEFAULT_SEED + 0x517CC1B7) % 2**64)
    assert torch.equal(signs(128, Rotation(rounds=2), 1), signs(128, stepped))
    wrapped = Rotation(rounds=2, seed=2**64 - 0x517CC1B7)
    assert torch.equal(signs(128, wrapped, 1), signs(128, Rotation(seed=0)))


def test_the_first_round_of_two_is_the_one_of_one() -> None:
    assert torch.equal(signs(64, Rotation(rounds=2), 0), signs(64, RANDOM_HADAMARD))


def test_signs_do_not_depend_on_the_state_of_any_generator() -> None:
    state = torch.random.get_rng_state()
    _clear_tables()
    torch.manual_seed(1)
    first = signs(64, RANDOM_HADAMARD)
    after = torch.random.get_rng_state()
    _clear_tables()
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), after), "drawing signs moved the generator"
    torch.manual_seed(2)
    assert torch.equal(signs(64, RANDOM_HADAMARD), first)
    torch.random.set_rng_state(state)


def _clear_tables() -> None:
    from kvq.reference import hadamard

    hadamard._signs.cache_clear()


def test_a_caller_cannot_change_the_table() -> None:
    x = torch.ones(1, 64)
    before = hadamard_transform(x, RANDOM_HADAMARD)
    table = signs(64, RANDOM_HADAMARD)
    table.zero_()
    assert mask(signs(64, RANDOM_HADAMARD)) == SIGN_MASKS[64]
    assert torch.equal(hadamard_transform(x, RANDOM_HADAMARD), before)


def test_tables_of_several_dtypes_do_not_meet() -> None:
    # The order that has gone wrong elsewhere: each call must get the dtype that it asks for.
    order = (torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.float16)
    for dtype in order:
        row = signs(64, RANDOM_HADAMARD, dtype=dtype)
        assert row.dtype is dtype
        assert mask(row) == SIGN_MASKS[64]
    x = integers(4, 64)
    want = hadamard_transform(x, RANDOM_HADAMARD)
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float16):
        assert_bit_exact(hadamard_transform(x.to(dtype), RANDOM_HADAMARD), want)
    assert rotate(x.to(torch.float64), RANDOM_HADAMARD).dtype is torch.float64


def test_a_table_made_in_inference_mode_serves_outside() -> None:
    _clear_tables()
    with torch.inference_mode():
        hadamard_transform(torch.ones(1, 64), RANDOM_HADAMARD)
    x = torch.ones(1, 64, requires_grad=True)
    hadamard_transform(x, RANDOM_HADAMARD).sum().backward()
    # Row 0 of H is the only one whose entries do not cancel: the gradient is b times the signs
    # in channel 0.
    assert x.grad is not None
    want = torch.zeros(64)
    want[0] = 64.0 * signs(64, RANDOM_HADAMARD)[0]
    assert torch.equal(x.grad[0], want)


def test_the_default_dtype_and_device_of_torch_change_nothing() -> None:
    x = integers(4, 64)
    want = hadamard_transform(x, HADAMARD), hadamard_transform(x, RANDOM_HADAMARD)
    _clear_tables()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        got = hadamard_transform(x, HADAMARD), hadamard_transform(x, RANDOM_HADAMARD)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        _clear_tables()
    assert_bit_exact(got[0], want[0])
    assert_bit_exact(got[1], want[1])


def test_input_is_left_alone_and_views_are_read_by_their_strides() -> None:
    base = integers(33, 2 * 3 * 64).view(33, 2, 3, 64)
    kept = base.clone()
    for view in (base[:, 1], base.transpose(0, 2), base[:, :, :1].expand(33, 2, 3, 64)):
        got = hadamard_transform(view, RANDOM_HADAMARD)
        assert got.shape == view.shape
        assert_bit_exact(got, hadamard_transform(view.contiguous(), RANDOM_HADAMARD))
    assert torch.equal(base, kept)
    strided = integers(5, 128)[:, ::2]
    assert_bit_exact(
        hadamard_transform(strided, RANDOM_HADAMARD),
        hadamard_transform(strided.contiguous(), RANDOM_HADAMARD),
    )


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64), (2, 3, 4, 64)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    x = integers(24, 64)[: torch.Size(shape).numel() // 64].view(shape)
    for inverse in (False, True):
        got = hadamard_transform(x, RANDOM_HADAMARD, inverse=inverse)
        want = hadamard_transform(x.reshape(-1, 64), RANDOM_HADAMARD, inverse=inverse)
        assert_bit_exact(got, want.reshape(shape))


class TestFloat16Input:
    """Sums that float16 cannot hold."""

    def test_a_constant_row_whose_sum_is_too_large_for_float16(self) -> None:
        y = hadamard_transform(torch.full((1, 128), 600.0, dtype=torch.float16), HADAMARD)
        assert y[0, 0] == 76800.0
        assert torch.equal(y[0, 1:], torch.zeros(127))

    def test_the_largest_constant_row(self) -> None:
        x = torch.full((1, 128), 60000.0, dtype=torch.float16)
        y = hadamard_transform(x, HADAMARD)
        # float16 rounds 60,000 to itself; over sqrt(128) it is 678,823.
        assert y[0, 0] == 128 * 60000.0
        assert torch.equal(hadamard_transform(y, HADAMARD, inverse=True), x.float())

    def test_cancellation_at_256_channels(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = (torch.randn(64, 256, generator=generator) * 1000).to(torch.float16)
        exact = rotate(x.to(torch.float64), RANDOM_HADAMARD)
        error = (hadamard_transform(x, RANDOM_HADAMARD) - exact).norm() / exact.norm()
        assert error < 1e-6


def test_the_inverse_divides_before_it_adds() -> None:
    # The sum of 128 such numbers is not finite; their mean is.
    y = torch.full((1, 128), 2.0**127)
    x = hadamard_transform(y, HADAMARD, inverse=True)
    want = torch.zeros(1, 128)
    want[0, 0] = 2.0**127
    assert torch.equal(x, want)


@pytest.mark.parametrize("head_dim", [1, 8, 17, 20, 24, 72, 100, 120, 127])
def test_a_head_size_that_does_not_mix_is_refused_by_name(head_dim: int) -> None:
    text = re.escape(f"head_dim must be divisible by 16 for a Hadamard rotation, got {head_dim}")
    for call in (
        lambda: hadamard_transform(torch.ones(1, head_dim), RANDOM_HADAMARD),
        lambda: hadamard_transform(torch.ones(1, head_dim), RANDOM_HADAMARD, inverse=True),
        lambda: signs(head_dim, RANDOM_HADAMARD),
    ):
        with pytest.raises(ValueError, match=f"^{text}$"):
            call()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: hadamard_transform(torch.ones(64, dtype=torch.float64), HADAMARD),
            TypeError,
            "x must be float32, float16 or bfloat16, got float64",
        ),
        (
            lambda: hadamard_transform(torch.ones(64, dtype=torch.int32), HADAMARD),
            TypeError,
            "x must be float32, float16 or bfloat16, got int32",
        ),
        (
            lambda: hadamard_transform(np.ones(64, dtype=np.float32), HADAMARD),
            TypeError,
            "x must be a torch.Tensor, got ndarray",
        ),
        (
            lambda: hadamard_transform(torch.ones(()), HADAMARD),
            ValueError,
            "x must have at least one axis, got a scalar",
        ),
        (
            lambda: hadamard_transform(torch.ones(4, 0), HADAMARD),
            ValueError,
            "head_dim must be divisible by 16 for a Hadamard rotation, got 0",
        ),
        (lambda: signs(64, HADAMARD, 1), ValueError, "round_index must be below 1, got 1"),
        (lambda: signs(64, HADAMARD, -1), ValueError, "round_index must be below 1, got -1"),
        (
            lambda: signs(64, Rotation(rounds=2), 2),
            ValueError,
            "round_index must be below 2, got 2",
        ),
    ],
)
def test_refusals(call: object, error: type[Exception], text: str) -> None:
    assert callable(call)
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()


class TestTreeSum:
    """The balanced binary tree, neighbors first."""

    def test_neighbors_first(self) -> None:
        # 2^24 + 1 rounds to 2^24, and 1 - 2^24 is exact. Halves would give 0 + 2.
        assert tree_sum(torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])) == 1.0
        # From left to right each 1 would be lost.
        assert tree_sum(torch.tensor([2.0**24, 0.0, 1.0, 1.0])) == 2.0**24 + 2
        # Halves would lose a 1 beside 2^24.
        assert tree_sum(torch.tensor([1.0, 1.0, 2.0**24, -(2.0**24)])) == 2.0

    @pytest.mark.parametrize("length", [1, 2, 3, 5, 15, 16, 17, 80, 96, 112, 128])
    def test_equals_the_oracle_at_any_length(self, length: int) -> None:
        rows = oracle.planted_rows(128)[:200, :length].copy()
        rows[~np.isfinite(rows).all(axis=1)] = 1.0
        with np.errstate(all="ignore"):
            want = torch.from_numpy(oracle.tree_sum(rows))
        got = tree_sum(torch.from_numpy(rows))
        assert torch.equal(got.isnan(), want.isnan())
        assert_bit_exact(got.nan_to_num(), want.nan_to_num())

    def test_pads_with_plus_zero(self) -> None:
        assert_bit_exact(tree_sum(torch.full((3,), -0.0)), torch.tensor(0.0))
        assert_bit_exact(tree_sum(torch.full((4,), -0.0)), torch.tensor(-0.0))

    @given(st.lists(st.integers(-(2**10), 2**10), min_size=1, max_size=70))
    def test_is_exact_on_integers(self, values: list[int]) -> None:
        assert tree_sum(torch.tensor(values, dtype=torch.float32)) == sum(values)

    def test_differs_from_torch_sum_somewhere(self) -> None:
        rows = torch.from_numpy(oracle.planted_rows(128)[:200])
        rows = rows[rows.isfinite().all(-1)]
        assert not torch.equal(tree_sum(rows), rows.sum(-1))
