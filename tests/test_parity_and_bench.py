"""`kvq parity` and `kvq bench`: what they print, keep and exit with, and how they count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq import dequantize, reference
from kvq.modes import MODES, Mode
from kvq.modes import mode as find_mode
from kvq.reference import key_transforms
from kvq.tier import Layout, QuantizedKV
from tests.test_cli import error, run, run_json

pytest.importorskip("triton")

from kvq.analysis import centered_throughput, decode_throughput, parity, throughput

INT8 = find_mode("int8")
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

#: Loaded by every Python that is started: kernels with a low mantissa bit of the word of row 5,
#: and the sign of the word of the last row, flipped.
BROKEN_KERNELS = """
import torch
from kvq import kernels
from kvq.tier import QuantizedKV

sound = kernels.quantize

def quantize(x, mode):
    codes, words = sound(x, mode)
    words.view(torch.int32)[5] ^= 1
    words.view(torch.int32)[-1] ^= -(2**31)
    return QuantizedKV(codes, words)

kernels.quantize = quantize
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN_KERNELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other process has to agree, a small digest set."""
    monkeypatch.setattr(parity, "DIGEST_ROWS", 64)


# What differs


def stored(rows: int = 6) -> QuantizedKV:
    generator = torch.Generator().manual_seed(0)
    return reference.quantize(torch.randn(rows, 32, generator=generator), INT8)


def flipped(words: Tensor, row: int, bit: int) -> Tensor:
    bits = words.clone().view(torch.int32)
    bits[row] ^= -(2**31) if bit == 31 else 1 << bit
    return bits.view(torch.float32)


def test_nothing_differs() -> None:
    assert parity.compare(stored(), stored()) == parity.NONE == (0, -1, -1, 0, 0, 0)


def test_bits_are_split() -> None:
    codes, words = stored()
    changed = flipped(flipped(flipped(words, 1, 31), 3, 0), 3, 23)
    found = parity.compare(QuantizedKV(codes, changed), stored())
    assert found == (2, 1, 3, 1, 1, 1)
    other = codes.clone()
    other[4, 7] += 1
    assert parity.compare(QuantizedKV(other, words), stored()) == (1, 4, 4, 0, 0, 0)


def test_values_count_too() -> None:
    values = reference.dequantize(*stored(), INT8, 32)
    changed = values.clone()
    changed[2, 3] = -changed[2, 3]
    assert parity.compare(stored(), stored(), changed, values) == (1, 2, 2, 1, 0, 0)
    assert parity.compare(stored(), stored(), values, values) == parity.NONE


class _Late(ModuleType):
    """The reference, but a NaN word for the row `bad` of every call."""

    def __init__(self, bad: int) -> None:
        super().__init__("late")
        self.bad = bad
        self.dequantize = reference.dequantize

    def quantize(self, x: Tensor, mode: Mode) -> QuantizedKV:
        codes, words = reference.quantize(x, mode)
        words[self.bad : self.bad + 1] = torch.nan
        return QuantizedKV(codes, words)


def test_places_count_from_the_start_of_the_set(
    few_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier: Any = _Late(3)
    found = parity.compare_digest_set(tier, reference, INT8)
    assert (found.rows, found.first, found.last) == (2, 3, 35)
    assert found.exponent >= 2
    assert parity.digest(tier, INT8) != parity.digest(reference, INT8)
    monkeypatch.setattr(parity, "CHUNK_ROWS", 16)
    seen: list[int] = []
    found = parity.compare_volume(tier, reference, INT8, 48, device="cpu", watch=seen.append)
    # The first chunk is of planted rows, which are made two at a time, too few for a row 3.
    assert seen == [2, 4, 6, 8, 10, 12, 14, 16, 32, 48]
    assert parity.compare_volume(reference, reference, INT8, 48, device="cpu") == parity.NONE
    assert (found.rows, found.first, found.last) == (2, 19, 35)


# kvq parity


@WITHOUT_GPU
def test_parity_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    (record,) = run_json("parity", "--mode", "int8", "--out", out)
    assert record["mode"] == INT8.name
    assert record["digest_reference"] == record["digest_interpreter"] != ""
    assert (record["digest_gpu"], record["rows"], record["mismatches"]) == ("", 0, 0)
    document = json.loads(out.read_text())
    assert document["schema"] == "kvq-parity/1"
    assert document["rows"] == [record]
    assert set(document) == {"schema", "command", "commit", "machine", "versions", "rows"}


@WITHOUT_GPU
def test_a_mismatch_is_counted_and_ends_with_1(broken: None) -> None:
    result = run("parity", "--mode", "int8", code=1)
    first, second = result.stderr.splitlines()
    name = INT8.name
    assert first.startswith(f"{name}, digest set, interpreted: Mismatches(rows=4, first=5, ")
    assert "last=65535, sign=" in first
    split = dict(part.split("=") for part in first[:-1].partition("(")[2].split(", "))
    # A word and its row's values each: one row of a mantissa and one of a sign in either half.
    assert int(split["sign"]) >= 2
    assert int(split["mantissa"]) >= 2
    assert second == f"{name}: DIFFER"
    assert "False" in result.stdout


@WITHOUT_GPU
def test_interpreted_kernels_that_fail_say_why(
    few_rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from kvq import kernels\ndef quantize(x, mode): raise ValueError('out of luck')\n"
        "kernels.quantize = quantize\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (line,) = run("parity", "--mode", "int8", code=3).stderr.splitlines()
    assert "interpreted kernels failed for mode int8_per_token_head" in line
    assert "ValueError: out of luck" in line


def test_no_volume_without_a_gpu() -> None:
    assert error("parity", "--mode", "int8", "--rows", 5) == (
        "rows must be 0 without a CUDA device, got 5"
    )


def test_bad_options() -> None:
    assert error("parity", "--rows", -1) == "rows must not be negative, got -1"
    assert error("parity", "--mode", "int5").startswith("mode must be one of")


@WITHOUT_GPU
def test_results_are_kept_beside_those_of_other_modes(few_rows: None, tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    for name in ("int8", "fp8"):
        run("parity", "--mode", name, "--no-interpreter", "--out", out)
    kept = json.loads(out.read_text())["rows"]
    assert [row["mode"] for row in kept] == [find_mode(name).name for name in ("int8", "fp8")]
    # A digest of the interpreter that is there is not computed again; one that differs shows.
    document = json.loads(out.read_text())
    document["rows"][0]["digest_interpreter"] = document["rows"][0]["digest_reference"]
    out.write_text(json.dumps(document))
    (record,) = run_json("parity", "--mode", "int8", "--out", out)
    assert record == document["rows"][0]
    kept = json.loads(out.read_text())["rows"]
    assert kept == document["rows"]


@pytest.mark.gpu
def test_parity_on_a_gpu(few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "CHUNK_ROWS", 2**12)
    arguments = ("parity", "--mode", "int8", "--mode", "lloyd3", "--no-interpreter")
    for record in run_json(*arguments, "--rows", 3 * 2**12):
        assert record["digest_gpu"] == record["digest_reference"]
        assert (record["rows"], record["mismatches"]) == (3 * 2**12, 0)
    from kvq import kernels

    sound = kernels.quantize

    def quantize(x: Tensor, mode: Mode) -> QuantizedKV:
        codes, words = sound(x, mode)
        words.view(torch.int32)[5] ^= 1
        return QuantizedKV(codes, words)

    monkeypatch.setattr(kernels, "quantize", quantize)
    result = run(*arguments, "--rows", 2**12, code=1)
    assert "digest set, compiled: Mismatches(rows=2, first=5, last=37, " in result.stderr
    # Planted rows are made 512 at a time.
    assert "volume set: Mismatches(rows=8, first=5, last=3589, sign=0, " in result.stderr


# kvq bench


@WITHOUT_GPU
def test_bench_without_a_gpu() -> None:
    assert error("bench", "write") == "device must be a CUDA device to be timed, got none"


def test_bench_times_what_it_knows() -> None:
    assert error("bench", "rewrite").endswith("got 'rewrite'")
    assert error("bench", "write", "--mode", "int5").startswith("mode must be one of")


@pytest.mark.parametrize("mode", MODES.values(), ids=str)
def test_random_caches_hold_rows_of_about_unit_variance(mode: Mode) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = decode_throughput.random_cache(mode, 4, 16, Layout.HND, generator)
    rows = dequantize(cache.codes, cache.words, mode, decode_throughput.HEAD_DIM)
    assert 0.6 < rows.std() < 1.6


def test_bench_shows_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench_write(modes: list[Mode], tokens: int, *, layout: Any) -> list[Any]:
        return [
            throughput.WriteTime(mode.name, str(layout), tokens, 0.5, 0.25, 2.0, 0.625)
            for mode in modes
        ]

    monkeypatch.setattr(throughput, "bench_write", bench_write)
    monkeypatch.setattr(sys, "argv", ["kvq", "bench", "write"])
    out = tmp_path / "write.json"
    arguments = ("bench", "write", "--mode", "int4", "--tokens", 32, "--out", out)
    table = run(*arguments).stdout
    assert "Paged write" in table
    assert " 32 " in table
    assert table.count("int4_per_token_head") == 2
    assert "0.625" in table
    records = run_json(*arguments)
    assert [record["layout"] for record in records] == ["HND", "NHD"]
    document = json.loads(out.read_text())
    assert document["schema"] == "kvq-bench-write/1"
    assert document["command"] == "kvq bench write"
    assert document["rows"] == records


@WITHOUT_GPU
def test_bench_centered_without_a_gpu() -> None:
    assert error("bench", "decode", "--centered") == (
        "device must be a CUDA device to be timed, got none"
    )
    assert error("bench", "write", "--centered") == (
        "what must be decode with --centered, got 'write'"
    )


def test_bench_centered_shows_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench_centered(modes: list[Mode], *, watch: Any) -> list[Any]:
        return [
            centered_throughput.CenteredTime(mode.name, 64, 16, 4096, 1, 0.5, 0.25, 0.75, 1.5, 8)
            for mode in modes
        ]

    monkeypatch.setattr(centered_throughput, "bench_centered", bench_centered)
    monkeypatch.setattr(sys, "argv", ["kvq", "bench", "decode", "--centered"])
    out = tmp_path / "centered.json"
    arguments = ("bench", "decode", "--centered", "--mode", "int4", "--out", out)
    table = run(*arguments).stdout
    assert "keys without their mean" in table
    assert "int4_per_token_head" in table
    (record,) = run_json(*arguments)
    assert record["ratio"] == record["ms"] / record["plain_ms"]
    document = json.loads(out.read_text())
    assert document["schema"] == "kvq-bench-centered/1"
    assert document["rows"] == [record]


def test_what_is_timed_is_centered_attention() -> None:
    """At a tiny size: it is attention over the keys with their mean."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shape = centered_throughput.Shape(2, 9)
    case = centered_throughput.centered_case(shape, find_mode("int4"), 8, generator)
    plain, spec = case.plain._replace(query=case.plain.query.float()), centered_throughput.ROTARY
    found = case._replace(plain=plain).attend()
    keys, values = (
        dequantize(*(x[plain.block_table.long()] for x in cache[:2]), cache.mode, 128)
        .transpose(1, 2)
        .flatten(2, 3)[:, :, :9]
        for cache in (plain.key_cache, plain.value_cache)
    )
    keys = key_transforms.decode_keys(keys, case.mean, case.pair_scale, case.rows, spec)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        plain.query[:, :, None], keys, values, enable_gqa=True
    )
    torch.testing.assert_close(found, wanted[:, :, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_bench_centered_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (centered_throughput.Shape(4, 4_096),)
    (row,) = centered_throughput.bench_centered([find_mode("int4")], shapes)
    assert row.ratio == row.ms / row.plain_ms
    assert row.term_ms < row.ms
    assert row.term_bytes == 4 * 4 * 32 * 4_096


@pytest.mark.gpu
def test_bench_on_a_gpu() -> None:
    records = run_json("bench", "write", "--mode", "int4", "--tokens", 4096)
    assert [record["mode"] for record in records[:2]] == ["bfloat16", "int4_per_token_head"]
    for record in records:
        assert record["tokens"] == 4096
        assert record["ms"] > 0
        assert record["ratio"] == pytest.approx(record["ms"] / record["bf16_ms"])
    assert "must be at least 1" in error("bench", "write", "--tokens", 0)
