"""Predictions where the assumptions are met, and choices against all there are."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

from kvq import reference
from kvq.analysis.agreement import by_mode, by_noise, predicted_and_measured
from kvq.analysis.prediction import predict_activations, row_model
from kvq.analysis.ranking import METRICS, Judged, cheap_metrics, rank_correlations, spearman
from kvq.analysis.recommend import _knapsack, counts, recommend
from kvq.analysis.samples import gaussian, synthetic_activations
from kvq.analysis.summary import select
from kvq.commands.recommend import read_judged
from kvq.evaluation.recipes import parse_recipe
from kvq.files import FileFormatError
from kvq.modes import MODES, mode
from kvq.rounding import Rounding

ROWS = 4096


@pytest.mark.parametrize(
    "wanted",
    [
        *MODES.values(),
        mode("int8").with_rounding(Rounding.TOWARD_ZERO),
        mode("int4").with_rounding(Rounding.TOWARD_ZERO),
        mode("int4").without_rotation(),
    ],
    ids=str,
)
def test_row_models_hold_on_gaussian_rows(wanted: object) -> None:
    x = gaussian(ROWS, 1, 64, seed=7)
    model = row_model(x, wanted)  # type: ignore[arg-type]
    x_hat = reference.dequantize(*reference.quantize(x, wanted), wanted, 64)  # type: ignore[arg-type]
    exact, energy = x.double(), x.double().square().sum((0, -1))
    expected = (model.mean(x) - exact).square().sum(-1) + model.noise_energy(x)
    error = (x_hat.double() - exact).square().sum(-1)
    assert float(expected.sum() / error.sum()) == pytest.approx(1.0, abs=0.06)
    gain = float((x_hat.double() * exact).sum() / energy)
    moved = float((model.mean(x) * exact).sum() / energy)
    # The end codes are not modeled: truncated unsigned codes leave a row's lower end in place.
    truncated = wanted == mode("int4").with_rounding(Rounding.TOWARD_ZERO)
    assert moved == pytest.approx(gain, abs=0.02 if truncated else 0.005)


def test_truncation_shrinks_signed_codes_and_moves_unsigned_ones() -> None:
    x = gaussian(8, 1, 64)
    signed = row_model(x, mode("int8").with_rounding(Rounding.TOWARD_ZERO))
    assert bool((signed.gain < 1.0).all())
    assert not bool(signed.shift.any())
    unsigned = row_model(x, mode("int4").with_rounding(Rounding.TOWARD_ZERO))
    assert bool((unsigned.gain == 1.0).all())
    assert bool((unsigned.shift < 0.0).all())


def test_equal_rows_have_equal_noise_and_others_none_in_common() -> None:
    x = gaussian(3, 1, 64)
    x[1] = x[0]
    model = row_model(x, mode("lloyd4"))
    products = model.noise_products(x)[0]
    torch.testing.assert_close(products[0, 1], products[0, 0])
    assert float(products[0, 2] / products[0, 0]) < 1e-6
    torch.testing.assert_close(products.diagonal(), model.noise_energy(x)[:, 0])


@pytest.fixture(scope="module")
def agreement() -> pd.DataFrame:
    activations = synthetic_activations(
        layers=2, tokens=256, queries=64, head_dim=64, heads=4, query_heads=8, key_mean_share=0.0
    )
    modes = [mode(name) for name in ("int8", "int4", "lloyd4", "lloyd3", "lloyd2_unbiased")]
    return predicted_and_measured(activations, modes)


def test_predictions_hold_on_isotropic_rows(agreement: pd.DataFrame) -> None:
    means = by_mode(agreement)
    assert list(means["mode"]) == list(dict.fromkeys(agreement["mode"]))
    for name, tolerance in (
        ("score_slope", 0.02),
        ("score_rmse", 0.05),
        ("output_error_key", 0.2),
        ("output_error_value", 0.12),
    ):
        np.testing.assert_allclose(means[f"{name}_ratio"], 1.0, atol=tolerance)
    assert means["in_range"].all()


def test_bins_hold_every_head(agreement: pd.DataFrame) -> None:
    bins = by_noise(agreement)
    assert bins["heads"].sum() == 5 * 2 * 8
    assert (bins["low"] <= bins["ratio"]).all()
    assert (bins["ratio"] <= bins["high"]).all()


def test_prediction_needs_queries() -> None:
    activations = synthetic_activations(layers=1, tokens=8, queries=2, head_dim=32)
    layer = activations.layers[0]._replace(query=None)
    bare = type(activations)({0: layer}, activations.positions, activations.positions[:0], 0.1)
    with pytest.raises(ValueError, match="layer must have queries"):
        predict_activations(bare, [mode("int8")])


def test_knapsack_finds_the_best_of_all_choices() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        sizes = (4 * generator.integers(1, 8, (4, 3))).tolist()
        errors = generator.random((4, 3))
        least, most = (sum(f(group) for group in sizes) for f in (min, max))
        budget = int(generator.integers(least, most + 8))
        best = min(
            sum(errors[i, item] for i, item in enumerate(items))
            for items in itertools.product(range(3), repeat=4)
            if sum(sizes[i][item] for i, item in enumerate(items)) <= budget
        )
        found = _knapsack(sizes, errors, budget)
        assert sum(sizes[i][item] for i, item in enumerate(found)) <= budget
        assert sum(errors[i, item] for i, item in enumerate(found)) == pytest.approx(best)


def test_recommendation_is_a_recipe_within_its_budget() -> None:
    activations = synthetic_activations(layers=3, tokens=64, queries=8, head_dim=64)
    modes = [mode(name) for name in ("int8", "int4", "lloyd2", "lloyd3")]
    found = recommend(activations, modes, 4.1)
    assert found.bits_per_value <= 4.1
    assert found.pair_bits_per_value <= 4.1
    assert found.output_error <= found.pair_output_error
    recipe = parse_recipe(found.recipe)
    assert (recipe.key_mode, recipe.value_mode) == found.pair
    for choice in found.choices:
        by_layer = recipe.key_layers if choice.side == "key" else recipe.value_layers
        assert by_layer.get(choice.layer, found.pair[choice.side == "value"]) == choice.mode
    assert recipe.bits_per_value(3, 64, 4096) == pytest.approx(found.bits_per_value)
    assert sum(count for _, _, count in counts(found.choices)) == 6
    # With all the bits there are, the best mode everywhere.
    assert recommend(activations, modes, 16.0).recipe == "k=int8,v=int8"


@pytest.mark.parametrize(
    ("bits", "message"),
    [(2.0, "bits must be at least 2.5"), (-1.0, "positive"), (math.nan, "positive")],
)
def test_budgets_that_cannot_be_met(bits: float, message: str) -> None:
    activations = synthetic_activations(layers=1, tokens=16, queries=2, head_dim=64)
    with pytest.raises(ValueError, match=message):
        recommend(activations, [mode("lloyd2"), mode("int4")], bits)


def test_rank_correlation_is_scipys() -> None:
    generator = np.random.default_rng(1)
    x, y = generator.integers(0, 6, 20), generator.random(20)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert math.isnan(spearman(np.ones(3), y[:3]))


def test_metrics_rank_what_they_should() -> None:
    activations = synthetic_activations(layers=1, tokens=64, queries=8, head_dim=64)
    names = ("int8", "int4", "lloyd3", "lloyd2", "lloyd1")
    judged = [Judged(n, mode(n), mode(n), float(i)) for i, n in enumerate(names)]
    table = cheap_metrics(activations, judged)
    assert list(table.columns) == ["recipe", "key_mode", "value_mode", "kld", *METRICS]
    found = rank_correlations(table).set_index("metric")
    for metric in METRICS:
        assert found.loc[metric, "spearman"] == pytest.approx(1.0), metric
    # The measured error is that of the attention tables, keys and values together.
    assert table["output_error"].is_monotonic_increasing
    with pytest.raises(ValueError, match="at least 4"):
        rank_correlations(table[:3])


def test_only_plain_recipes_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    texts = ("int4", "k=int8,v=lloyd2", "k=int4,v=int4,first=4", "k=int4,v=int4,k0=int8")
    rows = [{"recipe": text, "kld": 0.1} for text in texts]
    path.write_text(json.dumps({"schema": "kvq-eval/1", "rows": rows}))
    assert [one.recipe for one in read_judged(path)] == list(texts[:2])
    for text in ("{", "[]", '{"schema": "other", "rows": []}', '{"schema": "kvq-eval/1"}'):
        path.write_text(text)
        with pytest.raises(FileFormatError):
            read_judged(path)


def test_the_tables_name_what_they_hold() -> None:
    activations = synthetic_activations(layers=1, tokens=16, queries=2, head_dim=32)
    table = predict_activations(activations, [mode("int4")])
    assert set(select(table, metric="output_error")["quantized"]) == {"key", "value"}
    assert set(table["query_head"]) == set(range(4))
    assert (table["head"] == table["query_head"] // 2).all()
