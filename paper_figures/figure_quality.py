"""KL divergence of the real model against stored bits, for every kept recipe."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.labels import place_labels
from kvq.analysis.measure import Settings
from kvq.evaluation.recipes import NAMED
from paper_figures.style import WIDTH, kept, main

NAME = "figure_quality"
#: The results of every mode, the best first, and those of the recipes by name.
SOURCES: Final = ("eval-smollm2.json", "eval-smollm2-cpu-sample.json")
NAMED_SOURCE: Final = "eval-smollm2-recipes-cpu.json"
#: What always has its name beside it.
SHOWN: Final = ("int8", "fp8", "int4", "int2", "int4@unrotated", "int4@toward_zero", *NAMED)

#: Kinds of recipe: what is in the text of one, the first that fits, with color and marker.
KINDS: Final = (
    ("center=", "keys centered", plots.PURPLE, "D"),
    ("recent=", "recent tokens in full precision", plots.ORANGE, "^"),
    ("first=", "first tokens in full precision", plots.SKY, "v"),
    ("k=", "keys and values in two modes", plots.GREEN, "s"),
    ("", "one mode", plots.BLUE, "o"),
)


def short(recipe: str) -> str:
    """A recipe in few words: by its name, or a mode of both sides once, and what it adds."""
    parts = recipe.replace("_per_token_head", "").split(",")
    for name, text in NAMED.items():
        known = text.split(",")
        if set(known) <= set(parts):
            return ", ".join([name, *(part for part in parts if part not in known)])
    sides = {part[:2]: part[2:] for part in parts if part[:2] in ("k=", "v=")}
    if len(sides) == 2 and sides["k="] == sides["v="]:
        parts = [sides["k="], *(part for part in parts if part[:2] not in sides)]
    return ", ".join(parts)


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers; the activations are not used."""
    found = [result for result in (kept(*SOURCES), kept(NAMED_SOURCE)) if result is not None]
    assert found, f"results must hold one of {SOURCES}"
    table = pd.concat(
        [pd.DataFrame(document["rows"]).assign(source=source) for document, source in found]
    )
    # Of what was measured twice, the run over more tokens.
    table = table.sort_values("tokens", ascending=False).drop_duplicates("recipe")
    table = table.sort_values(["bits_per_value", "kld"], ignore_index=True)
    table["on_front"] = table["kld"] < table["kld"].cummin().shift(fill_value=np.inf)
    table["label"] = [short(recipe) for recipe in table["recipe"]]
    table["kind"] = [
        "by name" if label in NAMED else next(name for part, name, *_ in KINDS if part in recipe)
        for recipe, label in zip(table["recipe"], table["label"], strict=True)
    ]
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        table["bits_per_value"][table["on_front"]], table["kld"][table["on_front"]],
        color=plots.GRAY, lw=1.0, zorder=0, label="no smaller recipe diverges less",
    )  # fmt: skip
    kinds = [*KINDS[::-1], ("", "by name", plots.VERMILION, "*")]
    for _, kind, color, marker in kinds:
        mine = table[table["kind"] == kind]
        interval = np.minimum(plots.CONFIDENCE * mine["kld_se"].fillna(0), 0.9 * mine["kld"])
        axes.errorbar(
            mine["bits_per_value"], mine["kld"], yerr=interval, fmt=marker, color=color,
            ecolor=plots.GRAY, elinewidth=0.8, ms=11 if marker == "*" else 4.5, label=kind,
        )  # fmt: skip
    counted = " to ".join(f"{n:,}" for n in sorted({*table["tokens"].agg(["min", "max"])}))
    axes.set(
        yscale="log",
        xlabel="stored bits per value",
        ylabel="KL divergence from full precision, nats per token",
        title=f"{found[0][0]['inputs']['model']}: {len(table)} recipes, {counted} tokens each",
    )
    axes.title.set_fontsize(8.5)
    axes.margins(x=0.06)
    axes.legend(fontsize=7)
    named = table[table["on_front"] | table["label"].isin(SHOWN)]
    place_labels(
        axes,
        list(named[["bits_per_value", "kld", "label"]].itertuples(index=False, name=None)),
        list(table[["bits_per_value", "kld"]].itertuples(index=False, name=None)),
    )
    return figure, table


if __name__ == "__main__":
    main(NAME, draw)
