"""The report from end to end: files, page, manifest, replay, and the same bytes twice."""

from __future__ import annotations

import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from kvq.activations import Activations, activations_sha256, save_activations
from kvq.analysis import report as report_module
from kvq.analysis.measure import COLUMNS, Settings, measure
from kvq.analysis.report import ReportResult, replay, run_report
from kvq.analysis.samples import synthetic_activations
from kvq.analysis.summary import headline, with_error
from kvq.codebooks import CODEBOOKS, Codebook
from kvq.files import FileFormatError
from kvq.modes import MODES, Mode, mode

SETTINGS = Settings(theory_rows=64, gaussian_tokens=64, gaussian_heads=2, query_block=4)
FITTED = mode("lloyd3").with_codebook(
    Codebook(
        "mine",
        tuple(np.float32(1.01 * level).item() for level in CODEBOOKS["gaussian_8"].levels),
        CODEBOOKS["gaussian_8"].thresholds,
        CODEBOOKS["gaussian_8"].recipe,
        CODEBOOKS["gaussian_8"].provenance,
    )
)
CHOSEN: list[Mode | str] = ["int8", mode("int4"), "lloyd2_unit_per_token_head", FITTED]
PICTURES = {
    "quality_against_size", "error_against_theory", "scores", "attention", "divergence_by_layer",
    "drift_sample", "drift_gaussian", "activation_statistics", "storage",
}  # fmt: skip


@pytest.fixture(scope="module")
def activations() -> Activations:
    return synthetic_activations(layers=2, tokens=64, queries=8, head_dim=32, dtype=torch.float16)


@pytest.fixture(scope="module")
def source(activations: Activations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "small.safetensors"
    save_activations(path, activations)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "made"


@pytest.fixture(scope="module")
def result(activations: Activations, source: Path, folder: Path) -> ReportResult:
    return run_report(activations, folder, modes=CHOSEN, settings=SETTINGS, input_name=str(source))


def manifest_of(folder: Path) -> dict[str, dict[str, object]]:
    found = json.loads((folder / "manifest.json").read_text())
    assert isinstance(found, dict)
    return found


class Page(HTMLParser):
    """Every tag closed, every address, every identity, and all text."""

    VOID = frozenset(("meta", "link", "img", "br"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.identities: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                self.addresses.append(value or "")
            if name == "id":
                self.identities.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_every_file_is_there_and_listed(result: ReportResult, folder: Path) -> None:
    written = {path for path in folder.rglob("*") if path.is_file()}
    assert written == set(result.files)
    names = {path.relative_to(folder).as_posix() for path in written}
    expected = {f"figures/{name}.{ending}" for name in PICTURES for ending in ("png", "svg")}
    for name in ("summary", *COLUMNS):
        expected |= {f"tables/{name}.csv", f"tables/{name}.parquet"}
    assert names == expected | {"report.html", "manifest.json"}
    assert [path.name for path in result.files[-2:]] == ["report.html", "manifest.json"]


def test_tables_read_back_as_they_were_returned(result: ReportResult, folder: Path) -> None:
    for name, table in result.tables.items():
        parquet = pd.read_parquet(folder / "tables" / f"{name}.parquet")
        csv = pd.read_csv(folder / "tables" / f"{name}.csv")
        pd.testing.assert_frame_equal(parquet, table, check_exact=True)
        pd.testing.assert_frame_equal(csv, table, rtol=1e-14, check_dtype=False)
        if name in COLUMNS:
            assert tuple(table.columns) == COLUMNS[name]
            assert len(table), name
    assert list(result.summary["mode"]) == [
        "int8_per_token_head",
        "int4_per_token_head",
        "lloyd2_unit_per_token_head",
        "lloyd3+mine",
    ]
    assert not result.summary.isna().any(axis=None)


def test_the_page_is_whole_and_asks_for_nothing(result: ReportResult, folder: Path) -> None:
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert len(page.identities) == len(set(page.identities))
    for address in page.addresses:
        assert address.startswith(("data:image/svg+xml;base64,", "data:,", "#")), address
        if address.startswith("#"):
            assert address[1:] in page.identities
    assert sum(address.startswith("data:image") for address in page.addresses) == len(PICTURES)
    text = " ".join(page.text)
    for row in result.summary.itertuples():
        assert str(row.mode).removesuffix("_per_token_head") in text
    assert "small.safetensors" in text
    assert activations_sha256(synthetic_activations(
        layers=2, tokens=64, queries=8, head_dim=32, dtype=torch.float16
    )) in text  # fmt: skip


def test_nothing_says_when_or_where(result: ReportResult, folder: Path, source: Path) -> None:
    del result
    year = re.compile(rb"20[2-9]\d-[01]\d-[0-3]\d|\b\d\d:\d\d:\d\d\b")
    paths = (str(folder), str(source.parent), str(Path.cwd()), os.path.expanduser("~/"), "/tmp/")
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        contents = file.read_bytes()
        if file.suffix != ".png":
            assert not year.search(contents), file.name
        for path in paths:
            assert path.encode() not in contents, (file.name, path)


def test_the_manifest_says_what_was_run(
    result: ReportResult, folder: Path, activations: Activations
) -> None:
    del result
    manifest = manifest_of(folder)
    assert manifest["schema"] == "kvq-report/1"
    assert manifest["input"] == {
        "name": "small.safetensors",
        "activations_sha256": activations_sha256(activations),
    }
    modes = manifest["options"]["modes"]
    assert isinstance(modes, list)
    assert [item["name"] for item in modes][-1] == "lloyd3+mine"
    assert {"kvq", "torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "python"} == set(
        manifest["versions"]
    )
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    for name, entry in manifest["tables"].items():
        contents = (folder / "tables" / f"{name}.csv").read_bytes()
        assert isinstance(entry, dict)
        assert entry["sha256"] == hashlib.sha256(contents).hexdigest()


def test_replay_gives_the_same_bytes(
    result: ReportResult, folder: Path, source: Path, tmp_path: Path
) -> None:
    del result
    again = replay(folder / "manifest.json", tmp_path, input_path=source)
    assert again.comparison is not None
    assert again.comparison.identical
    assert again.comparison.largest_relative_difference == 0.0
    assert "identical" in str(again.comparison)
    for file in folder.rglob("*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / file.relative_to(folder)).read_bytes(), file


class TestReplay:
    """What can be wrong with a record, and what a difference is called."""

    @pytest.fixture
    def record(self, result: ReportResult, folder: Path, tmp_path: Path) -> Path:
        """A copy of the report that a test may damage."""
        del result
        copy = tmp_path / "record"
        (copy / "tables").mkdir(parents=True)
        for file in (folder / "manifest.json", *(folder / "tables").iterdir()):
            (copy / file.relative_to(folder)).write_bytes(file.read_bytes())
        return copy

    @pytest.fixture
    def no_measuring(self, monkeypatch: pytest.MonkeyPatch, result: ReportResult) -> None:
        """The measures answer from the report that is there."""
        tables = {name: result.tables[name] for name in COLUMNS}
        monkeypatch.setattr(report_module, "measure", lambda *args, **options: tables)
        monkeypatch.setattr(report_module, "_write_pictures", lambda *args: [])

    def change(self, record: Path, column: str, factor: float) -> None:
        manifest = json.loads((record / "manifest.json").read_text())
        manifest["tables"]["theory"]["sha256"] = "0" * 64
        (record / "manifest.json").write_text(json.dumps(manifest))
        path = record / "tables" / "theory.parquet"
        table = pd.read_parquet(path)
        table[column] = table[column] * factor
        table.to_parquet(path, index=False)

    @pytest.mark.usefixtures("no_measuring")
    def test_differences_are_measured(self, record: Path, source: Path, tmp_path: Path) -> None:
        self.change(record, "value", 1 + 1e-7)
        found = replay(record / "manifest.json", tmp_path / "out", input_path=source).comparison
        assert found is not None
        assert found.differing == ("theory",)
        assert found.largest_relative_difference == pytest.approx(1e-7, rel=0.01)
        assert "theory differ, by at most 1.0e-07" in str(found)

    @pytest.mark.usefixtures("no_measuring")
    def test_other_rows_are_no_number(self, record: Path, source: Path, tmp_path: Path) -> None:
        self.change(record, "head_dim", 2)
        found = replay(record / "manifest.json", tmp_path / "out", input_path=source).comparison
        assert found is not None
        assert np.isinf(found.largest_relative_difference)
        assert "not in numbers alone" in str(found)

    @pytest.mark.usefixtures("no_measuring")
    def test_without_the_recorded_tables(self, record: Path, source: Path, tmp_path: Path) -> None:
        self.change(record, "value", 2.0)
        (record / "tables" / "theory.parquet").unlink()
        found = replay(record / "manifest.json", tmp_path / "out", input_path=source).comparison
        assert found is not None
        assert not found.identical
        assert np.isnan(found.largest_relative_difference)

    def test_other_activations_are_refused(self, record: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.safetensors"
        save_activations(other, synthetic_activations(layers=1, tokens=8, queries=2, seed=5))
        with pytest.raises(ValueError, match=r"'small.safetensors'.*got .*other.safetensors"):
            replay(record / "manifest.json", tmp_path / "out", input_path=other)
        with pytest.raises(ValueError, match=r"input_path must hold .* got the embedded sample"):
            replay(record / "manifest.json", tmp_path / "out")

    def test_the_record_is_not_written_over(self, record: Path, source: Path) -> None:
        with pytest.raises(ValueError, match="out must not be the folder of the manifest"):
            replay(record / "manifest.json", record, input_path=source)

    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            ("{", "not valid JSON"),
            ("[]", "schema must be kvq-report/1, got None"),
            ('{"schema": "kvq-report/9"}', "got 'kvq-report/9'"),
            ('{"schema": "kvq-report/1"}', "not a valid manifest"),
        ],
    )
    def test_what_is_no_manifest(self, contents: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / "manifest.json"
        path.write_text(contents)
        with pytest.raises(FileFormatError, match=message):
            replay(path, tmp_path / "out")
        with pytest.raises(FileFormatError, match="cannot be read"):
            replay(tmp_path / "none.json", tmp_path / "out")

    def test_a_mode_that_breaks_a_rule(self, record: Path, tmp_path: Path) -> None:
        manifest = json.loads((record / "manifest.json").read_text())
        manifest["options"]["modes"][3]["codebook"]["levels"][0] = 5.0
        (record / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(FileFormatError, match="levels must be strictly increasing"):
            replay(record / "manifest.json", tmp_path / "out")


def test_without_queries_the_rows_are_still_measured(
    activations: Activations, tmp_path: Path
) -> None:
    layers = {i: layer._replace(query=None) for i, layer in activations.layers.items()}
    without = Activations(layers, activations.positions, torch.arange(0), 1.0)
    made = run_report(without, tmp_path, modes=["int8", "int2"], settings=SETTINGS)
    assert made.tables["score_bias"].empty
    assert made.tables["attention_error"].empty
    assert made.summary["output_error"].isna().all()
    assert made.summary["key_relative_error"].notna().all()
    assert {path.stem for path in made.files if path.suffix == ".svg"} == {
        "error_against_theory", "drift_gaussian", "activation_statistics", "storage",
    }  # fmt: skip
    text = (tmp_path / "report.html").read_text()
    assert "scores and attention were not measured" in text
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text).lower()


def test_one_token_and_one_head(tmp_path: Path) -> None:
    tiny = synthetic_activations(
        layers=1, tokens=1, queries=1, query_heads=1, heads=1, head_dim=16
    )
    made = run_report(tiny, tmp_path, modes=["lloyd2_unit"], settings=SETTINGS)
    assert made.tables["rounding_drift"].empty
    assert made.summary["key_relative_error_se"].isna().all()
    assert Page((tmp_path / "report.html").read_text(encoding="utf-8")).open == []


def test_threads_are_given_back(activations: Activations, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run_report(activations, tmp_path, modes=["int2"], settings=SETTINGS, threads=before + 1)
    assert torch.get_num_threads() == before
    assert manifest_of(tmp_path)["options"]["threads"] == before + 1


def test_modes_that_do_not_fit(activations: Activations, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="different names, got 'int8_per_token_head' twice"):
        run_report(activations, tmp_path, modes=["int8", "int8_per_token_head"])
    with pytest.raises(ValueError, match="at least one mode"):
        run_report(activations, tmp_path, modes=[])
    odd = synthetic_activations(layers=1, tokens=4, queries=1, head_dim=24)
    with pytest.raises(ValueError, match=r"suit layers.0.key, got int4.*divisible by 16.*got 24"):
        run_report(odd, tmp_path, modes=["int8", "int4"])
    assert not any(tmp_path.iterdir())


def test_settings_have_rules() -> None:
    with pytest.raises(ValueError, match="page must be at least 1, got 0"):
        Settings(page=0)
    with pytest.raises(ValueError, match="drift_queries must be at most 1"):
        Settings(drift_queries=2.0)


def test_a_progress_bar_only_where_there_is_a_terminal(
    activations: Activations, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(activations, [mode("int8")], settings=SETTINGS, progress=True, only=("theory",))
    assert capsys.readouterr().err == ""


def test_some_tables_alone(activations: Activations, result: ReportResult) -> None:
    chosen = [MODES["int8_per_token_head"], MODES["int4_per_token_head"]]
    tables = measure(activations, chosen, settings=SETTINGS, only=("score_bias",))
    assert [name for name, table in tables.items() if len(table)] == ["score_bias"]
    whole = result.tables["score_bias"]
    part = whole[whole["mode"].isin([each.name for each in chosen])].reset_index(drop=True)
    pd.testing.assert_frame_equal(tables["score_bias"], part, check_exact=True)


def test_headlines(result: ReportResult) -> None:
    printed = result.headline()
    assert list(printed["mode"]) == ["int8", "int4", "lloyd2_unit", "lloyd3+mine"]
    assert list(printed["theory from"]) == ["monte carlo", "monte carlo", "exact", "monte carlo"]
    assert all(" ± " in cell for cell in printed["output error"])
    assert headline(result.summary).equals(printed)


@pytest.mark.parametrize(
    ("value", "standard_error", "expected"),
    [
        (0.0078461, 0.0000892, ("0.00785", "0.00009")),
        (1.2345, 0.0123, ("1.234", "0.012")),
        (3.4861e-5, 4.1e-7, ("3.49e-05", "4e-07")),
        (-8.1e-5, 3e-4, ("-0.0001", "0.0003")),
        (0.0, 0.02, ("0.00", "0.02")),
        (0.114545, 0.0, ("0.11454", "")),
        (1.0, 1e-9, ("1", "")),
        (123.4, 30.0, ("123", "30")),
        (float("nan"), float("nan"), ("", "")),
        (0.5, float("nan"), ("0.5", "")),
    ],
)
def test_values_with_their_error(
    value: float, standard_error: float, expected: tuple[str, str]
) -> None:
    assert with_error(value, standard_error) == expected
