"""Every command with every kind of bad option: one line that says what is wrong, exit code 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvq.cli import COMMANDS, GROUPS
from tests.bad_input.command_rows import LINES, OPEN
from tests.bad_input.command_table import Line, find_command, run_line, write_files
from tests.bad_input.table import as_pattern


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        pytest.param(name, line, id=f"{name}-{line.option}-{number}")
        for name, lines in LINES.items()
        for number, line in enumerate(lines)
    ],
)
def test_refused(
    name: str,
    line: Line,
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    code, out, error = run_line(name, line, files, capsys)
    assert code == 2, error
    assert not out
    wanted = as_pattern(line.message.format(**files))
    assert re.search(wanted, error), error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir()), "something was written"
    assert not Path(files["out"]).exists(), "something was written"


def options_of(name: str) -> set[str]:
    """The options and arguments of a command, by their longest name."""
    return {
        max(parameter.opts, key=len)
        for parameter in find_command(name).params
        if parameter.name != "help"
    }


EVERY = (*COMMANDS, *(f"{first} {name}" for first in GROUPS for name in GROUPS[first].COMMANDS))


@pytest.mark.parametrize("name", EVERY)
def test_every_option_has_a_line(name: str) -> None:
    covered = {line.option for line in LINES.get(name, ())} | set(OPEN.get(name, ()))
    missing = options_of(name) - covered - {"--json"}
    assert not missing, f"{name}: no line in command_rows.py for {sorted(missing)}"
    unknown = covered - options_of(name)
    assert not unknown, f"{name} has no {sorted(unknown)}"
