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

from kvq.commands.output import Json, print_json, print_table, say
from kvq.modes import MODES
from kvq.modes import mode as resolve_mode

EXAMPLES: Final = (
    "kvq parity --rows 0",
    "kvq parity --mode int4 --rows 100000000 --out results/parity-h200.json",
)


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
    Exit code 1 if anything differs.
    """
    if rows < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    import torch

    from kvq import reference
    from kvq.analysis.parity import compare_volume, digest
    from kvq.analysis.results import write_result

    names = [resolve_mode(name).name for name in mode] if mode else list(MODES)
    known = _known(out)
    interpreted = {
        name: record["digest_interpreter"]
        for name, record in known.items()
        if record.get("digest_interpreter")
    }
    missing = [name for name in names if name not in interpreted] if interpreter else []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        interpreted |= zip(missing, pool.map(_interpreted_digest, missing), strict=True)
    gpu = torch.cuda.is_available()
    records: list[dict[str, object]] = []
    for name in names:
        one = resolve_mode(name)
        record: dict[str, object] = {"mode": name, "rows": 0, "mismatches": 0}
        record["digest_reference"] = digest(reference, one, device="cuda" if gpu else "cpu")
        record["digest_interpreter"] = interpreted.get(name, "")
        record["digest_gpu"] = ""
        if gpu:
            from kvq import kernels

            record["digest_gpu"] = digest(kernels, one, device="cuda")
            if rows:
                found = compare_volume(kernels, reference, one, rows)
                record["rows"], record["mismatches"] = rows, found.rows
                if found.rows:
                    say(f"{name}: {found}")
        records.append(record)
        if out is not None:
            kept: dict[str, Mapping[str, object]] = {**known}
            kept |= {str(row["mode"]): row for row in records}
            command_line = " ".join(["kvq", *sys.argv[1:]])
            write_result(out, "kvq-parity/1", command_line, list(kept.values()))
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
    document = json_module.loads(out.read_text(encoding="utf-8"))
    return {row["mode"]: row for row in document["rows"]}


def _interpreted_digest(name: str) -> str:
    """The digest of the interpreted kernels, from a process of its own: a choice at import."""
    code = (
        "import sys; from kvq import kernels; from kvq.analysis.parity import digest; "
        "from kvq.modes import mode; print(digest(kernels, mode(sys.argv[1])))"
    )
    found = subprocess.run(
        (sys.executable, "-W", "ignore", "-c", code, name),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()
