"""Lloyd-Max fitting: the levels of least squared error for a law or for samples.

A fit is a fixed point: every level is the centroid of its cell, every threshold the midpoint of
two levels. It starts from a dynamic program that is exact for up to 1,024 weighted points (the
samples themselves, if they are that few), and goes to a fixed point of the full problem: a law by
Newton's method on the tridiagonal stationarity equations, samples by Lloyd's iteration. Nothing is
random. Every fit comes with a `Certificate`, measured on its float64 levels.

Source: Lloyd 1982, Max 1960; the start's density of levels is Panter and Dite's, 1951.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy
from scipy.linalg import solve_banded

from kvq.codebooks import MAX_LEVELS, Codebook, Provenance, Recipe, check_name
from kvq.reference.laws import (
    Array,
    CellMoments,
    Law,
    as_law,
    cell_moments,
    cube_root_integral,
    law,
    masses,
    signed_max,
    sphere,
)
from kvq.value_checks import check_bool, check_int, check_kind, check_number, check_optional

__all__ = [
    "Certificate",
    "Law",
    "LloydMaxFit",
    "distortion_rate",
    "fit",
    "fit_masses",
    "fit_samples",
    "gaussian_distortion",
    "law",
    "panter_dite",
    "signed_max",
    "sphere",
]

Indices: TypeAlias = npt.NDArray[np.intp]

#: Points of the dynamic program.
_POINTS: Final = 1024
_NEWTON_STEPS: Final = 200
_LLOYD_STEPS: Final = 100_000
#: Points times steps, in the exact part of Lloyd's iteration.
_LLOYD_WORK: Final = 2_000_000_000
#: A fit with a smaller `Certificate.stationarity` has converged.
_CONVERGED: Final = 1e-10


@dataclass(frozen=True, slots=True)
class Certificate:
    """How good a fixed point is, measured on the float64 levels.

    `q` is the level of `x`. The four residuals are zero at a fixed point. For samples of a
    symmetric fit, and for weighted ones, expectations are over the mirrored or weighted samples.
    """

    #: Steps taken after the start.
    iterations: int
    #: The largest distance of a level from the centroid of its cell, over the standard deviation
    #: of x or the level's magnitude, whichever is larger.
    stationarity: float
    #: `E[q] - E[x]`, in units of x.
    mean: float
    #: `E[q x] - E[q^2]`, in units of x^2.
    projection: float
    #: `E[q^2] - (E[x^2] - E[(x - q)^2])`, in units of x^2. For a law, `E[x]` and `E[x^2]` are its
    #: closed forms, so that this and `mean` also measure the integration.
    variance: float
    #: Entropy of the codes, in bits.
    entropy: float
    #: Probability of the rarest code.
    smallest_probability: float
    #: Whether `stationarity` is at most 1e-10.
    converged: bool


class LloydMaxFit(NamedTuple):
    """A fitted codebook, and how good it is."""

    #: Levels and thresholds, rounded once to float32.
    codebook: Codebook
    #: `E[(x - q)^2]`, in units of x^2; of the float64 levels.
    distortion: float
    #: `distortion / E[x^2]`, to compare with `distortion_rate`. For `signed_max` it is the
    #: expected squared error of a row over its expected squared norm.
    relative_distortion: float
    #: Measured on the float64 levels.
    certificate: Certificate
    #: The levels before rounding, increasing.
    exact_levels: tuple[float, ...]


def fit(
    law: Law | str | Any,
    num_levels: int,
    *,
    symmetric: bool | None = None,
    name: str | None = None,
) -> LloydMaxFit:
    """Fit levels to a law.

    The same law and arguments give the same object, at once: fits are remembered.

    Args:
        law: A `Law`, the text of one (see `law`), or a frozen continuous distribution of
            scipy.stats with a finite variance.
        num_levels: 2 to 256.
        symmetric: Hold level `i` at exactly minus level `n - 1 - i`; by default wherever the law
            is symmetric about zero.
        name: Of the codebook; by default the law's name and the number of levels.

    Returns:
        The fit. Its codebook's recipe names the law.

    Raises:
        ValueError: `law` is none of those, `num_levels` is out of range, `symmetric` is asked of
            a law that is not, or the levels are not apart as float32.
        TypeError: `num_levels` is not an int.

    Exactness: as the certificate says; about 1e-15 standard deviations for the Gaussian, the
        sphere and the signed maximum. The fixed point is unique for a log-concave density; for
        others it is the one next to the dynamic program's optimum.
    """
    known = as_law(law)
    _check_num_levels(num_levels)
    check_optional("symmetric", symmetric, bool)
    if name is not None:
        check_name(name)
    held = known.symmetric if symmetric is None else symmetric
    if held and not known.symmetric:
        raise ValueError(f"symmetric must be False for a law that is not symmetric, got {known}")
    return _fit_law(known, num_levels, bool(held), name)


def fit_samples(
    samples: npt.ArrayLike,
    num_levels: int,
    *,
    weights: npt.ArrayLike | None = None,
    symmetric: bool = False,
    name: str | None = None,
    source: str = "samples",
) -> LloydMaxFit:
    """Fit levels to samples, in whatever order they come.

    With at most 1,024 distinct samples the fit has the least squared error that there is. With
    more, it is the fixed point that Lloyd's iteration reaches from the best levels for 1,024
    groups of neighbors.

    Args:
        samples: `[n]` numbers, rounded to float32 first.
        num_levels: 2 to 256, at most the number of distinct samples.
        weights: `[n]` numbers, not negative, rounded to float32 first: how much each sample
            counts. Samples of weight zero are left out.
        symmetric: Fit to the samples and their negatives together, and hold level `i` at exactly
            minus level `n - 1 - i`.
        name: Of the codebook; by default `samples_` and the number of levels.
        source: Where the samples come from, in words, for the provenance.

    Returns:
        The fit. Its codebook's provenance holds the SHA-256 of the float32 samples and weights.

    Raises:
        ValueError: The samples are none, constant, not finite or not one-dimensional; they have
            fewer distinct values than `num_levels`; the weights are negative, not finite, all zero
            or not as many; a symmetric codebook would have a level that no sample is nearest to;
            or the levels are not apart as float32.
        TypeError: The samples or weights are not real numbers, or `num_levels` is not an int.

    Exactness: deterministic; each level is the centroid of its cell to the rounding of float64.
    """
    _check_num_levels(num_levels)
    check_bool("symmetric", symmetric)
    check_kind("source", source, str)
    name = f"samples_{num_levels}" if name is None else name
    check_name(name)
    data = _float32_row("samples", samples)
    digest = hashlib.sha256(data.tobytes())
    counts = np.ones(data.size)
    if weights is not None:
        row = _float32_row("weights", weights)
        if row.size != data.size:
            raise ValueError(f"weights must be as many as samples, {data.size}, got {row.size}")
        if (row < 0).any():
            raise ValueError(f"weights must not be negative, got {row.min()}")
        if not row.any():
            raise ValueError("weights must not all be zero, got only zeros")
        digest.update(row.tobytes())
        counts = row.astype(np.float64)
        data, counts = data[counts > 0], counts[counts > 0]
    return fit_masses(
        data,
        counts,
        num_levels,
        symmetric=symmetric,
        weighted=weights is not None,
        name=name,
        source=source,
        data_sha256=digest.hexdigest(),
    )


def fit_masses(
    points: npt.NDArray[np.floating[Any]],
    masses: Array,
    num_levels: int,
    *,
    symmetric: bool = False,
    weighted: bool = False,
    name: str | None = None,
    source: str = "samples",
    data_sha256: str = "",
) -> LloydMaxFit:
    """Fit levels to points with masses: to a histogram.

    Args:
        points: `[n]`, finite, in any order.
        masses: `[n]`, positive and finite.
        num_levels: As for `fit_samples`.
        symmetric: As for `fit_samples`.
        weighted: Whether the masses are more than counts, for the recipe.
        name: As for `fit_samples`.
        source: As for `fit_samples`.
        data_sha256: SHA-256 (hex) of what the points and masses were made of, for the provenance.

    Raises:
        ValueError: As for `fit_samples`; or the masses are not as many as the points, or not
            positive and finite.
        TypeError: `num_levels` is not an int.

    Exactness: as for `fit_samples`.
    """
    _check_num_levels(num_levels)
    check_bool("symmetric", symmetric)
    name = f"samples_{num_levels}" if name is None else name
    check_name(name)
    if points.ndim != 1 or masses.shape != points.shape:
        raise ValueError(
            f"masses must be as many as the points of one axis, got {list(masses.shape)} "
            f"for {list(points.shape)}"
        )
    if not points.size:
        raise ValueError("samples must not be empty, got none")
    for argument, numbers in (("points", points), ("masses", masses)):
        if not np.isfinite(numbers).all():
            raise ValueError(f"{argument} must be finite, got {numbers[~np.isfinite(numbers)][0]}")
    if masses.min() <= 0:
        raise ValueError(f"masses must be positive, got {masses.min()}")
    if points.min() == points.max():
        raise ValueError(f"samples must not all be equal, got only {points[0]}")
    points, shares = _distinct(np.abs(points) if symmetric else points, masses)
    if points.size < (-(-num_levels // 2) if symmetric else num_levels):
        raise ValueError(
            f"num_levels must be at most what the distinct samples can fill, got {num_levels} "
            f"for {points.size} distinct {'magnitudes' if symmetric else 'samples'}"
        )
    return _result(
        name,
        _fit_sample(_Sample(points, shares, _Shape(num_levels, symmetric))),
        Recipe("samples", num_levels, symmetric, weighted),
        Provenance(source, data_sha256, _versions()),
    )


def panter_dite(num_levels: int, law: Law | str | Any) -> float:
    """The distortion that the best levels approach as they grow many.

    `(integral of f^(1/3))^3 / (12 N^2)`; for N(0,1), `sqrt(3) pi / (2 N^2)`.

    Args:
        num_levels: N.
        law: As for `fit`. Its atom, if any, is left out: it costs nothing in the limit.

    Returns:
        In units of x^2.

    Raises:
        ValueError: As for `fit`.

    Source: Panter and Dite 1951.
    """
    _check_num_levels(num_levels)
    return cube_root_integral(as_law(law)) ** 3 / (12 * num_levels**2)


def distortion_rate(num_levels: int, variance: float = 1.0) -> float:
    """The least squared error that any code of `log2 N` bits can reach on a Gaussian source.

    Args:
        num_levels: N.
        variance: Of the source, in units of x^2.

    Returns:
        `variance / N^2`.

    Raises:
        ValueError: `num_levels` is not 2 to 256, or `variance` not positive and finite.
    """
    _check_num_levels(num_levels)
    return check_number("variance", variance, positive=True) / num_levels**2


def gaussian_distortion(num_levels: int) -> float:
    """The distortion of the Lloyd-Max levels of N(0,1): the best of one code per value.

    Raises:
        ValueError: `num_levels` is not 2 to 256.
    """
    return fit("norm", num_levels).distortion


@dataclass(frozen=True, slots=True)
class _Shape:
    """Which levels are free: all, or the positive ones of a symmetric codebook."""

    num_levels: int
    symmetric: bool

    @property
    def odd(self) -> bool:
        """Whether there is a level held at zero."""
        return self.symmetric and self.num_levels % 2 == 1

    @property
    def free(self) -> int:
        return self.num_levels // 2 if self.symmetric else self.num_levels

    def lower_edges(self, levels: Array, lowest: float) -> Array:
        """`[N]`: where the cell of each free level begins."""
        first = levels[0] / 2 if self.odd else 0.0 if self.symmetric else lowest
        return np.append(first, (levels[:-1] + levels[1:]) / 2)

    def all_levels(self, levels: Array) -> Array:
        if not self.symmetric:
            return levels
        return np.concatenate([-levels[::-1], np.zeros(int(self.odd)), levels])


class _FixedPoint(NamedTuple):
    """All levels, their cells, the first two moments of x, and the steps taken."""

    levels: Array
    cells: CellMoments
    mean: float
    second_moment: float
    iterations: int


# Laws


@lru_cache(maxsize=1024)
def _fit_law(law: Law, num_levels: int, symmetric: bool, name: str | None) -> LloydMaxFit:
    shape = _Shape(num_levels, symmetric)
    points, shares = (law.knots[:-1] + law.knots[1:]) / 2, masses(law, law.knots)
    chosen = (shares > 0) & ((points > 0) | (not symmetric))
    start = _start(points[chosen], shares[chosen], shape)
    free, iterations = _newton(law, start, shape)
    levels = shape.all_levels(free)
    low, high = law.support
    edges = np.concatenate([[low], (levels[:-1] + levels[1:]) / 2, [high]])
    slug = re.sub(r"[^0-9A-Za-z.-]+", "_", law.name).strip("_")
    return _result(
        name or f"{slug}_{num_levels}",
        _FixedPoint(
            levels, cell_moments(law, edges, levels), law.mean, law.second_moment, iterations
        ),
        Recipe(law.name, num_levels, symmetric, law.weighted),
        Provenance(f"Lloyd-Max fixed point of {law}", versions=_versions()),
    )


class _State(NamedTuple):
    """Levels on the way to a fixed point."""

    levels: Array
    #: `[N + 1]` edges of their cells.
    edges: Array
    #: `[N]` probabilities of the cells.
    mass: Array
    #: `[N]`: centroid less level.
    residual: Array
    #: The largest residual, as in `Certificate.stationarity`; infinite if a cell is empty.
    error: float


def _newton(law: Law, start: Array, shape: _Shape) -> tuple[Array, int]:
    """The fixed point near `start`: Newton's steps, halved until they help, else Lloyd's."""
    low, high = law.support

    def at(levels: Array) -> _State:
        edges = np.append(shape.lower_edges(levels, low), high)
        cells = cell_moments(law, edges, levels)
        with np.errstate(all="ignore"):
            residual = cells.first / cells.mass
        error = _stationarity(levels, residual, law.deviation)
        return _State(levels, edges, cells.mass, residual, error)

    state = at(start)
    for iteration in range(_NEWTON_STEPS):
        step = _newton_step(law, state, shape)
        for scale in 0.5 ** np.arange(8 if state.error > _CONVERGED else 1):
            levels = state.levels + scale * step
            bounds = np.concatenate([[0.0 if shape.symmetric else low], levels, [high]])
            if (np.diff(bounds) > 0).all():
                trial = at(levels)
                if trial.error < state.error:
                    break
        else:
            if state.error < _CONVERGED:
                return state.levels, iteration
            trial = at(state.levels + state.residual)
            if math.isinf(trial.error):
                return state.levels, iteration
        state = trial
    return state.levels, _NEWTON_STEPS


def _newton_step(law: Law, state: _State, shape: _Shape) -> Array:
    """Solve the linearized stationarity equations; NaN where they have no solution."""
    levels, edges, mass, residual, _ = state
    centroids = levels + residual
    with np.errstate(all="ignore"):
        density = law.density(edges[:-1])
        # A centroid follows an edge by density times distance over mass; an edge follows each of
        # its two levels by half.
        left = density * (centroids - edges[:-1]) / mass / 2
        right = density[1:] * (edges[1:-1] - centroids[:-1]) / mass[:-1] / 2
    if not shape.odd:
        left[0] = 0.0
    banded = np.zeros((3, levels.size))
    banded[0, 1:] = right
    banded[1] = left - 1
    banded[1, :-1] += right
    banded[2, :-1] = left[1:]
    try:
        return np.asarray(solve_banded((1, 1), banded, -residual))
    except (np.linalg.LinAlgError, ValueError):
        return np.full_like(levels, math.nan)


# Samples


class _Sample(NamedTuple):
    """An empirical law; of magnitudes, if the codebook is symmetric."""

    #: `[n]`, increasing.
    points: Array
    #: `[n]`, positive, of sum 1.
    shares: Array
    shape: _Shape

    def cuts(self, free: Array) -> Indices:
        """`[N + 1]` indices where the cells of free levels begin, and the number of points."""
        edges = self.shape.lower_edges(free, self.points[0])
        return np.append(np.searchsorted(self.points, edges), self.points.size)

    def cells(self, free: Array) -> CellMoments:
        """The cells of all levels."""
        points, shares, shape = self
        # What lies below the first free level's cell is nearest to the level at zero.
        cuts = np.append(0, self.cuts(free))
        offset = points - np.repeat(np.append(0.0, free), np.diff(cuts))
        moments = np.stack([_sums(shares * offset**k, cuts) for k in range(3)])
        zero, cells = moments[:, :1] * [[1.0], [0.0], [1.0]], moments[:, 1:]
        if not shape.symmetric:
            return CellMoments(*cells)
        mirror = cells[:, ::-1] * [[0.5], [-0.5], [0.5]]
        return CellMoments(*np.concatenate([mirror, zero[:, : int(shape.odd)], cells / 2], axis=1))


def _sums(row: Array, cuts: Indices) -> Array:
    """`[N]` sums of `[n]` numbers between `[N + 1]` cuts, pairwise; zero where a cell is empty."""
    return np.where(np.diff(cuts) > 0, np.add.reduceat(np.append(row, 0.0), cuts)[:-1], 0.0)


def _fit_sample(sample: _Sample) -> _FixedPoint:
    points, shares, shape = sample
    # Sums are of distances from the middle, so that they lose nothing far from zero.
    middle = points[points.size // 2]
    weighted = shares * (points - middle)
    sums = np.zeros((2, points.size + 1), dtype=np.longdouble)
    np.cumsum(shares, out=sums[0, 1:], dtype=np.longdouble)
    np.cumsum(weighted, out=sums[1, 1:], dtype=np.longdouble)

    def quick(cuts: Indices) -> Array:
        mass, first = np.diff(sums[:, cuts])
        with np.errstate(all="ignore"):
            return np.asarray(middle + first / mass, dtype=np.float64)

    def exact(cuts: Indices) -> Array:
        return np.asarray(middle + _sums(weighted, cuts) / _sums(shares, cuts))

    start = _start(points, shares, shape)
    # Prefix sums lose a light cell beside heavy or distant ones: tried, never trusted.
    tried, tries = _lloyd(start, sample, quick, _LLOYD_STEPS)
    better = min(start, tried, key=lambda free: sample.cells(free).second.sum())
    most = min(_LLOYD_STEPS, max(1000, _LLOYD_WORK // points.size))
    free, steps = _lloyd(better, sample, exact, most)
    if shape.odd and sample.cuts(free)[0] == 0:
        raise ValueError(
            "num_levels must be even for a symmetric fit of samples of which none is nearest to "
            f"zero, got {shape.num_levels}"
        )
    if shape.symmetric and free[0] == 0:
        raise ValueError(
            "num_levels must be odd for a symmetric fit of samples of which too many are zero, "
            f"got {shape.num_levels}"
        )
    mean = 0.0 if shape.symmetric else float(np.sum(shares * points))
    second_moment = float(np.sum(shares * points**2))
    return _FixedPoint(
        shape.all_levels(free), sample.cells(free), mean, second_moment, tries + steps
    )


def _lloyd(
    free: Array, sample: _Sample, centroids: Callable[[Indices], Array], most: int
) -> tuple[Array, int]:
    """Lloyd's iteration until no point changes its cell: levels and the number of steps."""
    cuts = sample.cuts(free)
    for step in range(most):
        if (np.diff(cuts) == 0).any():
            cuts = _refilled(cuts, sample)
        levels, previous = centroids(cuts), cuts
        cuts = sample.cuts(levels)
        if not (np.diff(levels) > 0).all() or cuts[0] == cuts[-1]:
            return free, step
        free = levels
        if np.array_equal(cuts, previous):
            return free, step
    return free, most


def _refilled(cuts: Indices, sample: _Sample) -> Indices:
    """Give each empty cell a part of the cell with the largest error."""
    points, shares, _ = sample
    kept = np.unique(cuts)
    while kept.size < cuts.size:
        center = _sums(shares * points, kept) / _sums(shares, kept)
        offset = points - np.repeat(np.append(0.0, center), np.diff(np.append(0, kept)))
        error = _sums(shares * offset**2, kept)
        worst = int(np.where(np.diff(kept) > 1, error, -1.0).argmax())
        cut = np.searchsorted(points, center[worst])
        kept = np.insert(kept, worst + 1, np.clip(cut, kept[worst] + 1, kept[worst + 1] - 1))
    return kept


# The start of both


def _start(points: Array, shares: Array, shape: _Shape) -> Array:
    """The best free levels for at most 1,024 groups of neighboring points.

    Args:
        points: `[n]`, increasing; positive ones or magnitudes, if the codebook is symmetric.
        shares: `[n]`, positive.
        shape: With at most n levels in all.

    Returns:
        `[shape.free]`, increasing.

    Source: dynamic programming over the ends of cells; Bruce 1965.
    """
    begins = _groups(points, shares)
    mass = np.add.reduceat(shares, begins)
    center = np.add.reduceat(shares * points, begins) / mass
    offset = points - np.repeat(center, np.diff(np.append(begins, points.size)))
    inner = np.add.reduceat(shares * offset**2, begins)
    groups = begins.size
    # cost[j, i]: the squared error of groups i to j - 1 in one cell, about their centroid, which
    # moves as j grows. Nothing is subtracted, so rare and distant groups keep their weight.
    cost = np.full((groups + 1, groups + 1), math.inf)
    total, centroid, error = np.zeros((3, groups))
    for j in range(groups):
        i = slice(0, j + 1)
        step = center[j] - centroid[i]
        before = total[i].copy()
        total[i] += mass[j]
        centroid[i] += step * (mass[j] / total[i])
        error[i] += step**2 * (mass[j] * (before / total[i])) + inner[j]
        cost[j + 1, i] = error[i]
    # best[j]: the least error of groups 0 to j - 1 in the cells so far.
    best = np.full(groups + 1, math.inf)
    if shape.odd:
        best[1:] = np.cumsum(mass * center**2 + inner)
    else:
        best[0] = 0.0
    choices = []
    for _ in range(shape.free):
        totals = cost + best
        choices.append(totals.argmin(axis=1))
        best = np.take_along_axis(totals, choices[-1][:, None], axis=1)[:, 0]
    ends = [groups]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    cells = np.array(ends[:0:-1])
    return np.asarray(np.add.reduceat(mass * center, cells) / np.add.reduceat(mass, cells))


def _groups(points: Array, shares: Array) -> Indices:
    """Where at most 1,024 groups of neighboring points begin.

    The gaps within a group sum to at most one part of `share^(1/3) gap^(2/3)`, as between the best
    levels of a density, and a gap of one part or more always ends a group.
    """
    if points.size <= _POINTS:
        return np.arange(points.size)
    gaps = np.cbrt((shares[:-1] + shares[1:]) * np.diff(points) ** 2)
    # The part of which all gaps have _POINTS - 1, none more than one.
    rising = np.sort(gaps)
    largest, rest = (row[:-_POINTS:-1] for row in (rising, np.cumsum(rising)))
    parts = rest / np.arange(_POINTS - 1, 0, -1)
    part = parts[np.argmax(largest <= parts)]
    # A little more than one, so that no rounding joins what a whole part divides.
    place = np.cumsum(np.minimum(gaps / part, 1 + 1e-9))
    return np.append(0, np.flatnonzero(np.diff(np.floor(place), prepend=0.0)) + 1)


# What a fit takes and hands back


def _float32_row(argument: str, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """`values` as a row of finite float32 numbers; a negative zero is made positive."""
    try:
        row = np.asarray(values)
    # Lists of several lengths, and tensors that a gradient flows to or a GPU holds.
    except (ValueError, TypeError, RuntimeError):
        raise TypeError(
            f"{argument} must be real numbers, got a {type(values).__name__}"
        ) from None
    if not row.size:
        raise ValueError(f"{argument} must not be empty, got none")
    if row.dtype.kind not in "iuf":
        raise TypeError(f"{argument} must be real numbers, got {row.dtype}")
    if row.ndim != 1:
        raise ValueError(f"{argument} must have one dimension, got {row.ndim}")
    with np.errstate(over="ignore"):
        single = row.astype(np.float32) + np.float32(0.0)
    finite = np.isfinite(single)
    if not finite.all():
        first = int(finite.argmin())
        raise ValueError(f"{argument} must be finite as float32, got {row[first]} at {first}")
    return single


def _distinct(row: npt.NDArray[np.floating[Any]], counts: Array) -> tuple[Array, Array]:
    """The distinct values, increasing, and their shares of the whole."""
    order = np.lexsort((counts, row))
    values = row[order].astype(np.float64)
    begins = np.append(0, np.flatnonzero(np.diff(values)) + 1)
    shares = np.add.reduceat(counts[order], begins)
    return values[begins], shares / shares.sum()


def _stationarity(levels: Array, residual: Array, deviation: float) -> float:
    worst = float((np.abs(residual) / np.maximum(np.abs(levels), deviation)).max())
    return worst if math.isfinite(worst) else math.inf


def _result(name: str, found: _FixedPoint, recipe: Recipe, provenance: Provenance) -> LloydMaxFit:
    levels, (mass, first, second), mean, second_moment, iterations = found
    with np.errstate(over="ignore"):
        single = [row.astype(np.float32) for row in (levels, (levels[:-1] + levels[1:]) / 2)]
    if not all(np.isfinite(row).all() and (np.diff(row) > 0).all() for row in single):
        raise ValueError(
            f"{recipe.distribution} must have levels and thresholds that are finite and distinct "
            f"as float32, got {levels[0]} to {levels[-1]} for {recipe.num_levels} levels"
        )
    exact = tuple(float(level) for level in levels)
    codebook = Codebook.from_exact(name, exact, recipe, provenance)
    distortion = float(second.sum())
    with np.errstate(all="ignore"):
        stationarity = _stationarity(levels, first / mass, math.sqrt(second_moment - mean**2))
        entropy = -float((mass * np.log2(mass)).sum())
    certificate = Certificate(
        iterations=iterations,
        stationarity=stationarity,
        mean=float(mass @ levels) - mean,
        projection=float(first @ levels),
        variance=float(mass @ levels**2) - (second_moment - distortion),
        entropy=entropy,
        smallest_probability=float(mass.min()),
        converged=stationarity <= _CONVERGED,
    )
    return LloydMaxFit(codebook, distortion, distortion / second_moment, certificate, exact)


def _check_num_levels(num_levels: int) -> None:
    if not 2 <= check_int("num_levels", num_levels) <= MAX_LEVELS:
        raise ValueError(f"num_levels must be 2 to {MAX_LEVELS}, got {num_levels}")


def _versions() -> tuple[tuple[str, str], ...]:
    from kvq import __version__

    return (("kvq", __version__), ("numpy", np.__version__), ("scipy", scipy.__version__))
