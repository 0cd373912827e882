"""Encoded files: what is written comes back, to the bit, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvq
from kvq.activations import Activations, LayerActivations, activations_sha256
from kvq.codebooks import Codebook, Provenance, Recipe
from kvq.encoded_files import (
    SCHEMA,
    Encoded,
    EncodedLayer,
    decode_rows,
    encode_activations,
    load_encoded,
    save_encoded,
)
from kvq.files import SCHEMA_KEY, FileFormatError, identify
from kvq.modes import INT4_FIRST_IMPLEMENTATION
from kvq.records import from_json, to_json
from tests.compare import assert_bit_exact

TOKENS, HEADS, HEAD_DIM, VALUE_DIM = 5, 2, 32, 16

FITTED = Codebook.from_exact(
    "fitted",
    (-1.7, -0.6, 0.1, 0.5, 1.9),
    Recipe("samples", 5, symmetric=False, weighted=True),
    Provenance("by hand", "ab" * 32, (("numpy", "2.0"), ("scipy", "1.0"))),
)
MADE = (
    kvq.mode("lloyd2").with_codebook(FITTED),
    kvq.mode("int4").with_rounding(kvq.Rounding.TOWARD_ZERO),
    kvq.mode("int4").without_rotation(),
    INT4_FIRST_IMPLEMENTATION,
)
ALL_MODES = [pytest.param(mode, id=mode.name) for mode in (*kvq.MODES.values(), *MADE)]


@pytest.fixture
def activations() -> Activations:
    generator = torch.Generator().manual_seed(1)

    def rows(head_dim: int) -> torch.Tensor:
        return torch.randn(TOKENS, HEADS, head_dim, generator=generator)

    layers = {
        index: LayerActivations(None, rows(HEAD_DIM), rows(VALUE_DIM).to(torch.float16))
        for index in (0, 7, 12)
    }
    positions = torch.arange(3, 3 + TOKENS)
    return Activations(layers, positions, positions[:0], 0.125, None, {"model": "drawn"})


@pytest.fixture
def encoded(activations: Activations) -> Encoded:
    return encode_activations(activations, kvq.mode("lloyd3"), MADE[0])


def rewrite(path: Path, change: Any) -> None:
    """Read a file, let `change(tensors, metadata)` spoil it, and write it back."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_mode_survives_json(mode: kvq.Mode) -> None:
    text = json.dumps(to_json(mode), sort_keys=True, allow_nan=False)
    assert from_json(kvq.Mode, json.loads(text), "mode") == mode


@pytest.mark.parametrize("mode", ALL_MODES)
def test_round_trip(mode: kvq.Mode, activations: Activations, tmp_path: Path) -> None:
    path = tmp_path / "encoded.safetensors"
    encoded = encode_activations(activations, mode, kvq.mode("int8"))
    save_encoded(path, encoded)
    assert identify(path) == SCHEMA
    loaded = load_encoded(path)
    assert list(loaded.layers) == [0, 7, 12]
    assert loaded.provenance == {"model": "drawn"}
    assert loaded.activations_sha256 == activations_sha256(activations)
    assert_bit_exact(loaded.positions, activations.positions, "positions")
    for index, layer in activations.layers.items():
        key, value = loaded.layers[index]
        assert (key.mode, value.mode) == (mode, kvq.mode("int8"))
        assert (key.head_dim, value.head_dim) == (HEAD_DIM, VALUE_DIM)
        expected = kvq.quantize(layer.key, mode)
        assert_bit_exact(key.codes, expected.codes, "codes")
        assert_bit_exact(key.words, expected.words, "words")
        assert_bit_exact(decode_rows(key), kvq.dequantize(*expected, mode, HEAD_DIM), "rows")


def test_a_fitted_codebook_travels_in_the_file(encoded: Encoded, tmp_path: Path) -> None:
    save_encoded(tmp_path / "e.safetensors", encoded)
    mode = load_encoded(tmp_path / "e.safetensors").layers[0].value.mode
    assert mode.name == "lloyd2+fitted"
    assert mode.codebook == FITTED


def test_the_same_contents_give_the_same_bytes(encoded: Encoded, tmp_path: Path) -> None:
    for name in "ab":
        save_encoded(tmp_path / name, encoded)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_layers_can_be_chosen(activations: Activations) -> None:
    mode = kvq.mode("int8")
    assert list(encode_activations(activations, mode, mode, layers=[7]).layers) == [7]


def _drop(name: str) -> Any:
    return lambda tensors, metadata: (tensors.pop(name, None), metadata.pop(name, None))


def _tensor(name: str, change: Any) -> Any:
    return lambda tensors, _: tensors.update({name: change(tensors[name]).contiguous()})


def _metadata(name: str, change: Any) -> Any:
    def spoil(_: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        value = json.loads(metadata[name])
        change(value)
        metadata[name] = json.dumps(value)

    return spoil


def _text(name: str, text: str) -> Any:
    return lambda _, metadata: metadata.update({name: text})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop("positions"), "positions must be present"),
        (_drop("layers.0.key.words"), r"layers\.0\.key\.words must be present"),
        (_drop("modes"), "modes must be present"),
        (_drop("layers"), "layers must be present"),
        (_drop("activations_sha256"), "activations_sha256 must be present"),
        (_tensor("layers.0.key.codes", lambda t: t[..., 1:]), r"codes must be \[T, H, B\]"),
        (_tensor("layers.0.key.codes", lambda t: t[1:]), r"codes must be \[T, H, B\]"),
        (_tensor("layers.0.key.codes", lambda t: t.to(torch.int16)), "codes must be uint8"),
        (_tensor("layers.7.value.words", lambda t: t[:, 1:]), r"words must be \[T, H\]"),
        (_tensor("layers.7.value.words", lambda t: t.double()), "words must be float32"),
        (_tensor("positions", lambda t: t.float()), "positions must be int64"),
        (_tensor("positions", lambda t: t[None]), "positions must be"),
        (lambda t, _: t.update(extra=torch.zeros(1)), "tensors must be named"),
        (lambda t, _: t.update({"layers.1.key.codes": torch.zeros(1)}), "layers must describe"),
        (_text("modes", "{"), "Expecting property name"),
        (_text("modes", "[]"), "modes must be a JSON object"),
        (_text("modes", "[" * 100_000), "recursion"),
        (_text("layers", "{}"), "layers must describe every tensor"),
        (_text("activations_sha256", "abc"), "activations_sha256 must be 64 hexadecimal digits"),
        (_metadata("provenance", lambda v: v.update(model=3)), "provenance must be"),
        (_metadata("layers", lambda v: v.pop("7")), "layers must describe every tensor"),
        (_metadata("layers", lambda v: v["7"].pop("key")), "key must be present"),
        (_metadata("layers", lambda v: v.update({"x": {}})), "invalid literal for int"),
        (_metadata("layers", lambda v: v["0"]["key"].update(head_dim=40)), "head_dim must be"),
        (_metadata("layers", lambda v: v["0"]["key"].update(head_dim=32.0)), "must be int, got"),
        (_metadata("layers", lambda v: v["0"]["key"].update(head_dim=True)), "must be int, got"),
        (_metadata("layers", lambda v: v["0"]["key"].update(mode="int5")), "int5 must be present"),
        (_metadata("layers", lambda v: v["0"].update(key=[])), "must be a JSON object"),
    ],
)
def test_files_refused(spoil: Any, message: str, encoded: Encoded, tmp_path: Path) -> None:
    path = tmp_path / "encoded.safetensors"
    save_encoded(path, encoded)
    rewrite(path, spoil)
    with pytest.raises(FileFormatError, match=message) as caught:
        load_encoded(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mode: mode.pop("bits"), "bits must be present"),
        (lambda mode: mode.update(bits="3"), "bits must be int, got '3'"),
        (lambda mode: mode.update(bits=True), "bits must be int, got True"),
        (lambda mode: mode.update(bits=5), "bits must be one of"),
        (lambda mode: mode.update(colour="red"), "must have no field 'colour'"),
        (lambda mode: mode.update(grid="round"), "grid must be one of"),
        (lambda mode: mode.update(grid=["signed"]), "grid must be one of"),
        (lambda mode: mode.update(rotation=3), "rotation must be a JSON object"),
        (lambda mode: mode["rotation"].update(rounds=7), "rounds must be 1 or 2"),
        (lambda mode: mode["rotation"].update(rounds=None), "rounds must be int"),
        (lambda mode: mode.update(codebook=None), "codebook must be given"),
        (lambda mode: mode["codebook"].update(levels=3), "levels must be a list"),
        (lambda mode: mode["codebook"]["levels"].pop(), "thresholds must hold one number fewer"),
        (lambda mode: mode["codebook"]["levels"].reverse(), "levels must be strictly increasing"),
        (lambda mode: mode["codebook"]["levels"].insert(0, "x"), r"levels\[0\] must be float"),
        (lambda mode: mode["codebook"]["levels"].__setitem__(3, -0.1), "must hold finite float32"),
        (
            lambda mode: mode["codebook"]["levels"].__setitem__(0, 10**400),
            r"levels\[0\] must be a float, got an integer past its range",
        ),
        (
            lambda mode: mode["codebook"]["provenance"].update(versions=[["numpy"]]),
            r"versions\[0\] must hold 2 items, got 1",
        ),
        (lambda mode: mode["codebook"].update(name="other"), "mode must be the one mode of its"),
    ],
)
def test_modes_refused(change: Any, message: str, encoded: Encoded, tmp_path: Path) -> None:
    path = tmp_path / "encoded.safetensors"
    save_encoded(path, encoded)
    rewrite(path, _metadata("modes", lambda modes: change(modes[kvq.mode("lloyd3").name])))
    with pytest.raises(FileFormatError, match=message):
        load_encoded(path)


def test_a_field_that_a_file_lacks_takes_its_default() -> None:
    record = to_json(kvq.mode("int4"))
    del record["rotation"]["seed"], record["codebook"]
    assert from_json(kvq.Mode, record, "mode") == kvq.mode("int4")


def test_one_name_stands_for_one_mode(encoded: Encoded) -> None:
    impostor = replace(MADE[0], scale_fit=kvq.ScaleFit.UNIT)
    key, value = encoded.layers[0]
    layers = {**encoded.layers, 7: EncodedLayer(key, value._replace(mode=impostor))}
    with pytest.raises(ValueError, match=r"layers\.7\.value\.mode must be the one mode"):
        replace(encoded, layers=layers)
    with pytest.raises(ValueError, match="layers must hold at least one layer"):
        replace(encoded, layers={})


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 and the rest", "pickle or a zip"),
        (b"\x80\x04K\x01.", "pickle or a zip"),
        (b"plain text, and more of it", "not a valid safetensors file"),
    ],
)
def test_other_files_refused(contents: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(contents)
    with pytest.raises(FileFormatError, match=message):
        load_encoded(path)


def test_truncated_and_foreign_files_refused(encoded: Encoded, tmp_path: Path) -> None:
    path = tmp_path / "encoded.safetensors"
    save_encoded(path, encoded)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(FileFormatError, match="not a valid safetensors file"):
        load_encoded(path)
    path.write_bytes(whole)
    rewrite(path, lambda _, metadata: metadata.update({SCHEMA_KEY: "kvq-encoded/2"}))
    with pytest.raises(FileFormatError, match="schema must be kvq-encoded/1"):
        load_encoded(path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_encoded(tmp_path / "missing")


def test_every_field_of_a_mode_is_in_its_record() -> None:
    assert set(to_json(kvq.mode("lloyd2"))) == {
        field.name for field in fields(kvq.Mode) if field.init
    }


def test_changed_bytes_are_read_or_refused(encoded: Encoded, tmp_path: Path) -> None:
    """Whatever the bytes of the header: an encoded file, or a `FileFormatError` and no other."""
    path = tmp_path / "encoded.safetensors"
    save_encoded(path, encoded)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for place in (*range(10), *range(10, header, 11)):
        for bit in (1, 0x20, 0x80):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            try:
                load_encoded(path)
            except FileFormatError as error:
                refused += str(error).startswith(f"{path}: ")
    assert refused > header // 11
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError):
            load_encoded(path)
