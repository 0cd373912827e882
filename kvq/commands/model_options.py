"""The options of every command that runs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelPath = Annotated[
    Path, typer.Option(help="Folder of a Hugging Face checkpoint on this disk, or a .gguf file.")
]
ComputeDtype = Annotated[str, typer.Option(help="What the model computes in.")]
Device = Annotated[str, typer.Option(help="Where the model runs.")]
GgufFile = Annotated[
    str | None, typer.Option(help="The .gguf file of the folder, if it has several.")
]
TextSource = Annotated[str, typer.Option(help="Where the text comes from, for the record.")]
LicenseNotes = Annotated[
    str, typer.Option(help="Under what terms model and text are, for the record.")
]
