"""Search and levels of trellis codes; `kvq.trellis.Trellis` fixes the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq.trellis import Trellis, state_levels

#: Costs worked on at once: on the CPU what stays in a core's cache, on a GPU what bounds memory.
_COSTS_CPU = 2**18
_COSTS_GPU = 2**25


def trellis_codes(z: Tensor, trellis: Trellis) -> Tensor:
    """The codes that the search of `Trellis` gives for each row.

    Args:
        z: `[R, D]` float32, D at least `trellis.window`. A row with a NaN gets some codes.
        trellis: Which.

    Returns:
        `[R, D]` uint8, one code each.

    Exactness: bit-exact across tiers and devices.
    """
    levels = level_table(trellis, z.device)
    codes = torch.empty(z.shape, dtype=torch.uint8, device=z.device)
    step = max(1, (_COSTS_CPU if z.device.type == "cpu" else _COSTS_GPU) // trellis.num_states)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        codes[rows] = _search(z[rows], trellis, levels)
    return codes


def trellis_states(codes: Tensor, trellis: Trellis) -> Tensor:
    """The state of each channel of codes `[..., D]`, int32: codes that follow are higher bits."""
    states = torch.zeros(codes.shape, dtype=torch.int32, device=codes.device)
    for j in range(trellis.window):
        states += codes.roll(-j, -1).to(torch.int32) << (trellis.bits * j)
    return states


def level_table(
    trellis: Trellis, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`[2 ** window_bits]`: the level of each state."""
    return torch.tensor(state_levels(trellis), dtype=dtype, device=device)


def _search(z: Tensor, trellis: Trellis, levels: Tensor) -> Tensor:
    """Codes `[R, D]` of rows `[R, D]`: two passes, of which the first finds where to start."""
    head_dim, half = z.shape[1], z.shape[1] // 2
    w = z.t().contiguous()
    free = torch.zeros((trellis.num_overlaps, len(z)), dtype=torch.float32, device=z.device)
    turned = w.roll(-half, 0)
    costs = _forward(turned, trellis, levels, free)
    _, first = _back(turned, trellis, levels, costs, _lowest(costs[-1]), head_dim - half)
    closed = torch.full_like(free, torch.inf).scatter_(0, first[None], 0.0)
    codes, _ = _back(w, trellis, levels, _forward(w, trellis, levels, closed), first, 0)
    return codes.t()


def _forward(w: Tensor, trellis: Trellis, levels: Tensor, costs: Tensor) -> Tensor:
    """Costs `[D + 1, overlaps, R]` before each of the numbers `w` `[D, R]`, and after the last."""
    count = 1 << trellis.bits
    distinct, which = torch.unique(levels, return_inverse=True)
    every = torch.empty((len(w) + 1, *costs.shape), dtype=torch.float32, device=w.device)
    every[0] = costs
    for t, number in enumerate(w.unbind(0)):
        d = number - distinct[:, None]
        candidates = (d * d).index_select(0, which).view(count, *costs.shape)
        # State `c * overlaps + o` ends in code c and has overlap o ...
        candidates += every[t]
        # ... and it is `count * p + r`, with the next overlap p and the code r that stays behind.
        candidates = candidates.view(trellis.num_overlaps, count, -1)
        least = torch.minimum(candidates[:, 0], candidates[:, 1])
        for code in range(2, count):
            torch.minimum(least, candidates[:, code], out=least)
        every[t + 1] = least
    return every


def _back(
    w: Tensor, trellis: Trellis, levels: Tensor, costs: Tensor, overlap: Tensor, stop: int
) -> tuple[Tensor, Tensor]:
    """The codes `[D, R]` of the steps from the last to `stop`, and the overlap before that one.

    The choices of a step are those of its smallest candidates, which are made again here.
    """
    every_code = torch.arange(1 << trellis.bits, device=w.device)[:, None]
    codes = torch.zeros(w.shape, dtype=torch.uint8, device=w.device)
    for t in range(len(w) - 1, stop - 1, -1):
        states = (overlap << trellis.bits) + every_code
        d = w[t] - levels[states]
        candidates = costs[t].gather(0, states % trellis.num_overlaps) + d * d
        code = _lowest(candidates)
        codes[t] = code
        overlap = ((overlap << trellis.bits) + code) % trellis.num_overlaps
    return codes, overlap


def _lowest(costs: Tensor) -> Tensor:
    """The first index of the smallest of `[N, R]`, which `argmin` does not promise; 0 with NaN."""
    index = torch.arange(len(costs), device=costs.device)[:, None]
    return torch.where(costs == costs.amin(0), index, len(costs)).amin(0) % len(costs)
