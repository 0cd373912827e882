"""Keys and values before and after rotation and centering: tails, and the energy in the mean."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvq.activations import Activations, LayerActivations
from kvq.analysis import plots
from kvq.analysis.activation_statistics import rotated
from kvq.analysis.measure import Settings
from kvq.modes import RANDOM_HADAMARD
from kvq.reference.rotary import apply_rotary
from paper_figures.style import main

NAME = "figure_activations"
_STYLES = {
    "as they are": (plots.VERMILION, "o", "-"),
    "rotated": (plots.BLUE, "s", "--"),
    "centered": (plots.ORANGE, "^", "-."),
    "centered, rotated": (plots.GREEN, "D", ":"),
}


def centered_keys(key: Tensor, activations: Activations) -> Tensor:
    """Keys less their mean before RoPE, turned to each position; without RoPE, less their mean."""
    wide = key.to(torch.float32)
    spec = activations.rotary
    if spec is None:
        return wide - wide.mean(0)
    positions = activations.positions
    before = apply_rotary(wide, positions, spec, inverse=True)
    return wide - apply_rotary(before.mean(0).expand_as(before), positions, spec)


def versions(layer: LayerActivations, activations: Activations) -> dict[str, dict[str, Tensor]]:
    """Rows of each side, by what was done to them; float64."""
    sides = {}
    value = layer.value.to(torch.float32)
    for side, x, centered in (
        ("keys", layer.key.to(torch.float32), centered_keys(layer.key, activations)),
        ("values", value, value - value.mean(0)),
    ):
        sides[side] = {
            "as they are": x.to(torch.float64),
            "rotated": rotated(x, RANDOM_HADAMARD),
            "centered": centered.to(torch.float64),
            "centered, rotated": rotated(centered, RANDOM_HADAMARD),
        }
    return sides


def row_kurtosis(x: Tensor) -> float:
    """Mean over rows of `mean x^4 / (mean x^2)^2`."""
    square = x.square()
    mean = square.mean(-1)
    alive = mean > 0
    return float((square.square().mean(-1)[alive] / mean[alive].square()).mean())


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers."""
    numbers: list[dict[str, object]] = []
    middle = list(activations.layers)[len(activations.layers) // 2]
    shares = (np.arange(99) + 1) / 100
    for index, layer in activations.layers.items():
        for side, by_version in versions(layer, activations).items():
            for name, x in by_version.items():
                labels = {"layer": index, "side": side, "version": name}
                numbers.append({**labels, "metric": "row_kurtosis", "value": row_kurtosis(x)})
                if name == "as they are":
                    energy = x.square().sum(-1).mean(0)
                    share = float((x.mean(0).square().sum(-1) / energy).mean())
                    numbers.append({**labels, "metric": "mean_energy_share", "value": share})
                if name == "centered":
                    kept = x.square().sum((0, 2)) / by_version["as they are"].square().sum((0, 2))
                    share = 1.0 - float(kept.mean())
                    numbers.append({**labels, "metric": "removed_energy_share", "value": share})
                if index == middle:
                    unit = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
                    found = np.quantile(unit.numpy(), shares)
                    numbers += [
                        {**labels, "metric": "quantile", "share": p, "value": q}
                        for p, q in zip(shares, found, strict=True)
                    ]
    table = pd.DataFrame(numbers)
    figure = Figure(figsize=(9.0, 5.2), layout="constrained")
    panels = figure.subplots(2, 3)
    for row, side in zip(panels, ("keys", "values"), strict=True):
        part = table[table["side"] == side]
        for name, (color, marker, dashes) in _STYLES.items():
            of = part[part["version"] == name]
            line = of[of["metric"] == "row_kurtosis"]
            row[0].plot(
                line["layer"], line["value"], color=color, marker=marker, ls=dashes, label=name
            )
            line = of[of["metric"] == "quantile"]
            row[1].plot(
                [NormalDist().inv_cdf(share) for share in line["share"]],
                line["value"],
                color=color,
                ls=dashes,
                lw=1.5,
                label=name,
            )
        row[0].axhline(3.0, color=plots.GRAY, lw=0.9)
        row[0].set(yscale="log", title=f"{side}: kurtosis of a row", xlabel="layer")
        row[0].set_yticks([3, 5, 10], ["3", "5", "10"])
        row[0].yaxis.set_minor_formatter("")
        row[1].axline((0, 0), slope=1, color=plots.GRAY, lw=0.9)
        row[1].set(title=f"{side}: layer {middle}", xlabel="N(0,1)", ylabel="entry / RMS of row")
        for metric, color, marker, text in (
            ("mean_energy_share", plots.VERMILION, "o", "constant, as stored"),
            ("removed_energy_share", plots.BLUE, "s", "removed by centering"),
        ):
            line = part[part["metric"] == metric]
            row[2].plot(line["layer"], line["value"], color=color, marker=marker, label=text)
        row[2].set(title=f"{side}: energy in mean", xlabel="layer", ylim=(0, 1))
    panels[0, 2].legend(loc="best")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure, table


if __name__ == "__main__":
    main(NAME, draw)
