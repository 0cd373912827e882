"""The built wheel, installed outside the repository, runs the main job."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvq

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == kvq.__version__
    assert f"## {kvq.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {kvq.__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_wheel_runs_the_report_outside_the_repository(tmp_path: Path) -> None:
    # Source distribution first and the wheel from that: what a stale build folder holds stays out.
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("kvq/", "kvq-")) for name in names)
    assert "kvq/py.typed" in names
    assert any(name.startswith("kvq/data/") and name.endswith(".safetensors") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)

    # An environment that sees the libraries of this one, but not this kvq: the lines of a .pth
    # file are folders, and the .pth files in them are not read.
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    scripts = Path(sysconfig.get_path("scripts", vars={"base": str(environment)}))
    python = scripts / Path(sys.executable).name
    site = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet")
    run(*pip, wheel, cwd=tmp_path)

    where = run(python, "-c", "import kvq; print(kvq.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(site)
    modes = ("--mode", "int4", "--mode", "lloyd2")
    printed = run(scripts / "kvq", "report", "--out", "report", *modes, "--json", cwd=tmp_path)
    summary = json.loads(printed)["summary"]
    assert {row["mode"] for row in summary} >= {"int4_per_token_head", "lloyd2_per_token_head"}
    assert (tmp_path / "report" / "manifest.json").exists()
