"""A pass that only reads: what the bytes of a cache cost at the least, for `kvq bench decode`.

No mirror: it exists to be measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels import launch

#: Integers of a load, loads in flight and warps of a program: the fastest tried on an H200.
WIDTH = 4096
UNROLL = 4
WARPS = 8


@triton.jit
def _read_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, UNROLL: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (WIDTH * UNROLL)
    at = x_ptr + start + tl.arange(0, WIDTH)
    total = tl.load(at)
    for i in tl.static_range(1, UNROLL):
        total ^= tl.load(at + i * WIDTH)
    # Never true of a sum of random bits; the compiler does not know.
    if tl.max(total, 0) == -2147483647:
        tl.store(out_ptr, 1)


def read_pass(x: Tensor, out: Tensor) -> int:
    """Read the bytes of `x`, whole programs of them, and say how many.

    Args:
        x: A contiguous tensor of any dtype, on a GPU.
        out: `[1]` int32, which stays as it is.
    """
    launch.check_device("x", x)
    integers = x.view(-1).view(torch.int32)
    programs = len(integers) // (WIDTH * UNROLL)
    if programs:
        _read_kernel[(programs,)](integers, out, WIDTH=WIDTH, UNROLL=UNROLL, num_warps=WARPS)
    return programs * WIDTH * UNROLL * 4
