"""`kvq inspect`: name a file, check it, and say what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.descriptions import AS_RECORDED, Description, describe
from kvq.commands.output import Json, print_json, print_table, say

EXAMPLES: Final = ("kvq inspect activations.safetensors", "kvq inspect mine.safetensors --json")


def command(
    *,
    file: Annotated[
        Path,
        typer.Argument(
            help="A codebook, activation, calibration, histogram or encoded file, or a manifest."
        ),
    ],
    json: Json = False,
) -> None:
    """Name any file that kvq wrote, check it, and print its shapes, modes and provenance."""
    description = describe(file)
    print_description(file, description, json=json)
    changed = [row["file"] for row in description.get("files", ()) if row["state"] != AS_RECORDED]
    if changed:
        say(f"check failed: not as the manifest records them: {', '.join(changed)}")
        raise typer.Exit(1)


def print_description(path: Path, description: Description, *, json: bool) -> None:
    """Print a description: one JSON document, or a table for each of its parts."""
    if json:
        print_json({"file": str(path), **description})
        return
    plain = {
        key: value for key, value in description.items() if not isinstance(value, list | dict)
    }
    print_table(str(path), ("", ""), list(plain.items()))
    for key, value in description.items():
        if isinstance(value, dict) and value:
            print_table(key, ("", ""), [(name, _brief(item)) for name, item in value.items()])
        elif isinstance(value, list) and value:
            print_table(key, tuple(value[0]), [tuple(row.values()) for row in value])


def _brief(value: object) -> object:
    """An object inside a table: its fields that hold something, and of one within it its name."""
    if not isinstance(value, dict):
        return value
    fields = {
        name: item.get("name", _brief(item)) if isinstance(item, dict) else item
        for name, item in value.items()
        if item not in (None, False, "")
    }
    return ", ".join(f"{name} {item}" for name, item in fields.items())
