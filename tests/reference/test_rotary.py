"""RoPE against complex numbers, and the facts that make it RoPE."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq.reference.rotary import apply_rotary
from kvq.rotary import RotaryLayout, RotarySpec


def spec(
    pairs: int = 8, layout: RotaryLayout = RotaryLayout.HALF, factor: float = 1.0
) -> RotarySpec:
    frequencies = torch.tensor([1e4 ** (-i / pairs) for i in range(pairs)], dtype=torch.float32)
    return RotarySpec(tuple(frequencies.tolist()), 2 * pairs, layout, factor)


def random_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


LAYOUTS = pytest.mark.parametrize("layout", list(RotaryLayout), ids=str)


def test_a_quarter_turn() -> None:
    x = torch.tensor([[[3.0, 5.0, 7.0]]], dtype=torch.float64)
    quarter = RotarySpec((float(np.float32(math.pi / 2)),), 2, attention_factor=2.0)
    expected = torch.tensor([[[-10.0, 6.0, 7.0]]], dtype=torch.float64)
    torch.testing.assert_close(
        apply_rotary(x, torch.tensor([1]), quarter), expected, atol=1e-6, rtol=0
    )


@LAYOUTS
@pytest.mark.parametrize("head_dim", [16, 24])
def test_is_multiplication_by_a_complex_number(layout: RotaryLayout, head_dim: int) -> None:
    x = random_rows(5, 3, head_dim, dtype=torch.float64)
    positions = torch.tensor([0, 1, 63, 4095, 131071])
    rotary = spec(layout=layout, factor=1.25)
    got = apply_rotary(x, positions, rotary).numpy()

    angles = np.float32(positions.numpy())[:, None] * np.float32(rotary.inverse_frequencies)
    turns = 1.25 * np.exp(1j * angles.astype(np.float64))[:, None, :]
    first, second = (
        (slice(0, 8), slice(8, 16))
        if layout is RotaryLayout.HALF
        else (slice(0, 16, 2), slice(1, 16, 2))
    )
    rows = x.numpy()
    turned = (rows[..., first] + 1j * rows[..., second]) * turns
    np.testing.assert_allclose(got[..., first], turned.real, rtol=0, atol=1e-13)
    np.testing.assert_allclose(got[..., second], turned.imag, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(got[..., 16:], rows[..., 16:])


@LAYOUTS
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-15), (torch.float32, 5e-7)])
def test_the_inverse_undoes_it(layout: RotaryLayout, dtype: torch.dtype, error: float) -> None:
    x = random_rows(9, 2, 20, dtype=dtype)
    positions = torch.arange(9) * 1000
    rotary = spec(layout=layout, factor=1.1)
    for inverse in (False, True):
        there = apply_rotary(x, positions, rotary, inverse=inverse)
        back = apply_rotary(there, positions, rotary, inverse=not inverse)
        assert back.dtype is dtype
        assert float((back - x).norm() / x.norm()) < error


@LAYOUTS
def test_scores_depend_on_the_distance_alone(layout: RotaryLayout) -> None:
    query, key = random_rows(2, 1, 1, 16, dtype=torch.float64)
    rotary = spec(layout=layout)

    def score(m: int, n: int) -> float:
        turned = apply_rotary(query, torch.tensor([m]), rotary)
        return float((turned * apply_rotary(key, torch.tensor([n]), rotary)).sum())

    # The angles are float32, which is 2e-6 at this distance.
    assert score(17, 5) == pytest.approx(score(30, 18), abs=1e-4)
    assert score(17, 5) != pytest.approx(score(17, 6), abs=1e-2)


def test_angles_are_rounded_to_float32_in_either_arithmetic() -> None:
    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    frequency = float(np.float32(0.7))
    position = 123_457
    angle = float(np.float32(position) * np.float32(frequency))
    assert angle != position * frequency
    turned = apply_rotary(x, torch.tensor([position]), RotarySpec((frequency,), 2))
    assert turned.flatten().tolist() == pytest.approx(
        [math.cos(angle), math.sin(angle)], abs=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_widened(dtype: torch.dtype) -> None:
    x = random_rows(4, 2, 16).to(dtype)
    got = apply_rotary(x, torch.arange(4), spec())
    assert got.dtype is torch.float32
    assert torch.equal(got, apply_rotary(x.float(), torch.arange(4), spec()))


def test_the_input_is_left_alone() -> None:
    x = random_rows(4, 2, 20)
    before = x.clone()
    apply_rotary(x, torch.arange(4), spec())[...] = 0.0
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("x", "positions", "error", "message"),
    [
        ([1.0], torch.arange(1), TypeError, "x must be a torch.Tensor, got list"),
        (
            torch.zeros(1, 1, 16, dtype=torch.int32),
            torch.arange(1),
            TypeError,
            "x must be .*, got int32",
        ),
        (torch.zeros(1, 16), torch.arange(1), ValueError, r"x must be \[T, H, D\] of shape"),
        (torch.zeros(1, 1, 14), torch.arange(1), ValueError, "x must have the 16 channels .* 14"),
        (torch.zeros(1, 1, 16), torch.arange(2), ValueError, r"positions must be .*, got \[2\]"),
        (
            torch.zeros(1, 1, 16),
            torch.zeros(1),
            TypeError,
            "positions must be int64, got float32",
        ),
        (
            torch.zeros(1, 1, 16),
            torch.arange(1, device="meta"),
            ValueError,
            "positions must be on",
        ),
    ],
)
def test_refuses(x: Tensor, positions: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply_rotary(x, positions, spec())
