"""Calibration files: what the keys of a model's layers have in common, before RoPE.

Schema `kvq-calibration/1`, safetensors:

* `layers.{i}.mean` and `layers.{i}.pair_scale`, `[H, D]` float32, as `KeyTransform` takes them.
* metadata: `rotary` (a `RotarySpec` as JSON); `provenance` (a JSON object of strings).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from torch import Tensor

from kvq.activations import check_layers
from kvq.checks import check_kind, check_strings
from kvq.files import FileFormatError, read_tensors, write_tensors
from kvq.key_transforms import KeyTransform
from kvq.rotary import RotarySpec

#: Name and version of the file format.
SCHEMA: Final = "kvq-calibration/1"

_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(mean|pair_scale)")


class LayerCalibration(NamedTuple):
    """What was found of the keys of one layer."""

    #: `[H, D]` float32: their mean before RoPE.
    mean: Tensor
    #: `[H, D]` float32: what makes channels of queries and keys alike, by RoPE pair.
    pair_scale: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The contents of a calibration file, checked."""

    #: How the model applies RoPE.
    rotary: RotarySpec
    #: By layer index, ascending.
    layers: Mapping[int, LayerCalibration]
    #: Where it comes from: model, text, hashes, versions.
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_kind("rotary", self.rotary, RotarySpec)
        check_layers(self.layers, LayerCalibration)
        check_strings("provenance", self.provenance)
        for index, layer in self.layers.items():
            try:
                KeyTransform(self.rotary, mean=layer.mean, pair_scale=layer.pair_scale)
            except (TypeError, ValueError) as error:
                raise ValueError(f"layers.{index}.{error}") from None

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of RoPE and the tensors, in a fixed order."""
        digest = hashlib.sha256(json.dumps(self.rotary.to_json(), sort_keys=True).encode())
        for index, layer in self.layers.items():
            for name, tensor in layer._asdict().items():
                digest.update(f"{index}.{name}:{list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().astype("<f4").tobytes())
        return digest.hexdigest()


def save_calibration(path: str | os.PathLike[str], calibration: Calibration) -> None:
    """Write a calibration file. The same calibration gives the same bytes."""
    check_kind("calibration", calibration, Calibration)
    tensors = {
        f"layers.{index}.{name}": tensor
        for index, layer in calibration.layers.items()
        for name, tensor in layer._asdict().items()
    }
    metadata = {
        "rotary": json.dumps(calibration.rotary.to_json(), sort_keys=True),
        "provenance": json.dumps(dict(calibration.provenance), sort_keys=True),
    }
    write_tensors(path, tensors, SCHEMA, metadata)


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read and check a calibration file.

    Raises:
        FileFormatError: It cannot be read, or breaks a rule of the format; the message names the
            file and the rule.
    """
    tensors, metadata = read_tensors(path, SCHEMA)
    try:
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise ValueError(f"tensors must be named layers.N.mean|pair_scale, got {name!r}")
            found.setdefault(int(match[1]), {})[match[2]] = tensor
        layers = {}
        for index in sorted(found):
            for name in LayerCalibration._fields:
                if name not in found[index]:
                    raise ValueError(f"layers.{index}.{name} must be present, got nothing")
            layers[index] = LayerCalibration(**found[index])
        provenance = json.loads(metadata["provenance"])
        if not isinstance(provenance, dict) or not all(
            isinstance(value, str) for value in provenance.values()
        ):
            raise ValueError("provenance must be a JSON object of strings")
        return Calibration(
            RotarySpec.from_json(json.loads(metadata["rotary"])), layers, provenance
        )
    except KeyError as error:
        raise FileFormatError(path, f"{error.args[0]} must be present, got nothing") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FileFormatError(path, str(error)) from None
