"""Share of memory bandwidth that decoding and writing reach on the kept GPU, beside bf16."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvq.activations import Activations
from kvq.analysis import plots
from kvq.analysis.decode_throughput import HEAD_DIM, KV_HEADS
from kvq.analysis.measure import Settings
from kvq.modes import MODES
from paper_figures.style import LABELS, STYLES, kept, main

NAME = "figure_bandwidth"
#: Terabytes per second that NVIDIA states for the memory of an H200.
PEAK = 4.8
_BF16_BITS = 16


def _decode() -> pd.DataFrame:
    """The fastest row of each mode and shape; its share of `PEAK` and that of the bf16 peer."""
    found = kept("decode-h200.json")
    assert found is not None
    rows = [
        row
        for row in found[0]["rows"]
        if row["best"] and row["query_tokens"] == 1 and row["key_mode"] in MODES
    ]
    table = pd.DataFrame(rows)
    bits = [float(MODES[name].bits_per_value(HEAD_DIM)) for name in table["key_mode"]]
    values = 2 * table["batch"] * table["context"] * KV_HEADS * HEAD_DIM
    seconds, peer_seconds = table["ms"] * 1e-3, table["best_bf16_ms"] * 1e-3
    table["share"] = values * bits / 8 / seconds / (PEAK * 1e12)
    table["peer_share"] = values * _BF16_BITS / 8 / peer_seconds / (PEAK * 1e12)
    return table.assign(what="decode", mode=table["key_mode"])


def draw(activations: Activations, settings: Settings) -> tuple[Figure, pd.DataFrame]:
    """The figure and its numbers; the activations are not used."""
    decode = _decode()
    written = kept("write-h200.json")
    assert written is not None
    write = pd.DataFrame(written[0]["rows"]).assign(what="write")
    write = write[(write["layout"] == "HND") & (write["tokens"] == write["tokens"].max())]
    write = write.drop_duplicates("mode")
    figure = Figure(figsize=(9.0, 1.8 + 0.15 * len(write)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    shapes = decode[["batch", "context"]].drop_duplicates().sort_values(["context", "batch"])
    common = decode.groupby(["batch", "context"])["mode"].nunique()
    shapes = shapes[[common[b, c] == common.max() for b, c in shapes.to_numpy()]]
    names = [f"{batch}\nx {context // 1024}k" for batch, context in shapes.to_numpy()]
    x = np.arange(len(shapes))
    for index, mode in enumerate(dict.fromkeys(decode["mode"])):
        part = decode[decode["mode"] == mode].set_index(["batch", "context"])
        share = [part.loc[(b, c), "share"] for b, c in shapes.to_numpy()]
        color, marker = STYLES[index]
        left.plot(x, np.asarray(share, dtype=float).reshape(len(x), -1)[:, 0], color=color,
                  marker=marker, lw=0.9, label=plots.label(mode, LABELS))  # fmt: skip
    peer = [
        float(decode[(decode["batch"] == b) & (decode["context"] == c)]["peer_share"].median())
        for b, c in shapes.to_numpy()
    ]
    left.plot(x, peer, color=plots.BLACK, ls="--", marker="x", label="bf16, fastest peer")
    left.set_xticks(x, names, fontsize=7)
    left.set(ylim=(0, 1.05), xlabel="batch x context", title=f"decode: share of {PEAK:g} TB/s")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    rows = np.arange(len(write))
    colors = [plots.GRAY if name not in MODES else plots.BLUE for name in write["mode"]]
    right.barh(rows, write["share_of_copy"], color=colors, height=0.65)
    right.set_yticks(rows, [plots.label(name, LABELS) for name in write["mode"]], fontsize=7)
    right.set(ylim=(len(write) - 0.4, -0.6), xlim=(0, 1.05), title="write, of a copy")
    return figure, pd.concat([decode, write], ignore_index=True)


if __name__ == "__main__":
    main(NAME, draw)
