"""The form of the tables of bad command lines, and the files that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer

from kvq.activations import Activations, LayerActivations, save_activations
from kvq.calibration_files import Calibration, LayerCalibration, save_calibration
from kvq.cli import app
from kvq.codebook_files import save_codebook
from kvq.codebooks import CODEBOOKS
from kvq.rotary import RotarySpec

#: The command line. Making it takes longer than most errors.
GROUP: Any = typer.main.get_command(app)


def find_command(name: str) -> Any:
    """A command by its one or two words."""
    found = GROUP
    for word in name.split():
        found = found.commands[word]
    return found


class Line(NamedTuple):
    """A command line that must be refused.

    `{name}` in an argument stands for the path of a file that `write_files` writes.
    """

    #: The option or the argument of the command that is bad.
    option: str
    #: What follows the name of the command.
    arguments: tuple[str, ...]
    #: What standard error must say: parts of it, in this order, with `...` between them.
    message: str


def bad(option: str, arguments: str, message: str) -> Line:
    """A line whose arguments are separated by spaces; `''` is an empty one."""
    return Line(option, tuple("" if part == "''" else part for part in arguments.split()), message)


def write_files(folder: Path) -> dict[str, str]:
    """Files of every kind, good and bad, by name."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layers = {
        index: LayerActivations(drawn(4, 4, 32), drawn(12, 2, 32), drawn(12, 2, 32))
        for index in (0, 3)
    }
    positions = torch.arange(12)
    rotary = RotarySpec(tuple(0.1**i for i in range(16)), 32)
    acts = Activations(layers, positions, positions[-4:], 0.2, rotary)
    found = {name: folder / name for name in ("acts", "alone", "book", "calibration", "text")}
    save_activations(found["acts"], acts)
    unqueried = {0: layers[0]._replace(query=None)}
    save_activations(found["alone"], Activations(unqueried, positions, positions[:0], 0.2))
    save_codebook(found["book"], CODEBOOKS["gaussian_8"])
    save_calibration(
        found["calibration"],
        Calibration(rotary, {9: LayerCalibration(torch.zeros(2, 32), torch.ones(2, 32))}),
    )
    found["text"].write_text("Prose, and no more of it.\n")
    for name, contents in (
        ("latin", b"caf\xe9"),
        ("empty", b""),
        ("list", b"[1, 2]"),
        ("other", json.dumps({"schema": "other/1", "rows": []}).encode()),
        ("number", b"7"),
        ("pickle", b"\x80\x04N."),
        ("deep", b"[" * 100_000),
    ):
        found[name] = folder / name
        found[name].write_bytes(contents)
    found["folder"] = folder / "folder"
    found["folder"].mkdir()
    found["model"] = folder / "model"
    found["model"].mkdir()
    (found["model"] / "config.json").write_text("{")
    (found["model"] / "model.safetensors").write_bytes(b"")
    found["gguf"] = folder / "m.gguf"
    found["gguf"].write_bytes(b"not a model")
    found |= {"missing": folder / "missing", "under": found["text"] / "file"}
    found["out"] = folder / "out"
    return {name: str(path) for name, path in found.items()}


def run_line(
    name: str, line: Line, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, as one line, of a command."""
    arguments = [argument.format(**files) for argument in line.arguments]
    # Anything but a SystemExit would be a traceback.
    with pytest.raises(SystemExit) as ended:
        GROUP.main(args=[*name.split(), *arguments], prog_name="kvq")
    out, error = capsys.readouterr()
    # What typer says by itself stands in a box.
    said = re.sub("[│─╭╮╰╯]", " ", error)
    return int(ended.value.code or 0), out, " ".join(said.split())
