"""Run mutants and keep the score."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.mutation.listed import equivalent, kernel_mutants
from tests.mutation.operators import Mutant, mutants, sample
from tests.mutation.runner import ROOT, Outcome, Runner
from tests.mutation.subsets import SUBSETS

SCHEMA = "kvq-mutation/1"


def main() -> int:
    """The command; 1 if a mutant survives that is not known to change nothing."""
    options = _options()
    chosen = {file: found for file in SUBSETS if (found := _choose(file, options))}
    if options.list:
        for found in chosen.values():
            print(*found, sep="\n")
        return 0
    reasons = equivalent()
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(options.jobs, Path(scratch))
        rows = []
        for file, found in chosen.items():
            rows.append(_run_file(file, found, runner, reasons))
            if options.out is not None:
                _write(options.out, rows)
    return int(any(row["survivors"] for row in rows))


def _choose(file: str, options: argparse.Namespace) -> list[Mutant]:
    """The mutants of a file that are to run."""
    if not any(text in file for text in options.only):
        return []
    found = mutants(file, (ROOT / file).read_text(encoding="utf-8"))
    number = SUBSETS[file].sample if options.sample is None else options.sample
    by_hand = [mutant for mutant in kernel_mutants() if mutant.file == file]
    chosen = [*sample(found, number, options.seed), *by_hand]
    return [mutant for mutant in chosen if options.change in str(mutant)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file; rows of files not run are kept")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of files")
    parser.add_argument("--change", default="", help="a part of the names of mutants")
    parser.add_argument("--sample", type=int, help="made mutants of a file (default: its own)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="name mutants and run none")
    return parser.parse_args()


def _run_file(
    file: str, chosen: list[Mutant], runner: Runner, reasons: dict[str, str]
) -> dict[str, object]:
    """The row of a file; mutants and what killed them are printed."""
    started = time.monotonic()
    outcomes = []
    for outcome in runner.run(chosen, SUBSETS[file].tests):
        outcomes.append(outcome)
        print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {outcome.mutant}", flush=True)
        if outcome.killed:
            print(" " * 18 + outcome.test)
    row = _row(file, outcomes, reasons)
    print(f"{_score(row)}  {time.monotonic() - started:.0f} s", flush=True)
    return row


def _row(file: str, outcomes: Iterable[Outcome], reasons: dict[str, str]) -> dict[str, object]:
    from kvq.analysis.results import commit

    outcomes = list(outcomes)
    same = [o for o in outcomes if str(o.mutant) in reasons]
    # A mutant that a test can tell from the original does change something.
    wrong = [str(o.mutant) for o in same if o.killed]
    if wrong:
        raise ValueError(f"equivalent mutants must survive, got killed: {wrong}")
    return {
        "file": file,
        "commit": commit(),
        "total": len(outcomes),
        "equivalent": len(same),
        "killed": sum(o.killed for o in outcomes),
        "survivors": [str(o.mutant) for o in outcomes if not o.killed and o not in same],
    }


def _score(row: dict[str, object]) -> str:
    return (
        f"{row['file']}: {row['killed']} killed of {row['total']}, {row['equivalent']} equivalent"
    )


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write the rows of files, and of all together first."""
    from kvq.analysis.results import write_result

    if path.exists():
        new = {row["file"] for row in rows}
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"][1:]
        rows = [row for row in kept if row["file"] not in new] + rows
    rows.sort(key=lambda row: list(SUBSETS).index(str(row["file"])))
    total = {
        "file": "all",
        "commit": ", ".join(sorted({str(row["commit"]) for row in rows})),
        **{
            name: sum(row[name] for row in rows)  # type: ignore[misc]
            for name in ("total", "equivalent", "killed")
        },
        "survivors": [name for row in rows for name in row["survivors"]],  # type: ignore[attr-defined]
    }
    command = f"python -m tests.mutation {shlex.join(sys.argv[1:])}"
    write_result(path, SCHEMA, command, [total, *rows])
    print(_score(total))


if __name__ == "__main__":
    sys.exit(main())
