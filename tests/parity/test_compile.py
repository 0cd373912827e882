"""The fused write compiles for every target, exactly and without spills, where no GPU is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvq.modes import MODES, Mode, short_name

pytest.importorskip("triton")

#: One mode for each kind of code: signed, e4m3, zero-point, pair, constants, look-up, three bits,
#: a search of gains with words of 16 bits, and a trellis.
KINDS = (
    "int8",
    "fp8",
    "int4",
    "affine4",
    "int2",
    "lloyd4",
    "lloyd3",
    "smax2_search_w16",
    "trellis3",
)
#: Fused multiply-adds a value of `search_guess`, whose guess need not be exact.
GUESS_FUSED = 4
#: Bytes that the search of a trellis may spill; it keeps all levels in registers.
SEARCH_LOCAL = 128


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
    return mode.codebook is not None and (mode.codebook.num_levels >= 5 or bool(mode.gains))


def assert_spills_nothing(record: dict[str, object]) -> None:
    assert record["local"] <= (SEARCH_LOCAL if record["kernel"] == "search" else 0), record


def assert_exact(record: dict[str, object]) -> None:
    """Only a guess may fuse; on Hopper it is counted, elsewhere some of it is done in pairs."""
    mode = MODES[str(record["mode"])]
    assert record["unexplained"] == 0, record
    if record["target"] == "cuda:90" or not guessed(mode):
        # In a search Triton writes a guess for each of two layouts, which the assembler merges.
        passes = 2 if mode.gains else 1
        assert record["fused"] == (GUESS_FUSED * 128 * passes if guessed(mode) else 0), record
    assert record["forbidden"] == [], record


def test_the_write_on_hopper_is_exact_and_spills_nothing() -> None:
    for record in compiled(
        "cuda:90", ("int4", "int2", "fp8", "affine4", "lloyd4", "smax4_search_w16", "trellis2")
    ):
        assert_exact(record)
        assert_spills_nothing(record)


@pytest.mark.slow
def test_every_mode_on_hopper() -> None:
    for record in compiled("cuda:90", tuple(short_name(name) for name in MODES)):
        assert_exact(record)
        assert_spills_nothing(record)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_every_kind_on_other_nvidia_gpus(arch: int) -> None:
    for record in compiled(f"cuda:{arch}", KINDS):
        assert_exact(record)


@pytest.mark.slow
def test_every_kind_on_amd() -> None:
    """Codes are not guessed there; division and square root are made of fused operations."""
    records = compiled("hip:gfx942", KINDS)
    assert len(records) == len(KINDS) + 1
    for record in records:
        assert record["unexplained"] == 0, record
        assert record["forbidden"] == [], record
