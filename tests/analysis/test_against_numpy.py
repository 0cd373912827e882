"""The numbers of the tables against plain numpy, written from their definitions in loops."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from kvq import reference
from kvq.activations import Activations
from kvq.analysis.measure import Settings, measure, thin_queries
from kvq.analysis.samples import synthetic_activations
from kvq.analysis.summary import select, summarize
from kvq.modes import RANDOM_HADAMARD, Mode, mode

Array = NDArray[np.float64]
MODES = [mode(name) for name in ("int8", "int4", "lloyd2", "smax3_per_token_head")]
SETTINGS = Settings(
    key_block=8, query_block=16, theory_rows=64, gaussian_tokens=64, gaussian_heads=2
)


@pytest.fixture(scope="module")
def activations() -> Activations:
    made = synthetic_activations(
        layers=2, tokens=48, query_heads=4, heads=2, head_dim=32, queries=7, dtype=torch.bfloat16
    )
    # Positions with gaps, so that a position is not an index; queries at keys and between them.
    between = torch.arange(7) % 2
    return Activations(
        made.layers,
        made.positions * 2 + 5,
        made.query_positions * 2 + 5 + between,
        0.3,
    )


@pytest.fixture(scope="module")
def tables(activations: Activations) -> dict[str, pd.DataFrame]:
    return measure(activations, MODES, settings=SETTINGS)


class Layer(NamedTuple):
    """One layer in float64, with the keys and values of a mode."""

    query: Array
    key: Array
    value: Array
    key_hat: Array
    value_hat: Array


def layer_of(activations: Activations, index: int, each: Mode) -> Layer:
    layer = activations.layers[index]
    assert layer.query is not None
    key_hat, value_hat = (
        reference.dequantize(*reference.quantize(x, each), each, x.shape[-1]).double().numpy()
        for x in (layer.key, layer.value)
    )
    query, key, value = (x.double().numpy() for x in layer)
    return Layer(query, key, value, key_hat, value_hat)


def one(table: pd.DataFrame, **labels: object) -> tuple[float, float]:
    found = select(table, **labels)
    assert len(found) == 1, labels
    return float(found["value"].iloc[0]), float(found["standard_error"].iloc[0])


def jackknife_ratio(numerator: Array, denominator: Array, blocks: Array) -> tuple[float, float]:
    names = sorted(set(blocks.tolist()))
    left = []
    for name in names:
        keep = blocks != name
        left.append(numerator[keep].sum() / denominator[keep].sum())
    n = len(names)
    variance = (n - 1) / n * sum((x - sum(left) / n) ** 2 for x in left)
    return numerator.sum() / denominator.sum(), math.sqrt(variance)


@pytest.mark.parametrize("each", MODES, ids=str)
@pytest.mark.parametrize("index", [0, 1])
def test_errors_of_rows(
    activations: Activations, tables: dict[str, pd.DataFrame], each: Mode, index: int
) -> None:
    layer = layer_of(activations, index, each)
    blocks = activations.positions.numpy() // 8
    for side, x, x_hat in (
        ("key", layer.key, layer.key_hat),
        ("value", layer.value, layer.value_hat),
    ):
        for head in range(2):
            error = ((x_hat - x)[:, head] ** 2).sum(1)
            energy = (x[:, head] ** 2).sum(1)
            labels = {"layer": index, "head": head, "side": side, "mode": each.name}
            table = select(tables["quantization_error"], **labels)
            expected = jackknife_ratio(error, energy, blocks)
            found = one(table, tokens="all", metric="relative_error")
            assert found == pytest.approx(expected, rel=1e-10)
            decibels = -10 * math.log10(expected[0])
            assert one(table, tokens="all", metric="snr_db")[0] == pytest.approx(decibels)
            mean = one(table, tokens="all", metric="mean_squared_error")[0]
            assert mean == pytest.approx(((x_hat - x)[:, head] ** 2).mean())
            first = one(table, tokens="first", metric="relative_error")
            assert first[0] == pytest.approx(error[0] / energy[0])
            assert math.isnan(first[1])
            rest = one(table, tokens="rest", metric="relative_error")
            assert rest == pytest.approx(
                jackknife_ratio(error[1:], energy[1:], blocks[1:]), rel=1e-10
            )


@pytest.mark.parametrize("each", MODES, ids=str)
@pytest.mark.parametrize("head", range(4))
def test_scores_and_attention(
    activations: Activations, tables: dict[str, pd.DataFrame], each: Mode, head: int
) -> None:
    layer = layer_of(activations, 1, each)
    kv_head = head // 2
    positions, at = activations.positions.numpy(), activations.query_positions.numpy()
    errors, centered, centered_scores, divergences, variations = [], [], [], [], []
    outputs: dict[str, list[float]] = {"key": [], "value": [], "both": []}
    energies = []
    for i, position in enumerate(at):
        seen = positions <= position
        q = layer.query[i, head]
        s = 0.3 * layer.key[seen, kv_head] @ q
        s_hat = 0.3 * layer.key_hat[seen, kv_head] @ q
        errors += list(s_hat - s)
        centered += list((s_hat - s) - (s_hat - s).mean())
        centered_scores += list(s - s.mean())
        p, p_hat = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (s, s_hat))
        divergences.append((p * np.log(p / p_hat)).sum())
        variations.append(0.5 * np.abs(p - p_hat).sum())
        v, v_hat = layer.value[seen, kv_head], layer.value_hat[seen, kv_head]
        output = p @ v
        energies.append((output**2).sum())
        for quantized, new in (("key", p_hat @ v), ("value", p @ v_hat), ("both", p_hat @ v_hat)):
            outputs[quantized].append(((new - output) ** 2).sum())
    labels = {"layer": 1, "head": kv_head, "query_head": head, "mode": each.name}
    table = select(tables["score_bias"], **labels)
    fitted = stats.linregress(centered_scores, np.add(centered_scores, centered))
    residual = np.array(centered) - (fitted.slope - 1) * np.array(centered_scores)
    for metric, expected in (
        ("mean_error", np.mean(errors)),
        ("rmse", np.sqrt(np.mean(np.square(errors)))),
        ("centered_rmse", np.sqrt(np.mean(np.square(centered)))),
        ("slope", fitted.slope),
        ("spread", np.sqrt(np.mean(residual**2))),
    ):
        value, standard_error = one(table, metric=metric)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-15), metric
        assert standard_error > 0, metric
    table = select(tables["attention_error"], **labels)
    blocks, ones = at // 16, np.ones(len(at))
    for metric, values in (("kl_divergence", divergences), ("total_variation", variations)):
        assert one(table, quantized="key", metric=metric) == pytest.approx(
            jackknife_ratio(np.array(values), ones, blocks), rel=1e-7
        )
    for quantized, values in outputs.items():
        assert one(table, quantized=quantized, metric="output_error") == pytest.approx(
            jackknife_ratio(np.array(values), np.array(energies), blocks), rel=1e-7
        )


@pytest.mark.parametrize("side", ["key", "value"])
def test_statistics(activations: Activations, tables: dict[str, pd.DataFrame], side: str) -> None:
    for index, layer in activations.layers.items():
        x = getattr(layer, side)
        turned = reference.hadamard_transform(x, RANDOM_HADAMARD).double().numpy()
        shapes = {"none": x.double().numpy(), "random_hadamard": turned / math.sqrt(32)}
        for rotation, rows in shapes.items():
            for head in range(2):
                r = rows[:, head]
                expected = {
                    "mean_energy_share": (r.mean(0) ** 2).sum() / (r**2).sum(1).mean(),
                    "first_token_share": (r[0] ** 2).sum() / (r**2).sum(),
                    "kurtosis": stats.kurtosis(r.ravel(), fisher=False),
                    "row_kurtosis": ((r**4).mean(1) / (r**2).mean(1) ** 2).mean(),
                    "peak_to_rms": (np.abs(r).max(1) / np.sqrt((r**2).mean(1))).mean(),
                }
                table = select(
                    tables["activation_statistics"],
                    layer=index, head=head, side=side, rotation=rotation,
                )  # fmt: skip
                for metric, value in expected.items():
                    assert one(table, metric=metric)[0] == pytest.approx(value, rel=1e-10), metric


def test_the_summary_averages_over_layers_and_kv_heads(
    tables: dict[str, pd.DataFrame],
) -> None:
    summary = summarize(tables, MODES).set_index("mode")
    assert list(summary.index) == [each.name for each in MODES]
    for each in MODES:
        table = select(
            tables["attention_error"], mode=each.name, metric="output_error", quantized="both"
        )
        units = [
            select(table, layer=index, head=head)["value"].mean()
            for index in (0, 1)
            for head in (0, 1)
        ]
        row = summary.loc[each.name]
        assert row["output_error"] == pytest.approx(np.mean(units))
        assert row["output_error_se"] == pytest.approx(np.std(units, ddof=1) / 2)
        errors = select(
            tables["quantization_error"],
            mode=each.name, side="key", tokens="all", metric="relative_error",
        )["value"]  # fmt: skip
        assert row["key_relative_error"] == pytest.approx(errors.mean())
        assert row["key_snr_db"] == pytest.approx(-10 * math.log10(errors.mean()))


def test_queries_are_thinned_evenly_and_keep_the_last(activations: Activations) -> None:
    thin = thin_queries(activations, 3)
    assert thin.query_positions.tolist() == activations.query_positions[[1, 3, 6]].tolist()
    for index, layer in thin.layers.items():
        whole = activations.layers[index].query
        assert layer.query is not None
        assert whole is not None
        assert torch.equal(layer.query, whole[[1, 3, 6]])
    assert thin_queries(activations, 7).query_positions.tolist() == (
        activations.query_positions.tolist()
    )


def test_queries_before_all_keys_see_nothing_and_are_left_out(activations: Activations) -> None:
    early = Activations(
        activations.layers,
        activations.positions + 30,
        activations.query_positions,
        activations.scale,
    )
    kept = thin_queries(early, 100).query_positions
    assert kept.tolist() == [p for p in activations.query_positions.tolist() if p >= 35]


def test_keys_and_values_may_have_other_head_sizes() -> None:
    made = synthetic_activations(layers=1, tokens=24, queries=4, head_dim=64)
    narrow = {0: made.layers[0]._replace(value=made.layers[0].value[..., :32].contiguous())}
    odd = Activations(narrow, made.positions, made.query_positions, made.scale)
    tables = measure(odd, MODES, settings=SETTINGS)
    exact = {
        head_dim: select(tables["theory"], mode="lloyd2_per_token_head", head_dim=head_dim)
        for head_dim in (64, 32)
    }
    summary = summarize(tables, MODES).set_index("mode")
    found = summary.loc["lloyd2_per_token_head", "theory_relative_error"]
    assert found == one(exact[64], kind="monte_carlo", metric="relative_error")[0]
    assert found != one(exact[32], kind="monte_carlo", metric="relative_error")[0]
    assert (tables["attention_error"]["value"].notna()).all()
    values = select(tables["accounting"], metric="values")["value"]
    assert (values == 24 * 2 * (64 + 32)).all()
