"""`kvq inspect`: name a file, check it, and say what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvq.commands.output import Json, print_json, print_table

if TYPE_CHECKING:
    from torch import Tensor

    from kvq.activations import Activations
    from kvq.codebooks import Codebook
    from kvq.encoded_files import Encoded

EXAMPLES: Final = ("kvq inspect activations.safetensors", "kvq inspect mine.safetensors --json")

#: What a file holds, as a JSON object. Values that are objects or lists of them become tables.
Description = dict[str, Any]


def command(
    *,
    file: Annotated[
        Path, typer.Argument(help="A codebook, activation or encoded file, or a manifest.")
    ],
    json: Json = False,
) -> None:
    """Name any file that kvq wrote, check it, and print its shapes, modes and provenance."""
    print_description(file, describe(file), json=json)


def print_description(path: Path, description: Description, *, json: bool) -> None:
    """Print a description: one JSON document, or a table for each of its parts."""
    if json:
        print_json({"file": str(path), **description})
        return
    plain = {
        key: value for key, value in description.items() if not isinstance(value, list | dict)
    }
    print_table(str(path), ("", ""), list(plain.items()))
    for key, value in description.items():
        if isinstance(value, dict) and value:
            print_table(key, ("", ""), [(name, _brief(item)) for name, item in value.items()])
        elif isinstance(value, list) and value:
            print_table(key, tuple(value[0]), [tuple(row.values()) for row in value])


def _brief(value: object) -> object:
    """An object inside a table: its fields that hold something, and of one within it its name."""
    if not isinstance(value, dict):
        return value
    fields = {
        name: item.get("name", _brief(item)) if isinstance(item, dict) else item
        for name, item in value.items()
        if item not in (None, False, "")
    }
    return ", ".join(f"{name} {item}" for name, item in fields.items())


def describe(path: Path) -> Description:
    """What the file holds, checked.

    Raises:
        FileFormatError: It is not one of ours, or breaks a rule of its format.
    """
    from kvq import activations, codebook_files, encoded_files
    from kvq.files import FileFormatError, identify

    schema = identify(path)
    if schema == activations.SCHEMA:
        return describe_activations(activations.load_activations(path))
    if schema == codebook_files.SCHEMA:
        return describe_codebook(codebook_files.load_codebook(path))
    if schema == encoded_files.SCHEMA:
        return describe_encoded(encoded_files.load_encoded(path))
    raise FileFormatError(path, f"schema must be one that this version knows, got {schema!r}")


def describe_activations(activations: Activations) -> Description:
    """What an activation file holds."""
    from kvq.activations import SCHEMA, activations_sha256

    rotary = activations.rotary
    return {
        "schema": SCHEMA,
        "layers": len(activations.layers),
        "positions": _span(activations.positions),
        "query positions": _span(activations.query_positions),
        "scale": activations.scale,
        "rotary": "not known"
        if rotary is None
        else f"{rotary.rotary_dim} channels, {rotary.layout}",
        "sha256": activations_sha256(activations),
        "tensors": [
            {
                "layer": index,
                **{
                    side: None if tensor is None else _shape(tensor)
                    for side, tensor in layer._asdict().items()
                },
            }
            for index, layer in activations.layers.items()
        ],
        "provenance": dict(activations.provenance),
    }


def describe_codebook(codebook: Codebook) -> Description:
    """What a codebook file holds."""
    from kvq.codebook_files import SCHEMA
    from kvq.records import to_json

    return {
        "schema": SCHEMA,
        "name": codebook.name,
        "num_levels": codebook.num_levels,
        "symmetric": codebook.symmetric,
        "levels": [
            {"code": code, "level": level, "thresholds up to": above}
            for code, (level, above) in enumerate(
                zip(codebook.levels, (*codebook.thresholds, None), strict=True)
            )
        ],
        "recipe": to_json(codebook.recipe),
        "provenance": {
            "source": codebook.provenance.source,
            "data_sha256": codebook.provenance.data_sha256,
            **dict(codebook.provenance.versions),
        },
    }


def describe_encoded(encoded: Encoded) -> Description:
    """What an encoded file holds."""
    from kvq.encoded_files import SCHEMA
    from kvq.records import to_json

    sizes = [rows.codes.nbytes + rows.words.nbytes for _, rows in encoded.rows()]
    values = [rows.words.numel() * rows.head_dim for _, rows in encoded.rows()]
    return {
        "schema": SCHEMA,
        "layers": len(encoded.layers),
        "positions": _span(encoded.positions),
        "bytes": sum(sizes),
        "bits_per_value": 8 * sum(sizes) / sum(values),
        "activations_sha256": encoded.activations_sha256,
        "tensors": [
            {
                "rows": name,
                "mode": rows.mode.name,
                "head_dim": rows.head_dim,
                "codes": _shape(rows.codes),
                "words": _shape(rows.words),
            }
            for name, rows in encoded.rows()
        ],
        "modes": {name: to_json(mode) for name, mode in encoded.modes().items()},
        "provenance": dict(encoded.provenance),
    }


def _shape(tensor: Tensor) -> str:
    from kvq.checks import dtype_name

    return f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"


def _span(positions: Tensor) -> str:
    """How many positions, and from where to where."""
    if len(positions) == 0:
        return "none"
    return f"{len(positions)}, from {int(positions[0])} to {int(positions[-1])}"
