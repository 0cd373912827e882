"""Groups of processes for tests: forked from one process that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Seconds after which a group is given up.
LIMIT = 120


def run_processes(
    size: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """What `function(*arguments)` returns in each of `size` processes of a group, by rank.

    Raises:
        AssertionError: One of them failed, with its traceback, or they took too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        pipes, group = [], []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            start = f"file://{folder}/start"
            process = context.Process(
                target=_run,
                args=(rank, size, backend, start, theirs, function, arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            group.append(process)
        try:
            return _collect(pipes)
        finally:
            for process in group:
                process.join(5)
                process.kill()
                process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=LIMIT)
        assert ready, f"no answer in {LIMIT} seconds"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                error, result = pipe.recv()
            except EOFError:
                raise AssertionError(f"process {rank} died") from None
            assert error is None, f"process {rank}:\n{error}"
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _run(
    rank: int,
    size: int,
    backend: str,
    start: str,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=start,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=LIMIT),
        )
        result = function(*arguments)
        # Nobody leaves while another still talks to it.
        dist.barrier()
        pipe.send((None, result))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((traceback.format_exc(), None))


def torchrun(size: int, *arguments: object, folder: Path) -> list[str]:
    """The command line of torchrun on this machine, with a port that is free."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(size), "--log-dir", str(folder), *map(str, arguments),
    ]  # fmt: skip
