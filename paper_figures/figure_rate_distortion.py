"""Error on isotropic rows of 128 channels against bits: every mode, Lloyd-Max and the bounds."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings
from kvq.analysis.theory import predict, rate_distortion
from kvq.modes import MODES, short_name
from kvq.reference.lloyd_max import gaussian_distortion, panter_dite
from paper_figures.style import STYLES, main

NAME = "figure_rate_distortion"
HEAD_DIM = 128


def family(name: str) -> str:
    """A mode's short name without its bits: `lloyd3_unbiased` is `lloyd_unbiased`."""
    return re.sub(r"(?<=[a-z])\d+", "", short_name(name))


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers; the activations are not used."""
    numbers = []
    for mode in MODES.values():
        found = predict(mode, HEAD_DIM, rows=settings.theory_rows)
        numbers.append(
            {
                "name": mode.name,
                "family": family(mode.name),
                "code_bits": mode.bits,
                "stored_bits": float(mode.bits_per_value(HEAD_DIM)),
                "relative_error": found.relative_error,
                "standard_error": found.relative_error_se,
            }
        )
    for bits in range(1, 9):
        for name, error in (
            ("Lloyd-Max of N(0,1)", gaussian_distortion(2**bits)),
            ("Panter-Dite", panter_dite(2**bits, "norm")),
            ("D(R)", rate_distortion(bits)),
        ):
            numbers.append(
                {"name": name, "family": name, "code_bits": bits, "relative_error": error}
            )
    table = pd.DataFrame(numbers)
    table["excess_db"] = 10 * np.log10(
        table["relative_error"] / [rate_distortion(b) for b in table["code_bits"]]
    )
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines = (
        ("Lloyd-Max of N(0,1)", plots.BLACK, "-"),
        ("Panter-Dite", plots.GRAY, "--"),
        ("D(R)", plots.BLACK, ":"),
    )
    for axes, column in ((left, "relative_error"), (right, "excess_db")):
        for name, color, dashes in lines:
            part = table[table["family"] == name]
            axes.plot(part["code_bits"], part[column], color=color, ls=dashes, lw=1.1, label=name)
        modes = table[table["stored_bits"].notna()]
        families = list(dict.fromkeys(modes["family"]))
        for index, name in enumerate(families):
            part = modes[modes["family"] == name]
            color, marker = STYLES[index % len(STYLES)]
            # Families side by side, so that none hides another.
            shift = 0.5 * (index - (len(families) - 1) / 2) / len(families)
            axes.plot(
                part["code_bits"] + shift, part[column], marker, color=color, ms=4.5, label=name
            )
        axes.set_xlabel("bits of a code")
    left.set_yscale("log")
    left.set_title("relative squared error")
    right.set_title("excess over D(R), dB")
    best = float(table["excess_db"].min())
    right.set_ylim(min(-0.3, best - 0.3), math.ceil(modes["excess_db"].max()) + 0.5)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure, table


if __name__ == "__main__":
    main(NAME, draw)
