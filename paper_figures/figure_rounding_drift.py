"""Scores and outputs under each rounding as the context grows, on Gaussian rows."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings, measure
from kvq.analysis.rounding_drift import DRIFT_MODES
from kvq.analysis.summary import select
from paper_figures.style import LABELS, main

NAME = "figure_rounding_drift"


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers."""
    tables = measure(activations, DRIFT_MODES, settings=settings, only=("rounding_drift",))
    table = select(tables["rounding_drift"], input="gaussian")
    return plots.drift(table, "gaussian", LABELS, height=1.7), table


if __name__ == "__main__":
    main(NAME, draw)
