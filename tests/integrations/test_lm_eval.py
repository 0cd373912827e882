"""The adapter for lm-evaluation-harness on tasks of a local JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

import transformers
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import kvq.integrations.lm_eval  # noqa: F401  (registers the model)
from tests.integrations.models import tiny_model

WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[END]", *WORDS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]"
    )


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks over one local file: the likelihood of a text, and a greedy continuation."""
    rows = [
        {"text": " ".join(WORDS[(i * 7 + j * j) % 90] for j in range(40)), "answer": "w1"}
        for i in range(6)
    ]
    data = tmp_path / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    definitions = {
        "likelihood": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "continuation": {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["[END]"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean"}],
        },
    }
    for name, definition in definitions.items():
        contents = {"task": f"kvq_{name}", **common, **definition}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(contents))
    return tmp_path


def run(tasks: Path, tokenizer: Any, name: str, **options: Any) -> dict[str, Any]:
    model = tiny_model("llama", "sdpa")
    model.generation_config.pad_token_id = 0
    return simple_evaluate(
        name,
        {"pretrained": model, "tokenizer": tokenizer, "batch_size": 2, **options},
        tasks=["kvq_likelihood", "kvq_continuation"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def found(results: dict[str, Any]) -> tuple[float, list[str]]:
    """The perplexity, and the continuations."""
    perplexity = results["results"]["kvq_likelihood"]["word_perplexity,none"]
    samples = results["samples"]["kvq_continuation"]
    return perplexity, [sample["resps"][0][0] for sample in samples]


def test_int2_changes_likelihood_and_generation(
    tasks: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    full = found(run(tasks, tokenizer, "hf"))
    int8 = found(run(tasks, tokenizer, "kvq", key_mode="int8", value_mode="int8"))
    int2 = found(run(tasks, tokenizer, "kvq", key_mode="int2", value_mode="int2"))
    assert int8[0] == pytest.approx(full[0], rel=5e-3)
    assert int8[0] != full[0]
    assert abs(int2[0] - full[0]) > 3 * abs(int8[0] - full[0])
    assert int2[1] != full[1]
    with pytest.raises(ValueError, match="int5"):
        run(tasks, tokenizer, "kvq", key_mode="int5")
