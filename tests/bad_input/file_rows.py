"""What files, and the values that they hold, refuse."""

# A line of a table is a line here.
# ruff: noqa: E501

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import kvq
from kvq import activations as acts
from kvq import calibration_files, codebook_files, encoded_files, files, records
from kvq.activations import Activations, LayerActivations
from kvq.calibration_files import Calibration, LayerCalibration
from kvq.codebooks import Recipe
from kvq.encoded_files import Encoded, encode_activations
from kvq.files import FileFormatError
from kvq.key_transforms import KeyTransform
from kvq.reference.rotary import apply_rotary
from kvq.rotary import RotarySpec
from tests.bad_input.core_rows import TIER
from tests.bad_input.mode_rows import flag, kind, parts
from tests.bad_input.table import Call, Made, Row
from tests.bad_input.tensors import META, indices, no_tensors, rows

ROTARY = RotarySpec(tuple(0.1**i for i in range(16)), 32)
MEAN, ONES = torch.zeros(2, 32), torch.ones(2, 32)
LAYER = LayerActivations(rows(3, 4, 32), rows(), rows())
ACTS = Activations({0: LAYER}, torch.arange(3), torch.arange(3), 0.2, ROTARY)
INT8 = kvq.mode("int8")
ENCODED = encode_activations(ACTS, INT8, INT8)
CALIBRATION = Calibration(ROTARY, {0: LayerCalibration(MEAN, ONES)})


def written(name: str, contents: bytes) -> Made:
    """The path of a file that is written first."""

    def write(_: dict[str, Any], folder: Path) -> Path:
        (folder / name).write_bytes(contents)
        return folder / name

    return Made(write)


#: Of a file to read.
READ: list[Row] = [
    *(
        (value, TypeError, f"path must be a path, got {type(value).__name__}")
        for value in (None, 3, ["x"])
    ),
    ("missing", FileFormatError, "missing: cannot be read (No such file or directory)"),
    ("", FileFormatError, ": cannot be read (No such file or directory)"),
    (
        Made(lambda _, folder: folder),
        FileFormatError,
        "...: cannot be read (Is a directory)",
    ),
    (written("empty", b""), FileFormatError, "...empty: is empty"),
    (written("text", b"text"), FileFormatError, "...text: not a valid safetensors file (...)"),
    (written("zip", b"PK\x03\x04"), FileFormatError, "...zip: is a pickle or a zip archive..."),
]
#: Of a file to write.
WRITE: list[Row] = [
    *(
        (value, TypeError, f"path must be a path, got {type(value).__name__}")
        for value in (None, 3)
    ),
    (Made(lambda _, folder: folder), IsADirectoryError, "...path must be that of a file, got ..."),
]


def side(name: str, value: Any, error: type[Exception], message: str) -> Row:
    """A bad tensor of a layer of activations."""
    return {0: LAYER._replace(**{name: value})}, error, message


ACTIVATIONS: dict[str, list[Row]] = {
    "layers": [
        ({}, ValueError, "layers must hold at least one layer, got none"),
        *kind("layers", "a Mapping", None, [LAYER]),
        ({0: tuple(LAYER)}, TypeError, "layers.0 must be a LayerActivations, got tuple"),
        ({"0": LAYER}, TypeError, "layers must have ints as keys, got '0'"),
        ({-1: LAYER}, ValueError, "layers must have keys from 0 to 999999, got -1"),
        side("key", None, TypeError, "layers.0.key must be a torch.Tensor, got NoneType"),
        side("key", rows().numpy(), TypeError, "layers.0.key must be a torch.Tensor, got ndarray"),
        side("key", rows().double(), ValueError, "layers.0.key must be float32, ... got float64"),
        side("key", rows(2, 2, 32), ValueError, "layers.0.key must be [3 tokens, ...], got [2, 2, 32]"),
        side("key", rows() / 0, ValueError, "layers.0.key must be finite, got a NaN or an infinity"),
        side("value", rows(3, 1, 32), ValueError, "layers.0.value must have the 2 heads of the key, got 1"),
        side("query", rows(3, 3, 32), ValueError, "layers.0.query must have ... got [3, 3, 32] for keys of [3, 2, 32]"),
        side("query", rows(3, 4, 16), ValueError, "layers.0.query must have ... got [3, 4, 16] for keys of [3, 2, 32]"),
    ],
    "positions": [
        *no_tensors("positions", torch.arange(3)),
        (torch.arange(3).int(), ValueError, "positions must be a vector of int64, got int32 [3]"),
        (torch.arange(3)[None], ValueError, "positions must be a vector of int64, got int64 [1, 3]"),
        (indices(0, 2, 1), ValueError, "positions must be strictly increasing, got 1 after 2"),
    ],
    "query_positions": [
        *no_tensors("query_positions", torch.arange(3)),
        (indices(0, 1, 1), ValueError, "query_positions must be strictly increasing, got 1 after 1"),
    ],
    "scale": [
        *kind("scale", "a number", "0.2", None, True),
        *(
            (value, ValueError, f"scale must be positive and finite, got {value}")
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
    ],
    "rotary": kind("rotary", "a RotarySpec or None", "half", {}),
    "provenance": [
        *kind("provenance", "a Mapping", None, "words"),
        ({"a": 1}, TypeError, "provenance must hold strings by name, got 1 for 'a'"),
    ],
}  # fmt: skip


def saved(name: str, value: Any) -> Any:
    """Arguments to write a value."""
    return lambda folder: {"path": folder / "file", name: value}


def loaded(save: Any, value: Any) -> Any:
    """Arguments to read a value that was written."""

    def write(folder: Path) -> dict[str, Any]:
        save(folder / "good", value)
        return {"path": folder / "good"}

    return write


CALLS: list[Call] = [
    Call("kvq.activations.Activations", Activations, parts(ACTS), ACTIVATIONS),
    *(
        Call(
            f"save_{name}",
            save,
            saved(name, value),
            {"path": WRITE, name: kind(name, f"{article} {type(value).__name__}", None, "x")},
        )
        for name, article, save, value in (
            ("activations", "an", acts.save_activations, ACTS),
            ("codebook", "a", codebook_files.save_codebook, kvq.CODEBOOKS["gaussian_4"]),
            ("encoded", "an", encoded_files.save_encoded, ENCODED),
            ("calibration", "a", calibration_files.save_calibration, CALIBRATION),
        )
    ),
    *(
        Call(f"load_{name}", load, loaded(save, value), {"path": READ})
        for name, load, save, value in (
            ("activations", acts.load_activations, acts.save_activations, ACTS),
            ("codebook", codebook_files.load_codebook, codebook_files.save_codebook, kvq.CODEBOOKS["gaussian_4"]),
            ("encoded", encoded_files.load_encoded, encoded_files.save_encoded, ENCODED),
            ("calibration", calibration_files.load_calibration, calibration_files.save_calibration, CALIBRATION),
            ("any file", files.identify, acts.save_activations, ACTS),
        )
    ),
    Call(
        "kvq.activations.activations_sha256",
        acts.activations_sha256,
        lambda _: {"activations": ACTS},
        {"activations": kind("activations", "an Activations", None, "x")},
    ),
    Call(
        "kvq.encoded_files.encode_activations",
        encode_activations,
        lambda _: {"activations": ACTS, "key_mode": INT8, "value_mode": INT8},
        {
            "activations": kind("activations", "an Activations", None, "x"),
            "key_mode": kind("key_mode", "a Mode", None, "int8"),
            "value_mode": kind("value_mode", "a Mode", None, "int8"),
            "layers": [([1], ValueError, "layers must be among those of the activations, got 1")],
            "device": [
                ("gpu", ValueError, "device must be one that torch knows, got 'gpu'"),
                ("meta", ValueError, "... must be on a device that holds values, got meta"),
            ],
            "tier": TIER,
        },
    ),
    Call(
        "kvq.encoded_files.decode_rows",
        encoded_files.decode_rows,
        lambda _: {"rows": ENCODED.layers[0].key},
        {"rows": kind("rows", "an EncodedRows", None, tuple(ENCODED.layers[0].key)), "tier": TIER},
    ),
    Call(
        "kvq.encoded_files.Encoded",
        Encoded,
        parts(ENCODED),
        {
            "layers": [
                ({}, ValueError, "layers must hold at least one layer, got none"),
                *kind("layers", "a Mapping", None, [1]),
                ({0: None}, TypeError, "layers.0 must be an EncodedLayer, got NoneType"),
            ],
            "positions": [
                *no_tensors("positions", torch.arange(3)),
                (torch.arange(3).int(), TypeError, "positions must be int64, got int32"),
                (torch.arange(4), ValueError, "layers.0.key.codes must be [T, H, B] of shape [4, any, 32], got [3, 2, 32]"),
            ],
            "activations_sha256": [
                *kind("activations_sha256", "a str", None, b""),
                ("0" * 63, ValueError, f"activations_sha256 must be 64 hexadecimal digits, got '{'0' * 63}'"),
            ],
            "provenance": ACTIVATIONS["provenance"],
        },
    ),
    Call(
        "kvq.calibration_files.Calibration",
        Calibration,
        parts(CALIBRATION),
        {
            "rotary": kind("rotary", "a RotarySpec", None, "half"),
            "layers": [
                ({}, ValueError, "layers must hold at least one layer, got none"),
                *kind("layers", "a Mapping", None, [1]),
                ({0: (MEAN, ONES)}, TypeError, "layers.0 must be a LayerCalibration, got tuple"),
                ({0: LayerCalibration(MEAN.double(), ONES)}, ValueError, "layers.0.mean must be float32, got float64"),
                ({0: LayerCalibration(MEAN / 0, ONES)}, ValueError, "layers.0.mean must be finite, got a NaN or an infinity"),
                ({0: LayerCalibration(MEAN, MEAN)}, ValueError, "layers.0.pair_scale must be positive, got 0.0"),
            ],
            "provenance": ACTIVATIONS["provenance"],
        },
    ),
    Call(
        "kvq.key_transforms.KeyTransform",
        KeyTransform,
        lambda _: {"rotary": ROTARY, "mean": MEAN},
        {
            "rotary": kind("rotary", "a RotarySpec", None, "half"),
            "mean": [
                *no_tensors("mean", MEAN)[1:],
                (None, ValueError, "mean, mean_tokens or pair_scale must be given, got none"),
                (MEAN.double(), TypeError, "mean must be float32, got float64"),
                (MEAN[0], ValueError, "mean must be [KV heads, head_dim] of shape [any, any], got [32]"),
                (MEAN[:, :8], ValueError, "mean must have the 32 channels that are rotated, got 8"),
                (MEAN / 0, ValueError, "mean must be finite, got a NaN or an infinity"),
            ],
            "mean_tokens": [
                *kind("mean_tokens", "an int", "1", 1.5, True, None),
                (-1, ValueError, "mean_tokens must not be negative, got -1"),
                (4, ValueError, "mean_tokens must be 0 with a mean, got 4"),
            ],
            "pair_scale": [
                *no_tensors("pair_scale", ONES)[1:],
                (MEAN, ValueError, "pair_scale must be positive, got 0.0"),
                (ONES[:1], ValueError, "pair_scale must be [KV heads, head_dim] of shape [2, 32], got [1, 32]"),
                (torch.arange(1.0, 65).view(2, 32), ValueError, "pair_scale must be the same in both channels of a RoPE pair, got two that differ"),
            ],
            "positions": [(3, TypeError, "positions must be a function or None, got int")],
        },
    ),
    Call(
        "KeyTransform.check_keys",
        KeyTransform(ROTARY, mean_tokens=4).check_keys,
        lambda _: {"heads": 2, "head_dim": 32},
        {
            "heads": kind("heads", "an int", "2", None, 2.0),
            "head_dim": [
                *kind("head_dim", "an int", "32", None),
                (16, ValueError, "keys must have the 32 channels that are rotated, got 16"),
            ],
        },
    ),
    Call(
        "kvq.rotary.RotarySpec",
        RotarySpec,
        parts(ROTARY),
        {
            "inverse_frequencies": [
                *kind("inverse_frequencies", "a tuple", [1.0], None, torch.ones(16)),
                ((math.nan,) * 16, ValueError, "inverse_frequencies must be finite and not negative, got nan"),
                ((-1.0,) * 16, ValueError, "inverse_frequencies must be finite and not negative, got -1.0"),
                (("1",) * 16, TypeError, "inverse_frequencies[0] must be a number, got str"),
            ],
            "rotary_dim": [
                *kind("rotary_dim", "an int", "32", 32.0, True, None),
                *(
                    (value, ValueError, f"rotary_dim must be twice the number of inverse frequencies (32), got {value}")
                    for value in (0, 16, -32)
                ),
            ],
            "layout": kind("layout", "a RotaryLayout", "half", None),
            "attention_factor": [
                *kind("attention_factor", "a number", "1", None, True),
                *(
                    (value, ValueError, f"attention_factor must be positive and finite, got {value}")
                    for value in (0.0, -1.0, math.nan, math.inf)
                ),
            ],
        },
    ),
    Call(
        "RotarySpec.from_json",
        RotarySpec.from_json,
        lambda _: {"value": ROTARY.to_json()},
        {
            "value": [
                (None, ValueError, "rotary must be a JSON object with the fields [...], got None"),
                ({}, ValueError, "rotary must be a JSON object with the fields [...], got {}"),
                ({**ROTARY.to_json(), "layout": "x"}, ValueError, "layout must be one of 'half', 'interleaved', got 'x'"),
                ({**ROTARY.to_json(), "rotary_dim": "x"}, ValueError, "rotary_dim must be an integer and attention_factor a number, got 'x' and 1.0"),
                ({**ROTARY.to_json(), "inverse_frequencies": 3}, ValueError, "inverse_frequencies must be a list of numbers, got 3"),
            ]
        },
    ),
    Call(
        "kvq.reference.rotary.apply_rotary",
        apply_rotary,
        lambda _: {"x": rows(), "positions": torch.arange(3), "spec": ROTARY},
        {
            "x": [
                *no_tensors("x", rows()),
                (rows().int(), TypeError, "x must be float32 or ..., got int32"),
                (rows(3, 32), ValueError, "x must be [T, H, D] of shape [any, any, any], got [3, 32]"),
                (rows(3, 2, 16), ValueError, "x must have the 32 channels that are rotated, got 16"),
            ],
            "positions": [
                *no_tensors("positions", torch.arange(3)),
                (torch.arange(3).int(), TypeError, "positions must be int64, got int32"),
                (torch.arange(2), ValueError, "positions must be [T] of shape [3], got [2]"),
                (torch.arange(3).to(META), ValueError, "positions must be on the device of x (cpu), got meta"),
            ],
            "spec": kind("spec", "a RotarySpec", None, "half"),
            "inverse": flag("inverse"),
        },
    ),
    Call(
        "kvq.records.from_json",
        records.from_json,
        lambda _: {"kind": Recipe, "value": records.to_json(Recipe("norm", 4, True)), "argument": "recipe"},
        {
            "kind": [(int, TypeError, "kind must be a dataclass, got <class 'int'>"), (None, TypeError, "kind must be a dataclass, got None")],
            "value": [
                (None, ValueError, "recipe must be a JSON object, got None"),
                ({}, ValueError, "recipe.distribution must be present, got nothing"),
                ({"distribution": 3, "num_levels": 4, "symmetric": True}, ValueError, "recipe.distribution must be str, got 3"),
                ({"x": 3}, ValueError, "recipe must have no field 'x', got one"),
            ],
        },
        open={"argument": "a name for messages"},
    ),
    Call(
        "kvq.files.read_tensors",
        files.read_tensors,
        lambda folder: {**loaded(acts.save_activations, ACTS)(folder), "schema": acts.SCHEMA},
        {
            "path": READ,
            "schema": [("other/1", FileFormatError, "...: schema must be other/1, got 'kvq-activations/1'")],
        },
    ),
    Call(
        "kvq.files.write_tensors",
        files.write_tensors,
        lambda folder: {"path": folder / "file", "tensors": {"x": rows()}, "schema": "s/1", "metadata": {"a": "b"}},
        {
            "path": WRITE,
            "tensors": [
                ({"x": None}, TypeError, "tensors.x must be a torch.Tensor, got NoneType"),
                ({"x": rows().to(META)}, ValueError, "tensors.x must be on a device that holds values, got meta"),
            ],
            "metadata": [({"a": 1}, TypeError, "metadata must hold strings by name, got 1 for 'a'")],
            "schema": [("", ValueError, "schema must not be empty, got ''"), *kind("schema", "a str", None)],
        },
    ),
]  # fmt: skip
