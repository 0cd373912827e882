"""The table of storage modes.

A mode says how one row (one token's vector of one KV head) is stored. It is made of parts:
rotation, normalization, grid of codes, codebook, scale fit, rounding, stored word, packing. Both
tiers read the parts and never a mode's name, so a new mode is one row here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

from kvq.codebooks import CODEBOOKS, Codebook, to_float32
from kvq.rounding import Rounding
from kvq.scale_word import ZERO_POINT_BITS, StoredWord
from kvq.trellis import TRELLISES, Trellis
from kvq.value_checks import (
    check_bool,
    check_int,
    check_kind,
    check_optional,
    check_text,
    check_tuple,
)

#: Ends the full name of every mode: one scale per token and KV head.
SUFFIX: Final = "_per_token_head"
#: Bits per code that a packing exists for.
PACKINGS: Final = (1, 2, 3, 4, 8)
#: The seed of the sign tables.
DEFAULT_SEED: Final = 0x9E3779B9
#: The smallest Hadamard block that mixes enough to be worth its time.
SMALLEST_BLOCK: Final = 16


@dataclass(frozen=True, slots=True)
class Rotation:
    """A block-diagonal Hadamard transform with signs: `y = H (s0 * x)`, unnormalized.

    >>> Rotation().block_size(96), Rotation(rounds=2).gain(96)
    (32, 1024)
    """

    #: 1: `H (s0 * x)`; 2: `H (s1 * H (s0 * x))`.
    rounds: int = 1
    #: Random signs drawn from `seed`, or all +1.
    random_signs: bool = True
    #: Seed of the sign tables.
    seed: int = DEFAULT_SEED
    #: Draw the signs of one block and repeat them in each (the first implementation's way), or
    #: draw a row of signs as long as the head.
    repeat_block_signs: bool = False
    #: Round the rotated row to the input's dtype (the first implementation's way).
    round_to_input: bool = False

    def __post_init__(self) -> None:
        if check_int("rounds", self.rounds) not in (1, 2):
            raise ValueError(f"rounds must be 1 or 2, got {self.rounds!r}")
        if not 0 <= check_int("seed", self.seed) < 2**64:
            raise ValueError(f"seed must be between 0 and 2^64 - 1, got {self.seed!r}")
        for argument in ("random_signs", "repeat_block_signs", "round_to_input"):
            check_bool(argument, getattr(self, argument))

    @staticmethod
    def block_size(head_dim: int) -> int:
        """`b`, the largest power of two that divides `head_dim`."""
        check_int("head_dim", head_dim, 1)
        return head_dim & -head_dim

    def gain(self, head_dim: int) -> int:
        """`N = b ** rounds`: the factor by which a rotation and its transpose multiply a row."""
        size = self.block_size(head_dim)
        return size if self.rounds == 1 else size * size

    def check(self, head_dim: int) -> None:
        """`head_dim` must have a block that mixes.

        Raises:
            ValueError: `head_dim` is not divisible by 16.
        """
        if check_int("head_dim", head_dim) <= 0 or head_dim % SMALLEST_BLOCK:
            raise ValueError(
                f"head_dim must be divisible by {SMALLEST_BLOCK} for a Hadamard rotation, "
                f"got {head_dim}"
            )


#: All signs +1, one round.
HADAMARD: Final = Rotation(random_signs=False)
#: Random signs of the default seed, one round.
RANDOM_HADAMARD: Final = Rotation()


class Normalization(Enum):
    """What a row is divided by (and moved by) before it meets the grid of codes."""

    #: The largest magnitude of the row over the largest code; the scale has a floor of 1e-6.
    ABSMAX = "absmax"
    #: The range, stretched to hold zero, over the largest code, with an integer zero-point; the
    #: scale that is stored is the scale that encodes.
    ZERO_RANGE = "zero_range"
    #: As the first implementation of `int4`: the bare range, a zero-point that can saturate, and a
    #: scale that is truncated only when it is stored. For parity with existing caches.
    CLAMPED_RANGE = "clamped_range"
    #: The smallest value and the range over the largest code, both float16.
    MIN_RANGE = "min_range"
    #: The root mean square of the row.
    RMS = "rms"
    #: The entry of largest magnitude, with its sign; the lowest channel among equals.
    SIGNED_MAX = "signed_max"

    def __str__(self) -> str:
        return self.value


class Grid(Enum):
    """What a code stands for."""

    #: Two's complement integers.
    SIGNED = "signed"
    #: Unsigned integers.
    UNSIGNED = "unsigned"
    #: The 8-bit float e4m3fn: largest 448, no infinity.
    E4M3 = "e4m3"
    #: The index of a level of a codebook.
    CODEBOOK = "codebook"
    #: A code of a trellis: with those of the next channels it names a level.
    TRELLIS = "trellis"

    def __str__(self) -> str:
        return self.value


#: The grids whose codes stand for levels; their rows have a scale fit and no rounding.
LEVEL_GRIDS: Final = (Grid.CODEBOOK, Grid.TRELLIS)


class ScaleFit(Enum):
    """How the word of a row of levels is chosen once its codes are known.

    `y` is the rotated row, `c` the levels of its codes.
    """

    #: The normalization itself: the RMS (or the signed maximum) of the row.
    UNIT = "unit"
    #: `<y, c> / <c, c>`: the smallest squared error.
    LEAST_SQUARES = "least_squares"
    #: `|y| / |c|`, with the sign of what the row was divided by: the row keeps its length.
    NORM_MATCH = "norm_match"
    #: `<y, y> / <y, c>`: the row keeps its projection on itself.
    UNBIASED = "unbiased"

    def __str__(self) -> str:
        return self.value


#: The words of codebook rows.
_SCALES: Final = (StoredWord.FLOAT32, StoredWord.FLOAT16)
#: The normalizations, words and grids that go together.
_WORDS: Final = {
    Normalization.ABSMAX: ((StoredWord.FLOAT32,), (Grid.SIGNED, Grid.E4M3)),
    Normalization.ZERO_RANGE: ((StoredWord.FLOAT32_ZERO_POINT,), (Grid.UNSIGNED,)),
    Normalization.CLAMPED_RANGE: ((StoredWord.FLOAT32_ZERO_POINT,), (Grid.UNSIGNED,)),
    Normalization.MIN_RANGE: ((StoredWord.FLOAT16_PAIR,), (Grid.UNSIGNED,)),
    Normalization.RMS: (_SCALES, LEVEL_GRIDS),
    Normalization.SIGNED_MAX: (_SCALES, (Grid.CODEBOOK,)),
}

#: The gains that are searched when a row is written, in 32nds (so each is a float32), by what the
#: row is divided by. Seven were chosen for the smallest error of Gaussian rows of head size 128
#: over 2, 3 and 4 bits together; an eighth gains less than one part in a hundred. A gain of 1 is
#: among them, so no row is worse for the search.
GAINS: Final[Mapping[Normalization, tuple[float, ...]]] = MappingProxyType(
    {
        Normalization.RMS: tuple(n / 32 for n in (25, 28, 30, 32, 34, 36, 39)),
        Normalization.SIGNED_MAX: tuple(n / 32 for n in (28, 30, 31, 32, 33, 35, 39)),
    }
)

#: What a mode must be made of, and what it may lack.
_KINDS: Final[dict[str, type]] = {"grid": Grid, "normalization": Normalization, "word": StoredWord}
_OPTIONAL_KINDS: Final[dict[str, type]] = {
    "rotation": Rotation,
    "rounding": Rounding,
    "codebook": Codebook,
    "scale_fit": ScaleFit,
    "trellis": Trellis,
}

#: The normalizations whose words hold the `1/N` of the rotation.
_FOLDED: Final = (Normalization.MIN_RANGE, Normalization.RMS, Normalization.SIGNED_MAX)


def _parts(value: object) -> object:
    """A dataclass as a dictionary of what it is made with, and an enum as its value."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in fields(value) if item.init}
    return value.value if isinstance(value, Enum) else value


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to store a row. `str(mode)` is its name.

    >>> mode = MODES["int4_per_token_head"]
    >>> mode.levels, mode.bytes_per_row(128), mode.bits_per_value(128)
    (16, 64, Fraction(17, 4))
    """

    #: Its name in ids, tables, files and figures.
    name: str
    #: Bits of one code: 1, 2, 3, 4 or 8. They fix the packing, first code in the lowest bits.
    bits: int
    #: What a code stands for.
    grid: Grid
    #: What a row is divided by.
    normalization: Normalization
    #: What the stored word holds.
    word: StoredWord
    #: The transform before everything else, or `None`.
    rotation: Rotation | None = None
    #: How codes and zero-point are rounded; `None` for codebooks, which compare with thresholds,
    #: and for trellises, which are searched.
    rounding: Rounding | None = None
    #: The levels, for `Grid.CODEBOOK`.
    codebook: Codebook | None = None
    #: How the word is chosen, for `Grid.CODEBOOK` and `Grid.TRELLIS`.
    scale_fit: ScaleFit | None = None
    #: Gains, each a float32, that a row tries before its codes are chosen: those of `z * gain`,
    #: with `z` the normalized row. The best fit by least squares wins, the first among equals,
    #: whatever the scale fit; it is judged before the word is rounded. Empty: no search.
    gains: tuple[float, ...] = ()
    #: The states and their levels, for `Grid.TRELLIS`.
    trellis: Trellis | None = None
    #: All of the above as JSON, which `kvq.records.from_json` reads: for what can carry a mode as
    #: text only, such as an operator of a compiled graph, in this process or another.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text("name", self.name)
        for argument, kind in _KINDS.items():
            check_kind(argument, getattr(self, argument), kind)
        for argument, kind in _OPTIONAL_KINDS.items():
            check_optional(argument, getattr(self, argument), kind)
        check_tuple("gains", self.gains, float)
        if check_int("bits", self.bits) not in PACKINGS:
            raise ValueError(f"bits must be one of {PACKINGS}, got {self.bits!r}")
        words, grids = _WORDS[self.normalization]
        if self.word not in words:
            names = " or ".join(str(word) for word in words)
            raise ValueError(f"word must be {names} for {self.normalization}, got {self.word}")
        if self.grid not in grids:
            names = " or ".join(str(grid) for grid in grids)
            raise ValueError(f"grid must be {names} for {self.normalization}, got {self.grid}")
        levels = self.grid in LEVEL_GRIDS
        if self.grid in (Grid.SIGNED, Grid.E4M3) and self.bits != 8:
            raise ValueError(f"bits must be 8 for the grid {self.grid}, got {self.bits}")
        if self.grid is Grid.UNSIGNED and self.bits > ZERO_POINT_BITS:
            raise ValueError(f"bits must be at most 4 for the grid {self.grid}, got {self.bits}")
        for argument, wanted, where in (
            ("codebook", self.grid is Grid.CODEBOOK, "the grid codebook and for no other"),
            ("trellis", self.grid is Grid.TRELLIS, "the grid trellis and for no other"),
            ("scale_fit", levels, "the grids codebook and trellis and for no other"),
            ("rounding", not levels, "every grid but codebook and trellis"),
        ):
            part = getattr(self, argument)
            if wanted != (part is not None):
                raise ValueError(
                    f"{argument} must be given for {where}, got {part} with the grid {self.grid}"
                )
        if self.trellis is not None and self.trellis.bits != self.bits:
            raise ValueError(
                f"bits must be {self.trellis.bits} for the trellis {self.trellis}, got {self.bits}"
            )
        if self.codebook is not None and self.codebook.num_levels > 2**self.bits:
            raise ValueError(
                f"codebook must have at most {2**self.bits} levels for {self.bits} bits, "
                f"got {self.codebook.num_levels}"
            )
        if self.gains and self.scale_fit in (None, ScaleFit.UNIT):
            raise ValueError(
                "gains must be empty unless the word is fitted to the codes, "
                f"got {self.gains} with the scale fit {self.scale_fit}"
            )
        for gain in self.gains:
            if not 0 < gain < math.inf or to_float32(gain) != gain:
                raise ValueError(f"gains must hold positive float32 numbers, got {gain!r}")
        object.__setattr__(self, "text", json.dumps(_parts(self), default=_parts))

    @property
    def levels(self) -> int:
        """How many codes there are: the codebook's levels, or `2 ** bits`."""
        return 2**self.bits if self.codebook is None else self.codebook.num_levels

    @property
    def max_code(self) -> int:
        """The largest code of an integer grid: 127 if signed, `2 ** bits - 1` if not."""
        return 127 if self.grid is Grid.SIGNED else 2**self.bits - 1

    @property
    def codes_per_byte(self) -> Fraction:
        """Codes in a byte: 8 / bits, which is 8/3 for three bits."""
        return Fraction(8, self.bits)

    @property
    def folds_gain(self) -> bool:
        """Whether the stored word already holds the `1/N` of the rotation, if there is one."""
        return self.rotation is None or self.normalization in _FOLDED

    def gain(self, head_dim: int) -> int:
        """`N` of the rotation at this head size; 1 without a rotation."""
        return 1 if self.rotation is None else self.rotation.gain(head_dim)

    def check_head_dim(self, head_dim: int, argument: str = "head_dim") -> None:
        """`head_dim` must fill whole bytes, and suit the rotation and the trellis.

        Raises:
            ValueError: It does not; the message names the rule.
        """
        multiple = 8 // math.gcd(8, self.bits)
        if check_int(argument, head_dim) <= 0 or head_dim % multiple:
            raise ValueError(
                f"{argument} must be a positive multiple of {multiple} to fill whole bytes with "
                f"{self.bits}-bit codes, got {head_dim}"
            )
        if self.rotation is not None:
            self.rotation.check(head_dim)
        if self.trellis is not None:
            self.trellis.check_head_dim(head_dim, argument)

    def bytes_per_row(self, head_dim: int) -> int:
        """Bytes of the packed codes of one row, without its stored word."""
        self.check_head_dim(head_dim)
        return head_dim * self.bits // 8

    def head_dim(self, bytes_per_row: int) -> int:
        """The head size whose packed codes fill `bytes_per_row` bytes.

        Raises:
            ValueError: No head size does.
        """
        if check_int("bytes_per_row", bytes_per_row) <= 0 or bytes_per_row * 8 % self.bits:
            raise ValueError(
                f"bytes_per_row must hold whole {self.bits}-bit codes, got {bytes_per_row}"
            )
        head_dim = bytes_per_row * 8 // self.bits
        self.check_head_dim(head_dim)
        return head_dim

    def bytes_per_token_head(self, head_dim: int) -> int:
        """Bytes of one row with its stored word."""
        return self.bytes_per_row(head_dim) + self.word.num_bytes

    def bits_per_value(self, head_dim: int) -> Fraction:
        """Stored bits per channel, the stored word counted."""
        return Fraction(8 * self.bytes_per_token_head(head_dim), head_dim)

    def with_codebook(self, codebook: Codebook, *, name: str | None = None) -> Mode:
        """This mode with another codebook, in the smallest packing that holds its levels.

        Args:
            codebook: Any `Codebook`, such as a freshly fitted one.
            name: Name of the new mode; by default this mode's short name, `+` and the codebook's.

        Raises:
            ValueError: This is not a codebook mode, or `name` is that of a shipped mode.
        """
        check_kind("codebook", codebook, Codebook)
        if self.grid is not Grid.CODEBOOK:
            raise ValueError(
                f"mode must be a codebook mode to take another codebook, got {self.name}"
            )
        bits = next(bits for bits in PACKINGS if codebook.num_levels <= 2**bits)
        new = f"{short_name(self.name)}+{codebook.name}" if name is None else name
        if new in MODES:
            raise ValueError(f"name must not be that of a shipped mode, got {new!r}")
        return replace(self, name=new, bits=bits, codebook=codebook)

    def with_rounding(self, rounding: Rounding) -> Mode:
        """This mode under another rounding, named for it (itself, if it is the same).

        Raises:
            ValueError: Its codes stand for levels: it compares or searches and does not round.
        """
        check_kind("rounding", rounding, Rounding)
        if self.rounding is None:
            raise ValueError(
                f"mode must round to take another rounding, got {self.name}, which has a "
                f"{self.grid}"
            )
        if rounding is self.rounding:
            return self
        return replace(self, name=f"{short_name(self.name)}@{rounding}", rounding=rounding)

    def without_rotation(self) -> Mode:
        """This mode with no rotation, named for it (itself, if it has none)."""
        if self.rotation is None:
            return self
        return replace(self, name=f"{short_name(self.name)}@unrotated", rotation=None)

    def __str__(self) -> str:
        return self.name


def short_name(name: str) -> str:
    """A mode's name without `_per_token_head`."""
    return check_kind("name", name, str).removesuffix(SUFFIX)


def _absmax(stem: str, grid: Grid, rounding: Rounding) -> Mode:
    return Mode(stem + SUFFIX, 8, grid, Normalization.ABSMAX, StoredWord.FLOAT32, None, rounding)


def _affine(stem: str, normalization: Normalization, word: StoredWord) -> Mode:
    return Mode(
        stem + SUFFIX,
        4,
        Grid.UNSIGNED,
        normalization,
        word,
        RANDOM_HADAMARD,
        Rounding.HALF_AWAY,
    )


def _codebook(
    stem: str,
    normalization: Normalization,
    codebook: str,
    fit: ScaleFit,
    *,
    word: StoredWord = StoredWord.FLOAT32,
    searched: bool = False,
) -> Mode:
    book = CODEBOOKS[codebook]
    return Mode(
        stem + SUFFIX,
        (book.num_levels - 1).bit_length(),
        Grid.CODEBOOK,
        normalization,
        word,
        RANDOM_HADAMARD,
        codebook=book,
        scale_fit=fit,
        gains=GAINS[normalization] if searched else (),
    )


def _trellis(
    stem: str, trellis: str, fit: ScaleFit, word: StoredWord = StoredWord.FLOAT32
) -> Mode:
    code = TRELLISES[trellis]
    return Mode(
        stem + SUFFIX,
        code.bits,
        Grid.TRELLIS,
        Normalization.RMS,
        word,
        RANDOM_HADAMARD,
        scale_fit=fit,
        trellis=code,
    )


def _lloyd(ending: str, bits: int, fit: ScaleFit, **parts: Any) -> Mode:
    return _codebook(
        f"lloyd{bits}{ending}", Normalization.RMS, f"gaussian_{2**bits}", fit, **parts
    )


def _smax(ending: str, bits: int, fit: ScaleFit, **parts: Any) -> Mode:
    return _codebook(
        f"smax{bits}{ending}", Normalization.SIGNED_MAX, f"signed_max_{2**bits}", fit, **parts
    )


#: Of codebook modes, by the end of their names.
_FITS: Final = {
    ScaleFit.LEAST_SQUARES: "",
    ScaleFit.UNIT: "_unit",
    ScaleFit.NORM_MATCH: "_norm_match",
    ScaleFit.UNBIASED: "_unbiased",
}

_ROWS = (
    _absmax("int8", Grid.SIGNED, Rounding.HALF_AWAY),
    _absmax("fp8", Grid.E4M3, Rounding.HALF_EVEN),
    _affine("int4", Normalization.ZERO_RANGE, StoredWord.FLOAT32_ZERO_POINT),
    _codebook("int2", Normalization.RMS, "gaussian_4", ScaleFit.UNIT),
    *(_lloyd(ending, bits, fit) for bits in (1, 2, 3, 4) for fit, ending in _FITS.items()),
    *(_smax("", bits, ScaleFit.LEAST_SQUARES) for bits in (2, 3, 4)),
    _affine("affine4", Normalization.MIN_RANGE, StoredWord.FLOAT16_PAIR),
    *(
        make("_search", bits, ScaleFit.LEAST_SQUARES, searched=True)
        for make in (_lloyd, _smax)
        for bits in (2, 3, 4)
    ),
    # Words of two bytes, for what a recipe would take: keys and values of 4 bits and keys of 2 and
    # 3 want least squares or their length kept, values of 2 and 3 bits no shrinkage.
    *(
        _lloyd(_FITS[fit] + "_w16", bits, fit, word=StoredWord.FLOAT16)
        for bits, fit in (
            (2, ScaleFit.NORM_MATCH),
            (2, ScaleFit.UNBIASED),
            (3, ScaleFit.NORM_MATCH),
            (3, ScaleFit.UNBIASED),
            (4, ScaleFit.LEAST_SQUARES),
        )
    ),
    *(
        _smax(f"_search{_FITS[fit]}_w16", bits, fit, word=StoredWord.FLOAT16, searched=True)
        for bits, fits in (
            (2, (ScaleFit.LEAST_SQUARES, ScaleFit.NORM_MATCH, ScaleFit.UNBIASED)),
            (3, (ScaleFit.LEAST_SQUARES, ScaleFit.NORM_MATCH, ScaleFit.UNBIASED)),
            (4, (ScaleFit.LEAST_SQUARES,)),
        )
        for fit in fits
    ),
    *(
        _trellis(f"trellis{bits}{_FITS[fit]}", trellis, fit)
        for bits, trellis in ((2, "linear_2_10"), (3, "linear_3_12"))
        for fit in (ScaleFit.LEAST_SQUARES, ScaleFit.NORM_MATCH, ScaleFit.UNBIASED)
    ),
    *(
        _trellis(f"trellis{bits}{_FITS[fit]}_w16", trellis, fit, StoredWord.FLOAT16)
        for bits, trellis in ((2, "linear_2_10"), (3, "linear_3_12"))
        for fit in (ScaleFit.NORM_MATCH, ScaleFit.UNBIASED)
    ),
)

#: Every shipped mode by its full name, in the order of the tables. Read-only.
MODES: Final[Mapping[str, Mode]] = MappingProxyType({row.name: row for row in _ROWS})

#: `int4` as its first implementation encodes it on the float32 butterfly path: for parity with
#: caches that exist. Its range need not hold zero, so its zero-point can saturate.
INT4_FIRST_IMPLEMENTATION: Final = replace(
    MODES["int4_per_token_head"],
    name="int4@first_implementation",
    normalization=Normalization.CLAMPED_RANGE,
    rotation=Rotation(repeat_block_signs=True, round_to_input=True),
)


def mode(name: str | Mode) -> Mode:
    """The mode of that name; `_per_token_head` may be left off. A `Mode` is handed back.

    >>> mode("int4").name
    'int4_per_token_head'

    Raises:
        ValueError: There is no such mode; the message lists them.
        TypeError: `name` is neither a string nor a `Mode`.
    """
    if isinstance(name, Mode):
        return name
    if not isinstance(name, str):
        raise TypeError(f"mode must be a name or a Mode, got {type(name).__name__}")
    full = name if name in MODES else name + SUFFIX
    if full not in MODES:
        valid = ", ".join(short_name(known) for known in MODES)
        hint = "; names are in lower case" if {name.lower(), full.lower()} & MODES.keys() else ""
        raise ValueError(f"mode must be one of {valid}, got {name!r}{hint}")
    return MODES[full]
