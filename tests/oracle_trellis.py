"""The trellis codes once more, in numpy, for `tests/oracle.py`: from the text of `Trellis` alone.

The transitions are written out as tables of states. The two codes are written down again: a change
of the table in the package is a change of the storage format.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Code(NamedTuple):
    """A trellis: bits of a code and of a state, parities, and the level of each label."""

    bits: int
    window_bits: int
    masks: tuple[int, ...]
    levels: tuple[float, ...]


def _symmetric(positive: tuple[int, ...], unit: float) -> tuple[float, ...]:
    return tuple(unit * step for step in (*(-p for p in reversed(positive)), *positive))


#: By bits of a code.
CODES = {
    2: Code(
        2,
        10,
        (0b0000001000, 0b0000010000, 0b0100001001, 0b1000010010),
        _symmetric((3, 15, 27, 37, 49, 67, 85, 127), 17 / 1024),
    ),
    3: Code(
        3,
        12,
        (0b000000101111, 0b011101011100, 0b110010101110, 0b100010010001, 0b011011010101),
        _symmetric(
            (31, 71, 103, 135, 209, 242, 288, 334, 408, 441, 531, 587, 689, 808, 1005, 1335),
            1 / 512,
        ),
    ),
}


@lru_cache
def state_levels(code: Code) -> np.ndarray:
    """Float32 level of each state: the label's bits are parities, counted digit by digit."""
    levels = []
    for state in range(2**code.window_bits):
        label = 0
        for b, mask in enumerate(code.masks):
            label += 2**b * (format(state & mask, "b").count("1") % 2)
        levels.append(code.levels[label])
    return np.array(levels, dtype=np.float32)


def levels_of(code: Code, codes: np.ndarray) -> np.ndarray:
    """Level of each channel of rows of codes ``[R, D]``."""
    head_dim = codes.shape[1]
    digits = codes.astype(np.int64)
    states = np.zeros(codes.shape, dtype=np.int64)
    for j in range(code.window_bits // code.bits):
        after = (np.arange(head_dim) + j) % head_dim
        states += digits[:, after] * 2 ** (code.bits * j)
    return state_levels(code)[states]


def search(code: Code, z: np.ndarray) -> np.ndarray:
    """Codes ``[R, D]`` of normalized rows."""
    levels = state_levels(code)
    overlaps = 2 ** (code.window_bits - code.bits)
    # Every way into an overlap: the states, by the code they leave behind.
    ways = np.arange(overlaps)[:, np.newaxis] * 2**code.bits + np.arange(2**code.bits)
    levels, before = levels[ways], ways % overlaps
    head_dim = z.shape[1]
    half = head_dim // 2
    turned = z[:, (np.arange(head_dim) + half) % head_dim]
    free = np.zeros((len(z), overlaps), dtype=np.float32)
    costs, choices = _pass(turned, free, levels, before)
    _, overlap = _back(choices[half:], costs.argmin(axis=1), before)
    closed = np.full(free.shape, np.inf, dtype=np.float32)
    closed[np.arange(len(z)), overlap] = 0.0
    _, choices = _pass(z, closed, levels, before)
    codes, _ = _back(choices, overlap, before)
    return codes


def _pass(
    w: np.ndarray, costs: np.ndarray, levels: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Costs after all numbers of rows ``[R, D]``, and choices ``[D, R, overlaps]``."""
    choices = np.zeros((w.shape[1], *costs.shape), dtype=np.uint8)
    for t, number in enumerate(w.T):
        candidates = []
        for code in range(before.shape[1]):
            d = number[:, np.newaxis] - levels[:, code]
            candidates.append(costs.take(before[:, code], axis=1) + d * d)
        costs, choice = candidates[0], choices[t]
        for code, candidate in enumerate(candidates[1:], 1):
            # The first of equal ones.
            lower = candidate < costs
            costs = np.where(lower, candidate, costs)
            np.copyto(choice, code, where=lower, casting="unsafe")
    return costs, choices


def _back(
    choices: np.ndarray, overlap: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[R, steps]`` of the ways that end in overlaps ``[R]``, and where they begin."""
    codes = []
    for choice in choices[::-1]:
        code = choice[np.arange(len(overlap)), overlap]
        overlap = before[overlap, code]
        codes.append(code)
    return np.stack(codes[::-1], axis=1), overlap
