"""Round against truncate: what a mode's rounding does to scores and outputs as contexts grow.

Rounding errors of different tokens have no common direction, so an attention output averages them
away. Truncation pushes all of them the same way, so no context is long enough: with signed codes
the rows shrink, with unsigned codes every rotated channel moves down by half a step.

The theory lines come from the steps that the stored words hold. Where a code stands for an
interval of width `step`, an error is taken to be uniform on it: mean 0 and variance `step^2 / 12`
if rounded, mean half a step if truncated, variance `step^2 / 6` if rounded stochastically. The
two end codes are not modeled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvq import reference
from kvq.activations import Activations
from kvq.analysis.attention_error import attention_output, log_weights
from kvq.analysis.estimates import Estimate, over_units
from kvq.analysis.samples import gaussian, with_mean
from kvq.analysis.score_bias import pair_errors, scores, slope_of
from kvq.modes import MODES, Grid, Mode
from kvq.reference.scaling import decode_float16_pair, decode_zero_point
from kvq.rounding import Rounding
from kvq.scale_word import StoredWord
from kvq.tier import QuantizedKV, Tier

#: The roundings that are compared, in the order of the tables.
ROUNDINGS: Final = tuple(Rounding)
#: The modes that are compared: those that round.
DRIFT_MODES: Final = tuple(row for row in MODES.values() if row.rounding is not None)

#: Fraction bits of e4m3, and the exponent of its smallest normal number.
_E4M3_MANTISSA_BITS = 3
_E4M3_MIN_EXPONENT = -6


class DriftInput(NamedTuple):
    """Queries, keys and values, and how far back from each query each key lies."""

    #: `[Q, Hq, D]`.
    query: Tensor
    #: `[T, Hkv, D]`.
    key: Tensor
    #: `[T, Hkv, Dv]`.
    value: Tensor
    #: `[Q, T]` int64: 0 for the most recent key that a query sees, -1 for those it does not.
    age: Tensor
    #: The softmax scale.
    scale: float


class ErrorModel(NamedTuple):
    """The errors that a rounding should make, in the original domain."""

    #: `[..., D]` float64: the mean of every entry's error.
    mean: Tensor
    #: `[..., D]` or `[..., 1]` float64: its variance.
    variance: Tensor


class Drift(NamedTuple):
    """What a context of one length does: a measured value, and the theory's where there is one."""

    #: Number of most recent keys that each query sees.
    context: int
    #: Which number: a field of this module's tables.
    metric: str
    #: Measured, over KV heads as units.
    measured: Estimate
    #: Predicted, or NaN.
    theory: float


def quantize_rounded(
    x: Tensor,
    mode: Mode,
    rounding: Rounding,
    generator: torch.Generator,
    tier: Tier = reference,
) -> QuantizedKV:
    """Quantize under another rounding than the mode's own.

    Args:
        x: `[..., D]`.
        mode: A mode that rounds.
        rounding: Any; the stochastic one is always done by the reference tier.
        generator: Of the stochastic rounding.
        tier: Who quantizes otherwise.
    """
    if rounding is Rounding.STOCHASTIC:
        return reference.quantize_stochastic(x, mode, generator)
    return tier.quantize(x, mode.with_rounding(rounding))


def error_model(
    x: Tensor, words: Tensor, mode: Mode, rounding: Rounding, tier: Tier = reference
) -> ErrorModel:
    """Mean and variance of the error that rounding should make of each entry.

    Args:
        x: `[..., D]`, the rows.
        words: `[...]`, what was stored beside their codes: it holds the step.
        mode: A mode that rounds.
        rounding: How.
        tier: Who undoes the rotation.
    """
    head_dim = x.shape[-1]
    gain = float(mode.gain(head_dim))
    offset, variance = moments_of_rounding(rounding)
    if mode.grid is not Grid.UNSIGNED:
        step = signed_step(x, words, mode)
        return ErrorModel(-offset * step * torch.sign(x.to(torch.float64)), variance * step**2)
    if mode.word is StoredWord.FLOAT16_PAIR:
        # This word holds the step of the rotated row divided by N.
        step = decode_float16_pair(words)[0].to(torch.float64)[..., None] * gain
    else:
        step = decode_zero_point(words)[0].to(torch.float64)[..., None]
    down = torch.ones((1, head_dim), device=x.device)
    if mode.rotation is not None:
        down = tier.hadamard_transform(down, mode.rotation, inverse=True)
    return ErrorModel(-offset * step * down[0].to(torch.float64), variance * step**2 / gain)


def moments_of_rounding(rounding: Rounding) -> tuple[float, float]:
    """How far below the value the mean of its code lies, and the variance, in steps."""
    if rounding is Rounding.TOWARD_ZERO:
        return 0.5, 1.0 / 12.0
    return 0.0, 1.0 / 6.0 if rounding is Rounding.STOCHASTIC else 1.0 / 12.0


def signed_step(x: Tensor, words: Tensor, mode: Mode) -> Tensor:
    """The distance between codes around `x`: `[..., 1]`, or `[..., D]` if they are floats.

    Args:
        x: `[..., D]`.
        words: `[...]`, the scale of each row.
        mode: One with signed codes or floats.
    """
    scale = words.to(torch.float64)[..., None]
    if mode.grid is Grid.SIGNED:
        return scale
    exponent = torch.frexp((x.to(torch.float64) / scale).abs())[1] - 1
    spacing = exponent.clamp_min(_E4M3_MIN_EXPONENT) - _E4M3_MANTISSA_BITS
    return scale * torch.exp2(spacing.to(torch.float64))


def rounding_drift(
    inputs: Sequence[DriftInput],
    mode: Mode,
    rounding: Rounding,
    contexts: Sequence[int],
    *,
    seed: int = 0,
    tier: Tier = reference,
) -> Iterator[Drift]:
    """Errors of scores and outputs when every query sees its `n` most recent keys.

    The metrics: `slope` of the scores (see `score_bias`); `mean_error`, signed; `shift`, the root
    mean square over queries of a query's mean error; `centered_rmse`; `output_error_value` of the
    output with quantized values and exact weights; `output_error` with keys and values quantized.

    Args:
        inputs: One for each layer.
        mode: A mode that rounds.
        rounding: How.
        contexts: Lengths; every query sees that many keys.
        seed: Of the stochastic rounding.
        tier: Who quantizes otherwise.

    Yields:
        One `Drift` for each context and metric, over the KV heads of all inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
    for item in inputs:
        key = _Side.of(item.key, mode, rounding, generator, tier)
        value = _Side.of(item.value, mode, rounding, generator, tier)
        pairs = _Scores.of(item, key)
        for context in contexts:
            visible = (item.age >= 0) & (item.age < context)
            tokens = visible.any(0).nonzero()[:, 0]
            measured = _measure(visible[:, tokens], pairs.select(tokens), value.select(tokens))
            for metric, numbers in measured.items():
                found.setdefault((context, metric), []).append(numbers)
    for (context, metric), layers in found.items():
        values, predictions = (torch.cat(column) for column in zip(*layers, strict=True))
        yield Drift(context, metric, over_units(values), float(predictions.mean()))


class _Side(NamedTuple):
    """Rows, what they read back as, and what the model says of the difference."""

    exact: Tensor
    approximate: Tensor
    model: ErrorModel

    @classmethod
    def of(
        cls, x: Tensor, mode: Mode, rounding: Rounding, generator: torch.Generator, tier: Tier
    ) -> _Side:
        codes, words = quantize_rounded(x, mode, rounding, generator, tier)
        x_hat = tier.dequantize(codes, words, mode, x.shape[-1])
        return cls(
            x.to(torch.float64),
            x_hat.to(torch.float64),
            error_model(x, words, mode, rounding, tier),
        )

    def select(self, tokens: Tensor) -> _Side:
        mean, variance = self.model
        return _Side(
            self.exact[tokens],
            self.approximate[tokens],
            ErrorModel(mean[tokens], variance[tokens]),
        )


class _Scores(NamedTuple):
    """Scores `[Hq, Q, T]` of the keys, and what is measured and predicted of their errors."""

    exact: Tensor
    approximate: Tensor
    #: The mean of every error by the model.
    mean: Tensor
    #: Its variance by the model.
    variance: Tensor

    @classmethod
    def of(cls, item: DriftInput, key: _Side) -> _Scores:
        mean, variance = key.model
        square = item.query.to(torch.float64).square()
        if variance.shape[-1] == 1:
            square = square.sum(-1, keepdim=True)
        return cls(
            scores(item.query, key.exact, item.scale),
            scores(item.query, key.approximate, item.scale),
            scores(item.query, mean, item.scale),
            scores(square, variance, item.scale**2),
        )

    def select(self, tokens: Tensor) -> _Scores:
        return _Scores(*(item[..., tokens] for item in self))


def _measure(visible: Tensor, pairs: _Scores, value: _Side) -> dict[str, tuple[Tensor, Tensor]]:
    """For each metric the measured and the predicted value of every KV head, `[Hkv]`."""
    measured = pair_errors(pairs.exact, pairs.approximate, visible)
    modeled = pair_errors(pairs.exact, pairs.exact + pairs.mean, visible)
    noise = pairs.variance * visible
    per_query = visible.sum(-1)

    log_p = log_weights(pairs.exact, visible)
    output = attention_output(log_p, value.exact)
    energy = output.square().sum((0, -1))
    offset = attention_output(log_p, value.model.mean)
    # Squared weights pick up the variance of every value's error.
    spread = attention_output(2.0 * log_p, value.model.variance)
    channels = value.exact.shape[-1] / value.model.variance.shape[-1]
    unknown = torch.full_like(energy, math.nan)

    def mean(x: Tensor) -> Tensor:
        return x.sum((-1, -2)) / measured.num_pairs

    def shift(error: Tensor, variance: Tensor | float) -> Tensor:
        return ((error.sum(-1) / per_query).square() + variance).mean(-1).sqrt()

    def relative(approximate: Tensor) -> Tensor:
        return (approximate - output).square().sum((0, -1)) / energy

    per_query_head = {
        "slope": (slope_of(measured), slope_of(modeled)),
        "mean_error": (mean(measured.error), mean(modeled.error)),
        "shift": (
            shift(measured.error, 0.0),
            shift(modeled.error, noise.sum(-1) / per_query**2),
        ),
        "centered_rmse": (
            mean(measured.centered_error.square()).sqrt(),
            mean(
                modeled.centered_error.square() + noise * (1.0 - 1.0 / per_query)[:, None]
            ).sqrt(),
        ),
        "output_error_value": (
            relative(attention_output(log_p, value.approximate)),
            (offset.square().sum((0, -1)) + channels * spread.sum((0, -1))) / energy,
        ),
        "output_error": (
            relative(attention_output(log_weights(pairs.approximate, visible), value.approximate)),
            unknown,
        ),
    }
    heads = value.exact.shape[1]
    return {
        metric: (_by_kv_head(found, heads), _by_kv_head(predicted, heads))
        for metric, (found, predicted) in per_query_head.items()
    }


def _by_kv_head(values: Tensor, heads: int) -> Tensor:
    """Means over the query heads that share a KV head, `[Hkv]`."""
    return values.reshape(heads, -1).mean(-1)


def inputs_from_activations(
    activations: Activations, share: float = 0.125
) -> tuple[list[DriftInput], int]:
    """The last queries of an activation file, and the longest context that all of them have.

    Args:
        activations: With queries.
        share: Of the queries to keep; at least one is.

    Returns:
        One input for each layer, and the length.
    """
    last = max(1, math.ceil(share * len(activations.query_positions)))
    positions = activations.query_positions[-last:]
    visible = activations.positions <= positions[:, None]
    reach = visible.sum(-1, keepdim=True)
    age = torch.where(visible, reach - 1 - torch.arange(len(activations.positions)), -1)
    inputs = [
        DriftInput(layer.query[-last:], layer.key, layer.value, age, activations.scale)
        for layer in activations.layers.values()
        if layer.query is not None
    ]
    return inputs, int(reach.min())


def gaussian_inputs(
    tokens: int,
    head_dim: int,
    *,
    heads: int = 8,
    queries: int = 8,
    value_mean_share: float = 0.2,
    seed: int = 0,
) -> DriftInput:
    """Gaussian queries and keys whose logits have a standard deviation of 1, and values with an
    offset per channel, as those of models have: else there is nothing that stays while the noise
    averages away.

    Args:
        tokens: T; every query sees all.
        head_dim: D.
        heads: Independent KV heads, one query head each: the units of the standard errors.
        queries: Of every head.
        value_mean_share: Share of the energy of the values in their mean per channel.
        seed: Of the generators.
    """
    value = with_mean(gaussian(tokens, heads, head_dim, seed + 2), value_mean_share, seed + 3)
    return DriftInput(
        gaussian(queries, heads, head_dim, seed),
        gaussian(tokens, heads, head_dim, seed + 1),
        value,
        (tokens - 1 - torch.arange(tokens)).expand(queries, tokens),
        1.0 / math.sqrt(head_dim),
    )


def contexts_up_to(length: int, smallest: int = 16) -> list[int]:
    """Powers of two from `smallest`, and `length` itself.

    >>> contexts_up_to(100)
    [16, 32, 64, 100]
    """
    powers = [smallest << i for i in range(length.bit_length()) if smallest << i < length]
    return [*powers, length]
