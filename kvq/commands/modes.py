"""`kvq modes`: the table of modes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.options import check_alone
from kvq.commands.output import Json, print_json, print_table, say
from kvq.modes import MODES, SUFFIX, Mode, short_name

EXAMPLES: Final = (
    "kvq modes",
    "kvq modes --families",
    "kvq modes --head-dim 64 --json",
    "kvq modes --into README.md",
)

#: What surrounds each generated table in a Markdown file.
MARKERS: Final = {
    "modes": ("<!-- kvq modes: begin -->\n", "<!-- kvq modes: end -->\n"),
    "families": ("<!-- kvq families: begin -->\n", "<!-- kvq families: end -->\n"),
}

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
_FAMILY_COLUMNS: Final = (
    "family",
    "bits per value",
    "vs bf16",
    "levels",
    *_PART_COLUMNS[:3],
    "other ends, other names",
)


def command(
    *,
    head_dim: Annotated[int, typer.Option(help="Channels of a row.")] = 128,
    families: Annotated[
        bool,
        typer.Option("--families", help="One row for the modes that differ in fit and word only."),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    into: Annotated[
        list[Path] | None,
        typer.Option(help="Rewrite the tables between the markers of this file; repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """List the storage modes: what each is made of, and what it costs.

    Bits per value count the stored word of each row; bytes per row are its codes and its word.
    """
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if json:
        check_alone("--json", "with", markdown=markdown or None, families=families or None)
    if into:
        check_alone(
            "--into", "with", markdown=markdown or None, json=json or None,
            families=families or None,
        )  # fmt: skip
        for path in into:
            path.write_text(with_tables(_read_page(path), head_dim), encoding="utf-8")
            say(f"wrote the tables of modes into {path}")
    elif json:
        print_json([_record(mode, head_dim) for mode in MODES.values()])
    elif markdown:
        typer.echo((family_table if families else markdown_table)(head_dim), nl=False)
    elif families:
        print_table(
            f"Families of storage modes at head size {head_dim}; each name ends in {SUFFIX}",
            _FAMILY_COLUMNS,
            _families(head_dim),
        )
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
    rows = [(f"`{mode}`", *_costs(mode, head_dim), *_parts(mode)) for mode in MODES.values()]
    return _markdown((*_COST_COLUMNS, *_PART_COLUMNS), rows)


def family_table(head_dim: int) -> str:
    """The table of families in Markdown, most bits first.

    A family is what is normalized alike and has the same codes: its modes differ in the scale fit,
    the search and the stored word. They go by the ends of their names; what begins otherwise is
    named in full.
    """
    rows = [
        (f"`{stem}`", *rest, ", ".join(f"`{name}`" for name in names.split(", ") if name))
        for stem, *rest, names in _families(head_dim)
    ]
    return _markdown(_FAMILY_COLUMNS, rows)


def with_tables(text: str, head_dim: int) -> str:
    """`text` with each table whose markers it has.

    Raises:
        ValueError: It has none, or an end is missing.
    """
    tables = {"modes": markdown_table, "families": family_table}
    found = [name for name, (begin, _) in MARKERS.items() if begin in text]
    for name in found or ["modes"]:
        text = _with_table(text, tables[name](head_dim), MARKERS[name])
    return text


def _with_table(text: str, table: str, markers: tuple[str, str]) -> str:
    """`text` with `table` between the markers."""
    begin, end = markers
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


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _families(head_dim: int) -> list[tuple[str, ...]]:
    """The cells of `_FAMILY_COLUMNS` for each family, most bits first."""
    families: dict[tuple[str, ...], list[Mode]] = {}
    for mode in MODES.values():
        families.setdefault((str(mode.bits), *_parts(mode)[:3]), []).append(mode)
    rows = []
    for modes in sorted(families.values(), key=lambda members: -members[0].bits):
        names = [short_name(mode.name) for mode in modes]
        # The name that most of the others begin with; the shortest, if several do.
        stem = max(names, key=lambda name: (sum(n.startswith(name) for n in names), -len(name)))
        names.remove(stem)
        others = [name.removeprefix(stem) for name in names]
        others.sort(key=lambda name: not name.startswith("_"))
        costs = [_costs(mode, head_dim) for mode in modes]
        bits, ratios = (" / ".join(dict.fromkeys(cost[i] for cost in costs)) for i in (0, -1))
        shared = (str(modes[0].levels), *_parts(modes[0])[:3])
        rows.append((stem, bits, ratios, *shared, ", ".join(others)))
    return rows


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
