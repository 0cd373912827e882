"""All measures of a set of modes on one set of activations, as tidy tables.

One row holds one number: what was measured, where, its value and its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import pandas as pd
import torch
from tqdm import tqdm

from kvq import reference
from kvq.activations import Activations, LayerActivations
from kvq.analysis.accounting import Accounting, account
from kvq.analysis.activation_statistics import activation_statistics, rotated
from kvq.analysis.estimates import blocks_of
from kvq.analysis.measured_layer import Context, MeasuredLayer, Row, estimate_rows
from kvq.analysis.rounding_drift import (
    ROUNDINGS,
    DriftInput,
    contexts_up_to,
    gaussian_inputs,
    inputs_from_activations,
    rounding_drift,
)
from kvq.analysis.theory import limit, predict, rate_distortion
from kvq.checks import (
    check_bool,
    check_choice,
    check_int,
    check_kind,
    check_list,
    check_number,
    check_optional,
    check_seed,
)
from kvq.modes import RANDOM_HADAMARD, SMALLEST_BLOCK, Mode
from kvq.tier import QuantizedKV, Tier, check_tier

#: The tables and their columns, in order.
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "quantization_error": (
        "layer", "head", "side", "mode", "tokens", "metric", "value", "standard_error",
    ),
    "score_bias": (
        "layer", "head", "query_head", "mode", "metric", "value", "standard_error",
    ),
    "attention_error": (
        "layer", "head", "query_head", "quantized", "mode", "metric", "value", "standard_error",
    ),
    "activation_statistics": (
        "layer", "head", "side", "rotation", "metric", "value", "standard_error",
    ),
    "theory": (
        "mode", "head_dim", "metric", "kind", "value", "standard_error",
    ),
    "rounding_drift": (
        "input", "mode", "rounding", "context", "metric", "value", "standard_error", "theory",
    ),
    "accounting": ("mode", "metric", "value"),
}  # fmt: skip

#: The tables that need every mode on every layer.
PER_LAYER: Final = frozenset(("quantization_error", "score_bias", "attention_error", "accounting"))


@dataclass(frozen=True, slots=True)
class Settings:
    """The sizes of a report. Each is recorded in its manifest."""

    #: Consecutive positions in a block of keys or values, the unit of their standard errors. On
    #: the embedded sample these grow up to about this size, and then no more.
    key_block: int = 16
    #: The same for queries, of which there are fewer.
    query_block: int = 8
    #: Queries that are used; of more, evenly spaced ones are.
    max_queries: int = 256
    #: Rows of the Monte Carlo predictions.
    theory_rows: int = 2**13
    #: Share of the queries, the last ones, that the drift over contexts is measured at.
    drift_queries: float = 0.125
    #: Longest context of the Gaussian drift.
    gaussian_tokens: int = 4096
    #: Independent heads of the Gaussian drift: the units of its standard errors.
    gaussian_heads: int = 8
    #: Slots of a page, for the padding in the accounting.
    page: int = 16

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "drift_queries":
                check_number(item.name, value, positive=True)
            else:
                check_int(item.name, value, 1)
        if self.drift_queries > 1:
            raise ValueError(f"drift_queries must be at most 1, got {self.drift_queries!r}")


def measure(
    activations: Activations,
    modes: Sequence[Mode],
    *,
    seed: int = 0,
    settings: Settings | None = None,
    tier: Tier = reference,
    progress: bool = False,
    only: Collection[str] = tuple(COLUMNS),
) -> dict[str, pd.DataFrame]:
    """Measure every mode on every layer.

    Args:
        activations: Keys and values; without queries the tables of scores and attention are empty.
        modes: Which, in the order of the tables. Their names must differ.
        seed: Of the Monte Carlo predictions, the Gaussian inputs and the stochastic rounding.
        settings: Sizes; the defaults if not given.
        tier: Who quantizes.
        progress: Show a bar, where there is a terminal.
        only: The tables to fill; the others stay empty.

    Returns:
        The tables of `COLUMNS`, by name.

    Raises:
        ValueError: `modes` is empty or names a mode twice, or a mode does not suit a head size.
    """
    settings = check_optional("settings", settings, Settings) or Settings()
    check_modes(activations, modes)
    check_seed(seed)
    check_tier(tier)
    check_bool("progress", progress)
    if isinstance(only, str):
        raise TypeError("only must be a collection of names, got str")
    for name in only:
        check_choice("only", name, tuple(COLUMNS))
    activations = thin_queries(activations, settings.max_queries)
    rounding_modes = [
        mode for mode in modes if mode.rounding is not None and "rounding_drift" in only
    ]
    steps = len(modes) * (len(activations.layers) + 1) + len(rounding_modes) * len(ROUNDINGS)
    rows: dict[str, list[Row]] = {name: [] for name in COLUMNS}
    # disable=None: no bar where there is no terminal.
    with (
        torch.inference_mode(),
        tqdm(total=steps, unit="step", disable=None if progress else True, leave=False) as bar,
    ):
        stored: dict[str, list[QuantizedKV]] = {mode.name: [] for mode in modes}
        context = _context(activations, settings)
        for index, layer in activations.layers.items():
            if "activation_statistics" in only:
                rows["activation_statistics"] += _describe(index, layer, context, tier)
            measured = MeasuredLayer(index, layer, context, tier)
            for mode in modes if PER_LAYER & set(only) else ():
                bar.set_postfix_str(f"layer {index}, {mode}")
                stored[mode.name] += measured.add_mode(mode, rows, only)
                bar.update()
        for mode in modes:
            bar.set_postfix_str(f"theory, {mode}")
            if "theory" in only:
                rows["theory"] += _predict(activations, mode, seed, settings, tier)
            if "accounting" in only:
                rows["accounting"] += _count(mode, account(mode, stored[mode.name], settings.page))
            bar.update()
        for step in _drift(activations, rounding_modes, seed, settings, tier):
            rows["rounding_drift"] += step
            bar.update()
    return {
        name: pd.DataFrame(rows[name], columns=list(columns)) for name, columns in COLUMNS.items()
    }


def check_modes(activations: Activations, modes: Sequence[Mode]) -> None:
    """Every mode must suit every head size, and have a name of its own.

    Raises:
        ValueError: One does not; the message says which and why.
    """
    check_kind("activations", activations, Activations)
    check_list("modes", modes, Mode)
    if not modes:
        raise ValueError("modes must hold at least one mode, got none")
    names = [mode.name for mode in modes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"modes must have different names, got {name!r} twice")
    for index, layer in activations.layers.items():
        for side in ("key", "value"):
            for mode in modes:
                try:
                    mode.check_head_dim(getattr(layer, side).shape[-1])
                except ValueError as error:
                    raise ValueError(
                        f"modes must suit layers.{index}.{side}, got {mode}: {error}"
                    ) from None


def thin_queries(activations: Activations, most: int) -> Activations:
    """The activations with at most that many queries, evenly spaced, each of which sees a key."""
    check_kind("activations", activations, Activations)
    check_int("most", most, 1)
    sees = activations.query_positions >= activations.positions[0]
    keep = sees.nonzero()[:, 0]
    if len(keep) > most:
        # The last query sees most, so it is always among them.
        keep = keep[(torch.arange(1, most + 1) * len(keep)) // most - 1]
    layers = {
        index: layer._replace(query=None if layer.query is None else layer.query[keep])
        for index, layer in activations.layers.items()
    }
    if not len(keep):
        layers = {index: layer._replace(query=None) for index, layer in layers.items()}
    return Activations(
        layers,
        activations.positions,
        activations.query_positions[keep],
        activations.scale,
        activations.rotary,
        activations.provenance,
    )


def _context(activations: Activations, settings: Settings) -> Context:
    return Context(
        activations.positions <= activations.query_positions[:, None],
        blocks_of(activations.query_positions, settings.query_block),
        blocks_of(activations.positions, settings.key_block),
        activations.scale,
    )


def _describe(index: int, layer: LayerActivations, context: Context, tier: Tier) -> Iterator[Row]:
    for side, x in (("key", layer.key), ("value", layer.value)):
        shapes = {"none": x}
        if x.shape[-1] % SMALLEST_BLOCK == 0:
            shapes["random_hadamard"] = rotated(x, RANDOM_HADAMARD, tier)
        for rotation, rows in shapes.items():
            estimates = activation_statistics(rows, context.key_blocks)
            labels = {"layer": index, "side": side, "rotation": rotation}
            yield from estimate_rows(estimates, "head", labels)


def _predict(
    activations: Activations, mode: Mode, seed: int, settings: Settings, tier: Tier
) -> Iterator[Row]:
    layers = activations.layers.values()
    # Those of the keys first: the summary takes the first.
    head_dims = (*(layer.key.shape[-1] for layer in layers), *(x.value.shape[-1] for x in layers))
    for head_dim in dict.fromkeys(head_dims):
        labels = {"mode": mode.name, "head_dim": head_dim}
        found = [
            predict(mode, head_dim, rows=settings.theory_rows, seed=seed, tier=tier),
            limit(mode),
        ]
        for prediction in found:
            if prediction is None:
                continue
            kind = {**labels, "kind": str(prediction.kind)}
            yield {
                **kind,
                "metric": "relative_error",
                "value": prediction.relative_error,
                "standard_error": prediction.relative_error_se,
            }
            yield {
                **kind,
                "metric": "gain",
                "value": prediction.gain,
                "standard_error": prediction.gain_se,
            }
        yield {
            **labels,
            "kind": "bound",
            "metric": "relative_error",
            "value": rate_distortion(math.log2(mode.levels)),
            "standard_error": 0.0,
        }


def _count(mode: Mode, found: Accounting) -> Iterator[Row]:
    names = (*found._fields, "stored_bytes", "paged_bytes", "baseline_bytes")
    ratios = ("bits_per_value", "compression", "paged_compression")
    for metric in (*names, *ratios):
        yield {"mode": mode.name, "metric": metric, "value": float(getattr(found, metric))}


def _drift(
    activations: Activations,
    modes: Sequence[Mode],
    seed: int,
    settings: Settings,
    tier: Tier,
) -> Iterator[list[Row]]:
    """The rows of each mode under each rounding."""
    if not modes:
        return
    head_dim = next(iter(activations.layers.values())).key.shape[-1]
    inputs: dict[str, tuple[list[DriftInput], int]] = {
        "gaussian": (
            [
                gaussian_inputs(
                    settings.gaussian_tokens, head_dim, heads=settings.gaussian_heads, seed=seed
                )
            ],
            settings.gaussian_tokens,
        )
    }
    if any(layer.query is not None for layer in activations.layers.values()):
        inputs = {
            "sample": inputs_from_activations(activations, settings.drift_queries),
            **inputs,
        }
    for mode in modes:
        for rounding in ROUNDINGS:
            yield [
                {
                    "input": name,
                    "mode": mode.name,
                    "rounding": str(rounding),
                    "context": drift.context,
                    "metric": drift.metric,
                    "value": float(drift.measured.value),
                    "standard_error": float(drift.measured.standard_error),
                    "theory": drift.theory,
                }
                for name, (items, length) in inputs.items()
                for drift in rounding_drift(
                    items, mode, rounding, contexts_up_to(length), seed=seed, tier=tier
                )
            ]
