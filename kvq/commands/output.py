"""What the commands print, and on which stream.

The result goes to standard output: tables, or one JSON document with `--json`. What is said on the
way goes to standard error.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import IO, Annotated, TypeVar

import typer
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

_T = TypeVar("_T")

#: How wide a table may be where no terminal says it.
_FILE_WIDTH = 200

#: The option `--json` of every command.
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output instead.")
]


def print_json(document: object) -> None:
    """Print one JSON document on standard output; NaN and infinities become `null`."""
    text = json.dumps(_plain(document), indent=2, ensure_ascii=False, allow_nan=False)
    typer.echo("".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output; only its last column wraps.

    Columns of numbers are set to the right. Without column names there is no head.
    """
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_header=any(columns)
    )
    last = len(columns) - 1
    for index, name in enumerate(columns):
        numbers = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(
            Text(_visible(name)),
            justify="right" if numbers and rows else "left",
            no_wrap=index < last,
            overflow="fold" if index == last else "ellipsis",
        )
    for row in rows:
        table.add_row(*map(_cell, row))
    console = _console(sys.stdout)
    console.print(Text(_visible(title), style="bold"))
    console.print(table)


def say(message: str) -> None:
    """Print a line on standard error."""
    typer.echo(_visible(message), err=True)


def track(items: Sequence[_T], description: str) -> Iterable[_T]:
    """`items`, with a progress bar on standard error if that is a terminal."""
    return progress.track(
        items,
        description,
        console=_console(sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def waiting(description: str) -> AbstractContextManager[object]:
    """A spinner on standard error, if that is a terminal, for work that cannot be counted."""
    return _console(sys.stderr).status(description)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _console(stream: IO[str]) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _FILE_WIDTH, highlight=False)


def _cell(value: object) -> Text:
    """A value as a table shows it. `Text`, because square brackets in a string are no markup."""
    if value is None:
        return Text("")
    if isinstance(value, float):
        return Text(f"{value:.6g}")
    return Text(_visible(str(value)))


def _visible(text: str) -> str:
    """`text` with its control characters escaped, but for ends of lines: a file must not move the
    cursor."""
    return "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
