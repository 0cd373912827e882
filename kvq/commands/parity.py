"""`kvq parity`: the bits of the kernels against the reference."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.options import check_output
from kvq.commands.output import Json, print_json, print_table, say
from kvq.modes import MODES
from kvq.modes import mode as resolve_mode

EXAMPLES: Final = (
    "kvq parity --rows 0",
    "kvq parity --mode int4 --rows 100000000 --out results/parity-h200.json",
)

#: What `--out` writes, and goes on with.
_SCHEMA: Final = "kvq-parity/1"


def command(
    *,
    mode: Annotated[list[str] | None, typer.Option(help="A mode; all, if none is given.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of the volume set on the GPU; 0: none.")] = 0,
    interpreter: Annotated[bool, typer.Option(help="Digest the interpreted kernels too.")] = True,
    jobs: Annotated[int, typer.Option(help="Interpreters that run side by side.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the rows in this JSON file, mode by mode, beside those in it."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare the kernels with the reference, bit for bit.

    The digest set (65,536 planted and random rows a mode) is hashed for the reference, the
    interpreted kernels and, on a GPU, the compiled kernels; the volume set is compared on the GPU.
    If anything differs, the exit code is 1, and what differs is counted on standard error: rows,
    the first and the last of them, and words and values by sign, exponent and mantissa.
    """
    if rows < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    check_output("out", out)
    names = [resolve_mode(name).name for name in mode] if mode else list(MODES)
    known = _known(out)
    import torch

    gpu = torch.cuda.is_available()
    if rows and not gpu:
        raise ValueError(f"rows must be 0 without a CUDA device, got {rows}")
    from kvq import reference
    from kvq.analysis.parity import compare_digest_set, compare_volume, digest
    from kvq.analysis.results import write_result

    interpreted = {
        name: record["digest_interpreter"]
        for name, record in known.items()
        if record.get("digest_interpreter")
    }
    missing = [name for name in names if name not in interpreted] if interpreter else []
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda name: _interpret("digest(kernels, mode)", name), missing)
        interpreted |= zip(missing, found, strict=True)
    records: list[dict[str, object]] = []
    for name in names:
        one = resolve_mode(name)
        record: dict[str, object] = {"mode": name, "rows": 0, "mismatches": 0}
        record["digest_reference"] = digest(reference, one, device="cuda" if gpu else "cpu")
        record["digest_interpreter"] = interpreted.get(name, "")
        record["digest_gpu"] = ""
        if record["digest_interpreter"] not in ("", record["digest_reference"]):
            where = _interpret("compare_digest_set(kernels, reference, mode)", name)
            say(f"{name}, digest set, interpreted: {where}")
        if gpu:
            from kvq import kernels

            record["digest_gpu"] = digest(kernels, one, device="cuda")
            if record["digest_gpu"] != record["digest_reference"]:
                differ = compare_digest_set(kernels, reference, one, device="cuda")
                say(f"{name}, digest set, compiled: {differ}")
            if rows:
                differ = compare_volume(kernels, reference, one, rows)
                record["rows"], record["mismatches"] = rows, differ.rows
                if differ.rows:
                    say(f"{name}, volume set: {differ}")
        records.append(record)
        if out is not None:
            kept: dict[str, Mapping[str, object]] = {**known}
            kept |= {str(row["mode"]): row for row in records}
            command_line = " ".join(["kvq", *sys.argv[1:]])
            write_result(out, _SCHEMA, command_line, list(kept.values()))
        say(f"{name}: {'agree' if _agrees(record) else 'DIFFER'}")
    if json:
        print_json(records)
    else:
        columns = ("rows", "mismatches", "agree", "digest", "mode")
        print_table(
            "Kernels against the reference",
            columns,
            [
                (
                    record["rows"],
                    record["mismatches"],
                    str(_agrees(record)),
                    str(record["digest_reference"])[:12],
                    record["mode"],
                )
                for record in records
            ],
        )
    if not all(_agrees(record) for record in records):
        raise typer.Exit(1)


def _agrees(record: dict[str, object]) -> bool:
    """Whether nothing differs among what was computed."""
    digests = {str(record[key]) for key in record if key.startswith("digest")} - {""}
    return record["mismatches"] == 0 and len(digests) == 1


def _known(out: Path | None) -> dict[str, dict[str, str]]:
    """Rows of an earlier run, by mode."""
    if out is None or not out.exists():
        return {}
    from kvq.files import FileFormatError

    try:
        document = json_module.loads(out.read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA:
            raise FileFormatError(out, f"schema must be {_SCHEMA}, got {document['schema']!r}")
        return {row["mode"]: row for row in document["rows"]}
    except FileFormatError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileFormatError(out, f"not a result of kvq parity ({error!r})") from None


def _interpret(expression: str, name: str) -> str:
    """What a function of `kvq.analysis.parity` gives for a mode with interpreted kernels.

    It runs in a process of its own: whether kernels are interpreted is settled at import.
    """
    code = (
        "import sys; import kvq; from kvq import kernels, reference; "
        "from kvq.analysis.parity import compare_digest_set, digest; "
        f"mode = kvq.mode(sys.argv[1]); print({expression})"
    )
    found = subprocess.run(
        (sys.executable, "-W", "ignore", "-c", code, name),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        why = found.stderr.strip().splitlines()[-1:] or [f"exit code {found.returncode}"]
        raise RuntimeError(f"interpreted kernels failed for mode {name}: {why[0]}")
    return found.stdout.strip()
