"""What the property tests draw: modes, rows, and the memory that tensors lie in.

A row is drawn as a kind and a seed, and single numbers are set on top: that is quick, and it
shrinks to a plain row in which one number matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Final, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import reject, settings
from hypothesis import strategies as st
from torch import Tensor

from kvq import reference
from kvq.analysis.planted_rows import planted_rows
from kvq.codebooks import Codebook, Provenance, Recipe, to_float32
from kvq.modes import MODES, Grid, Mode, Normalization, Rotation, ScaleFit
from kvq.rounding import Rounding
from kvq.scale_word import StoredWord
from tests.cases import CODEBOOK_MODES, DTYPES, VARIANTS

#: Where tensors are drawn: the kernels run interpreted without a GPU, compiled with one.
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
#: For `parametrize`: both tiers, by name.
TIERS: Final = ("reference", "kernels")
#: Numbers that are hard on some mode, or on any.
SPECIAL: Final = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 127.0, 448.0, 65504.0, 65520.0, 1e-6, 5e-7),
    *(2.0**-149, -(2.0**-149), 2.0**-127, 2.0**-126, 2.0**-24, 2.0**63, 2.0**120),
    *(3.4028234663852886e38, -3.4028234663852886e38, math.inf, -math.inf, math.nan),
)
#: What fills memory that nobody may read, or write.
POISON: Final = {torch.uint8: 0xAB, torch.int32: 2**31 - 1, torch.int64: -(2**40)}
#: How large the levels of a codebook may be.
SIZES: Final = (1.0, 4.0, 2.0**-130, 2.0**100, math.inf)
ROW_KINDS: Final = ("gaussian", "planted", "ties", "sparse", "constant", "any finite", "any bits")
INDEX_DTYPES: Final = (torch.int32, torch.int64)

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(DTYPES)


def examples(count: int) -> settings:
    """`count` examples of a test, and as many times more as the profile asks for."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 50))


def tier_of(name: str) -> ModuleType:
    """A tier by its name; the test is skipped where there is no Triton."""
    return reference if name == "reference" else pytest.importorskip("kvq.kernels")


# ----------------------------------------------------------------------------------------- modes


def _by_name(table: Mapping[str, Mode]) -> st.SearchStrategy[Mode]:
    """One of the table's modes; what is printed of the strategy stays short."""
    return st.sampled_from(list(table)).map(lambda name: table[name])


@st.composite
def codebooks(draw: st.DrawFn, sizes: tuple[float, ...] = SIZES) -> Codebook:
    """Any codebook: few levels or many, near or far, with thresholds where they may be."""
    count = draw(st.one_of(st.integers(2, 9), st.sampled_from((16, 17, 200, 256))))
    if count <= 9:
        size = draw(st.sampled_from(sizes))
        bounds = {} if size == math.inf else {"min_value": -size, "max_value": size}
        numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, **bounds)
        levels = sorted(draw(st.lists(numbers, min_size=count, max_size=count, unique=True)))
    else:
        generator = np.random.default_rng(draw(seeds))
        levels = np.unique(generator.standard_normal(count).astype(np.float32)).tolist()
    recipe = Recipe("uniform", len(levels), symmetric=False)
    source = Provenance("drawn")
    try:
        book = Codebook.from_exact("drawn", tuple(levels), recipe, source)
        if count <= 9 and draw(st.booleans()):
            sides = [draw(st.sampled_from((0.0, 0.5, 0.75, 1.0))) for _ in levels[1:]]
            thresholds = tuple(
                to_float32(low * (1 - side) + high * side)
                for low, high, side in zip(book.levels, book.levels[1:], sides, strict=False)
            )
            book = replace(book, thresholds=thresholds)
    except ValueError:
        reject()
    return book


rotations = st.builds(
    Rotation,
    rounds=st.sampled_from((1, 2)),
    random_signs=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    repeat_block_signs=st.booleans(),
    round_to_input=st.booleans(),
)
_NORMALIZATIONS = {mode.normalization for mode in MODES.values()}
_ROUNDINGS = (Rounding.HALF_AWAY, Rounding.HALF_EVEN, Rounding.TOWARD_ZERO)
_GAINS = st.lists(
    st.one_of(st.floats(0.25, 4.0, width=32), st.sampled_from((2.0**-140, 2.0**-30, 2.0**100))),
    max_size=4,
).map(tuple)


@st.composite
def _made_up_modes(draw: st.DrawFn) -> Mode:
    """Parts put together as nobody ships them."""
    normalization = draw(st.sampled_from([n for n in Normalization if n in _NORMALIZATIONS]))
    mode = draw(_by_name({m.name: m for m in MODES.values() if m.normalization is normalization}))
    if mode.grid is Grid.CODEBOOK:
        mode = mode.with_codebook(draw(codebooks()), name="drawn")
    changes: dict = {"name": "drawn", "rotation": draw(st.one_of(st.none(), rotations))}
    if mode.rounding is not None:
        changes["rounding"] = draw(st.sampled_from(_ROUNDINGS))
    if mode.grid is Grid.UNSIGNED:
        changes["bits"] = draw(st.sampled_from((1, 2, 3, 4)))
    if mode.scale_fit is not None:
        fit = changes["scale_fit"] = draw(st.sampled_from(ScaleFit))
        changes["gains"] = ()
        if fit is not ScaleFit.UNIT and mode.grid is Grid.CODEBOOK:
            changes["gains"] = draw(_GAINS)
        # The unit of a signed maximum in 16 bits is the one word that the oracle does not know.
        if fit is ScaleFit.UNIT and mode.normalization is Normalization.SIGNED_MAX:
            changes["word"] = StoredWord.FLOAT32
        else:
            changes["word"] = draw(st.sampled_from((StoredWord.FLOAT32, StoredWord.FLOAT16)))
    return replace(mode, **changes)


modes = st.one_of(
    _by_name(MODES),
    _by_name(VARIANTS),
    st.builds(
        lambda mode, book: mode.with_codebook(book, name="drawn"),
        _by_name({mode.name: mode for mode in CODEBOOK_MODES}),
        codebooks(),
    ),
    _made_up_modes(),
    _made_up_modes(),
)


#: Modes whose levels are of ordinary size: attention has a budget for what models have.
ordinary_modes = st.one_of(
    _by_name(MODES),
    _by_name(VARIANTS),
    st.builds(
        lambda mode, book: mode.with_codebook(book, name="drawn"),
        _by_name({mode.name: mode for mode in CODEBOOK_MODES}),
        codebooks((4.0,)),
    ),
)


@st.composite
def head_dims(draw: st.DrawFn, mode: Mode, most: int = 96) -> int:
    """A head size that suits a mode."""
    multiple = 16 if mode.rotation is not None else 8 // math.gcd(8, mode.bits)
    least = 1 if mode.trellis is None else -(-mode.trellis.window // multiple)
    return multiple * draw(st.integers(least, max(least, most // multiple)))


# ------------------------------------------------------------------------------------------ rows


def _row(kind: str, seed: int, head_dim: int) -> np.ndarray:
    """One float32 row."""
    generator = np.random.default_rng(seed)
    exponent = int(generator.integers(-140, 120))
    bits = generator.integers(0, 2**32, head_dim, dtype=np.uint32)
    with np.errstate(all="ignore"):
        if kind == "planted" and head_dim % 16 == 0:
            return planted_rows(seed % 4096, 1, head_dim, seed=seed)[0].numpy()
        if kind == "ties":
            return (generator.integers(-254, 255, head_dim) * 0.5 * 2.0**exponent).astype("f4")
        if kind == "sparse":
            keep = generator.random(head_dim) < 0.1
            return (generator.standard_normal(head_dim) * keep * 2.0**exponent).astype("f4")
        if kind == "constant":
            return np.full(head_dim, generator.standard_normal() * 2.0**exponent, dtype="f4")
        if kind == "any finite":
            return np.where(bits & 0x7F800000 == 0x7F800000, 0, bits).astype("u4").view("f4")
        if kind == "any bits":
            return bits.view("f4")
        return (generator.standard_normal(head_dim) * 2.0 ** (exponent // 16)).astype("f4")


@st.composite
def rows(
    draw: st.DrawFn, tokens: int, heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`[T, H, D]`: a kind for each row, and here and there a number that is special."""
    count = tokens * heads
    kinds = draw(st.lists(st.sampled_from(ROW_KINDS), min_size=count, max_size=count))
    seed = draw(seeds)
    made = [_row(kind, (seed + i) % 2**32, head_dim) for i, kind in enumerate(kinds)]
    x = np.stack(made) if made else np.zeros((0, head_dim), dtype="f4")
    for row in range(count):
        for channel, number in draw(
            st.lists(st.tuples(st.integers(0, head_dim - 1), st.sampled_from(SPECIAL)), max_size=2)
        ):
            x[row, channel] = number
    return torch.from_numpy(x).reshape(tokens, heads, head_dim).to(dtype)


# ---------------------------------------------------------------------------------------- memory


class View(NamedTuple):
    """A tensor, and the memory that it is a part of."""

    tensor: Tensor
    memory: Tensor


@st.composite
def views(draw: st.DrawFn, values: Tensor, *, dense_last: bool = False, align: int = 1) -> View:
    """`values` elsewhere: axes in any order, with steps and gaps, at an offset, amid poison.

    With `dense_last` the last axis has a stride of one, and all others a multiple of `align`.
    """
    axes = draw(st.permutations(range(values.ndim)))
    steps = [draw(st.sampled_from((1, 1, 1, 2, 3))) for _ in axes]
    gaps = [draw(st.sampled_from((0, 0, 1, 5))) for _ in axes]
    if dense_last:
        axes = [axis for axis in axes if axis != values.ndim - 1] + [values.ndim - 1]
        steps[-1] = 1
    offset = align * draw(st.sampled_from((0, 0, 1, 3, 16)))
    outer = [size * step + gap for size, step, gap in zip(values.shape, steps, gaps, strict=True)]
    if dense_last:
        outer[-1] += -outer[-1] % align
    poison = POISON.get(values.dtype, math.nan)
    memory = torch.full((offset + math.prod(outer),), poison, dtype=values.dtype, device=DEVICE)
    tensor = memory[offset:].view([outer[axis] for axis in axes])
    tensor = tensor.permute([axes.index(axis) for axis in range(values.ndim)])
    for axis, (size, step) in enumerate(zip(values.shape, steps, strict=True)):
        tensor = tensor.narrow(axis, 0, size * step)
        tensor = tensor[(slice(None),) * axis + (slice(None, None, step),)]
    return View(tensor.copy_(values), memory)


@st.composite
def inputs(draw: st.DrawFn, values: Tensor) -> Tensor:
    """A view of `values`, or of one slice of them repeated with a stride of zero."""
    if values.numel() and draw(st.integers(0, 7)) == 0:
        axis = draw(st.integers(0, values.ndim - 2))
        one = draw(views(values.narrow(axis, 0, 1))).tensor
        return one.expand_as(values)
    return draw(views(values)).tensor
