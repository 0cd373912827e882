"""`kvq report`: the main job."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvq.commands.options import load_input, load_mode
from kvq.commands.output import Json, print_json, print_table, say

if TYPE_CHECKING:
    from kvq.analysis.report import ReportResult
    from kvq.modes import Mode

EXAMPLES: Final = (
    "kvq report",
    "kvq report --input acts.safetensors --mode int4 --mode lloyd2 --out report",
    "kvq report --codebook mine.safetensors --base lloyd3",
    "kvq report --replay report/manifest.json --out again",
)


def command(
    *,
    source: Annotated[
        Path | None,
        typer.Option("--input", help="An activation file; default the embedded sample."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("report"),
    mode: Annotated[
        list[str] | None, typer.Option(help="A mode; repeatable, default all shipped modes.")
    ] = None,
    codebook: Annotated[
        list[Path] | None,
        typer.Option(help="A codebook file, which becomes a mode with --base; repeatable."),
    ] = None,
    base: Annotated[
        str, typer.Option(help="The codebook mode that --codebook files are put into.")
    ] = "lloyd4",
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    replay: Annotated[
        Path | None,
        typer.Option(help="The manifest of a report: run it again and compare the files."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure what each mode does to real keys, values and attention, and write the report.

    The folder gets tables, pictures, a page and a manifest that runs it again.
    """
    from kvq.analysis import report

    if replay is not None:
        result = report.replay(replay, out, input_path=source)
    else:
        activations, name = load_input(source)
        modes = _modes(mode, codebook, base)
        result = report.run_report(activations, out, modes=modes, seed=seed, input_name=name)
    _print(result, json=json)


def _modes(names: list[str] | None, codebooks: list[Path] | None, base: str) -> list[Mode]:
    """The modes asked for, the shipped ones by default, and one for each codebook file."""
    from kvq.modes import MODES

    modes = [load_mode(name) for name in names] if names else list(MODES.values())
    return modes + [load_mode(base, path) for path in codebooks or ()]


def _print(result: ReportResult, *, json: bool) -> None:
    # pandas writes numbers that JSON has no word for as null.
    rows = loads(result.summary.to_json(orient="records", double_precision=15))
    files = [str(file) for file in result.files]
    if json:
        print_json({"summary": rows, "files": files})
        return
    columns = [str(column) for column in result.summary.columns]
    print_table("Summary", columns, [tuple(row.values()) for row in rows])
    say(f"wrote {len(files)} files")
