"""The picture of a model's quality: what each recipe costs and what it loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvq.analysis.labels import place_labels

_POINT = "#2d6cdf"
_BEST = "#c23616"


def quality_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw divergence and perplexity against bits per value.

    Args:
        rows: `recipe`, `bits_per_value`, `kld`, `kld_se`, `perplexity_ratio`,
            `perplexity_ratio_se` of each recipe. Those that no smaller recipe beats are joined.

    Returns:
        A figure that belongs to no window: save it with `figure.savefig`.
    """
    figure = Figure(figsize=(11.0, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, name, offset, title in (
        (left, "kld", 0.0, "KL divergence from full precision, nats per token"),
        (right, "perplexity_ratio", 1.0, "perplexity over full precision's, less 1"),
    ):
        shown = [row for row in rows if row[name] > offset]
        bits = [row["bits_per_value"] for row in shown]
        loss = [row[name] - offset for row in shown]
        error = [np.nan_to_num(row.get(f"{name}_se", 0.0)) for row in shown]
        # An error bar on a logarithmic axis ends above zero.
        below = [min(e, 0.9 * x) for e, x in zip(error, loss, strict=True)]
        axes.errorbar(
            bits, loss, yerr=[below, error], fmt="o", ms=4, lw=0.8, color=_POINT, alpha=0.8
        )
        front = _front(bits, loss)
        axes.plot(
            [bits[i] for i in front], [loss[i] for i in front], "-", lw=1.0, color=_BEST, zorder=0
        )
        if shown:
            axes.set_yscale("log")
        axes.set_xlabel("bits per value, words counted")
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.25, which="both")
        names = [row["recipe"].replace("_per_token_head", "") for row in shown]
        place_labels(axes, list(zip(bits, loss, names, strict=True)), fontsize=6)
    return figure


def _front(bits: Sequence[float], loss: Sequence[float]) -> list[int]:
    """Those that lose less than every smaller one, by size."""
    front: list[int] = []
    for i in sorted(range(len(bits)), key=lambda i: (bits[i], loss[i])):
        if not front or loss[i] < loss[front[-1]]:
            front.append(i)
    return front
