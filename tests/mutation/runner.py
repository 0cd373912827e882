"""Run the tests of one mutant after another, each in a copy of the tree and a process of its own.

A process is forked from one that has imported torch, triton and pytest but nothing of this
project, so a mutant costs its tests and little else. Python writes no bytecode of mutated files.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutation.operators import Mutant

ROOT: Final = Path(__file__).parents[2]
#: Imported once, before the processes part.
_PRELOADED: Final = (
    *("torch", "numpy", "scipy.stats", "scipy.optimize", "scipy.integrate", "scipy.special"),
    *("triton", "triton.language", "triton.runtime.interpreter"),
    *("pytest", "hypothesis", "safetensors.torch"),
)
#: What a mutant may take, in CPU time of its tests without a change, and at least, in seconds. A
#: loop that no longer ends is killed by it; so is one that asks for too much memory.
_MOST_TIME: Final = 5
_LEAST_TIME: Final = 30
_MOST_BYTES: Final = 16 << 30
#: Of the wall clock, for what waits for ever, whatever else the machine does.
_MOST_WALL: Final = 20


class Outcome(NamedTuple):
    """What the tests said of a mutant."""

    mutant: Mutant
    #: `killed`, `timeout`, or `survived`.
    verdict: str
    #: Of the wall clock.
    seconds: float
    #: The first test that failed; empty if none did.
    test: str

    @property
    def killed(self) -> bool:
        return self.verdict != "survived"


@dataclass
class _Slot:
    """A copy of the tree, and what runs in it."""

    tree: Path
    process: BaseProcess | None = None
    mutant: Mutant | None = None
    original: str = ""
    started: float = 0.0
    deadline: float = field(default=0.0)

    @property
    def log(self) -> Path:
        return self.tree.with_suffix(".log")


def run(
    mutants: Iterable[Mutant], tests: Sequence[str], jobs: int, scratch: Path
) -> Iterator[Outcome]:
    """The outcome of each mutant, as they come.

    Args:
        mutants: Of any files.
        tests: Arguments of pytest: what should kill them, the quickest first.
        jobs: How many at a time.
        scratch: A directory for copies of the tree.

    Raises:
        RuntimeError: The tests fail without a change, or pytest could not run them.
    """
    preload()
    slots = [_Slot(copy_tree(scratch / f"tree{i}")) for i in range(jobs)]
    limit = max(_LEAST_TIME, round(_MOST_TIME * _unchanged(slots[0], tests)))
    for slot in slots[1:]:
        # The bytecode of the run without a change.
        shutil.copytree(slots[0].tree, slot.tree, dirs_exist_ok=True)
    waiting = deque(mutants)
    while waiting or any(slot.process for slot in slots):
        for slot in slots:
            if slot.process is None and waiting:
                _start(slot, waiting.popleft(), tests, limit)
        running = [slot for slot in slots if slot.process is not None]
        wait([slot.process.sentinel for slot in running if slot.process], timeout=1.0)
        for slot in running:
            assert slot.process is not None
            if slot.process.is_alive() and time.monotonic() > slot.deadline:
                os.killpg(slot.process.pid or 0, 9)
                slot.process.join()
            if not slot.process.is_alive():
                yield _finish(slot)


def preload() -> None:
    """Import what is heavy and not ours."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    # The same examples of hypothesis for all.
    os.environ["CI"] = "1"
    for name in _PRELOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


def copy_tree(to: Path) -> Path:
    """What git knows of the tree, as it lies here."""
    names = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def _unchanged(slot: _Slot, tests: Sequence[str]) -> float:
    """CPU time of the tests without a change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = _fork(slot, tests, 3600, writes_bytecode=True)
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(
            f"tests must pass without a change, got exit code {process.exitcode}: {tests}\n"
            + slot.log.read_text()[-3000:]
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _start(slot: _Slot, mutant: Mutant, tests: Sequence[str], limit: int) -> None:
    path = slot.tree / mutant.file
    slot.mutant, slot.original = mutant, path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(slot.original), encoding="utf-8")
    # Bytecode knows its source by size and second, which may be those of a mutant.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    slot.started = time.monotonic()
    slot.deadline = slot.started + _MOST_WALL * limit
    slot.process = _fork(slot, tests, limit, writes_bytecode=False)


def _finish(slot: _Slot) -> Outcome:
    """Restore the file, and say what became of the mutant."""
    assert slot.process is not None
    assert slot.mutant is not None
    mutant, code = slot.mutant, slot.process.exitcode
    (slot.tree / mutant.file).write_text(slot.original, encoding="utf-8")
    slot.process, slot.mutant = None, None
    log = slot.log.read_text(encoding="utf-8", errors="replace")
    if code is None or code in (3, 4, 5):
        raise RuntimeError(f"pytest must run, got exit code {code} with {mutant}\n{log[-3000:]}")
    failed = [line for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    test = failed[0].split(" - ")[0].split(" ", 1)[1] if failed else ""
    verdict = "survived" if code == 0 else "killed" if code > 0 else "timeout"
    return Outcome(mutant, verdict, time.monotonic() - slot.started, test)


def _fork(
    slot: _Slot, tests: Sequence[str], seconds: int, *, writes_bytecode: bool
) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(
        target=_test, args=(slot.tree, slot.log, tests, seconds, writes_bytecode)
    )
    process.start()
    return process


def _test(
    tree: Path, log: Path, tests: Sequence[str], seconds: int, writes_bytecode: bool
) -> None:
    """In the forked process: pytest in the tree."""
    os.setpgrp()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    # Kernels that are compiled are compiled anew.
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=tree.parent)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = not writes_bytecode
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kvq", "tests")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    found = importlib.util.find_spec("kvq")
    if found is None or not str(found.origin).startswith(str(tree)):
        os._exit(4)
    pytest = importlib.import_module("pytest")
    code = pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))
