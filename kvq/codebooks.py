"""Codebooks: the centroids and thresholds that a codebook mode rounds to.

A `Codebook` is a plain, frozen value. The rows of `CODEBOOKS` ship as literals, so nothing is
fitted at import; each names the recipe that made it, and a test fits it again and compares.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from kvq.value_checks import check_bool, check_int, check_kind, check_text, check_tuple

#: The most levels a codebook may have: one byte per code.
MAX_LEVELS: Final = 256


def to_float32(value: float) -> float:
    """The float32 nearest to `value`, ties to even, as a Python float; overflow is infinite."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)


def check_name(name: object) -> None:
    """A codebook's name must be one that a mode's name and a file's can hold.

    Raises:
        TypeError, ValueError: It is not.
    """
    text = check_kind("name", name, str)
    if not text or not all(c.isalnum() or c in "._-" for c in text):
        raise ValueError(f"name must be made of letters, digits, '.', '_' and '-', got {text!r}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a codebook was fitted to: enough to fit it again."""

    #: The law of the numbers: `norm`, `sphere(128)`, `signed_max(128)`, a scipy name with its
    #: parameters, or `samples`.
    distribution: str
    #: How many levels were asked for.
    num_levels: int
    #: Whether the levels were held symmetric about zero.
    symmetric: bool
    #: Whether errors were weighted: by the samples' own weights, or by m^2 for `signed_max`.
    weighted: bool = False

    def __post_init__(self) -> None:
        check_text("distribution", self.distribution)
        check_int("num_levels", self.num_levels, 1)
        check_bool("symmetric", self.symmetric)
        check_bool("weighted", self.weighted)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a codebook comes from."""

    #: In words: the law's name, or the file and the part of it that was read.
    source: str
    #: SHA-256 (hex) of the float32 samples and weights; empty when fitted to a law.
    data_sha256: str = ""
    #: Versions of what fitted it, as (name, version) pairs in alphabetical order.
    versions: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_kind("source", self.source, str)
        check_kind("data_sha256", self.data_sha256, str)
        check_tuple("versions", self.versions)


@dataclass(frozen=True, slots=True)
class Codebook:
    """Levels (centroids) in increasing order, and the thresholds between them.

    The code of `z` is the number of thresholds `t` with `z >= t` (IEEE compare).

    >>> CODEBOOKS["gaussian_4"].num_levels
    4
    """

    #: A short name of letters, digits, `.`, `_` and `-`; it becomes part of a mode's name.
    name: str
    #: Strictly increasing; each exactly a float32.
    levels: tuple[float, ...]
    #: One fewer than the levels; the midpoints of the exact levels, rounded once to float32.
    thresholds: tuple[float, ...]
    #: What it was fitted to.
    recipe: Recipe
    #: Where the numbers come from.
    provenance: Provenance

    def __post_init__(self) -> None:
        check_tuple("levels", self.levels, float)
        check_tuple("thresholds", self.thresholds, float)
        check_kind("recipe", self.recipe, Recipe)
        check_kind("provenance", self.provenance, Provenance)
        check_name(self.name)
        n = len(self.levels)
        if not 2 <= n <= MAX_LEVELS:
            raise ValueError(f"levels must hold 2 to {MAX_LEVELS} numbers, got {n}")
        if len(self.thresholds) != n - 1:
            raise ValueError(
                f"thresholds must hold one number fewer than levels ({n - 1}), "
                f"got {len(self.thresholds)}"
            )
        for argument, values in (("levels", self.levels), ("thresholds", self.thresholds)):
            for value in values:
                if not math.isfinite(value) or to_float32(value) != value:
                    raise ValueError(f"{argument} must hold finite float32 numbers, got {value!r}")
            for left, right in pairwise(values):
                if not left < right:
                    raise ValueError(
                        f"{argument} must be strictly increasing, got {left!r} before {right!r}"
                    )
        for low, threshold, high in zip(
            self.levels, self.thresholds, self.levels[1:], strict=False
        ):
            if not low <= threshold <= high:
                raise ValueError(
                    "thresholds must lie between their two levels, got "
                    f"{threshold!r} between {low!r} and {high!r}"
                )
        if self.recipe.num_levels != n:
            raise ValueError(f"recipe.num_levels must be {n}, got {self.recipe.num_levels}")

    @classmethod
    def from_exact(
        cls, name: str, levels: tuple[float, ...], recipe: Recipe, provenance: Provenance
    ) -> Codebook:
        """A codebook from float64 levels: midpoints are taken first, then all is rounded once.

        Args:
            name: See `Codebook.name`.
            levels: Strictly increasing float64 numbers that stay distinct as float32.
            recipe: What they were fitted to.
            provenance: Where they come from.

        Raises:
            ValueError: The levels are not finite, not increasing, or collide as float32.
        """
        check_tuple("levels", levels, float)
        midpoints = tuple(to_float32((low + high) / 2) + 0.0 for low, high in pairwise(levels))
        return cls(name, tuple(to_float32(v) for v in levels), midpoints, recipe, provenance)

    @property
    def num_levels(self) -> int:
        """How many levels there are."""
        return len(self.levels)

    @property
    def symmetric(self) -> bool:
        """Whether level `i` is exactly minus level `n - 1 - i`."""
        return all(a == -b for a, b in zip(self.levels, reversed(self.levels), strict=True))

    def __str__(self) -> str:
        return self.name


def _floats(words: str) -> tuple[float, ...]:
    """Float32 numbers from their bits, written as hexadecimal words."""
    return tuple(float(struct.unpack(">f", bytes.fromhex(word))[0]) for word in words.split())


def _symmetric(positive_levels: str, positive_thresholds: str) -> Codebook:
    """The Lloyd-Max codebook of N(0,1) from its positive half."""
    levels = _floats(positive_levels)
    thresholds = _floats(positive_thresholds)
    n = 2 * len(levels)
    return Codebook(
        name=f"gaussian_{n}",
        levels=(*(-v for v in reversed(levels)), *levels),
        thresholds=(*(-v for v in reversed(thresholds)), 0.0, *thresholds),
        recipe=Recipe("norm", n, symmetric=True),
        provenance=Provenance("Lloyd-Max fixed point of N(0,1)"),
    )


def _signed_max(levels: str, thresholds: str) -> Codebook:
    """The codebook of a row divided by its signed maximum, fitted at head size 128."""
    values = _floats(levels)
    n = len(values)
    return Codebook(
        name=f"signed_max_{n}",
        levels=values,
        thresholds=_floats(thresholds),
        recipe=Recipe("signed_max(128)", n, symmetric=False, weighted=True),
        provenance=Provenance(
            "Lloyd-Max fixed point of y/m, 128 draws y of N(0,1), m the one of largest magnitude, "
            "weighted by m^2"
        ),
    )


_ROWS = (
    _symmetric("3f4c422a", ""),
    _symmetric("3ee7d2c9 3fc1555d", "3f7b4a0f"),
    _symmetric("3e7af9f8 3f418990 3fac0538 4009b97a", "3f002407 3f866500 3fdfbc17"),
    _symmetric(
        "3e0379fd 3ec6ae44 3f28215e 3f713d39 3fa0cc2f 3fcf1c25 40046ac7 402ee2bf",
        "3e8435a1 3f05bc40 3f4caf4b 3f8cb566 3fb7f42a 3febf8da 4019a6c3",
    ),
    _signed_max("bf00a814 be089b20 3e3e2010 3f142b1d", "bea2cedc 3cd613c0 3ec3b321"),
    _signed_max(
        "bf33dfdc bedd598a be6c7080 bd5ee82e 3def8add 3e996995 3f04ac43 3f57bbc0",
        "bf114650 bea9c8e5 be121546 3d0016c6 3e554c4d 3ed1610e 3f2e3402",
    ),
    _signed_max(
        "bf57b26d bf27c26a bf03b4fe becb7990 be96a6ae be4c632a bde168f1 bcbd9d30 "
        "3d8182b3 3e1ab7ee 3e787777 3eae7402 3ee62389 3f136d75 3f3be2e0 3f761755",
        "bf3fba6c bf15bbb4 bee971c5 beb1101f be7cd843 be1e8bd2 bd88681f 3ca436cd "
        "3ddb7948 3e4997b3 3e9557df 3eca4bc5 3f033f9d 3f27a82b 3f58fd1b",
    ),
)

#: Every codebook that ships, by name. Read-only.
CODEBOOKS: Final[Mapping[str, Codebook]] = MappingProxyType({row.name: row for row in _ROWS})
