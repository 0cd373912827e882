"""The fused write compiles for every target, exactly and without spills, where no GPU is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvq.modes import MODES, Mode, ScaleFit, short_name

pytest.importorskip("triton")

#: One mode for each kind of code: signed, e4m3, zero-point, pair, constants, look-up, three bits.
KINDS = ("int8", "fp8", "int4", "affine4", "int2", "lloyd4", "lloyd3")
#: Fused multiply-adds a value of `search_guess`, whose guess need not be exact.
GUESS_FUSED = 4


def compiled(target: str, modes: tuple[str, ...]) -> list[dict[str, object]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run(
        (sys.executable, "-m", "tests.parity.compile_kernels", target, *modes),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


def guessed(mode: Mode) -> bool:
    """Whether its codes are guessed by a cubic, which may fuse."""
    return mode.codebook is not None and mode.codebook.num_levels >= 5


def assert_exact(record: dict[str, object]) -> None:
    """On Hopper every fused multiply-add is counted; elsewhere only a guess may hold any."""
    mode = MODES[str(record["mode"])]
    if record["target"] == "cuda:90" or not guessed(mode):
        assert record["fused"] == (GUESS_FUSED * 128 if guessed(mode) else 0), record
    assert record["forbidden"] == [], record


def spills(mode: Mode) -> bool:
    """What still spills: one-bit fits, 16 to 64 bytes a thread at any register count tried, and
    four-bit fits with triton 3.7 (not with 3.6)."""
    return mode.scale_fit not in (None, ScaleFit.UNIT) and mode.bits in (1, 4)


def test_the_write_on_hopper_is_exact_and_spills_nothing() -> None:
    for record in compiled("cuda:90", ("int4", "int2", "fp8", "affine4")):
        assert_exact(record)
        assert record["local"] == 0, record


@pytest.mark.slow
def test_every_mode_on_hopper() -> None:
    for record in compiled("cuda:90", tuple(short_name(name) for name in MODES)):
        assert_exact(record)
        if not spills(MODES[str(record["mode"])]):
            assert record["local"] == 0, record


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_every_kind_on_other_nvidia_gpus(arch: int) -> None:
    for record in compiled(f"cuda:{arch}", KINDS):
        assert_exact(record)


@pytest.mark.slow
def test_every_kind_on_amd() -> None:
    assert len(compiled("hip:gfx942", KINDS)) == len(KINDS)
