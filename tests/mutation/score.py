"""The score: rows of `results/mutation.json`, one for each file and one for all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict

from kvq.analysis.results import commit, write_result
from tests.mutation.listed import equivalent, survivors
from tests.mutation.runner import Outcome
from tests.mutation.subsets import SUBSETS

SCHEMA: Final = "kvq-mutation/1"


class Survivor(TypedDict):
    """A mutant that no test kills; the reason is empty until somebody has looked at it."""

    mutant: str
    reason: str


class Row(TypedDict):
    """The score of a file, and at which commit its mutants ran."""

    file: str
    commit: str
    total: int
    killed: int
    equivalent: int
    survivors: list[Survivor]


def row_of(file: str, outcomes: Sequence[Outcome]) -> Row:
    """The row of a file whose mutants have run.

    Raises:
        ValueError: A mutant was killed that `reviewed.toml` says is equivalent.
    """
    # A mutant that a test can tell from the original does change something.
    wrong = [str(o.mutant) for o in outcomes if o.killed and str(o.mutant) in equivalent()]
    if wrong:
        raise ValueError(f"equivalent mutants must survive, got killed: {wrong}")
    return _reviewed(
        {
            "file": file,
            "commit": commit(),
            "total": len(outcomes),
            "killed": sum(o.killed for o in outcomes),
            "equivalent": 0,
            "survivors": [
                {"mutant": str(o.mutant), "reason": ""} for o in outcomes if not o.killed
            ],
        }
    )


def write_score(path: Path, rows: list[Row], command: str) -> Row:
    """Write the rows of files, those that the file has already of others, and their sum first."""
    if path.exists():
        new = {row["file"] for row in rows}
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"][1:]
        rows = [_reviewed(row) for row in kept if row["file"] not in new] + rows
    rows = sorted(rows, key=lambda row: list(SUBSETS).index(row["file"]))
    total: Row = {
        "file": "all",
        "commit": " ".join(sorted({one for row in rows for one in row["commit"].split()})),
        "total": sum(row["total"] for row in rows),
        "killed": sum(row["killed"] for row in rows),
        "equivalent": sum(row["equivalent"] for row in rows),
        "survivors": [survivor for row in rows for survivor in row["survivors"]],
    }
    write_result(path, SCHEMA, command, [total, *rows])
    return total


def describe(row: Row) -> str:
    """One line."""
    return (
        f"{row['file']}: {row['killed']} of {row['total'] - row['equivalent']} killed, "
        f"{row['equivalent']} equivalent"
    )


def _reviewed(row: Row) -> Row:
    """The same row by what is known of its survivors now."""
    same, known = equivalent(), survivors()
    left = [s["mutant"] for s in row["survivors"] if s["mutant"] not in same]
    return {
        **row,
        "equivalent": row["equivalent"] + len(row["survivors"]) - len(left),
        "survivors": [{"mutant": name, "reason": known.get(name, "")} for name in left],
    }
