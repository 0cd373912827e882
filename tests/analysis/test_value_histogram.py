"""Histograms of normalized values: exact integers, in any order, and their files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from kvq.analysis.value_histogram import SCHEMA, ValueHistogram, load_histogram
from kvq.files import FileFormatError, read_tensors, write_tensors


def total(histogram: ValueHistogram, folder: Path) -> Fraction:
    """The sum of all weights, exactly, as the file has it."""
    histogram.save(folder / "total.st", "")
    tensors, _ = read_tensors(folder / "total.st", SCHEMA)
    return sum(
        (
            Fraction(2) ** (8 * int(name.split(".")[1])) * sum(tensor.tolist())
            for name, tensor in tensors.items()
            if name.endswith("sums")
        ),
        Fraction(0),
    )


def test_weights_are_exact_over_all_of_float32(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(60, 8, generator=generator) * torch.logspace(-6, 0, 60)[:, None]
    weights = torch.rand(60, generator=generator) * torch.logspace(-44, 38, 60)
    weights[:4] = torch.tensor([2.0**-149, 2.0**-126, 3.4028234663852886e38, 1.0])
    whole, parts = ValueHistogram(), [ValueHistogram(), ValueHistogram()]
    whole.add(values, weights)
    for i, rows in enumerate(torch.randperm(60, generator=generator).split(17)):
        parts[i % 2].add(values[rows], weights[rows])
    parts[1].merge(parts[0])
    assert parts[1].sha256 == whole.sha256
    assert whole.count == parts[1].count == values.numel()
    assert total(whole, tmp_path) == 8 * sum(map(Fraction, weights.tolist()))


def test_sums_are_exact_beyond_float64(tmp_path: Path) -> None:
    histogram = ValueHistogram()
    large = 2.0**31 - 2.0**7  # the largest float32 of its window
    for _ in range(3):
        histogram.add(torch.zeros(1, 2**22), torch.tensor([large]))
    histogram.add(torch.zeros(1, 1), torch.tensor([2.0**23 + 1]))  # the smallest that is odd
    expected = 3 * 2**22 * Fraction(large) + 2**23 + 1
    assert float(expected) != expected
    assert total(histogram, tmp_path) == expected


def test_points_are_nearest_with_ties_to_even() -> None:
    histogram = ValueHistogram()
    step = 2.0**-16
    ties = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 256 / step]]) * step
    histogram.add(ties)
    points, masses = histogram.law()
    assert (points / step).tolist() == [-2.0, 0.0, 2.0, 256 / step]
    assert masses.tolist() == [1.0, 3.0, 2.0, 1.0]


def test_what_is_refused() -> None:
    histogram = ValueHistogram()
    one = torch.ones(1, 1)
    for value in (256.1, -300.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="values must be at most 256 in magnitude"):
            histogram.add(one * value)
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weights must be positive and finite"):
            histogram.add(one, one[0] * weight)
    with pytest.raises(TypeError, match="values must be float32"):
        histogram.add(one.double())
    with pytest.raises(TypeError, match="weights must be float32"):
        histogram.add(one, one[0].double())
    # 2^24 values of the largest weight of a window, doubled until there is no room.
    histogram = ValueHistogram()
    histogram.add(torch.zeros(1, 2**24), torch.tensor([2.0**31 - 2.0**7]))
    for _ in range(7):
        histogram.merge(histogram)
    assert int(histogram.law()[1][0]) == 2**62 - 2**38
    histogram.merge(histogram)
    with pytest.raises(ValueError, match="sums must stay below 2\\^62"):
        histogram.merge(histogram)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "h.safetensors"
    histogram = ValueHistogram()
    histogram.add(torch.tensor([[-2.5, 0.5], [0.5, 0.25]]), torch.tensor([1e-3, 1e9]))
    histogram.save(path, "these")
    again = load_histogram(path, "these")
    assert (again.sha256, again.count) == (histogram.sha256, 4)
    for mine, theirs in zip(again.law(), histogram.law(), strict=True):
        assert mine.tolist() == theirs.tolist()
    with pytest.raises(FileFormatError, match="made_of must be others, got these"):
        load_histogram(path, "others")
    tensors, metadata = read_tensors(path, SCHEMA)
    points = next(name for name in tensors if name.endswith("points"))
    sums = points.replace("points", "sums")
    for changes, message in (
        ({points: None}, "points must be present"),
        ({points: tensors[points][:0]}, "must be rows of one length"),
        ({sums: tensors[sums].float()}, "must be rows of one length"),
        ({sums: tensors[sums] + 1}, "sha256 must be that of its contents"),
        ({points: tensors[points] + 2**30}, "values must be at most 256"),
        ({"window.99.points": tensors[points]}, "tensors must be named window.K"),
        ({"other": tensors[points]}, "tensors must be named window.K"),
    ):
        changed = {k: v for k, v in (tensors | changes).items() if v is not None}
        write_tensors(path, changed, SCHEMA, metadata)
        with pytest.raises(FileFormatError, match=message):
            load_histogram(path, "these")
    write_tensors(path, tensors, SCHEMA, {"made_of": "these"})
    with pytest.raises(FileFormatError, match="count must be present"):
        load_histogram(path, "these")
