"""An evaluation from beginning to end: it keeps what is done, goes on after a stop, and writes
tables, a picture and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd
import torch
from tqdm.auto import tqdm

from kvq.analysis.quality_plot import quality_figure
from kvq.analysis.results import commit, machine, versions
from kvq.calibration_files import Calibration
from kvq.checks import check_int, check_tuple
from kvq.evaluation.generation import (
    Divergence,
    Passkey,
    continue_prompts,
    distinct_grams,
    measure_divergence,
    measure_passkey,
)
from kvq.evaluation.prose import SEPARATOR
from kvq.evaluation.recipes import Recipe, check_named_once, parse_recipe
from kvq.evaluation.summary import summarize, window_table
from kvq.evaluation.windows import WindowSums, cut_windows, evaluate_windows
from kvq.integrations.capture import LoadedModel

#: Name and version of the manifest's format.
SCHEMA: Final = "kvq-eval/1"
#: What full precision is called among recipes.
FULL: Final = "full precision"
#: Where keys are hidden in a text.
DEPTHS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. A folder holds the rows of one."""

    #: Tokens in a window.
    tokens: int = 512
    #: Windows, evenly spread over the text.
    windows: int = 40
    #: Tokens at the end of a window that are run one at a time.
    decode: int = 16
    #: New tokens of greedy decoding; 0: none.
    generate: int = 0
    #: Prompts of greedy decoding: the beginnings of so many windows.
    prompts: int = 4
    #: Tokens of such a prompt.
    prompt_tokens: int = 64
    #: Lengths of the texts that a key is hidden in.
    passkey: tuple[int, ...] = ()
    #: The context at which bits per value count the full-precision tokens.
    context: int = 4096
    #: Where the first token of a window stands.
    position_offset: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("tokens", 2),
            ("windows", 1),
            ("decode", 0),
            ("generate", 0),
            ("prompts", 1),
            ("prompt_tokens", 1),
            ("context", 1),
            ("position_offset", 0),
        ):
            check_int(name, getattr(self, name), least)
        for length in check_tuple("passkey", self.passkey, int):
            check_int("passkey", length, 1)
        if self.prompt_tokens > self.tokens:
            raise ValueError(
                f"prompt_tokens must be at most the window's {self.tokens}, "
                f"got {self.prompt_tokens}"
            )


class EvaluationResult(NamedTuple):
    """What was found and written."""

    #: One row for each recipe and phase.
    summary: pd.DataFrame
    #: One row for each recipe: greedy decoding and retrieval; empty if none was asked for.
    generation: pd.DataFrame
    #: What was measured on: names, hashes, licenses.
    inputs: Mapping[str, str]
    #: Every file, the manifest last.
    files: Sequence[Path]

    def rows(self) -> list[dict[str, Any]]:
        """The rows to keep: both phases together, and the decoding that belongs to each."""
        whole = self.summary[self.summary["phase"] == "all"].drop(columns="phase")
        decoding = {row["recipe"]: row for row in _records(self.generation)}
        return [{**decoding.get(row["recipe"], {}), **row} for row in _records(whole)]


def run_evaluation(
    loaded: LoadedModel,
    text: str,
    recipes: Sequence[Recipe],
    out: str | os.PathLike[str],
    settings: Settings,
    *,
    inputs: Mapping[str, str] | None = None,
    calibration: Calibration | None = None,
    batch: int = 1,
    progress: bool = True,
) -> EvaluationResult:
    """Measure recipes on a model and a text; what the folder holds already is not run again.

    Args:
        loaded: The model, its tokenizer and its provenance.
        text: Documents with form feeds between them; windows do not span two.
        recipes: What to measure. Others may be added in a later run of the same settings.
        out: A folder; it is made if need be.
        settings: What to measure of each.
        inputs: Strings to record beside those that are known here.
        calibration: Of the model, for recipes that need one.
        batch: Windows, and prompts of greedy decoding, that run at once.
        progress: Show a bar, where there is a terminal.

    Returns:
        The tables, and the files: `rows.jsonl` (what is done), `tables/*.csv` and `.parquet`,
        `quality.png` and `manifest.json`.

    Raises:
        ValueError: The text is too short, recipes are named twice, one cannot be had for the
            model, or the folder holds another evaluation.
    """
    check_named_once(recipes)
    check_int("batch", batch, 1)
    model, tokenizer = loaded.model, loaded.tokenizer
    recipes = [recipe.bind(model, calibration) for recipe in recipes]
    documents = [
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(SEPARATOR)
    ]
    windows = cut_windows(documents, settings.tokens, settings.windows)
    known = {
        **loaded.provenance,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        **({} if calibration is None else {"calibration_sha256": calibration.sha256}),
        **(inputs or {}),
    }
    folder = Path(out)
    kept = _Kept(folder, {"settings": asdict(settings), "inputs": known})
    tasks = _window_tasks(model, windows, recipes, settings, kept, batch)
    tasks += _generation_tasks(model, windows, recipes, settings, kept, batch)
    tasks += _passkey_tasks(loaded, documents, recipes, settings, kept)
    for task in tqdm(tasks, unit="task", disable=None if progress else True):
        for row in task():
            kept.add(row)
    return _write(loaded, recipes, settings, known, kept, folder)


_Task = Callable[[], Iterable[WindowSums | Divergence | Passkey]]


def _window_tasks(
    model: Any,
    windows: torch.Tensor,
    recipes: Sequence[Recipe],
    settings: Settings,
    kept: _Kept,
    batch: int,
) -> list[_Task]:
    """One task for each batch of windows: full precision runs once for all recipes it lacks."""

    def task(indices: list[int], missing: Sequence[Recipe]) -> _Task:
        return lambda: evaluate_windows(
            model, indices, windows[indices], missing, settings.decode, settings.position_offset
        )

    phases = 2 if settings.decode > 1 else 1
    rows = {(row.window, row.recipe, row.phase) for row in kept.of(WindowSums)}
    kept_phases = Counter((window, recipe) for window, recipe, _ in rows)
    missing = [
        [recipe for recipe in recipes if kept_phases[index, str(recipe)] < phases]
        for index in range(len(windows))
    ]
    return [task(indices, missing[indices[0]]) for indices in _batches(missing, batch)]


def _batches(missing: Sequence[Sequence[Recipe]], batch: int) -> Iterator[list[int]]:
    """Indices of what lacks the same recipes, so many at a time; what lacks none is left out."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, recipes in enumerate(missing):
        if recipes:
            groups.setdefault(tuple(map(str, recipes)), []).append(index)
    for group in groups.values():
        for start in range(0, len(group), batch):
            yield group[start : start + batch]


def _generation_tasks(
    model: Any,
    windows: torch.Tensor,
    recipes: Sequence[Recipe],
    settings: Settings,
    kept: _Kept,
    batch: int,
) -> list[_Task]:
    """One task for each batch of prompts, which decodes in full precision first."""

    def task(indices: list[int], missing: Sequence[Recipe]) -> _Task:
        def run() -> Iterable[Divergence]:
            prompts = windows[indices, : settings.prompt_tokens]
            references = continue_prompts(model, prompts, None, settings.generate)
            for index, reference in zip(indices, references, strict=True):
                count = len(reference)
                yield Divergence(index, FULL, count, count, distinct_grams(reference))
            for recipe in missing:
                yield from measure_divergence(model, indices, prompts, recipe, references)

        return run

    done = {(row.prompt, row.recipe) for row in kept.of(Divergence)}
    missing = [
        [recipe for recipe in recipes if (index, str(recipe)) not in done]
        for index in range(min(settings.prompts, len(windows)) if settings.generate else 0)
    ]
    return [task(indices, missing[indices[0]]) for indices in _batches(missing, batch)]


def _passkey_tasks(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    recipes: Sequence[Recipe],
    settings: Settings,
    kept: _Kept,
) -> list[_Task]:
    """One task for each length, depth and recipe, full precision among them."""
    filler = [token for document in documents for token in document]

    def task(length: int, depth: float, recipe: Recipe | None) -> _Task:
        return lambda: [
            measure_passkey(loaded.model, loaded.tokenizer, filler, length, depth, recipe)
        ]

    done = {(row.length, row.depth, row.recipe) for row in kept.of(Passkey)}
    return [
        task(length, depth, recipe)
        for length in settings.passkey
        for depth in DEPTHS
        for recipe in (None, *recipes)
        if (length, depth, FULL if recipe is None else str(recipe)) not in done
    ]


class _Kept:
    """The rows of an evaluation, in a file that grows by whole lines."""

    _KINDS: Final = {kind.__name__: kind for kind in (WindowSums, Divergence, Passkey)}

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "rows.jsonl"
        first = json.dumps({"schema": SCHEMA, **identity}, sort_keys=True)
        self.rows: list[WindowSums | Divergence | Passkey] = []
        if not self.path.exists():
            self.path.write_text(first + "\n", encoding="utf-8")
            return
        lines = self.path.read_text(encoding="utf-8").split("\n")
        if lines[0] != first:
            raise ValueError(
                "out must be a folder of the same model, text and settings, "
                f"got {folder} of another evaluation"
            )
        # A last line that was cut short is run again.
        whole = lines[1:-1]
        self.path.write_text("\n".join([first, *whole]) + "\n", encoding="utf-8")
        for line in whole:
            name, values = json.loads(line)
            self.rows.append(self._KINDS[name](*values))

    def of(self, kind: type[Any]) -> list[Any]:
        """The rows of one kind."""
        return [row for row in self.rows if isinstance(row, kind)]

    def add(self, row: WindowSums | Divergence | Passkey) -> None:
        """Keep a row, now."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([type(row).__name__, list(row)]) + "\n")


def _write(
    loaded: LoadedModel,
    recipes: Sequence[Recipe],
    settings: Settings,
    inputs: Mapping[str, str],
    kept: _Kept,
    folder: Path,
) -> EvaluationResult:
    """The tables, the picture and the manifest of all rows that the folder holds."""
    decoder = loaded.model.config.get_text_config(decoder=True)
    head_dim = getattr(decoder, "head_dim", None) or (
        decoder.hidden_size // decoder.num_attention_heads
    )
    by_name = {str(recipe): recipe for recipe in recipes}
    for row in kept.of(WindowSums):
        by_name.setdefault(row.recipe, parse_recipe(row.recipe))
    bits = {
        name: recipe.bits_per_value(decoder.num_hidden_layers, head_dim, settings.context)
        for name, recipe in by_name.items()
    }
    windows = window_table(kept.of(WindowSums))
    summary = summarize(windows, bits)
    generation = _generation_table(kept)
    tables = {"windows": windows, "summary": summary}
    if len(generation):
        tables["generation"] = generation
    files = [kept.path]
    for name, table in tables.items():
        for ending, save in ((".csv", table.to_csv), (".parquet", table.to_parquet)):
            path = folder / "tables" / f"{name}{ending}"
            path.parent.mkdir(exist_ok=True)
            save(path, index=False)
            files.append(path)
    picture = folder / "quality.png"
    whole = summary[summary["phase"] == "all"]
    quality_figure(_records(whole)).savefig(picture, dpi=150)
    manifest = folder / "manifest.json"
    contents = {
        "schema": SCHEMA,
        "settings": asdict(settings),
        "recipes": list(by_name),
        "inputs": dict(inputs),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "files": {
            str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in (*files, picture)
        },
    }
    manifest.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return EvaluationResult(summary, generation, inputs, (*files, picture, manifest))


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, each by column; what a row lacks is left out."""
    return [
        {str(name): value for name, value in row.items() if not pd.isna(value)}
        for row in table.to_dict("records")
    ]


def _generation_table(kept: _Kept) -> pd.DataFrame:
    """Means over prompts, and the share of keys found at each length."""
    rows: dict[str, dict[str, Any]] = {}
    decoding = pd.DataFrame(kept.of(Divergence), columns=list(Divergence._fields))
    for recipe, part in decoding.groupby("recipe", sort=False):
        once = part.drop_duplicates("prompt")
        rows[str(recipe)] = {
            "prompts": len(once),
            "new_tokens": int(once["tokens"].max()),
            "first_difference": float(once["first_difference"].mean()),
            "distinct_4grams": float(once["distinct"].mean()),
        }
    keys = pd.DataFrame(kept.of(Passkey), columns=list(Passkey._fields))
    for names, part in keys.groupby(["recipe", "length"], sort=False):
        name, length = names
        rows.setdefault(str(name), {})[f"passkey_{length}"] = float(part["found"].mean())
    return pd.DataFrame([{"recipe": recipe, **row} for recipe, row in rows.items()])
