"""What a mean of the keys is worth when all positions move: taken before RoPE, and after.

Queries and keys are turned on by the same number of positions, which leaves every exact score as
it was. Means are those of the keys at their home positions.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvq import reference
from kvq.activations import Activations, LayerActivations
from kvq.analysis import plots
from kvq.analysis.attention_error import attention_output, log_weights, output_error, weight_error
from kvq.analysis.measure import Settings, thin_queries
from kvq.analysis.score_bias import scores
from kvq.modes import Mode, mode
from kvq.reference.rotary import apply_rotary
from paper_figures.style import main

NAME = "figure_position_shift"
OFFSETS = (0, 300, 1000, 3000, 10_000, 30_000)
MODES = (mode("int4"), mode("lloyd2"))
_STYLES = {
    "no mean": (plots.GRAY, "o", "-"),
    "mean before RoPE": (plots.BLUE, "s", "--"),
    "mean after RoPE": (plots.VERMILION, "^", "-."),
}


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers; the activations must say how RoPE was applied."""
    activations = thin_queries(activations, settings.max_queries)
    visible = activations.positions <= activations.query_positions[:, None]
    numbers = [
        {
            "mode": kind.name,
            "layer": index,
            "offset": offset,
            "centering": name,
            "attention_kl": kl,
            "output_error": error,
        }
        for index, layer in activations.layers.items()
        for offset in OFFSETS
        for kind in MODES
        for name, kl, error in _measure(layer, activations, visible, offset, kind)
    ]
    table = pd.DataFrame(numbers)
    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    panels = figure.subplots(len(MODES), 2).ravel()
    x = np.arange(len(OFFSETS))
    for number, kind in enumerate(MODES):
        for axes, metric, title in (
            (panels[2 * number], "attention_kl", "KL of weights, nats"),
            (panels[2 * number + 1], "output_error", "output error"),
        ):
            for name, (color, marker, dashes) in _STYLES.items():
                part = table[(table["mode"] == kind.name) & (table["centering"] == name)]
                means = part.groupby("offset")[metric].mean()
                axes.plot(x, means, color=color, marker=marker, ls=dashes, label=name)
            axes.set_xticks(x, ["0", "300", "1k", "3k", "10k", "30k"])
            axes.set_title(f"{plots.label(kind.name)}: {title}", fontsize=8.5)
            axes.set(xlabel="positions moved by", ylim=(0.0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure, table


def _measure(
    layer: LayerActivations, activations: Activations, visible: Tensor, offset: int, kind: Mode
) -> list[tuple[str, float, float]]:
    """Divergence of the weights and error of the output for each kind of mean."""
    spec = activations.rotary
    assert spec is not None, "activations must say how RoPE was applied"
    assert layer.query is not None

    def turn(x: Tensor, by: Tensor, inverse: bool = False) -> Tensor:
        return apply_rotary(x.to(torch.float32), by, spec, inverse=inverse)

    home = activations.positions
    before = turn(layer.key, home, inverse=True)
    positions = home + offset
    key = turn(before, positions)
    queries = activations.query_positions
    query = turn(turn(layer.query, queries, inverse=True), queries + offset)
    means = {
        "no mean": torch.zeros_like(key),
        "mean before RoPE": turn(before.mean(0).expand_as(before), positions),
        "mean after RoPE": layer.key.to(torch.float32).mean(0).expand_as(key),
    }
    exact = log_weights(scores(query, key, activations.scale), visible)
    output = attention_output(exact, layer.value)
    blocks = torch.zeros(len(queries), dtype=torch.int64)
    found = []
    for name, mean in means.items():
        stored = reference.quantize(key - mean, kind)
        key_hat = reference.dequantize(*stored, kind, key.shape[-1]) + mean
        log_p = log_weights(scores(query, key_hat, activations.scale), visible)
        error = output_error(output, attention_output(log_p, layer.value), blocks)
        divergence = weight_error(exact, log_p, blocks).kl_divergence
        found.append((name, float(divergence.value.mean()), float(error.value.mean())))
    return found


if __name__ == "__main__":
    main(NAME, draw)
