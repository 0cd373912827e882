"""Slope, mean error and centered error of the scores in every mode."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings, measure
from kvq.analysis.summary import summarize
from kvq.modes import MODES
from paper_figures.style import LABELS, main

NAME = "figure_score_bias"


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers."""
    modes = list(MODES.values())
    tables = measure(
        activations, modes, settings=settings, only=("score_bias", "theory", "accounting")
    )
    summary = summarize(tables, modes)
    kept = summary.filter(regex="^(mode|bits_per_value|score_|theory_gain|theory_kind)")
    return plots.scores(summary, LABELS), kept


if __name__ == "__main__":
    main(NAME, draw)
