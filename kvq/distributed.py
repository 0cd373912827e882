"""More than one process, by torch.distributed: started by torchrun, or by the caller.

Results may not depend on how many processes there are, so what they add up are integers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvq.checks import check_device_name

_T = TypeVar("_T")

#: What torchrun tells every process that it starts.
_LAUNCHED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Processes wait for the one with the most to do. If one dies, torchrun ends the others.
_PATIENCE: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that work together; one, if nobody started more.

    What they do together raises a `ConnectionError` where another of them is gone.
    """

    #: Which of them this is, from 0.
    rank: int = 0
    #: How many there are.
    size: int = 1
    #: Where this one computes.
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def share(self, items: Sequence[_T]) -> Sequence[_T]:
        """This process's part of what all have the same list of."""
        return items[self.rank :: self.size]

    def sum(self, x: Tensor) -> None:
        """Let `x`, int64 on `device` and of one shape everywhere, be its sum over all processes.

        Raises:
            ValueError: The sum could exceed 63 bits.
        """
        self._check(x)
        if self.size == 1 or not x.numel():
            return
        # The sum is below the number of processes times the largest magnitude of any.
        largest = x.abs().amax()
        with _others_alive():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        if int(largest) > (2**63 - 1) // self.size:
            raise ValueError(f"sums must stay below 2^63, got up to {int(largest)} to add up")
        with _others_alive():
            dist.all_reduce(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> None:
        """Let `x`, int64 on `device` and of one shape everywhere, be its largest, by element."""
        self._check(x)
        if self.size > 1:
            with _others_alive():
                dist.all_reduce(x, dist.ReduceOp.MAX)

    def gather(self, item: _T) -> list[_T]:
        """Every process's item, by rank, in every process."""
        if self.size == 1:
            return [item]
        items: list[_T | None] = [None] * self.size
        with _others_alive():
            dist.all_gather_object(items, item)
        return items  # type: ignore[return-value]

    @staticmethod
    def _check(x: Tensor) -> None:
        if x.dtype is not torch.int64:
            raise TypeError(f"x must be int64, whose sums have no order, got {x.dtype}")


@contextmanager
def _others_alive() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError("another process has failed, and says why itself") from error


@contextmanager
def processes(device: str = "cpu") -> Iterator[Processes]:
    """The processes that this one works with.

    The default process group is used if there is one. Under torchrun one is made, and ended
    after: gloo for the CPU, NCCL for `cuda`, of which each process takes the device of its local
    rank.

    Args:
        device: Where each computes: `"cpu"`, `"cuda"`, or without torchrun any that torch knows.

    Raises:
        ValueError: The device is not there.
    """
    check_device_name(device)
    if dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size(), torch.device(device))
        return
    if not all(name in os.environ for name in _LAUNCHED):
        yield Processes(device=torch.device(device))
        return
    where = torch.device(device)
    if where.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"processes on one machine must be at most its devices, "
                f"{torch.cuda.device_count()}, got local rank {local}"
            )
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), where)
    finally:
        dist.destroy_process_group()
