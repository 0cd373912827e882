"""Histograms of normalized values that are exact integers, so that no order of adding matters.

A value is rounded to the nearest multiple of 2^-16, ties to even, and counted there. A weight, a
positive float32, is counted exactly: as an integer in units of `2^(8 k)`, where the window `k` is
that in which the integer has 24 to 31 bits. Whatever the files, processes and slices that the
values came in, the same values give the same integers.

Schema `kvq-histogram/1`, safetensors: for each window `k`, `window.{k}.points` int32 (multiples of
2^-16, increasing) and `window.{k}.sums` int64, not zero; metadata `count` (of values), `made_of`
(what was counted, in JSON) and `sha256` (of the integers).
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvq.checks import check_dtype
from kvq.distributed import Processes
from kvq.files import FileFormatError, read_tensors, write_tensors

#: Name and version of the file format.
SCHEMA: Final = "kvq-histogram/1"
#: Points of the grid between 0 and 1.
PER_UNIT: Final = 2**16
#: Octaves of weights in a window.
_OCTAVES: Final = 8
#: Bits of the smallest integer of a window: those of a float32.
_BITS: Final = 24
#: Windows of all float32 weights, subnormal ones too: -22 to 13, and a few to spare.
_WINDOWS: Final = range(-32, 32)
#: Points on either side of zero, at most: rows of 65,536 channels have values up to 256.
_FARTHEST: Final = 256 * PER_UNIT
#: A slice adds less than 2^61 to a sum.
_FULL: Final = 2**62

_NAME: Final = re.compile(r"window\.(0|-?[1-9][0-9]?)\.(points|sums)")


class ValueHistogram:
    """How often each multiple of 2^-16 occurs, and with what weight.

    >>> histogram = ValueHistogram()
    >>> histogram.add(torch.tensor([[0.5, -0.25], [0.5, 0.5]]))
    >>> histogram.law()
    (array([-0.25,  0.5 ]), array([1., 3.]))
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """An empty one, which counts on this device."""
        self.device = torch.device(device)
        #: How many values were counted.
        self.count = 0
        #: What was counted, if it comes from a file.
        self.made_of = ""
        #: The grid reaches from minus to plus so many points.
        self._radius = PER_UNIT
        # By window, `[2 * radius + 1]` int64.
        self._sums: dict[int, Tensor] = {}

    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Count the values of some rows.

        Args:
            values: `[R, D]` float32, at most 256 in magnitude; at most 2^30 of them.
            weights: `[R]` float32, positive and finite: of every value of a row; 1 by default.

        Raises:
            ValueError: A value or a weight is out of range, or a sum could exceed 63 bits.
        """
        check_dtype("values", values, torch.float32)
        points = (values.to(self.device) * PER_UNIT).round().to(torch.int64)
        if not points.numel():
            return
        self._reach(max(int(points.max()), -int(points.min())))
        self.count += points.numel()
        if weights is None:
            self._add(0, points, torch.ones_like(points[:, :1]))
            return
        check_dtype("weights", weights, torch.float32)
        exact = weights.to(self.device).double()
        if not bool(((exact > 0) & exact.isfinite()).all()):
            raise ValueError("weights must be positive and finite")
        # weight = fraction * 2^exponent, the fraction from 1/2 up to 1.
        exponents = torch.frexp(exact).exponent.to(torch.int64)
        windows = (exponents - _BITS).div(_OCTAVES, rounding_mode="floor")
        for window in sorted(set(windows.tolist())):
            mine = windows == window
            integers = (exact[mine] * 2.0 ** (-_OCTAVES * window)).to(torch.int64)
            self._add(window, points[mine], integers[:, None])

    def _add(self, window: int, points: Tensor, integers: Tensor) -> None:
        """Add integers `[R, 1]` at points `[R, D]`."""
        sums = self._sums.get(window)
        if sums is None:
            sums = torch.zeros(2 * self._radius + 1, dtype=torch.int64, device=self.device)
            self._sums[window] = sums
        elif int(sums.max()) >= _FULL:
            raise ValueError("sums must stay below 2^62, got more values than can be counted")
        sums.index_add_(0, points.flatten() + self._radius, integers.expand_as(points).flatten())

    def _reach(self, point: int) -> None:
        """Let the grid reach a point."""
        if point > _FARTHEST:
            raise ValueError(f"values must be at most {_FARTHEST // PER_UNIT} in magnitude")
        radius = -(-point // PER_UNIT) * PER_UNIT
        more = radius - self._radius
        if more > 0:
            self._radius = radius
            self._sums = {
                window: torch.nn.functional.pad(sums, (more, more))
                for window, sums in self._sums.items()
            }

    def merge(self, other: ValueHistogram) -> None:
        """Count what another has counted.

        Raises:
            ValueError: A sum could exceed 63 bits.
        """
        self._reach(other._radius)
        self.count += other.count
        for window, sums in other._sums.items():
            mine = self._sums.get(window)
            room = torch.nn.functional.pad(
                sums.to(self.device), (self._radius - other._radius,) * 2
            )
            if mine is None:
                self._sums[window] = room.clone()
                continue
            if max(int(mine.max()), int(room.max())) >= _FULL:
                raise ValueError("sums must stay below 2^62, got more values than can be counted")
            mine += room

    def add_up(self, processes: Processes) -> None:
        """Let the histogram of every process be the sum of all of theirs.

        Raises:
            ValueError: A sum could exceed 63 bits.
        """
        known = torch.tensor(
            [self._radius, *(window in self._sums for window in _WINDOWS)],
            dtype=torch.int64,
            device=self.device,
        )
        processes.largest(known)
        radius, *there = known.tolist()
        self._reach(radius)
        for window in (window for window, known in zip(_WINDOWS, there, strict=True) if known):
            if window not in self._sums:
                self._sums[window] = torch.zeros(
                    2 * radius + 1, dtype=torch.int64, device=self.device
                )
            processes.sum(self._sums[window])
        count = torch.tensor([self.count], device=self.device)
        processes.sum(count)
        self.count = int(count)

    def law(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The points that occur, increasing, and the weight of each, rounded to float64 once for
        each window."""
        total = np.zeros(2 * self._radius + 1)
        for window in sorted(self._sums):
            total += np.ldexp(self._sums[window].cpu().numpy().astype(float), _OCTAVES * window)
        (there,) = total.nonzero()
        return (there - self._radius) / PER_UNIT, total[there]

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the integers: of the values, in whatever order they came."""
        digest = hashlib.sha256(f"count:{self.count}".encode())
        for name, tensor in self._tensors().items():
            digest.update(f"{name}:{len(tensor)}".encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str], made_of: str) -> None:
        """Write a histogram file, whole or not at all; `made_of` says what was counted."""
        write_tensors(
            path,
            self._tensors(),
            SCHEMA,
            {"count": str(self.count), "made_of": made_of, "sha256": self.sha256},
        )

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for window in sorted(self._sums):
            sums = self._sums[window].cpu()
            (there,) = sums.nonzero(as_tuple=True)
            tensors[f"window.{window}.points"] = (there - self._radius).to(torch.int32)
            tensors[f"window.{window}.sums"] = sums[there]
        return tensors


def load_histogram(
    path: str | os.PathLike[str], made_of: str | None = None, device: torch.device | str = "cpu"
) -> ValueHistogram:
    """Read a histogram file.

    Args:
        path: The file.
        made_of: What must have been counted, if that matters.
        device: Where to go on.

    Raises:
        FileFormatError: It cannot be read, breaks a rule of the format, or is of something else.
    """
    tensors, metadata = read_tensors(path, SCHEMA)
    if made_of is not None and metadata.get("made_of") != made_of:
        raise FileFormatError(path, f"made_of must be {made_of}, got {metadata.get('made_of')}")
    histogram = ValueHistogram(device)
    try:
        histogram.made_of = metadata["made_of"]
        histogram.count = int(metadata["count"])
        windows: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None or int(match[1]) not in _WINDOWS:
                raise ValueError(f"tensors must be named window.K.points|sums, got {name!r}")
            windows.setdefault(int(match[1]), {})[match[2]] = tensor.to(device)
        for window in sorted(windows):
            points, sums = windows[window]["points"].to(torch.int64), windows[window]["sums"]
            if sums.dtype is not torch.int64 or points.shape != sums.shape or points.ndim != 1:
                raise ValueError(f"window.{window} must be rows of one length")
            if len(points):
                histogram._reach(max(int(points.max()), -int(points.min())))
                histogram._add(window, points[:, None], sums[:, None])
        if histogram.sha256 != metadata["sha256"]:
            raise ValueError(f"sha256 must be that of its contents, {histogram.sha256}")
    except KeyError as error:
        raise FileFormatError(path, f"{error.args[0]} must be present, got nothing") from None
    except ValueError as error:
        raise FileFormatError(path, str(error)) from None
    return histogram
