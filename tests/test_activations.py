"""Activation files: what is written comes back, and what breaks a rule is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvq.activations import (
    SCHEMA,
    Activations,
    LayerActivations,
    activations_sha256,
    load_activations,
    save_activations,
)
from kvq.files import SCHEMA_KEY, FileFormatError, identify
from kvq.rotary import RotaryLayout, RotarySpec

ROTARY = RotarySpec((1.0, 0.1), 4, RotaryLayout.INTERLEAVED, 1.25)


def example(dtype: torch.dtype = torch.float32, *, queries: int = 3) -> Activations:
    generator = torch.Generator().manual_seed(11)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Activations(
        {
            index: LayerActivations(
                rows(queries, 4, 6) if queries else None, rows(7, 2, 6), rows(7, 2, 5)
            )
            for index in (0, 12)
        },
        torch.arange(2, 9),
        torch.arange(9 - queries, 9),
        0.25,
        ROTARY,
        {"model": "none", "text": "naïve “quotes”"},
    )


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    """Change the tensors and the metadata of a file, past every check."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "activations.safetensors"
    save_activations(path, example())
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries", [0, 3])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, queries: int) -> None:
    written = example(dtype, queries=queries)
    save_activations(tmp_path / "a", written)
    read = load_activations(tmp_path / "a")
    assert list(read.layers) == [0, 12]
    for index, layer in written.layers.items():
        for ours, theirs in zip(layer, read.layers[index], strict=True):
            if ours is None:
                assert theirs is None
            else:
                assert theirs is not None
                assert ours.dtype is theirs.dtype
                assert torch.equal(ours, theirs)
    assert torch.equal(written.positions, read.positions)
    assert torch.equal(written.query_positions, read.query_positions)
    assert (read.scale, read.rotary, read.provenance) == (0.25, ROTARY, written.provenance)
    assert activations_sha256(read) == activations_sha256(written)


def test_a_file_is_identified_by_its_schema(file: Path) -> None:
    assert identify(file) == SCHEMA


def test_rotary_may_be_unknown(tmp_path: Path) -> None:
    save_activations(tmp_path / "a", dataclasses.replace(example(), rotary=None))
    assert load_activations(tmp_path / "a").rotary is None


def test_the_hash_sees_every_tensor() -> None:
    hashes = {activations_sha256(example())}
    for index in (0, 12):
        for side in (0, 1, 2):
            changed = example()
            tensor = changed.layers[index][side]
            assert tensor is not None
            tensor.view(-1)[-1] += 1.0
            hashes.add(activations_sha256(changed))
    hashes.add(activations_sha256(dataclasses.replace(example(), positions=torch.arange(7))))
    assert len(hashes) == 8


def _set(name: str, value: Tensor) -> Callable[[dict[str, Tensor], dict[str, str]], object]:
    return lambda tensors, metadata: tensors.update({name: value})


def _drop(name: str) -> Callable[[dict[str, Tensor], dict[str, str]], object]:
    return lambda tensors, metadata: tensors.pop(name)


def _say(name: str, value: str) -> Callable[[dict[str, Tensor], dict[str, str]], object]:
    return lambda tensors, metadata: metadata.update({name: value})


def _rotary(**fields: Any) -> Callable[[dict[str, Tensor], dict[str, str]], object]:
    return _say("rotary", json.dumps(ROTARY.to_json() | fields))


KEY, QUERY, VALUE = "layers.0.key", "layers.0.query", "layers.0.value"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param(lambda t, m: m.pop(SCHEMA_KEY), "has no kvq_schema", id="no schema"),
        pytest.param(_say(SCHEMA_KEY, "kvq-codebook/1"), "schema must be", id="other schema"),
        pytest.param(_say(SCHEMA_KEY, "kvq-activations/2"), "schema must be", id="later schema"),
        pytest.param(lambda t, m: m.pop("scale"), "scale must be present", id="no scale"),
        pytest.param(_say("scale", "0"), "scale must be positive", id="zero scale"),
        pytest.param(_say("scale", "nan"), "scale must be positive", id="NaN scale"),
        pytest.param(_say("scale", "wide"), "scale must be a number", id="scale in words"),
        pytest.param(_drop("positions"), "positions must be present", id="no positions"),
        pytest.param(_set("positions", torch.arange(8)), "must be .8 tokens", id="positions +1"),
        pytest.param(
            _set("positions", torch.arange(7, dtype=torch.int32)), "int64", id="int32 positions"
        ),
        pytest.param(
            _set("positions", torch.zeros(7, dtype=torch.int64)), "increasing", id="repeated"
        ),
        pytest.param(_set("query_positions", torch.arange(3)[None]), "a vector", id="matrix"),
        pytest.param(
            _set("query_positions", torch.tensor([3, 2, 1])), "increasing", id="descending"
        ),
        pytest.param(_drop("query_positions"), "query must be .0 tokens", id="no query positions"),
        pytest.param(_drop(KEY), "layers.0.key must be present", id="no key"),
        pytest.param(_drop(VALUE), "layers.0.value must be present", id="no value"),
        pytest.param(
            lambda t, m: [t.pop(n) for n in list(t) if n.startswith("layers")],
            "at least one layer",
            id="no layers",
        ),
        pytest.param(_set("layers.x.key", torch.zeros(7, 2, 6)), "named layers.N", id="name"),
        pytest.param(_set("layers.01.key", torch.zeros(7, 2, 6)), "named layers.N", id="zero"),
        pytest.param(_set("extra", torch.zeros(1)), "named layers.N", id="extra tensor"),
        pytest.param(_set(KEY, torch.zeros(7, 12)), "layers.0.key must be .7 tokens", id="2-d"),
        pytest.param(_set(KEY, torch.zeros(6, 2, 6)), "layers.0.key must be .7 tokens", id="T"),
        pytest.param(_set(KEY, torch.zeros(7, 0, 6)), "layers.0.key must be .7", id="no heads"),
        pytest.param(
            _set(KEY, torch.zeros(7, 2, 6, dtype=torch.float64)), "got float64", id="float64"
        ),
        pytest.param(
            _set(VALUE, torch.zeros(7, 2, 5, dtype=torch.int8)), "got int8", id="integers"
        ),
        pytest.param(_set(KEY, torch.full((7, 2, 6), torch.nan)), "must be finite", id="NaN"),
        pytest.param(_set(VALUE, torch.full((7, 2, 5), torch.inf)), "must be finite", id="inf"),
        pytest.param(_set(VALUE, torch.zeros(7, 3, 5)), "the 2 heads of the key", id="V heads"),
        pytest.param(_set(QUERY, torch.zeros(3, 4, 5)), "the key's channels", id="Q channels"),
        pytest.param(_set(QUERY, torch.zeros(3, 3, 6)), "a multiple of its heads", id="Q heads"),
        pytest.param(_set(QUERY, torch.zeros(2, 4, 6)), "must be .3 tokens", id="Q tokens"),
        pytest.param(_say("rotary", "{"), "Expecting property name", id="rotary no JSON"),
        pytest.param(_say("rotary", "[]"), "rotary must be a JSON object", id="rotary a list"),
        pytest.param(_rotary(base=1e4), "rotary must be a JSON object", id="rotary field"),
        pytest.param(_rotary(rotary_dim=6), "rotary_dim must be twice", id="rotary dim"),
        pytest.param(_rotary(rotary_dim="4"), "rotary_dim must be an integer", id="dim a string"),
        pytest.param(
            _rotary(layout="thirds"),
            "layout must be one of 'half', 'interleaved', got 'thirds'",
            id="rotary layout",
        ),
        pytest.param(
            _rotary(layout=["half"]),
            "layout must be one of 'half', 'interleaved', got",
            id="rotary layout a list",
        ),
        pytest.param(
            _rotary(inverse_frequencies=[1.0, -0.1]), "finite and not negative", id="frequency"
        ),
        pytest.param(
            _rotary(inverse_frequencies=[1.0, "x"]), "list of numbers", id="frequency in words"
        ),
        pytest.param(_rotary(attention_factor=0.0), "attention_factor must be", id="factor"),
        pytest.param(_say("provenance", '{"a": 1}'), "JSON object of strings", id="provenance"),
        pytest.param(_say("provenance", '["a"]'), "JSON object of strings", id="provenance list"),
    ],
)
def test_a_broken_rule_is_named(
    file: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object], rule: str
) -> None:
    rewrite(file, change)
    with pytest.raises(FileFormatError, match=rule) as caught:
        load_activations(file)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("contents", "rule"),
    [
        (b"", "is empty"),
        (b"\x80\x04K\x01.", "a pickle"),
        (b"PK\x03\x04 and so on", "a zip archive"),
        (b"#!/bin/sh\n", "not a valid safetensors file"),
        (b"\xff" * 64, "not a valid safetensors file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, contents: bytes, rule: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(contents)
    with pytest.raises(FileFormatError, match=rule):
        load_activations(path)


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileFormatError, match="cannot be read"):
            load_activations(path)


def test_a_truncated_file_is_refused(file: Path) -> None:
    contents = file.read_bytes()
    for length in (1, 7, 8, 9, 100, len(contents) // 2, len(contents) - 1):
        file.write_bytes(contents[:length])
        with pytest.raises(FileFormatError):
            load_activations(file)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(
    tmp_path: Path, example_bytes: bytes, data: st.DataObject
) -> None:
    """Whatever the bytes: the activations, or a `FileFormatError`."""
    contents = bytearray(example_bytes)
    header = 8 + int.from_bytes(contents[:8], "little")
    # Most of a file is numbers, where nothing can go wrong: half of the changes are in the header.
    where = st.one_of(st.integers(0, header - 1), st.integers(0, len(contents) - 1))
    for position, byte in data.draw(
        st.lists(st.tuples(where, st.integers(0, 255)), min_size=1, max_size=4)
    ):
        contents[position] = byte
    start, end = sorted(data.draw(st.tuples(where, where)))
    if data.draw(st.booleans()):
        del contents[start : min(end, start + 40)]
    path = tmp_path / "fuzzed"
    path.write_bytes(contents)
    with contextlib.suppress(FileFormatError):
        load_activations(path)


@pytest.fixture(scope="module")
def example_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "a"
    save_activations(path, example())
    return path.read_bytes()
