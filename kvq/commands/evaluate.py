"""`kvq eval`: the quality of a real model on the packed cache."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvq.commands.model_options import (
    ComputeDtype,
    Device,
    GgufFile,
    LicenseNotes,
    ModelPath,
    TextSource,
)
from kvq.commands.options import check_output, check_output_folder
from kvq.commands.output import Json, print_json, print_table, say

if TYPE_CHECKING:
    from kvq.evaluation.run import EvaluationResult

EXAMPLES: Final = (
    "kvq eval --model ./SmolLM2-135M --text prose.txt",
    "kvq eval --model m.gguf --text prose.txt --recipe int4 --recipe k=int8,v=int2,first=4",
    "kvq eval --model m --text t.txt --recipe k=int4,v=int4,center=first",
    "kvq eval --model m --text t.txt --device cuda --batch 16 --generate 1000 --passkey 4096",
)


def command(
    *,
    model: ModelPath,
    text: Annotated[
        Path, typer.Option(help="A UTF-8 text file; form feeds separate its documents.")
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A mode, kvq4, kvq3, kvq2, or k=MODE,v=MODE[,k3=MODE][,first=N][,recent=N]"
            "[,prompt=full][,center=bias|first|calibrated][,pair=calibrated]; repeatable, default "
            "every mode and some recipes."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write, or to go on with.")] = Path(
        "eval"
    ),
    keep: Annotated[
        Path | None, typer.Option(help="Keep the rows in this JSON file as well.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    windows: Annotated[int, typer.Option(help="Windows, evenly spread over the text.")] = 40,
    decode: Annotated[
        int, typer.Option(help="Tokens at a window's end that are run one at a time.")
    ] = 16,
    generate: Annotated[int, typer.Option(help="New tokens of greedy decoding; 0: none.")] = 0,
    prompts: Annotated[int, typer.Option(help="Prompts of greedy decoding.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of such a prompt.")] = 64,
    passkey: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a text that a key is hidden in; repeatable."),
    ] = None,
    context: Annotated[
        int, typer.Option(help="Context at which full-precision tokens are counted as bits.")
    ] = 4096,
    calibration: Annotated[
        Path | None, typer.Option(help="What kvq calibrate wrote, for recipes that need it.")
    ] = None,
    position_offset: Annotated[
        int, typer.Option(help="The position of a window's first token, in full precision too.")
    ] = 0,
    batch: Annotated[
        int, typer.Option(help="Windows, and prompts of greedy decoding, that run at once.")
    ] = 1,
    dtype: ComputeDtype = "float32",
    device: Device = "cpu",
    gguf_file: GgufFile = None,
    text_source: TextSource = "not stated",
    license_notes: LicenseNotes = "not stated",
    json: Json = False,
) -> None:
    """Measure perplexity, divergence and agreement of a model on the packed cache.

    Each recipe is compared with the model in full precision over the same windows, through the
    cache, in prefill and in decoding. A run that was stopped goes on where it was.
    """
    from kvq.calibration_files import load_calibration
    from kvq.checks import check_device_name, check_int
    from kvq.evaluation.recipes import check_named_once, default_recipes, parse_recipe
    from kvq.evaluation.run import SCHEMA, Settings, run_evaluation
    from kvq.integrations.capture import load_model, read_dtype, read_text

    settings = Settings(
        tokens=tokens,
        windows=windows,
        decode=decode,
        generate=generate,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        passkey=tuple(passkey or ()),
        context=context,
        position_offset=position_offset,
    )
    if decode > tokens - 2:
        raise ValueError(
            f"decode must be at most {tokens - 2} of a window's {tokens} tokens, got {decode}"
        )
    check_int("batch", batch, 1)
    check_device_name(device)
    check_output_folder("out", out)
    check_output("keep", keep)
    compute = read_dtype("dtype", dtype)
    recipes = [parse_recipe(one) for one in recipe] if recipe else default_recipes()
    calibrated = None if calibration is None else load_calibration(calibration)
    check_named_once(recipes)
    for one in recipes:
        if one.needs_calibration and calibrated is None:
            raise ValueError(f"calibration must be given for the recipe {one}, got none")
    prose = read_text(text)
    loaded = load_model(model, gguf_file=gguf_file, dtype=compute, device=device)
    result = run_evaluation(
        loaded,
        prose,
        recipes,
        out,
        settings,
        inputs={"text": text_source, "license": license_notes},
        calibration=calibrated,
        batch=batch,
    )
    if keep is not None:
        from kvq.analysis.results import write_result

        # Of a path on this machine the name is kept.
        arguments = [Path(x).name if x.startswith("/") else x for x in sys.argv[1:]]
        command_line = shlex.join(["kvq", *arguments])
        write_result(keep, SCHEMA, command_line, result.rows(), inputs=result.inputs)
    _print(result, json=json)


def _estimate(row: Mapping[str, Any], name: str, digits: int) -> str:
    """A value with its standard error, which one window does not have."""
    error = row.get(f"{name}_se")
    shown = f"{row[name]:.{digits}f}"
    return shown if error is None else f"{shown} ± {error:.{digits}f}"


def _print(result: EvaluationResult, *, json: bool) -> None:
    rows = result.rows()
    files = [str(file) for file in result.files]
    if json:
        print_json({"rows": rows, "inputs": dict(result.inputs), "files": files})
        return
    full = rows[0]["perplexity_full"] if rows else float("nan")
    columns = ("bits", "perplexity", "ratio", "KL divergence", "top 1", "recipe")
    print_table(
        f"Perplexity {full:.6g} in full precision; values ± standard errors over windows",
        columns,
        [
            (
                row["bits_per_value"],
                row["perplexity"],
                _estimate(row, "perplexity_ratio", 4),
                _estimate(row, "kld", 5),
                _estimate(row, "top1", 4),
                row["recipe"],
            )
            for row in sorted(rows, key=lambda row: row["kld"])
        ],
    )
    if len(result.generation):
        table = result.generation
        print_table(
            "Greedy decoding",
            [*table.columns[1:], "recipe"],
            [(*row[1:], row[0]) for row in table.itertuples(index=False)],
        )
    say(f"wrote {len(files)} files, the manifest among them: {files[-1]}")
