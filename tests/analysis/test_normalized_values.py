"""Normalized values are the very numbers that a codebook mode compares with its thresholds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kvq
from kvq.activations import Activations, LayerActivations
from kvq.analysis.normalized_values import activation_values, normalized_values
from kvq.modes import Normalization
from tests.compare import assert_bit_exact

CODEBOOK_MODES = [
    pytest.param(mode, id=mode.name) for mode in kvq.MODES.values() if mode.codebook is not None
]


def rows() -> torch.Tensor:
    x = torch.randn(40, 3, 48, generator=torch.Generator().manual_seed(3))
    x[..., 7] *= 30
    return x


@pytest.mark.parametrize("mode", CODEBOOK_MODES)
def test_codes_are_counts_of_thresholds(mode: kvq.Mode) -> None:
    x = rows()
    values, _ = normalized_values(x, mode)
    assert mode.codebook is not None
    # The values are those before a gain.
    mode = replace(mode, name="no search", gains=())
    thresholds = torch.tensor(mode.codebook.thresholds)
    counts = (values[..., None] >= thresholds).sum(-1).to(torch.uint8)
    codes = kvq.unpack_codes(kvq.quantize(x, mode).codes, mode.bits, 48)
    assert_bit_exact(counts.reshape(codes.shape), codes)


@pytest.mark.parametrize("mode", CODEBOOK_MODES)
def test_weights_turn_values_back_into_rows(mode: kvq.Mode) -> None:
    x = rows()
    values, weights = normalized_values(x, mode)
    energy = (values.square() * weights[:, None]).sum(-1)
    expected = x.square().sum(-1).reshape(-1) * mode.gain(48)
    torch.testing.assert_close(energy, expected, rtol=1e-5, atol=0.0)
    if mode.normalization is Normalization.RMS:
        torch.testing.assert_close(values.square().mean(-1), torch.ones(120))
    else:
        torch.testing.assert_close(values.amax(-1), torch.ones(120), rtol=1e-6, atol=0.0)


def test_zero_rows_and_nan_rows_are_left_out() -> None:
    x = rows()
    x[0, 0], x[1, 1, 5], x[2, 2, 9] = 0.0, math.nan, math.inf
    values, weights = normalized_values(x, kvq.mode("lloyd2"))
    assert values.shape == (117, 48)
    assert weights.shape == (117,)
    assert bool(torch.isfinite(values).all())


def test_the_values_of_activations() -> None:
    key, value = rows(), rows()[..., :16].to(torch.float16)
    layers = {2: LayerActivations(None, key, value), 5: LayerActivations(None, value, key)}
    positions = torch.arange(40)
    activations = Activations(layers, positions, positions[:0], 1.0)
    mode = kvq.mode("lloyd2")
    everything = activation_values(activations, mode)
    assert everything.values.shape == everything.weights.shape == (2 * 40 * 3 * (48 + 16),)
    found = activation_values(activations, mode, sides=["value"], layers=[2], heads=[2, 0, 2])
    expected = normalized_values(value[:, [2, 0]], mode)
    assert_bit_exact(found.values, expected.values.reshape(-1))
    assert_bit_exact(found.weights, expected.weights.repeat_interleave(16))
    for chosen, message in (
        ({"layers": [3]}, "layer must be one of 2, 5, got 3"),
        ({"heads": [-1]}, "head must be one of 0, 1, 2, got -1"),
        ({"sides": ["query"]}, "side must be one of key, value, got query"),
    ):
        with pytest.raises(ValueError, match=message):
            activation_values(activations, mode, **chosen)  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be a codebook mode, got int4"):
        normalized_values(rows(), kvq.mode("int4"))
    with pytest.raises(ValueError, match="head_dim must be divisible by 16"):
        normalized_values(torch.zeros(2, 72), kvq.mode("lloyd2"))
    with pytest.raises(TypeError, match="x must be float32"):
        normalized_values(torch.zeros(2, 48, dtype=torch.float64), kvq.mode("lloyd2"))
