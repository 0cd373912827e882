"""Bit layout of the word that is stored beside each row of codes. Constants only.

A word holds what turns a row of codes back into numbers. It is one float32 (four bytes), whose
bits carry a second number in two layouts, or one float16 (two bytes).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

#: The smallest scale of the integer modes. Nearest float32: `0x358637bd`.
SCALE_FLOOR: Final = 1e-6
#: The low mantissa bits of a float32 scale that hold the zero-point.
ZERO_POINT_BITS: Final = 4
#: Selects the zero-point in the word's bits.
ZERO_POINT_MASK: Final = 0x0000000F
#: Clears the zero-point from the word's bits, as a signed 32-bit integer (`~ZERO_POINT_MASK`).
SCALE_MASK: Final = -16
#: Bits of the word of a NaN row: the canonical quiet NaN.
NAN_WORD: Final = 0x7FC00000
#: The same of a word of 16 bits.
NAN_WORD_16: Final = 0x7E00
#: Exponent bits of a float32; all of them set means infinity or NaN.
EXPONENT_MASK: Final = 0x7F800000
#: Exponent bits of a float16.
EXPONENT_MASK_16: Final = 0x7C00
#: A codebook row whose sum of squares is below this is a zero row: 2^-126, the smallest normal.
SMALLEST_NORMAL: Final = 2.0**-126
#: The smallest scale of a float16 pair: 2^-24, the smallest positive float16.
SCALE_FLOOR_16: Final = 2.0**-24


class StoredWord(Enum):
    """What the stored word of a row holds."""

    #: One float32: the scale.
    FLOAT32 = "float32"
    #: One float32 scale with its low 4 mantissa bits cleared, and an unsigned zero-point in them.
    FLOAT32_ZERO_POINT = "float32_zero_point"
    #: Two float16: the scale in the low half, the smallest value of the row in the high half.
    FLOAT16_PAIR = "float16_pair"
    #: One float16: the float32 scale of a codebook row, rounded once. Codes and gains are chosen
    #: before it is. A scale that rounds to zero (up to 2^-25) makes a zero row, one that rounds to
    #: infinity (from 65,520 on) a NaN row; below 2^-14 it has fewer than 11 bits. For a row of
    #: length `|x|` in no special direction the scale is about `|x| / sqrt(D * b)`, with `b` the
    #: block size of the rotation (for `smax*` some three times that): at head size 128 lengths of
    #: 1e-5 to 1e6 survive, from 0.01 on with all 11 bits. Where the rotation puts a row into one
    #: channel it is up to twice `|x| / sqrt(b)`: such rows near the largest float16 are NaN rows.
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one stored word: 2 or 4."""
        return 2 if self is StoredWord.FLOAT16 else 4

    def __str__(self) -> str:
        return self.value
