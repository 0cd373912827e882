"""`kvq bench`: how fast the kernels are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvq.commands.options import check_alone, check_output
from kvq.commands.output import Json, print_json, print_table, say
from kvq.modes import MODES, Mode
from kvq.modes import mode as resolve_mode
from kvq.tier import Layout

EXAMPLES: Final = (
    "kvq bench write",
    "kvq bench write --mode int4 --tokens 65536 --tokens 16 --json",
    "kvq bench decode --centered --mode int4 --mode smax4",
    "kvq bench decode --mode int4 --more --out results/decode-h200.json",
)


def command(
    *,
    what: Annotated[str, typer.Argument(help="What to time: write or decode.")],
    mode: Annotated[list[str] | None, typer.Option(help="A mode; all, if none is given.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of a write: 65536.")] = None,
    more: Annotated[
        bool,
        typer.Option(help="decode: also NHD, several queries, a long prompt and other batches."),
    ] = False,
    centered: Annotated[
        bool, typer.Option("--centered", help="decode: what centered keys cost, and nothing else.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Keep the rows in this JSON file.")] = None,
    json: Json = False,
) -> None:
    """Time the kernels on the GPU, beside their peers in bf16 in the same run.

    `write` times the paged write beside a plain bf16 paged write and a device copy; `decode` times
    attention over packed caches beside attention over bf16 keys and values and a pass that only
    reads. A ratio below 1 is faster than bf16.
    """
    if what not in ("write", "decode"):
        raise ValueError(f"what must be write or decode, got {what!r}")
    modes = [resolve_mode(name) for name in mode] if mode else list(MODES.values())
    for count in tokens or ():
        if count < 1:
            raise ValueError(f"tokens must be at least 1, got {count}")
    if what == "decode":
        check_alone("decode", "with", tokens=tokens)
    elif centered:
        raise ValueError(f"what must be decode with --centered, got {what!r}")
    else:
        check_alone("write", "with", more=more or None)
    if centered:
        check_alone("--centered", "with", more=more or None)
    check_output("out", out)
    if centered:
        _centered(modes, out, json)
        return
    rows = _write(modes, tokens or [65_536]) if what == "write" else _decode(modes, more)
    records = [row._asdict() for row in rows]
    if out is not None:
        from kvq.analysis.results import write_result

        write_result(out, f"kvq-bench-{what}/1", " ".join(["kvq", *sys.argv[1:]]), records)
    if json:
        print_json(records)
    elif what == "write":
        print_table(
            "Paged write of keys and values, 8 heads x 128, bf16 in",
            ("tokens", "layout", "ratio", "share of copy", "ms", "mode"),
            [(r.tokens, r.layout, r.ratio, r.share_of_copy, r.ms, r.mode) for r in rows],
        )
    else:
        print_table(
            "Attention of 32 query heads over 8 packed KV heads x 128",
            ("batch", "context", "queries", "block", "layout", "ratio", "share of read", "mode"),
            [
                (
                    r.batch,
                    r.context,
                    r.query_tokens,
                    r.block_size,
                    r.layout,
                    r.ratio,
                    r.share_of_read,
                    r.key_mode,
                )
                for r in rows
            ],
        )


def _centered(modes: list[Mode], out: Path | None, json: bool) -> None:
    """Time, keep and show attention over keys without their mean, beside plain attention."""
    from kvq.analysis.centered_throughput import bench_centered

    rows = bench_centered(modes, watch=say)
    records = [row._asdict() for row in rows]
    if out is not None:
        from kvq.analysis.results import write_result

        write_result(out, "kvq-bench-centered/1", " ".join(["kvq", *sys.argv[1:]]), records)
    if json:
        print_json(records)
        return
    print_table(
        "Attention of 32 query heads over 8 packed KV heads x 128, keys without their mean",
        ("batch", "context", "plain ms", "term ms", "ms", "ratio", "mode"),
        [(r.batch, r.context, r.plain_ms, r.term_ms, r.ms, r.ratio, r.mode) for r in rows],
    )


def _write(modes: list[Mode], tokens: list[int]) -> list[Any]:
    from kvq.analysis.throughput import bench_write

    return [
        row
        for count in tokens
        for order in Layout
        for row in bench_write(modes, count, layout=order)
    ]


def _decode(modes: list[Mode], more: bool) -> list[Any]:
    """The table of shapes for each mode, and with `more` what is about them."""
    from kvq.analysis import decode_throughput as decode

    def time(shapes: Any, *layouts: tuple[Layout, int]) -> list[Any]:
        pairs = [(mode, mode) for mode in modes]
        return decode.bench_decode(pairs, shapes, layouts, watch=say)

    rows = time(decode.SHAPES, (Layout.HND, 16), (Layout.HND, 64))
    if more:
        rows += time(decode.SHAPES[:1], (Layout.NHD, 16), (Layout.NHD, 64))
        rows += time((*decode.VERIFY_SHAPES, decode.PREFILL_SHAPE), (Layout.HND, 64))
        rows += time(decode.BATCHES, (Layout.HND, 64))
    return decode.mark_best(rows)
