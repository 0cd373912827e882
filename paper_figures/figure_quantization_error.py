"""Relative error of keys and values in every mode, beside the theory for isotropic rows."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings, measure
from kvq.analysis.summary import summarize
from kvq.modes import MODES
from paper_figures.style import LABELS, main

NAME = "figure_quantization_error"


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers."""
    modes = list(MODES.values())
    tables = measure(
        activations, modes, settings=settings, only=("quantization_error", "theory", "accounting")
    )
    summary = summarize(tables, modes)
    kept = summary.filter(regex="^(mode|bits_per_value|key_|value_|theory_)")
    return plots.error_against_theory(summary, tables["theory"], LABELS), kept


if __name__ == "__main__":
    main(NAME, draw)
