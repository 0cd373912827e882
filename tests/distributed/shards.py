"""Activation files for tests: the same tokens, cut into any number of files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from kvq.activations import Activations, LayerActivations, save_activations
from kvq.rotary import RotarySpec

TOKENS, HEADS, DIMS = 600, 2, (32, 16)
#: Where three files end: one is much longer than the others.
CUTS = (0, 37, 430, TOKENS)
ROTARY = RotarySpec(tuple(10000.0 ** (-i / 16) for i in range(16)), 32)


def drawn() -> Activations:
    """Rows whose norms differ by ten thousand, and by much more in a few."""
    generator = torch.Generator().manual_seed(11)
    norms = torch.logspace(-2, 2, TOKENS)[torch.randperm(TOKENS, generator=generator)]
    norms[:3] = torch.tensor([0.0, 1e-12, 1e12])

    def rows(channels: int) -> torch.Tensor:
        x = torch.randn(TOKENS, HEADS, channels, generator=generator)
        x[..., 3] += 4
        return x * norms[:, None, None]

    layers = {i: LayerActivations(None, rows(DIMS[0]), rows(DIMS[1])) for i in (0, 2)}
    positions = torch.arange(TOKENS)
    return Activations(layers, positions, positions[:0], 0.2, ROTARY)


def save_shards(folder: Path, cuts: tuple[int, ...] = CUTS) -> list[Path]:
    """The tokens between each two cuts, a file each."""
    whole = drawn()
    paths = []
    for i, (begin, end) in enumerate(pairwise(cuts)):
        path = folder / f"shard-{i}.safetensors"
        layers = {
            index: layer._replace(key=layer.key[begin:end], value=layer.value[begin:end])
            for index, layer in whole.layers.items()
        }
        part = Activations(
            layers, whole.positions[begin:end], whole.query_positions, whole.scale, ROTARY
        )
        save_activations(path, part)
        paths.append(path)
    return paths
