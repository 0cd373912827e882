"""Files that are broken in any way: each is read and is sound, or is refused and told why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import kvq
from kvq.activations import Activations, LayerActivations, load_activations, save_activations
from kvq.analysis import report
from kvq.calibration_files import (
    Calibration,
    LayerCalibration,
    load_calibration,
    save_calibration,
)
from kvq.cli import app
from kvq.codebook_files import load_codebook, save_codebook
from kvq.codebooks import CODEBOOKS
from kvq.encoded_files import encode_activations, load_encoded, save_encoded
from kvq.files import FileFormatError
from kvq.records import to_json
from kvq.rotary import RotaryLayout, RotarySpec
from tests.fuzz.contained import contained
from tests.fuzz.mutations import changed_json, mutants
from tests.fuzz.strategies import examples

ROTARY = RotarySpec((1.0, 0.25), 4, RotaryLayout.INTERLEAVED, 1.25)


class Format(NamedTuple):
    """How files of a format are read and written."""

    load: Callable[[Path], Any]
    save: Callable[[Path, Any], None]


FORMATS = {
    "codebook": Format(load_codebook, save_codebook),
    "activations": Format(load_activations, save_activations),
    "encoded": Format(load_encoded, save_encoded),
    "calibration": Format(load_calibration, save_calibration),
}


def contents_of(name: str) -> list[Any]:
    """What valid files of a format hold."""
    generator = torch.Generator().manual_seed(1)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if name == "codebook":
        return [CODEBOOKS["gaussian_4"], CODEBOOKS["signed_max_4"]]
    if name == "calibration":
        pairs = rows(2, 4).abs().repeat_interleave(2, 1)[:, :6]
        layer = LayerCalibration(rows(2, 6), pairs)
        return [Calibration(ROTARY, {0: layer, 7: layer}, {"model": "drawn"})]
    positions = torch.arange(2, 5)
    layers = {
        0: LayerActivations(rows(2, 4, 16), rows(3, 2, 16), rows(3, 2, 16).bfloat16()),
        3: LayerActivations(None, rows(3, 1, 16), rows(3, 1, 32).half()),
    }
    drawn = Activations(layers, positions, positions[1:], 0.25, ROTARY, {"model": "drawn"})
    if name == "activations":
        return [drawn]
    fitted = kvq.mode("lloyd2").with_codebook(CODEBOOKS["signed_max_4"])
    pairs = ((fitted, "int8"), ("int4", "trellis3_norm_match_w16"))
    return [
        encode_activations(drawn, *(kvq.mode(m) if isinstance(m, str) else m for m in pair))
        for pair in pairs
    ]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """The bytes of valid files by the name of their format."""
    path = tmp_path_factory.mktemp("valid") / "file"
    found: dict[str, list[bytes]] = {}
    for name, form in FORMATS.items():
        for contents in contents_of(name):
            form.save(path, contents)
            # What is imported late is imported now.
            assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code == 0
            found.setdefault(name, []).append(path.read_bytes())
    return found


@pytest.mark.parametrize("name", FORMATS)
@examples(200)
@given(data=st.data())
def test_read_or_refused(
    name: str, data: st.DataObject, valid: dict[str, list[bytes]], tmp_path: Path
) -> None:
    form, path = FORMATS[name], tmp_path / "mutant"
    path.write_bytes(data.draw(mutants(valid[name])))
    try:
        with contained():
            found = form.load(path)
    except FileFormatError as error:
        reason = str(error)
        note(reason)
        assert reason.startswith(f"{path}: ")
        assert len(reason) > len(f"{path}: ") + 3
        return
    # What was read is sound: it can be written, and is the same when it is read again.
    form.save(tmp_path / "once", found)
    form.save(tmp_path / "twice", form.load(tmp_path / "once"))
    assert (tmp_path / "once").read_bytes() == (tmp_path / "twice").read_bytes()


def inspect(path: Path, *options: str) -> Result:
    with contained():
        return CliRunner().invoke(app, ["inspect", str(path), *options])


def check_inspected(result: Result, *, json_wanted: bool, codes: tuple[int, ...] = (0, 2)) -> None:
    """An exit code that means something, and a result or one line that says why not."""
    note(result.output)
    assert result.exit_code in codes, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit | None)
    for text in (result.stdout, result.stderr):
        assert all(line.isprintable() for line in text.split("\n")), "a terminal would obey"
    if result.exit_code == 2:
        assert not result.stdout
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
    elif json_wanted:
        json.loads(result.stdout)
    else:
        assert result.stdout.strip()


@examples(150)
@given(data=st.data())
def test_inspect(data: st.DataObject, valid: dict[str, list[bytes]], tmp_path: Path) -> None:
    path = tmp_path / "mutant"
    name = data.draw(st.sampled_from(tuple(FORMATS)))
    path.write_bytes(data.draw(mutants(valid[name])))
    json_wanted = data.draw(st.booleans())
    check_inspected(inspect(path, *["--json"][:json_wanted]), json_wanted=json_wanted)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a manifest."""
    return json.dumps(
        {
            "schema": report.SCHEMA,
            "input": {"name": "drawn", "sha256": "ab" * 32},
            "options": {
                "seed": 3,
                "modes": [to_json(kvq.mode("int4")), to_json(kvq.mode("int2"))],
            },
            "files": {"index.html": "cd" * 32, "tables/a.csv": "ef" * 32},
            "versions": {"kvq": "0", "torch": "2"},
            "machine": {"cpu": "some"},
        }
    )


@examples(100)
@given(data=st.data())
def test_inspect_a_manifest(data: st.DataObject, manifest: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(data.draw(changed_json(manifest)))
    json_wanted = data.draw(st.booleans())
    result = inspect(path, *["--json"][:json_wanted])
    check_inspected(result, json_wanted=json_wanted, codes=(0, 1, 2))
