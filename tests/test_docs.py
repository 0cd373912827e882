"""What the README and the pages of docs/ tell the reader to run.

Python blocks are run, page by page, and so are the commands that take seconds. Of every other
command, in blocks and in the text, the parts must exist. A block that cannot run has a line
`<!-- not run: why -->` above it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from kvq.activations import save_activations
from kvq.analysis.samples import synthetic_activations
from kvq.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
#: Commands that are run where a page has them; they take seconds, and write what they name.
RUN = {"modes", "fit", "encode", "inspect"}

_FENCE = re.compile(
    r"(?P<before>[^\n]*)\n\n?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
_INLINE = re.compile(r"`((?:kvq|make) [^`]+)`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


class Block(NamedTuple):
    """A fenced block: its language, its text, the line before it, and whether it is to be run."""

    language: str
    text: str
    line: int
    run: bool


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def blocks(page: Path) -> list[Block]:
    text = "\n\n" + page.read_text(encoding="utf-8")
    return [
        Block(
            match["language"],
            match["text"],
            text.count("\n", 2, match.start("text")),
            not match["before"].startswith("<!-- not run: "),
        )
        for match in _FENCE.finditer(text)
    ]


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a block of shell, split into words."""
    if block.language in ("", "sh", "console", "shell", "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                if words := shlex.split(part, comments=True):
                    yield words


def is_run(block: Block) -> bool:
    """Whether there is something in it that is run."""
    program = any(words[0] == "kvq" and words[1] in RUN for words in commands(block))
    return block.run and (program or block.language == "python")


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words (without `kvq`) name, and what it is given."""
    command = typer.main.get_command(app)
    while words and (children := getattr(command, "commands", None)):
        assert words[0] in children, f"there is no command {words[0]}"
        command, words = children[words[0]], words[1:]
    return command, words


def options(command: Any) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


def check_exists(words: list[str]) -> None:
    """A command line must be one that its program takes."""
    match words:
        case ["kvq", "--version" | "--help"]:
            pass
        case ["kvq", *rest]:
            command, arguments = find_command(rest)
            command.make_context(command.name, list(arguments))
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            for target in targets:
                assert f"\n{target}:" in makefile or "=" in target, f"make has no {target}"
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), f"there is no module {module}"
        case ["python", file, *_] if file.endswith(".py"):
            assert (ROOT / file).exists(), f"there is no file {file}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_exist(page: Path) -> None:
    for block in blocks(page):
        for words in commands(block):
            check_exists(words)
    for text in _INLINE.findall(page.read_text(encoding="utf-8")):
        program, *words = text.split()
        if program == "make":
            check_exists([program, *words])
        elif words[0].islower() and words[0].isalpha():
            command, arguments = find_command(words)
            given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
            assert given <= {*options(command), "--help"}, text


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        # The pages that the site makes itself have no file here.
        if not target.startswith(("api/", "../api/", "command-line.md", "../command-line.md")):
            assert (page.parent / target).exists(), f"{relative(page)} has a link to {target}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(is_run(block) for block in blocks(page))],
    ids=relative,
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after the other, in an empty folder with an activation file."""
    monkeypatch.chdir(tmp_path)
    save_activations("activations.safetensors", synthetic_activations(layers=2, tokens=96))
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and block.run:
            tree = ast.increment_lineno(ast.parse(block.text), block.line)
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            for name in ("model", "ids"):
                if name in used and name not in names:
                    names[name] = given(name)
            exec(compile(tree, str(page), "exec"), names)
        for words in commands(block) if is_run(block) else ():
            if words[0] == "kvq" and words[1] in RUN:
                result = CliRunner().invoke(app, words[1:])
                assert result.exit_code == 0, (words, result.output)


def given(name: str) -> Any:
    """What pages take as there: a model of transformers and a prompt."""
    pytest.importorskip("transformers")
    from tests.integrations.models import prompt, tiny_model

    return tiny_model("qwen2", "sdpa") if name == "model" else prompt(batch=1)
