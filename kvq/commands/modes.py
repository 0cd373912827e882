"""`kvq modes`: the table of modes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.options import check_alone
from kvq.commands.output import Json, print_json, print_table, say
from kvq.modes import MODES, SUFFIX, Mode, short_name

EXAMPLES: Final = ("kvq modes", "kvq modes --head-dim 64 --json", "kvq modes --into README.md")

#: What surrounds the generated table in a Markdown file.
MARKERS: Final = ("<!-- kvq modes: begin -->\n", "<!-- kvq modes: end -->\n")

_BF16_BITS: Final = 16
_COST_COLUMNS: Final = (
    "mode",
    "bits per value",
    "bytes per row",
    "codes per byte",
    "levels",
    "vs bf16",
)
_PART_COLUMNS: Final = ("rotation", "normalization", "codes", "scale fit", "word")


def command(
    *,
    head_dim: Annotated[int, typer.Option(help="Channels of a row.")] = 128,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    into: Annotated[
        Path | None, typer.Option(help="Rewrite the table between the markers of this file.")
    ] = None,
    json: Json = False,
) -> None:
    """List the storage modes: what each is made of, and what it costs.

    Bits per value count the stored word of each row; bytes per row are its codes and its word.
    """
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if json:
        check_alone("--json", "with", markdown=markdown or None)
    if into is not None:
        check_alone("--into", "with", markdown=markdown or None, json=json or None)
        into.write_text(with_table(_read_page(into), markdown_table(head_dim)), encoding="utf-8")
        say(f"wrote the table of modes into {into}")
    elif json:
        print_json([_record(mode, head_dim) for mode in MODES.values()])
    elif markdown:
        typer.echo(markdown_table(head_dim), nl=False)
    else:
        print_table(
            f"Storage modes at head size {head_dim}; each name ends in {SUFFIX}",
            (*(name.replace(" ", "\n") for name in _COST_COLUMNS), "parts"),
            [
                (
                    short_name(mode.name),
                    *_costs(mode, head_dim),
                    ", ".join(filter(None, _parts(mode))),
                )
                for mode in MODES.values()
            ],
        )


def markdown_table(head_dim: int) -> str:
    """The table of modes in Markdown."""
    columns = (*_COST_COLUMNS, *_PART_COLUMNS)
    lines = [columns, ("---",) * len(columns)]
    lines += [(f"`{mode}`", *_costs(mode, head_dim), *_parts(mode)) for mode in MODES.values()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text: str, table: str) -> str:
    """`text` with `table` between the markers.

    Raises:
        ValueError: The markers are not there.
    """
    begin, end = MARKERS
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(
            f"text must hold the lines {begin.strip()} and {end.strip()}, got one without"
        )
    return f"{before}{begin}{table}{end}{after}"


def _read_page(path: Path) -> str:
    """The text of a file that is to hold the table."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"into must be a text file, got {path} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"into must be a text file, got {path} ({error.reason})") from None


def _suits(mode: Mode, head_dim: int) -> bool:
    try:
        mode.check_head_dim(head_dim)
    except ValueError:
        return False
    return True


def _costs(mode: Mode, head_dim: int) -> tuple[str, ...]:
    """The cells of `_COST_COLUMNS` but the name; what depends on a head size refused is empty."""
    bits = row = ratio = ""
    if _suits(mode, head_dim):
        bits = f"{float(mode.bits_per_value(head_dim)):g}"
        row = f"{mode.bytes_per_row(head_dim)} + {mode.word.num_bytes}"
        ratio = f"{float(_BF16_BITS / mode.bits_per_value(head_dim)):.2f}x"
    return bits, row, str(mode.codes_per_byte), str(mode.levels), ratio


def _parts(mode: Mode) -> tuple[str, ...]:
    """The cells of `_PART_COLUMNS`."""
    levels = mode.codebook or mode.trellis
    rotation = "none"
    if mode.rotation is not None:
        rotation = "random Hadamard" if mode.rotation.random_signs else "Hadamard"
        rotation += " twice" if mode.rotation.rounds == 2 else ""
    search = f", {len(mode.gains)} gains" if mode.gains else ""
    return (
        rotation,
        str(mode.normalization),
        f"{mode.grid}, {mode.rounding}" if levels is None else str(levels),
        "" if mode.scale_fit is None else str(mode.scale_fit) + search,
        str(mode.word),
    )


def _record(mode: Mode, head_dim: int) -> dict[str, object]:
    """A mode as JSON; what depends on a head size refused is null."""
    from kvq.records import to_json

    suits = _suits(mode, head_dim)
    return {
        "mode": mode.name,
        "head_dim": head_dim,
        "levels": mode.levels,
        "codes_per_byte": str(mode.codes_per_byte),
        "bits_per_value": float(mode.bits_per_value(head_dim)) if suits else None,
        "bytes_per_row": mode.bytes_per_row(head_dim) if suits else None,
        "bytes_per_token_head": mode.bytes_per_token_head(head_dim) if suits else None,
        "vs_bf16": float(_BF16_BITS / mode.bits_per_value(head_dim)) if suits else None,
        "parts": to_json(mode),
    }
