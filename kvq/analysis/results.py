"""Kept measurements: one JSON object with the machine and the versions beside the rows."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

#: What is recorded beside every result.
_PACKAGES = ("kvq", "torch", "triton", "transformers", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Versions of what computes, by package; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """The GPU, if there is one, and the kind of processor."""
    named = {"processor": platform.machine()}
    if torch.cuda.is_available():
        named["gpu"] = torch.cuda.get_device_name()
    return named


def commit() -> str:
    """The commit of the working tree, or the empty string outside a repository."""
    try:
        found = subprocess.run(
            ("git", "rev-parse", "HEAD"),
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def write_result(
    path: Path,
    schema: str,
    command: str,
    rows: Sequence[Mapping[str, object]],
    *,
    inputs: Mapping[str, object] | None = None,
) -> None:
    """Write rows as `{schema, command, commit, machine, versions, rows}`.

    `inputs`, if there are any, says what was measured on: names, hashes, licenses.
    """
    document = {
        "schema": schema,
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **({} if inputs is None else {"inputs": dict(inputs)}),
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
