"""Predicted against measured error of the attention output, and where the prediction holds."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.agreement import by_noise, predicted_and_measured
from kvq.analysis.measure import Settings
from kvq.analysis.prediction import LARGEST_NOISE
from kvq.analysis.summary import select
from kvq.modes import MODES
from paper_figures.style import main

NAME = "figure_error_budget"


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers: a row for each mode, layer and side, a mean over heads."""
    heads = predicted_and_measured(activations, list(MODES.values()), settings=settings)
    heads = select(heads, metric="output_error")
    keys = ["mode", "layer", "quantized"]
    table = heads.groupby(keys, sort=False)[["predicted", "measured", "score_noise"]].mean()
    table = table.reset_index()
    table["ratio"] = table["predicted"] / table["measured"]
    bits = np.array([MODES[name].bits for name in table["mode"]])
    styles = {
        1: (plots.VERMILION, "o"),
        2: (plots.ORANGE, "s"),
        3: (plots.GREEN, "^"),
        4: (plots.BLUE, "D"),
    }
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, side in zip(panels[:2], ("key", "value"), strict=True):
        for count in sorted(set(bits.tolist())):
            part = table[(table["quantized"] == side) & (bits == count)]
            color, marker = styles.get(count, (plots.BLACK, "x"))
            axes.plot(
                part["measured"], part["predicted"], marker, color=color, ms=3.5,
                label=f"{count} bit{'s' * (count > 1)}",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="measured", title=f"output error, {side}s")
        axes.axline((0.01, 0.01), (0.1, 0.1), color=plots.GRAY, lw=0.9, zorder=0)
    panels[0].set_ylabel("predicted")
    bins = by_noise(heads)
    x = np.sqrt(np.maximum(bins["above"], 0.02) * np.minimum(bins["up_to"], 8.0))
    panels[2].errorbar(
        x, bins["ratio"], yerr=[bins["ratio"] - bins["low"], bins["high"] - bins["ratio"]],
        fmt="o", color=plots.BLUE, ecolor=plots.SKY,
    )  # fmt: skip
    panels[2].axhline(1.0, color=plots.GRAY, lw=0.9)
    panels[2].axvline(LARGEST_NOISE, color=plots.VERMILION, ls="--", lw=0.9)
    panels[2].set(
        xscale="log", yscale="log", xlabel="score noise, logits",
        title="keys: ratio",
    )  # fmt: skip
    panels[2].set_yticks([0.5, 1.0, 2.0], ["0.5", "1", "2"])
    panels[2].yaxis.set_minor_formatter("")
    panels[2].xaxis.set_major_formatter("{x:g}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure, table


if __name__ == "__main__":
    main(NAME, draw)
