"""KL divergence and perplexity of the real model against stored bits, for every kept recipe."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings
from paper_figures.style import kept, main

NAME = "figure_quality"
#: The results, the best first.
SOURCES = ("eval-smollm2.json", "eval-smollm2-cpu-sample.json")


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers; the activations are not used."""
    found = kept(*SOURCES)
    assert found is not None, f"results must hold one of {SOURCES}"
    document, source = found
    table = pd.DataFrame(document["rows"]).assign(source=source)
    table = table.sort_values(["bits_per_value", "kld"], ignore_index=True)
    front = table["kld"] < table["kld"].cummin().shift(fill_value=np.inf)
    table["on_front"] = front
    figure = Figure(figsize=(9.0, 3.6 + 0.17 * len(table)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3.2, 0.17 * len(table) + 0.6))
    top, bottom = above.subplots(), below.subplots()
    interval = np.minimum(plots.CONFIDENCE * table["kld_se"].fillna(0), 0.9 * table["kld"])
    top.errorbar(
        table["bits_per_value"], table["kld"], yerr=interval,
        fmt="o", color=plots.BLUE, ecolor=plots.GRAY, elinewidth=0.9,
    )  # fmt: skip
    top.plot(
        table["bits_per_value"][front], table["kld"][front], color=plots.VERMILION, lw=1.2,
        label="no smaller recipe diverges less",
    )  # fmt: skip
    places: list[tuple[float, float]] = []
    for number, (bits, kld) in enumerate(table[["bits_per_value", "kld"]].to_numpy(), start=1):
        # Numbers of recipes that lie on each other stand side by side.
        near = sum(abs(b - bits) < 0.1 and abs(np.log(k / kld)) < 0.3 for b, k in places)
        places.append((bits, kld))
        top.annotate(
            str(number), (bits, kld), xytext=(5 + 10 * near, 3),
            textcoords="offset points", fontsize=7,
        )  # fmt: skip
    top.set(
        yscale="log",
        xlabel="stored bits per value",
        ylabel="KL divergence, nats per token",
        title=f"{document['inputs']['model']}, {int(table['tokens'].max())} tokens",
    )
    top.title.set_fontsize(8.5)
    top.legend()
    ranks = np.arange(len(table))
    bottom.errorbar(
        table["perplexity_ratio"] - 1, ranks,
        xerr=plots.CONFIDENCE * table["perplexity_ratio_se"].fillna(0),
        fmt="s", color=plots.GREEN, ecolor=plots.GRAY, elinewidth=0.9,
    )  # fmt: skip
    names = [recipe.replace("_per_token_head", "") for recipe in table["recipe"]]
    bottom.set_yticks(ranks, [f"{i + 1}  {name}" for i, name in enumerate(names)], fontsize=7)
    bottom.set_xscale("symlog", linthresh=0.01)
    bottom.axvline(0.0, color=plots.GRAY, lw=0.9)
    bottom.set(ylim=(len(table) - 0.4, -0.6), xlabel="perplexity over full precision's, less 1")
    bottom.xaxis.set_major_formatter("{x:g}")
    return figure, table


if __name__ == "__main__":
    main(NAME, draw)
