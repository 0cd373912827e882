"""Every program of `examples/` runs, as its docstring says, on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: What programs are given, and what they print; `MODEL` is the folder of a tiny model.
RUNS: dict[str, list[tuple[list[str], int, str]]] = {
    "add_mode.py": [([], 0, r"lloyd3_twice, 3\.5, 0\.03\d\d, 0\.03\d\d, 0\.9\d+\n")],
    "check_kernel.py": [
        ([], 0, r"^0 of 2000 rows differ\n$"),
        (["--wrong"], 1, r"int8_ties: \d+"),
    ],
    "compare_recipes.py": [([], 0, r"int8: KL divergence \d\.\d\de-0[789] nats")],
    "fit_codebook.py": [(["s.safetensors"], 0, r"lloyd3\+sphere64_8: 0\.03\d+\n$")],
    "generate.py": [(["MODEL", "int8", "int4", "w1 w2 w3"], 0, r"w1 w2 w3 w.*\n42 tokens: \d+")],
    "paged_attention.py": [([], 0, r"keys int8, values int8: relative error 0\.0\d+\n")],
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, and a tokenizer of one token per word."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from tests.integrations.models import VOCABULARY, tiny_model

    folder = tmp_path_factory.mktemp("model")
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    tiny_model("llama", "sdpa").save_pretrained(folder)
    return folder


def test_every_example_is_run() -> None:
    assert [path.name for path in EXAMPLES] == list(RUNS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = path.read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in source.partition("from __future__")[0]
    if "kvq.integrations" in source:
        pytest.importorskip("transformers")
    for words, code, printed in RUNS[path.name]:
        arguments = [
            str(request.getfixturevalue("model_folder")) if word == "MODEL" else word
            for word in words
        ]
        # This kvq, wherever the environment has another, and no matter what the folder is.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [sys.executable, str(path), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        assert result.returncode == code, result.stdout + result.stderr
        assert re.search(printed, result.stdout, re.DOTALL), result.stdout
