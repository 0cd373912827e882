"""The command line, `kvq`. Each command is one file of `kvq.commands`.

Exit codes: 0, done; 1, a check failed; 2, the arguments or a file are not what they must be;
3, a fault of kvq itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Annotated, Final

import typer

import kvq
from kvq.commands import (
    bench,
    calibrate,
    capture,
    encode,
    evaluate,
    fit,
    inspect,
    modes,
    parity,
    predict,
    recommend,
    report,
    serving,
    vectors,
)
from kvq.commands.output import say

#: Every command: its name and its module, in the order of the help.
COMMANDS: Final = {
    "modes": modes,
    "fit": fit,
    "report": report,
    "predict": predict,
    "recommend": recommend,
    "capture": capture,
    "calibrate": calibrate,
    "encode": encode,
    "inspect": inspect,
    "parity": parity,
    "bench": bench,
    "eval": evaluate,
    "serving": serving,
}

#: Commands of two words: the first, and the module of the others.
GROUPS: Final = {"vectors": vectors}

app = typer.Typer(
    name="kvq",
    no_args_is_help=True,
    add_completion=False,
    # `_guarded` says what a fault looks like.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvq {kvq.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Quantize the KV cache of language models: fit, measure, encode, evaluate."""


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with every error told in one line.

    `KVQ_DEBUG=1` in the environment lets the traceback through.
    """

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except (BrokenPipeError, typer.Abort, typer.Exit):
            raise
        except Exception as error:
            if os.environ.get("KVQ_DEBUG") == "1":
                raise
            if isinstance(error, ValueError | TypeError | OSError | ImportError):
                say(f"error: {_in_one_line(error)}")
                raise typer.Exit(2) from None
            say(f"error: {type(error).__name__}: {error} (KVQ_DEBUG=1 shows where)")
            raise typer.Exit(3) from None

    return run


def _in_one_line(error: Exception) -> str:
    """What an error says; of one that the system gave for a file, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split("\n"))


def _epilog(examples: tuple[str, ...]) -> str:
    """Examples, each a paragraph, which the help sets on a line of its own."""
    return "\n\n".join(("Examples:", *examples))


for _name, _module in COMMANDS.items():
    app.command(_name, epilog=_epilog(_module.EXAMPLES))(_guarded(_module.command))
for _group, _module in GROUPS.items():
    _commands = typer.Typer(no_args_is_help=True, help=_module.HELP)
    for _name, _command in _module.COMMANDS.items():
        _commands.command(_name, epilog=_epilog(_module.EXAMPLES[_name]))(_guarded(_command))
    app.add_typer(_commands, name=_group)


def main() -> None:
    """The entry point of `kvq`."""
    app()
