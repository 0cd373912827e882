"""What the figures look like: sizes, labels, and how they are saved. One place."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings
from kvq.data import embedded_sample

#: Where kept measurements lie, and the numbers that others published.
RESULTS: Final = Path(__file__).parents[1] / "results"
PUBLISHED: Final = Path(__file__).with_name("published.json")
#: Color and marker of the families of modes, in turn.
STYLES: Final = tuple(
    (color, marker)
    for color, marker in zip(
        (plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE, plots.ORANGE, plots.SKY) * 3,
        "osD^vPXdh<>*sDo^vP",
        strict=True,
    )
)
#: Inches of a column of text.
WIDTH: Final = 6.75
#: What the figures call a mode, by full name; any other goes by its short name.
LABELS: Final[Mapping[str, str]] = {
    "int8_per_token_head": "INT8",
    "fp8_per_token_head": "FP8 (e4m3)",
    "int4_per_token_head": "INT4",
    "int2_per_token_head": "INT2 (Lloyd-Max)",
    "affine4_per_token_head": "affine, 4 bits",
    **{
        f"lloyd{bits}{ending}_per_token_head": f"Lloyd-Max, {bits} bit{'s' * (bits > 1)}, {fit}"
        for bits in (1, 2, 3, 4)
        for ending, fit in (
            ("", "least squares"),
            ("_unit", "unit"),
            ("_norm_match", "norm"),
            ("_unbiased", "unbiased"),
        )
    },
    **{f"smax{bits}_per_token_head": f"signed max, {bits} bits" for bits in (2, 3, 4)},
}

#: Draws a figure from activations, and gives the numbers in it.
Draw = Callable[[Activations, Settings], tuple[Figure, pd.DataFrame]]


def kept(*names: str) -> tuple[dict[str, Any], str] | None:
    """The first of these kept results that is there, and its name; `None` if none is."""
    for name in names:
        path = RESULTS / name
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8")), name
    return None


def say(axes: Any, text: str) -> None:
    """Say in an empty panel why it is empty."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, wrap=True)
    axes.set_axis_off()


def save(name: str, draw: Draw, activations: Activations, settings: Settings, out: Path) -> None:
    """Write a figure as PDF and PNG, and its numbers as CSV, into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    with plots.style():
        figure, table = draw(activations, settings)
        figure.set_figwidth(WIDTH)
        for ending in ("pdf", "png"):
            plots.save(figure, out / f"{name}.{ending}")
    table.to_csv(out / f"{name}.csv", index=False, lineterminator="\n")


def main(name: str, draw: Draw) -> None:
    """The command line of a figure: draw it from the embedded sample."""
    parser = argparse.ArgumentParser(description=f"Draw {name} from the embedded sample.")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="the folder to write")
    # The layers of the sample are small: threads would wait for each other.
    torch.set_num_threads(1)
    save(name, draw, embedded_sample(), Settings(), parser.parse_args().out)
