"""Run mutants and keep the score."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation.listed import kernel_mutants
from tests.mutation.operators import Mutant, mutants, sample
from tests.mutation.runner import ROOT, Outcome, Runner
from tests.mutation.subsets import SUBSETS


def main() -> int:
    """The command; 1 if a mutant survives that nobody has looked at."""
    options = _options()
    chosen = {file: found for file in SUBSETS if (found := _choose(file, options))}
    if options.list:
        for found in chosen.values():
            print(*found, sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(options.jobs, Path(scratch))
        unknown = 0
        for file, found in chosen.items():
            unknown += _run_file(file, found, runner, options.out)
    return int(unknown > 0)


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


def _choose(file: str, options: argparse.Namespace) -> list[Mutant]:
    """The mutants of a file that are to run."""
    if not any(text in file for text in options.only):
        return []
    found = mutants(file, (ROOT / file).read_text(encoding="utf-8"))
    number = SUBSETS[file].sample if options.sample is None else options.sample
    by_hand = [mutant for mutant in kernel_mutants() if mutant.file == file]
    chosen = [*sample(found, number, options.seed), *by_hand]
    return [mutant for mutant in chosen if options.change in str(mutant)]


def _run_file(file: str, chosen: list[Mutant], runner: Runner, out: Path | None) -> int:
    """Run the mutants of a file, print what killed them, keep its row; how many are unknown."""
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in runner.run(chosen, SUBSETS[file].tests):
        outcomes.append(outcome)
        print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {outcome.mutant}", flush=True)
        if outcome.killed:
            print(" " * 18 + outcome.test)
    # Only now, since it imports the package, and mutants are forked without it.
    from tests.mutation.score import describe, row_of, write_score

    row = row_of(file, outcomes)
    print(f"{describe(row)}  ({time.monotonic() - started:.0f} s)", flush=True)
    if out is not None:
        command = f"python -m tests.mutation {shlex.join(sys.argv[1:])}"
        print(describe(write_score(out, [row], command)), flush=True)
    return sum(not survivor["reason"] for survivor in row["survivors"])


if __name__ == "__main__":
    sys.exit(main())
