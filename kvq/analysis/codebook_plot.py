"""The picture of a codebook: its levels over the density that they were fitted to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from kvq.codebooks import Codebook

if TYPE_CHECKING:
    from kvq.reference.laws import Law

_DENSITY = "#7f8fa6"
_LEVEL = "#c23616"


def check_picture(argument: str, path: Path) -> None:
    """The ending of a picture's path must be that of a kind that can be drawn.

    Raises:
        ValueError: It is not; the message has the kinds.
    """
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"{argument} must end in one of .{', .'.join(kinds)}, got {path}")


def codebook_figure(
    codebook: Codebook,
    *,
    law: Law | None = None,
    samples: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
) -> Figure:
    """Draw levels and thresholds over the density of a law, the histogram of samples, or both.

    Args:
        codebook: What to draw.
        law: What it was fitted to; its atoms are not drawn.
        samples: What it was fitted to.
        weights: Of the samples.

    Returns:
        A figure that belongs to no window: save it with `figure.savefig`.
    """
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    low, high = codebook.levels[0], codebook.levels[-1]
    margin = 0.35 * (high - low)
    low, high = low - margin, high + margin
    if law is not None:
        x = np.linspace(max(low, law.support[0]), min(high, law.support[1]), 2001)[1:-1]
        axes.fill_between(x, law.density(x), color=_DENSITY, alpha=0.45, lw=0)
    if samples is not None:
        axes.hist(
            np.asarray(samples, dtype=np.float64),
            bins=201,
            range=(low, high),
            weights=None if weights is None else np.asarray(weights, dtype=np.float64),
            density=True,
            color=_DENSITY,
            alpha=0.45,
        )
    for threshold in codebook.thresholds:
        axes.axvline(threshold, color="black", lw=0.6, ls=":", alpha=0.6)
    top = axes.get_ylim()[1]
    axes.vlines(codebook.levels, 0.0, top, color=_LEVEL, lw=1.2)
    axes.plot(codebook.levels, np.full(codebook.num_levels, top), "v", color=_LEVEL, ms=4)
    axes.set(
        xlim=(low, high),
        ylim=(0.0, 1.06 * top),
        xlabel="normalized value",
        ylabel="density",
        title=f"{codebook}: {codebook.num_levels} levels (thresholds dotted)",
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
