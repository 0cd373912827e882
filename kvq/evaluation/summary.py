"""Windows to numbers: perplexity, divergence and agreement, with standard errors over windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd
import torch
from torch import Tensor

from kvq.analysis.estimates import Estimate, jackknife
from kvq.evaluation.windows import WindowSums

#: The phases of a summary: both together, and each.
PHASES = ("all", "prefill", "decode")


def window_table(sums: Iterable[WindowSums]) -> pd.DataFrame:
    """One row for each window, recipe and phase, the first if there are several."""
    table = pd.DataFrame([row._asdict() for row in sums], columns=list(WindowSums._fields))
    return table.drop_duplicates(["window", "recipe", "phase"], ignore_index=True)


def summarize(table: pd.DataFrame, bits: Mapping[str, float]) -> pd.DataFrame:
    """One row for each recipe and phase.

    Args:
        table: As `window_table` makes it.
        bits: Bits per value of each recipe.

    Returns:
        `recipe`, `phase`, `bits_per_value`, `windows`, `tokens`; `perplexity`,
        `perplexity_full`, `perplexity_ratio` (of the former to the latter), `kld` and `top1`, each
        but `perplexity_full` with its `_se`. Errors are delete-one-window jackknives, and the
        ratio's is paired: both models saw the same windows.
    """
    rows = []
    for recipe, of_recipe in table.groupby("recipe", sort=False):
        for phase in PHASES:
            part = of_recipe if phase == "all" else of_recipe[of_recipe["phase"] == phase]
            if part.empty:
                continue
            by_window = part.groupby("window")[["tokens", "nll", "full_nll", "kld", "agree"]].sum()
            rows.append(
                {
                    "recipe": recipe,
                    "phase": phase,
                    "bits_per_value": bits[str(recipe)],
                    "windows": len(by_window),
                    "tokens": int(by_window["tokens"].sum()),
                    **_measures(by_window),
                }
            )
    return pd.DataFrame(rows)


def _measures(by_window: pd.DataFrame) -> dict[str, float]:
    sums = {
        name: torch.tensor(by_window[name].to_numpy(), dtype=torch.float64) for name in by_window
    }
    tokens, nll, full = sums["tokens"], sums["nll"], sums["full_nll"]
    estimates = {
        "perplexity": jackknife(_exp_mean, nll, tokens),
        "perplexity_ratio": jackknife(_exp_mean, nll - full, tokens),
        "kld": jackknife(torch.divide, sums["kld"], tokens),
        "top1": jackknife(torch.divide, sums["agree"], tokens),
    }
    measures = {"perplexity_full": float(_exp_mean(full.sum(), tokens.sum()))}
    for name, estimate in estimates.items():
        measures |= _named(name, estimate)
    return measures


def _exp_mean(total: Tensor, count: Tensor) -> Tensor:
    return (total / count).exp()


def _named(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: float(estimate.value), f"{name}_se": float(estimate.standard_error)}
