"""Tables of bytes in registers, from which a byte permutation chooses four at a time (PTX)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import triton

#: What `choose_bytes` needs once before. `zero` is 0, which the compiler cannot know: the lanes
#: before one's own never include the last. Words that it knew it would keep in uniform registers,
#: of which a permutation takes one, and pay a move for each use.
TABLE_REGISTERS: Final = (
    ".reg .b32 zero, word0, word1; mov.u32 zero, %lanemask_lt; and.b32 zero, zero, 0x80000000; "
)


@triton.constexpr_function
def choose_bytes(register: str, table: Sequence[int], nibbles: str) -> str:
    """PTX: the four bytes of up to eight that the low nibbles of a register choose.

    Args:
        register: Where they go.
        table: Four or eight bytes; of four the nibbles are below 4.
        nibbles: The register whose low 16 bits choose: nibbles below 8, or 8 more for the sign of
            a byte in all its bits.
    """
    words = [
        sum(byte << 8 * i for i, byte in enumerate(table[j : j + 4])) for j in (0, len(table) - 4)
    ]
    put = "".join(f"xor.b32 word{i}, zero, {word:#x}; " for i, word in enumerate(words))
    return put + f"prmt.b32 {register}, word0, word1, {nibbles}; "
