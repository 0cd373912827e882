"""Reading and writing this package's own files: safetensors with a schema in the metadata.

Nothing here unpickles or runs what it reads. Every fault raises a `FileFormatError` that names the
file and the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvq.checks import check_strings, check_tensor, check_text, check_values_are_there

#: Metadata key of the schema, such as `kvq-codebook/1`.
SCHEMA_KEY: Final = "kvq_schema"

#: What tensors are answered with that torch cannot have: sizes whose strides overflow, dtypes.
_CANNOT_BE_TENSORS: Final = (SafetensorError, RuntimeError, TypeError, ValueError, OverflowError)


class FileFormatError(ValueError):
    """A file that is not what it should be. The message names the file and the reason."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    schema: str,
    metadata: Mapping[str, str],
) -> None:
    """Write tensors and string metadata under a schema; the file appears whole or not at all.

    Args:
        path: Where; its folder is made if need be.
        tensors: By name.
        schema: Name and version, such as `kvq-codebook/1`.
        metadata: Strings by name.
    """
    check_text("schema", schema)
    check_strings("metadata", metadata)
    for name, tensor in tensors.items():
        check_values_are_there(f"tensors.{name}", check_tensor(f"tensors.{name}", tensor))
    target = Path(check_path(path))
    if target.is_dir():
        raise IsADirectoryError(f"path must be that of a file, got the folder {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    # Copies: tensors may be views of one another, which the library refuses to write.
    contents = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    try:
        # Not the library's own `save_file`, which lets nobody else read the file.
        partial.write_bytes(_sorted_header(save(contents, {**metadata, SCHEMA_KEY: schema})))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def check_path(path: object) -> str:
    """What names a file.

    Raises:
        TypeError: It does not.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a path, got {type(path).__name__}")
    return str(os.fspath(path))


def identify(path: str | os.PathLike[str]) -> str:
    """The schema of a file of ours.

    Raises:
        FileFormatError: It cannot be read, or is not one of ours.
    """
    return _read_metadata(path)[SCHEMA_KEY]


def read_tensors(
    path: str | os.PathLike[str], schema: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file of this schema.

    Args:
        path: The file.
        schema: What it must be, such as `kvq-codebook/1`.

    Raises:
        FileFormatError: It cannot be read, is truncated, pickled, or of another schema.
    """
    metadata = _read_schema(path, schema)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except _CANNOT_BE_TENSORS as error:
        reason = str(error).partition("\n")[0]
        raise FileFormatError(path, f"not a valid safetensors file ({reason})") from None


class TensorFile:
    """A file of ours, read in slices, for files that are larger than memory.

    Raises:
        FileFormatError: As for `read_tensors`.
    """

    def __init__(self, path: str | os.PathLike[str], schema: str) -> None:
        self.path = Path(path)
        #: Strings by name.
        self.metadata = _read_schema(path, schema)
        with safe_open(path, framework="pt") as file:
            #: By name of the tensor.
            self.shapes: dict[str, tuple[int, ...]] = {
                name: tuple(file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118
            }

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Rows `begin` to `end - 1` of a tensor, along its first axis.

        Raises:
            FileFormatError: The file can no longer be read.
        """
        try:
            # Opened each time: what was read would stay mapped, and count as memory in use.
            with safe_open(self.path, framework="pt") as file:
                rows: Tensor = file.get_slice(name)[begin:end].clone()
        except (OSError, SafetensorError) as error:
            raise FileFormatError(self.path, f"cannot be read ({error})") from None
        return rows


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 (hex) of the bytes of a file, which is not held in memory.

    Raises:
        FileFormatError: It cannot be read.
    """
    try:
        with open(path, "rb") as raw:
            return hashlib.file_digest(raw, "sha256").hexdigest()
    except OSError as error:
        raise FileFormatError(path, f"cannot be read ({error.strerror})") from None


def _sorted_header(contents: bytes) -> bytes:
    """A file with sorted keys in its header: safetensors leaves the metadata in no fixed order."""
    end = 8 + int.from_bytes(contents[:8], "little")
    header = json.dumps(json.loads(contents[8:end]), sort_keys=True, separators=(",", ":"))
    encoded = header.encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + contents[end:]


def _read_schema(path: str | os.PathLike[str], schema: str) -> dict[str, str]:
    """The metadata of a file of this schema, without it."""
    metadata = _read_metadata(path)
    found = metadata.pop(SCHEMA_KEY)
    if found != schema:
        raise FileFormatError(path, f"schema must be {schema}, got {found!r}")
    return metadata


def _read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    check_path(path)
    try:
        with open(path, "rb") as raw:
            magic = raw.read(8)
    except OSError as error:
        raise FileFormatError(path, f"cannot be read ({error.strerror})") from None
    if not magic:
        raise FileFormatError(path, "is empty")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
    except (SafetensorError, UnicodeDecodeError) as error:
        # Only now: a safetensors file begins with the length of its header, whose low byte may
        # be 0x80 too.
        if magic[:4] == b"PK\x03\x04" or magic[:1] == b"\x80":
            reason = "is a pickle or a zip archive, which is never loaded"
            raise FileFormatError(path, reason) from None
        raise FileFormatError(path, f"not a valid safetensors file ({error})") from None
    if SCHEMA_KEY not in metadata:
        raise FileFormatError(path, f"has no {SCHEMA_KEY} in its metadata: not one of ours")
    return metadata
