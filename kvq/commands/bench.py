"""`kvq bench`: how fast the kernels are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.output import Json, print_json, print_table
from kvq.modes import MODES
from kvq.modes import mode as resolve_mode
from kvq.tier import Layout

EXAMPLES: Final = ("kvq bench write", "kvq bench write --mode int4 --tokens 65536 --json")


def command(
    *,
    what: Annotated[str, typer.Argument(help="What to time: write.")],
    mode: Annotated[list[str] | None, typer.Option(help="A mode; all, if none is given.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a write.")] = 65_536,
    out: Annotated[Path | None, typer.Option(help="Keep the rows in this JSON file.")] = None,
    json: Json = False,
) -> None:
    """Time the paged write on the GPU, beside a bf16 paged write and a device copy.

    A ratio below 1 is faster than the plain bf16 paged write of the same tokens in the same run.
    """
    if what != "write":
        raise ValueError(f"what must be write, got {what!r}")
    from kvq.analysis.results import write_result
    from kvq.analysis.throughput import bench_write

    modes = [resolve_mode(name) for name in mode] if mode else list(MODES.values())
    rows = [row for layout in Layout for row in bench_write(modes, tokens, layout=layout)]
    records = [row._asdict() for row in rows]
    if out is not None:
        write_result(out, "kvq-bench-write/1", " ".join(["kvq", *sys.argv[1:]]), records)
    if json:
        print_json(records)
    else:
        print_table(
            f"Paged write of {tokens} tokens x 8 heads x 128, keys and values, bf16 in",
            ("layout", "ratio", "share of copy", "ms", "mode"),
            [(r.layout, r.ratio, r.share_of_copy, r.ms, r.mode) for r in rows],
        )
