"""Codebook files: one fitted `Codebook`, exactly.

Schema `kvq-codebook/1`, safetensors:

* `levels` `[N]` and `thresholds` `[N - 1]`, float32.
* metadata: `name`; `recipe` and `provenance` (JSON objects with the fields of `Recipe` and
  `Provenance`); `sha256` (hexadecimal) of the bytes of the levels and the thresholds,
  little-endian, and of the three texts, each ended by a zero byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kvq.checks import check_kind, dtype_name
from kvq.codebooks import Codebook, Provenance, Recipe
from kvq.files import FileFormatError, read_tensors, write_tensors
from kvq.records import from_json, to_json

#: Name and version of the file format.
SCHEMA: Final = "kvq-codebook/1"

_TENSORS = ("levels", "thresholds")
_TEXTS = ("name", "recipe", "provenance")


def save_codebook(path: str | os.PathLike[str], codebook: Codebook) -> None:
    """Write a codebook file. The same codebook gives the same bytes.

    Args:
        path: Where; its folder is made if need be.
        codebook: What to write.
    """
    check_kind("codebook", codebook, Codebook)
    tensors = {
        "levels": torch.tensor(codebook.levels, dtype=torch.float32),
        "thresholds": torch.tensor(codebook.thresholds, dtype=torch.float32),
    }
    texts = {
        "name": codebook.name,
        "recipe": json.dumps(to_json(codebook.recipe), sort_keys=True),
        "provenance": json.dumps(to_json(codebook.provenance), sort_keys=True),
    }
    write_tensors(path, tensors, SCHEMA, {**texts, "sha256": _sha256(tensors, texts)})


def load_codebook(path: str | os.PathLike[str]) -> Codebook:
    """Read and check a codebook file.

    Args:
        path: The file.

    Returns:
        A codebook equal to the one that was saved.

    Raises:
        FileFormatError: It cannot be read; it is empty, truncated, pickled or of another schema;
            something is missing, unknown or of another type; the levels or thresholds break a
            rule of `Codebook`; or a byte has changed since it was written.
    """
    tensors, texts = read_tensors(path, SCHEMA)
    try:
        _check_names("tensors", tensors, _TENSORS)
        _check_names("metadata", texts, (*_TEXTS, "sha256"))
        for name, tensor in tensors.items():
            if tensor.dtype is not torch.float32 or tensor.ndim != 1:
                raise ValueError(
                    f"{name} must be a vector of float32, got {dtype_name(tensor.dtype)} "
                    f"{list(tensor.shape)}"
                )
        codebook = Codebook(
            name=texts["name"],
            levels=tuple(tensors["levels"].tolist()),
            thresholds=tuple(tensors["thresholds"].tolist()),
            recipe=from_json(Recipe, json.loads(texts["recipe"]), "recipe"),
            provenance=from_json(Provenance, json.loads(texts["provenance"]), "provenance"),
        )
        found = _sha256(tensors, texts)
        if found != texts["sha256"]:
            raise ValueError(f"sha256 must be that of its contents, {found}, got another")
    except (ValueError, RecursionError) as error:
        raise FileFormatError(path, str(error)) from None
    return codebook


def _check_names(what: str, found: Mapping[str, object], wanted: tuple[str, ...]) -> None:
    if set(found) != set(wanted):
        raise ValueError(f"{what} must be {', '.join(wanted)}, got {', '.join(sorted(found))}")


def _sha256(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in _TENSORS:
        digest.update(tensors[name].numpy().astype("<f4").tobytes())
    for name in _TEXTS:
        digest.update(texts[name].encode() + b"\0")
    return digest.hexdigest()
