"""Pictures of tables: labels, marks and bars, and the figures for a paper."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvq.analysis import plots
from kvq.analysis.labels import place_labels
from kvq.analysis.measure import Settings
from kvq.analysis.samples import synthetic_activations
from kvq.data import embedded_sample
from kvq.modes import MODES, short_name
from kvq.rotary import RotarySpec
from paper_figures import style
from paper_figures.__main__ import FIGURES


def test_labels_fall_back_to_the_short_name() -> None:
    assert plots.label("int4_per_token_head") == "int4"
    assert plots.label("lloyd3+mine") == "lloyd3+mine"
    assert plots.label("int4_per_token_head", style.LABELS) == "INT4"
    assert plots.label("lloyd3+mine", style.LABELS) == "lloyd3+mine"
    assert style.LABELS.keys() <= MODES.keys()


@pytest.mark.parametrize("number", [1, 2, 12])
def test_labels_of_points_that_lie_on_each_other_do_not(number: int) -> None:
    figure = Figure(figsize=(4.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 1), ylim=(1e-3, 1), yscale="log")
    points = [(0.9 + 0.002 * i, 0.5) for i in range(number)]
    place_labels(axes, [(x, y, f"label {i}") for i, (x, y) in enumerate(points)])
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [f"label {i}" for i in range(number)]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    inside = axes.get_window_extent()
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
    for box in boxes:
        for point in axes.transData.transform(points):
            assert not box.contains(*point)


def test_marks_stand_at_the_numbers_and_bars_at_95_percent() -> None:
    names = ["int8_per_token_head", "mine"]
    summary = pd.DataFrame({"mode": names})
    for column in (
        "attention_kl",
        "attention_tv",
        *(f"output_error{x}" for x in ("", "_key", "_value")),
    ):
        summary[column] = [0.01, 0.2]
        summary[f"{column}_se"] = [0.001, np.nan]
    with plots.style():
        axes = plots.attention(summary).axes[0]
    (bars,) = axes.containers
    assert bars[0].get_xdata().tolist() == [0.01, 0.2]
    first, second = (segment[:, 0] for segment in bars[2][0].get_segments())
    np.testing.assert_allclose(first, [0.01 - 1.96e-3, 0.01 + 1.96e-3])
    np.testing.assert_allclose(second, [0.2, 0.2])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["int8", "mine"]
    assert axes.get_xscale() == "log"


def test_colors_are_those_the_color_blind_can_tell_apart() -> None:
    okabe_ito = {
        "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
    }  # fmt: skip
    styles = plots.ROUNDING_STYLES.values()
    assert {color for color, _ in styles} <= okabe_ito
    assert len({marker for _, marker in styles}) == len(styles)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.NAME)
def test_paper_figures(figure: object, tmp_path: Path) -> None:
    activations = replace(
        synthetic_activations(layers=1, tokens=32, queries=4, head_dim=32),
        rotary=RotarySpec(tuple(100.0 ** (-i / 16) for i in range(16)), 32),
    )
    settings = Settings(theory_rows=32, gaussian_tokens=32, gaussian_heads=2, query_block=2)
    name, draw = figure.NAME, figure.draw  # type: ignore[attr-defined]
    for folder in ("one", "two"):
        style.save(name, draw, activations, settings, tmp_path / folder)
    for ending in ("pdf", "png", "csv"):
        one, two = (tmp_path / folder / f"{name}.{ending}" for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    table = pd.read_csv(tmp_path / "one" / f"{name}.csv")
    assert len(table) >= 4
    numbers = table.select_dtypes("number")
    assert np.isfinite(numbers.to_numpy()).any(0).all()


def test_every_figure_is_drawn_and_listed() -> None:
    folder = Path(style.__file__).parent
    scripts = {path.stem for path in folder.glob("figure_*.py")}
    assert scripts == {figure.NAME for figure in FIGURES}
    text = (folder / "README.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `figure_")]
    assert listed == [figure.NAME for figure in FIGURES]


def test_a_mean_after_rope_is_a_trap() -> None:
    position_shift = next(one for one in FIGURES if one.NAME == "figure_position_shift")
    activations = embedded_sample()
    few = {17: activations.layers[17]}
    with plots.style():
        _, table = position_shift.draw(replace(activations, layers=few), Settings(max_queries=16))
    kl = table[table["mode"] == "int4_per_token_head"].groupby(["centering", "offset"])
    kl = kl["attention_kl"].mean()
    assert kl["mean before RoPE", 30_000] < 0.8 * kl["no mean", 30_000]
    assert kl["mean after RoPE", 30_000] > kl["no mean", 30_000]


def test_published_numbers_have_a_source() -> None:
    published = json.loads(style.PUBLISHED.read_text(encoding="utf-8"))
    assert "vllm-project/vllm/pull/40633" in published["source"]
    assert published["gsm8k"]["modes"].keys() <= {short_name(name) for name in MODES}
