"""Captured keys as a calibration leaves them: what a cache packs, and codebooks fitted to it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kvq.activations import Activations, LayerActivations, save_activations
from kvq.analysis.centered_activations import centered_activations
from kvq.calibration_files import Calibration, LayerCalibration, save_calibration
from kvq.codebook_files import load_codebook
from kvq.reference.rotary import apply_rotary
from kvq.rotary import RotarySpec
from tests.test_cli import error, run

SPEC = RotarySpec(tuple(torch.tensor([1e4 ** (-i / 8) for i in range(8)]).tolist()), 16)
POSITIONS = torch.tensor([3, 4, 7, 1000])
MEAN = 30 * torch.randn(2, 16, generator=torch.Generator().manual_seed(1))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def make() -> tuple[Activations, Calibration]:
    before = MEAN + random(4, 2, 16)
    layer = LayerActivations(None, apply_rotary(before, POSITIONS, SPEC), random(4, 2, 16))
    scale = torch.full((2, 16), 2.0)
    return (
        Activations({5: layer}, POSITIONS, POSITIONS[:0], 0.25, SPEC),
        Calibration(SPEC, {5: LayerCalibration(MEAN, scale)}),
    )


def test_what_is_left_is_what_keys_do_not_share() -> None:
    activations, calibration = make()
    found = centered_activations(activations, calibration)
    left = apply_rotary(found.layers[5].key, POSITIONS, SPEC, inverse=True)
    torch.testing.assert_close(left, 2 * random(4, 2, 16), rtol=0, atol=1e-3)
    assert torch.equal(found.layers[5].value, activations.layers[5].value)


def test_refuses() -> None:
    activations, calibration = make()
    with pytest.raises(ValueError, match="RoPE of the calibration, got none that is known"):
        centered_activations(dataclasses.replace(activations, rotary=None), calibration)
    other = RotarySpec((1.0,) * 8, 16)
    with pytest.raises(ValueError, match="must have the RoPE of the calibration, got another"):
        centered_activations(dataclasses.replace(activations, rotary=other), calibration)
    with pytest.raises(ValueError, match="must have every layer, got none for layer 5"):
        centered_activations(activations, Calibration(SPEC, {4: calibration.layers[5]}))
    one = LayerCalibration(*(x[:1] for x in calibration.layers[5]))
    with pytest.raises(ValueError, match=r"layers.5 must be of \[2, 16\] heads .* got \[1, 16\]"):
        centered_activations(activations, Calibration(SPEC, {5: one}))


def test_a_codebook_is_fitted_to_them(tmp_path: Path) -> None:
    activations, calibration = make()
    save_activations(tmp_path / "a.safetensors", activations)
    save_calibration(tmp_path / "c.safetensors", calibration)
    out = tmp_path / "book.safetensors"
    arguments = ["fit", "--from", tmp_path / "a.safetensors", "--side", "key", "--levels", 4]
    arguments += ["--base", "lloyd2", "--name", "book", "--out", out]
    run(*arguments)
    plain = load_codebook(out)
    run(*arguments, "--calibration", tmp_path / "c.safetensors")
    centered = load_codebook(out)
    assert centered.levels != plain.levels
    assert f"centered by a calibration (sha256 {calibration.sha256})" in centered.provenance.source
    assert error("fit", "--law", "norm", "--levels", 4, "--calibration", out).startswith(
        "calibration must be left out with --law"
    )
