"""What drawn inputs have found, each once more by itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvq
from kvq import reference
from kvq.activations import load_activations
from kvq.calibration_files import Calibration, LayerCalibration
from kvq.codebooks import Codebook, Provenance, Recipe, to_float32
from kvq.commands.output import print_json, print_table, say
from kvq.encoded_files import Encoded, EncodedLayer, EncodedRows
from kvq.files import FileFormatError, read_tensors
from kvq.rotary import RotarySpec
from kvq.tier import AttentionFeatures, PagedKV, new_paged_kv
from tests.attention_cases import INT4, INT8, make_batch
from tests.compare import assert_bit_exact
from tests.fuzz.strategies import TIERS, codebooks, examples, tier_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("name", TIERS)
def test_slots_with_a_stride(name: str) -> None:
    """The kernels took the slots in between."""
    x = torch.randn(3, 1, 32)
    got, want = (new_paged_kv(2, 4, 1, 32, INT8) for _ in range(2))
    slots = torch.tensor([5, 0, 2, 1, 7, 3])[::2]
    tier_of(name).reshape_and_cache(x, x, got, got, slots)
    reference.reshape_and_cache(x, x, want, want, torch.tensor([5, 2, 7]))
    assert_bit_exact(got.codes, want.codes)
    assert_bit_exact(got.words, want.words)


@pytest.mark.parametrize("name", TIERS)
def test_the_bytes_of_a_row_lie_side_by_side(name: str) -> None:
    """The kernels wrote over the bytes in between."""
    codes, words = torch.zeros(2, 1, 4, 64, dtype=torch.uint8)[..., ::2], torch.zeros(2, 1, 4)
    cache = PagedKV(codes, words, INT8, kvq.Layout.HND)
    x = torch.zeros(1, 1, 32)
    with pytest.raises(
        ValueError, match=r"^key_cache\.codes must have the bytes of a row side by"
    ):
        tier_of(name).reshape_and_cache(x, x, cache, cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="side by side, got a stride of 2"):
        tier_of(name).copy_blocks(cache, torch.tensor([[0, 1]]))


@pytest.mark.parametrize("fit", ["lloyd3", "lloyd3_unbiased_w16", "smax3_search"])
@pytest.mark.parametrize("levels", [(-1e-40, 0.0, 3e-41), (1e-41, 2e-40, 3e-40, 5e-40, 1.0)])
def test_subnormal_levels(levels: tuple[float, ...], fit: str) -> None:
    """Triton took the constants for float64 numbers."""
    kernels = tier_of("kernels")
    levels = tuple(to_float32(level) for level in levels)
    recipe = Recipe("uniform", len(levels), symmetric=False)
    book = Codebook.from_exact("tiny", levels, recipe, Provenance("for a test"))
    mode = kvq.mode(fit).with_codebook(book)
    x = torch.randn(5, 32) * torch.tensor([1.0, 1e-20, 1e-30, 1e10, 1e-38])[:, None]
    got, want = kernels.quantize(x, mode), reference.quantize(x, mode)
    assert_bit_exact(got.codes, want.codes)
    assert_bit_exact(got.words, want.words)


@pytest.mark.parametrize("first_key", [2**31, 2**32, 2**33 + 1, 2**63 - 1, -(2**32) + 5, -(2**63)])
@pytest.mark.parametrize("name", TIERS)
def test_first_keys_of_64_bits(name: str, first_key: int) -> None:
    """The kernels took the low 32 bits."""
    batch = make_batch([9], [2], modes=(INT8, INT4), dtype=torch.float32)
    got = batch.run(AttentionFeatures(first_key=torch.tensor([first_key])), tier=tier_of(name))
    if first_key > 0:
        assert (got.output == 0).all()
        assert (got.log_sum_exp == -torch.inf).all()
    else:
        want = batch.run(tier=tier_of(name))
        assert_bit_exact(got.output, want.output)


@pytest.mark.parametrize("name", TIERS)
def test_lengths_of_64_bits(name: str) -> None:
    """A table is too short for a length whose low 32 bits it would hold."""
    batch = make_batch([9], [1], modes=(INT8, INT4), dtype=torch.float32)
    batch.seq_lens = [2**32 + 9]
    got = batch.run(tier=tier_of(name), check=False)
    assert got.output.isnan().all()


@examples(100)
@given(data=st.data())
def test_a_guess_among_thresholds_is_right(data: st.DataObject) -> None:
    """As a GPU guesses, in float32: thresholds far from zero, or close, were guessed wrong."""
    quantize = pytest.importorskip("kvq.kernels.quantize")
    thresholds = data.draw(codebooks()).thresholds
    guess = quantize.guess_index(thresholds, 3)
    if not guess:
        return
    t = np.array(thresholds, dtype="f4")
    near = [t, np.nextafter(t, np.float32(-np.inf)), np.nextafter(t, np.float32(np.inf))]
    z = np.concatenate([*near, (t[1:] / 2 + t[:-1] / 2), t * 2, t / 2, -t])
    with np.errstate(all="ignore"):
        # A product of two float32 is exact in float64: the sum is rounded as if it were fused.
        fused = (z.astype("f8") * guess[0] + guess[1]).astype("f4")
    place = np.clip(fused, np.float32(0), np.float32(1)).astype("f8")
    slope = (place * np.float32(guess[4]) + guess[3]).astype("f4").astype("f8")
    slope = (place * slope + guess[2]).astype("f4").astype("f8")
    nearest = np.rint(place * slope).astype(int)
    padded = np.append(t, np.full(32, t[-1], dtype="f4"))
    got = nearest + (z >= padded[nearest])
    assert got.tolist() == (z[:, None] >= t).sum(1).tolist()


def write(path: Path, name: str, shape: list[int], dtype: str, metadata: dict[str, str]) -> None:
    """A file with one tensor of zeros, or of nothing."""
    size = 0 if 0 in shape else 8
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    text = json.dumps({"__metadata__": metadata, name: entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


@pytest.mark.parametrize("shape", [[0, 2**62, 3], [0, 3, 2**62], [0, 2**64 - 1]])
def test_sizes_that_overflow(shape: list[int], tmp_path: Path) -> None:
    """The error of torch came through, of many lines."""
    write(tmp_path / "file", "x", shape, "F32", {"kvq_schema": "some/1"})
    with pytest.raises(FileFormatError, match=r"not a valid safetensors file \([^\n]*\)$"):
        read_tensors(tmp_path / "file", "some/1")


def test_positions_without_an_axis(tmp_path: Path) -> None:
    """An `IndexError` came through."""
    metadata = {"kvq_schema": "kvq-activations/1", "scale": "1.0"}
    write(tmp_path / "file", "positions", [], "I64", metadata)
    with pytest.raises(FileFormatError, match="layers must hold at least one layer"):
        load_activations(tmp_path / "file")


def test_files_of_nothing() -> None:
    """They were read, and `kvq inspect` divided by zero or looked for the largest of no number."""
    rows = EncodedRows(torch.zeros(0, 2, 32).byte(), torch.zeros(0, 2), INT8, 32)
    with pytest.raises(ValueError, match=r"layers\.0\.key\.words must hold at least one word"):
        Encoded({0: EncodedLayer(rows, rows)}, torch.zeros(0, dtype=torch.int64), "0" * 64)
    layer = LayerCalibration(torch.zeros(0, 4), torch.zeros(0, 4))
    with pytest.raises(ValueError, match=r"layers\.0\.mean must have at least one KV head"):
        Calibration(RotarySpec((1.0, 0.5), 4), {0: layer})


def test_a_file_does_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Texts of a file were printed as they were."""
    print_table("a\x1b[2J", ("", ""), [("model\r", "x\x1b[31m\ny\ud800")])
    print_json({"model": "\x9b2J\ud800\u2028"})
    say("error: \x1b[2J\n")
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).split("\n"))
    assert "\\x1b[31m" in out
    assert "y\\ud800" in out
    assert json.loads(out[out.index("{") :]) == {"model": "\x9b2J\ud800\u2028"}
    assert err == "error: \\x1b[2J\n\n"


def test_cells_have_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """What a table is given in two lines was printed in one, and cut."""
    print_table("errors", ("mode", "bits/\nvalue"), [("int8", "8.5\n± 0.1")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["int8", "8.5"] in lines
    assert ["±", "0.1"] in lines
    assert ["mode", "value"] in lines
