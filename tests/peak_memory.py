"""How much memory a call takes on the CPU: every allocation of torch, inside operators too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Memory(NamedTuple):
    """Bytes of a call: at most at one time, and still there after it with what it returned."""

    peak: int
    kept: int


def memory_of(call: Callable[[], object]) -> Memory:
    """Of a call whose result lives on; what it is given is not counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = recorded.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert sizes, "the profiler saw no allocation"
    del result
    return Memory(max(accumulate(sizes)), sum(sizes))
