"""The command line: results, exit codes, one JSON document, and errors in one line."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import kvq
from kvq.activations import Activations, LayerActivations, save_activations
from kvq.cli import COMMANDS, app
from kvq.codebook_files import load_codebook
from kvq.commands.modes import family_table, with_tables
from kvq.encoded_files import load_encoded
from kvq.modes import short_name
from tests.compare import assert_bit_exact

ROOT = Path(__file__).parents[1]
TOKENS, HEADS, HEAD_DIM = 24, 2, 32


def run(*arguments: object, code: int = 0) -> Result:
    """Run a command line, which must end with this exit code and without a traceback."""
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    if code == 2:
        assert not result.stdout
    return result


def run_json(*arguments: object, code: int = 0) -> Any:
    """What a command with `--json` prints on standard output."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def error(*arguments: object) -> str:
    """The one line that a command fails with."""
    (line,) = run(*arguments, code=2).stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def drawn() -> Activations:
    generator = torch.Generator().manual_seed(5)
    layers = {
        index: LayerActivations(
            torch.randn(8, 2 * HEADS, HEAD_DIM, generator=generator),
            torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator),
            torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator),
        )
        for index in (0, 3)
    }
    positions = torch.arange(TOKENS)
    return Activations(layers, positions, positions[-8:], 0.2, None, {"model": "drawn [seed 5]"})


@pytest.fixture
def activations() -> Activations:
    return drawn()


@pytest.fixture
def source(activations: Activations, tmp_path: Path) -> Path:
    path = tmp_path / "acts.safetensors"
    save_activations(path, activations)
    return path


# Help


def test_help_lists_every_command() -> None:
    text = run("--help").stdout
    assert all(name in text for name in COMMANDS)
    # Without a command: the help, and a usage error.
    assert "Usage" in CliRunner().invoke(app, []).output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(name: str) -> None:
    text = " ".join(run(name, "--help").stdout.split())
    assert "Examples:" in text
    for example in COMMANDS[name].EXAMPLES:
        assert example in text


@pytest.mark.parametrize(
    "example", [example for module in COMMANDS.values() for example in module.EXAMPLES]
)
def test_examples_can_be_parsed(example: str) -> None:
    program, name, *arguments = shlex.split(example)
    assert program == "kvq"
    group: Any = typer.main.get_command(app)
    group.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name: str) -> None:
    assert "--json" in run(name, "--help").stdout


def test_version() -> None:
    assert run("--version").stdout == f"kvq {kvq.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["modes", "--nonsense"], ["modes", "--head-dim", "x"], ["fit"]]
)
def test_usage_errors(arguments: list[str]) -> None:
    run(*arguments, code=2)


# Modes


def test_modes() -> None:
    text = run("modes").stdout
    assert all(name.removesuffix("_per_token_head") in text for name in kvq.MODES)


def test_modes_as_json() -> None:
    rows = {row["mode"]: row for row in run_json("modes", "--head-dim", 64)}
    assert list(rows) == list(kvq.MODES)
    int4 = rows["int4_per_token_head"]
    assert int4["bits_per_value"] == 4.5
    assert int4["bytes_per_row"] == 32
    assert int4["parts"]["rotation"]["rounds"] == 1


def test_modes_that_refuse_a_head_size() -> None:
    rows = {row["mode"]: row for row in run_json("modes", "--head-dim", 72)}
    assert rows["int8_per_token_head"]["bytes_per_row"] == 72
    assert rows["int4_per_token_head"]["bytes_per_row"] is None
    run("modes", "--head-dim", 72)
    assert error("modes", "--head-dim", 0) == "head_dim must be at least 1, got 0"


@pytest.mark.parametrize("name", ["README.md", "docs/guide/modes.md"])
def test_the_tables_of_modes_are_in_step(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == with_tables(text, 128), "run: make readme"


def test_every_mode_is_in_one_family() -> None:
    rows = [line.replace("`", "").split("|")[1:-1] for line in family_table(128).splitlines()[2:]]
    names = []
    for stem, *_, others in rows:
        names.append(stem.strip())
        for other in filter(None, map(str.strip, others.split(","))):
            names.append(stem.strip() + other if other.startswith("_") else other)
    assert sorted(names) == sorted(short_name(mode) for mode in kvq.MODES)
    # One row for what has the same codes: `int2` is among those of `lloyd2`.
    (row,) = (line for line in family_table(128).splitlines() if "`int2`" in line)
    assert row.startswith("| `lloyd2` | 2.25 / 2.125 | ")
    text = run("modes", "--families").stdout
    assert text.count("gaussian_4") == 1
    assert all(row[0] in text for row in rows)


def test_modes_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- kvq modes: begin -->\nold\n<!-- kvq modes: end -->\nb\n")
    run("modes", "--into", path)
    table = run("modes", "--markdown").stdout
    assert path.read_text() == (
        f"a\n<!-- kvq modes: begin -->\n{table}<!-- kvq modes: end -->\nb\n"
    )
    path.write_text("no markers")
    assert "must hold the lines" in error("modes", "--into", path)


# Encode


@pytest.mark.parametrize("mode", ["int8", "int4", "lloyd3", "smax2_per_token_head"])
def test_encode(mode: str, source: Path, activations: Activations, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "encoded.safetensors"
    described = run_json("encode", source, "--mode", mode, "--out", out)
    assert described["layers"] == 2
    encoded = load_encoded(out)
    for index, layer in activations.layers.items():
        expected = kvq.quantize(layer.value, mode)
        assert_bit_exact(encoded.layers[index].value.codes, expected.codes)
        assert_bit_exact(encoded.layers[index].value.words, expected.words)


def test_encode_with_a_mode_for_each_side(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "e.safetensors"
    run("encode", source, "--key-mode", "int4", "--value-mode", "lloyd2_unbiased", "--out", out)
    key, value = load_encoded(out).layers[3]
    assert key.mode is not None
    assert (str(key.mode), str(value.mode)) == (
        "int4_per_token_head",
        "lloyd2_unbiased_per_token_head",
    )


def test_both_tiers_write_the_same_bytes(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    encode = ("encode", source, "--key-mode", "int4", "--value-mode", "lloyd3", "--tier")
    for tier in ("reference", "kernels"):
        run(*encode, tier, "--out", tmp_path / tier)
    assert (tmp_path / "kernels").read_bytes() == (tmp_path / "reference").read_bytes()


def test_encode_errors(source: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "e.safetensors")
    assert "--key-mode" in error("encode", source, *out)
    assert "--value-mode" in error("encode", source, "--key-mode", "int4", *out)
    assert "mode must be one of int8" in error("encode", source, "--mode", "int5", *out)
    missing = tmp_path / "missing"
    assert error("encode", missing, "--mode", "int4", *out).startswith(
        f"{missing}: cannot be read"
    )
    run("encode", source, "--mode", "int4", "--tier", "abacus", *out, code=2)
    assert not (tmp_path / "e.safetensors").exists()
    folder = ("--out", tmp_path)
    error("encode", source, "--mode", "int4", *folder)


# Fit


def test_fit_a_law(tmp_path: Path) -> None:
    out = tmp_path / "mine.safetensors"
    document = run_json("fit", "--law", "norm", "--levels", 4, "--name", "mine", "--out", out)
    assert document["distortion"] == pytest.approx(0.117481847829329287, abs=1e-12)
    comparison = document["relative_distortion"]
    assert comparison["Panter-Dite of N(0,1)"] == pytest.approx(2.7207 / 16, rel=1e-4)
    assert comparison["D(R) of N(0,1)"] == 1 / 16
    assert document["certificate"]["converged"]
    codebook = load_codebook(out)
    assert codebook.name == "mine"
    assert codebook.levels == kvq.CODEBOOKS["gaussian_4"].levels
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")


def test_fit_prints_tables(tmp_path: Path) -> None:
    out = tmp_path / "mine.safetensors"
    result = run("fit", "--law", "sphere(64)", "--levels", 3, "--out", out)
    for word in ("Certificate", "stationarity", "Lloyd-Max", "Panter-Dite", "D(R)", "sphere(64)"):
        assert word in result.stdout
    assert str(out) in result.stderr


def test_fit_activations_and_use_the_codebook(source: Path, tmp_path: Path) -> None:
    book, out = tmp_path / "keys.safetensors", tmp_path / "e.safetensors"
    document = run_json(
        "fit", "--from", source, "--side", "key", "--layer", 3, "--head", 0, "--base", "lloyd3",
        "--levels", 5, "--name", "keys", "--out", book, "--picture", tmp_path / "p" / "a.png",
    )  # fmt: skip
    assert (tmp_path / "p" / "a.png").exists()
    assert "layer 3" in document["codebook"]["provenance"]["source"]
    assert document["codebook"]["recipe"]["weighted"] is False
    run("encode", source, "--mode", "lloyd3", "--codebook", book, "--out", out)
    key, value = load_encoded(out).layers[0]
    assert key.mode.name == value.mode.name == "lloyd3+keys"
    assert key.mode.codebook == load_codebook(book)
    assert int(kvq.unpack_codes(key.codes, 3, HEAD_DIM).max()) <= 4


@pytest.mark.parametrize(
    ("base", "weigh", "weighted"),
    [("lloyd2", [], False), ("lloyd2", ["--weigh"], True), ("smax2", [], True)],
)
def test_fit_weighs_rows(
    base: str, weigh: list[str], weighted: bool, source: Path, tmp_path: Path
) -> None:
    document = run_json(
        "fit", "--from", source, "--base", base, "--levels", 4, *weigh, "--out", tmp_path / "c.st"
    )
    assert document["codebook"]["recipe"]["weighted"] is weighted


def test_fit_errors(source: Path, tmp_path: Path) -> None:
    fit = ("fit", "--levels", 4, "--out", tmp_path / "c.safetensors")
    assert "either --law or --from" in error(*fit)
    assert "either --law or --from" in error(*fit, "--law", "norm", "--from", source)
    assert "law must be" in error(*fit, "--law", "__import__('os')")
    assert "layer must be one of 0, 3, got 1" in error(*fit, "--from", source, "--layer", 1)
    assert "side must be one of key, value" in error(*fit, "--from", source, "--side", "query")
    assert "head must be one of 0, 1" in error(*fit, "--from", source, "--head", 2)
    assert "base must be a codebook mode" in error(*fit, "--from", source, "--base", "int4")
    assert "num_levels must be" in error("fit", "--law", "norm", "--levels", 1)


def test_a_fit_that_is_no_fixed_point_fails_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvq.reference import lloyd_max

    real = lloyd_max.fit

    def unconverged(*args: Any, **kwargs: Any) -> lloyd_max.LloydMaxFit:
        fitted = real(*args, **kwargs)
        from dataclasses import replace

        return fitted._replace(certificate=replace(fitted.certificate, converged=False))

    monkeypatch.setattr(lloyd_max, "fit", unconverged)
    out = tmp_path / "c.safetensors"
    result = run("fit", "--law", "norm", "--levels", 4, "--out", out, code=1)
    assert "check failed" in result.stderr


# Inspect


def test_inspect_activations(source: Path) -> None:
    document = run_json("inspect", source)
    assert document["schema"] == "kvq-activations/1"
    assert document["provenance"] == {"model": "drawn [seed 5]"}
    text = run("inspect", source).stdout
    # Square brackets are text, not markup.
    assert "drawn [seed 5]" in text
    assert f"[{TOKENS}, {HEADS}, {HEAD_DIM}] float32" in text


def test_inspect_encoded(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "e.safetensors"
    run("encode", source, "--mode", "int4", "--out", out)
    document = run_json("inspect", out)
    assert document["schema"] == "kvq-encoded/1"
    assert document["bits_per_value"] == 5.0
    assert document["modes"]["int4_per_token_head"]["rounding"] == "half_away"
    assert "int4_per_token_head" in run("inspect", out).stdout


def test_inspect_codebook(tmp_path: Path) -> None:
    out = tmp_path / "c.safetensors"
    run("fit", "--law", "norm", "--levels", 3, "--out", out)
    document = run_json("inspect", out)
    assert document["num_levels"] == 3
    assert document["levels"][1]["level"] == 0.0
    assert "norm" in run("inspect", out).stdout


def test_inspect_refuses(source: Path, tmp_path: Path) -> None:
    assert "cannot be read" in error("inspect", tmp_path / "missing")
    other = tmp_path / "other"
    for contents in (b"", b"PK\x03\x04", b"{}", b"\x00" * 64, source.read_bytes()[:-5]):
        other.write_bytes(contents)
        assert error("inspect", other).startswith(f"{other}: ")


# Report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A small report: its input, its folder and what the command printed."""
    folder = tmp_path_factory.mktemp("report")
    source, book, out = folder / "acts.safetensors", folder / "mine.safetensors", folder / "report"
    save_activations(source, drawn())
    run("fit", "--law", "sphere(32)", "--levels", 5, "--name", "mine", "--out", book)
    document = run_json(
        "report", "--input", source, "--out", out, "--mode", "int4", "--codebook", book,
        "--base", "lloyd2", "--seed", 3,
    )  # fmt: skip
    return source, out, document


def test_report(report: tuple[Path, Path, Any]) -> None:
    _, out, document = report
    assert [row["mode"] for row in document["summary"]] == ["int4_per_token_head", "lloyd2+mine"]
    assert document["comparison"] is None
    assert all(Path(file).is_file() for file in document["files"])
    assert (out / "report.html").is_file()


def test_replay(report: tuple[Path, Path, Any], tmp_path: Path) -> None:
    source, out, _ = report
    manifest = json.loads((out / "manifest.json").read_text())
    result = run(
        "report", "--replay", out / "manifest.json", "--input", source, "--out", tmp_path / "1"
    )
    assert "int4" in result.stdout
    assert "identical" in result.stderr
    name = next(iter(manifest["tables"]))
    manifest["tables"][name]["sha256"] = "0" * 64
    # Beside the recorded tables, which are the same after all; and where they are not there.
    beside, apart = out / "changed.json", tmp_path / "changed.json"
    for changed, code, difference in ((beside, 0, 0.0), (apart, 1, None)):
        changed.write_text(json.dumps(manifest))
        document = run_json(
            "report", "--replay", changed, "--input", source, "--out", tmp_path / "2", code=code
        )
        assert document["comparison"] == {
            "differing": [name],
            "largest_relative_difference": difference,
        }


def test_report_errors(report: tuple[Path, Path, Any], tmp_path: Path) -> None:
    source, out, _ = report
    assert "mode must be one of" in error("report", "--mode", "int5", "--out", tmp_path)
    assert "not valid JSON" in error("report", "--replay", source, "--out", tmp_path)
    assert "SHA-256" in error("report", "--replay", out / "manifest.json", "--out", tmp_path)


def test_inspect_a_manifest(report: tuple[Path, Path, Any], tmp_path: Path) -> None:
    _, out, _ = report
    document = run_json("inspect", out / "manifest.json")
    assert document["schema"] == "kvq-report/1"
    assert document["seed"] == 3
    assert set(document["modes"]) == {"int4_per_token_head", "lloyd2+mine"}
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / "report.html").write_text("another page")
    result = run("inspect", copy / "manifest.json", code=1)
    assert "report.html" in result.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    for change in ({"schema": "kvq-report/2"}, {"files": {"../x": ""}}, {"options": 3}):
        (copy / "manifest.json").write_text(json.dumps({**manifest, **change}))
        assert "not a valid manifest" in error("inspect", copy / "manifest.json")


# Capture


def test_capture_hands_its_options_on(
    activations: Activations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvq.integrations import capture

    seen: dict[str, Any] = {}

    def fake(*paths: Path, **options: Any) -> Activations:
        seen.update(options, paths=paths)
        return activations

    monkeypatch.setattr(capture, "capture_command", fake)
    document = run_json(
        "capture", "--model", "m", "--text", "t", "--out", "o", "--layers", "0, 4,-1",
        "--tokens", 640, "--text-source", "prose",
    )  # fmt: skip
    assert document["layers"] == 2
    assert seen["paths"] == (Path("m"), Path("t"), Path("o"))
    assert seen["layers"] == [0, 4, -1]
    assert (seen["tokens"], seen["queries"], seen["text_source"]) == (640, 64, "prose")
    assert "layers must be comma-separated" in error(
        "capture", "--model", "m", "--text", "t", "--out", "o", "--layers", "0;4"
    )


def test_capture_without_a_model(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("prose")
    message = error("capture", "--model", tmp_path / "m", "--text", text, "--out", tmp_path / "o")
    assert "model" in message


# Errors


def test_debug_lets_the_traceback_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_DEBUG", "1")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "missing")])
    assert isinstance(result.exception, ValueError)


def test_a_fault_of_ours_is_one_line_too(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvq.commands import inspect

    def broken(_: Path) -> None:
        raise IndexError("off by one")

    monkeypatch.setattr(inspect, "describe", broken)
    result = run("inspect", source, code=3)
    assert result.stderr == "error: IndexError: off by one (KVQ_DEBUG=1 shows where)\n"


def as_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvq", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


def test_processes(source: Path, tmp_path: Path) -> None:
    version = as_process("--version")
    assert (version.returncode, version.stdout) == (0, f"kvq {kvq.__version__}\n")
    failed = as_process("inspect", tmp_path / "missing")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert len(failed.stderr.splitlines()) == 1
    encoded = as_process(
        "encode", source, "--mode", "int4", "--out", tmp_path / "e.safetensors", "--json"
    )
    assert encoded.returncode == 0
    assert json.loads(encoded.stdout)["schema"] == "kvq-encoded/1"


def test_help_and_modes_load_nothing_heavy() -> None:
    program = (
        "import sys; from kvq.cli import app\n"
        "try: app(['modes'])\nexcept SystemExit: pass\n"
        "assert not {'scipy', 'matplotlib', 'pandas', 'transformers'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=ROOT, stdout=subprocess.DEVNULL
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    message = "device must be one that torch finds, got 'cuda'"
    assert error("serving", "--recipe", "int4") == message
