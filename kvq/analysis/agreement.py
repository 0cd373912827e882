"""The prediction beside the measurement: their ratios, by mode and by the noise of the scores.

A measurement is of one table of signs and of rows that a few keys may dominate; a prediction is a
mean over rotations. So single heads scatter, and the means over heads say whether it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd

from kvq import reference
from kvq.activations import Activations
from kvq.analysis.measure import Settings, measure
from kvq.analysis.prediction import LARGEST_NOISE, predict_activations
from kvq.analysis.summary import select
from kvq.modes import Mode
from kvq.tier import Tier

#: What identifies a number of both tables.
_KEYS: Final = ("layer", "head", "query_head", "mode", "quantized", "metric")
#: Edges of the bins of score noise, in logits.
NOISE_EDGES: Final = (0.0, 0.1, 0.2, 0.5, 1.0, LARGEST_NOISE, np.inf)
#: The columns of `by_mode` that compare: their name, the metric, and what is quantized.
COMPARED: Final = (
    ("score_slope", "slope", "key"),
    ("score_rmse", "centered_rmse", "key"),
    ("output_error_key", "output_error", "key"),
    ("output_error_value", "output_error", "value"),
)


def predicted_and_measured(
    activations: Activations,
    modes: Sequence[Mode],
    *,
    settings: Settings | None = None,
    tier: Tier = reference,
) -> pd.DataFrame:
    """Every number that is both predicted and measured.

    Args:
        activations: With queries.
        modes: Which; their names must differ.
        settings: Of the measurement.
        tier: Who quantizes.

    Returns:
        `layer`, `head`, `query_head`, `mode`, `quantized`, `metric`, `predicted`, `measured`,
        `standard_error` (of the measured one) and `score_noise` (predicted, of the head's keys).

    Raises:
        ValueError: There are no queries, or a mode does not suit a head size.
    """
    settings = Settings() if settings is None else settings
    predicted = predict_activations(
        activations, modes, max_queries=settings.max_queries, tier=tier
    )
    tables = measure(
        activations,
        modes,
        settings=settings,
        tier=tier,
        only=("score_bias", "attention_error"),
    )
    measured = pd.concat([tables["score_bias"].assign(quantized="key"), tables["attention_error"]])
    keys = list(_KEYS)
    table = predicted.rename(columns={"value": "predicted"}).merge(
        measured.rename(columns={"value": "measured"}), on=keys
    )
    head = ["layer", "query_head", "mode"]
    noise = select(predicted, metric="score_noise")[[*head, "value"]]
    return table.merge(noise.rename(columns={"value": "score_noise"}), on=head)


def by_mode(table: pd.DataFrame) -> pd.DataFrame:
    """Means over layers and heads, a row for each mode.

    Args:
        table: From `predicted_and_measured`.

    Returns:
        `mode`; for each of `COMPARED` its name, the same with `_predicted`, and with `_ratio`;
        `score_noise`, and `in_range`: whether that is at most `LARGEST_NOISE`.
    """
    rows = []
    for mode, part in table.groupby("mode", sort=False):
        row: dict[str, object] = {"mode": mode}
        for name, metric, quantized in COMPARED:
            means = select(part, metric=metric, quantized=quantized)[["predicted", "measured"]]
            predicted, measured = means.mean()
            row |= {
                name: measured,
                f"{name}_predicted": predicted,
                f"{name}_ratio": predicted / measured if measured else np.nan,
            }
        noise = float(select(part, metric="slope")["score_noise"].mean())
        rows.append({**row, "score_noise": noise, "in_range": noise <= LARGEST_NOISE})
    return pd.DataFrame(rows)


def by_noise(table: pd.DataFrame) -> pd.DataFrame:
    """The ratio of predicted to measured output error of the keys, by the noise of the scores.

    Args:
        table: From `predicted_and_measured`.

    Returns:
        `above` and `up_to` (logits), `heads` (query heads of a layer and mode), the geometric mean
        `ratio`, and `low` and `high`: its 10th and 90th percentiles.
    """
    heads = select(table, metric="output_error", quantized="key")
    heads = heads[(heads["predicted"] > 0) & (heads["measured"] > 0)]
    ratio = np.log(heads["predicted"].to_numpy() / heads["measured"].to_numpy())
    noise = heads["score_noise"].to_numpy()
    rows = []
    for above, up_to in pairwise(NOISE_EDGES):
        part = ratio[(noise > above) & (noise <= up_to)]
        if not len(part):
            continue
        low, high = np.quantile(part, [0.1, 0.9])
        rows.append(
            {
                "above": above,
                "up_to": up_to,
                "heads": len(part),
                "ratio": float(np.exp(part.mean())),
                "low": float(np.exp(low)),
                "high": float(np.exp(high)),
            }
        )
    return pd.DataFrame(rows)
