"""`kvq report`: the main job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvq.commands.options import check_alone, check_output_folder, load_input, load_mode
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

#: Columns of the summary that are printed.
_COLUMNS: Final = (
    "bits_per_value",
    "key_relative_error",
    "value_relative_error",
    "score_slope",
    "attention_kl",
    "output_error",
)


def command(
    *,
    source: Annotated[
        Path | None,
        typer.Option("--input", help="An activation file; default the embedded sample."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("report"),
    mode: Annotated[
        list[str] | None, typer.Option(help="A mode; repeatable, default all but alike ones.")
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
    tolerance: Annotated[
        float, typer.Option(help="The largest relative difference that a replay may have.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Measure what each mode does to real keys, values and attention, and write the report.

    The folder gets a page, its tables and pictures, and a manifest that --replay runs again.
    """
    from kvq.analysis import report

    check_output_folder("out", out)
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be finite and not negative, got {tolerance}")
    if replay is not None:
        check_alone("--replay", "with", mode=mode, codebook=codebook, seed=seed or None)
        result = report.replay(replay, out, input_path=source)
    else:
        check_alone("--replay", "without", tolerance=tolerance or None)
        load_mode(base)
        activations, name = load_input(source)
        modes = _modes(mode, codebook, base)
        result = report.run_report(activations, out, modes=modes, seed=seed, input_name=name)
    _print(result, json=json)
    comparison = result.comparison
    if comparison is not None:
        say(str(comparison))
        # Written so that a difference that is not a number fails.
        if not (comparison.identical or comparison.largest_relative_difference <= tolerance):
            raise typer.Exit(1)


def _modes(names: list[str] | None, codebooks: list[Path] | None, base: str) -> list[Mode]:
    """The modes asked for, `REPORTED` by default, and one for each codebook file."""
    from kvq.analysis.report import REPORTED

    modes = [load_mode(name) for name in names] if names else list(REPORTED)
    return modes + [load_mode(base, path) for path in codebooks or ()]


def _print(result: ReportResult, *, json: bool) -> None:
    files = [str(file) for file in result.files]
    if json:
        comparison = None if result.comparison is None else result.comparison._asdict()
        summary = result.summary.to_dict("records")
        print_json({"summary": summary, "files": files, "comparison": comparison})
        return
    from kvq.analysis.summary import HEADINGS

    headline = result.headline()[["mode", *(HEADINGS[name] for name in _COLUMNS)]]
    print_table(
        "Means over layers and heads, with standard errors; the page has more",
        [name.replace(" ", "\n").replace("/", "/\n") for name in headline.columns],
        # A value above its standard error: the table fits a terminal.
        [
            [cell.replace(" ± ", "\n± ") for cell in row]
            for row in headline.itertuples(index=False)
        ],
    )
    say(f"wrote {len(files)} files, the page among them: {files[-2]}")
