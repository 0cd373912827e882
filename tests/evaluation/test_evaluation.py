"""Evaluations of tiny models: the measures against their definitions, and runs from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

import transformers

from kvq.analysis.quality_plot import _front
from kvq.cli import app
from kvq.evaluation import generation, prose, run
from kvq.evaluation.recipes import parse_recipe
from kvq.evaluation.summary import summarize, window_table
from kvq.evaluation.windows import WindowSums, compare, cut_windows, evaluate_window
from kvq.integrations.capture import LoadedModel
from kvq.integrations.key_transforms import calibrate
from tests.integrations.models import prompt, tiny_model

WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]"
    )


@pytest.fixture(scope="module")
def loaded(tokenizer: Any) -> LoadedModel:
    return LoadedModel(tiny_model("llama", "sdpa"), tokenizer, {"model": "tiny"})


def text(documents: int = 3, words: int = 50) -> str:
    return prose.SEPARATOR.join(
        " ".join(WORDS[(7 * i + j * j) % 90] for j in range(words)) for i in range(documents)
    )


# Measures


def test_compare_is_the_definition() -> None:
    torch.manual_seed(0)
    logits, reference = torch.randn(300, 11), torch.randn(300, 11)
    targets = torch.randint(0, 11, (300,))
    p, q = reference.double().softmax(-1), logits.double().softmax(-1)
    index = torch.arange(300)
    nll, full, kld, agree = compare(logits, reference, targets)
    assert nll == pytest.approx(float(-q[index, targets].log().sum()), rel=1e-6)
    assert full == pytest.approx(float(-p[index, targets].log().sum()), rel=1e-6)
    assert kld == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert agree == int((p.argmax(-1) == q.argmax(-1)).sum())
    assert compare(reference, reference, targets)[2] == 0


def test_windows_do_not_span_documents() -> None:
    documents = [list(range(10)), list(range(100, 107)), list(range(200, 202))]
    windows = cut_windows(documents, 3, 5)
    assert windows.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [100, 101, 102], [103, 104, 105]]
    assert cut_windows(documents, 3, 2).tolist() == [[0, 1, 2], [6, 7, 8]]
    with pytest.raises(ValueError, match=r"windows must be from 1 to the 5 windows .* got 6"):
        cut_windows(documents, 3, 6)


def test_a_window_is_scored_through_the_cache() -> None:
    model, ids = tiny_model("llama", "sdpa"), prompt(1, 30)[0]
    recipes = [parse_recipe(name) for name in ("int8", "int2")]
    rows = list(evaluate_window(model, 4, ids, recipes, 6))
    assert [(row.recipe, row.phase, row.tokens) for row in rows] == [
        (recipe, *phase)
        for recipe in ("int8", "int2")
        for phase in (("prefill", 24), ("decode", 5))
    ]
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        full = model(ids[None]).logits[0].double().log_softmax(-1)
    nll = -full[torch.arange(29), ids[1:]]
    for row in rows:
        part = nll[:24] if row.phase == "prefill" else nll[24:]
        assert row.full_nll == pytest.approx(float(part.sum()), rel=1e-5)
        assert row.kld > 0
    assert rows[2].kld > 5 * rows[0].kld
    assert rows[3].kld > 5 * rows[1].kld
    # Prefill and decoding see the same tokens: run at once, the sums are the same.
    at_once = list(evaluate_window(model, 4, ids, recipes, 0))
    for i, whole in enumerate(at_once):
        both = rows[2 * i], rows[2 * i + 1]
        assert whole.nll == pytest.approx(sum(row.nll for row in both), abs=1e-3)
        assert whole.kld == pytest.approx(sum(row.kld for row in both), rel=1e-2)
    with pytest.raises(ValueError, match="decode must be from 0 to 28, got 29"):
        next(evaluate_window(model, 0, ids, recipes, 29))


def test_summary_by_hand() -> None:
    rows = [
        WindowSums(0, "a", "prefill", 10, 20.0, 18.0, 1.0, 9),
        WindowSums(0, "a", "decode", 10, 30.0, 26.0, 3.0, 8),
        WindowSums(1, "a", "prefill", 20, 60.0, 59.0, 2.0, 19),
    ]
    summary = summarize(window_table(rows), {"a": 4.5}).set_index("phase")
    whole = summary.loc["all"]
    assert whole["perplexity"] == pytest.approx(math.exp(110 / 40))
    assert whole["perplexity_full"] == pytest.approx(math.exp(103 / 40))
    assert whole["perplexity_ratio"] == pytest.approx(math.exp(7 / 40))
    assert whole["kld"] == pytest.approx(6 / 40)
    assert whole["top1"] == pytest.approx(36 / 40)
    # Delete one of two windows: means 4/20 and 2/20 of the KL divergence.
    assert whole["kld_se"] == pytest.approx(math.sqrt(((0.2 - 0.15) ** 2 + (0.1 - 0.15) ** 2) / 2))
    assert summary.loc["decode", "tokens"] == 10
    assert math.isnan(summary.loc["decode", "kld_se"])


def test_generation_measures() -> None:
    assert generation.first_difference([1, 2, 3], [1, 2, 3]) == 3
    assert generation.first_difference([1, 5, 3], [1, 2, 3]) == 1
    assert generation.distinct_grams([1, 2] * 10) == 2 / 17
    assert generation.distinct_grams(list(range(10))) == 1.0
    assert generation.distinct_grams([1, 2]) == 1.0
    model = tiny_model("llama", "sdpa")
    (reference,) = references = generation.continue_prompts(model, prompt(1), None, 12)
    alone = model.generate(prompt(1), max_new_tokens=12, do_sample=False)[0, 40:]
    assert reference == alone.tolist()
    recipe = parse_recipe("k=int2,v=int2")
    (row,) = generation.measure_divergence(model, [3], prompt(1), recipe, references)
    assert row.tokens == 12
    assert row.first_difference < 12


def test_a_passkey_is_hidden_at_its_depth(tokenizer: Any) -> None:
    class Characters:
        """A token for each character."""

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(x) for x in text]

    filler = [ord("x")] * 500
    ids = generation.passkey_prompt(Characters(), filler, 300, 0.5, 12345)
    shown = "".join(map(chr, ids.tolist()))
    assert len(shown) == 300
    assert shown.endswith("The pass key is")
    before, _, after = shown.partition("\nThe pass key is 12345.")
    assert abs(before.count("x") - after.count("x")) <= 2
    with pytest.raises(ValueError, match=r"passkey must be a length .* got 800"):
        generation.passkey_prompt(Characters(), filler, 800, 0.5, 12345)


def test_markup_is_stripped() -> None:
    markup = (
        "{{Infobox|a={{b|c}}}}'''Bold''' [[link|text]] and [[plain]]s"
        '<ref name="a">no {{x}}</ref>'
        "<ref name=b/>. [[File:a.png|thumb|with [[inner]] link]]&lt;!-- note --&gt;\n== Head ==\n"
        "* item\n{| table\n|-\n| cell\n|}\n\n\nNext [http://x.org site] &amp; more [[de:Titel]]."
    )
    assert prose.strip_markup(markup) == "Bold text and plains.\nNext site & more ."


def test_the_front_of_a_picture() -> None:
    assert _front([4.0, 2.0, 8.0, 3.0], [0.5, 1.0, 0.7, 2.0]) == [1, 0]


def test_a_window_that_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass is told where its tokens stand, and positions change full precision little."""
    model, ids = tiny_model("qwen2", "sdpa"), prompt(1, 30)[0]
    seen: list[list[int]] = []
    rotary = model.model.rotary_emb
    original = rotary.forward

    def forward(x: Any, position_ids: Any) -> Any:
        seen.append(position_ids[0].tolist())
        return original(x, position_ids)

    recipes = [parse_recipe("k=int4,v=int4,center=bias").bind(model)]
    here = list(evaluate_window(model, 0, ids, recipes, 3))
    monkeypatch.setattr(rotary, "forward", forward)
    moved = list(evaluate_window(model, 0, ids, recipes, 3, 30_000))
    whole = list(range(30_000, 30_030))
    assert seen == [whole, whole[:27], whole[27:28], whole[28:29]]
    assert sum(row.kld for row in moved) < 2 * sum(row.kld for row in here)
    for a, b in zip(here, moved, strict=True):
        assert a.full_nll == pytest.approx(b.full_nll, rel=0.02)
    # A plain recipe loses far more, so the mean was where the keys were.
    plain = list(evaluate_window(model, 0, ids, [parse_recipe("int4")], 3, 30_000))
    assert sum(row.kld for row in plain) > 4 * sum(row.kld for row in moved)


# Runs


SETTINGS = run.Settings(
    tokens=12, windows=5, decode=3, generate=6, prompts=2, prompt_tokens=5, passkey=(60,)
)


def evaluate(
    loaded: LoadedModel,
    out: Path,
    names: list[str],
    settings: run.Settings = SETTINGS,
    batch: int = 1,
) -> run.EvaluationResult:
    recipes = [parse_recipe(name) for name in names]
    return run.run_evaluation(loaded, text(), recipes, out, settings, batch=batch, progress=False)


def test_a_run_writes_what_it_says(loaded: LoadedModel, tmp_path: Path) -> None:
    names = ["int8", "k=int4,v=int2,first=2,recent=3"]
    result = evaluate(loaded, tmp_path, names)
    assert [row["recipe"] for row in result.rows()] == names
    for row in result.rows():
        assert row["tokens"] == 5 * 11
        assert row["new_tokens"] == 6
        assert 0 <= row["passkey_60"] <= 1
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["recipes"] == names
    assert manifest["inputs"]["model"] == "tiny"
    assert len(manifest["inputs"]["text_sha256"]) == 64
    assert set(manifest["files"]) | {"manifest.json"} == {
        str(file.relative_to(tmp_path)) for file in result.files
    }
    table = pd.read_parquet(tmp_path / "tables/windows.parquet")
    assert len(table) == 5 * 2 * 2
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_run_goes_on(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["int8", "int4"]
    whole = evaluate(loaded, tmp_path / "whole", names)
    windows: list[int] = []
    original = run.evaluate_windows

    def stopping(model: Any, indices: list[int], *args: Any) -> Any:
        windows.extend(indices)
        for row in original(model, indices, *args):
            if row.window == 3 and row.phase == "decode":
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(run, "evaluate_windows", stopping)
    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        evaluate(loaded, out, names)
    with (out / "rows.jsonl").open("a") as file:
        file.write('["WindowSums", [3, "int')  # a line that was being written
    windows.clear()
    monkeypatch.setattr(
        run, "evaluate_windows", lambda *args: windows.extend(args[1]) or original(*args)
    )
    again = evaluate(loaded, out, names)
    assert windows == [3, 4]
    pd.testing.assert_frame_equal(again.summary, whole.summary)
    pd.testing.assert_frame_equal(again.generation, whole.generation)
    # Another recipe: what is there already is not run again.
    windows.clear()
    more = evaluate(loaded, out, ["int8", "int2"])
    assert windows == [0, 1, 2, 3, 4]
    assert [row["recipe"] for row in more.rows()] == ["int8", "int4", "int2"]
    with pytest.raises(ValueError, match="out must be a folder of the same model, text and"):
        evaluate(loaded, out, names, run.Settings(tokens=12, windows=4, prompt_tokens=5))


def test_windows_and_prompts_at_once(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["int8", "int4"]
    alone = evaluate(loaded, tmp_path / "alone", names)
    batches: list[list[int]] = []
    original = run.evaluate_windows
    monkeypatch.setattr(
        run, "evaluate_windows", lambda *args: batches.append(args[1]) or original(*args)
    )
    together = evaluate(loaded, tmp_path / "together", names, batch=3)
    assert batches == [[0, 1, 2], [3, 4]]
    tables = [
        pd.read_parquet(result.files[0].parent / "tables/windows.parquet").sort_values(
            ["window", "recipe", "phase"], ignore_index=True
        )
        for result in (alone, together)
    ]
    pd.testing.assert_frame_equal(*tables, rtol=1e-4)
    pd.testing.assert_frame_equal(alone.generation, together.generation)
    # What lacks different recipes does not run together.
    batches.clear()
    evaluate(loaded, tmp_path / "together", ["int8", "int2"], batch=9)
    assert batches == [[0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        evaluate(loaded, tmp_path / "together", names, batch=0)


def test_a_calibrated_run(loaded: LoadedModel, tmp_path: Path) -> None:
    calibration = calibrate(loaded.model, prompt())
    names = [
        "int4",
        "k=int4,v=int4,center=calibrated,pair=calibrated",
        "k=int4,v=int4,center=first",
    ]
    recipes = [parse_recipe(name) for name in names]
    settings = run.Settings(tokens=12, windows=3, decode=2, prompt_tokens=5, position_offset=100)

    def evaluated(**options: Any) -> run.EvaluationResult:
        return run.run_evaluation(
            loaded, text(), recipes, tmp_path, settings, progress=False, **options
        )

    result = evaluated(calibration=calibration)
    assert [row["recipe"] for row in result.rows()] == names
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["inputs"]["calibration_sha256"] == calibration.sha256
    assert manifest["settings"]["position_offset"] == 100
    with pytest.raises(ValueError, match=r"recipe 'k=int4.*' cannot be had: calibration must be"):
        evaluated()
    other = calibrate(loaded.model, prompt(seed=9))
    with pytest.raises(ValueError, match="out must be a folder of the same model, text and"):
        evaluated(calibration=other)
    with pytest.raises(ValueError, match=r"'k=int4,v=int4,center=bias' cannot be had: model must"):
        evaluate(loaded, tmp_path / "b", ["k=int4,v=int4,center=bias"])


def test_a_run_refuses(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recipes must each be named once, got int8, int8"):
        evaluate(loaded, tmp_path, ["int8", "int8"])
    with pytest.raises(ValueError, match="recipe must name layers below 2, got 7"):
        evaluate(loaded, tmp_path, ["k=int8,v=int8,k7=int4"])
    with pytest.raises(ValueError, match="windows must be at least 1, got 0"):
        run.Settings(windows=0)
    with pytest.raises(ValueError, match="prompt_tokens must be at most the window's 12, got 64"):
        run.Settings(tokens=12)


def test_the_command(loaded: LoadedModel, tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    loaded.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "text.txt").write_text(text())
    arguments = ["eval", "--model", folder, "--text", tmp_path / "text.txt", "--recipe", "int8"]
    arguments += ["--tokens", 12, "--windows", 3, "--decode", 2, "--out", tmp_path / "out"]
    arguments += [
        "--prompt-tokens",
        8,
        "--keep",
        tmp_path / "kept.json",
        "--license-notes",
        "mine",
    ]
    found = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["schema"] == "kvq-eval/1"
    assert kept["rows"] == document["rows"]
    assert kept["inputs"]["license"] == "mine"
    assert {"recipe", "bits_per_value", "perplexity", "kld", "kld_se", "tokens"} <= kept["rows"][
        0
    ].keys()
    calibrated = ["calibrate", *arguments[1:5], "--tokens", 12, "--windows", 3, "--out"]
    calibrated.append(tmp_path / "calibration.safetensors")
    found = CliRunner().invoke(app, [*map(str, calibrated), "--json"])
    assert found.exit_code == 0, found.output
    described = json.loads(found.stdout)
    assert described["schema"] == "kvq-calibration/1"
    assert [layer["layer"] for layer in described["layers"]] == [0, 1]
    assert described["provenance"]["windows"] == "3"
    moved = [*arguments[:5], "--recipe", "k=int4,v=int4,center=calibrated", *arguments[7:13]]
    moved += ["--prompt-tokens", 8, "--out", tmp_path / "moved", "--position-offset", 50]
    moved += ["--calibration", calibrated[-1], "--json"]
    found = CliRunner().invoke(app, list(map(str, moved)))
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["rows"][0]["kld"] > 0
    plain = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert "KL divergence" in plain.stdout


def test_serving() -> None:
    arguments = "serving --shape tiny --device cpu --dtype float32 --sequences 2 --inputs 9 --json"
    recipes = "--recipe int4 --recipe k=int4,v=int4,center=first"
    found = CliRunner().invoke(app, [*arguments.split(), "--outputs", "3", *recipes.split()])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    assert [row["mode"] for row in rows] == [
        "dynamic",
        "static",
        "int4",
        "k=int4,v=int4,center=first",
    ]
    assert max(row["ratio"] for row in rows[:2]) == 1
    for row in rows:
        assert row["tokens_per_s"] > 0
        total = row["ttft_ms"] + 2 * row["tpot_ms"]
        assert row["tokens_per_s"] == pytest.approx(2 * 3 / total * 1e3)
