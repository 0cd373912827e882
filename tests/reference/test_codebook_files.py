"""Codebook files: what is saved comes back, and nothing else is let in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvq.codebook_files import SCHEMA, load_codebook, save_codebook
from kvq.codebooks import CODEBOOKS, Codebook, Provenance, Recipe
from kvq.files import SCHEMA_KEY, FileFormatError, identify
from kvq.reference.lloyd_max import fit, fit_samples

GAUSSIAN = CODEBOOKS["gaussian_4"]
Parts = tuple[dict[str, Tensor], dict[str, str]]


def parts(path: Path) -> Parts:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def sealed(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Parts:
    """With the digest that the format's description asks for, so that another fault shows."""
    raw = b"".join(tensors[name].numpy().tobytes() for name in ("levels", "thresholds"))
    raw += b"".join(metadata[name].encode() + b"\0" for name in ("name", "recipe", "provenance"))
    return tensors, {**metadata, "sha256": hashlib.sha256(raw).hexdigest()}


def test_codebooks_round_trip(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).standard_normal(500)
    fitted = [
        fit("sphere(128)", 5).codebook,
        fit("expon", 256, name="x.y-z_1").codebook,
        fit_samples(samples, 3, weights=np.abs(samples), source='a "b"\n\u00e9').codebook,
    ]
    for codebook in [*CODEBOOKS.values(), *fitted]:
        path = tmp_path / "deep" / f"{codebook}.safetensors"
        save_codebook(path, codebook)
        loaded = load_codebook(path)
        assert loaded == codebook
        assert all(type(level) is float for level in loaded.levels + loaded.thresholds)
        assert identify(path) == SCHEMA == "kvq-codebook/1"
        before = path.read_bytes()
        save_codebook(path, loaded)
        assert path.read_bytes() == before


@given(
    levels=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2),
)
def test_any_levels_round_trip(levels: list[float], tmp_path: Path) -> None:
    # Two float32 numbers always have a threshold between them; more may round to one.
    distinct = sorted({level + 0.0 for level in levels})[::3]
    if len(distinct) < 2:
        return
    recipe = Recipe("samples", len(distinct), symmetric=False)
    codebook = Codebook.from_exact("any", tuple(distinct), recipe, Provenance("here"))
    save_codebook(tmp_path / "any", codebook)
    assert load_codebook(tmp_path / "any") == codebook


def test_the_digest_is_the_documented_one(tmp_path: Path) -> None:
    save_codebook(tmp_path / "book", GAUSSIAN)
    found = parts(tmp_path / "book")
    assert sealed(*found)[1] == found[1]
    assert {name: tensor.dtype for name, tensor in found[0].items()} == {
        "levels": torch.float32,
        "thresholds": torch.float32,
    }


def test_a_fit_can_be_made_again_from_a_file(tmp_path: Path) -> None:
    save_codebook(tmp_path / "book", fit("signed_max(64)", 6).codebook)
    recipe = load_codebook(tmp_path / "book").recipe
    again = fit(recipe.distribution, recipe.num_levels, symmetric=recipe.symmetric)
    assert again.codebook == load_codebook(tmp_path / "book")


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    # Every byte of the file, and not only of the data.
    path = tmp_path / "book.safetensors"
    save_codebook(path, GAUSSIAN)
    raw = path.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    for place in range(len(raw)):
        for bit in (1, 0x80) if place >= header else (1,):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1 :])
            with pytest.raises(FileFormatError, match=r"book\.safetensors: "):
                load_codebook(path)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "book.safetensors"
    save_codebook(path, GAUSSIAN)
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(FileFormatError, match=r"book\.safetensors: "):
            load_codebook(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(FileFormatError, match="not a valid safetensors file"):
        load_codebook(path)


def replaced(tensor: str, *values: float) -> Callable[[Parts], Parts]:
    def change(found: Parts) -> Parts:
        return sealed({**found[0], tensor: torch.tensor(values)}, found[1])

    return change


def text(name: str, value: str) -> Callable[[Parts], Parts]:
    return lambda found: sealed(found[0], {**found[1], name: value})


def field(name: str, key: str, value: object) -> Callable[[Parts], Parts]:
    def change(found: Parts) -> Parts:
        record = {**json.loads(found[1][name]), key: value}
        return text(name, json.dumps(record))(found)

    return change


INFINITE = float("inf")
NAN = float("nan")
FAULTS: dict[str, tuple[Callable[[Parts], Parts], str]] = {
    "nan level": (replaced("levels", -1.5, NAN, 0.5, 1.5), "levels must hold finite"),
    "nan threshold": (replaced("thresholds", -1.0, NAN, 1.0), "thresholds must hold finite"),
    "infinite": (replaced("levels", -1.5, -0.5, 0.5, INFINITE), "levels must hold finite"),
    "unsorted": (replaced("levels", -0.5, -1.5, 0.5, 1.5), "levels must be strictly increasing"),
    "duplicate": (replaced("levels", -1.5, 0.5, 0.5, 1.5), "levels must be strictly increasing"),
    "outside": (replaced("thresholds", -1.0, 0.0, 2.0), "thresholds must lie between"),
    "too few levels": (replaced("levels", -1.5, -0.5, 0.5), "thresholds must hold one number"),
    "too few thresholds": (replaced("thresholds", -1.0, 1.0), "thresholds must hold one number"),
    "no levels": (replaced("levels"), "levels must hold 2 to 256 numbers, got 0"),
    "float64": (
        lambda found: sealed({**found[0], "levels": found[0]["levels"].double()}, found[1]),
        r"levels must be a vector of float32, got float64 \[4\]",
    ),
    "matrix": (
        lambda found: sealed({**found[0], "levels": found[0]["levels"].view(2, 2)}, found[1]),
        r"levels must be a vector of float32, got float32 \[2, 2\]",
    ),
    "extra tensor": (
        lambda found: ({**found[0], "more": torch.zeros(1)}, found[1]),
        "tensors must be levels, thresholds, got levels, more, thresholds",
    ),
    "missing tensor": (
        lambda found: ({"levels": found[0]["levels"]}, found[1]),
        "tensors must be levels, thresholds, got levels",
    ),
    "extra metadata": (lambda found: (found[0], {**found[1], "more": "1"}), "metadata must be"),
    "missing metadata": (
        lambda found: (found[0], {k: v for k, v in found[1].items() if k != "recipe"}),
        "metadata must be",
    ),
    "no digest": (
        lambda found: (found[0], {k: v for k, v in found[1].items() if k != "sha256"}),
        "metadata must be",
    ),
    "another digest": (lambda found: (found[0], {**found[1], "sha256": "0" * 64}), "sha256 must"),
    "another level": (
        lambda found: ({**found[0], "levels": found[0]["levels"] * 0.99}, found[1]),
        "sha256 must be that of its contents",
    ),
    "unknown schema": (text(SCHEMA_KEY, "kvq-codebook/2"), "schema must be kvq-codebook/1, got"),
    "another schema": (text(SCHEMA_KEY, "kvq-activations/1"), "schema must be kvq-codebook/1"),
    "no name": (text("name", ""), "name must be made of"),
    "bad name": (text("name", "../up"), "name must be made of"),
    "no json": (text("recipe", "{"), "Expecting property name"),
    "another json": (text("recipe", "[1]"), "recipe must be"),
    "null": (text("provenance", "null"), "provenance must be"),
    "deep json": (text("recipe", "[" * 100_000), "recursion"),
    "wrong count": (field("recipe", "num_levels", 5), "recipe.num_levels must be 4, got 5"),
    "text for a number": (field("recipe", "num_levels", "4"), "num_levels must be"),
    "number for a truth": (field("recipe", "symmetric", 1), "symmetric must be"),
    "unknown field": (field("recipe", "colour", "red"), "colour"),
    "versions": (field("provenance", "versions", [["numpy"]]), "versions"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, tmp_path: Path) -> None:
    change, reason = FAULTS[fault]
    path = tmp_path / "book.safetensors"
    save_codebook(path, GAUSSIAN)
    tensors, metadata = change(parts(path))
    save_file(tensors, path, metadata)
    with pytest.raises(FileFormatError, match=rf"^.*book\.safetensors: .*{reason}"):
        load_codebook(path)


class Trap:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("sprung"),))


def test_pickles_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "book.safetensors"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Trap(), protocol=protocol))
        with pytest.raises(FileFormatError, match=r"book\.safetensors: "):
            load_codebook(path)
    for zipped in (True, False):
        torch.save({"trap": Trap()}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(FileFormatError, match="pickle"):
            load_codebook(path)
    assert not (tmp_path / "sprung").exists()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="missing: cannot be read"):
        load_codebook(tmp_path / "missing")
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_codebook(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(FileFormatError, match="empty: is empty"):
        load_codebook(tmp_path / "empty")
    (tmp_path / "text").write_text("levels: 1 2 3 4\n" * 10)
    with pytest.raises(FileFormatError, match="text: "):
        load_codebook(tmp_path / "text")
    save_file({"levels": torch.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(FileFormatError, match="not one of ours"):
        load_codebook(tmp_path / "foreign")


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    save_codebook(tmp_path / "c", CODEBOOKS["gaussian_4"])
    assert (tmp_path / "c").stat().st_mode == plain.stat().st_mode


def test_codebooks_stay_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GAUSSIAN.levels = ()  # type: ignore[misc]
