"""Launch choices and device limits: nothing mathematical.

The numbers here were chosen on an H200; `results/write-h200.json` is one run of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from kvq.kernels.interpreter import take_one_element_bounds
from kvq.modes import Mode, ScaleFit

#: Whether kernels run in Triton's interpreter, on the CPU.
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0") == "1"
#: Major and minor version of the compiler.
TRITON: Final = tuple(int(part) for part in triton.__version__.split(".")[:2])
if INTERPRETED and TRITON < (3, 7):
    take_one_element_bounds()
#: A row this long or shorter lives in the registers of one thread.
VALUES_PER_THREAD: Final = 128
#: Channels of a thread where rows are not rotated and so are spread over the threads.
SPREAD_VALUES: Final = 32
#: Registers of a thread of the row kernels: what lets twelve warps share a multiprocessor.
MAX_REGISTERS: Final = 168
#: Channels of a part (see `part_of`) and registers of a thread where a scale is fitted to a
#: codebook, by bits of a code: at head size 128 nothing spills on Hopper, with triton 3.6 and 3.7.
#: Four bits need 192 registers with 3.7 only; with 168 two more warps share a multiprocessor.
FITTED: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    {1: (8, 200), 2: (8, 255), 3: (16, 232), 4: (16, 168) if TRITON < (3, 7) else (32, 192)}
)
#: The same where gains are searched, which keeps the row until the last one.
SEARCHED: Final = (16, 232)
#: The same, and channels of a part, where levels come by state.
TRELLIS_REGISTERS: Final = 255
TRELLIS_PART: Final = 8
#: Warps of one program of the row kernels.
ROW_WARPS: Final = 2
#: Rows of one program in the interpreter, which pays for each program and not for each row.
INTERPRETED_ROWS: Final = 4096
#: Warps that search at a time, a row each: what sixteen of each of an H200's multiprocessors take.
#: Several warps of one row would all gather the costs of the whole row.
SEARCH_WARPS: Final = 16 * 132
#: Rows that the interpreter searches at a time.
INTERPRETED_SEARCHES: Final = 64
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


def word_bits(words: Tensor) -> Tensor:
    """Stored words as the integers that kernels load and store: int32, or int16 of float16."""
    return words.view(UNIT_DTYPES[words.itemsize])


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


def has_early_launch(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it ends, and wait for it by itself."""
    return (
        not INTERPRETED
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def has_shuffle() -> bool:
    """Whether inline PTX can exchange registers between the threads of a warp."""
    return not INTERPRETED and torch.version.hip is None


def is_fitted(mode: Mode) -> bool:
    """Whether a row's scale is chosen once its codes are known."""
    return mode.scale_fit not in (None, ScaleFit.UNIT)


def part_of(mode: Mode, padded: int, guesses: bool) -> int:
    """Channels that are encoded at a time, so that what is made on the way takes few registers.

    A rotated row lies in one thread; another is spread over a warp and is not cut. A guess and a
    fit keep more beside the codes.

    Args:
        mode: How rows are stored.
        padded: Channels, padded to a power of two.
        guesses: Whether codes are guessed and looked up.
    """
    if mode.rotation is None:
        return padded
    if mode.gains:
        return SEARCHED[0]
    if mode.trellis is not None:
        return TRELLIS_PART
    part = 16 if guesses or is_fitted(mode) else 32
    return FITTED[mode.bits][0] if is_fitted(mode) and mode.bits in FITTED else part


def registers_of(mode: Mode) -> int:
    """The most registers of a thread."""
    if mode.gains:
        return SEARCHED[1]
    if mode.trellis is not None:
        return TRELLIS_REGISTERS
    return FITTED[mode.bits][1] if is_fitted(mode) and mode.bits in FITTED else MAX_REGISTERS


def options(tile: RowTile, *modes: Mode) -> dict[str, object]:
    """Launch options. Exact arithmetic forbids the contraction of `a * b + c`.

    Args:
        tile: The rows of a program.
        modes: How rows are stored; the one that takes most registers decides.
    """
    if INTERPRETED:
        return {}
    return {
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
        "maxnreg": max(map(registers_of, modes), default=MAX_REGISTERS),
    }


class SearchPlan(NamedTuple):
    """The launch of the search of a trellis. The bits of the result do not depend on it."""

    #: Programs, each with room for the choices of its rows, and rows of a program at a time.
    programs: int
    rows: int

    def options(self) -> dict[str, object]:
        """Launch options. Exact arithmetic forbids the contraction of `a * b + c`."""
        return {} if INTERPRETED else {"num_warps": 1, "enable_fp_fusion": False}


def search_plan(num_rows: int) -> SearchPlan:
    """The launch for so many rows."""
    if INTERPRETED:
        return SearchPlan(1, min(INTERPRETED_SEARCHES, triton.next_power_of_2(num_rows)))
    return SearchPlan(min(num_rows, SEARCH_WARPS), 1)


class AttentionPlan(NamedTuple):
    """The launch for sequences with a certain number of new tokens."""

    #: Sequences with so many new tokens, from and to.
    fewest: int
    most: int
    #: Query tokens and heads of a program, and their product padded to a power of two.
    tokens: int
    heads: int
    columns: int
    #: Keys of an iteration, and of the pieces they are read in.
    tile: int
    piece: int
    stages: int
    warps: int
    #: Most registers of a thread; `None`: as many as it wants.
    registers: int | None
    #: Keys of a split: at least, at most; and splits aimed at.
    least_split: int
    most_split: int
    splits: int
    #: Products with queries as rows: they pay for many.
    query_rows: bool

    @property
    def searches(self) -> bool:
        """Whether programs look for their sequence: there is no most number of its queries."""
        return self.most > MOST_DECODED

    @property
    def blocks(self) -> int:
        """Blocks of queries of a sequence, where programs do not search."""
        return 0 if self.searches else -(-self.most // self.tokens)

    def most_splits(self, longest: int) -> int:
        """The most splits that a sequence of up to `longest` keys is cut into."""
        shortest = -(-longest // self.least_split)
        return max(1, min(shortest, max(self.splits, -(-longest // self.most_split))))

    def options(self) -> dict[str, object]:
        """Launch options."""
        if INTERPRETED:
            return {}
        registers = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **registers}


#: New tokens of a sequence up to which its keys are split as those of one are.
MOST_DECODED: Final = 8
#: Keys of a split: at least, at most, and splits aimed at. More splits serve one sequence, fewer
#: many; the sums of one split are of at most so many terms in float32.
LEAST_SPLIT: Final = 256
MOST_SPLIT: Final = 4096
SPLITS: Final = 32
#: Keys of a split where a sequence has many queries.
PREFILL_SPLIT: Final = 32_768
#: Keys of an iteration and iterations in flight of a program there. 128 keys spill, and are still
#: an eighth to a fifth faster (int4, lloyd4, int8); wider heads, and operands that differ in
#: width, get half as many.
PREFILL_TILE: Final = 128
PREFILL_STAGES: Final = 2
#: Rows of queries of a program there, and warps: as the matrix unit of Hopper takes them, from
#: shared memory; or, where operands of keys and of values differ in width, as older ones do, from
#: registers. Hopper's then reads outside of shared memory and answers otherwise each time (triton
#: 3.6, ptxas 12.8; compute-sanitizer says "Invalid __shared__ read").
PREFILL_ROWS: Final = 64
PREFILL_WARPS: Final = 4
UNLIKE_ROWS: Final = 32
UNLIKE_WARPS: Final = 2
#: Query columns of a program with more than one token; and of one for all tokens that fit in so
#: few, which takes a third of the instructions less (int4, int2, int8).
MOST_COLUMNS: Final = 16
FEW_COLUMNS: Final = 8
#: Bytes of codes of one side in an iteration; larger ones leave too few warps room.
TILE_BYTES: Final = 4096
#: Keys of a piece: the rows of one matrix operation.
PIECE: Final = 16
#: Iterations in flight.
ATTENTION_STAGES: Final = 3
#: Registers of a thread for one token of four heads: twelve warps share a multiprocessor. With
#: 232, and so eight warps, lloyd3 takes 1.09 times as long at 64 sequences of 32k, lloyd4 1.06.
ATTENTION_REGISTERS: Final = 168


def _query_ranges(heads: int) -> Iterator[tuple[int, int]]:
    """New tokens of the sequences of each launch, from and to: one, few, more, and many."""
    yield 1, 1
    few = min(FEW_COLUMNS // heads, MOST_DECODED)
    if few > 1:
        yield 2, few
    if few < MOST_DECODED:
        yield max(few, 1) + 1, MOST_DECODED
    yield MOST_DECODED + 1, 2**31 - 1


def attention_plans(
    group: int,
    most_queries: int,
    row_bytes: int,
    head_dim: int,
    widths: tuple[int, int],
    *,
    wide: bool,
    crowded: bool,
    in_memory: bool,
) -> list[AttentionPlan]:
    """The launches that a batch may need.

    A sequence's own number of queries decides which of them it is part of.

    Args:
        group: Query heads of a KV head.
        most_queries: That a sequence may have.
        row_bytes: Bytes of the codes of a row, of the larger side.
        head_dim: Of the larger side.
        widths: Channels of one operand, of keys and of values.
        wide: Float64 throughout.
        crowded: Whether operands take many registers: both bytes of levels are looked up, or an
            integer holds more than eight codes.
        in_memory: Whether levels are loaded one by one.
    """
    tile = PIECE
    while tile < (32 if crowded else 64) and 2 * tile * row_bytes <= TILE_BYTES:
        tile *= 2
    heads = min(group, MOST_COLUMNS)
    alike = widths[0] == widths[1]
    prefill_rows = PREFILL_ROWS if alike else UNLIKE_ROWS
    prefill_warps = PREFILL_WARPS if alike else UNLIKE_WARPS
    prefill_tile = PREFILL_TILE if alike and head_dim <= 128 else PREFILL_TILE // 2
    plans = []
    for fewest, most in _query_ranges(heads):
        if most_queries < fewest:
            continue
        decodes = most <= MOST_DECODED
        rows = not decodes and not wide
        tokens = min(most, max(1, (prefill_rows if rows else MOST_COLUMNS) // heads))
        columns = max(4, triton.next_power_of_2(tokens * heads))
        small = columns == 4 and head_dim <= 128
        if rows:
            plans.append(
                AttentionPlan(
                    fewest=fewest,
                    most=most,
                    tokens=tokens,
                    heads=heads,
                    columns=columns,
                    tile=prefill_tile,
                    piece=prefill_tile,
                    stages=PREFILL_STAGES,
                    warps=prefill_warps,
                    registers=None,
                    least_split=PREFILL_SPLIT,
                    most_split=PREFILL_SPLIT,
                    splits=1,
                    query_rows=True,
                )
            )
            continue
        plans.append(
            AttentionPlan(
                fewest=fewest,
                most=most,
                tokens=tokens,
                heads=heads,
                columns=columns,
                tile=tile if small else min(tile, 32),
                piece=PIECE,
                stages=ATTENTION_STAGES,
                warps=1,
                registers=ATTENTION_REGISTERS if small and not in_memory else None,
                least_split=LEAST_SPLIT,
                most_split=MOST_SPLIT if decodes else PREFILL_SPLIT,
                splits=SPLITS if decodes else 1,
                query_rows=False,
            )
        )
    return plans


def attention_rows(num_rows: int) -> int:
    """Queries of a program that prepares them."""
    return min(INTERPRETED_ROWS, triton.next_power_of_2(num_rows)) if INTERPRETED else 4
