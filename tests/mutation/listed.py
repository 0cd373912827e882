"""What was written by hand: mutants of the Triton kernels, and verdicts on those that survive."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

from tests.mutation.operators import Mutant

_HERE: Final = Path(__file__).parent
_ROOT: Final = Path(__file__).parents[2]


def kernel_mutants() -> list[Mutant]:
    """The mutants of `kernel_mutants.toml`, in its order.

    Raises:
        ValueError: What is to be replaced does not occur exactly once; the list has rotted.
    """
    found = []
    for entry in _entries("kernel_mutants.toml", "mutant"):
        text = (_ROOT / entry["file"]).read_text(encoding="utf-8")
        old = entry["old"]
        if text.count(old) != 1:
            raise ValueError(
                f"old must occur once in {entry['file']}, got {text.count(old)} times: {old!r}"
            )
        start = len(text[: text.index(old)].encode())
        line = next(line for line in old.splitlines() if line.strip()).strip()
        found.append(
            Mutant(
                entry["file"], line, entry["why"], start, start + len(old.encode()), entry["new"]
            )
        )
    return found


def equivalent() -> dict[str, str]:
    """Why a mutant changes nothing, by the names of mutants of `reviewed.toml`."""
    return _reasons("equivalent")


def survivors() -> dict[str, str]:
    """What it would take to kill a mutant, by the names of mutants of `reviewed.toml`."""
    return _reasons("survivor")


def _reasons(verdict: str) -> dict[str, str]:
    return {
        str(Mutant(entry["file"], entry["line"], entry["change"], 0, 0, "")): entry["reason"]
        for entry in _entries("reviewed.toml", verdict)
    }


def _entries(name: str, table: str) -> list[dict[str, str]]:
    with (_HERE / name).open("rb") as file:
        return tomllib.load(file)[table]
