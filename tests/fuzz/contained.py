"""Work on what somebody else wrote: little memory, little time, and nothing run on its behalf."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import torch

#: Memory that a small file may cost, and CPU seconds. A header can announce any size.
MEMORY: Final = 2**28
SECONDS: Final = 10.0
#: Audit events of code that is run or fetched, and of what a file has no say in.
FORBIDDEN: Final = frozenset(
    {
        *("pickle.find_class", "ctypes.dlopen", "socket.connect", "os.remove"),
        *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.rename"),
    }
)

_watching: list[list[str]] = []


def _watch(event: str, _arguments: object) -> None:
    if _watching and event in FORBIDDEN:
        _watching[-1].append(event)


sys.addaudithook(_watch)


def _out_of_time(_signal: int, _frame: FrameType | None) -> None:
    raise AssertionError(f"took more than {SECONDS} seconds of the CPU")


@contextmanager
def contained() -> Iterator[None]:
    """Less than `MEMORY` more and `SECONDS`, and nothing `FORBIDDEN`; else an error that shows."""
    statm = Path("/proc/self/statm")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    events: list[str] = []
    _watching.append(events)
    try:
        # A CUDA context reserves more address space than any limit.
        if statm.exists() and not torch.cuda.is_available():
            used = int(statm.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _watching.pop()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, previous)
    assert not events, f"a file had this done: {events}"
