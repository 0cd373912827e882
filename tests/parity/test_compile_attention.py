"""Packed attention compiles for every target, without spills where one token is decoded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest

from kvq.modes import MODES, short_name

pytest.importorskip("triton")

#: One pair for each kind of code: digits of integers, e4m3, pairs, bytes and halves of 2 bits,
#: halves of 4, one bit, three bits, a table, K and V of different kinds, and words of 16 bits.
KINDS = (
    "int4",
    "int8",
    "fp8",
    "affine4",
    "int2",
    "smax2",
    "lloyd4",
    "lloyd1",
    "lloyd3",
    "lloyd4+even_255",
    "trellis2",
    "trellis3",
    "int8/int2",
    "smax4/fp8",
    "lloyd4_w16/smax3_search_w16",
)
#: What spills: levels of eight bits and of windows, each gathered from memory.
SPILLS = {
    "lloyd4+even_255",
    "trellis3",
    "trellis3_norm_match",
    "trellis3_unbiased",
}
#: Bytes that keys and values of sixteen levels spill; with more registers, which fewer warps can
#: have, they are slower.
FEW = 8
LAUNCHED = {"_prepare_kernel", "attend_kernel", "combine_kernel"}


def compiled(target: str, tokens: int, modes: tuple[str, ...]) -> list[dict[str, object]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # Triton's cache does not know the code of the properties of a kernel's constants.
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            (sys.executable, "-m", "tests.parity.compile_attention", target, str(tokens), *modes),
            env={**environment, "TRITON_CACHE_DIR": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    assert found.returncode == 0, found.stderr[-3000:]
    records = [json.loads(line) for line in found.stdout.splitlines()]
    for mode in modes:
        assert {record["kernel"] for record in records if record["mode"] == mode} == LAUNCHED
    return records


def test_decoding_on_hopper_spills_nothing_and_loads_ahead() -> None:
    for record in compiled("cuda:90", 1, ("int4", "int8/int2", "smax3", "trellis2")):
        assert record["local"] == 0, record
        if record["kernel"] == "attend_kernel":
            # Keys and values of at least two pieces.
            assert record["loop"].get("LDGSTS", 0) >= 4, record


@pytest.mark.parametrize(("tokens", "layout"), [(1, "[8, 0]]"), (5, "[8, 0], [0, 8]]")])
def test_weights_lie_where_their_transposition_looks(tokens: int, layout: str) -> None:
    """A layout that is not the matrix unit's gave wrong outputs and right log-sum-exps."""
    for record in compiled("cuda:90", tokens, ("int4", "fp8/lloyd4")):
        if record["kernel"] == "attend_kernel":
            assert len(record["transposed"]) == 1
            assert layout in record["transposed"][0]


@pytest.mark.parametrize(
    ("tokens", "keys"), [(1, {"smax4": "planes", "smax2": "planes"}), (64, {"smax4": "halves"})]
)
def test_keys_are_more_accurate_than_values(tokens: int, keys: dict[str, str]) -> None:
    """Logits of standard deviation 30 need it, in every launch."""
    for record in compiled("cuda:90", tokens, tuple(keys)):
        if record["kernel"] == "attend_kernel":
            values = "bytes" if record["mode"] == "smax2" else "sevens"
            assert record["operands"] == [keys[record["mode"]], values]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_mode_on_hopper() -> None:
    for record in compiled("cuda:90", 1, tuple(dict.fromkeys((*map(short_name, MODES), *KINDS)))):
        few = FEW if record["operands"] == ["planes", "sevens"] else 0
        assert record["local"] <= few or record["mode"] in SPILLS, record


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tokens", [2, 5, 200])
def test_more_tokens_on_hopper(tokens: int) -> None:
    compiled("cuda:90", tokens, KINDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_every_kind_on_other_nvidia_gpus(arch: int) -> None:
    compiled(f"cuda:{arch}", 1, KINDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tokens", [1, 200])
def test_every_kind_on_amd(tokens: int) -> None:
    compiled("hip:gfx942", tokens, KINDS)
