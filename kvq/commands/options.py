"""What the options of several commands stand for, and what is asked of all of their kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvq.activations import Activations
    from kvq.modes import Mode


def load_mode(name: str, codebook: Path | None = None) -> Mode:
    """The mode of that name, with the codebook of a file if one is given."""
    from kvq.codebook_files import load_codebook
    from kvq.modes import mode

    base = mode(name)
    return base if codebook is None else base.with_codebook(load_codebook(codebook))


def load_input(path: Path | None) -> tuple[Activations, str]:
    """The activations of a file, or the embedded sample, and what to call them."""
    from kvq.activations import load_activations

    if path is not None:
        return load_activations(path), path.name
    from kvq.data import embedded_sample

    return embedded_sample(), "embedded sample"


def check_output(option: str, path: Path | None) -> None:
    """A file that is to be written must be one that can be: asked before the work, not after.

    Raises:
        ValueError: It is a folder, or no file can be written there.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} must be the path of a file, got the folder {path}")
    _check_place(option, path)


def check_output_folder(option: str, path: Path) -> None:
    """The same of a folder, which is made if need be.

    Raises:
        ValueError: It is a file, or no folder can be made there.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} must be the path of a folder, got the file {path}")
    _check_place(option, path / "file")


def check_alone(option: str, beside: str, **others: object) -> None:
    """Options that would do nothing beside another must not be given with it.

    Raises:
        ValueError: One is.
    """
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} must be left out {beside} {option}, got {_shown(value)}")


def _shown(value: object) -> str:
    """A value as it was written: a list as its items."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _check_place(option: str, path: Path) -> None:
    """The first folder above a path that is there must let files be made in it."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{option} must be where files can be written, got {path} under {above}")
