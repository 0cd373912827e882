"""What the first implementation published, beside this toolkit's numbers on its own model.

Two models, two metrics and two machines: the panels share modes, not scales.
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings
from paper_figures.figure_quality import SOURCES
from paper_figures.style import PUBLISHED, kept, main, say

NAME = "figure_published"


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers; the activations are not used."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    found = kept(*SOURCES)
    assert found is not None
    ours = {row["recipe"].removesuffix("_per_token_head"): row for row in found[0]["rows"]}
    full = published["gsm8k"]["full_precision"]
    numbers: list[dict[str, object]] = []
    for mode, row in published["gsm8k"]["modes"].items():
        here = ours.get(mode, {})
        numbers.append(
            {
                "what": "quality",
                "mode": mode,
                "gsm8k_drop": full["accuracy"] - row["accuracy"],
                # Where none is printed, that of a share of the same number of questions.
                "gsm8k_drop_se": np.hypot(
                    full["standard_error"],
                    row.get(
                        "standard_error",
                        full["standard_error"]
                        * np.sqrt(
                            row["accuracy"]
                            * (1 - row["accuracy"])
                            / (full["accuracy"] * (1 - full["accuracy"]))
                        ),
                    ),
                ),
                "kld": here.get("kld", np.nan),
                "top1": here.get("top1", np.nan),
            }
        )
    table = pd.DataFrame(numbers)
    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    (left, right), (before, after) = figure.subplots(2, 2)
    x = np.arange(len(table))
    left.errorbar(
        x - 0.08, 100 * table["gsm8k_drop"], yerr=100 * plots.CONFIDENCE * table["gsm8k_drop_se"],
        fmt="o", color=plots.BLUE, label="GSM8K drop (left axis)",
    )  # fmt: skip
    left.axhline(0.0, color=plots.GRAY, lw=0.9)
    left.set(ylabel="GSM8K drop, points")
    other = left.twinx()
    other.plot(
        x + 0.08, table["kld"], "s", color=plots.VERMILION, label="KL divergence (right axis)"
    )
    other.set(yscale="log", ylabel="KL divergence, nats")
    other.spines["right"].set_visible(True)
    other.grid(visible=False)
    left.set_title("GSM8K there, KL here")
    right.errorbar(
        x - 0.08, 100 * table["gsm8k_drop"], yerr=100 * plots.CONFIDENCE * table["gsm8k_drop_se"],
        fmt="o", color=plots.BLUE,
    )  # fmt: skip
    right.axhline(0.0, color=plots.GRAY, lw=0.9)
    right.set(ylabel="GSM8K drop, points")
    top = right.twinx()
    top.plot(
        x + 0.08, 100 * (1 - table["top1"]), "^", color=plots.GREEN,
        label="top-1 disagreement (right axis)",
    )  # fmt: skip
    top.set(ylabel="top-1 disagreement, %", ylim=(0, None))
    top.spines["right"].set_visible(True)
    top.grid(visible=False)
    right.set_title("GSM8K there, top-1 here")
    for axes in (left, right):
        axes.set_xticks(x, table["mode"])
        axes.set_xlim(-0.5, len(x) - 0.5)
    handles = [axes.get_legend_handles_labels() for axes in (left, other, top)]
    figure.legend(
        [handle for drawn, _ in handles for handle in drawn],
        [name for _, names in handles for name in names],
        loc="outside upper center", ncols=3,
    )  # fmt: skip

    theirs = pd.DataFrame(published["serving"]["rows"])
    theirs = theirs.rename(columns={"output_tokens_per_s": "tokens_per_s"})
    theirs["ratio"] = theirs["tokens_per_s"] / theirs["tokens_per_s"].iloc[0]
    _bars(before, theirs, "published: output tokens/s over fp16")
    served = kept("serving-h200.json")
    parts = [table, theirs.assign(what="serving, published")]
    if served is None:
        say(after, "results/serving-h200.json\nis not kept yet")
    else:
        here = pd.DataFrame(served[0]["rows"])
        _bars(after, here, "here: output tokens/s over bf16")
        parts.append(here.assign(what="serving, here"))
    model = found[0]["inputs"]["model"]
    figure.supxlabel(
        f"published: vllm-project/vllm#40633, {published['model']}.\n"
        f"here: {model}, {found[1]}. Not the same metric, model or machine.",
        fontsize=7,
    )
    return figure, pd.concat(parts, ignore_index=True)


def _bars(axes: Axes, table: pd.DataFrame, title: str) -> None:
    rows = np.arange(len(table))
    axes.barh(rows, table["ratio"], color=plots.SKY, edgecolor=plots.BLUE, height=0.6)
    names = [str(mode).replace("_per_token_head", "") for mode in table["mode"]]
    axes.set_yticks(rows, names, fontsize=7)
    axes.axvline(1.0, color=plots.GRAY, lw=0.9)
    axes.set(ylim=(len(table) - 0.4, -0.6))
    axes.set_title(title, fontsize=8.5)


if __name__ == "__main__":
    main(NAME, draw)
