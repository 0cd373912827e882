"""`kvq capture`: write what a model's attention layers saw."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.model_options import (
    ComputeDtype,
    Device,
    GgufFile,
    LicenseNotes,
    ModelPath,
    TextSource,
)
from kvq.commands.options import check_output
from kvq.commands.output import Json

EXAMPLES: Final = (
    "kvq capture --model ./SmolLM2-135M --text prose.txt --out activations.safetensors",
    "kvq capture --model m.gguf --text prose.txt --layers 0,-1 --tokens 640 --out a.safetensors",
)


def command(
    *,
    model: ModelPath,
    text: Annotated[Path, typer.Option(help="A UTF-8 text file.")],
    out: Annotated[Path, typer.Option(help="The activation file to write.")],
    layers: Annotated[
        str | None,
        typer.Option(help="Comma-separated layers, negative ones from the last; default all."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the text to use, from the first; default all.")
    ] = None,
    first_position: Annotated[
        int, typer.Option(help="Where the kept keys begin; the model sees the tokens before.")
    ] = 0,
    queries: Annotated[int, typer.Option(help="Queries to keep, of the last positions.")] = 64,
    dtype: Annotated[
        str, typer.Option(help="How they are stored: float32, float16 or bfloat16.")
    ] = "float16",
    compute_dtype: ComputeDtype = "float32",
    device: Device = "cpu",
    gguf_file: GgufFile = None,
    require_rotary: Annotated[
        bool, typer.Option("--require-rotary", help="Refuse a RoPE that cannot be verified.")
    ] = False,
    text_source: TextSource = "not stated",
    license_notes: LicenseNotes = "not stated",
    json: Json = False,
) -> None:
    """Run a model over a text and write the queries, keys and values of its attention layers.

    The model is read from this disk; nothing is downloaded.
    """
    from kvq.commands.descriptions import describe_activations
    from kvq.commands.inspect import print_description
    from kvq.integrations.capture import capture_command

    check_output("out", out)
    activations = capture_command(
        model,
        text,
        out,
        gguf_file=gguf_file,
        layers=None if layers is None else _integers(layers),
        tokens=tokens,
        first_position=first_position,
        queries=queries,
        dtype=dtype,
        compute_dtype=compute_dtype,
        device=device,
        require_rotary=require_rotary,
        text_source=text_source,
        license_notes=license_notes,
    )
    print_description(out, describe_activations(activations), json=json)


def _integers(text: str) -> list[int]:
    """`0,4,-1` as integers."""
    if not re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", text):
        raise ValueError(f"layers must be comma-separated integers, got {text!r}")
    return [int(item) for item in text.split(",")]
