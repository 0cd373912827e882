"""The modes, by side and layer, that minimize the predicted output error within a budget of bits.

The error of a layer is taken to be the sum of what its keys and its values do alone, so the choice
is a knapsack with one item from each group. It is solved exactly, by dynamic programming over the
bytes of a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvq import reference
from kvq.activations import Activations
from kvq.analysis.prediction import LARGEST_NOISE, predict_activations
from kvq.analysis.summary import select
from kvq.checks import check_number
from kvq.modes import Mode, short_name
from kvq.tier import Tier

#: The sides of a layer, with the letters that a recipe has for them.
SIDES: Final = {"key": "k", "value": "v"}


class Choice(NamedTuple):
    """A mode for one side of one layer."""

    layer: int
    #: `"key"` or `"value"`.
    side: str
    mode: Mode
    #: Predicted output error, a mean over query heads.
    output_error: float
    #: Predicted root mean square error of a score, weighted by attention; 0 for values.
    score_noise: float


class Recommendation(NamedTuple):
    """The best choice, and the best that has one mode for each side."""

    #: What `kvq eval --recipe` takes. Layers that were not captured have the modes of `pair`.
    recipe: str
    #: Keys and values of each layer in turn.
    choices: Sequence[Choice]
    #: Stored bits per value of these layers, words counted.
    bits_per_value: float
    #: Predicted output error: keys and values of a layer together, a mean over layers.
    output_error: float
    #: The modes of keys and of values that do best where all layers have the same.
    pair: tuple[Mode, Mode]
    #: The same of that pair.
    pair_bits_per_value: float
    pair_output_error: float
    #: Whether all score noise is in the range where predictions were found to hold.
    in_range: bool


def recommend(
    activations: Activations, modes: Sequence[Mode], bits: float, *, tier: Tier = reference
) -> Recommendation:
    """Choose modes for every captured layer.

    Args:
        activations: With queries.
        modes: The candidates.
        bits: The budget: average stored bits per value, words counted.
        tier: Who rotates.

    Raises:
        ValueError: No candidate fits the budget; there are no queries; a mode does not suit a head
            size; or layers have different shapes.

    Exactness: no other choice of candidates within the budget has a smaller sum of predicted
    errors, to rounding.
    """
    check_number("bits", bits, positive=True)
    predicted = predict_activations(activations, modes, tier=tier)
    layers = activations.layers
    first = next(iter(layers.values()))
    for index, layer in layers.items():
        if layer.key.shape != first.key.shape or layer.value.shape != first.value.shape:
            raise ValueError(
                f"layers must have one shape to share a budget, got layers.{index}.key "
                f"{list(layer.key.shape)} beside {list(first.key.shape)}"
            )
    head_dims = {"key": first.key.shape[-1], "value": first.value.shape[-1]}
    sizes = {
        side: [mode.bytes_per_token_head(head_dim) for mode in modes]
        for side, head_dim in head_dims.items()
    }
    errors = {side: _errors(predicted, side, modes) for side in SIDES}
    noise = _by_layer(select(predicted, metric="score_noise"), modes)
    # A tolerance for budgets such as 3.1, which no float is.
    budget = math.floor(bits * sum(head_dims.values()) / 8 * len(layers) + 1e-9)
    pair = _best_pair(sizes, errors, budget / len(layers))
    if pair is None:
        least = 8 * sum(map(min, sizes.values())) / sum(head_dims.values())
        raise ValueError(f"bits must be at least {least:g} for the modes given, got {bits:g}")
    groups = [(side, row) for row in range(len(layers)) for side in SIDES]
    picked = _knapsack(
        [sizes[side] for side, _ in groups], [errors[side][row] for side, row in groups], budget
    )
    numbers = list(layers)
    choices = [
        Choice(
            numbers[row],
            side,
            modes[item],
            float(errors[side][row, item]),
            float(noise[row, item]) if side == "key" else 0.0,
        )
        for (side, row), item in zip(groups, picked, strict=True)
    ]
    values = sum(head_dims.values())
    stored = sum(sizes[side][item] for (side, _), item in zip(groups, picked, strict=True))
    key, value = pair
    return Recommendation(
        recipe=_recipe(choices, modes[key], modes[value]),
        choices=choices,
        bits_per_value=8 * stored / (values * len(layers)),
        output_error=sum(choice.output_error for choice in choices) / len(layers),
        pair=(modes[key], modes[value]),
        pair_bits_per_value=8 * (sizes["key"][key] + sizes["value"][value]) / values,
        pair_output_error=float(errors["key"][:, key].mean() + errors["value"][:, value].mean()),
        in_range=all(choice.score_noise <= LARGEST_NOISE for choice in choices),
    )


def _errors(predicted: pd.DataFrame, side: str, modes: Sequence[Mode]) -> npt.NDArray[np.float64]:
    """Predicted output error, `[layers, modes]`."""
    return _by_layer(select(predicted, metric="output_error", quantized=side), modes)


def _by_layer(table: pd.DataFrame, modes: Sequence[Mode]) -> npt.NDArray[np.float64]:
    """Means over query heads, `[layers, modes]`."""
    wide = table.pivot_table(index="layer", columns="mode", values="value", aggfunc="mean")
    return wide[[mode.name for mode in modes]].to_numpy(dtype=np.float64)


def _best_pair(
    sizes: dict[str, list[int]], errors: dict[str, npt.NDArray[np.float64]], budget: float
) -> tuple[int, int] | None:
    """The modes of keys and values with the smallest mean error whose bytes fit."""
    means = {side: table.mean(0) for side, table in errors.items()}
    fitting = [
        (means["key"][i] + means["value"][j], i, j)
        for i, key in enumerate(sizes["key"])
        for j, value in enumerate(sizes["value"])
        if key + value <= budget
    ]
    return min(fitting)[1:] if fitting else None


def _knapsack(sizes: Sequence[Sequence[int]], errors: Sequence[Any], budget: int) -> list[int]:
    """One item of each group, of the smallest sum of errors whose sum of sizes is within budget.

    `best[c]` is the smallest sum of errors of the groups so far within `c` units of bytes.
    """
    unit = math.gcd(*(size for group in sizes for size in group))
    capacity = min(budget // unit, sum(max(group) for group in sizes) // unit)
    best = np.zeros(capacity + 1)
    picks = []
    for group, losses in zip(sizes, errors, strict=True):
        options = np.full((len(group), capacity + 1), np.inf)
        for item, (size, loss) in enumerate(zip(group, losses, strict=True)):
            if size // unit <= capacity:
                options[item, size // unit :] = best[: capacity + 1 - size // unit] + loss
        picks.append(options.argmin(0))
        best = options.min(0)
    chosen, left = [], capacity
    for group, pick in zip(reversed(sizes), reversed(picks), strict=True):
        chosen.append(int(pick[left]))
        left -= group[chosen[-1]] // unit
    return chosen[::-1]


def _recipe(choices: Sequence[Choice], key: Mode, value: Mode) -> str:
    """The text of a recipe: the modes of all other layers, and of those that differ from them."""
    others = {"key": key, "value": value}
    parts = [f"{SIDES[side]}={short_name(mode.name)}" for side, mode in others.items()]
    parts += [
        f"{SIDES[choice.side]}{choice.layer}={short_name(choice.mode.name)}"
        for choice in choices
        if choice.mode != others[choice.side]
    ]
    return ",".join(parts)


def counts(choices: Sequence[Choice]) -> Iterator[tuple[str, str, int]]:
    """How many layers have each mode, by side, the most frequent first."""
    for side in SIDES:
        names = Counter(short_name(c.mode.name) for c in choices if c.side == side)
        yield from ((side, name, count) for name, count in names.most_common())
