"""Activation files that are read in slices: what a pass over the rows of a large one needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from kvq.activations import SCHEMA, assemble_activations
from kvq.files import FileFormatError, TensorFile

#: Numbers that a slice holds, about: a few MB, and some tens while they are worked on.
SLICE: Final = 2**19


class ActivationFile:
    """An activation file, whose rules are checked where they are met.

    Names, dtypes, shapes and metadata are checked at once; that numbers are finite, and positions
    increasing, when they are read. Nothing that was read is kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the header and the first token.

        Raises:
            FileFormatError: As for `kvq.activations.load_activations`.
        """
        self._file = TensorFile(path, SCHEMA)
        self.path = self._file.path
        shapes = self._file.shapes
        for name, shape in shapes.items():
            if not shape:
                raise FileFormatError(path, f"{name} must have at least one axis, got a scalar")
        first = {name: self._file.read(name, 0, 1) for name in shapes}
        activations = assemble_activations(path, first, self._file.metadata)
        #: How RoPE was applied, or `None` if it is not known.
        self.rotary = activations.rotary
        #: Of each layer, ascending, by `"key"` and `"value"`: heads and channels.
        self.layers: dict[int, dict[str, tuple[int, int]]] = {
            index: {
                side: (tensor.shape[1], tensor.shape[2])
                for side, tensor in (("key", layer.key), ("value", layer.value))
            }
            for index, layer in activations.layers.items()
        }
        (self.tokens,) = shapes["positions"]
        queries = shapes.get("query_positions", (0,))[0]
        for name, shape in shapes.items():
            wanted = queries if name.endswith("query") else self.tokens
            if name.startswith("layers.") and shape[0] != wanted:
                raise FileFormatError(
                    path, f"{name} must be [{wanted} tokens, heads, channels], got {list(shape)}"
                )

    def slices(
        self, layer: int, side: str, *, numbers: int = SLICE
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of one side of a layer, some tokens at a time.

        Args:
            layer: Its index.
            side: `"key"` or `"value"`.
            numbers: About how many to read at once.

        Yields:
            Positions `[n]` int64 and rows `[n, H, D]`.

        Raises:
            FileFormatError: A number is not finite, positions do not increase, or the file can no
                longer be read.
        """
        heads, channels = self.layers[layer][side]
        name = f"layers.{layer}.{side}"
        size = max(1, numbers // (heads * channels))
        last = None
        for begin in range(0, self.tokens, size):
            positions = self._file.read("positions", begin, begin + size)
            known = positions if last is None else torch.cat((last, positions))
            if bool((known[1:] <= known[:-1]).any()):
                raise FileFormatError(self.path, "positions must be strictly increasing")
            last = positions[-1:]
            rows = self._file.read(name, begin, begin + size)
            if not bool(torch.isfinite(rows).all()):
                raise FileFormatError(
                    self.path, f"{name} must be finite, got a NaN or an infinity"
                )
            yield positions, rows
