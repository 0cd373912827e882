"""Launch choices and device limits: nothing mathematical.

The numbers here were chosen on an H200; `results/write-h200.json` is one run of it.
"""

from __future__ import annotations

import math
import os
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from kvq.modes import Mode, ScaleFit

#: Whether kernels run in Triton's interpreter, on the CPU.
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0") == "1"
#: A row this long or shorter lives in the registers of one thread.
VALUES_PER_THREAD: Final = 128
#: Channels of a thread where rows are not rotated and so are spread over the threads.
SPREAD_VALUES: Final = 32
#: Registers of a thread of the row kernels: what lets twelve warps share a multiprocessor.
MAX_REGISTERS: Final = 168
#: The same where codebooks of fewer than 4 bits are fitted, which would spill below it.
MAX_REGISTERS_FITTED: Final = 232
#: Warps of one program of the row kernels.
ROW_WARPS: Final = 2
#: Rows of one program in the interpreter, which pays for each program and not for each row.
INTERPRETED_ROWS: Final = 4096
#: Threads of a warp. AMD's wavefronts of 64 hold two rows where a warp holds one.
WARP: Final = 32


class RowTile(NamedTuple):
    """The rows of one program of the row kernels."""

    #: Rows of a program, a power of two.
    rows: int
    #: Channels, padded to a power of two of at least 32.
    padded: int
    #: Warps of a program.
    warps: int


def row_tile(mode: Mode | None, head_dim: int, num_rows: int) -> RowTile:
    """The tile for rows of `head_dim` channels. The bits of the result do not depend on it.

    Args:
        mode: A rotated row wants to lie in one thread; others are spread over the threads.
        head_dim: D.
        num_rows: How many rows there are.
    """
    padded = max(32, triton.next_power_of_2(head_dim))
    if INTERPRETED:
        rows = min(INTERPRETED_ROWS, triton.next_power_of_2(num_rows))
        return RowTile(rows, padded, ROW_WARPS)
    values = SPREAD_VALUES if mode is not None and mode.rotation is None else VALUES_PER_THREAD
    rows_of_warp = max(1, WARP * values // max(padded, values))
    warps = min(ROW_WARPS, triton.next_power_of_2(triton.cdiv(num_rows, rows_of_warp)))
    return RowTile(warps * rows_of_warp, padded, warps)


#: The integer type of a store of so many bytes.
UNIT_DTYPES: Final = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def store_unit(mode: Mode, head_dim: int, codes: Tensor) -> int:
    """Bytes of the integers that packed rows are stored as: 4, or less where rows lie closer.

    Args:
        mode: Fixes the segments of a row: three bits are stored as crumbs and then single bits.
        head_dim: D.
        codes: Packed rows along the last axis; its strides and its address matter.
    """
    segments = [head_dim // 4, head_dim // 8] if mode.bits == 3 else [mode.bytes_per_row(head_dim)]
    return math.gcd(4, codes.data_ptr(), codes.storage_offset(), *segments, *codes.stride()[:-1])


def store_alignment(codes: Tensor, unit: int) -> int:
    """The largest power of two, at most 16 bytes, that divides every row's place, in units."""
    return math.gcd(16, codes.data_ptr(), *codes.stride()[:-1]) // unit


def check_below_2_31(argument: str, what: str, count: int) -> None:
    """Rows and slots are counted in 32 bits; offsets are not."""
    if count >= 2**31:
        raise ValueError(f"{argument} must have fewer than 2^31 {what}, got {count}")


def check_device(argument: str, tensor: Tensor) -> None:
    """The kernels must be able to work on the tensor's device.

    Raises:
        ValueError: It is not on a GPU or, with the interpreter, on the CPU.
    """
    if tensor.device.type != "cuda" and not (INTERPRETED and tensor.device.type == "cpu"):
        raise ValueError(
            f"{argument} must be on a CUDA device for the kernel tier, got {tensor.device} "
            "(TRITON_INTERPRET=1 runs the kernels on the CPU)"
        )


def has_e4m3_cast(device: torch.device) -> bool:
    """Whether the hardware rounds float32 to e4m3 straight and to nearest even.

    Compute capability 9.0 does; 8.9 goes by way of
    float16 and rounds twice, older devices and the interpreter have no such instruction.
    """
    return (
        not INTERPRETED
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def has_shuffle() -> bool:
    """Whether inline PTX can exchange registers between the threads of a warp."""
    return not INTERPRETED and torch.version.hip is None


def options(tile: RowTile, mode: Mode | None = None) -> dict[str, object]:
    """Launch options. Exact arithmetic forbids the contraction of `a * b + c`."""
    if INTERPRETED:
        return {}
    fitted = mode is not None and mode.scale_fit not in (None, ScaleFit.UNIT) and mode.bits < 4
    return {
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
        "maxnreg": MAX_REGISTERS_FITTED if fitted else MAX_REGISTERS,
    }
