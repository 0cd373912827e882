"""Every codebook that ships: levels and thresholds over the density that it was fitted to."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings
from kvq.codebooks import CODEBOOKS
from kvq.reference.laws import law
from paper_figures.style import main

NAME = "figure_codebooks"
COLUMNS = 2
#: Where a density is cut, so that a spike leaves room for the rest.
_TALLEST = 1.2


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers; the activations are not used."""
    rows_down = -(-len(CODEBOOKS) // COLUMNS)
    figure = Figure(figsize=(9.0, 1.35 * rows_down + 0.4), layout="constrained")
    panels = figure.subplots(rows_down, COLUMNS, squeeze=False).ravel()
    numbers = []
    for axes, book in zip(panels, CODEBOOKS.values(), strict=False):
        known = law(book.recipe.distribution)
        reach = max(3.0 * known.deviation, 1.25 * max(map(abs, book.levels)))
        low, high = max(-reach, known.support[0]), min(reach, known.support[1])
        x = np.linspace(low, high, 1001)[1:-1]
        density = known.density(x)
        top = min(_TALLEST, 1.25 * float(density[np.abs(x) < 0.9 * high].max()))
        axes.fill_between(x, density, color="#C5CBD3", lw=0, label="density")
        axes.vlines(book.thresholds, 0, top, color=plots.BLACK, lw=0.7, ls=":", label="thresholds")
        axes.vlines(book.levels, 0, 0.85 * top, color=plots.VERMILION, lw=1.3, label="levels")
        tops = np.full(book.num_levels, 0.85 * top)
        axes.plot(book.levels, tops, "o", ms=3, color=plots.VERMILION)
        axes.set(xlim=(low, high), ylim=(0, top), yticks=[])
        axes.set_title(f"{book} ({known})", fontsize=8.5)
        axes.grid(visible=False)
        for kind, values in (("level", book.levels), ("threshold", book.thresholds)):
            numbers += [
                {
                    "codebook": book.name,
                    "law": known.name,
                    "kind": kind,
                    "index": i,
                    "value": value,
                }
                for i, value in enumerate(values)
            ]
    for axes in panels[len(CODEBOOKS) :]:
        axes.set_axis_off()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure, pd.DataFrame(numbers)


if __name__ == "__main__":
    main(NAME, draw)
