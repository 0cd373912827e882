"""What the files of kvq hold, as JSON objects: for `kvq inspect` and whatever writes a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

    from kvq.activations import Activations
    from kvq.analysis.value_histogram import ValueHistogram
    from kvq.calibration_files import Calibration
    from kvq.codebooks import Codebook
    from kvq.encoded_files import Encoded
    from kvq.rotary import RotarySpec

#: What a file holds. Values that are objects, or lists of them, become tables.
Description = dict[str, Any]
#: State of a file that has the hash in its manifest.
AS_RECORDED: Final = "as recorded"


def describe(path: Path) -> Description:
    """What the file holds, checked.

    Raises:
        FileFormatError: It is not one of ours, or breaks a rule of its format.
    """
    from kvq import activations, calibration_files, codebook_files, encoded_files
    from kvq.analysis import value_histogram
    from kvq.conformance import manifest as vectors
    from kvq.files import FileFormatError, identify

    if path.suffix == ".json":
        if _json_schema(path) == vectors.SCHEMA:
            return describe_vectors(path)
        return describe_manifest(path)
    schema = identify(path)
    if schema == activations.SCHEMA:
        return describe_activations(activations.load_activations(path))
    if schema == codebook_files.SCHEMA:
        return describe_codebook(codebook_files.load_codebook(path))
    if schema == calibration_files.SCHEMA:
        return describe_calibration(calibration_files.load_calibration(path))
    if schema == encoded_files.SCHEMA:
        return describe_encoded(encoded_files.load_encoded(path))
    if schema == vectors.SCHEMA:
        tensors = sorted(vectors.read_file(path).items())
        described = [{"name": name, "tensor": _shape(tensor)} for name, tensor in tensors]
        return {"schema": schema, "tensors": described}
    if schema == value_histogram.SCHEMA:
        return describe_histogram(value_histogram.load_histogram(path))
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
        "rotary": "not known" if rotary is None else _turned(rotary),
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


def describe_calibration(calibration: Calibration) -> Description:
    """What a calibration file holds."""
    from kvq.calibration_files import SCHEMA

    return {
        "schema": SCHEMA,
        "rotary": _turned(calibration.rotary),
        "sha256": calibration.sha256,
        "layers": [
            {
                "layer": index,
                "heads x channels": _shape(layer.mean),
                "largest mean": float(layer.mean.abs().max()),
                "least scale": float(layer.pair_scale.min()),
                "largest scale": float(layer.pair_scale.max()),
            }
            for index, layer in calibration.layers.items()
        ],
        "provenance": dict(calibration.provenance),
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


def describe_histogram(histogram: ValueHistogram) -> Description:
    """What a histogram file holds."""
    from kvq.analysis.value_histogram import SCHEMA

    points, _ = histogram.law()
    return {
        "schema": SCHEMA,
        "values": histogram.count,
        "points": len(points),
        "least": float(points.min(initial=0.0)),
        "largest": float(points.max(initial=0.0)),
        "made of": histogram.made_of,
        "sha256": histogram.sha256,
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


def describe_manifest(path: Path) -> Description:
    """What a report's manifest records, and whether the files beside it are as it records them.

    Raises:
        FileFormatError: It is not a manifest.
    """
    from kvq.analysis.report import SCHEMA
    from kvq.files import FileFormatError
    from kvq.modes import Mode
    from kvq.records import from_json, to_json

    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}")
        modes = [from_json(Mode, mode, "options.modes") for mode in manifest["options"]["modes"]]
        return {
            "schema": SCHEMA,
            **{f"input {name}": value for name, value in manifest["input"].items()},
            "seed": manifest["options"]["seed"],
            "files": [
                {"file": name, "sha256": sha256, "state": _state(path.parent, name, sha256)}
                for name, sha256 in manifest["files"].items()
            ],
            "modes": {mode.name: to_json(mode) for mode in modes},
            "provenance": {**manifest["versions"], **manifest["machine"]},
        }
    except OSError as error:
        raise FileFormatError(path, f"cannot be read ({error.strerror})") from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise FileFormatError(path, f"not a valid manifest ({error})") from None


def describe_vectors(path: Path) -> Description:
    """What a manifest of conformance vectors records, and whether its files are as recorded.

    Raises:
        FileFormatError: It is not a manifest of vectors.
    """
    from kvq.conformance import manifest as vectors
    from kvq.files import FileFormatError
    from kvq.records import to_json

    manifest = vectors.read_manifest(path)
    recorded = {vectors.INPUTS: manifest.inputs}
    for case in manifest.cases:
        recorded[case.file] = recorded.get(case.file, ()) + case.tensors
    files = []
    for name, records in recorded.items():
        state = AS_RECORDED if (path.parent / name).is_file() else "missing"
        try:
            if state == AS_RECORDED:
                vectors.pick(path, vectors.read_file(path.parent / name), records)
        except FileFormatError:
            state = "changed"
        files.append({"file": name, "tensors": len(records), "state": state})
    return {
        "schema": vectors.SCHEMA,
        "rows": manifest.rows,
        "seed": manifest.seed,
        "cases": len(manifest.cases),
        "files": files,
        "kinds": {kind.name: kind.what for kind in manifest.kinds},
        "modes": {mode.name: to_json(mode) for mode in manifest.modes},
        "provenance": dict(manifest.versions),
    }


def _json_schema(path: Path) -> object:
    """What a JSON file calls itself, if it can be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return document.get("schema") if isinstance(document, dict) else None


def _state(folder: Path, name: str, sha256: str) -> str:
    """Whether a file beside a manifest is there and has its hash."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"files must be in the folder of the manifest, got {name!r}")
    file = folder / name
    if not file.is_file():
        return "missing"
    return AS_RECORDED if hashlib.sha256(file.read_bytes()).hexdigest() == sha256 else "changed"


def _turned(rotary: RotarySpec) -> str:
    return f"{rotary.rotary_dim} channels, {rotary.layout}"


def _shape(tensor: Tensor) -> str:
    from kvq.checks import dtype_name

    return f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"


def _span(positions: Tensor) -> str:
    """How many positions, and from where to where."""
    if len(positions) == 0:
        return "none"
    return f"{len(positions)}, from {int(positions[0])} to {int(positions[-1])}"
