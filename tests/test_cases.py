"""The table of cases has what it says."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from kvq.analysis.planted_rows import planted_rows
from kvq.modes import MODES, Mode
from kvq.tier import Layout
from tests.cases import (
    CASES,
    DTYPES,
    HEAD_DIMS,
    SAMPLES,
    SHAPES,
    Case,
    Launch,
    covering_cases,
    covering_launches,
)

FIELDS = {
    "mode": tuple(MODES.values()),
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "shape": tuple(SHAPES),
    "sample": SAMPLES,
}


@pytest.mark.parametrize(("left", "right"), list(combinations(FIELDS, 2)))
def test_every_pair_of_values_occurs(left: str, right: str) -> None:
    met = {(getattr(case, left), getattr(case, right)) for case in covering_cases(MODES)}
    missing = set(product(FIELDS[left], FIELDS[right])) - met
    assert not missing


LAUNCH_FIELDS = {name: FIELDS[name] for name in ("mode", "dtype", "head_dim", "shape")}
LAUNCH_FIELDS["layout"] = tuple(Layout)


@pytest.mark.parametrize(("left", "right"), list(combinations(LAUNCH_FIELDS, 2)))
def test_every_pair_of_values_occurs_in_the_launches(left: str, right: str) -> None:
    """Of modes that search, which take a third of the launches each: as one kind."""

    def value(each: Launch, name: str) -> object:
        found = getattr(each, name)
        return kind(found) if name == "mode" else found

    met = {(value(each, left), value(each, right)) for each in covering_launches(MODES)}
    values = {**LAUNCH_FIELDS, "mode": {kind(mode) for mode in MODES.values()}}
    assert not set(product(values[left], values[right])) - met


def kind(mode: Mode) -> object:
    """What a launch of one mode stands for."""
    if mode.gains or mode.trellis:
        return mode.normalization, mode.trellis
    return mode


@pytest.mark.parametrize("shape", SHAPES)
def test_a_launch_carries_every_sample(shape: str) -> None:
    x = Launch(MODES["int8_per_token_head"], torch.float32, 32, shape, Layout.HND).x()
    carried = {tuple(row) for row in x.reshape(-1, 32).view(torch.int32).tolist()}
    samples = planted_rows(0, len(SAMPLES), 32).view(torch.int32)
    assert {tuple(row) for row in samples.tolist()} <= carried


def test_ids_are_unique() -> None:
    assert len({param.id for param in CASES}) == len(CASES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_shape_moves_rows_and_keeps_their_values(shape: str, dtype: torch.dtype) -> None:
    case = Case(MODES["int8_per_token_head"], dtype, 32, shape, "gaussian")
    x = case.x()
    tokens, heads, _ = SHAPES[shape]
    plain = Case(case.mode, dtype, 32, "500_tokens", "gaussian").x()
    expected = plain.reshape(-1, 32)[: tokens * heads].view(tokens, heads, 32)
    if shape == "expanded":
        expected = expected[:, :1].expand(tokens, heads, 32)
    assert torch.equal(x, expected)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ("gaps", (4 * 39, 39, 1)),
        ("qkv_slice", (3 * 4 * 32, 32, 1)),
        ("transposed", (32, 17 * 32, 1)),
        ("offset", (2 * 32, 32, 1)),
        ("stride_2", (3 * 64, 64, 2)),
        ("expanded", (32, 0, 1)),
    ],
)
def test_a_shape_has_its_strides(shape: str, strides: tuple[int, ...]) -> None:
    x = Case(MODES["int8_per_token_head"], torch.float32, 32, shape, "gaussian").x()
    assert x.stride() == strides
    assert (x.storage_offset() != 0) == (shape in ("gaps", "qkv_slice", "offset"))
