"""The text of recipes, and what it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvq import CODEBOOKS, MODES, Rounding, mode
from kvq.codebook_files import save_codebook
from kvq.evaluation.recipes import NAMED, default_recipes, parse_mode, parse_recipe


def test_a_mode_is_a_recipe() -> None:
    recipe = parse_recipe("int4")
    assert recipe.key_mode == recipe.value_mode == mode("int4")
    assert (recipe.first_tokens, recipe.recent_tokens) == (0, 0)
    assert str(recipe) == "int4"


def test_sides_layers_and_tokens() -> None:
    recipe = parse_recipe(
        "k=int8, v=lloyd2_unbiased,k0=fp8,v11=int8,first=4,recent=64,prompt=full"
    )
    assert recipe.key_mode == mode("int8")
    assert recipe.value_mode == mode("lloyd2_unbiased")
    assert recipe.key_layers == {0: mode("fp8")}
    assert recipe.value_layers == {11: mode("int8")}
    assert (recipe.first_tokens, recipe.recent_tokens) == (4, 64)
    assert recipe.full_precision_prompt


def test_what_keys_lose() -> None:
    recipe = parse_recipe("k=int4,v=int4,center=first,pair=calibrated")
    assert (recipe.center, recipe.scale_pairs) == ("first", True)
    assert parse_recipe("int4").center is None
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2)
    with pytest.raises(ValueError, match=r"recipe must be bound to a model, got 'k=int4.*first"):
        recipe.new_cache(config)


def test_modes_with_parts(tmp_path: Path) -> None:
    assert parse_mode("int4@unrotated") == mode("int4").without_rotation()
    assert parse_mode("int8@toward_zero") == mode("int8").with_rounding(Rounding.TOWARD_ZERO)
    path = tmp_path / "book.safetensors"
    save_codebook(path, CODEBOOKS["gaussian_4"])
    fitted = parse_recipe(f"k=lloyd3+{path},v=int8").key_mode
    assert fitted == mode("lloyd3").with_codebook(CODEBOOKS["gaussian_4"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "int5"),
        ("k=int4", "recipe must have k= and v=, got 'k=int4'"),
        ("k=int4,v=int4,last=3", "recipe must be a mode, or parts among .*, got 'last=3'"),
        ("k=int4,v=int4,first=-3", "got 'first=-3'"),
        ("k=int4,v=int4,center=mean", r"center=bias\|first\|calibrated .* got 'center=mean'"),
        ("k=int4,v=int4,pair=bias", "and pair=calibrated, got 'pair=bias'"),
        ("int4@up", "rounding must be one of"),
        ("lloyd2@toward_zero", "mode must round to take another rounding"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_recipe(text)


def test_bits_per_value() -> None:
    assert parse_recipe("int4").bits_per_value(30, 128, 4096) == 4.25
    assert parse_recipe("k=int8,v=int4").bits_per_value(30, 64, 4096) == (8.5 + 4.5) / 2
    layers = parse_recipe("k=int4,v=int4,k0=int8").bits_per_value(4, 128, 4096)
    assert layers == 4.25 + 4 / 8
    kept = parse_recipe("k=int4,v=int4,first=4,recent=60").bits_per_value(2, 128, 4096)
    assert kept == 4.25 + 16 * (4 + 60 + 64) / 4096
    first = parse_recipe("k=int4,v=int4,center=first")
    assert first.bits_per_value(2, 128, 4096) == 4.25 + 16 / 4096
    assert parse_recipe("k=int4,v=int4,center=bias").bits_per_value(2, 128, 4096) == 4.25
    assert parse_recipe("k=int4,v=int4,first=9").bits_per_value(2, 128, 4) == 4.25 + 16


def test_recipes_by_name() -> None:
    for name, bits in (("kvq4", 4.25), ("kvq3", 3.25), ("kvq2", 2.25)):
        recipe = parse_recipe(name)
        assert recipe == parse_recipe(NAMED[name])
        assert str(recipe) == NAMED[name]
        # The first four of 4,096 tokens are kept twice.
        assert recipe.bits_per_value(30, 64, 4096) == bits + 16 * 4 / 4096
    assert set(NAMED) == {"kvq4", "kvq3", "kvq2"}


def test_by_default_every_mode_and_more() -> None:
    texts = [str(recipe) for recipe in default_recipes()]
    assert texts[: len(MODES)] == list(MODES)
    assert len(set(texts)) == len(texts) > len(MODES)
