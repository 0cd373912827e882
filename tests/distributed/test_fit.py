"""Counting files: the same integers, so the same codebook, however the work is cut and shared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvq
from kvq.analysis.file_values import Counted, count_files, find_files
from kvq.analysis.normalized_values import activation_values
from kvq.analysis.value_histogram import PER_UNIT, SCHEMA
from kvq.calibration_files import Calibration, LayerCalibration, save_calibration
from kvq.codebook_files import load_codebook
from kvq.distributed import Processes, processes
from kvq.files import FileFormatError, file_sha256, read_tensors, write_tensors
from kvq.reference import lloyd_max
from tests.distributed.launch import LIMIT, run_processes, torchrun
from tests.distributed.shards import CUTS, DIMS, HEADS, ROTARY, TOKENS, drawn, save_shards
from tests.test_cli import error, run_json

CALIBRATION = Calibration(
    ROTARY, {i: LayerCalibration(torch.ones(HEADS, 32), torch.ones(HEADS, 32)) for i in (0, 2)}
)
COUNTED = [
    Counted(kvq.mode("lloyd4")),
    Counted(kvq.mode("lloyd4"), weighted=True),
    Counted(kvq.mode("smax3"), weighted=True, sides=["key"], layers=[2], heads=[1]),
    Counted(kvq.mode("lloyd2"), calibration=CALIBRATION),
]


def counted_by_all(folder: Path, turned: bool = False) -> tuple[list[tuple[str, int]], Any]:
    """What a process of a group finds: digests, numbers of values, levels of the last."""
    found = []
    with processes() as together:
        for counted in COUNTED:
            paths = find_files([folder])
            histogram, _ = count_files(paths[::-1] if turned else paths, counted, together)
            found.append((histogram.sha256, histogram.count))
        fitted = lloyd_max.fit_masses(*histogram.law(), 8)
    return found, fitted.exact_levels


def test_any_number_of_processes_and_files(tmp_path: Path) -> None:
    for name in ("three", "one"):
        (tmp_path / name).mkdir()
    save_shards(tmp_path / "three")
    save_shards(tmp_path / "one", (0, TOKENS))
    expected = counted_by_all(tmp_path / "three")
    counts = [count for _, count in expected[0]]
    assert len(set(expected[0])) == len(COUNTED)
    # The first row is zeros, which meet no threshold.
    rows = TOKENS - 1
    assert counts[0] == counts[1] == 2 * rows * HEADS * sum(DIMS)
    assert counts[2] == rows * DIMS[0]
    assert counted_by_all(tmp_path / "one") == expected
    assert counted_by_all(tmp_path / "three", turned=True) == expected
    # One process of four has no file.
    for size, turned in ((2, False), (4, True)):
        assert run_processes(size, counted_by_all, tmp_path / "three", turned) == [expected] * size


def refused_by_all(folder: Path) -> str:
    with processes() as together:
        one = torch.full((2,), 2**62 // (1 + together.rank))
        try:
            together.sum(one)
        except ValueError as raised:
            return str(raised)
    return "no error"


def test_sums_that_could_overflow_are_refused_in_every_process(tmp_path: Path) -> None:
    messages = run_processes(2, refused_by_all, tmp_path)
    assert messages == [f"sums must stay below 2^63, got up to {2**62} to add up"] * 2
    with processes() as alone, pytest.raises(TypeError, match="x must be int64"):
        alone.sum(torch.ones(2))


def test_the_end_of_another_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: Any) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:18145")

    for name in ("all_reduce", "all_gather_object"):
        monkeypatch.setattr(torch.distributed, name, closed)
    together = Processes(0, 2)
    for call, argument in (
        (together.sum, torch.ones(1, dtype=torch.int64)),
        (together.largest, torch.ones(1, dtype=torch.int64)),
        (together.gather, "item"),
    ):
        with pytest.raises(ConnectionError, match="another process has failed"):
            call(argument)  # type: ignore[operator]


@pytest.mark.parametrize("counted", COUNTED[:2], ids=["counts", "weights"])
def test_the_histogram_is_that_of_the_values(counted: Counted, tmp_path: Path) -> None:
    (path,) = save_shards(tmp_path, (0, TOKENS))
    histogram, sha256 = count_files([path], counted)
    assert sha256 == {path: file_sha256(path)}
    values = activation_values(drawn(), counted.mode)
    exact = values.values.double().numpy()
    masses = values.weights.double().numpy() if counted.weighted else np.ones(exact.size)
    points, where = np.unique(np.rint(exact * PER_UNIT), return_inverse=True)
    law = histogram.law()
    np.testing.assert_array_equal(law[0], points / PER_UNIT)
    np.testing.assert_allclose(law[1], np.bincount(where, masses), rtol=1e-13)
    # Slices of a token, of some, and of all.
    (path,) = save_shards(tmp_path, (0, 20))
    expected = count_files([path], counted)[0].sha256
    for numbers in (1, 200):
        assert count_files([path], counted, numbers=numbers)[0].sha256 == expected


def test_rounding_costs_nothing() -> None:
    """The error of a codebook on the histogram, and that of the codebook fitted to it."""
    from importlib.resources import as_file, files

    from kvq.activations import load_activations

    with as_file(files("kvq.data") / "smollm2-135m-kjv.safetensors") as path:
        values = activation_values(load_activations(path), kvq.mode("lloyd4")).values
        points, masses = count_files([path], Counted(kvq.mode("lloyd4"))).histogram.law()
    x = values.double().numpy()

    def distortion(levels: tuple[float, ...], x: np.ndarray, masses: np.ndarray) -> float:
        thresholds = (np.array(levels[1:]) + levels[:-1]) / 2
        offset = x - np.array(levels)[np.searchsorted(thresholds, x)]
        return float((masses * offset**2).sum() / masses.sum())

    ones = np.ones(x.size)
    shipped = kvq.CODEBOOKS["gaussian_16"].levels
    assert distortion(shipped, points, masses) == pytest.approx(
        distortion(shipped, x, ones), rel=1e-7
    )
    # Fixed points that Lloyd's iteration ends in differ by more than the histogram does.
    fitted = lloyd_max.fit_masses(points, masses, 16)
    best = lloyd_max.fit_samples(values.numpy(), 16)
    assert fitted.certificate.converged
    assert distortion(fitted.exact_levels, x, ones) == pytest.approx(best.distortion, rel=3e-6)
    assert fitted.distortion == pytest.approx(best.distortion, rel=3e-6)


def test_interrupted_in_one_process_and_resumed_in_another_number(tmp_path: Path) -> None:
    """Under torchrun: one of two processes is killed, four go on, and the file is the same."""
    shards, kept, logs = (tmp_path / name for name in ("shards", "kept", "logs"))
    shards.mkdir()
    save_shards(shards, (0, 90, 170, 250, 330, 410, TOKENS))
    calibration = tmp_path / "calibration.safetensors"
    save_calibration(calibration, CALIBRATION)
    options = ["--base", "smax4", "--levels", "6", "--name", "shared", "--json"]
    options += ["--calibration", str(calibration)]
    alone, out = tmp_path / "alone.safetensors", tmp_path / "out.safetensors"
    document = run_json("fit", "--from", shards, *options[:-3], *options[-2:], "--out", alone)
    assert document["codebook"]["recipe"]["weighted"] is True
    assert "6 files" in document["codebook"]["provenance"]["source"]

    def start(size: int, *program: str) -> subprocess.CompletedProcess[str]:
        # As a shell expands a pattern.
        given = ["fit", "--from", *map(str, sorted(shards.iterdir())), *options]
        command = torchrun(size, *program, *given, "--out", out, "--resume", kept, folder=logs)
        return subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, check=False, env=environment
        )

    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    killed = start(2, "-m", "tests.distributed.killed")
    assert killed.returncode != 0
    assert f"Signal {signal.SIGKILL.value}" in killed.stderr
    assert not out.exists()
    before = {path.name: path.read_bytes() for path in kept.glob("*.safetensors")}
    assert 1 <= len(before) < 6
    times = {name: (kept / name).stat().st_mtime_ns for name in before}

    done = start(4, "-m", "kvq")
    assert done.returncode == 0, done.stderr
    # One process has printed, and one document.
    assert json.loads(done.stdout)["codebook"] == document["codebook"]
    assert out.read_bytes() == alone.read_bytes()
    assert load_codebook(out).num_levels == 6
    after = {path.name for path in kept.glob("*.safetensors")}
    assert len(after) == 6
    assert {name: (kept / name).stat().st_mtime_ns for name in before} == times


@pytest.mark.gpu
def test_two_devices(tmp_path: Path) -> None:
    """NCCL under torchrun, and the file of one process on the CPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, found {torch.cuda.device_count()}")
    shards, alone, out = (tmp_path / name for name in ("shards", "alone.st", "out.st"))
    shards.mkdir()
    save_shards(shards)
    options = ["--base", "lloyd4", "--weigh", "--levels", "16", "--name", "shared"]
    run_json("fit", "--from", shards, *options, "--out", alone)
    given = ["-m", "kvq", "fit", "--from", shards, *options, "--out", out, "--device", "cuda"]
    done = subprocess.run(
        torchrun(2, *given, folder=tmp_path / "logs"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == alone.read_bytes()


def test_what_is_kept_is_of_the_same_bytes_and_options(tmp_path: Path) -> None:
    paths = save_shards(tmp_path, CUTS)
    kept = tmp_path / "kept"
    first = count_files(paths, COUNTED[0], resume=kept).histogram
    assert len(list(kept.iterdir())) == 3
    document = run_json("inspect", next(kept.iterdir()))
    assert document["schema"] == SCHEMA
    assert document["made of"] in map(COUNTED[0].made_of, map(file_sha256, paths))
    with pytest.raises(ValueError, match="resume must be a folder without activation files"):
        count_files(paths, COUNTED[0], resume=tmp_path)
    # Other options, or another file under the same name, are counted anew.
    other = count_files(paths, COUNTED[1], resume=kept).histogram
    assert len(list(kept.iterdir())) == 6
    assert other.sha256 == count_files(paths, COUNTED[1]).histogram.sha256 != first.sha256
    paths[0].write_bytes(paths[1].read_bytes())
    again = count_files(paths, COUNTED[0], resume=kept).histogram
    assert again.sha256 == count_files(paths, COUNTED[0]).histogram.sha256 != first.sha256
    assert len(list(kept.iterdir())) == 6  # that of the second file serves both
    # The same values by another mode of the same rotation and normalization.
    count_files(paths, replace(COUNTED[0], mode=kvq.mode("lloyd2")), resume=kept)
    assert len(list(kept.iterdir())) == 6
    # What is kept is what is read.
    for path in kept.iterdir():
        tensors, metadata = read_tensors(path, SCHEMA)
        next(iter(tensors.values()))[-1] += 1
        write_tensors(path, tensors, SCHEMA, metadata)
    with pytest.raises(FileFormatError, match="sha256 must be that of its contents"):
        count_files(paths, COUNTED[0], resume=kept)


def test_which_files(tmp_path: Path) -> None:
    paths = save_shards(tmp_path)
    (tmp_path / ".shard-9.safetensors").write_bytes(b"")
    assert find_files([tmp_path]) == paths
    assert find_files([tmp_path / "shard-[12]*"]) == paths[1:]
    assert find_files([paths[2], paths[0], paths[2], tmp_path / "." / paths[0].name]) == [
        paths[0],
        paths[2],
    ]
    with pytest.raises(ValueError, match="files must be at least one, got none in"):
        find_files([tmp_path / "other-*"])
    fit = ("fit", "--levels", 4, "--out", tmp_path / "c.st")
    assert "missing: cannot be read" in error(*fit, "--from", tmp_path / "missing")
    assert "resume must be left out with --law" in error(
        *fit, "--law", "norm", "--resume", tmp_path
    )
    assert "device must be one that torch finds" in error(
        *fit, "--from", tmp_path, "--device", "cuda:99" if torch.cuda.is_available() else "cuda"
    )
