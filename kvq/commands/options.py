"""What the options of several commands stand for."""

from __future__ import annotations

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
