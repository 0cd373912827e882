"""Files that are larger than the memory they are counted in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvq.activation_slices import ActivationFile
from kvq.activations import SCHEMA, Activations, LayerActivations, save_activations
from kvq.files import SCHEMA_KEY, FileFormatError, write_tensors

CHANNELS = 64
#: Counts a file, and prints how many MB that took at the most, beyond what small ones take.
PROGRAM = """
import resource, sys
from pathlib import Path

import kvq
from kvq.analysis.file_values import Counted, count_files

def count(path):
    histogram = count_files([Path(path)], Counted(kvq.mode("lloyd4"))).histogram
    return histogram.count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

count(sys.argv[1])  # what is imported and set up once
before = count(sys.argv[1])[1]
values, after = count(sys.argv[2])
print(values, after - before)
"""


def save_sparse(path: Path, tokens: int) -> None:
    """A file of zeros that takes no room on a disk, but for its positions and its last token."""
    tensors: dict[str, tuple[str, list[int]]] = {
        "positions": ("I64", [tokens]),
        "layers.0.key": ("F16", [tokens, 1, CHANNELS]),
        "layers.0.value": ("F16", [tokens, 1, CHANNELS]),
    }
    header: dict[str, object] = {
        "__metadata__": {SCHEMA_KEY: SCHEMA, "scale": "1.0", "rotary": "null", "provenance": "{}"}
    }
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + tokens * (8 if dtype == "I64" else 2 * CHANNELS)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.write(torch.arange(tokens).numpy().tobytes())
        file.truncate(8 + len(encoded) + end)
        file.seek(-2 * CHANNELS, 2)
        file.write(torch.ones(CHANNELS, dtype=torch.float16).numpy().tobytes())


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    save_sparse(small, 20_000)
    save_sparse(large, 1_200_000)
    assert large.stat().st_size > 300 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(small), str(large)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    values, growth = done.stdout.split()
    # All rows were read: the one that is not zero is the last.
    assert int(values) == CHANNELS
    assert float(growth) < 30


def test_rules_of_the_format_hold_where_they_are_met(tmp_path: Path) -> None:
    positions, rows = torch.arange(8), torch.ones(8, 2, 16)
    path = tmp_path / "a.safetensors"

    def read() -> None:
        for side in ("value", "key"):
            list(ActivationFile(path).slices(0, side, numbers=96))

    def refused(**tensors: torch.Tensor) -> str:
        given = {"positions": positions, "layers.0.key": rows, "layers.0.value": rows}
        given |= {name.replace("_", "."): tensor for name, tensor in tensors.items()}
        metadata = {"scale": "1.0", "rotary": "null", "provenance": "{}"}
        write_tensors(path, given, SCHEMA, metadata)
        with pytest.raises(FileFormatError) as raised:
            read()
        return str(raised.value).removeprefix(f"{path}: ")

    late = rows.clone()
    late[7, 1, 3] = torch.nan
    assert "layers.0.key must be finite" in refused(layers_0_key=late)
    # The seventh position is the first of a slice.
    turned = positions.clone()
    turned[6] = 5
    assert "positions must be strictly increasing" in refused(positions=turned)
    assert "must be [8 tokens, heads, channels], got [7, 2, 16]" in refused(layers_0_key=rows[:7])
    assert "must be float32, float16 or bfloat16" in refused(layers_0_key=rows.double())
    assert "must have the 2 heads of the key" in refused(layers_0_value=rows[:, :1])
    assert "must be present" in refused(layers_1_key=rows)
    assert "must have at least one axis" in refused(positions=torch.tensor(3))
    assert "positions must be a vector" in refused(positions=positions[:, None])


def test_slices_are_the_tensors(tmp_path: Path) -> None:
    layer = LayerActivations(None, torch.randn(10, 2, 16), torch.randn(10, 2, 32).half())
    positions = torch.arange(10) * 3
    path = tmp_path / "a.safetensors"
    save_activations(path, Activations({4: layer}, positions, positions[:0], 0.5))
    file = ActivationFile(path)
    assert file.tokens == 10
    assert file.layers == {4: {"key": (2, 16), "value": (2, 32)}}
    for side, expected in (("key", layer.key), ("value", layer.value)):
        found = list(file.slices(4, side, numbers=100))
        assert len(found) == (4 if side == "key" else 10)
        assert torch.equal(torch.cat([rows for _, rows in found]), expected)
        assert torch.equal(torch.cat([places for places, _ in found]), positions)
