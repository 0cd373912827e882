"""Errors with a known answer: uniform numbers on a uniform grid, ties, plain sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvq import reference
from kvq.analysis.activation_statistics import activation_statistics, rotated
from kvq.analysis.attention_error import (
    attention_output,
    log_weights,
    output_error,
    weight_error,
)
from kvq.analysis.quantization_error import quantization_error
from kvq.analysis.rounding_drift import error_model, quantize_rounded
from kvq.analysis.samples import SAMPLES, gaussian, ties
from kvq.analysis.score_bias import score_bias, scores
from kvq.modes import MODES, RANDOM_HADAMARD, mode
from kvq.rounding import Rounding

INT8 = mode("int8")
TOKENS, HEAD_DIM = 4096, 64
BLOCKS = torch.arange(TOKENS) // 16


def uniform_rows() -> Tensor:
    """Rows uniform between -127 and 127, the first entry 127: a step of exactly 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((TOKENS, 1, HEAD_DIM), generator=generator) * 254 - 127
    x[..., 0] = 127.0
    return x


def rounded_error(x: Tensor, rounding: Rounding) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    stored = quantize_rounded(x, INT8, rounding, generator)
    assert (stored.words == 1.0).all()
    return reference.dequantize(*stored, INT8, HEAD_DIM)


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (Rounding.HALF_AWAY, 1 / 12),
        (Rounding.HALF_EVEN, 1 / 12),
        (Rounding.TOWARD_ZERO, 1 / 3),
        (Rounding.STOCHASTIC, 1 / 6),
    ],
)
def test_uniform_numbers_on_a_uniform_grid(rounding: Rounding, expected: float) -> None:
    x = uniform_rows()
    found = quantization_error(x, rounded_error(x, rounding), BLOCKS).mean_squared_error
    # The first entry of each row is exact.
    expected *= (HEAD_DIM - 1) / HEAD_DIM
    assert abs(float(found.value) - expected) < 4 * float(found.standard_error)
    assert float(found.standard_error) < 0.005 * expected


@pytest.mark.parametrize("rounding", list(Rounding))
def test_the_model_of_rounding_has_that_mean_and_variance(rounding: Rounding) -> None:
    x = uniform_rows()
    stored = quantize_rounded(x, INT8, rounding, torch.Generator().manual_seed(1))
    error = (reference.dequantize(*stored, INT8, HEAD_DIM) - x)[..., 1:].to(torch.float64)
    model = error_model(x, stored.words, INT8, rounding)
    rest = error - model.mean[..., 1:]
    count = error.numel()
    toward_zero = (error * x[..., 1:].sign()).mean()
    expected = -0.5 if rounding is Rounding.TOWARD_ZERO else 0.0
    assert float(toward_zero) == pytest.approx(expected, abs=4 / math.sqrt(6 * count))
    assert float(rest.square().mean()) == pytest.approx(float(model.variance.mean()), rel=0.01)


def test_relative_error_and_decibels_say_the_same() -> None:
    x = gaussian(64, 2, 32)
    found = quantization_error(x, 1.1 * x, torch.arange(64) // 8)
    assert found.relative_error.value.tolist() == pytest.approx([0.01, 0.01], rel=1e-6)
    assert found.snr_db.value.tolist() == pytest.approx([20.0, 20.0], rel=1e-6)
    assert float(found.relative_error.standard_error.max()) < 1e-8


def test_ties_move_away_from_zero_or_to_the_even_code() -> None:
    # All ties of half_away grow by half a step. Of half_even every second one does, and the others
    # shrink: 64 of the magnitudes from 0.5 to 126.5 against 63.
    x = ties(TOKENS, 1, HEAD_DIM)
    drift = {
        rounding: ((rounded_error(x, rounding) - x) * x.sign())[..., 1:].mean()
        for rounding in (Rounding.HALF_AWAY, Rounding.HALF_EVEN)
    }
    assert float(drift[Rounding.HALF_AWAY]) == 0.5
    standard_error = 0.5 / math.sqrt(TOKENS * 63)
    assert abs(float(drift[Rounding.HALF_EVEN]) + 0.5 / 127) < 4 * standard_error


def test_without_ties_the_two_nearest_roundings_agree() -> None:
    x = gaussian(256, 2, HEAD_DIM)
    generator = torch.Generator()
    away, even = (
        quantize_rounded(x, INT8, rounding, generator)
        for rounding in (Rounding.HALF_AWAY, Rounding.HALF_EVEN)
    )
    assert torch.equal(away.codes, even.codes)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_samples_are_seeded_and_go_through_every_mode(name: str) -> None:
    x = SAMPLES[name](6, 2, 32, 3)
    assert x.shape == (6, 2, 32)
    assert x.dtype is torch.float32
    assert torch.equal(x, SAMPLES[name](6, 2, 32, 3))
    for each in MODES.values():
        x_hat = reference.dequantize(*reference.quantize(x, each), each, 32)
        assert x_hat.isfinite().all()


def test_scores_that_shrink_shift_and_spread() -> None:
    generator = torch.Generator().manual_seed(2)
    exact = torch.randn((3, 50, 200), generator=generator, dtype=torch.float64)
    noise = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    per_query = torch.randn((3, 50, 1), generator=generator, dtype=torch.float64)
    found = score_bias(
        exact,
        0.9 * exact + 0.05 * noise + per_query,
        torch.ones(50, 200, dtype=torch.bool),
        torch.arange(50),
        torch.arange(200),
    )
    for estimate, expected in (
        (found.slope, torch.full((3,), 0.9)),
        (found.spread, torch.full((3,), 0.05)),
        (found.centered_rmse, torch.full((3,), math.hypot(0.1, 0.05))),
        (found.mean_error, per_query.mean((1, 2))),
    ):
        distance = (estimate.value - expected).abs() / estimate.standard_error
        assert float(distance.max()) < 4
    # What each query adds to all its keys is in the plain error, and not in the centered one.
    assert (found.rmse.value > 5 * found.centered_rmse.value).all()


def test_what_softmax_does_not_see() -> None:
    exact = torch.randn((2, 5, 7), generator=torch.Generator().manual_seed(0)).double()
    shifted = exact + torch.arange(5.0)[:, None]
    visible = torch.ones(5, 7, dtype=torch.bool)
    bias = score_bias(exact, shifted, visible, torch.arange(5), torch.arange(7))
    torch.testing.assert_close(bias.mean_error.value, torch.full((2,), 2.0).double())
    torch.testing.assert_close(bias.slope.value, torch.ones(2).double())
    assert float(bias.centered_rmse.value.max()) < 1e-15
    weights = weight_error(
        log_weights(exact, visible), log_weights(shifted, visible), torch.arange(5)
    )
    assert float(weights.kl_divergence.value.abs().max()) < 1e-14
    assert float(weights.total_variation.value.max()) < 1e-14


def test_divergence_of_two_keys() -> None:
    # Weights 3/4, 1/4 become 1/2, 1/2; the third key is not visible.
    exact = torch.tensor([[[math.log(3.0), 0.0, 50.0]]], dtype=torch.float64)
    visible = torch.tensor([[True, True, False]])
    found = weight_error(
        log_weights(exact, visible),
        log_weights(torch.zeros_like(exact), visible),
        torch.zeros(1, dtype=torch.int64),
    )
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(found.kl_divergence.value) == pytest.approx(expected, rel=1e-12)
    assert float(found.total_variation.value) == pytest.approx(0.25, rel=1e-12)
    assert found.kl_divergence.standard_error.isnan().all()


def test_query_heads_read_their_own_kv_head() -> None:
    query, key, value = gaussian(3, 4, 8), gaussian(5, 2, 8, 1), gaussian(5, 2, 6, 2)
    logits = scores(query, key, 0.5)
    log_p = log_weights(logits, torch.ones(3, 5, dtype=torch.bool))
    output = attention_output(log_p, value)
    for head in range(4):
        expected = 0.5 * query[:, head].double() @ key[:, head // 2].double().T
        torch.testing.assert_close(logits[head], expected)
        torch.testing.assert_close(
            output[:, head], torch.softmax(expected, -1) @ value[:, head // 2].double()
        )
    assert float(output_error(output, output, torch.arange(3)).value.max()) == 0.0
    doubled = output_error(output, 2 * output, torch.arange(3)).value
    torch.testing.assert_close(doubled, torch.ones(4).double())


def test_statistics_of_shapes_that_are_known() -> None:
    blocks = torch.arange(512) // 16
    found = activation_statistics(gaussian(512, 2, 64), blocks)
    for estimate, expected in ((found.kurtosis, 3.0), (found.row_kurtosis, 3 * 64 / 66)):
        distance = (estimate.value - expected).abs() / estimate.standard_error
        assert float(distance.max()) < 4

    constant = torch.ones(512, 1, 64) * torch.arange(64)
    assert float(activation_statistics(constant, blocks).mean_energy_share.value) == 1.0

    one_hot = torch.zeros(512, 1, 64)
    one_hot[..., 5] = 1.0
    assert float(activation_statistics(one_hot, blocks).row_kurtosis.value) == 64.0
    assert float(activation_statistics(one_hot, blocks).peak_to_rms.value) == 8.0
    # A rotated one-hot row has entries +-1/8: the flattest there is.
    turned = rotated(one_hot, RANDOM_HADAMARD)
    assert float(activation_statistics(turned, blocks).row_kurtosis.value) == 1.0
    torch.testing.assert_close(turned.square().sum(-1), torch.ones(512, 1).double())


def test_rows_of_zeros_have_no_kurtosis() -> None:
    x = gaussian(32, 1, 16)
    x[3] = 0.0
    found = activation_statistics(x, torch.arange(32) // 4)
    kept = torch.cat((x[:3], x[4:]))
    expected = kept.double().pow(4).mean(-1) / kept.double().square().mean(-1).square()
    torch.testing.assert_close(found.row_kurtosis.value, expected.mean(0))
