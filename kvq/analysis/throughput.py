"""How fast the paged write is, beside a plain bf16 paged write and a device copy in the same run.

Times are medians of CUDA-graph replays; each replay writes more than the cache of the GPU holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvq import kernels
from kvq.kernels.paged_copy import paged_copy
from kvq.modes import Mode
from kvq.tier import Layout, new_paged_kv

_CALLS_PER_REPLAY = 8
_REPLAYS = 11


class WriteTime(NamedTuple):
    """One row of `results/write-h200.json`."""

    #: The mode's name, or `bfloat16` for the plain paged write.
    mode: str
    #: Order of the axes of the cache.
    layout: str
    #: Tokens written, keys and values, of `heads` heads of `head_dim` channels.
    tokens: int
    #: Milliseconds of one call.
    ms: float
    #: Milliseconds of the plain bf16 paged write of the same tokens.
    bf16_ms: float
    #: `ms / bf16_ms`.
    ratio: float
    #: Bytes read and written per second, over those of a device-to-device copy.
    share_of_copy: float


def time_call(call: Callable[[], object]) -> float:
    """Milliseconds of one call, in replays of a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_PER_REPLAY):
            call()
    times = []
    for _ in range(_REPLAYS + 1):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / _CALLS_PER_REPLAY)
    return float(statistics.median(times[1:]))


def bench_write(
    modes: Sequence[Mode],
    tokens: int,
    *,
    heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    layout: Layout = Layout.HND,
    seed: int = 0,
) -> list[WriteTime]:
    """Time the paged write of each mode for keys and values of bfloat16.

    Args:
        modes: What to time.
        tokens: T; blocks are in random order.
        heads: KV heads.
        head_dim: D, a power of two.
        block_size: Tokens of a page.
        layout: Order of the axes of the quantized cache.
        seed: Of the values and the order of the blocks.

    Returns:
        A row for the plain paged write, and one for each mode.

    Raises:
        ValueError: There is no CUDA device, or `tokens` is not positive.
    """
    if not torch.cuda.is_available():
        raise ValueError("device must be a CUDA device to be timed, got none")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    key, value = (
        torch.randn(
            (tokens, heads, head_dim), generator=generator, device="cuda", dtype=torch.bfloat16
        )
        for _ in range(2)
    )
    blocks = -(-tokens // block_size)
    order = torch.randperm(blocks, generator=generator, device="cuda")
    slots = (order[:, None] * block_size + torch.arange(block_size, device="cuda")).flatten()
    slots = slots[:tokens]
    pages = [key.new_empty((blocks, heads, block_size, head_dim)) for _ in range(2)]
    plain = time_call(lambda: paged_copy(key, value, pages[0], pages[1], slots))

    def copy() -> None:
        pages[0].view(-1)[: key.numel()].copy_(key.view(-1))
        pages[1].view(-1)[: key.numel()].copy_(value.view(-1))

    rows = 2 * tokens * heads
    read = rows * head_dim * 2
    copy_rate = 2 * read / time_call(copy)

    def row(name: str, order: str, ms: float, written: int) -> WriteTime:
        share = (read + written) / ms / copy_rate
        return WriteTime(name, order, tokens, ms, plain, ms / plain, share)

    results = [row("bfloat16", str(Layout.HND), plain, read)]
    for mode in modes:
        caches = [
            new_paged_kv(blocks, block_size, heads, head_dim, mode, layout=layout, device="cuda")
            for _ in range(2)
        ]
        ms = time_call(
            lambda caches=caches: kernels.reshape_and_cache(  # type: ignore[misc]
                key, value, caches[0], caches[1], slots
            )
        )
        results.append(row(mode.name, str(layout), ms, rows * mode.bytes_per_token_head(head_dim)))
    return results
