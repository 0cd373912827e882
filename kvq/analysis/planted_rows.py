"""Rows to test bit-exactness with, from an integer counter hash: the same on every device.

Nothing here draws from a random generator of a library, so a row depends on its index, its length
and the seed alone, whatever else is made with it. The kinds in `KINDS` take turns; most are hard
on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvq.modes import RANDOM_HADAMARD
from kvq.reference.hadamard import hadamard_transform
from kvq.scale_word import NAN_WORD

_MASK = 0xFFFFFFFF
#: Scales of planted ties. Divided by 1, a tie stays one. At 7, 13 and 95 a product that is fused
#: with the sum after it, and at all but 1 a quotient in place of the product with `RN(1/s)`, fall
#: to the other side of a tie now and then.
_SHORT = (1.0, 7.0, 13.0, 41.0, 61.0, 95.0)


def hash_counters(counters: Tensor, seed: int) -> Tensor:
    """Mix 64-bit counters into uniform 32-bit integers, held in int64.

    Two rounds of the xor-shift-multiply finalizer of MurmurHash3 over the low and the high word.
    Products are split, so no 64-bit product overflows.

    Args:
        counters: Any shape, int64, not negative.
        seed: Any 32-bit integer.

    Returns:
        The same shape, int64 in [0, 2^32).
    """
    h = (counters >> 32) ^ (seed & _MASK)
    for word in (counters & _MASK, torch.zeros_like(counters)):
        h = h ^ word
        h = h ^ (h >> 16)
        h = _multiply(h, 0x85EBCA6B)
        h = h ^ (h >> 13)
        h = _multiply(h, 0xC2B2AE35)
        h = h ^ (h >> 16)
    return h


def _multiply(h: Tensor, factor: int) -> Tensor:
    """The low 32 bits of `h * factor`."""
    low, high = h * (factor & 0xFFFF), h * (factor >> 16)
    return (low + ((high & 0xFFFF) << 16)) & _MASK


def uniform(counters: Tensor, seed: int) -> Tensor:
    """Multiples of 2^-24 in [0, 1), float32: exact."""
    return (hash_counters(counters, seed) >> 8).to(torch.float32) * 2.0**-24


def near_gaussian(counters: Tensor, seed: int) -> Tensor:
    """The sum of four 16-bit uniform integers, centered, times one float32: unit variance."""
    first, second = hash_counters(counters, seed), hash_counters(counters, seed ^ 0x9E3779B9)
    total = (first & 0xFFFF) + (first >> 16) + (second & 0xFFFF) + (second >> 16)
    return (total - 131070).to(torch.float32) * (math.sqrt(3.0) * 2.0**-16)


def random_rows(
    start: int, count: int, head_dim: int, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Rows of near-Gaussian numbers, each scaled by its own power of two (2^-8 to 2^7).

    Args:
        start: Index of the first row.
        count: How many.
        head_dim: D.
        seed: Any 32-bit integer.
        device: Where.

    Returns:
        `[count, D]` float32.
    """
    rows = torch.arange(start, start + count, device=device)
    counters = rows[:, None] * head_dim + torch.arange(head_dim, device=device)
    return near_gaussian(counters, seed) * _power_of_two(rows, seed + 1, -8, 7)


def planted_rows(
    start: int, count: int, head_dim: int, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Rows of the kinds in `KINDS`, which take turns: row `i` is of kind `i % len(KINDS)`.

    Args:
        start: Index of the first row.
        count: How many.
        head_dim: D, divisible by 16.
        seed: Any 32-bit integer.
        device: Where.

    Returns:
        `[count, D]` float32.
    """
    rows = torch.arange(start, start + count, device=device)
    channels = torch.arange(head_dim, device=device)[None]
    out = torch.empty((count, head_dim), dtype=torch.float32, device=device)
    for turn, make in enumerate(_MAKERS.values()):
        own = slice((turn - start) % len(KINDS), None, len(KINDS))
        out[own] = make(_Draws(rows[own], channels, seed))
    return out


def rows_of_kind(
    kind: str, count: int, head_dim: int, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """The first `count` rows of one kind among `planted_rows`.

    Args:
        kind: One of `KINDS`.
        count: How many.
        head_dim: D, divisible by 16.
        seed: Any 32-bit integer.
        device: Where.

    Returns:
        `[count, D]` float32.

    Raises:
        ValueError: There is no such kind; the message lists them.
    """
    if kind not in _MAKERS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    rows = torch.arange(count, device=device) * len(KINDS) + KINDS.index(kind)
    channels = torch.arange(head_dim, device=device)[None]
    return _MAKERS[kind](_Draws(rows, channels, seed))


@dataclass(frozen=True, slots=True)
class _Draws:
    """What the kinds are made of, for some rows: drawn when asked for."""

    #: `[R]` int64: their indices.
    rows: Tensor
    #: `[1, D]` int64: 0, 1, 2, ...
    channels: Tensor
    #: Everything that is drawn depends on it.
    seed: int

    @property
    def counters(self) -> Tensor:
        """`[R, D]` int64: one for each lane of all rows."""
        return self.rows[:, None] * self.channels.shape[1] + self.channels

    @property
    def z(self) -> Tensor:
        """`[R, D]` near-Gaussian."""
        return near_gaussian(self.counters, self.seed)

    @property
    def u(self) -> Tensor:
        """`[R, D]` uniform on [0, 1)."""
        return uniform(self.counters, self.seed + 2)

    @property
    def h(self) -> Tensor:
        """`[R, D]` 32-bit integers."""
        return hash_counters(self.counters, self.seed + 4)

    @property
    def pick(self) -> Tensor:
        """`[R, 1]` 32-bit integers."""
        return hash_counters(self.rows, self.seed + 3)[:, None]

    @property
    def sign(self) -> Tensor:
        """`[R, 1]` of +1 and -1."""
        return 1.0 - 2.0 * ((self.pick >> 8) & 1).to(torch.float32)

    @property
    def chosen(self) -> Tensor:
        """`[R, D]` bool: true in one channel of each row."""
        return self.channels == self.pick % self.channels.shape[1]

    def power_of_two(self, number: int, low: int, high: int) -> Tensor:
        """`[R, 1]`: a power of two with an exponent in [low, high]; draws differ by `number`."""
        return _power_of_two(self.rows, self.seed + number, low, high)

    def short_number(self, number: int) -> Tensor:
        """`[R, 1]`: a short integer times 2^-4 to 2^3, to multiply an exact scale by."""
        short = torch.tensor(_SHORT, dtype=torch.float32, device=self.rows.device)
        which = hash_counters(self.rows, self.seed + number) % len(_SHORT)
        return short[which][:, None] * self.power_of_two(number + 1, -4, 3)


def _power_of_two(rows: Tensor, seed: int, low: int, high: int) -> Tensor:
    """`[R, 1]` float32: a power of two with an exponent in [low, high], from its bits."""
    return _exp2(low + hash_counters(rows, seed) % (high - low + 1))[:, None]


def _exp2(exponent: Tensor) -> Tensor:
    """Powers of two with integer exponents in [-126, 127], float32, from their bits."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _unrotate(y: Tensor) -> Tensor:
    """Rows that the one-round rotation of the default seed takes to `y`."""
    return hadamard_transform(y, RANDOM_HADAMARD, inverse=True)


def _one_sided(d: _Draws) -> Tensor:
    return d.sign * (10.0 + 2.0 * d.u)


def _half_integers(d: _Draws) -> Tensor:
    """Multiples of a half from -63.5 to 63.5, and +-127 once: an int8 scale of exactly 1."""
    return torch.where(d.chosen, 127.0 * d.sign, torch.floor(d.u * 255.0) * 0.5 - 63.5)


def _int8_ties(d: _Draws) -> Tensor:
    return _half_integers(d) * d.short_number(14)


def _beside_ties(d: _Draws) -> Tensor:
    """The float32 neighbors, on either side, of half integers."""
    ties = _half_integers(d)
    step = (d.h & 2).to(torch.int32) - 1
    beside = (ties.view(torch.int32) + step).view(torch.float32)
    return torch.where(d.chosen | (ties == 0.0), ties, beside)


def _e4m3_ties(d: _Draws) -> Tensor:
    """Midpoints between neighboring e4m3fn numbers, and +-448 once: the fp8 scale is exact."""
    h = d.h
    sixteenths = (2 * (h & 7) + 1).to(torch.float32) * 2.0**-4
    exponent = ((h >> 3) & 15) - 7
    # An exponent of -7 stands for the numbers below the smallest normal.
    normal = (1.0 + sixteenths) * _exp2(exponent)
    magnitude = torch.where(exponent == -7, sixteenths * 2.0**-6, normal).clamp_max(448.0)
    signed = torch.where((h >> 7) & 1 == 1, -magnitude, magnitude)
    return torch.where(d.chosen, 448.0 * d.sign, signed) * d.short_number(16)


def _rotated_ties(d: _Draws) -> Tensor:
    """Rotated rows of range 15 on a lattice of halves, from about zero to one-sided.

    What they are multiplied by is exactly the 4-bit scale where zero is in the range; the
    zero-point may be a tie too.
    """
    nibbles = torch.floor(d.u * 31.0) * 0.5
    lowest = d.channels == (d.pick + 1) % d.channels.shape[1]
    nibbles = torch.where(d.chosen, 15.0, torch.where(lowest, 0.0, nibbles))
    shift = torch.floor(uniform(d.rows, d.seed + 7) * 40.0)[:, None] * 0.5
    return _unrotate((nibbles + 2.0 - shift) * d.short_number(18))


def _rotated_sparse(d: _Draws) -> Tensor:
    """Rotated rows of small integers, mostly zero: thresholds at zero, equal extremes."""
    integers = torch.floor(d.u * 80.0) - 40.0
    return _unrotate(torch.where(integers.abs() <= 3.0, integers, 0.0) * d.power_of_two(8, -3, 3))


def _float16_extremes(d: _Draws) -> Tensor:
    u = d.u
    return torch.where(u < 0.25, d.sign * 65504.0, torch.where(u > 0.75, -65504.0, d.z))


def _not_finite(d: _Draws) -> Tensor:
    """One lane of NaN, infinity, minus infinity or a NaN with the sign bit."""
    words = (NAN_WORD, 0x7F800000, -0x800000, -0x400000)
    bits = torch.tensor(words, dtype=torch.int32, device=d.rows.device)
    return torch.where(d.chosen, bits[(d.pick >> 12) & 3].view(torch.float32), d.z)


def _heavy_tail(d: _Draws) -> Tensor:
    z = d.z
    return z * z * z * z * z


def _near_floors(d: _Draws) -> Tensor:
    """Rows about the floor of the integer scales, or about the smallest sum of squares."""
    small, tiny = d.power_of_two(9, -26, -12), d.power_of_two(10, -70, -60)
    return d.z * torch.where((d.pick >> 9) & 1 == 1, small, tiny)


_MAKERS: Final[dict[str, Callable[[_Draws], Tensor]]] = {
    "gaussian": lambda d: d.z,
    "gaussian_scaled": lambda d: d.z * d.power_of_two(11, -60, 50),
    "zeros": lambda d: torch.where(d.u < 0.5, 0.0, -0.0),
    "one_sided": _one_sided,
    "spike_in_channel_0": lambda d: torch.where(d.channels == 0, d.sign * 100.0, d.z),
    "spike": lambda d: torch.where(d.chosen, d.sign * 100.0, d.z),
    "int8_ties": _int8_ties,
    "beside_ties": _beside_ties,
    "e4m3_ties": _e4m3_ties,
    "rotated_ties": _rotated_ties,
    "rotated_sparse": _rotated_sparse,
    "rotated_one_sided": lambda d: _unrotate(_one_sided(d)),
    "subnormal": lambda d: torch.floor(d.z * 64.0) * 2.0**-149,
    "float16_extremes": _float16_extremes,
    "not_finite": _not_finite,
    "constant": lambda d: (d.sign * 3.0).expand(-1, d.channels.shape[1]),
    "heavy_tail": _heavy_tail,
    "one_hot": lambda d: torch.where(d.chosen, d.sign * d.power_of_two(12, -40, 40), 0.0),
    "near_floors": _near_floors,
    "huge": lambda d: d.z * d.power_of_two(13, 50, 127),
}
#: The kinds of planted rows, in the order in which they take turns.
KINDS: Final = tuple(_MAKERS)
