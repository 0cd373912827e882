"""Normalized values of activation files, counted in slices: what a codebook is fitted to.

Files are shared out among processes, and histograms of integers are added up, so the result is
the same for any number of processes and any order of the files. With a folder for what is done,
each file's histogram is kept there once it is whole, under a name made of the file's bytes and of
what is counted: a pass that was interrupted goes on there, with any number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvq.activation_slices import SLICE, ActivationFile
from kvq.analysis.centered_activations import centered_keys
from kvq.analysis.normalized_values import choose, normalized_values
from kvq.analysis.value_histogram import SCHEMA, ValueHistogram, load_histogram
from kvq.calibration_files import Calibration
from kvq.distributed import Processes
from kvq.files import FileFormatError, file_sha256
from kvq.modes import Mode
from kvq.records import to_json


@dataclass(frozen=True, slots=True)
class Counted:
    """Which values are counted, and how."""

    #: The codebook mode that rotates and normalizes rows.
    mode: Mode
    #: Count each value with the weight of its row, as `NormalizedValues.weights`.
    weighted: bool = False
    #: `"key"`, `"value"`; by default both.
    sides: Sequence[str] | None = None
    #: By default all.
    layers: Sequence[int] | None = None
    #: KV heads; by default all.
    heads: Sequence[int] | None = None
    #: Count keys as it leaves them.
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.mode.codebook is None:
            raise ValueError(f"mode must be a codebook mode, got {self.mode.name}")

    def made_of(self, sha256: str) -> str:
        """In JSON: all that a histogram of a file depends on."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "file": sha256,
                "rotation": to_json(self.mode.rotation),
                "normalization": to_json(self.mode.normalization),
                "weighted": self.weighted,
                "sides": sorted(set(self.sides or ())),
                "layers": sorted(set(self.layers or ())),
                "heads": sorted(set(self.heads or ())),
                "calibration": self.calibration and self.calibration.sha256,
            },
            sort_keys=True,
        )


class CountedFiles(NamedTuple):
    """The histogram of some files."""

    histogram: ValueHistogram
    #: SHA-256 (hex) of the bytes of each file, by its path.
    sha256: dict[Path, str]


def find_files(given: Iterable[Path]) -> list[Path]:
    """The files that paths stand for: files, folders of `*.safetensors`, and patterns.

    Returns:
        Each file once, in the order of their paths.

    Raises:
        ValueError: A folder or a pattern has no file.
    """
    found: dict[Path, Path] = {}
    for path in given:
        if path.is_dir():
            files = [file for file in path.glob("*.safetensors") if file.name[0] != "."]
        elif path.exists() or not any(sign in path.name for sign in "*?["):
            files = [path]
        else:
            files = [file for file in path.parent.glob(path.name) if file.is_file()]
        if not files:
            raise ValueError(f"files must be at least one, got none in {path}")
        found |= {file.resolve(): file for file in files}
    return sorted(found.values())


def count_files(
    paths: Sequence[Path],
    counted: Counted,
    processes: Processes | None = None,
    *,
    resume: Path | None = None,
    numbers: int = SLICE,
) -> CountedFiles:
    """Count the values of activation files.

    Args:
        paths: The files; each process has the same list.
        counted: Which values.
        processes: That share the files; by default this one has them all.
        resume: A folder for the histograms of whole files, which all processes see.
        numbers: How many to work on at once.

    Returns:
        The same in every process.

    Raises:
        FileFormatError: A file is not what it must be.
        ValueError: A side, layer or head is not in every file, D does not suit the mode, or
            `resume` is the folder of a file.

    Exactness: the same integers for any number of processes, order of files and `numbers`; with a
        calibration as far as cosines and sines are.
    """
    folders = {path.resolve().parent for path in paths}
    if resume is not None and resume.resolve() in folders:
        raise ValueError(f"resume must be a folder without activation files, got {resume}")
    together = Processes() if processes is None else processes
    # The largest first: they are shared out in turn.
    ordered = sorted(paths, key=lambda path: (-_size(path), path))
    total = ValueHistogram(together.device)
    sha256 = {}
    for path in together.share(ordered):
        sha256[path] = file_sha256(path)
        total.merge(_of_file(path, sha256[path], counted, total, resume, numbers))
    total.add_up(together)
    for others in together.gather(sha256):
        sha256 |= others
    return CountedFiles(total, {path: sha256[path] for path in paths})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise FileFormatError(path, f"cannot be read ({error.strerror})") from None


def _of_file(
    path: Path,
    sha256: str,
    counted: Counted,
    like: ValueHistogram,
    resume: Path | None,
    numbers: int,
) -> ValueHistogram:
    """The histogram of one file, from the folder if it is there."""
    made_of = counted.made_of(sha256)
    kept = None
    if resume is not None:
        kept = resume / f"{hashlib.sha256(made_of.encode()).hexdigest()}.safetensors"
        if kept.exists():
            return load_histogram(kept, made_of, like.device)
    histogram = ValueHistogram(like.device)
    file = ActivationFile(path)
    for layer in choose("layer", counted.layers, tuple(file.layers)):
        shapes = file.layers[layer]
        heads = choose("head", counted.heads, range(shapes["key"][0]))
        for side in choose("side", counted.sides, ("key", "value")):
            for positions, read in file.slices(layer, side, numbers=numbers):
                rows = read
                if side == "key" and counted.calibration is not None:
                    rows = centered_keys(rows, positions, layer, file.rotary, counted.calibration)
                rows = rows[:, list(heads)].to(like.device)
                values, weights = normalized_values(rows, counted.mode)
                histogram.add(values, weights if counted.weighted else None)
    if kept is not None:
        histogram.save(kept, made_of)
    return histogram
