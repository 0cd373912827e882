"""Run the tests of one mutant after another, each in a copy of the tree and a process of its own.

A process is forked from one that has imported torch, triton and pytest but nothing of this
project, so a mutant costs its tests and little else. Python writes no bytecode of mutated files.
"""

from __future__ import annotations

import gc
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
from dataclasses import dataclass
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
    *("pytest", "doctest", "unittest.mock", "hypothesis", "hypothesis.strategies"),
    *("hypothesis.internal.conjecture.engine", "hypothesis.internal.entropy"),
    *("safetensors.torch", "torch.nn.functional"),
)
#: What a mutant may take, in CPU time of its tests without a change, and at least, in seconds. A
#: loop that no longer ends is killed by it; so is one that asks for too much memory.
_MOST_TIME: Final = 5
_LEAST_TIME: Final = 30
_MOST_BYTES: Final = 8 << 30
#: Of the wall clock, for what waits for ever, whatever else the machine does.
_MOST_WALL: Final = 20


class Outcome(NamedTuple):
    """What the tests said of a mutant."""

    mutant: Mutant
    #: `killed`, `stopped` (by the system or a limit), or `survived`.
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
    started: float = 0.0
    deadline: float = 0.0

    @property
    def log(self) -> Path:
        return self.tree.with_suffix(".log")


class Runner:
    """Copies of the tree, and what tests take in them."""

    def __init__(self, jobs: int, scratch: Path) -> None:
        """Copy the tree.

        Args:
            jobs: How many mutants are tested at a time.
            scratch: An empty directory.
        """
        preload()
        self._slots = [_Slot(copy_tree(scratch / f"tree{i}")) for i in range(jobs)]
        self._limits: dict[tuple[str, ...], int] = {}

    def run(self, mutants: Iterable[Mutant], tests: tuple[str, ...]) -> Iterator[Outcome]:
        """The outcome of each mutant, as they come.

        Args:
            mutants: Of any files.
            tests: Arguments of pytest: what should kill them, the quickest first.

        Raises:
            RuntimeError: The tests fail without a change, or pytest could not run them.
        """
        if tests not in self._limits:
            needed = _MOST_TIME * _unchanged(self._slots[0], tests)
            self._limits[tests] = max(_LEAST_TIME, round(needed))
            for slot in self._slots[1:]:
                shutil.copytree(self._slots[0].tree, slot.tree, dirs_exist_ok=True)
        waiting = deque(mutants)
        while waiting or any(slot.process for slot in self._slots):
            for slot in self._slots:
                if slot.process is None and waiting:
                    _start(slot, waiting.popleft(), tests, self._limits[tests])
            running = [slot for slot in self._slots if slot.process is not None]
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
    # The garbage collector of a fork has its own objects to look at and no others.
    gc.collect()
    gc.freeze()


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
    """CPU time of the tests without a change; bytecode is written for the runs after it."""
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
    slot.mutant = mutant
    path = slot.tree / mutant.file
    path.rename(path.with_suffix(".original"))
    text = path.with_suffix(".original").read_text(encoding="utf-8")
    # Written now, so the bytecode of the original, which knows its time, is not taken for it.
    path.write_text(mutant.apply(text), encoding="utf-8")
    slot.deadline = time.monotonic() + _MOST_WALL * limit
    slot.started = time.monotonic()
    slot.process = _fork(slot, tests, limit, writes_bytecode=False)


def _finish(slot: _Slot) -> Outcome:
    """Restore the file, and say what became of the mutant."""
    assert slot.process is not None
    assert slot.mutant is not None
    mutant, code = slot.mutant, slot.process.exitcode
    path = slot.tree / mutant.file
    path.with_suffix(".original").replace(path)
    slot.process, slot.mutant = None, None
    log = slot.log.read_text(encoding="utf-8", errors="replace")
    if code is None or code in (3, 4, 5):
        raise RuntimeError(f"pytest must run, got exit code {code} with {mutant}\n{log[-3000:]}")
    failed = [line for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    test = failed[0].split(" - ")[0].split(" ", 1)[1] if failed else ""
    # A negative code is the signal of a limit, or of memory that is not the kernel's.
    verdict = "survived" if code == 0 else "killed" if code > 0 else "stopped"
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
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
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
    options = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist")
    code = pytest.main([*options, *tests])
    whole = [argument for argument in tests if "[" not in argument]
    if code == pytest.ExitCode.USAGE_ERROR and whole:
        # Of what bears the name of a mode, a mutant may leave none of that name.
        code = pytest.main([*options, *whole])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))
