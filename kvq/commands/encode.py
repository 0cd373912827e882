"""`kvq encode`: write the codes and words of an activation file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from kvq.commands.options import check_output, load_mode
from kvq.commands.output import Json, track

EXAMPLES: Final = (
    "kvq encode acts.safetensors --mode int4 --out encoded.safetensors",
    "kvq encode acts.safetensors --key-mode lloyd4 --value-mode smax3 --out e.safetensors",
    "kvq encode acts.safetensors --mode lloyd3 --codebook mine.safetensors --out e.safetensors",
)


def command(
    *,
    file: Annotated[Path, typer.Argument(help="An activation file.")],
    out: Annotated[Path, typer.Option(help="The encoded file to write.")],
    mode: Annotated[str | None, typer.Option(help="Mode of keys and values.")] = None,
    key_mode: Annotated[str | None, typer.Option(help="Mode of the keys.")] = None,
    value_mode: Annotated[str | None, typer.Option(help="Mode of the values.")] = None,
    codebook: Annotated[
        Path | None, typer.Option(help="A codebook file for both in place of their own.")
    ] = None,
    key_codebook: Annotated[
        Path | None, typer.Option(help="A codebook file for the keys.")
    ] = None,
    value_codebook: Annotated[
        Path | None, typer.Option(help="A codebook file for the values.")
    ] = None,
    tier: Annotated[
        Literal["reference", "kernels"],
        typer.Option(help="Who encodes; the bytes are the same."),
    ] = "reference",
    json: Json = False,
) -> None:
    """Quantize the keys and values of an activation file and write their codes and words.

    The file holds every part of its modes, fitted codebooks included.
    """
    import torch

    from kvq.activations import load_activations
    from kvq.commands.descriptions import describe_encoded
    from kvq.commands.inspect import print_description
    from kvq.encoded_files import encode_activations, save_encoded

    check_output("out", out)
    modes = {}
    for side, name, book in (
        ("key", mode if key_mode is None else key_mode, key_codebook or codebook),
        ("value", mode if value_mode is None else value_mode, value_codebook or codebook),
    ):
        if name is None:
            raise ValueError(f"mode must be given, with --mode or --{side}-mode, got nothing")
        modes[side] = load_mode(name, book)
    activations = load_activations(file)
    encoded = encode_activations(
        activations,
        modes["key"],
        modes["value"],
        layers=track(list(activations.layers), "encoding layers"),
        device="cuda" if tier == "kernels" and torch.cuda.is_available() else "cpu",
        tier=tier,
    )
    save_encoded(out, encoded)
    print_description(out, describe_encoded(encoded), json=json)
