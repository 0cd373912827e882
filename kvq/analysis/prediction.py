"""What a mode should do to scores and outputs, from the activations alone: nothing is quantized.

A row `x` is taken to read back as `gain * x + shift + noise`. Gain and noise come from the mode:
for codebooks, from its error on rows in random directions at this head size (`theory.predict`);
for integers and floats, from the width of a step, which the range of the row fixes. All the rest
are statistics of the activations: norms, scores, how far values lie from the output, and how much
they are alike. With `s` the scores, `p` their weights and `o` the output, the error of a score has
mean `b` and variance `v`, and to first order

    E|o_hat - o|^2 = sum p^2 v |value - o|^2 + |sum p (b - sum p b) value|^2       (keys)
                   + sum_ij p_i p_j E[noise_i . noise_j] + |sum p mean error|^2    (values).

Rows that are alike have errors that are alike, which do not average away in the output. For steps
of width `w` and rows that differ by Gaussian amounts of variance `d` the correlation of the errors
is `6 / pi^2 sum_k exp(-2 pi^2 k^2 d / w^2) / k^2` (the Fourier series of the sawtooth).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from kvq import reference
from kvq.activations import Activations, LayerActivations
from kvq.analysis.attention_error import attention_output, log_weights
from kvq.analysis.measure import check_modes, thin_queries
from kvq.analysis.measured_layer import Row
from kvq.analysis.rounding_drift import moments_of_rounding, signed_step
from kvq.analysis.samples import gaussian
from kvq.analysis.score_bias import pair_errors, scores, slope_of
from kvq.analysis.theory import predict
from kvq.checks import check_int
from kvq.modes import Grid, Mode, Normalization
from kvq.tier import Tier, check_tier

#: Columns of the table of `predict_activations`.
COLUMNS: Final = (
    "layer", "head", "query_head", "mode", "quantized", "metric", "value",
)  # fmt: skip
#: The largest score noise (`Predicted.score_noise`) up to which the predicted error of outputs was
#: found to hold on the embedded sample (`kvq predict` prints it); beyond, it comes out too large.
LARGEST_NOISE: Final = 2.0
#: Random rows behind gain and noise of a codebook mode.
ISOTROPIC_ROWS: Final = 2**11
#: Terms of the correlation of errors; the next ones are below 1% of the first.
_TERMS: Final = (1.0, 4.0, 9.0, 16.0)


class RowModel(NamedTuple):
    """How rows should read back: `gain * x + shift * direction + noise`, as float64."""

    #: `[T, H]`.
    gain: Tensor
    #: `[T, H]`: how far every entry of the rotated row moves; 0 unless codes are truncated.
    shift: Tensor
    #: `[D]`: the direction of that in the original domain.
    direction: Tensor
    #: `[T, H, 1]` or `[T, H, D]`: variance of the noise of an entry.
    noise: Tensor
    #: Variance of the gain beyond what the noise already gives it; may be negative.
    gain_variance: Tensor

    def mean(self, x: Tensor) -> Tensor:
        """`[T, H, D]`: the expected row."""
        return self.gain[..., None] * x.to(torch.float64) + self.shift[..., None] * self.direction

    def noise_energy(self, x: Tensor) -> Tensor:
        """`[T, H]`: the expected squared length of a row's noise."""
        channels = x.shape[-1] / self.noise.shape[-1]
        energy = x.to(torch.float64).square().sum(-1)
        return channels * self.noise.sum(-1) + self.gain_variance * energy

    def noise_products(self, x: Tensor) -> Tensor:
        """`[H, T, T]`: the expected products of the noises of two rows.

        Args:
            x: `[T, H, D]`, the rows.
        """
        energy = self.noise_energy(x).T  # [H, T]
        floor = torch.finfo(torch.float64).tiny
        unit = x.to(torch.float64).permute(1, 0, 2) / energy.clamp_min(floor).sqrt()[..., None]
        # An error that is uniform on a step w has the variance w^2 / 12 in every entry.
        close = torch.exp(-(math.pi**2) / 6.0 * torch.cdist(unit, unit).square())
        correlation = sum(close**k / k for k in _TERMS) / sum(1.0 / k for k in _TERMS)
        root = energy.sqrt()
        return correlation * root[:, :, None] * root[:, None, :]


def row_model(x: Tensor, mode: Mode, tier: Tier = reference) -> RowModel:
    """How a mode should read rows back.

    Args:
        x: `[T, H, D]`.
        mode: Which.
        tier: Who rotates.
    """
    if mode.rounding is None:
        return _isotropic_model(x, mode)
    return _stepped_model(x, mode, tier)


class _Isotropic(NamedTuple):
    """A codebook mode on rows in random directions."""

    gain: float
    #: `E|x_hat - gain x|^2 / |x|^2`.
    noise: float
    #: The part of the noise along the row.
    along: float


@lru_cache(maxsize=256)
def _isotropic(mode: Mode, head_dim: int) -> _Isotropic:
    prediction = predict(mode, head_dim, rows=ISOTROPIC_ROWS)
    x = gaussian(ISOTROPIC_ROWS, 1, head_dim)[:, 0]
    x_hat = reference.dequantize(*reference.quantize(x, mode), mode, head_dim).to(torch.float64)
    exact = x.to(torch.float64)
    gains = (x_hat * exact).sum(-1) / exact.square().sum(-1)
    noise = prediction.relative_error - (1.0 - prediction.gain) ** 2
    return _Isotropic(prediction.gain, noise, min(noise, float(gains.var())))


def _isotropic_model(x: Tensor, mode: Mode) -> RowModel:
    head_dim = x.shape[-1]
    found = _isotropic(mode, head_dim)
    energy = x.to(torch.float64).square().sum(-1)
    noise = (found.noise - found.along) / (head_dim - 1)
    return RowModel(
        torch.full_like(energy, found.gain),
        torch.zeros_like(energy),
        torch.zeros(head_dim, dtype=torch.float64),
        (noise * energy)[..., None],
        torch.full_like(energy, found.along - noise),
    )


def _stepped_model(x: Tensor, mode: Mode, tier: Tier) -> RowModel:
    """An error is uniform on a step; the step is the range of the row over the codes.

    Truncation moves signed codes towards zero, which shrinks the row, and unsigned ones down.
    """
    assert mode.rounding is not None
    head_dim = x.shape[-1]
    size = float(mode.gain(head_dim))
    y = x if mode.rotation is None else tier.hadamard_transform(x, mode.rotation)
    y = y.to(torch.float64)
    step = _step(y, mode)
    below, variance = moments_of_rounding(mode.rounding)
    down = torch.ones((1, head_dim))
    if mode.rotation is not None:
        down = tier.hadamard_transform(down, mode.rotation, inverse=True)
    energy = y.square().sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    if mode.grid is Grid.UNSIGNED:
        moved, toward_zero = -below * step[..., 0], torch.zeros_like(y)
    else:
        moved, toward_zero = torch.zeros_like(energy), -below * step * torch.sign(y)
    change = (toward_zero * y).sum(-1) / energy
    noise = variance * step.square() + (toward_zero - change[..., None] * y).square()
    if mode.rotation is not None:
        # Turned back, the noise of every rotated entry is spread over all.
        noise = noise.mean(-1, keepdim=True) / size
    return RowModel(
        1.0 + change, moved, down[0].to(torch.float64), noise, torch.zeros_like(energy)
    )


def _step(y: Tensor, mode: Mode) -> Tensor:
    """Distance between codes around each entry: `[T, H, 1]` or `[T, H, D]`."""
    if mode.grid is Grid.UNSIGNED:
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        if mode.normalization is Normalization.ZERO_RANGE:
            low, high = low.clamp_max(0.0), high.clamp_min(0.0)
        return (high - low) / mode.max_code
    largest = torch.finfo(torch.float8_e4m3fn).max if mode.grid is Grid.E4M3 else mode.max_code
    size = y.abs()
    scale = size.amax(-1) / largest
    step = signed_step(y, scale.clamp_min(torch.finfo(torch.float64).tiny), mode)
    # The entry that the scale is made of has a code of its own.
    return torch.where(size < size.amax(-1, keepdim=True), step, 0.0)


class Predicted(NamedTuple):
    """What one mode should do to each query head, `[Hq]` float64.

    The scores' fields are those of `score_bias.ScoreBias`; output errors are relative to
    `sum |o|^2` over the queries.
    """

    mean_error: Tensor
    slope: Tensor
    centered_rmse: Tensor
    rmse: Tensor
    #: Root mean square error of a score, weighted by attention: what says whether the first order
    #: holds.
    score_noise: Tensor
    #: With keys alone in this mode, and with values alone. Both together: about the sum.
    output_error_key: Tensor
    output_error_value: Tensor


class PredictedLayer:
    """A layer with queries; its exact scores, weights and outputs are computed once."""

    def __init__(
        self,
        layer: LayerActivations,
        visible: Tensor,
        scale: float,
        tier: Tier = reference,
    ) -> None:
        """Keep what all modes share.

        Args:
            layer: With queries.
            visible: `[Q, T]` bool; every query sees a key.
            scale: The softmax scale.
            tier: Who rotates.

        Raises:
            ValueError: The layer has no queries.
        """
        if layer.query is None:
            raise ValueError("layer must have queries to predict its scores, got none")
        self._layer = layer
        self._query = layer.query.to(torch.float64)
        self._visible = visible
        self._scale = scale
        self._tier = tier
        self._scores = scores(self._query, layer.key, scale)
        self._log_p = log_weights(self._scores, visible)
        self._p = self._log_p.exp()
        self._value = layer.value.to(torch.float64)
        self._output = attention_output(self._log_p, self._value)
        self._energy = self._output.square().sum((0, -1))

    def predict(self, mode: Mode) -> Predicted:
        """Predict what keys, and values, in this mode do."""
        key = row_model(self._layer.key, mode, self._tier)
        mean, variance = self._score_errors(key)
        pairs = pair_errors(self._scores, self._scores + mean, self._visible)
        per_query = self._visible.sum(-1)
        noise = variance * self._visible
        centered = pairs.centered_error.square() + noise * (1.0 - 1.0 / per_query)[:, None]
        center = (self._p * mean).sum(-1, keepdim=True)
        seen = self._p * ((mean - center).square() + variance)
        return Predicted(
            mean_error=pairs.error.sum((-1, -2)) / pairs.num_pairs,
            slope=slope_of(pairs),
            centered_rmse=(centered.sum((-1, -2)) / pairs.num_pairs).sqrt(),
            rmse=((pairs.error.square() + noise).sum((-1, -2)) / pairs.num_pairs).sqrt(),
            score_noise=seen.sum(-1).mean(-1).sqrt(),
            output_error_key=self._key_error(mean - center, variance) / self._energy,
            output_error_value=self._value_error(mode) / self._energy,
        )

    def _score_errors(self, key: RowModel) -> tuple[Tensor, Tensor]:
        """Mean and variance of the error of every score, `[Hq, Q, T]`."""
        group = self._query.shape[1] // self._layer.key.shape[1]

        def of_keys(x: Tensor) -> Tensor:
            return x.T.repeat_interleave(group, 0)[:, None]  # [Hq, 1, T]

        along = (self._query @ key.direction).T[..., None] * self._scale  # [Hq, Q, 1]
        mean = (of_keys(key.gain) - 1.0) * self._scores + of_keys(key.shift) * along
        square = self._query.square()
        if key.noise.shape[-1] == 1:
            square = square.sum(-1, keepdim=True)
        variance = scores(square, key.noise, self._scale**2)
        variance = variance + of_keys(key.gain_variance) * self._scores.square()
        return mean, variance.clamp_min(0.0)

    def _key_error(self, centered: Tensor, variance: Tensor) -> Tensor:
        """`sum |o_hat - o|^2` over the queries, `[Hq]`, from the moments of the scores' errors."""
        heads = self._value.shape[1]
        shape = (heads, -1, self._value.shape[0])
        weight = (self._p.square() * variance).reshape(shape)  # [Hkv, group * Q, T]
        length = self._value.square().sum(-1).T[..., None]  # [Hkv, T, 1]
        output = self._output.permute(1, 0, 2)  # [Hq, Q, Dv]
        mean = (weight @ self._value.permute(1, 0, 2)).reshape(output.shape)
        spread = (weight @ length).reshape(output.shape[:2])
        total = weight.sum(-1).reshape(output.shape[:2])
        random = spread - 2.0 * (mean * output).sum(-1) + total * output.square().sum(-1)
        moved = (self._p * centered).reshape(shape) @ self._value.permute(1, 0, 2)
        return random.sum(-1) + moved.square().sum(-1).reshape(output.shape[:2]).sum(-1)

    def _value_error(self, mode: Mode) -> Tensor:
        model = row_model(self._layer.value, mode, self._tier)
        moved = attention_output(self._log_p, model.mean(self._value)) - self._output
        products = model.noise_products(self._value)  # [Hkv, T, T]
        weights = self._p.reshape(products.shape[0], -1, products.shape[-1])
        random = ((weights @ products) * weights).sum(-1).reshape(self._p.shape[:2])
        return moved.square().sum((0, -1)) + random.sum(-1)


def predict_activations(
    activations: Activations,
    modes: Sequence[Mode],
    *,
    max_queries: int = 256,
    tier: Tier = reference,
) -> pd.DataFrame:
    """Predict every mode on every layer.

    Args:
        activations: With queries.
        modes: Which; their names must differ.
        max_queries: Of more queries, evenly spaced ones are used, as in `measure`.
        tier: Who rotates.

    Returns:
        A row for each number, of `COLUMNS`: the scores' metrics with `quantized` "key";
        `output_error` with "key" and "value".

    Raises:
        ValueError: There are no queries, or a mode does not suit a head size.
    """
    check_modes(activations, modes)
    check_tier(tier)
    check_int("max_queries", max_queries, 1)
    activations = thin_queries(activations, max_queries)
    rows: list[Row] = []
    visible = activations.positions <= activations.query_positions[:, None]
    with torch.inference_mode():
        for index, layer in activations.layers.items():
            predicted = PredictedLayer(layer, visible, activations.scale, tier)
            group = 0 if layer.query is None else layer.query.shape[1] // layer.key.shape[1]
            for mode in modes:
                rows += _rows(predicted.predict(mode), index, group, mode)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(predicted: Predicted, index: int, group: int, mode: Mode) -> Iterator[Row]:
    for name, values in predicted._asdict().items():
        metric, quantized = name, "key"
        if name.startswith("output_error"):
            metric, quantized = "output_error", name.removeprefix("output_error_")
        for head, value in enumerate(values.tolist()):
            yield {
                "layer": index,
                "head": head // group,
                "query_head": head,
                "mode": mode.name,
                "quantized": quantized,
                "metric": metric,
                "value": value,
            }
