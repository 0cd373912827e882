"""The main job: run the measures, write tables, pictures, a page and a manifest, and replay one.

Nothing that is written holds a time or an absolute path, so the same input gives the same bytes on
the same machine and versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
import pyarrow
import scipy
import torch

import kvq
from kvq import reference
from kvq.activations import Activations, activations_sha256, load_activations
from kvq.analysis import plots
from kvq.analysis.measure import Settings, check_modes, measure
from kvq.analysis.page import Image, page
from kvq.analysis.summary import headline, summarize
from kvq.checks import check_bool, check_int, check_kind, check_list, check_optional, check_seed
from kvq.data import embedded_sample
from kvq.files import FileFormatError
from kvq.modes import MODES, Mode, ScaleFit
from kvq.modes import mode as resolve_mode
from kvq.records import from_json, to_json
from kvq.scale_word import StoredWord
from kvq.tier import Tier, check_tier

#: Name and version of the manifest's format.
SCHEMA: Final = "kvq-report/1"
#: Entries of a layer's keys up to which one thread is as fast as many, and does not wait for them.
SMALL_LAYER: Final = 2**20


class Comparison(NamedTuple):
    """A replayed report beside the recorded one. `str()` says it in a sentence."""

    #: Tables whose bytes differ.
    differing: tuple[str, ...]
    #: The largest difference of a number, relative to it or, where that is larger, to its standard
    #: error: 0 if all tables are identical, infinite if rows do not match, and NaN if the
    #: recorded tables are not beside the manifest.
    largest_relative_difference: float

    @property
    def identical(self) -> bool:
        """Whether all tables are the same, byte for byte."""
        return not self.differing

    def __str__(self) -> str:
        if self.identical:
            return "all tables are identical to the recorded ones"
        names = ", ".join(self.differing)
        if np.isnan(self.largest_relative_difference):
            return f"{names} differ; the recorded tables are not there to say by how much"
        if np.isinf(self.largest_relative_difference):
            return f"{names} differ, and not in numbers alone"
        return f"{names} differ, by at most {self.largest_relative_difference:.1e} relative"


class ReportResult(NamedTuple):
    """What a report found, and what it wrote."""

    #: One row for each mode.
    summary: pd.DataFrame
    #: Every table by name, the summary among them.
    tables: Mapping[str, pd.DataFrame]
    #: Every file, the page and the manifest last.
    files: Sequence[Path]
    #: How it compares with the record that it replays; `None` for a new report.
    comparison: Comparison | None = None

    def headline(self) -> pd.DataFrame:
        """The summary as text to print, with standard errors and short names."""
        return headline(self.summary)


#: What is measured by default: words of 16 bits have the codes of other rows, and the fits of a
#: trellis share a search, which takes a CPU most of a minute.
REPORTED: Final = tuple(
    mode
    for mode in MODES.values()
    if mode.word is not StoredWord.FLOAT16
    and (mode.trellis is None or mode.scale_fit is ScaleFit.LEAST_SQUARES)
)


def run_report(
    activations: Activations,
    out: str | os.PathLike[str],
    *,
    modes: Sequence[Mode | str] = REPORTED,
    seed: int = 0,
    settings: Settings | None = None,
    tier: Tier = reference,
    progress: bool = True,
    input_name: str = "activations",
    threads: int | None = None,
) -> ReportResult:
    """Measure modes on activations and write the report.

    Args:
        activations: What to measure on.
        out: A folder; it is made if need be, and files of an earlier report are written over.
        modes: Names, shipped modes, or modes with fitted codebooks.
        seed: Of everything that is drawn.
        settings: Sizes; the defaults if not given.
        tier: Who quantizes.
        progress: Show a bar, where there is a terminal.
        input_name: What to call the activations; of a path only the file's name is kept.
        threads: That torch may use; by default one for small layers, else as many as it does.
            Sums split among threads differ in their last bits, so the manifest has the number.

    Raises:
        ValueError: A mode does not suit a head size, or is named twice.
    """
    check_kind("activations", activations, Activations)
    _check_out(out)
    settings = check_optional("settings", settings, Settings) or Settings()
    check_seed(seed)
    check_tier(tier)
    check_bool("progress", progress)
    check_kind("input_name", input_name, str)
    check_list("modes", modes)
    if threads is not None:
        check_int("threads", threads, 1)
    resolved = [resolve_mode(mode) for mode in modes]
    check_modes(activations, resolved)
    threads = _default_threads(activations) if threads is None else threads
    with _torch_threads(threads):
        tables = measure(
            activations, resolved, seed=seed, settings=settings, tier=tier, progress=progress
        )
    tables = {"summary": summarize(tables, resolved), **tables}
    folder = Path(out)
    files = _write_tables(tables, folder / "tables")
    pictures = _write_pictures(tables, {mode.name: mode.bits for mode in resolved}, folder)
    name = PurePath(input_name).name
    manifest = {
        "schema": SCHEMA,
        "input": {"name": name, "activations_sha256": activations_sha256(activations)},
        "options": {
            "seed": seed,
            "modes": [to_json(mode) for mode in resolved],
            "settings": to_json(settings),
            "threads": threads,
        },
        "versions": _versions(),
        "machine": {
            "processor": platform.machine(),
            "system": platform.system(),
        },
        "tables": {
            file.stem: {"rows": len(tables[file.stem]), "sha256": _sha256(file)}
            for file in files
            if file.suffix == ".csv"
        },
    }
    html = folder / "report.html"
    images = [Image(file.stem, file.read_bytes()) for file in pictures if file.suffix == ".svg"]
    text = page(name, _facts(activations, manifest), tables, images, _units(settings))
    html.write_text(text, encoding="utf-8", newline="\n")
    files += [*pictures, html]
    manifest["files"] = {file.relative_to(folder).as_posix(): _sha256(file) for file in files}
    record = folder / "manifest.json"
    record.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8", newline="\n")
    return ReportResult(tables["summary"], tables, [*files, record])


def replay(
    manifest_path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    input_path: str | os.PathLike[str] | None = None,
    tier: Tier = reference,
    progress: bool = True,
) -> ReportResult:
    """Run a report again from its manifest, and compare the tables.

    Args:
        manifest_path: The `manifest.json` of a report.
        out: Another folder to write to.
        input_path: The activation file; not needed for the embedded sample.
        tier: Who quantizes.
        progress: Show a bar, where there is a terminal.

    Raises:
        FileFormatError: The manifest cannot be read or is not one.
        ValueError: The activations are not those that were measured, or `out` holds the manifest.
    """
    path = Path(_check_path("manifest_path", manifest_path))
    _check_out(out)
    if input_path is not None:
        _check_path("input_path", input_path, " or None")
    check_tier(tier)
    check_bool("progress", progress)
    manifest = _read_manifest(path)
    if path.resolve().parent == Path(out).resolve():
        raise ValueError(f"out must not be the folder of the manifest, got {os.fspath(out)!r}")
    try:
        expected, name = manifest["input"]["activations_sha256"], manifest["input"]["name"]
        options, recorded = manifest["options"], manifest["tables"]
        seed, threads = options["seed"], options["threads"]
        modes = [
            from_json(Mode, item, f"options.modes[{index}]")
            for index, item in enumerate(options["modes"])
        ]
        settings = from_json(Settings, options["settings"], "options.settings")
        hashes = {table: entry["sha256"] for table, entry in recorded.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileFormatError(path, f"not a valid manifest ({error})") from None
    activations = embedded_sample() if input_path is None else load_activations(input_path)
    found = activations_sha256(activations)
    if found != expected:
        source = "the embedded sample" if input_path is None else os.fspath(input_path)
        raise ValueError(
            f"input_path must hold the activations of the manifest, {name!r} with SHA-256 "
            f"{expected}, got {source} with {found}"
        )
    result = run_report(
        activations,
        out,
        modes=modes,
        seed=seed,
        settings=settings,
        tier=tier,
        progress=progress,
        input_name=name,
        threads=threads,
    )
    return result._replace(comparison=_compare(result, hashes, path.parent / "tables"))


def _check_path(argument: str, path: object, none: str = "") -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument} must be a path{none}, got {type(path).__name__}")
    return str(os.fspath(path))


def _check_out(out: object) -> None:
    """A report is a folder."""
    if Path(_check_path("out", out)).is_file():
        raise NotADirectoryError(f"out must be the path of a folder, got the file {out}")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileFormatError(path, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(path, f"not valid JSON ({error})") from None
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise FileFormatError(path, f"schema must be {SCHEMA}, got {schema!r}")
    assert isinstance(manifest, dict)
    return manifest


def _default_threads(activations: Activations) -> int:
    largest = max(layer.key.numel() for layer in activations.layers.values())
    return 1 if largest <= SMALL_LAYER else torch.get_num_threads()


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(result: ReportResult, recorded: Mapping[str, str], folder: Path) -> Comparison:
    """The new tables beside the recorded hashes, and beside the tables where hashes differ."""
    new = {file.stem: _sha256(file) for file in result.files if file.suffix == ".csv"}
    names = sorted(new.keys() | recorded.keys())
    differing = tuple(name for name in names if new.get(name) != recorded.get(name))
    largest = [0.0]
    for name in differing:
        file = folder / f"{name}.parquet"
        if name not in result.tables:
            largest.append(np.inf)
        elif not file.exists():
            largest.append(np.nan)
        else:
            largest.append(_largest_difference(result.tables[name], pd.read_parquet(file)))
    return Comparison(differing, float(np.max(largest)))


def _largest_difference(new: pd.DataFrame, old: pd.DataFrame) -> float:
    """Of any number, relative to it or to its standard error; infinite if rows do not match."""
    numbers = [name for name in new.columns if new[name].dtype == np.float64]
    labels = [name for name in new.columns if name not in numbers]
    if list(new.columns) != list(old.columns) or not new[labels].equals(old[labels]):
        return np.inf
    largest = 0.0
    for name in numbers:
        a, b = (table[name].to_numpy(dtype=np.float64) for table in (new, old))
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return np.inf
        size = np.maximum(np.abs(a), np.abs(b))
        error = f"{name}_se" if f"{name}_se" in new else "standard_error"
        if error in new:
            size = np.fmax(size, new[error].to_numpy(dtype=np.float64))
        differ = (a != b) & ~np.isnan(a)
        largest = max(largest, float(np.max(np.abs(a - b)[differ] / size[differ], initial=0.0)))
    return largest


def _write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, table in tables.items():
        parquet, csv = folder / f"{name}.parquet", folder / f"{name}.csv"
        table.to_parquet(parquet, index=False)
        table.to_csv(csv, index=False, lineterminator="\n")
        files += [parquet, csv]
    return files


def _write_pictures(
    tables: Mapping[str, pd.DataFrame], bits: Mapping[str, int], folder: Path
) -> list[Path]:
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    files = []
    with plots.style():
        for name, draw in plots.figures(tables, bits).items():
            figure = draw()
            for ending in ("png", "svg"):
                files.append(folder / "figures" / f"{name}.{ending}")
                plots.save(figure, files[-1])
                # The second picture has the layout of the first.
                figure.set_layout_engine("none")
    return files


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _versions() -> dict[str, str]:
    libraries = (kvq, torch, np, scipy, pd, pyarrow, matplotlib)
    found = {library.__name__: str(library.__version__) for library in libraries}
    return {**found, "python": platform.python_version()}


def _units(settings: Settings) -> str:
    """What the standard errors are taken over."""
    return (
        "In the summary the unit is a KV head of a layer. In the tables of single heads it is a "
        f"block of {settings.key_block} consecutive tokens for keys and values, a block of "
        f"{settings.query_block} queries for attention (the keys taken as given), and both at "
        "once for scores."
    )


def _facts(activations: Activations, manifest: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """What the page says of the input, of where it comes from, and of the options."""
    layers = activations.layers
    first = next(iter(layers.values()))
    options = manifest["options"]
    queries = (
        "none: scores and attention were not measured"
        if first.query is None
        else f"{len(activations.query_positions)}, at positions "
        f"{int(activations.query_positions[0])} to {int(activations.query_positions[-1])}, "
        f"{first.query.shape[1]} heads"
    )
    source = {
        "input": manifest["input"]["name"],
        "SHA-256 of its tensors": manifest["input"]["activations_sha256"],
        "layers": ", ".join(map(str, layers)),
        "keys and values": f"{len(activations.positions)} tokens, {first.key.shape[1]} KV heads, "
        f"head size {first.key.shape[2]} and {first.value.shape[2]}, "
        f"{str(first.key.dtype).removeprefix('torch.')}",
        "queries": queries,
        "softmax scale": f"{activations.scale:g}",
        "modes": str(len(options["modes"])),
    }
    run = {
        "seed": str(options["seed"]),
        "threads": str(options["threads"]),
        "settings": ", ".join(f"{name} {value}" for name, value in options["settings"].items()),
        "versions": ", ".join(f"{name} {value}" for name, value in manifest["versions"].items()),
    }
    return [source, dict(sorted(activations.provenance.items())), run]
