"""The pictures of a report: functions that take its tables and return figures.

Colors are those of Okabe and Ito, which the color-blind can tell apart; markers say the same
again. Bars are 95% confidence intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvq.analysis.labels import place_labels
from kvq.analysis.summary import select
from kvq.modes import short_name

BLACK: Final = "#000000"
ORANGE: Final = "#E69F00"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
BLUE: Final = "#0072B2"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
GRAY: Final = "#8A8F98"
_CYCLE: Final = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
_MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")
#: Color and marker of each rounding.
ROUNDING_STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "half_away": (BLUE, "o"),
    "half_even": (SKY, "x"),
    "toward_zero": (VERMILION, "s"),
    "stochastic": (GREEN, "^"),
}

#: Standard errors on either side that make a 95% confidence interval.
CONFIDENCE: Final = 1.96

#: From so many decades on a logarithmic axis has numbers at powers of ten alone: they lie side by
#: side along x, and need more room.
MANY_DECADES: Final[Mapping[str, float]] = {"x": 1.5, "y": 2.5}

#: What every picture of the package is drawn with.
STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E7EB",
    "grid.linewidth": 0.7,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
    # The same picture gives the same bytes.
    "svg.hashsalt": "kvq",
}

Labels = Mapping[str, str]


@contextmanager
def style() -> Iterator[None]:
    """Draw, and save, inside this context."""
    with mpl.rc_context(STYLE):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a picture, as the ending of its name says, without a date in it."""
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, metadata=dates.get(path.suffix))


def label(mode: str, labels: Labels | None = None) -> str:
    """What a picture calls a mode: its label, or its name without `_per_token_head`."""
    return (labels or {}).get(mode, short_name(mode))


def quality_against_size(summary: pd.DataFrame, labels: Labels | None = None) -> Figure:
    """Output error of each mode against its bits per value, with its name beside it.

    Args:
        summary: From `kvq.analysis.summary.summarize`, with attention measured.
        labels: Of modes, where the name will not do.
    """
    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    axes = figure.add_subplot()
    y = summary["output_error"].to_numpy(dtype=float)
    x = summary["bits_per_value"].to_numpy(dtype=float)
    axes.errorbar(
        x,
        y,
        yerr=_interval(summary["output_error_se"]),
        fmt="o",
        color=BLUE,
        ecolor=GRAY,
        elinewidth=1.0,
    )
    axes.set(
        xlabel="stored bits per value, everything counted",
        ylabel="relative squared error of the attention output",
        xlim=(0.0, float(x.max()) + 1.0),
    )
    axes.margins(y=0.08)
    _logarithmic(axes, "y")
    names = [label(mode, labels) for mode in summary["mode"]]
    place_labels(axes, list(zip(x, y, names, strict=True)), fontsize=7.0)
    return figure


def error_against_theory(
    summary: pd.DataFrame, theory: pd.DataFrame, labels: Labels | None = None
) -> Figure:
    """Relative error of keys and values for each mode, beside what isotropic rows would have.

    Args:
        summary: From `kvq.analysis.summary.summarize`.
        theory: The table of that name: it has the bounds.
        labels: Of modes, where the name will not do.
    """
    figure = Figure(figsize=(9.0, _height(summary)), layout="constrained")
    axes = figure.add_subplot()
    _dots(axes, summary, "key_relative_error", BLUE, "o", "keys", 0.16)
    _dots(axes, summary, "value_relative_error", ORANGE, "s", "values", -0.16)
    rows = np.arange(len(summary))
    exact = summary["theory_kind"].to_numpy() == "exact"
    for kind, keep, fill in (("exact", exact, BLACK), ("Monte Carlo", ~exact, "none")):
        axes.scatter(
            summary["theory_relative_error"].to_numpy()[keep],
            rows[keep],
            marker="d",
            s=30,
            facecolors=fill,
            edgecolors=BLACK,
            linewidths=0.9,
            zorder=4,
            label=f"isotropic rows, {kind}",
        )
    bound = select(theory, kind="bound").groupby("mode")["value"].first()
    axes.scatter(
        summary["mode"].map(bound),
        rows,
        marker="|",
        s=90,
        color=GRAY,
        label="rate-distortion bound at the bits of the codes",
    )
    _logarithmic(axes, "x")
    axes.set_xlabel("relative squared error")
    _name_rows(axes, summary, labels)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def scores(summary: pd.DataFrame, labels: Labels | None = None) -> Figure:
    """Slope, mean error and centered error of the scores for each mode.

    Args:
        summary: From `kvq.analysis.summary.summarize`, with attention measured.
        labels: Of modes, where the name will not do.
    """
    figure = Figure(figsize=(9.0, _height(summary)), layout="constrained")
    slope, mean, spread = figure.subplots(1, 3, sharey=True)
    slope.axvline(1.0, color=GRAY, lw=0.9)
    _dots(slope, summary, "score_slope", BLUE, "o", "measured")
    slope.scatter(
        summary["theory_gain"],
        np.arange(len(summary)),
        marker="d",
        s=30,
        facecolors="none",
        edgecolors=BLACK,
        linewidths=0.9,
        zorder=4,
        label="isotropic rows",
    )
    slope.set(title="slope", xlabel="new score against old")
    mean.axvline(0.0, color=GRAY, lw=0.9)
    _dots(mean, summary, "score_mean_error", BLUE, "o")
    mean.set(title="mean signed error", xlabel="logits")
    _dots(spread, summary, "score_centered_rmse", BLUE, "o")
    _logarithmic(spread, "x")
    spread.set(title="centered RMSE", xlabel="logits")
    _name_rows(slope, summary, labels)
    figure.legend(*slope.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def attention(summary: pd.DataFrame, labels: Labels | None = None) -> Figure:
    """Divergence and variation of the weights, and error of the output, for each mode.

    Args:
        summary: From `kvq.analysis.summary.summarize`, with attention measured.
        labels: Of modes, where the name will not do.
    """
    figure = Figure(figsize=(9.0, _height(summary)), layout="constrained")
    divergence, variation, output = figure.subplots(1, 3, sharey=True)
    _dots(divergence, summary, "attention_kl", BLUE, "o")
    divergence.set(title="KL divergence of the weights", xlabel="nats")
    _dots(variation, summary, "attention_tv", BLUE, "o")
    variation.set(title="total variation of the weights", xlabel="0 to 1")
    _dots(output, summary, "output_error_key", BLUE, "<", "keys quantized", 0.2)
    _dots(output, summary, "output_error_value", ORANGE, ">", "values quantized", -0.2)
    _dots(output, summary, "output_error", BLACK, "o", "both")
    output.set(title="error of the output", xlabel="relative squared error")
    for axes in (divergence, variation, output):
        _logarithmic(axes, "x")
    _name_rows(divergence, summary, labels)
    figure.legend(*output.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def divergence_by_layer(
    attention_error: pd.DataFrame,
    bits: Mapping[str, int],
    labels: Labels | None = None,
) -> Figure:
    """KL divergence of the attention weights in each layer; a panel for each size of code.

    The line is the mean over heads, and the bar comes from the mean of their standard errors: no
    correlation between heads can make the true one larger.

    Args:
        attention_error: The table of that name.
        bits: Bits of a code, by mode, in the order of the tables.
        labels: Of modes, where the name will not do.
    """
    table = select(attention_error, metric="kl_divergence")
    sizes = sorted(set(bits.values()), reverse=True)
    columns = min(3, len(sizes))
    rows = -(-len(sizes) // columns)
    figure = Figure(figsize=(9.0, 2.9 * rows + 0.3), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, size in zip(panels, sizes, strict=False):
        modes = [mode for mode in bits if bits[mode] == size]
        for index, mode in enumerate(modes):
            part = select(table, mode=mode).groupby("layer")[["value", "standard_error"]].mean()
            axes.errorbar(
                part.index,
                part["value"],
                yerr=_interval(part["standard_error"]),
                color=_CYCLE[index % len(_CYCLE)],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=3.5,
                lw=1.1,
                elinewidth=0.8,
                alpha=0.9,
                label=label(mode, labels),
            )
        _logarithmic(axes, "y")
        axes.set(title=f"{size}-bit codes", xlabel="layer")
        axes.legend(fontsize=7, loc="best")
    for axes in panels[len(sizes) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("KL divergence (nats)")
    return figure


#: The drift's metrics that are drawn, with their axis and whether it is logarithmic.
_DRIFT_ROWS: Final = (
    ("slope", "slope of the scores", False),
    ("shift", "mean error per query,\nRMS (logits)", True),
    ("output_error_value", "error of the output,\nvalues quantized", True),
)


def drift(
    table: pd.DataFrame, source: str, labels: Labels | None = None, *, height: float = 2.2
) -> Figure:
    """What each rounding does to scores and output as the context grows.

    Args:
        table: The table `rounding_drift`.
        source: Which input: `sample` or `gaussian`.
        labels: Of modes, where the name will not do.
        height: Of one row, in inches.
    """
    table = select(table, input=source)
    modes = list(dict.fromkeys(table["mode"]))
    figure = Figure(
        figsize=(max(9.0, 2.4 * len(modes)), height * len(_DRIFT_ROWS) + 0.5), layout="constrained"
    )
    panels = figure.subplots(len(_DRIFT_ROWS), len(modes), sharex=True, squeeze=False)
    for axes_row, (metric, name, logarithmic) in zip(panels, _DRIFT_ROWS, strict=True):
        for axes, mode in zip(axes_row, modes, strict=True):
            _drift_lines(axes, select(table, metric=metric, mode=mode))
            if logarithmic:
                _logarithmic(axes, "y")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
        axes_row[0].set_ylabel(name)
    for axes, mode in zip(panels[0], modes, strict=True):
        axes.set_title(label(mode, labels))
    for axes in panels[-1]:
        axes.set_xlabel("keys in the context")
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return figure


def _drift_lines(axes: Axes, table: pd.DataFrame) -> None:
    """One metric of one mode: a line for each rounding, the theory dashed."""
    for rounding, part in table.groupby("rounding", sort=False):
        color, marker = ROUNDING_STYLES[str(rounding)]
        axes.errorbar(
            part["context"],
            part["value"],
            yerr=_interval(part["standard_error"]),
            color=color,
            marker=marker,
            markersize=4,
            lw=0,
            elinewidth=1.0,
            label=str(rounding).replace("_", " "),
        )
        axes.plot(part["context"], part["theory"], color=color, ls="--", lw=1.1)
    axes.plot([], [], color=GRAY, ls="--", lw=1.1, label="theory")


def statistics(table: pd.DataFrame) -> Figure:
    """Energy in the mean per channel, and kurtosis before and after rotation, by layer.

    Args:
        table: The table `activation_statistics`.
    """
    figure = Figure(figsize=(9.0, 3.5), layout="constrained")
    share, pooled, row = figure.subplots(1, 3)
    panels = ((share, "mean_energy_share"), (pooled, "kurtosis"), (row, "row_kurtosis"))
    rotations = (("none", "as they are", "-"), ("random_hadamard", "after rotation", ":"))
    for axes, metric in panels:
        for side, color, marker in (("key", BLUE, "o"), ("value", ORANGE, "s")):
            for rotation, text, line in rotations[: 1 if axes is share else None]:
                part = select(table, side=side, rotation=rotation, metric=metric)
                means = part.groupby("layer")[["value", "standard_error"]].mean()
                axes.errorbar(
                    means.index,
                    means["value"],
                    yerr=_interval(means["standard_error"]),
                    color=color,
                    marker=marker,
                    ls=line,
                    elinewidth=0.9,
                    label=f"{side}s, {text}",
                )
        axes.set_xlabel("layer")
    share.set(title="energy in the channel means", ylabel="share", ylim=(0.0, 1.0))
    for axes, name in ((pooled, "kurtosis, all entries"), (row, "kurtosis within a row")):
        axes.axhline(3.0, color=GRAY, lw=0.9)
        _logarithmic(axes, "y")
        axes.set(title=name)
    figure.legend(*pooled.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def storage(accounting: pd.DataFrame, labels: Labels | None = None) -> Figure:
    """Bits per value of each mode, by what they are spent on.

    Args:
        accounting: The table of that name.
        labels: Of modes, where the name will not do.
    """
    wide = accounting.pivot(index="mode", columns="metric", values="value")
    wide = wide.loc[list(dict.fromkeys(accounting["mode"]))].reset_index()
    figure = Figure(figsize=(9.0, _height(wide)), layout="constrained")
    axes = figure.add_subplot()
    rows = np.arange(len(wide))
    left = np.zeros(len(wide))
    parts = (
        ("code_bytes", "codes", BLUE),
        ("word_bytes", "stored words", ORANGE),
        ("table_bytes", "shared tables", BLACK),
        ("padding_bytes", "padding of the last page", "#D0D4DA"),
    )
    for metric, name, color in parts:
        width = 8.0 * wide[metric].to_numpy() / wide["values"].to_numpy()
        axes.barh(rows, width, left=left, color=color, height=0.62, label=name)
        left += width
    for row, ratio in enumerate(wide["compression"]):
        axes.text(left[row] + 0.08, row, f"{ratio:.2f}x", va="center", fontsize=8)
    axes.set(xlabel="bits per value (16 uncompressed)", xlim=(0.0, float(left.max()) * 1.1))
    _name_rows(axes, wide, labels)
    axes.grid(visible=False, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _height(table: pd.DataFrame) -> float:
    return 1.2 + 0.235 * len(table)


def _interval(standard_errors: pd.Series[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Half a confidence interval; none where the error is not known."""
    return np.nan_to_num(CONFIDENCE * standard_errors.to_numpy(dtype=float))


def _dots(
    axes: Axes,
    summary: pd.DataFrame,
    column: str,
    color: str,
    marker: str,
    name: str | None = None,
    offset: float = 0.0,
) -> None:
    """A dot for each mode, a row each."""
    axes.errorbar(
        summary[column],
        np.arange(len(summary)) - offset,
        xerr=_interval(summary[f"{column}_se"]),
        fmt=marker,
        color=color,
        elinewidth=1.0,
        markersize=4.2,
        label=name,
    )


def _logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers: 1, 2, 5 in every decade, or 1 if there are many."""
    axis: Axis = getattr(axes, f"{which}axis")
    # One key leaves nothing to get wrong: all zeros.
    if not getattr(axes.dataLim, f"interval{which}").max() > 0:
        return
    getattr(axes, f"set_{which}scale")("log")
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    few = decades < MANY_DECADES[which]
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _name_rows(axes: Axes, table: pd.DataFrame, labels: Labels | None) -> None:
    axes.set_yticks(np.arange(len(table)), [label(mode, labels) for mode in table["mode"]])
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def figures(
    tables: Mapping[str, pd.DataFrame], bits: Mapping[str, int]
) -> dict[str, Callable[[], Figure]]:
    """What draws each picture that the tables have numbers for, by file name.

    Args:
        tables: Those of a report, with the summary.
        bits: Bits of a code, by mode, in the order of the tables.
    """
    summary = tables["summary"]
    drawn: dict[str, Callable[[], Figure]] = {
        "error_against_theory": lambda: error_against_theory(summary, tables["theory"]),
        "activation_statistics": lambda: statistics(tables["activation_statistics"]),
        "storage": lambda: storage(tables["accounting"]),
    }
    if len(tables["attention_error"]):
        drawn |= {
            "quality_against_size": lambda: quality_against_size(summary),
            "scores": lambda: scores(summary),
            "attention": lambda: attention(summary),
            "divergence_by_layer": lambda: divergence_by_layer(tables["attention_error"], bits),
        }
    for source in dict.fromkeys(tables["rounding_drift"]["input"]):
        drawn[f"drift_{source}"] = lambda source=source: drift(tables["rounding_drift"], source)  # type: ignore[misc]
    return drawn
