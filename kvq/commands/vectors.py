"""`kvq vectors`: conformance vectors, and checking an outside implementation against them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvq.commands.options import check_output_folder
from kvq.commands.output import Json, print_json, print_table, say

#: What `kvq --help` says of both.
HELP: Final = "Export conformance vectors, or check an outside implementation against them."
#: By subcommand.
EXAMPLES: Final = {
    "export": (
        "kvq vectors export --out vectors",
        "kvq vectors export --out vectors --mode int4 --head-dim 128 --rows 1000",
    ),
    "check": (
        "kvq vectors check vectors --impl my_kernels:quantize --mode int4",
        "kvq vectors check vectors --dump answers.safetensors --mode int4 --json",
        "kvq vectors check vectors --attention my_kernels:attention --device cuda",
    ),
}


def export(
    *,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    mode: Annotated[
        list[str] | None,
        typer.Option(help="A mode, or int4@first_implementation; all modes, if none is given."),
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="A head size; 64, 96 and 128, if none is given.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="An input dtype; float32, float16 and bfloat16, if none is given."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Planted rows of each mode, head size, dtype.")] = 200,
    seed: Annotated[int, typer.Option(help="All rows depend on it.")] = 0,
    json: Json = False,
) -> None:
    """Write conformance vectors: planted rows, and what each mode must write and read.

    For every mode, head size and input dtype: codes, words, dequantized rows, and attention over a
    small paged cache with the error that is allowed. docs/conformance.md describes the files.
    """
    from kvq.conformance.manifest import MANIFEST
    from kvq.conformance.vectors import DTYPES, HEAD_DIMS, export_vectors, vector_mode
    from kvq.modes import MODES

    check_output_folder("out", out)
    manifest = export_vectors(
        out,
        [vector_mode(name) for name in mode] if mode else list(MODES.values()),
        head_dims=head_dim or HEAD_DIMS,
        dtypes=dtype or tuple(DTYPES),
        rows=rows,
        seed=seed,
        watch=lambda mode: say(f"{mode.name}"),
    )
    files = [case.file for case in manifest.cases]
    made: dict[str, Any] = {
        "manifest": str(out / MANIFEST),
        "modes": len(manifest.modes),
        "cases": len(manifest.cases),
        "rows": manifest.rows,
        "seed": manifest.seed,
        "bytes": sum((out / file).stat().st_size for file in dict.fromkeys(files)),
    }
    if json:
        print_json(made)
    else:
        print_table("Conformance vectors", ("", ""), list(made.items()))


def check(
    *,
    folder: Annotated[Path, typer.Argument(help="A folder that `kvq vectors export` wrote.")],
    impl: Annotated[
        str | None,
        typer.Option(help="module:function, called as function(x, mode) -> (codes, words)."),
    ] = None,
    dequantize: Annotated[
        str | None,
        typer.Option(
            help="module:function, called as function(codes, words, mode, head_dim) -> rows."
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="module:function, called as kvq.paged_attention is."),
    ] = None,
    dump: Annotated[
        Path | None, typer.Option(help="A safetensors file of what was computed elsewhere.")
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Check this mode only.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Check this head size only.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Check this input dtype only.")] = None,
    skip_kind: Annotated[
        list[str] | None, typer.Option(help="Leave out planted rows of this kind.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where functions get their arguments.")] = "cpu",
    json: Json = False,
) -> None:
    """Check an outside implementation against conformance vectors.

    Codes, words and dequantized rows must have the same bits; the error of attention must be
    within what is allowed. If anything differs, the exit code is 1, and the first and the last
    mismatch are told: row, kind of planted row, byte and channel, what is expected and found.
    """
    from kvq.checks import check_device_name
    from kvq.conformance.check import Functions, Selection, Source, check_vectors, load_dump
    from kvq.conformance.manifest import MANIFEST, read_manifest
    from kvq.conformance.outside import load_function
    from kvq.conformance.vectors import vector_mode

    options = {"impl": impl, "dequantize": dequantize, "attention": attention}
    named = {option: text for option, text in options.items() if text is not None}
    if bool(named) == (dump is not None):
        got = ", ".join(f"--{option}" for option in (*named, *(["dump"] if dump else [])))
        raise ValueError(
            "one of --dump, or some of --impl, --dequantize and --attention, must be given, "
            f"got {got or 'none'}"
        )
    check_device_name(device)
    source: Source
    if dump is not None:
        source = load_dump(dump, read_manifest(folder / MANIFEST))
    else:
        functions = {option: load_function(option, text) for option, text in named.items()}
        source = Functions(
            functions.get("impl"), functions.get("dequantize"), functions.get("attention"), device
        )
    selection = Selection(
        tuple(vector_mode(name).name for name in mode or ()),
        tuple(head_dim or ()),
        tuple(dtype or ()),
        tuple(skip_kind or ()),
    )
    found = list(
        check_vectors(folder, source, selection, watch=lambda case: say(f"checking {case.key}"))
    )
    agree = not any(difference.differ for difference in found)
    if json:
        print_json({"agree": agree, "checked": [_record(difference) for difference in found]})
    else:
        _print(found)
    if not agree:
        raise typer.Exit(1)


def _record(difference: Any) -> dict[str, object]:
    """A difference with its places as objects."""
    places = {
        end: None if place is None else place._asdict()
        for end, place in (("first", difference.first), ("last", difference.last))
    }
    return {**difference._asdict(), **places}


def _print(found: list[Any]) -> None:
    print_table(
        "Rows that differ from the vectors",
        ("differ", "rows", "vectors"),
        [(difference.differ, difference.rows, difference.name) for difference in found],
    )
    for difference in found:
        if difference.differ:
            lines = [
                ("first", str(difference.first)),
                ("last", str(difference.last)),
                ("rows", _counts(difference.kinds)),
            ]
            if difference.fields:
                lines.append(("numbers", _counts({"all": difference.numbers} | difference.fields)))
            print_table(difference.name, ("", ""), lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


#: The subcommands.
COMMANDS: Final = {"export": export, "check": check}
