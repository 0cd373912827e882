"""Texts beside points, where they cover each other and the points least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

#: Where a text may be from its point, around it.
_STEPS: Final = (1.0, 0.5, 0.0, -0.5, -1.0)
_DIRECTIONS: Final = tuple((x, y) for x, y in product(_STEPS, _STEPS) if max(abs(x), abs(y)) == 1)
#: How far, in points.
_DISTANCES: Final = (4.0, 10.0, 18.0, 28.0, 40.0, 54.0)
#: Half the side of the square, in points, that a text leaves free around a point.
_MARKER: Final = 2.5

_Box = tuple[float, float, float, float]


class _Choice(NamedTuple):
    """Where a text may be: how far, from its point to its center in points, and in pixels."""

    distance: float
    offset: tuple[float, float]
    box: _Box


def place_labels(
    axes: Any,
    labels: Sequence[tuple[float, float, str]],
    points: Sequence[tuple[float, float]] = (),
    *,
    fontsize: float = 6.5,
) -> None:
    """Write a text beside each of some points, with a line to it where it is further away.

    Places are found one after the other, each the one that covers least of the points and of the
    texts so far. The axes must have their limits and scales, and their figure its size.

    Args:
        axes: Of matplotlib.
        labels: `x`, `y` and text of each.
        points: Others that no text should cover.
        fontsize: In points.
    """
    axes.figure.draw_without_rendering()
    unit = axes.figure.dpi / 72
    inside = axes.get_window_extent().extents
    places = axes.transData.transform([*points, *((x, y) for x, y, _ in labels)])
    taken: list[_Box] = [_box(x, y, 2 * _MARKER * unit, 2 * _MARKER * unit) for x, y in places]
    for x, y, text in labels:
        measured = axes.text(x, y, text, fontsize=fontsize)
        extent = measured.get_window_extent()
        measured.remove()
        at = axes.transData.transform((x, y))

        choices = _choices(at[0], at[1], extent.width, extent.height, unit)
        distance, offset, box = min(choices, key=lambda choice: _cost(choice, taken, inside))
        taken.append(box)
        line = {"arrowstyle": "-", "lw": 0.5, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            text, (x, y), offset, textcoords="offset points", ha="center", va="center",
            fontsize=fontsize, arrowprops=line if distance > _DISTANCES[0] else None,
        )  # fmt: skip


def _choices(x: float, y: float, width: float, height: float, unit: float) -> Iterator[_Choice]:
    """The places of a text about a point, in pixels, of which `unit` are a typographic point."""
    for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
        across, above = right * (distance * unit + width / 2), up * (distance * unit + height / 2)
        offset = (across / unit, above / unit)
        yield _Choice(distance, offset, _box(x + across, y + above, width, height))


def _cost(choice: _Choice, taken: Sequence[_Box], inside: _Box) -> float:
    """What a place covers, and ten times what of it lies outside."""
    outside = _overlap(choice.box, choice.box) - _overlap(choice.box, inside)
    return choice.distance + sum(_overlap(choice.box, other) for other in taken) + 10 * outside


def _box(x: float, y: float, width: float, height: float) -> _Box:
    """About a center."""
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(one: _Box, other: _Box) -> float:
    """Common area of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)
