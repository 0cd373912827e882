"""Conformance vectors: against the independent oracle, and the same bytes each time."""

from __future__ import annotations

import hashlib
import json
import math
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq.analysis.planted_rows import KINDS
from kvq.conformance.attention import PAGED
from kvq.conformance.manifest import (
    INPUTS,
    MANIFEST,
    PARTS,
    Manifest,
    pick,
    read_file,
    read_manifest,
    tensor_sha256,
)
from kvq.conformance.vectors import DTYPES, KIND_TEXTS, export_vectors, vector_mode
from kvq.modes import INT4_FIRST_IMPLEMENTATION, MODES
from tests.compare import assert_bit_exact
from tests.expected import _decode, expected, sign_rows

MODE_NAMES = (
    *("int8", "fp8", "int4", "int4@first_implementation", "affine4", "int2", "lloyd3"),
    *("smax2_search_norm_match_w16", "trellis2"),
)
HEAD_DIMS = (32, 96)
ROWS = 2 * len(KINDS) + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vectors")
    export_vectors(
        made, [vector_mode(name) for name in MODE_NAMES], head_dims=HEAD_DIMS, rows=ROWS
    )
    return made


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return read_manifest(folder / MANIFEST)


@pytest.fixture(scope="module")
def inputs(folder: Path) -> dict[str, Tensor]:
    return read_file(folder / INPUTS)


def parts_of(folder: Path, manifest: Manifest, name: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of a mode by dtype and head size, then by part."""
    mode = vector_mode(name)
    path = folder / f"{mode.name}.safetensors"
    tensors = read_file(path)
    return {
        f"{case.dtype}.{case.head_dim}": pick(path, tensors, case.tensors, f"{case.key}.")
        for case in manifest.cases
        if case.mode == mode.name
    }


@pytest.mark.parametrize("name", MODE_NAMES)
def test_what_is_written_and_read(
    name: str, folder: Path, manifest: Manifest, inputs: dict[str, Tensor]
) -> None:
    mode = vector_mode(name)
    cases = parts_of(folder, manifest, name)
    assert list(cases) == [f"{dtype}.{dim}" for dim in HEAD_DIMS for dtype in DTYPES]
    for form, parts in cases.items():
        x = inputs[f"{form}.x"]
        assert x.dtype is DTYPES[form.partition(".")[0]]
        assert len(x) == ROWS
        for part, right in expected(x, mode)._asdict().items():
            assert_bit_exact(parts[part], right, f"{name} {form} {part}")
        rotated = [torch.from_numpy(row) for row in sign_rows(mode.rotation, x.shape[1])]
        assert ("signs" in parts) == bool(rotated)
        if rotated:
            assert torch.equal(parts["signs"], torch.stack(rotated))


@pytest.mark.parametrize("name", MODE_NAMES)
def test_attention(name: str, folder: Path, manifest: Manifest, inputs: dict[str, Tensor]) -> None:
    """The definition, in numpy, over rows that the oracle reads in float32: near, not equal."""
    mode = vector_mode(name)
    table, starts = (inputs[key].tolist() for key in ("block_table", "query_start_loc"))
    for form, parts in parts_of(folder, manifest, name).items():
        query = inputs[f"{form}.query"].double().numpy()
        head_dim = query.shape[2]
        output, allowed = parts["output"].numpy(), parts["allowed"].numpy()
        assert output.shape == query.shape
        assert (allowed > 0).all()
        for sequence, length in enumerate(PAGED.seq_lens):
            first, last = starts[sequence : sequence + 2]
            blocks = table[sequence][: -(-length // PAGED.block_size)]
            for head in range(PAGED.query_heads):
                rows = []
                for side in ("key", "value"):
                    codes, words = (
                        parts[f"{side}_{part}"][blocks, head // 2].flatten(0, 1)[:length]
                        for part in ("codes", "words")
                    )
                    bits = words.numpy().view(np.uint16 if words.itemsize == 2 else np.uint32)
                    with np.errstate(all="ignore"):
                        rows.append(_decode(codes.numpy(), bits, mode, head_dim).astype(float))
                for token in range(first, last):
                    seen = length - last + token + 1
                    logits = rows[0][:seen] @ query[token, head] / math.sqrt(head_dim)
                    weights = np.exp(logits - logits.max())
                    right = weights / weights.sum() @ rows[1][:seen]
                    np.testing.assert_allclose(output[token, head], right, rtol=0, atol=3e-6)


def test_what_is_not_written_is_poison(folder: Path, manifest: Manifest) -> None:
    parts = parts_of(folder, manifest, "int4")["float32.32"]
    for side in ("key", "value"):
        words, codes = parts[f"{side}_words"], parts[f"{side}_codes"]
        written = words.isfinite()
        assert int(written.sum()) == sum(PAGED.seq_lens) * PAGED.kv_heads
        assert (codes[~written] == 0xFF).all()
        assert not written[3].any()  # the page that tables name past the end


def test_rows_are_of_the_kinds_they_say(manifest: Manifest, inputs: dict[str, Tensor]) -> None:
    assert tuple(KIND_TEXTS) == KINDS
    assert [kind.name for kind in manifest.kinds] == list(KINDS)
    x = inputs["float32.32.x"]
    by_kind = {
        kind: x[[row for row, name in enumerate(manifest.row_kinds) if name == kind]]
        for kind in KINDS
    }
    assert sum(map(len, by_kind.values())) == ROWS
    assert not by_kind["zeros"].any()
    assert not by_kind["not_finite"].isfinite().all(-1).any()
    assert (by_kind["spike_in_channel_0"][:, 0].abs() == 100).all()
    assert ((by_kind["one_hot"] != 0).sum(-1) == 1).all()
    assert (by_kind["constant"].abs() == 3).all()
    assert by_kind["subnormal"].abs().max() < 2.0**-126
    ties = by_kind["int8_ties"].double()
    halves = ties / (ties.abs().amax(-1, keepdim=True) / 127) * 2
    assert torch.equal(halves, halves.round())


def test_the_manifest_says_what_is_in_the_files(folder: Path, manifest: Manifest) -> None:
    assert [mode.name for mode in manifest.modes] == [vector_mode(n).name for n in MODE_NAMES]
    assert dict(manifest.versions)["torch"] == version("torch")
    described = {record.name: record for case in manifest.cases for record in case.tensors}
    described |= {record.name: record for record in manifest.inputs}
    held = {}
    for path in folder.glob("*.safetensors"):
        held |= read_file(path)
    assert set(held) == set(described)
    for name, tensor in held.items():
        record = described[name]
        assert record.shape == tuple(tensor.shape)
        assert f"torch.{record.dtype}" == str(tensor.dtype)
        assert record.sha256 == tensor_sha256(tensor)
    for case in manifest.cases:
        prefix = f"{case.mode}.{case.dtype}.{case.head_dim}."
        parts = {record.name.removeprefix(prefix) for record in case.tensors}
        assert parts == set(PARTS) - (set() if manifest.mode(case).rotation else {"signs"})
        assert case.scale == case.head_dim**-0.5


def test_a_digest_is_of_the_bytes() -> None:
    # 1.0 in little endian, and a matrix whose last axis is the fastest.
    one = hashlib.sha256(b"\x00\x00\x80\x3f").hexdigest()
    assert tensor_sha256(torch.tensor(1.0)) == one
    matrix = torch.tensor([[1, 3], [2, 4]], dtype=torch.uint8)
    assert tensor_sha256(matrix.T) == hashlib.sha256(b"\x01\x02\x03\x04").hexdigest()


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    modes = [MODES["int4_per_token_head"], MODES["int8_per_token_head"]]
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for made, seed in zip(folders, (5, 5, 6), strict=True):
        export_vectors(made, modes, head_dims=[32], dtypes=["float16"], rows=20, seed=seed)
    names = sorted(path.name for path in folders[0].iterdir())
    assert len(names) == 4
    for name in names:
        one, two, three = ((made / name).read_bytes() for made in folders)
        assert one == two, name
        assert one != three, name


def test_more_rows_begin_with_fewer(tmp_path: Path) -> None:
    modes = [MODES["int8_per_token_head"]]
    for rows in (20, 50):
        export_vectors(tmp_path / str(rows), modes, head_dims=[32], dtypes=["float32"], rows=rows)
    few, many = (read_file(tmp_path / name / INPUTS)["float32.32.x"] for name in ("20", "50"))
    assert_bit_exact(many[:20], few)


def test_the_modes_there_are() -> None:
    assert vector_mode("int4@first_implementation") is INT4_FIRST_IMPLEMENTATION
    assert vector_mode("int4") is MODES["int4_per_token_head"]
    with pytest.raises(ValueError, match="mode must be one of"):
        vector_mode("int5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dims": [72]}, "head_dim must be divisible by 16, for rows that are planted"),
        ({"head_dims": [0]}, "head_dim must be divisible by 16"),
        ({"head_dims": [32, 32]}, "head_dims must differ, at least one"),
        ({"head_dims": []}, "head_dims must differ, at least one"),
        ({"dtypes": ["float64"]}, "dtype must be one of float32, float16, bfloat16"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"seed": -1}, "seed must be between 0 and"),
        ({"modes": []}, "modes must differ, at least one"),
    ],
)
def test_arguments_that_are_refused(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    modes = arguments.pop("modes", [MODES["int8_per_token_head"]])
    with pytest.raises(ValueError, match=message):
        export_vectors(tmp_path / "none", modes, **arguments)
    assert not (tmp_path / "none").exists()


def edited(folder: Path, tmp_path: Path, change) -> Path:
    document = json.loads((folder / MANIFEST).read_text())
    change(document)
    path = tmp_path / MANIFEST
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="kvq-vectors/0"), "schema must be kvq-vectors/1"),
        (lambda d: d.update(rows=3), "row_kinds must name 3 kinds"),
        (lambda d: d.pop("cases"), "manifest.cases must be present"),
        (lambda d: d["modes"].pop(), "modes must hold trellis2_per_token_head once, got 0"),
        (lambda d: d["cases"][0].update(file="../x"), "file must be in the folder of the manife"),
        (
            lambda d: d["cases"][3]["tensors"].pop(2),
            "tensors must include int8_per_token_head.float32.96.key_codes, got no such tensor",
        ),
        (lambda d: d["inputs"].pop(), "tensors must include seq_lens, got no such tensor"),
        (
            lambda d: d["inputs"][3].update(shape=[42, 32]),
            r"bfloat16.96.x must have 43 rows, got \[42, 32\]",
        ),
        (lambda d: d["cases"][0].update(head_dim="x"), "head_dim must be int, got 'x'"),
    ],
)
def test_manifests_that_are_refused(change, message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        read_manifest(edited(folder, tmp_path, change))
    assert str(failure.value).startswith(str(tmp_path / MANIFEST))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_what_is_no_manifest(text: str, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_text(text)
    with pytest.raises(ValueError, match=MANIFEST):
        read_manifest(path)
