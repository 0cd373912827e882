"""How well cheap metrics rank recipes: by the divergence of the whole model, as `kvq eval` has it.

Each metric is taken of an activation file of the same model, with one mode for keys and one for
values. A metric is good if it puts recipes in the order that the model does (Spearman); whether
it is small says nothing. The intervals resample recipes: few recipes leave them wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Tensor

from kvq import reference
from kvq.activations import Activations, LayerActivations
from kvq.analysis.attention_error import attention_output, log_weights
from kvq.analysis.measure import check_modes, thin_queries
from kvq.analysis.prediction import PredictedLayer
from kvq.analysis.score_bias import pair_errors, scores
from kvq.checks import check_kind
from kvq.modes import Mode
from kvq.tier import Tier

#: The metrics, in the order of the table, and what they are called.
METRICS: Final = {
    "bits": "fewer code bits (keys and values)",
    "key_relative_error": "K reconstruction error",
    "value_relative_error": "V reconstruction error",
    "relative_error": "K + V reconstruction error",
    "score_rmse": "centered score RMSE",
    "attention_kl": "KL divergence of the attention weights",
    "output_error": "output error, measured",
    "output_error_predicted": "output error, predicted",
}
#: Resamples of an interval.
_RESAMPLES: Final = 2000
#: A rank correlation of fewer recipes says nothing.
FEWEST: Final = 4


class Judged(NamedTuple):
    """A recipe of one mode per side, with what the model says of it."""

    recipe: str
    key_mode: Mode
    value_mode: Mode
    #: KL divergence from full precision, nats per token.
    kld: float


def cheap_metrics(
    activations: Activations,
    judged: Sequence[Judged],
    *,
    max_queries: int = 256,
    tier: Tier = reference,
) -> pd.DataFrame:
    """Every metric of every recipe, means over layers and heads.

    Args:
        activations: Of the model that judged, with queries.
        judged: The recipes.
        max_queries: Of more queries, evenly spaced ones are used.
        tier: Who quantizes.

    Returns:
        `recipe`, `key_mode`, `value_mode`, `kld`, and the columns of `METRICS`.

    Raises:
        ValueError: There are no queries, or a mode does not suit a head size.
    """
    sides = {
        "key": {one.key_mode.name: one.key_mode for one in judged},
        "value": {one.value_mode.name: one.value_mode for one in judged},
    }
    check_modes(activations, list((sides["key"] | sides["value"]).values()))
    activations = thin_queries(activations, max_queries)
    visible = activations.positions <= activations.query_positions[:, None]
    totals: list[dict[str, float]] = [dict.fromkeys(METRICS, 0.0) for _ in judged]
    with torch.inference_mode():
        for layer in activations.layers.values():
            found = _Layer(layer, visible, activations.scale, sides, tier)
            for total, one in zip(totals, judged, strict=True):
                for name, value in found.metrics(one.key_mode, one.value_mode).items():
                    total[name] += value / len(activations.layers)
    rows = [
        {
            "recipe": one.recipe,
            "key_mode": one.key_mode.name,
            "value_mode": one.value_mode.name,
            "kld": one.kld,
            **total,
        }
        for one, total in zip(judged, totals, strict=True)
    ]
    return pd.DataFrame(rows)


class _Layer:
    """What each mode does to one layer, computed once for all recipes."""

    def __init__(
        self,
        layer: LayerActivations,
        visible: Tensor,
        scale: float,
        sides: dict[str, dict[str, Mode]],
        tier: Tier,
    ) -> None:
        predicted = PredictedLayer(layer, visible, scale, tier)
        assert layer.query is not None
        exact = scores(layer.query, layer.key, scale)
        self._log_p = log_weights(exact, visible)
        self._output = attention_output(self._log_p, layer.value)
        self._keys: dict[str, tuple[dict[str, float], Tensor]] = {}
        self._values: dict[str, tuple[dict[str, float], Tensor]] = {}
        for name, mode in sides["key"].items():
            x_hat = tier.dequantize(*tier.quantize(layer.key, mode), mode, layer.key.shape[-1])
            new = scores(layer.query, x_hat, scale)
            log_p = log_weights(new, visible)
            pairs = pair_errors(exact, new, visible)
            divergence = self._log_p.exp() * torch.where(visible, self._log_p - log_p, 0.0)
            rmse = (pairs.centered_error.square().sum((-1, -2)) / pairs.num_pairs).sqrt()
            numbers = {
                "key_relative_error": _relative(layer.key, x_hat),
                "score_rmse": float(rmse.mean()),
                "attention_kl": float(divergence.sum(-1).mean()),
                "predicted": float(predicted.predict(mode).output_error_key.mean()),
            }
            self._keys[name] = numbers, log_p
        for name, mode in sides["value"].items():
            x_hat = tier.dequantize(*tier.quantize(layer.value, mode), mode, layer.value.shape[-1])
            numbers = {
                "value_relative_error": _relative(layer.value, x_hat),
                "predicted": float(predicted.predict(mode).output_error_value.mean()),
            }
            self._values[name] = numbers, x_hat

    def metrics(self, key_mode: Mode, value_mode: Mode) -> dict[str, float]:
        """The columns of `METRICS`."""
        key, log_p = self._keys[key_mode.name]
        value, x_hat = self._values[value_mode.name]
        moved = (attention_output(log_p, x_hat) - self._output).square().sum((0, -1))
        both = key["key_relative_error"] + value["value_relative_error"]
        return {
            "bits": -math.log2(key_mode.levels) - math.log2(value_mode.levels),
            "key_relative_error": key["key_relative_error"],
            "value_relative_error": value["value_relative_error"],
            "relative_error": both,
            "score_rmse": key["score_rmse"],
            "attention_kl": key["attention_kl"],
            "output_error": float((moved / self._output.square().sum((0, -1))).mean()),
            "output_error_predicted": key["predicted"] + value["predicted"],
        }


def _relative(x: Tensor, x_hat: Tensor) -> float:
    """Squared error over energy, a mean over heads."""
    exact = x.to(torch.float64)
    error = (x_hat.to(torch.float64) - exact).square().sum((0, -1))
    return float((error / exact.square().sum((0, -1))).mean())


def rank_correlations(table: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Spearman's correlation of each metric with the divergence of the model.

    Args:
        table: From `cheap_metrics`.
        seed: Of the resampling.

    Returns:
        `metric`, `name`, `recipes`, `spearman`, and `low` and `high`: the 95% bootstrap interval.

    Raises:
        ValueError: There are fewer than `FEWEST` recipes.
    """
    check_kind("table", table, pd.DataFrame)
    if len(table) < FEWEST:
        raise ValueError(f"recipes must be at least {FEWEST} to be ranked, got {len(table)}")
    generator = np.random.default_rng(seed)
    draws = generator.integers(len(table), size=(_RESAMPLES, len(table)))
    kld = table["kld"].to_numpy(dtype=np.float64)
    rows = []
    for metric, name in METRICS.items():
        values = table[metric].to_numpy(dtype=np.float64)
        resampled = [spearman(values[draw], kld[draw]) for draw in draws]
        low, high = np.nanquantile(resampled, [0.025, 0.975])
        rows.append(
            {
                "metric": metric,
                "name": name,
                "recipes": len(table),
                "spearman": spearman(values, kld),
                "low": float(low),
                "high": float(high),
            }
        )
    return pd.DataFrame(rows)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Correlation of the ranks, ties at their mean; NaN if all of either are the same."""
    a, b = rankdata(x), rankdata(y)
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm else math.nan
