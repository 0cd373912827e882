"""One row for each mode: the means over layers and heads, beside the theory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd
import torch

from kvq.analysis.estimates import over_units
from kvq.analysis.quantization_error import decibels
from kvq.modes import Mode, short_name

#: What the columns of the summary are called where people read them.
HEADINGS: Final = {
    "bits_per_value": "bits/value",
    "compression": "compression",
    "key_relative_error": "K error",
    "value_relative_error": "V error",
    "theory_relative_error": "theory",
    "score_slope": "slope",
    "theory_gain": "theory slope",
    "score_mean_error": "score bias",
    "score_centered_rmse": "score RMSE",
    "attention_kl": "KL",
    "attention_tv": "TV",
    "output_error": "output error",
}
#: A standard error this small beside its value is not worth its digits.
EXACT: Final = 1e-7
#: Smaller numbers, if their standard errors are smaller too, are written with an exponent.
SMALLEST_DECIMAL: Final = 1e-4


def summarize(tables: Mapping[str, pd.DataFrame], modes: Sequence[Mode]) -> pd.DataFrame:
    """One row for each mode, in their order.

    Values are means over layers and KV heads, query heads averaged within their KV head; standard
    errors (`_se`) take layer and KV head as the unit. The theory is that of the keys' head size.

    Args:
        tables: From `measure`.
        modes: The same as there.
    """
    quantization = tables["quantization_error"].query("tokens == 'all'")
    attention = tables["attention_error"]
    score = tables["score_bias"]
    sources = {
        "key_relative_error": select(quantization, side="key", metric="relative_error"),
        "value_relative_error": select(quantization, side="value", metric="relative_error"),
        "score_slope": select(score, metric="slope"),
        "score_mean_error": select(score, metric="mean_error"),
        "score_centered_rmse": select(score, metric="centered_rmse"),
        "attention_kl": select(attention, metric="kl_divergence"),
        "attention_tv": select(attention, metric="total_variation"),
        "output_error": select(attention, metric="output_error", quantized="both"),
        "output_error_key": select(attention, metric="output_error", quantized="key"),
        "output_error_value": select(attention, metric="output_error", quantized="value"),
    }
    rows: list[dict[str, object]] = []
    for mode in modes:
        means = {name: _over_heads(select(part, mode=mode.name)) for name, part in sources.items()}
        counted = select(tables["accounting"], mode=mode.name).set_index("metric")["value"]
        predicted = select(tables["theory"], mode=mode.name)
        predicted = predicted[predicted["kind"].isin(("exact", "monte_carlo"))]
        relative = select(predicted, metric="relative_error").iloc[0]
        gain = select(predicted, metric="gain").iloc[0]
        row: dict[str, object] = {
            "mode": mode.name,
            "bits_per_value": counted["bits_per_value"],
            "compression": counted["compression"],
        }
        for name in ("key_relative_error", "value_relative_error"):
            value, standard_error = means.pop(name)
            row |= {name: value, f"{name}_se": standard_error}
            row[name.replace("relative_error", "snr_db")] = _decibels(value)
        row |= {
            "theory_relative_error": relative["value"],
            "theory_relative_error_se": relative["standard_error"],
            "theory_snr_db": _decibels(relative["value"]),
            "theory_gain": gain["value"],
            "theory_gain_se": gain["standard_error"],
            "theory_kind": relative["kind"],
        }
        for name, (value, standard_error) in means.items():
            row |= {name: value, f"{name}_se": standard_error}
        rows.append(row)
    return pd.DataFrame(rows)


def select(table: pd.DataFrame, **equal: object) -> pd.DataFrame:
    """The rows whose columns have these values."""
    for column, value in equal.items():
        table = table[table[column] == value]
    return table


def headline(summary: pd.DataFrame) -> pd.DataFrame:
    """The summary as text to print: short names, and every value with its standard error.

    Args:
        summary: From `summarize`.
    """
    columns: dict[str, list[str]] = {"mode": [short_name(name) for name in summary["mode"]]}
    for name in ("bits_per_value", "compression"):
        columns[HEADINGS[name]] = [f"{value:.3f}" for value in summary[name]]
    for name, heading in HEADINGS.items():
        if f"{name}_se" in summary:
            pairs = zip(summary[name], summary[f"{name}_se"], strict=True)
            columns[heading] = [" ± ".join(filter(None, with_error(*pair))) for pair in pairs]
    columns["theory from"] = [str(kind).replace("_", " ") for kind in summary["theory_kind"]]
    return pd.DataFrame(columns)


def with_error(value: float, standard_error: float) -> tuple[str, str]:
    """A value with the digits that its standard error leaves it, and that error.

    Either is empty if it is not a number; a value that is exact, or as good as, keeps five digits.

    >>> with_error(0.0078461, 0.0000892), with_error(3.4861e-05, 4.1e-07)
    (('0.00785', '0.00009'), ('3.49e-05', '4e-07'))
    """
    if math.isnan(value):
        return "", ""
    if math.isnan(standard_error) or standard_error <= EXACT * abs(value):
        return f"{value:.5g}", ""
    last = math.floor(math.log10(standard_error))
    # A leading 1 would be half gone by rounding.
    last -= standard_error < 2 * 10.0**last
    if max(abs(value), standard_error) >= SMALLEST_DECIMAL:
        digits = max(0, -last)
        return f"{value:.{digits}f}", f"{standard_error:.{digits}f}"
    digits = 0 if value == 0 else max(0, math.floor(math.log10(abs(value))) - last)
    return f"{value:.{digits}e}", f"{standard_error:.0e}"


def _decibels(relative_error: float) -> float:
    return float(decibels(torch.tensor(relative_error, dtype=torch.float64)))


def _over_heads(table: pd.DataFrame) -> tuple[float, float]:
    """Mean and standard error over (layer, KV head)."""
    if table.empty:
        return math.nan, math.nan
    means = table.groupby(["layer", "head"], sort=True)["value"].mean()
    estimate = over_units(torch.tensor(means.to_numpy(), dtype=torch.float64))
    return float(estimate.value), float(estimate.standard_error)
