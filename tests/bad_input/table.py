"""The form of the tables of bad input: calls that work, and what makes each of them fail.

A `Call` has arguments that work. A row puts one bad value (or, with `change`, several) in their
place and says which error comes: its type, and its message, in which `...` stands for any text.
Every message names the argument, the rule and the value.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvq.files import FileFormatError

#: What a message may name in place of an argument: its size or its part that breaks the rule, or
#: the other argument, where two do not fit together.
STANDS_FOR: dict[str, tuple[str, ...]] = {
    "x": ("head_dim",),
    "points": ("samples",),
    "head_dim": ("codes", "packed", "keys"),
    "value": ("recipe", "rotary", "layout", "frequencies"),
    "positions": ("layers",),
    "activations": ("layer",),
    "modes": ("mode",),
    "out": ("file",),
    "words": ("codes",),
    "key_cache": ("value_cache",),
    "mode": ("rounding",),
    "sides": ("side",),
    "heads": ("head",),
    "transforms": ("key_transforms",),
    "text": ("law", "head_dim", "recipe", "mode", "rounding"),
    "name": ("mode", "dtype"),
    "path": ("model", "text"),
    "documents": ("windows",),
    "count": ("windows",),
    "layers": ("layer",),
    "given": ("law", "head_dim"),
    "law": ("head_dim",),
    "features": ("sink", "alibi", "bias", "first_key"),
}

#: A bad value, the error and its message.
Row = tuple[Any, type[Exception], str]


class Call(NamedTuple):
    """A public function, arguments that it takes, and what it refuses."""

    name: str
    function: Callable[..., Any]
    #: Makes the arguments that work, by name; from a folder, for files.
    good: Callable[[Path], dict[str, Any]]
    #: By parameter.
    rows: Mapping[str, Sequence[Row]]
    #: Parameters that take whatever is given, and why.
    open: Mapping[str, str] = {}
    #: Whether the arguments that work are run; elsewhere other tests do.
    run: bool = True


class Made(NamedTuple):
    """A bad value that is made from the arguments that work and a folder."""

    make: Callable[[dict[str, Any], Path], Any]


class Change(NamedTuple):
    """Several bad values at once."""

    arguments: dict[str, Any]


def change(**arguments: Any) -> Change:
    return Change(arguments)


def as_pattern(message: str) -> str:
    """A regular expression for a message in which `...` stands for any text."""
    return ".*".join(map(re.escape, message.split("...")))


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters."""
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def every_row(calls: Sequence[Call]) -> list[Any]:
    """One pytest parameter for each row."""
    return [
        pytest.param(call, parameter, row, id=f"{call.name}-{parameter}-{number}")
        for call in calls
        for parameter, rows in call.rows.items()
        for number, row in enumerate(rows)
    ]


def run(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call a function; a generator does nothing until it is asked."""
    found = function(**arguments)
    if inspect.isgenerator(found):
        list(found)


def check_row(call: Call, parameter: str, row: Row, folder: Path) -> None:
    """The call must work, and fail with the bad value as the row says."""
    value, error, message = row
    given = call.good(folder)
    if isinstance(value, Made):
        value = value.make(given, folder)
    bad = given | (value.arguments if isinstance(value, Change) else {parameter: value})
    with pytest.raises(error) as caught:
        run(call.function, bad)
    # Not a kind of it: a FileNotFoundError is an OSError that a caller may want to tell apart.
    assert type(caught.value) is error, repr(caught.value)
    found = str(caught.value)
    assert re.fullmatch(as_pattern(message), found, re.DOTALL), found
    if error is FileFormatError:  # which names the file and the reason
        return
    names = (parameter, *STANDS_FOR.get(parameter, ()))
    assert any(name in found for name in names), f"{found!r} does not name {parameter}"


def check_complete(call: Call) -> None:
    """Every parameter has a row, or a reason to have none; and no row has another name."""
    known = set(arguments_of(call.function))
    covered = set(call.rows) | set(call.open)
    assert covered == known, f"{call.name}: rows for {sorted(covered ^ known)}"
    assert not set(call.rows) & set(call.open), call.name
