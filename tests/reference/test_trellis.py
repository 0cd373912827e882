"""Trellis codes: the rules of a code, the search against every sequence, and the error reached."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from kvq import reference
from kvq.codebooks import CODEBOOKS
from kvq.modes import MODES, Grid, Mode
from kvq.modes import mode as find_mode
from kvq.records import from_json
from kvq.reference.trellis import level_table, trellis_codes, trellis_states
from kvq.rounding import Rounding
from kvq.trellis import TRELLISES, Trellis, state_levels

LINEAR = TRELLISES["linear_2_10"]
#: Small enough to try every sequence of codes.
SMALL = {
    2: Trellis("small_2", 2, 4, (0b1001, 0b0110, 0b0011), (-9, -5, -3, -1, 1, 3, 5, 9), 0.25),
    3: Trellis("small_3", 3, 6, (0b101001, 0b010110, 0b100011), (7, -2, -5, 1, 3, -7, 5, 2), 0.25),
}


def test_a_state_and_its_level_by_hand() -> None:
    codes = torch.tensor([[1, 0, 2, 3, 0, 0, 1]], dtype=torch.uint8)
    states = trellis_states(codes, LINEAR)
    assert states[0, 0] == 1 + 0 * 4 + 2 * 16 + 3 * 64 + 0 * 256
    assert states[0, 5] == 0 + 1 * 4 + 1 * 16 + 0 * 64 + 2 * 256
    # State 0b0011100001: bit 3 of it is 0, bit 4 is 0; bits 0, 3, 8: odd; bits 1, 4, 9: even.
    assert level_table(LINEAR, codes.device)[states[0, 0]] == LINEAR.steps[0b0100] * 17 / 1024


@pytest.mark.parametrize("trellis", TRELLISES.values(), ids=str)
def test_levels_are_used_alike_and_symmetric(trellis: Trellis) -> None:
    levels = state_levels(trellis)
    counts = {levels.count(level) for level in set(levels)}
    assert counts == {trellis.num_states // len(trellis.steps)}
    assert sorted(levels) == sorted(-level for level in levels)
    assert torch.tensor(levels).tolist() == list(levels)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_search_against_every_sequence(bits: int) -> None:
    """The smallest error of all sequences with the same overlap at channel 0, and rarely more."""
    trellis, head_dim = SMALL[bits], {2: 6, 3: 4}[bits]
    z = torch.randn(60, head_dim, generator=torch.Generator().manual_seed(bits))
    levels = level_table(trellis, z.device)
    every = torch.tensor(list(itertools.product(range(1 << bits), repeat=head_dim)))
    states = trellis_states(every.to(torch.uint8), trellis)
    errors = (z[:, None] - levels[states]).double().square().sum(-1)
    codes = trellis_codes(z, trellis)
    mine = trellis_states(codes, trellis)
    error = (z - levels[mine]).double().square().sum(-1)
    same = states[None, :, 0] % trellis.num_overlaps == mine[:, None, 0] % trellis.num_overlaps
    torch.testing.assert_close(error, errors.where(same, torch.inf).amin(1), rtol=1e-6, atol=0)
    assert (error <= errors.amin(1) * (1 + 1e-6)).float().mean() > 0.7


@pytest.mark.parametrize("trellis", TRELLISES.values(), ids=str)
def test_a_power_of_two_changes_no_code(trellis: Trellis) -> None:
    """Of numbers and unit alike: costs start from 0, and each operation is rounded alike."""
    z = torch.randn(12, 40, generator=torch.Generator().manual_seed(2))
    small = replace(trellis, name="small", unit=trellis.unit * 2.0**-30)
    assert torch.equal(trellis_codes(z * 2.0**-30, small), trellis_codes(z, trellis))


@pytest.mark.parametrize(
    ("name", "rows", "target"), [("trellis2", 1000, 0.075), ("trellis3", 500, 0.0195)]
)
def test_relative_squared_error(name: str, rows: int, target: float) -> None:
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(5))
    mode = find_mode(name)
    read = reference.dequantize(*reference.quantize(x, mode), mode, 128)
    error = (read - x).double().square().sum(-1) / x.double().square().sum(-1)
    assert error.mean() + 4 * error.std() / rows**0.5 < target


@pytest.mark.parametrize("mode", [m for m in MODES.values() if m.grid is Grid.TRELLIS], ids=str)
def test_a_mode_travels_as_text(mode: Mode) -> None:
    assert from_json(Mode, json.loads(mode.text), "mode") == mode


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name must not be empty"),
        ({"bits": 4}, "bits must be 2 or 3, got 4"),
        ({"window_bits": 9}, "window_bits must be a multiple of 2 above it and at most 12, got 9"),
        ({"window_bits": 14}, "window_bits must be a multiple of 2"),
        ({"window_bits": 2}, "window_bits must be a multiple of 2 above it and at most 12, got 2"),
        ({"masks": (8, 16, 265, 1024)}, "masks must hold numbers of 1 to 10 bits, got 1024"),
        ({"masks": (0, 16, 265, 530)}, "masks must hold numbers of 1 to 10 bits, got 0"),
        ({"masks": (8, 16, 265, 273 ^ 8)}, "masks must be linearly independent"),
        ({"steps": (1, 2)}, "steps must hold a number for each of 16 labels, got 2"),
        ({"steps": (2048,) * 16}, r"steps must be below 2\^11, got 2048"),
        ({"steps": (-2048,) * 16}, r"steps must be below 2\^11, got -2048"),
        ({"unit": 0.1}, "unit must be a positive number of at most 13 significant bits, got 0.1"),
        ({"unit": 1 + 2.0**-13}, "unit must be a positive number of at most 13 significant bits"),
        ({"unit": -1.0}, "unit must be a positive number"),
        ({"unit": 0.0}, "unit must be a positive number"),
        ({"unit": 2.0**-102}, "unit must be a positive number"),
        ({"unit": 2.0**100}, "unit must be a positive number"),
    ],
)
def test_rules_of_a_trellis(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(LINEAR, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"window_bits": 4, "masks": (1,), "steps": (0, 1)},
        {"window_bits": 12},
        {"masks": (1, 1023, 265, 530)},
        {"steps": (-2047, 2047) * 8},
        {"unit": 1 + 2.0**-12},
        {"unit": 2.0**-101},
        {"unit": 2.0**99},
    ],
    ids=str,
)
def test_as_far_as_the_rules_go(change: dict[str, object]) -> None:
    """Levels stay float32 numbers there."""
    for level in state_levels(replace(LINEAR, **change)):
        assert level == torch.tensor(level, dtype=torch.float32).item()


def test_rules_of_a_trellis_mode() -> None:
    mode = find_mode("trellis2")
    with pytest.raises(ValueError, match=r"^trellis must be given for the grid trellis"):
        replace(mode, trellis=None)
    with pytest.raises(ValueError, match=r"^bits must be 2 for the trellis linear_2_10, got 3"):
        replace(mode, bits=3)
    with pytest.raises(ValueError, match=r"^mode must be a codebook mode to take another"):
        mode.with_codebook(CODEBOOKS["gaussian_4"])
    with pytest.raises(ValueError, match=r"^mode must round .* which has a trellis$"):
        mode.with_rounding(Rounding.HALF_EVEN)
    with pytest.raises(ValueError, match=r"^x must be at least 5 for a trellis with a window"):
        mode.without_rotation().check_head_dim(4, "x")
    mode.without_rotation().check_head_dim(8)
    TRELLISES["linear_2_10"].check_head_dim(5)
    with pytest.raises(ValueError, match=r"^head_dim must be divisible by 16"):
        mode.check_head_dim(40)
