"""Writes `command-line.md` from the tree of commands, when the site is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kvq import cli

PAGE: Final = "command-line.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the files of the site."""
    files.append(File.generated(config, PAGE, content=command_line_page()))
    return files


def command_line_page() -> str:
    """The page: every command with its options and examples."""
    root: Any = typer.main.get_command(cli.app)
    _, _, exit_codes = (cli.__doc__ or "").partition("Exit codes: ")
    parts = [
        "# The command line",
        f"{root.help} This page is made from the commands themselves; `kvq COMMAND --help` "
        "prints the same.",
        "Results go to standard output, everything else to standard error. With `--json` "
        "standard output is one JSON document. "
        f"Exit codes: {' '.join(exit_codes.split())}",
    ]
    for name, command in root.commands.items():
        parts += _command_parts(f"kvq {name}", command, depth=2)
    return "\n\n".join(parts) + "\n"


def _command_parts(name: str, command: Any, depth: int) -> Iterator[str]:
    """A heading, the help, the options and the examples; then those of the commands below."""
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"{'#' * depth} {name}"
    usage = " ".join((name, *command.collect_usage_pieces(context)))
    yield f"```text\n{usage}\n```"
    if command.help:
        yield command.help
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [(option, text) for option, text in filter(None, records) if "--help" not in option]
    if rows:
        lines = [("option", "what it does"), ("---", "---")]
        lines += [(f"`{option}`", _cell(text)) for option, text in rows]
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if command.epilog:
        _, _, examples = command.epilog.partition("\n\n")
        yield "```sh\n" + examples.replace("\n\n", "\n") + "\n```"
    for below, child in getattr(command, "commands", {}).items():
        yield from _command_parts(f"{name} {below}", child, depth + 1)


def _cell(text: str) -> str:
    """Text as a cell of a table: on one line, with its bars, brackets and stars escaped."""
    text = " ".join(text.split())
    for sign in "|[]<>*_":
        text = text.replace(sign, f"\\{sign}")
    return text
