"""The laws that `lloyd_max` fits levels to: distributions of one variable, and their cells.

Moments over a cell are integrals of the density, checked against the two tails `P(x <= t)` and
`P(x > t)`: so kinks, poles and atoms are found without being told.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.integrate import quad
from scipy.special import betainc, ndtr

from kvq.value_checks import check_kind, check_real

Array: TypeAlias = npt.NDArray[np.float64]
Function: TypeAlias = Callable[[Array], Array]

_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(16)
_MOST_HALVINGS: Final = 50
_MOST_PANELS: Final = 10_000
#: Infinite supports end at sigma * sinh(230), about 1e99 sigma from the center.
_FARTHEST: Final = 230.0
#: Where the end cells are cut, from their inner edge.
_OUTWARDS: Final = np.concatenate(
    [[0.0, 0.25], np.arange(0.5, 4.0, 0.5), np.arange(4.0, 2 * _FARTHEST, 4.0)]
)
_LARGEST_HEAD: Final = 65_536
#: Knots of the laws on bounded intervals.
_KNOTS: Final = 4097
#: Log of the smallest tail that has a knot.
_RAREST: Final = -100.0


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A distribution of one variable x. `law`, `sphere` and `signed_max` make them."""

    #: What `law` reads back as this law.
    name: str
    #: Whether it is symmetric about zero.
    symmetric: bool
    #: Whether its probabilities are weights, other than the frequencies of x.
    weighted: bool
    #: `E[x]`.
    mean: float
    #: `E[x^2]`.
    second_moment: float
    #: The ends of the support; may be infinite.
    support: tuple[float, float]
    #: `P(x <= t)`, to full relative accuracy where it is small.
    below: Function
    #: `P(x > t)`, to full relative accuracy where it is small.
    above: Function
    #: The density, without atoms.
    density: Function
    #: Values of x, increasing, dense wherever the law has mass: the start of a fit.
    knots: Array

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.second_moment - self.mean**2)

    @property
    def center(self) -> float:
        """Where a float must be finest: zero, or a finite end, where a density may have a pole."""
        ends = [0.0] if self.symmetric else [*self.support, self.mean]
        return next(end for end in ends if math.isfinite(end))

    def __str__(self) -> str:
        return self.name


class CellMoments(NamedTuple):
    """Moments of N cells, each `[N]`."""

    #: Probability of the cell.
    mass: Array
    #: `E[x - level; cell]`: zero where the level is the cell's centroid.
    first: Array
    #: `E[(x - level)^2; cell]`: the cell's part of the distortion.
    second: Array


@lru_cache(maxsize=256)
def law(text: str) -> Law:
    """The law of a text such as `norm`, `sphere(128)`, `signed_max(128)`, `t(df=5)`.

    The same text gives the same object.

    Args:
        text: `sphere` or `signed_max` with a head size, or the name of a continuous distribution
            of scipy.stats, with its numeric parameters in scipy's order or by name. It is read,
            never evaluated.

    Raises:
        ValueError: The text is not of that form, or names no law of finite variance.

    >>> law("t(df=5)").second_moment
    1.6666666666666667
    """
    name, arguments, keywords = _parse(check_kind("law", text, str))
    own = {"sphere": sphere, "signed_max": signed_max}
    distribution: Any = getattr(stats, name, None)
    if name not in own and not isinstance(distribution, stats.rv_continuous):
        raise ValueError(
            "law must be sphere, signed_max or a continuous distribution of scipy.stats, "
            f"got {text!r}"
        )
    try:
        if name in own:
            return own[name](*arguments, **keywords)
        frozen = distribution(*arguments, **keywords)
    except TypeError as error:
        raise ValueError(
            f"law must have the parameters of {name}, got {text!r} ({error})"
        ) from None
    return _from_scipy(_unparse(name, arguments, keywords), frozen)


@lru_cache(maxsize=64)
def sphere(head_dim: int) -> Law:
    """The law of `sqrt(d) x_i`, `x` uniform on the unit sphere of `d = head_dim` dimensions.

    Density proportional to `(1 - x^2/d)^((d-3)/2)`; mean 0, variance 1. So is distributed a
    coordinate after a uniformly random rotation, and a Gaussian row over its root mean square.

    Args:
        head_dim: 2 to 65,536.

    Raises:
        ValueError: It is not a whole number in that range.
    """
    d = _check_head_dim(head_dim)
    radius = math.sqrt(d)
    # Gamma(d/2) / Gamma((d-1)/2) by its recursion, which keeps all digits.
    ratio = 1 / math.sqrt(math.pi)
    for k in range(3, d + 1):
        ratio = (k / 2 - 1) / ratio

    def rest(x: Array) -> Array:
        """`1 - x^2/d`, zero outside the support."""
        return np.maximum((1 - x / radius) * (1 + x / radius), 0.0)

    def above(x: Array) -> Array:
        tail = betainc((d - 1) / 2, 0.5, rest(x)) / 2
        return np.where(x >= 0, tail, 1 - tail)

    def density(x: Array) -> Array:
        with np.errstate(divide="ignore"):
            return np.asarray(ratio / math.sqrt(math.pi * d) * rest(x) ** ((d - 3) / 2))

    return Law(
        name=f"sphere({d})",
        symmetric=True,
        weighted=False,
        mean=0.0,
        second_moment=1.0,
        support=(-radius, radius),
        below=lambda x: above(-x),
        above=above,
        density=density,
        knots=np.linspace(-min(radius, 12.0), min(radius, 12.0), _KNOTS),
    )


@lru_cache(maxsize=64)
def signed_max(head_dim: int) -> Law:
    """The law of `z = y_i / m`, weighted by `m^2`, for rows `y` of `D = head_dim` draws of N(0,1).

    `m` is the entry of largest magnitude, with its sign. One entry in D is `m` itself, an atom at
    `z = 1`; given `m`, the others have density `|m| phi(m z) / (2 Phi(|m|) - 1)` on (-1, 1). The
    weight makes the squared error that of `y`: it is `E[m^2 (z - q)^2] / E[m^2]`, and over
    `E[z^2]` the relative squared error of the row.

    Args:
        head_dim: 2 to 65,536.

    Raises:
        ValueError: It is not a whole number in that range.
    """
    d = _check_head_dim(head_dim)
    # |m|, the largest of d half-normals, at the nodes of 20 panels of (0, 12): exact to float64.
    m = (np.arange(20)[:, None] * 0.6 + 0.3 * (_NODES + 1.0)).ravel()
    log_inside = np.log1p(-2.0 * ndtr(-m))
    log_normal = -m * m / 2 - math.log(2 * math.pi) / 2
    weight = np.tile(_NODE_WEIGHTS, 20) * m**2 * np.exp((d - 1) * log_inside + log_normal)
    energy = 0.6 * d * float(weight.sum())
    others = (1 - 1 / d) * weight / weight.sum() / np.exp(log_inside)

    def tail(z: Array) -> Array:
        """The entries below `z` that are not `m`."""
        inside = ndtr(np.multiply.outer(np.clip(z, -1.0, 1.0), m)) - ndtr(-m)
        return np.asarray(inside @ others)

    def density(z: Array) -> Array:
        kernel = np.exp(np.multiply.outer(z * z, -m * m / 2) - math.log(2 * math.pi) / 2)
        return np.where(np.abs(z) < 1, kernel @ (m * others), 0.0)

    return Law(
        name=f"signed_max({d})",
        symmetric=False,
        weighted=True,
        mean=1 / d,
        second_moment=1 / energy,
        support=(-1.0, 1.0),
        below=lambda z: np.where(z < 1, tail(z), 1.0),
        above=lambda z: np.where(z < 1, tail(-z) + 1 / d, 0.0),
        density=density,
        knots=np.linspace(-1.0, 1.0, _KNOTS),
    )


def as_law(given: Law | str | Any) -> Law:
    """A `Law` from itself, its text, or a frozen continuous distribution of scipy.stats.

    Raises:
        ValueError: It is none of these, or has no finite variance.
    """
    if isinstance(given, Law):
        return given
    if isinstance(given, str):
        return law(given)
    distribution = getattr(given, "dist", None)
    name = getattr(distribution, "name", None)
    if (
        not isinstance(distribution, stats.rv_continuous)
        or not isinstance(name, str)
        or type(getattr(stats, name, None)) is not type(distribution)
    ):
        raise ValueError(
            "law must be a Law, its text or a frozen continuous distribution of scipy.stats, "
            f"got {given!r}"
        )
    parameters = (*given.args, *given.kwds.values())
    if any(np.ndim(value) for value in parameters):
        raise ValueError(f"law must have scalar parameters, got {parameters}")
    return law(_unparse(name, given.args, given.kwds))


def cell_moments(law: Law, edges: Array, levels: Array) -> CellMoments:
    """The mass of every cell, and its first and second moment about its level.

    Gauss-Legendre over the density, on panels that are halved until their mass is that of the
    tails; what is left of an atom or a pole is then a mass at one point.

    Args:
        law: Of x.
        edges: `[N + 1]`, increasing, within the support.
        levels: `[N]`.

    Exactness: the masses to 1e-14; far better where the density is smooth.
    """
    s = _coordinate(law, edges)
    # The end cells may be wide and nearly empty: cut from the inner edge outwards.
    cuts = np.unique(np.concatenate([s, s[-2] + _OUTWARDS, s[1] - _OUTWARDS]))
    cuts = cuts[(cuts >= s[0]) & (cuts <= s[-1])]
    left, right = cuts[:-1], cuts[1:]
    cell = np.searchsorted(s, left, side="right") - 1
    moments = np.zeros((3, levels.size))
    for halving in range(_MOST_HALVINGS + 1):
        middle, radius = (left + right) / 2, (right - left) / 2
        x, slope = _variable(law, middle[:, None] + radius[:, None] * _NODES)
        weight = law.density(x) * slope * radius[:, None] * _NODE_WEIGHTS
        low = np.where(left == s[cell], edges[cell], _variable(law, left)[0])
        high = np.where(right == s[cell + 1], edges[cell + 1], _variable(law, right)[0])
        mass, tail = _mass(law, low, high)
        weight[~np.isfinite(weight)] = 0.0
        total = weight.sum(axis=1)
        error = np.abs(total - mass)
        wrong = error > 1e-15 + 4e-14 * tail
        again = wrong & (error * np.ptp(x, axis=1) > 1e-16 * law.deviation)
        if halving == _MOST_HALVINGS or again.sum() > _MOST_PANELS:
            again[:] = False
        # Where all that is wrong is in a point, the mass of the tails is right.
        flat = wrong & (total == 0)
        weight[flat], total[flat] = _NODE_WEIGHTS, 2.0
        weight[wrong] *= (mass[wrong] / total[wrong])[:, None]
        weight[again] = 0.0
        offset = x - levels[cell][:, None]
        for k in range(3):
            moments[k] += np.bincount(cell, (weight * offset**k).sum(axis=1), levels.size)
        if not again.any():
            break
        left = np.append(left[again], middle[again])
        right = np.append(middle[again], right[again])
        cell = np.tile(cell[again], 2)
    return CellMoments(*moments)


def masses(law: Law, edges: Array) -> Array:
    """`[N]` probabilities of the cells between `[N + 1]` edges, from the lighter tail of each."""
    return _mass(law, edges[:-1], edges[1:])[0]


@lru_cache(maxsize=256)
def cube_root_integral(law: Law) -> float:
    """The integral of the cube root of the density, to about 1e-10."""

    def integrand(s: float) -> float:
        x, slope = _variable(law, np.array([s]))
        value = float(np.cbrt(law.density(x))[0] * slope[0])
        return value if math.isfinite(value) else 0.0

    low, middle, high = _coordinate(law, np.array([law.support[0], law.mean, law.support[1]]))
    halves = [
        quad(integrand, *ends, epsabs=0, epsrel=1e-11, limit=500)[0]
        for ends in ((low, middle), (middle, high))
    ]
    return float(sum(halves))


def _mass(law: Law, low: Array, high: Array) -> tuple[Array, Array]:
    """`P(low < x <= high)`, and the tail that it is a difference of."""
    below, above = law.below(low), law.above(high)
    upper = above < below
    tail = np.where(upper, law.above(low), law.below(high))
    return tail - np.where(upper, above, below), tail


def _coordinate(law: Law, x: Array) -> Array:
    """s with `x = center + sigma sinh(s)`: the tails of a law of finite variance vanish fast."""
    return np.clip(np.arcsinh((x - law.center) / law.deviation), -_FARTHEST, _FARTHEST)


def _variable(law: Law, s: Array) -> tuple[Array, Array]:
    """x of s, and `dx/ds`."""
    return law.center + law.deviation * np.sinh(s), law.deviation * np.cosh(s)


def _from_scipy(name: str, frozen: Any) -> Law:
    with np.errstate(all="ignore"):
        mean, variance = (float(moment) for moment in frozen.stats("mv"))
        low, high = (float(end) for end in frozen.support())
    if not (math.isfinite(mean) and math.isfinite(variance) and variance > 0):
        raise ValueError(f"law must have a finite variance above zero, got {name}")
    deviation = math.sqrt(variance)
    tail = np.union1d(np.exp(np.linspace(_RAREST, -3.0, 512)), np.linspace(0.0, 0.5, 1025)[1:])
    with np.errstate(all="ignore"):
        knots = np.concatenate([frozen.ppf(tail), frozen.isf(tail)])
        probes = deviation * np.sinh(np.linspace(0.01, 3.0, 64))
        right, left = frozen.pdf(probes), frozen.pdf(-probes)
    symmetric = low == -high and bool(np.all(np.abs(right - left) <= 1e-12 * (right + left)))

    def quiet(function: Function) -> Function:
        def quieted(x: Array) -> Array:
            with np.errstate(all="ignore"):
                return np.asarray(function(x))

        return quieted

    return Law(
        name=name,
        symmetric=symmetric,
        weighted=False,
        mean=0.0 if symmetric else mean,
        second_moment=variance + (0.0 if symmetric else mean**2),
        support=(low, high),
        below=quiet(frozen.cdf),
        above=quiet(frozen.sf),
        density=quiet(frozen.pdf),
        knots=np.unique(knots[np.isfinite(knots)]),
    )


def _parse(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, the numbers and the named numbers of `name(1, b=2)`, or a name alone."""
    wanted = f"law must be a name with numbers, such as 'norm' or 't(df=5)', got {text!r}"
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        arguments = [ast.literal_eval(argument) for argument in call.args]
        keywords = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(wanted) from None
    numbers = (*arguments, *keywords.values())
    if not isinstance(call.func, ast.Name) or any(type(n) not in (int, float) for n in numbers):
        raise ValueError(wanted)
    return call.func.id, arguments, keywords


def _unparse(name: str, arguments: Iterable[float], keywords: Mapping[str, float]) -> str:
    """What `_parse` reads back."""

    def number(value: float) -> str:
        whole = float(value).is_integer() and abs(value) < 2**53
        return str(int(value)) if whole else repr(float(value))

    numbers = [number(value) for value in arguments]
    numbers += [f"{word}={number(value)}" for word, value in keywords.items()]
    return f"{name}({', '.join(numbers)})" if numbers else name


def _check_head_dim(head_dim: float) -> int:
    check_real("head_dim", head_dim)
    if not 2 <= head_dim <= _LARGEST_HEAD or head_dim != int(head_dim):
        raise ValueError(
            f"head_dim must be a whole number from 2 to {_LARGEST_HEAD}, got {head_dim}"
        )
    return int(head_dim)
