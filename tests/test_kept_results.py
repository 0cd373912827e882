"""The tables of measurements in the README and in docs/ hold what `results/` holds.

A table is known by its first heading. Its numbers must be those of one row of a file that the page
names, as they are rounded there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvq
from kvq.evaluation.recipes import NAMED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Columns of evaluations: the key, the decimals, and whether a standard error follows.
COLUMNS = {
    "bits per value": ("bits_per_value", ".2f", False),
    "KL divergence": ("kld", ".4f", True),
    "at 30,000": ("kld", ".4f", True),
    "perplexity / full precision's": ("perplexity_ratio", ".3f", True),
    "top 1": ("top1", ".3f", False),
    "tokens": ("tokens", ",", False),
}
MOVED = "at-30000"
#: How tables of writing name their rows, and the layout of each.
LAYOUTS = {"HND": "HND", "NHD": "NHD", "time / bf16 write": "HND"}


class Table(NamedTuple):
    """A table of a page."""

    page: Path
    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}: {self.head[0]}, {self.head[1]}"


def cells(line: str) -> list[str]:
    return [cell.strip(" *`") for cell in line.strip().strip("|").split("|")]


def tables() -> Iterator[Table]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^\|.*\n\| ---.*\n(?:\|.*\n)+", text, re.MULTILINE):
            head, _, *rows = match[0].splitlines()
            yield Table(page, cells(head), [cells(row) for row in rows])


def chosen(first: str) -> list[Table]:
    return [table for table in tables() if table.head[0] == first]


@cache
def kept(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def named_files(page: Path) -> list[Path]:
    """The kept results that a page names; `...` stands for the beginning of the one before."""
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"`(?:results/|\.\.\.)([\w.-]+\.json)`", text)
    found = [path for name in names for path in (ROOT / "results").glob(f"*{name}")]
    assert found or not names
    return [path for path in found if path.name in text or "..." in text]


def shown(row: dict[str, Any], heading: str) -> str:
    key, form, with_error = COLUMNS[heading]
    error = f" ± {row[f'{key}_se']:{form}}" if with_error else ""
    return f"{row[key]:{form}}{error}"


@pytest.mark.parametrize(
    "table", [table for table in tables() if "KL divergence" in table.head], ids=str
)
def test_evaluations(table: Table) -> None:
    files = [path for path in named_files(table.page) if path.name.startswith("eval")]
    # Before the recipe there may be a column of words.
    begin = table.head.index("recipe")
    for row in table.rows:
        recipe, *numbers = row[begin:]
        for where in (False, True):
            expected = {
                heading: number
                for heading, number in zip(table.head[begin + 1 :], numbers, strict=True)
                if (heading == "at 30,000") == where
            }
            candidates = [
                {heading: shown(found, heading) for heading in expected}
                for path in files
                if (MOVED in path.name) == where
                for found in kept(path)
                if found["recipe"] == NAMED.get(recipe, recipe)
            ]
            assert expected in candidates or not expected, (recipe, candidates)


def test_the_named_recipes() -> None:
    (table,) = chosen("name")
    assert [row[0] for row in table.rows] == list(NAMED)
    for name, keys, values in table.rows:
        assert NAMED[name].startswith(f"k={keys},v={values},")


def full_name(short: str) -> str:
    return kvq.mode(short).name


@pytest.mark.parametrize("table", chosen("batch x context"), ids=str)
def test_decoding(table: Table) -> None:
    rows = [row for row in kept(ROOT / "results/decode-h200.json") if row["best"]]
    for name, *numbers in table.rows:
        batch, context = name.replace("k", "").split(" x ")
        for mode, number in zip(table.head[1:], numbers, strict=True):
            (row,) = (
                row
                for row in rows
                if row["key_mode"] == full_name(mode)
                and row["layout"] == "HND"
                and (row["batch"], row["context"]) == (int(batch), 1024 * int(context))
                and row["query_tokens"] == 1
            )
            assert number == f"{row['ratio']:.2f} ({row['share_of_read']:.0%})", (name, mode)


@pytest.mark.parametrize(
    "table",
    [table for table in tables() if {row[0] for row in table.rows} <= set(LAYOUTS)],
    ids=str,
)
def test_writing(table: Table) -> None:
    ratios = {
        (row["layout"], row["mode"]): f"{row['ratio']:.2f}"
        for row in kept(ROOT / "results/write-h200.json")
        if row["tokens"] == 65536
    }
    for name, *numbers in table.rows:
        for mode, number in zip(table.head[1:], numbers, strict=True):
            assert number == ratios[LAYOUTS[name], full_name(mode)], (name, mode)


def served(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['tokens_per_s']:,.0f}",
        f"{row['ratio']:.2f}",
        f"{row['ttft_ms']:,.0f}",
        f"{row['tpot_ms']:.1f}",
        f"{row['attention_share']:.0%}",
        f"{row['peak_bytes'] / 1e9:.1f}",
    ]


def test_serving() -> None:
    files = ("serving-h200.json", "decode-32k-h200.json")
    rows = [kept(ROOT / "results" / name) for name in files]
    summary, *whole = chosen("cache")
    ratios = {row["mode"]: f"{row['ratio']:.2f}" for row in rows[0]}
    assert summary.rows == [[summary.rows[0][0], *(ratios[mode] for mode in summary.head[1:])]]
    assert [table.rows for table in whole] == [
        [[row["mode"], *served(row)] for row in part] for part in rows
    ]


def test_trellis_codes_against_codebooks() -> None:
    best = {
        (row["key_mode"], row["batch"], row["context"]): row["ms"]
        for row in kept(ROOT / "results/decode-h200.json")
        if row["best"] and row["layout"] == "HND"
    }
    (table,) = chosen("mode")[-1:]
    assert table.head[1] == "over"
    for mode, other, *numbers, _ in table.rows:
        shapes = ((64, 32_768), (64, 4_096), (1, 32_768))
        assert numbers == [
            f"{best[full_name(mode), *shape] / best[full_name(other), *shape]:.2f}"
            for shape in shapes
        ]


def test_there_are_such_tables() -> None:
    heads = [table.head[0] for table in tables()]
    assert heads.count("batch x context") == 2
    assert sum("KL divergence" in table.head for table in tables()) == 6
    assert sum({row[0] for row in table.rows} <= set(LAYOUTS) for table in tables()) == 2
