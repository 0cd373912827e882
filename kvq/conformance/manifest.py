"""The folder of conformance vectors: a manifest and safetensors files, checked when read.

Schema `kvq-vectors/1`:

* `manifest.json`: `versions`; `seed`, `rows`; `modes`, every part of each; `kinds`, what the
  planted rows are; `row_kinds`, the kind of each row; `attention`, the paged cache; `inputs` and
  `cases`, every file with the name, dtype, shape and SHA-256 of each of its tensors.
* `inputs.safetensors`: `{dtype}.{head_dim}.x` and `.query`, and the index tensors of the cache.
* `{mode}.safetensors`: `{mode}.{dtype}.{head_dim}.{part}`, with the parts of `PARTS`.

A tensor's SHA-256 is that of its bytes, little endian, the last axis fastest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kvq.checks import dtype_name
from kvq.files import FileFormatError, read_tensors, write_tensors
from kvq.modes import Mode
from kvq.records import from_json, to_json

#: Name and version of the manifest and of the files beside it.
SCHEMA: Final = "kvq-vectors/1"
#: The name of the manifest in its folder.
MANIFEST: Final = "manifest.json"
#: The name of the file of inputs.
INPUTS: Final = "inputs.safetensors"
#: The index tensors of the paged cache, among the inputs.
INDEX: Final = ("block_table", "seq_lens", "query_start_loc")
#: The tensors of a case, and what each is.
PARTS: Final[Mapping[str, str]] = {
    "codes": "[rows, bytes] uint8: the packed codes of x",
    "words": "[rows] float32 or float16: the stored words of x",
    "values": "[rows, head_dim] float32: what codes and words read as",
    "signs": "[rounds, head_dim] float32: +1 and -1, of a mode that rotates",
    "key_codes": "[blocks, heads, block_size, bytes] uint8: a paged cache of keys",
    "key_words": "[blocks, heads, block_size]",
    "value_codes": "the same of values",
    "value_words": "the same of values",
    "output": "[tokens, query heads, head_dim] float64: attention over the cache, exact",
    "allowed": "[tokens, query heads] float64: the largest error of a channel that is allowed",
}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a file."""

    #: Its name in the file.
    name: str
    #: Such as `uint8`.
    dtype: str
    shape: tuple[int, ...]
    #: Of its bytes, hexadecimal.
    sha256: str


@dataclass(frozen=True, slots=True)
class Case:
    """One mode at one head size, with inputs of one dtype."""

    #: Full name of the mode.
    mode: str
    #: Of the rows and of the query.
    dtype: str
    head_dim: int
    #: In the folder.
    file: str
    #: What `q.k` is multiplied by.
    scale: float
    tensors: tuple[TensorRecord, ...]

    @property
    def key(self) -> str:
        """How the names of its tensors begin: `{mode}.{dtype}.{head_dim}`."""
        return case_key(self.mode, self.dtype, self.head_dim)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of planted row."""

    name: str
    #: One sentence.
    what: str


@dataclass(frozen=True, slots=True)
class Paged:
    """The paged caches that attention reads."""

    num_blocks: int
    block_size: int
    query_heads: int
    kv_heads: int
    #: Keys of each sequence, and new tokens among them.
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder of vectors holds."""

    #: Of the packages that computed it.
    versions: tuple[tuple[str, str], ...]
    seed: int
    rows: int
    modes: tuple[Mode, ...]
    kinds: tuple[Kind, ...]
    #: The kind of each row.
    row_kinds: tuple[str, ...]
    attention: Paged
    inputs: tuple[TensorRecord, ...]
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        if len(self.row_kinds) != self.rows:
            raise ValueError(f"row_kinds must name {self.rows} kinds, got {len(self.row_kinds)}")
        names = [mode.name for mode in self.modes]
        for case in self.cases:
            if names.count(case.mode) != 1:
                raise ValueError(f"modes must hold {case.mode} once, got {names.count(case.mode)}")
            if os.path.basename(case.file) != case.file:
                raise ValueError(f"file must be in the folder of the manifest, got {case.file!r}")
            self._check_tensors(case)

    def _check_tensors(self, case: Case) -> None:
        """Everything that a check needs is recorded."""
        form = f"{case.dtype}.{case.head_dim}"
        shapes = {record.name: record.shape for record in (*case.tensors, *self.inputs)}
        by_row = [f"{case.key}.{part}" for part in ("codes", "words", "values")]
        by_row.append(f"{form}.x")
        others = [f"{case.key}.{part}" for part in PARTS if part != "signs"]
        for name in (*by_row, *others, f"{form}.query", *INDEX):
            if name not in shapes:
                raise ValueError(f"tensors must include {name}, got no such tensor")
        for name in by_row:
            if shapes[name][:1] != (self.rows,):
                raise ValueError(f"{name} must have {self.rows} rows, got {[*shapes[name]]}")

    def mode(self, case: Case) -> Mode:
        """The mode of a case."""
        return next(mode for mode in self.modes if mode.name == case.mode)


def case_key(mode: str, dtype: str, head_dim: int) -> str:
    """How the names of a case's tensors begin."""
    return f"{mode}.{dtype}.{head_dim}"


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 (hex) of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> tuple[TensorRecord, ...]:
    """Write one safetensors file of the folder, and say what is in it."""
    write_tensors(path, tensors, SCHEMA, {})
    return tuple(
        TensorRecord(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_sha256(tensor))
        for name, tensor in sorted(tensors.items())
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, last of all: a folder without one is not finished."""
    document = {"schema": SCHEMA, **to_json(manifest)}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        FileFormatError: It cannot be read, or breaks a rule of the format.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError(f"must be a JSON object, got {type(document).__name__}")
        schema = document.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, got {schema!r}")
        return from_json(Manifest, document, "manifest")
    except OSError as error:
        raise FileFormatError(path, f"cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise FileFormatError(path, str(error)) from None


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of the folder.

    Raises:
        FileFormatError: It cannot be read, or is none of ours.
    """
    return read_tensors(path, SCHEMA)[0]


def pick(
    path: Path, tensors: Mapping[str, Tensor], records: Iterable[TensorRecord], prefix: str = ""
) -> dict[str, Tensor]:
    """The recorded ones among the tensors of a file, without a prefix of their names.

    Raises:
        FileFormatError: One is missing, or is not as the manifest records it.
    """
    picked = {}
    for record in records:
        tensor = tensors.get(record.name)
        if tensor is None:
            raise FileFormatError(path, f"must hold {record.name}, got no such tensor")
        if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (record.shape, record.dtype):
            raise FileFormatError(
                path,
                f"{record.name} must be {record.dtype} {[*record.shape]} as in the manifest, "
                f"got {dtype_name(tensor.dtype)} {[*tensor.shape]}",
            )
        if tensor_sha256(tensor) != record.sha256:
            raise FileFormatError(
                path, f"{record.name} must have the SHA-256 of the manifest, got another"
            )
        picked[record.name.removeprefix(prefix)] = tensor
    return picked
