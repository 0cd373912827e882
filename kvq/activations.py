"""Activation files: the queries, keys and values that a model's attention layers saw.

Schema `kvq-activations/1`, safetensors:

* `layers.{i}.query` `[Tq, Hq, D]`, `layers.{i}.key` `[T, Hkv, D]`, `layers.{i}.value`
  `[T, Hkv, Dv]`, float32, float16 or bfloat16; queries and keys after RoPE. Only `key` and `value`
  are required.
* `positions` `[T]` int64, of the keys; `query_positions` `[Tq]` int64, ascending.
* metadata: `scale` (the softmax scale), `rotary` (a `RotarySpec` as JSON, or `null`), `provenance`
  (a JSON object of strings).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvq.checks import (
    INPUT_DTYPES,
    check_kind,
    check_mapping,
    check_number,
    check_optional,
    check_strings,
    check_tensor,
    dtype_name,
)
from kvq.files import FileFormatError, read_tensors, write_tensors
from kvq.rotary import RotarySpec

#: Name and version of the file format.
SCHEMA: Final = "kvq-activations/1"
#: Layers have indices of at most six digits in the names of tensors.
MOST_LAYERS: Final = 1_000_000

_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(query|key|value)")


class LayerActivations(NamedTuple):
    """What one attention layer saw."""

    #: `[Tq, Hq, D]`, or `None` if the file has no queries.
    query: Tensor | None
    #: `[T, Hkv, D]`.
    key: Tensor
    #: `[T, Hkv, Dv]`.
    value: Tensor


@dataclass(frozen=True, slots=True)
class Activations:
    """The contents of an activation file, checked."""

    #: By layer index, ascending.
    layers: Mapping[int, LayerActivations]
    #: `[T]` int64: positions of the keys.
    positions: Tensor
    #: `[Tq]` int64: positions of the queries, ascending; a query sees the keys up to its own.
    query_positions: Tensor
    #: The softmax scale.
    scale: float
    #: How RoPE was applied, or `None` if it is not known.
    rotary: RotarySpec | None = None
    #: Where it comes from: model, text, hashes, versions.
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_layers(self.layers, LayerActivations)
        check_number("scale", self.scale, positive=True)
        check_optional("rotary", self.rotary, RotarySpec)
        check_strings("provenance", self.provenance)
        for name, positions in (
            ("positions", self.positions),
            ("query_positions", self.query_positions),
        ):
            check_tensor(name, positions)
            if positions.ndim != 1 or positions.dtype is not torch.int64:
                raise ValueError(
                    f"{name} must be a vector of int64, got {dtype_name(positions.dtype)} "
                    f"{list(positions.shape)}"
                )
            wrong = (positions[1:] <= positions[:-1]).nonzero()
            if len(wrong):
                before, after = positions[wrong[0, 0] :][:2].tolist()
                raise ValueError(f"{name} must be strictly increasing, got {after} after {before}")
        for index, layer in self.layers.items():
            self._check_layer(index, layer)

    def _check_layer(self, index: int, layer: LayerActivations) -> None:
        tokens = len(self.positions)
        for side, tensor in layer._asdict().items():
            if tensor is None and side == "query":
                continue
            name = f"layers.{index}.{side}"
            check_tensor(name, tensor)
            if tensor.dtype not in INPUT_DTYPES:
                raise ValueError(
                    f"{name} must be float32, float16 or bfloat16, got {dtype_name(tensor.dtype)}"
                )
            length = len(self.query_positions) if side == "query" else tokens
            if tensor.ndim != 3 or tensor.shape[0] != length or 0 in tensor.shape:
                raise ValueError(
                    f"{name} must be [{length} tokens, heads, channels], got {list(tensor.shape)}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} must be finite, got a NaN or an infinity")
        if layer.key.shape[1] != layer.value.shape[1]:
            raise ValueError(
                f"layers.{index}.value must have the {layer.key.shape[1]} heads of the key, "
                f"got {layer.value.shape[1]}"
            )
        if layer.query is not None and (
            layer.query.shape[2] != layer.key.shape[2] or layer.query.shape[1] % layer.key.shape[1]
        ):
            raise ValueError(
                f"layers.{index}.query must have the key's channels and a multiple of its heads, "
                f"got {list(layer.query.shape)} for keys of {list(layer.key.shape)}"
            )


def check_layers(layers: object, kind: type) -> None:
    """Layers by index, of some kind, at least one.

    Raises:
        TypeError, ValueError: They are not; the message says how.
    """
    found = check_mapping("layers", layers)
    if not found:
        raise ValueError("layers must hold at least one layer, got none")
    for index, layer in found.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"layers must have ints as keys, got {index!r}")
        if not 0 <= index < MOST_LAYERS:
            raise ValueError(f"layers must have keys from 0 to {MOST_LAYERS - 1}, got {index}")
        check_kind(f"layers.{index}", layer, kind)


def save_activations(path: str | os.PathLike[str], activations: Activations) -> None:
    """Write an activation file. The same activations give the same bytes."""
    check_kind("activations", activations, Activations)
    tensors = {
        f"layers.{index}.{side}": tensor
        for index, layer in activations.layers.items()
        for side, tensor in layer._asdict().items()
        if tensor is not None
    }
    tensors["positions"] = activations.positions
    tensors["query_positions"] = activations.query_positions
    rotary = None if activations.rotary is None else activations.rotary.to_json()
    write_tensors(
        path,
        tensors,
        SCHEMA,
        {
            "scale": repr(activations.scale),
            "rotary": json.dumps(rotary, sort_keys=True),
            "provenance": json.dumps(dict(activations.provenance), sort_keys=True),
        },
    )


def load_activations(path: str | os.PathLike[str]) -> Activations:
    """Read and check an activation file.

    Raises:
        FileFormatError: It cannot be read, or breaks a rule of the format; the message names the
            file and the rule.
    """
    return assemble_activations(path, *read_tensors(path, SCHEMA))


def assemble_activations(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: Mapping[str, str]
) -> Activations:
    """The activations that are made of the tensors and the metadata of a file, or of its first
    tokens.

    Raises:
        FileFormatError: They break a rule of the format.
    """
    try:
        positions = tensors.pop("positions")
        query_positions = tensors.pop("query_positions", positions.new_empty(0))
        sides: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise ValueError(f"tensors must be named layers.N.query|key|value, got {name!r}")
            sides.setdefault(int(match[1]), {})[match[2]] = tensor
        layers: dict[int, LayerActivations] = {}
        for index in sorted(sides):
            missing = {"key", "value"} - sides[index].keys()
            if missing:
                raise ValueError(f"layers.{index}.{min(missing)} must be present, got nothing")
            side = sides[index]
            layers[index] = LayerActivations(side.get("query"), side["key"], side["value"])
        rotary = json.loads(metadata.get("rotary", "null"))
        provenance = json.loads(metadata.get("provenance", "{}"))
        if not isinstance(provenance, dict) or not all(
            isinstance(value, str) for value in provenance.values()
        ):
            raise ValueError("provenance must be a JSON object of strings")
        return Activations(
            layers,
            positions,
            query_positions,
            _number("scale", metadata["scale"]),
            None if rotary is None else RotarySpec.from_json(rotary),
            provenance,
        )
    except KeyError as error:
        raise FileFormatError(path, f"{error.args[0]} must be present, got nothing") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FileFormatError(path, str(error)) from None


def _number(argument: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{argument} must be a number, got {text!r}") from None


def activations_sha256(activations: Activations) -> str:
    """SHA-256 (hex) of the tensors of an activation file in a fixed order, with their names."""
    check_kind("activations", activations, Activations)
    digest = hashlib.sha256()
    for index, layer in activations.layers.items():
        for side, tensor in layer._asdict().items():
            if tensor is not None:
                digest.update(
                    f"{index}.{side}:{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode()
                )
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    for positions in (activations.positions, activations.query_positions):
        digest.update(positions.numpy().tobytes())
    return digest.hexdigest()
