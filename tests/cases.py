"""The one table of cases: modes, dtypes, head sizes, shapes and samples, every pair of them.

The full product has some 100,000 cases. `CASES` has one for each mode and sample; its head size,
shape and dtype move on so that every pair of values of any two of the five meets
(`tests/test_cases.py` counts). A mode or sample appended to its table renames no case.
`covering_launches` are fewer, larger inputs for the kernels, whose launches are what costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

import pytest
import torch
from torch import Tensor

from kvq.analysis.planted_rows import KINDS, planted_rows, rows_of_kind
from kvq.codebooks import Codebook, Provenance, Recipe
from kvq.modes import (
    HADAMARD,
    INT4_FIRST_IMPLEMENTATION,
    MODES,
    RANDOM_HADAMARD,
    Grid,
    Mode,
    Normalization,
    Rotation,
    ScaleFit,
)
from kvq.rounding import Rounding
from kvq.tier import Layout

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS: Final = (32, 64, 80, 96, 112, 128, 192, 256, 512)


class Shape(NamedTuple):
    """How many rows, and how they lie in memory."""

    tokens: int
    heads: int
    #: From contiguous `[T, H, D]` to a view of other memory with the same values.
    lay_out: Callable[[Tensor], Tensor]


def _filled_with_nan(*shape: int, like: Tensor) -> Tensor:
    """What a wrong stride reads."""
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


def _gaps(rows: Tensor) -> Tensor:
    """Rows of a wider buffer."""
    tokens, heads, head_dim = rows.shape
    wider = _filled_with_nan(tokens, heads + 1, head_dim + 7, like=rows)
    return wider[:, :heads, 3 : head_dim + 3].copy_(rows)


def _qkv_slice(rows: Tensor) -> Tensor:
    """The keys of a fused projection: `[T, 3, H, D][:, 1]`."""
    tokens, heads, head_dim = rows.shape
    return _filled_with_nan(tokens, 3, heads, head_dim, like=rows)[:, 1].copy_(rows)


def _transposed(rows: Tensor) -> Tensor:
    """Heads outside, tokens inside."""
    return rows.transpose(0, 1).contiguous().transpose(0, 1)


def _offset(rows: Tensor) -> Tensor:
    """A storage offset of one number: rows are contiguous, and not aligned."""
    return _filled_with_nan(rows.numel() + 2, like=rows)[1:-1].view(rows.shape).copy_(rows)


def _stride_2(rows: Tensor) -> Tensor:
    """Every second number of the memory."""
    tokens, heads, head_dim = rows.shape
    return _filled_with_nan(tokens, heads, 2 * head_dim, like=rows)[..., ::2].copy_(rows)


def _expanded(rows: Tensor) -> Tensor:
    """One head for all, with a stride of zero."""
    return rows[:, :1].clone().expand_as(rows)


SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "1_token": Shape(1, 1, lambda rows: rows),
        "63_tokens": Shape(63, 1, lambda rows: rows),
        "500_tokens": Shape(500, 1, lambda rows: rows),
        "gaps": Shape(7, 3, _gaps),
        "qkv_slice": Shape(33, 4, _qkv_slice),
        "transposed": Shape(17, 5, _transposed),
        "offset": Shape(21, 2, _offset),
        "stride_2": Shape(11, 3, _stride_2),
        "expanded": Shape(9, 4, _expanded),
    }
)
#: Each is a kind of planted row; see `kvq.analysis.planted_rows`.
SAMPLES: Final = KINDS


@dataclass(frozen=True)
class Case:
    """One input for one mode."""

    mode: Mode
    dtype: torch.dtype
    head_dim: int
    shape: str
    sample: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.mode}-{dtype}-{self.head_dim}-{self.shape}-{self.sample}"

    def x(self, device: torch.device | str = "cpu") -> Tensor:
        """`[T, H, D]` in the layout of the shape."""
        tokens, heads, lay_out = SHAPES[self.shape]
        rows = rows_of_kind(self.sample, tokens * heads, self.head_dim, device=device)
        rows = rows.to(self.dtype)
        return lay_out(rows.view(tokens, heads, self.head_dim))


def covering_cases(modes: Mapping[str, Mode]) -> list[Case]:
    """One case for each mode and sample, such that all pairs of values occur.

    `i + j` and `i + 2 j` run over all residues of 9 together, and each of them with `i` and with
    `j`; `i + j // 3` is a function of neither.
    """
    shapes = tuple(SHAPES)
    return [
        Case(
            mode,
            DTYPES[(i + j // 3) % len(DTYPES)],
            HEAD_DIMS[(i + j) % len(HEAD_DIMS)],
            shapes[(i + 2 * j) % len(shapes)],
            sample,
        )
        for i, mode in enumerate(modes.values())
        for j, sample in enumerate(SAMPLES)
    ]


@dataclass(frozen=True)
class Launch:
    """One input that holds rows of every sample, and a cache to write it to."""

    mode: Mode
    dtype: torch.dtype
    head_dim: int
    shape: str
    layout: Layout

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.mode}-{dtype}-{self.head_dim}-{self.shape}-{self.layout}"

    def x(self, device: torch.device | str = "cpu") -> Tensor:
        """`[T, H, D]` in the layout of the shape; the tokens of head 0 are of every sample.

        One token has a head for each sample instead.
        """
        tokens, heads, lay_out = SHAPES[self.shape]
        if tokens == 1:
            heads = len(SAMPLES)
        else:
            tokens = max(tokens, len(SAMPLES))
        rows = planted_rows(0, heads * tokens, self.head_dim, device=device).to(self.dtype)
        return lay_out(rows.view(heads, tokens, self.head_dim).transpose(0, 1).contiguous())


def covering_launches(modes: Mapping[str, Mode]) -> list[Launch]:
    """One launch for each mode and head size, such that all pairs of values occur.

    `i + j` runs over all residues of 9 with `i` and with `j`; so does `i + j // 3` over those of
    3, and with `i + j` too. 9 is odd, so `(i + j) % 2` meets everything.

    Modes that search, seconds of the interpreter for a launch, take a third of the head sizes,
    each another third, so that a family of three meets all.
    """
    shapes = tuple(SHAPES)
    return [
        Launch(
            mode,
            DTYPES[(i + j // 3) % len(DTYPES)],
            head_dim,
            shapes[(i + j) % len(shapes)],
            tuple(Layout)[(i + j) % 2],
        )
        for i, mode in enumerate(modes.values())
        for j, head_dim in enumerate(HEAD_DIMS)
        if j % 3 == i % 3 or not (mode.gains or mode.trellis)
    ]


CASES: Final = [pytest.param(case, id=str(case)) for case in covering_cases(MODES)]


def _even_levels(name: str, num_levels: int, step: float = 1 / 16) -> Codebook:
    """Evenly spaced levels about zero, exact in float32."""
    levels = tuple((2 * i + 1 - num_levels) * step / 2 for i in range(num_levels))
    recipe = Recipe("uniform", num_levels, symmetric=True)
    return Codebook.from_exact(name, levels, recipe, Provenance("evenly spaced, for tests"))


def _variants() -> dict[str, Mode]:
    int8, fp8, int4, affine4, int2, lloyd2, lloyd3, lloyd4, smax4 = (
        MODES[f"{stem}_per_token_head"]
        for stem in (
            *("int8", "fp8", "int4", "affine4"),
            *("int2", "lloyd2", "lloyd3", "lloyd4", "smax4"),
        )
    )
    rows = [INT4_FIRST_IMPLEMENTATION]
    for mode in (int8, fp8, int4, affine4):
        rows += [mode.with_rounding(Rounding.TOWARD_ZERO)]
        rows += [mode.with_rounding(r) for r in (Rounding.HALF_EVEN, Rounding.HALF_AWAY)]
    rows += [mode.without_rotation() for mode in (int4, affine4, int2, lloyd3, smax4)]
    for name, rotation in (
        ("hadamard", HADAMARD),
        ("two_rounds", Rotation(rounds=2)),
        ("two_plain_rounds", Rotation(rounds=2, random_signs=False)),
        ("other_seed", Rotation(seed=2**64 - 1, rounds=2)),
        ("repeated_signs", Rotation(repeat_block_signs=True, rounds=2)),
    ):
        rows += [
            replace(mode, name=f"{mode}@{name}", rotation=rotation)
            for mode in (int4, affine4, int2, lloyd4, smax4)
        ]
    rows += [
        replace(mode, name=f"{mode}@rotated", rotation=RANDOM_HADAMARD) for mode in (int8, fp8)
    ]
    rows += [
        replace(mode, name=f"{mode}@rounded", rotation=Rotation(round_to_input=True))
        for mode in (int4, lloyd2)
    ]
    books = [_even_levels(f"even_{n}", n) for n in (2, 3, 5, 6, 7, 11, 15, 17, 255, 256)]
    # Many a row has no number beyond 2: all its codes stand for zero.
    books += [_even_levels("wide_3", 3, 4.0)]
    for book in books:
        rows += [lloyd4.with_codebook(book)]
        if book.num_levels in (3, 11, 256):
            rows += [smax4.with_codebook(book)]
            rows += [
                replace(row, name=f"{row}_{fit}", scale_fit=fit)
                for row in rows[-2:]
                for fit in ScaleFit
                if fit is not ScaleFit.LEAST_SQUARES
            ]
    rows += [
        replace(mode, name=f"{mode}@{bits}_bits", bits=bits)
        for mode in (int4, affine4)
        for bits in (1, 2, 3)
    ]
    return {row.name: row for row in rows if row.name not in MODES}


#: Modes that nobody ships and anybody can make: other roundings, rotations, codebooks and widths.
VARIANTS: Final[Mapping[str, Mode]] = MappingProxyType(_variants())


def rows_beside_thresholds(mode: Mode, head_dim: int = 32) -> Tensor:
    """Rows of a mode without a rotation whose second entry is normalized to almost a threshold.

    With a search, to a threshold over one of the gains. Seven float32 neighbors of each. The root
    of the head size is no power of two, so that a product and a quotient with it are not alike.
    """
    assert mode.codebook is not None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(420, head_dim, generator=generator, dtype=torch.float64)
    gains = mode.gains or (1.0,)
    targets = torch.tensor([t / gain for gain in gains for t in mode.codebook.thresholds])
    target = targets.double().repeat(420)[:420]
    rows[:, 1] = 0.0
    if mode.normalization is Normalization.SIGNED_MAX:
        # Not all are in reach of the largest entry.
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))[:, 0].float().double()
        rows[:, 1] = target.clamp(-1, 1) * largest
    else:
        rest = rows.float().double().square().sum(1)
        rows[:, 1] = target * (rest / (head_dim - target.square())).sqrt()
    bits = rows.float().view(torch.int32).repeat_interleave(7, 0)
    bits[:, 1] += torch.arange(-3, 4, dtype=torch.int32).repeat(420)
    return bits.view(torch.float32)


def rows_beside_zero_point_ties() -> Tensor:
    """Rows `[2000, 16]` of 15 steps, whose zero lies almost halfway between two of them."""
    generator = torch.Generator().manual_seed(0)
    step = torch.rand(2000, 1, generator=generator) + 1.0
    low = -(torch.randint(15, (2000, 1), generator=generator) + 0.5) * step
    between = torch.rand(2000, 14, generator=generator) * 15 * step + low
    return torch.cat((low, low + 15 * step, between), dim=1)


def modes_where(keep: Callable[[Mode], bool]) -> list[Mode]:
    """Shipped modes with a property, for `parametrize(..., ids=str)`."""
    return [mode for mode in MODES.values() if keep(mode)]


#: The shipped modes that compare with thresholds.
CODEBOOK_MODES: Final = modes_where(lambda mode: mode.grid is Grid.CODEBOOK)
#: The shipped modes that rotate.
ROTATED_MODES: Final = modes_where(lambda mode: mode.rotation is not None)
