"""Triton mirror of `kvq.reference.trellis`: the search, in two launches before the write.

Rows are rotated and normalized as the write will do it again, and stored; then each program
searches some rows, with all costs of a row in registers. What it stores is the state of each
channel, from which the write has codes and levels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels import launch
from kvq.kernels.hadamard import rotate
from kvq.kernels.rows import fold_add, load_rows, pick, store_rows
from kvq.kernels.scaling import constant, divide, round_to_bfloat16, round_to_float16
from kvq.modes import Mode
from kvq.trellis import Trellis, state_levels


@lru_cache(maxsize=64)
def level_table(
    trellis: Trellis, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`[2 ** window_bits]`: the level of each state."""
    return torch.tensor(state_levels(trellis), dtype=dtype, device=device)


@triton.jit
def rotate_input(x, SPEC: tl.constexpr, R: tl.constexpr):
    """Rows `[C, R]` rotated and, where the mode says so, rounded to the dtype of the input."""
    if pick(SPEC, "rounds") > 0:
        x = rotate(x, SPEC, R)
    if pick(SPEC, "round_to") == "float16":
        x = round_to_float16(x)
    elif pick(SPEC, "round_to") == "bfloat16":
        x = round_to_bfloat16(x)
    return x


@triton.jit
def load_states(base, live, FIRST: tl.constexpr, PART: tl.constexpr, D: tl.constexpr):
    """`[PART, R]` int32: the states of the channels from `FIRST` on of rows that start at `base`.

    Part by part, since a row of numbers takes the registers already.
    """
    channel = tl.arange(0, PART)[None, :] + FIRST
    states = tl.load(base[:, None] + channel, mask=live[:, None] & (channel < D), other=0)
    return states.permute(1, 0).to(tl.int32)


@triton.jit
def trellis_codes(base, live, table_ptr, SPEC: tl.constexpr, NUMBER: tl.constexpr):
    """Codes and levels of a part of rows whose states are known; a padded channel's level is 0."""
    PART: tl.constexpr = pick(SPEC, "part")
    FIRST: tl.constexpr = PART * NUMBER
    states = load_states(base, live, FIRST, PART, pick(SPEC, "head_dim"))
    levels = tl.load(table_ptr + states)
    if pick(SPEC, "head_dim") < FIRST + PART:
        levels = tl.where(
            FIRST + tl.arange(0, PART)[:, None] < pick(SPEC, "head_dim"), levels, 0.0
        )
    return states & ((1 << pick(SPEC, "bits")) - 1), levels


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _normalize_kernel(
    x_ptr,
    z_ptr,
    num_rows,
    num_heads,
    x_token,
    x_head,
    SPEC: tl.constexpr,
    R: tl.constexpr,
):
    """The numbers that are searched, of rows `[T, H, D]`."""
    D: tl.constexpr = pick(SPEC, "head_dim")
    C: tl.constexpr = pick(SPEC, "padded")
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < num_rows
    x = load_rows(x_ptr + row // num_heads * x_token + row % num_heads * x_head, live, D, C)
    y = rotate_input(x, SPEC, R)
    norm = tl.math.sqrt_rn(fold_add(y * y, C, R))
    z = y * divide(constant(norm, pick(SPEC, "root")), norm)[None, :]
    store_rows(z_ptr + row * D, z, live, D, C)


@triton.jit
def _forward(
    z,
    live,
    levels,
    costs,
    choices,
    turn,
    D: tl.constexpr,
    BITS: tl.constexpr,
    R: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Costs `[R, OVERLAPS]` after all of the numbers; the choices of each are stored.

    Costs are kept by next overlap, and gathered for the states that lead to it: a layout of
    registers that holds all the time, where reshaping would have the compiler carry several.
    """
    next_overlap = tl.arange(0, OVERLAPS)[None, :]
    at = choices + tl.arange(0, R)[:, None] * OVERLAPS + next_overlap
    for t in range(D):
        number = tl.load(z + (t + turn) % D, mask=live, other=0.0)[:, None]
        # The state `2^BITS * p + r` comes before the overlap p, and the code r stays behind.
        for r in tl.static_range(1 << BITS):
            overlap = ((next_overlap << BITS) + r) % OVERLAPS
            before = tl.gather(costs, overlap.broadcast_to(R, OVERLAPS), 1)
            d = number - levels[r]
            candidate = before + d * d
            if r == 0:
                least = candidate
                choice = tl.zeros([R, OVERLAPS], tl.int32)
            else:
                lower = candidate < least
                least = tl.where(lower, candidate, least)
                choice = tl.where(lower, r, choice)
        costs = least
        tl.store(at + t * (R * OVERLAPS), choice.to(tl.uint8))
    return costs


@triton.jit
def _levels_by_code(table_ptr, BITS: tl.constexpr, OVERLAPS: tl.constexpr):
    """For each code that stays behind, `[1, OVERLAPS]`: the levels by next overlap."""
    levels = ()
    for r in tl.static_range(1 << BITS):
        state = (tl.arange(0, OVERLAPS)[None, :] << BITS) + r
        levels = levels + (tl.load(table_ptr + state),)
    return levels


@triton.jit(do_not_specialize=["num_rows"])
def _search_kernel(
    z_ptr,
    states_ptr,
    choices_ptr,
    table_ptr,
    num_rows,
    D: tl.constexpr,
    BITS: tl.constexpr,
    WINDOW_BITS: tl.constexpr,
    R: tl.constexpr,
):
    """The states of the channels of each row: see `kvq.trellis.Trellis`."""
    OVERLAPS: tl.constexpr = 1 << (WINDOW_BITS - BITS)
    HALF: tl.constexpr = D // 2
    levels = _levels_by_code(table_ptr, BITS, OVERLAPS)
    choices = choices_ptr + tl.program_id(0).to(tl.int64) * (D * R * OVERLAPS)
    inside = tl.arange(0, R) * OVERLAPS
    for block in range(tl.program_id(0), tl.cdiv(num_rows, R), tl.num_programs(0)):
        row = (block * R + tl.arange(0, R)).to(tl.int64)
        live = row < num_rows
        z = z_ptr + row * D
        costs = tl.zeros([R, OVERLAPS], tl.float32)
        costs = _forward(z, live, levels, costs, choices, HALF, D, BITS, R, OVERLAPS)
        overlap = tl.argmin(costs, 1, tie_break_left=True)
        # Choices are read by other threads than wrote them.
        tl.debug_barrier()
        for i in range(HALF):
            at = choices + (D - 1 - i) * (R * OVERLAPS) + inside + overlap
            overlap = ((overlap << BITS) + tl.load(at).to(tl.int32)) % OVERLAPS
        tl.debug_barrier()
        closed = tl.arange(0, OVERLAPS)[None, :] == overlap[:, None]
        costs = tl.where(closed, 0.0, float("inf"))
        _forward(z, live, levels, costs, choices, 0, D, BITS, R, OVERLAPS)
        tl.debug_barrier()
        for i in range(D):
            t = D - 1 - i
            at = choices + t * (R * OVERLAPS) + inside + overlap
            state = (overlap << BITS) + tl.load(at).to(tl.int32)
            tl.store(states_ptr + row * D + t, state.to(tl.int16), mask=live)
            overlap = state % OVERLAPS
        tl.debug_barrier()


def trellis_states_of(x: Tensor, mode: Mode, spec: Any) -> Tensor:
    """The states that the search gives for the channels of rows of any size.

    Args:
        x: `[T, H, D]`, any strides of T and H, contiguous in D.
        mode: A trellis mode; for another the result is a placeholder.
        spec: Its `RowSpec`.

    Returns:
        `[T, H, D]` int16.
    """
    trellis = mode.trellis
    if trellis is None:
        return x.new_empty(1, dtype=torch.int16)
    num_tokens, num_heads, head_dim = x.shape
    num_rows = num_tokens * num_heads
    states = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    if num_rows == 0:
        return states
    z = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    tile = launch.row_tile(mode, head_dim, num_rows)
    _normalize_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x,
        z,
        num_rows,
        num_heads,
        x.stride(0),
        x.stride(1),
        SPEC=spec,
        R=tile.rows,
        **launch.options(tile, mode),
    )
    plan = launch.search_plan(num_rows)
    choices = torch.empty(
        plan.programs * plan.rows * head_dim * trellis.num_overlaps,
        dtype=torch.uint8,
        device=x.device,
    )
    _search_kernel[(plan.programs,)](
        z,
        states,
        choices,
        level_table(trellis, x.device),
        num_rows,
        D=head_dim,
        BITS=trellis.bits,
        WINDOW_BITS=trellis.window_bits,
        R=plan.rows,
        **plan.options(),
    )
    return states
