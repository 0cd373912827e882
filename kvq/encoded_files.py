"""Encoded files: the codes and words of an activation file's keys and values.

Schema `kvq-encoded/1`, safetensors:

* `layers.{i}.{key|value}.codes` `[T, H, B]` uint8 and `layers.{i}.{key|value}.words` `[T, H]`
  float32 (float16 for a mode with 16-bit words); `positions` `[T]` int64.
* metadata: `modes`, a JSON object with every part of each mode by name, codebooks included, so
  that a file can be read without the codebook files it was made with; `layers`, a JSON object
  `{"0": {"key": {"mode": name, "head_dim": D}, "value": ...}}`; `activations_sha256`, of the
  input; `provenance`, a JSON object of strings.

Nothing in the file says which tier encoded it: the bytes are the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvq.activations import Activations, activations_sha256, check_layers
from kvq.checks import (
    check_device,
    check_dtype,
    check_kind,
    check_shape,
    check_strings,
    check_tensor,
)
from kvq.dispatch import TierName, dequantize, quantize
from kvq.files import FileFormatError, read_tensors, write_tensors
from kvq.modes import MODES, Mode
from kvq.records import from_json, to_json
from kvq.tier import word_dtype

#: Name and version of the file format.
SCHEMA: Final = "kvq-encoded/1"

_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(key|value)\.(codes|words)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class EncodedRows(NamedTuple):
    """One side (keys or values) of one layer."""

    #: `[T, H, B]` uint8.
    codes: Tensor
    #: `[T, H]` float32 or float16; compare its bits, which may hold two numbers.
    words: Tensor
    #: How the rows are stored.
    mode: Mode
    #: Channels of a row.
    head_dim: int


class EncodedLayer(NamedTuple):
    """The keys and the values of one layer."""

    key: EncodedRows
    value: EncodedRows


@dataclass(frozen=True, slots=True)
class Encoded:
    """The contents of an encoded file, checked."""

    #: By layer index, ascending.
    layers: Mapping[int, EncodedLayer]
    #: `[T]` int64.
    positions: Tensor
    #: SHA-256 (hex) of the activations, as `kvq.activations.activations_sha256` takes it.
    activations_sha256: str
    #: That of the activations.
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_layers(self.layers, EncodedLayer)
        check_strings("provenance", self.provenance)
        if not _SHA256.fullmatch(check_kind("activations_sha256", self.activations_sha256, str)):
            raise ValueError(
                "activations_sha256 must be 64 hexadecimal digits, "
                f"got {self.activations_sha256!r}"
            )
        check_dtype("positions", check_tensor("positions", self.positions), torch.int64)
        check_shape("positions", self.positions, (None,), "[tokens]")
        tokens = len(self.positions)
        for name, rows in self.rows():
            check_kind(name, rows, EncodedRows)
            check_kind(f"{name}.mode", rows.mode, Mode)
            check_tensor(f"{name}.codes", rows.codes)
            check_tensor(f"{name}.words", rows.words)
            row_bytes = rows.mode.bytes_per_row(rows.head_dim)
            check_dtype(f"{name}.codes", rows.codes, torch.uint8)
            check_dtype(f"{name}.words", rows.words, word_dtype(rows.mode))
            check_shape(f"{name}.codes", rows.codes, (tokens, None, row_bytes), "[T, H, B]")
            check_shape(f"{name}.words", rows.words, (tokens, rows.codes.shape[1]), "[T, H]")
            if rows.words.numel() == 0:
                raise ValueError(
                    f"{name}.words must hold at least one word, got {list(rows.words.shape)}"
                )
        self.modes()

    def rows(self) -> Iterator[tuple[str, EncodedRows]]:
        """Every side of every layer with its name, such as `layers.0.key`."""
        for index, layer in self.layers.items():
            for side, rows in layer._asdict().items():
                yield f"layers.{index}.{side}", rows

    def modes(self) -> dict[str, Mode]:
        """The modes in use, by name.

        Raises:
            ValueError: One name stands for two modes, or for another mode than the shipped one.
        """
        modes: dict[str, Mode] = {}
        for name, rows in self.rows():
            known = MODES.get(rows.mode.name, rows.mode)
            if modes.setdefault(rows.mode.name, known) != rows.mode:
                raise ValueError(
                    f"{name}.mode must be the one mode of its name, got another {rows.mode.name!r}"
                )
        return modes


@dataclass(frozen=True, slots=True)
class _Description:
    """What the metadata says of one side of one layer."""

    mode: str
    head_dim: int


def encode_activations(
    activations: Activations,
    key_mode: Mode,
    value_mode: Mode,
    *,
    layers: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
    tier: TierName | None = None,
) -> Encoded:
    """Quantize the keys and values of activations.

    Args:
        activations: What to encode.
        key_mode: How keys are stored.
        value_mode: How values are stored.
        layers: Which layers; by default all.
        device: Where to do it.
        tier: As for `kvq.quantize`; by default the device decides.

    Returns:
        Codes and words on the CPU.

    Raises:
        ValueError: A head size does not suit its mode.

    Exactness: the same codes and words in every tier, on every device.
    """

    check_kind("activations", activations, Activations)
    check_kind("key_mode", key_mode, Mode)
    check_kind("value_mode", value_mode, Mode)
    check_device("device", device)
    chosen = activations.layers if layers is None else layers

    def rows(x: Tensor, mode: Mode) -> EncodedRows:
        codes, words = quantize(x.to(device), mode, tier=tier)
        return EncodedRows(codes.cpu(), words.cpu(), mode, x.shape[-1])

    def known(index: int) -> int:
        if index not in activations.layers:
            raise ValueError(f"layers must be among those of the activations, got {index}")
        return index

    return Encoded(
        {
            index: EncodedLayer(
                rows(activations.layers[index].key, key_mode),
                rows(activations.layers[index].value, value_mode),
            )
            for index in map(known, chosen)
        },
        activations.positions,
        activations_sha256(activations),
        activations.provenance,
    )


def decode_rows(rows: EncodedRows, *, tier: TierName | None = None) -> Tensor:
    """`[T, H, D]` float32: the rows that the codes and words stand for."""
    check_kind("rows", rows, EncodedRows)
    return dequantize(rows.codes, rows.words, rows.mode, rows.head_dim, tier=tier)


def save_encoded(path: str | os.PathLike[str], encoded: Encoded) -> None:
    """Write an encoded file."""
    check_kind("encoded", encoded, Encoded)
    tensors = {"positions": encoded.positions}
    layers: dict[str, dict[str, object]] = {}
    for name, rows in encoded.rows():
        tensors[f"{name}.codes"] = rows.codes
        tensors[f"{name}.words"] = rows.words
        _, index, side = name.split(".")
        description = _Description(rows.mode.name, rows.head_dim)
        layers.setdefault(index, {})[side] = to_json(description)
    modes = {name: to_json(mode) for name, mode in encoded.modes().items()}
    write_tensors(
        path,
        tensors,
        SCHEMA,
        {
            "modes": json.dumps(modes, sort_keys=True),
            "layers": json.dumps(layers, sort_keys=True),
            "activations_sha256": encoded.activations_sha256,
            "provenance": json.dumps(dict(encoded.provenance), sort_keys=True),
        },
    )


def load_encoded(path: str | os.PathLike[str]) -> Encoded:
    """Read and check an encoded file.

    Raises:
        FileFormatError: It cannot be read, or breaks a rule of the format; the message names the
            file and the rule.
    """
    tensors, metadata = read_tensors(path, SCHEMA)
    try:
        positions = tensors.pop("positions")
        for name in tensors:
            if _NAME.fullmatch(name) is None:
                raise ValueError(
                    f"tensors must be named layers.N.key|value.codes|words, got {name!r}"
                )
        modes = {
            name: from_json(Mode, value, f"modes.{name}")
            for name, value in _object(metadata, "modes").items()
        }
        described = _object(metadata, "layers")
        layers: dict[int, EncodedLayer] = {}
        for index in sorted(described, key=int):
            sides: dict[str, EncodedRows] = {}
            for side in EncodedLayer._fields:
                name = f"layers.{index}.{side}"
                description = from_json(_Description, described[index][side], name)
                sides[side] = EncodedRows(
                    tensors.pop(f"{name}.codes"),
                    tensors.pop(f"{name}.words"),
                    modes[description.mode],
                    description.head_dim,
                )
            layers[int(index)] = EncodedLayer(**sides)
        if tensors:
            raise ValueError(f"layers must describe every tensor, got {min(tensors)!r} besides")
        provenance = _object(metadata, "provenance")
        if not all(isinstance(value, str) for value in provenance.values()):
            raise ValueError("provenance must be a JSON object of strings")
        return Encoded(layers, positions, metadata["activations_sha256"], provenance)
    except KeyError as error:
        raise FileFormatError(path, f"{error.args[0]} must be present, got nothing") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise FileFormatError(path, str(error)) from None


def _object(metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    """The JSON object in one entry of the metadata."""
    value = json.loads(metadata[name])
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r}")
    return value
