"""The trellis codes once more, in numpy, for `tests/oracle.py`: from the text of `Trellis` alone.

Rows are searched one by one, with the transitions written out as tables of states. The two codes
are written down again: a change of the table in the package is a change of the storage format.
"""

from __future__ import annotations

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
    return np.stack([_search_row(row, levels[ways], ways % overlaps) for row in z]).astype(
        np.uint8
    )


def _search_row(z: np.ndarray, levels: np.ndarray, before: np.ndarray) -> np.ndarray:
    head_dim = len(z)
    half = head_dim // 2
    turned = z[(np.arange(head_dim) + half) % head_dim]
    free = np.zeros(len(before), dtype=np.float32)
    costs, choices = _pass(turned, free, levels, before)
    _, overlap = _back(choices, int(np.argmin(costs)), before, head_dim - half)
    closed = np.full(len(before), np.inf, dtype=np.float32)
    closed[overlap] = 0.0
    _, choices = _pass(z, closed, levels, before)
    codes, _ = _back(choices, overlap, before, 0)
    return np.array(codes)


def _pass(
    w: np.ndarray, costs: np.ndarray, levels: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    choices = []
    for number in w:
        d = number - levels
        candidates = costs[before] + d * d
        # The first of equal ones.
        choices.append(candidates.argmin(axis=1))
        costs = candidates.min(axis=1)
    return costs, choices


def _back(
    choices: list[np.ndarray], overlap: int, before: np.ndarray, stop: int
) -> tuple[list[int], int]:
    codes = []
    for choice in reversed(choices[stop:]):
        codes.append(int(choice[overlap]))
        overlap = int(before[overlap, codes[-1]])
    return codes[::-1], overlap
