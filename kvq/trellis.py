"""Trellis codes: a level that depends on a window of codes, and so on the channels that follow.

A code of `k` bits names one of `2^k` levels in a codebook. Here the `m` codes of a channel and of
the `m - 1` after it, cyclically, are one *state* of `L = k m` bits, and the state names the level.
There are more levels than codes, few sequences of them can be stored, and a search finds the best.
The map from state to level is linear: a few parities of the state are the *label*, the index of a
level. So what a reader must do is a few shifts and exclusive ors of the packed codes themselves,
and then a look-up among few levels, as in a codebook.

The levels are those that fit Gaussian rows best, found by turns of search and averaging and then
rounded to steps of one unit.

The arithmetic, which both tiers and the oracle of the tests follow, is fixed in `Trellis`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from kvq.value_checks import check_int, check_real, check_text, check_tuple

#: Bits of a state: a reader holds a window at any place in 32 bits, and its table is small.
MOST_WINDOW_BITS: Final = 12
#: Levels are integers of so many bits and a sign, times the unit: exactly float16 numbers but for
#: the unit.
STEP_BITS: Final = 11


@dataclass(frozen=True, slots=True)
class Trellis:
    """A tail-biting bitshift trellis code with linear labels.

    **State.** Of codes `c[0..D-1]`, channel `i` has the state
    `s[i] = sum over j < m of c[(i + j) mod D] * 2^(k j)`. Bit `b` of its label is the parity of
    `s[i] & masks[b]`, and its level is `steps[label] * unit`, a float32 number exactly.

    **Search.** `z` is the normalized row. All is float32, one operation at a time. The *overlap*
    of a channel is its state without its last code, `o = s mod 2^(L-k)`; that of the next channel
    is `floor(s / 2^k)`. One pass over numbers `w[0..D-1]` from costs `A[o]`:

    * step `t`: for each overlap `p` of the next channel and each code `r` from 0 to `2^k - 1`,
      with `s = 2^k p + r`, the candidate is `RN(A[s mod 2^(L-k)] + RN(d * d))`,
      `d = RN(w[t] - level[s])`. The new `A[p]` is the smallest candidate, and `choice[t][p]` its
      `r`, the lowest among equals.
    * back: from the overlap `p` after the last step, for `t = D-1 .. 0`: `r = choice[t][p]` is the
      code of number `t`, and `p` becomes `(2^k p + r) mod 2^(L-k)`, the overlap before step `t`.

    Two passes, with `h = floor(D / 2)`:

    1. over `w[t] = z[(t + h) mod D]`, from costs 0 and back from the overlap of the smallest final
       cost, the lowest among equals. It gives the overlap `p*` before step `D - h`, which is that
       of channel 0.
    2. over `w = z`, from cost 0 at `p*` and infinite costs elsewhere, and back from `p*`. Its
       codes are the codes of the row.

    So the code closes on itself: no code is spent on a first state. The second pass is the exact
    minimum of the squared error among the sequences that pass through `p*`.

    >>> trellis = TRELLISES["linear_2_10"]
    >>> trellis.num_states, trellis.window, len(trellis.steps)
    (1024, 5, 16)
    """

    #: A short name; it says nothing to the arithmetic.
    name: str
    #: `k`, bits of a code: 2 or 3.
    bits: int
    #: `L`, bits of a state: a multiple of `k`.
    window_bits: int
    #: For each bit of a label, the bits of the state whose parity it is; linearly independent.
    masks: tuple[int, ...]
    #: For each label, its level in units.
    steps: tuple[int, ...]
    #: What a step is worth.
    unit: float

    def __post_init__(self) -> None:
        check_text("name", self.name)
        if check_int("bits", self.bits) not in (2, 3):
            raise ValueError(f"bits must be 2 or 3, got {self.bits!r}")
        check_int("window_bits", self.window_bits)
        check_tuple("masks", self.masks, int)
        check_tuple("steps", self.steps, int)
        check_real("unit", self.unit)
        if self.window_bits % self.bits or not self.bits < self.window_bits <= MOST_WINDOW_BITS:
            raise ValueError(
                f"window_bits must be a multiple of {self.bits} above it and at most "
                f"{MOST_WINDOW_BITS}, got {self.window_bits!r}"
            )
        for mask in self.masks:
            if not 0 < mask < self.num_states:
                raise ValueError(
                    f"masks must hold numbers of 1 to {self.window_bits} bits, got {mask!r}"
                )
        if _rank(self.masks) != len(self.masks):
            raise ValueError(f"masks must be linearly independent, got {self.masks}")
        if len(self.steps) != 2 ** len(self.masks):
            raise ValueError(
                f"steps must hold a number for each of {2 ** len(self.masks)} labels, "
                f"got {len(self.steps)}"
            )
        for step in self.steps:
            if not abs(step) < 2**STEP_BITS:
                raise ValueError(f"steps must be below 2^{STEP_BITS}, got {step!r}")
        # A product of 11 and 13 bits has 24: it is a float32 number.
        mantissa, exponent = math.frexp(self.unit)
        if not -100 <= exponent <= 100 or not self.unit > 0 or (mantissa * 2**13) % 1:
            raise ValueError(
                f"unit must be a positive number of at most 13 significant bits, got {self.unit!r}"
            )

    @property
    def num_states(self) -> int:
        """`2^L`."""
        return 1 << self.window_bits

    @property
    def window(self) -> int:
        """`m`: the channels whose codes make a state."""
        return self.window_bits // self.bits

    @property
    def num_overlaps(self) -> int:
        """`2^(L - k)`."""
        return 1 << (self.window_bits - self.bits)

    def check_head_dim(self, head_dim: int, argument: str = "head_dim") -> None:
        """A row must hold a window.

        Raises:
            ValueError: It does not.
        """
        if check_int(argument, head_dim) < self.window:
            raise ValueError(
                f"{argument} must be at least {self.window} for a trellis with a window of as "
                f"many channels, got {head_dim}"
            )

    def __str__(self) -> str:
        return self.name


def _rank(masks: tuple[int, ...]) -> int:
    """Of a matrix over GF(2)."""
    basis: list[int] = []
    for mask in masks:
        rest = mask
        for row in basis:
            rest = min(rest, rest ^ row)
        if rest:
            basis.append(rest)
    return len(basis)


@lru_cache(maxsize=64)
def state_steps(trellis: Trellis) -> tuple[int, ...]:
    """The step of each of the `2^L` states."""
    return tuple(
        trellis.steps[
            sum(((state & mask).bit_count() & 1) << b for b, mask in enumerate(trellis.masks))
        ]
        for state in range(trellis.num_states)
    )


@lru_cache(maxsize=64)
def state_levels(trellis: Trellis) -> tuple[float, ...]:
    """The level of each of the `2^L` states, each exactly a float32."""
    return tuple(step * trellis.unit for step in state_steps(trellis))


def _symmetric(*positive: int) -> tuple[int, ...]:
    """Steps in ascending order, each with its opposite."""
    return (*(-step for step in reversed(positive)), *positive)


_ROWS = (
    # Of masks that two shifts of packed codes give, `x >> 3` and `x >> 8`, the best of a search.
    Trellis(
        name="linear_2_10",
        bits=2,
        window_bits=10,
        masks=(0x008, 0x010, 0x109, 0x212),
        steps=_symmetric(3, 15, 27, 37, 49, 67, 85, 127),
        unit=17 / 1024,
    ),
    # Of all masks, the best of a search.
    Trellis(
        name="linear_3_12",
        bits=3,
        window_bits=12,
        masks=(0x02F, 0x75C, 0xCAE, 0x891, 0x6D5),
        steps=_symmetric(
            *(31, 71, 103, 135, 209, 242, 288, 334, 408, 441, 531, 587, 689, 808, 1005, 1335)
        ),
        unit=1 / 512,
    ),
)

#: Every trellis that ships, by name. Read-only.
TRELLISES: Final[Mapping[str, Trellis]] = MappingProxyType({row.name: row for row in _ROWS})
