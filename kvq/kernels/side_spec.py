"""How one side of the cache becomes operands: what is decided on the host.

See `kvq.kernels.operands` for what the kinds of codes are read as.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import triton
from numpy.typing import NDArray

from kvq.kernels.trellis_operands import trellis_kind
from kvq.modes import Grid, Mode
from kvq.scale_word import StoredWord
from kvq.trellis import Trellis

#: The largest relative error of the levels at which a byte per level will do, as a share of the
#: rounding of the query's own dtype.
BYTE_SHARE: Final = 0.25
#: Codebooks of at most this many levels are selected from constants; larger ones are tables.
MOST_CONSTANT_LEVELS: Final = 16
#: The largest integers that four levels are tried as, in seven bits.
_SEVEN_BITS: Final = tuple(range(3, 128))
#: The largest integer of two planes of seven bits.
_PLANES: Final = (2**14 - 1,)


@dataclass(frozen=True)
class SideSpec:
    """How one side of the cache becomes operands, as compile-time values.

    A row reads `scale * unit * (operand * weight(stream) - offset)`, with the scale and, where
    the stored word has one, less the zero-point or plus the minimum of the row.
    """

    head_dim: int
    bits: int
    #: Bytes of one integer.
    unit_bytes: int
    #: Codes of one integer.
    streams: int
    #: Integers of a row, and the same padded for a matrix product.
    count: int
    padded: int
    #: `affine`, `e4m3`, `bytes`, `planes`, `sevens`, `halves`, `levels`, `table`; `labels` and
    #: `states` of a trellis.
    kind: str
    #: Bits of a code that are turned over: the sign bit of two's complement.
    flip: int
    #: What the stored word holds.
    word: str
    #: Factor of the operand of each stream.
    weights: tuple[float, ...]
    #: A level is `unit * (operand - offset)`.
    unit: float
    offset: float
    #: Operands as numbers, by code; for `bytes` the integers of the subnormals, and for `planes`
    #: of 14 bits.
    levels: tuple[float, ...]
    #: `1 / N` of a rotation that the stored words do not hold.
    fold: float
    #: Whether codes become 8-bit integers, and queries sums of 8-bit digits.
    digits: bool
    #: Whether a stream takes the nibbles of half a register of four bytes, which are neighbors,
    #: and not one place in each byte.
    by_register: bool
    #: Whose codes they are.
    trellis: Trellis | None

    @property
    def partial(self) -> int:
        """Integers of a row, to the next power of two."""
        return 1 << (self.count - 1).bit_length()

    @property
    def own_shift(self) -> bool:
        """Whether the stored word has a second number: a part of the row that no code changes."""
        return self.word in (str(StoredWord.FLOAT32_ZERO_POINT), str(StoredWord.FLOAT16_PAIR))

    @property
    def shifts(self) -> bool:
        """Whether a row's values have a part that does not depend on their codes."""
        return self.own_shift or self.offset != 0.0

    @property
    def level_bits(self) -> list[int]:
        """The bits of the levels as float16 numbers."""
        return [int.from_bytes(struct.pack("<e", level), "little") for level in self.levels]


@triton.constexpr_function
def place(bits: int, stream: int) -> tuple[int, int]:
    """Where the code of a stream lies: a right shift, and the place of its lowest bit after it.

    The place plus `bits` is at most 10, the mantissa of a float16.
    """
    low = stream * bits
    if bits >= 4:
        return low // 8 * 8, low % 8
    return (0, low) if low + bits <= 10 else (6, low - 6)


@triton.constexpr_function
def digit_place(bits: int, stream: int) -> tuple[int, int]:
    """The same in a byte, for 8-bit operands."""
    low = stream * bits
    return (0, low) if bits >= 4 else (low // 4 * 4, low % 4)


class Fit(NamedTuple):
    """Levels as `unit * (operand - offset)`."""

    #: Relative root-mean-square error that is left, of equally likely levels.
    error: float
    unit: float
    offset: float
    #: By code.
    operands: tuple[float, ...]


def _fit(levels: NDArray[np.float64], operands: NDArray[np.float64]) -> Fit:
    """The best unit and offset, by least squares, for the best row of `operands`."""
    centered = operands - operands.mean(-1, keepdims=True)
    units = (centered * levels).sum(-1) / (centered**2).sum(-1)
    constants = levels.mean() - units * operands.mean(-1)
    errors = ((operands * units[:, None] + constants[:, None] - levels) ** 2).sum(-1)
    best = int(errors.argmin())
    error = math.sqrt(errors[best] / (levels**2).sum())
    unit, offset = float(units[best]), float(-constants[best] / units[best])
    return Fit(error, unit, offset, tuple(map(float, operands[best])))


@lru_cache(maxsize=256)
def fit_integers(levels: tuple[float, ...], largest: tuple[int, ...]) -> Fit:
    """Levels as integers from 0 to one of `largest`."""
    values = np.array(levels)
    ends = np.array(largest, dtype=np.float64)[:, None]
    return _fit(values, np.rint((values - values[0]) * (ends / (values[-1] - values[0]))))


@lru_cache(maxsize=256)
def fit_sevens(levels: tuple[float, ...]) -> Fit:
    """Levels as float16 numbers of which neither byte has its highest bit, but for a factor of 2
    of the lower one: they are not negative, and their lowest bit is 0."""
    values = np.array(levels)
    ends = 2.0 ** np.linspace(0, 1, 4097)[:-1, None]
    scaled = ((values - values[0]) * (ends / (values[-1] - values[0]))).astype(np.float32)
    # The nearest with a significand of 10 bits, or a little off below 2^-14.
    nearest = ((scaled.view(np.uint32) + (1 << 13)) & ~np.uint32((1 << 14) - 1)).view(np.float32)
    bits = nearest.astype(np.float16).view(np.uint16) & np.uint16(0xFFFE)
    return _fit(values, bits.view(np.float16).astype(np.float64))


@lru_cache(maxsize=256)
def fit_halves(levels: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """Levels as float16 numbers: `unit * number`, with the unit that rounds them best."""
    values = np.array(levels)
    units = (2.0 ** np.linspace(0, 1, 4097)[:-1])[:, None] * np.abs(values).max() / 1024.0
    rounded = (values / units).astype(np.float16).astype(np.float64)
    fitted = (rounded * values).sum(1) / (rounded * rounded).sum(1)
    errors = ((rounded * fitted[:, None] - values) ** 2).sum(1)
    best = int(errors.argmin())
    return float(fitted[best]), tuple(float(v) for v in rounded[best])


@lru_cache(maxsize=1024)
def side_spec(
    mode: Mode,
    head_dim: int,
    unit_bytes: int,
    accuracy: float,
    ptx: bool,
    integers: bool = False,
) -> SideSpec:
    """The compile-time values of one side.

    Args:
        mode: How its rows are stored.
        head_dim: D.
        unit_bytes: 2, or 1 where rows lie on odd bytes.
        accuracy: Half an ulp of 1.0 in the query's dtype; levels of a codebook are as accurate.
            0.0 asks for float32 levels.
        ptx: Whether look-ups in registers may be used.
        integers: Whether 8-bit integers will do for operands: of keys, whose queries can be split
            into digits of as many.
    """
    bits = mode.bits
    # A three-bit row is read as its low crumbs; its high bits are read beside them.
    streams = 8 * unit_bytes // (2 if bits == 3 else bits)
    count = head_dim // streams
    padded = max(16, triton.next_power_of_2(count))
    weights = (1.0,) * streams
    unit, offset = 1.0, 0.0
    levels: tuple[float, ...] = ()
    affine = 2.0**24
    if mode.grid is Grid.SIGNED:
        # Read as unsigned integers, 128 more than the codes.
        kind, unit, offset = "affine", affine, 128 / affine
    elif mode.grid is Grid.E4M3:
        kind, unit = "e4m3", 256.0
    elif mode.trellis is not None:
        kind, unit, offset, levels = trellis_kind(mode.trellis, streams, unit_bytes, ptx)
    elif mode.codebook is None:
        kind, unit = "affine", affine
    else:
        exact = mode.codebook.levels
        levels = exact + (exact[-1],) * (2**bits - len(exact))
        kind, unit, offset, levels = _codebook_kind(
            levels, len(exact), bits, accuracy, ptx, integers
        )
    if kind == "affine" and bits != 3:
        weights = tuple(2.0 ** -place(bits, j)[1] for j in range(streams))
    digits = integers and accuracy > 0.0 and kind in ("affine", "bytes", "planes") and bits != 3
    flip = 0x80 if mode.grid is Grid.SIGNED else 0
    if digits:
        unit_bytes, streams, count = 1, 8 // bits, head_dim * bits // 8
        padded = max(32, triton.next_power_of_2(count))
        flip = 0
        weights = (1.0,) * streams
        if kind != "planes":
            unit, offset = unit / affine, offset * affine
        if kind == "affine":
            weights = tuple(float(1 << digit_place(bits, j)[1]) for j in range(streams))
        if mode.grid is Grid.SIGNED:
            offset = 0.0
    return SideSpec(
        head_dim=head_dim,
        bits=bits,
        unit_bytes=unit_bytes,
        streams=streams,
        count=count,
        padded=padded,
        kind=kind,
        flip=flip,
        word=str(mode.word),
        weights=weights,
        unit=unit,
        offset=offset,
        levels=levels,
        fold=1.0 if mode.folds_gain else 1.0 / mode.gain(head_dim),
        digits=digits,
        by_register=digits and ptx and kind in ("bytes", "planes"),
        trellis=mode.trellis,
    )


def _codebook_kind(
    levels: tuple[float, ...],
    num_levels: int,
    bits: int,
    accuracy: float,
    ptx: bool,
    integers: bool,
) -> tuple[str, float, float, tuple[float, ...]]:
    """Kind, unit, offset and operands of a codebook."""
    if num_levels == 2:
        step = levels[1] - levels[0]
        return "affine", step * 2.0**24, -levels[0] / step * 2.0**-24, ()
    if accuracy == 0.0:
        return "table", 1.0, 0.0, levels
    unit, halves = fit_halves(levels)
    if len(levels) > MOST_CONSTANT_LEVELS:
        return "table", unit, 0.0, halves
    most = BYTE_SHARE * accuracy
    if bits == 2 and ptx:
        fit = fit_integers(levels, _SEVEN_BITS)
        if fit.error <= most:
            scale = 2.0**24
            return "bytes", fit.unit * scale, fit.offset / scale, fit.operands
    if bits in (2, 4) and integers:
        fit = fit_integers(levels, _PLANES)
        if fit.error <= most:
            return "planes", fit.unit, fit.offset, fit.operands
    if not ptx:
        return "levels", unit, 0.0, halves
    if bits == 4:
        fit = fit_sevens(levels)
        if fit.error <= most:
            return "sevens", fit.unit, fit.offset, fit.operands
    return "halves", unit, 0.0, halves
