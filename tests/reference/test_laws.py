"""The laws that levels are fitted to, against closed forms and samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from scipy.special import ndtr

from kvq.reference.laws import Law, as_law, cell_moments, law, signed_max, sphere


def whole(known: Law, *inner: float) -> tuple[Any, Any, Any]:
    """Mass and moments about zero of the cells between `inner` edges."""
    edges = np.array([known.support[0], *inner, known.support[1]])
    return cell_moments(known, edges, np.zeros(len(inner) + 1))


@pytest.mark.parametrize(
    "text",
    [
        "norm",
        "norm(loc=3, scale=0.1)",
        "sphere(2)",
        "sphere(3)",
        "sphere(128)",
        "sphere(512)",
        "signed_max(2)",
        "signed_max(128)",
        "laplace(0.3)",
        "uniform(-1, 2)",
        "expon",
        "t(df=3)",
        "arcsine",
        "gamma(0.5)",
        "beta(2, 5)",
        "triang(0.3)",
    ],
)
@pytest.mark.parametrize("inner", [(0.0,), (-0.4, 0.05, 0.31)])
def test_cells_add_up_to_the_moments_of_the_law(text: str, inner: tuple[float, ...]) -> None:
    known = law(text)
    inner = tuple(known.mean + known.deviation * edge for edge in inner)
    mass, first, second = whole(known, *inner)
    assert mass.sum() == pytest.approx(1, abs=1e-12)
    assert first.sum() == pytest.approx(known.mean, abs=1e-12 * (1 + abs(known.mean)))
    assert second.sum() == pytest.approx(known.second_moment, rel=1e-12)


def test_cells_of_the_gaussian() -> None:
    known = law("norm")
    edges = np.array([-np.inf, -2.5, 0.0, 0.01, 7.0, np.inf])
    about = np.array([-2.7, -1.0, 0.003, 0.5, 7.2])
    mass, first, _ = cell_moments(known, edges, about)
    right = ndtr(-edges[:-1]) - ndtr(-edges[1:])
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    assert mass == pytest.approx(right, rel=1e-12)
    assert mass[-1] == pytest.approx(right[-1], rel=1e-13)
    assert first == pytest.approx(density[:-1] - density[1:] - about * right, abs=1e-15)


@pytest.mark.parametrize("head_dim", [2, 3, 8, 64, 128])
def test_sphere_is_a_scaled_beta_law(head_dim: int) -> None:
    radius, half = math.sqrt(head_dim), (head_dim - 1) / 2
    beta = stats.beta(half, half, loc=-radius, scale=2 * radius)
    x = np.linspace(-0.99 * radius, 0.99 * radius, 23)
    known = sphere(head_dim)
    assert known.below(x) == pytest.approx(beta.cdf(x), abs=1e-13)
    assert known.above(x) == pytest.approx(beta.sf(x), abs=1e-13)
    assert known.density(x) == pytest.approx(beta.pdf(x), rel=1e-11)


def test_sphere_of_three_dimensions_is_uniform() -> None:
    # Archimedes' hat-box theorem.
    x = np.array([-1.5, 0.0, 1.0])
    assert sphere(3).above(x) == pytest.approx(0.5 - x / (2 * math.sqrt(3)), abs=1e-15)


def test_signed_max_of_two_in_closed_form() -> None:
    # For two Gaussians, weighted by m^2, the other entry has density (1 + z^2)^-2 up to scale.
    known = signed_max(2)
    z = np.linspace(-0.95, 0.95, 11)
    integral = z / (2 * (1 + z**2)) + np.arctan(z) / 2
    half = 1 / 4 + math.pi / 8
    assert known.density(z) == pytest.approx((1 + z**2) ** -2.0 / (4 * half), rel=1e-12)
    assert known.below(z) == pytest.approx((integral + half) / (4 * half), abs=1e-14)
    assert known.above(np.array([1.0 - 1e-12, 1.0])) == pytest.approx([0.5, 0.0], abs=1e-11)


@pytest.mark.parametrize("text", ["signed_max(2)", "signed_max(128)", "sphere(3)", "sphere(128)"])
def test_beyond_the_support_there_is_nothing(text: str) -> None:
    known = law(text)
    far = 3 * np.array(known.support)
    assert known.below(far) == pytest.approx([0.0, 1.0], abs=1e-12)
    assert known.above(far) == pytest.approx([1.0, 0.0], abs=1e-12)


def test_signed_max_scale() -> None:
    # E[m^2] from the survival function of the largest magnitude.
    energy, _ = quad(lambda m: 2 * m * (1 - (1 - 2 * ndtr(-m)) ** 128), 0, 12, epsabs=1e-13)
    assert 1 / signed_max(128).second_moment == pytest.approx(energy, rel=1e-12)
    assert signed_max(128).mean == 1 / 128


def test_signed_max_against_samples() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((20_000, 32))
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    z, weight = rows / largest, np.broadcast_to(largest**2, rows.shape)
    edges = np.array([-1.0, -0.6, -0.1, 0.2, 0.7, 0.999, 1.0])
    mass = cell_moments(signed_max(32), edges, np.zeros(6)).mass
    # 20,000 independent rows: the share of one cell has a standard error below 1e-3.
    cell = np.searchsorted(edges[1:-1], z)
    found = [weight[cell == k].sum() / weight.sum() for k in range(6)]
    assert mass == pytest.approx(found, abs=4e-3)
    assert mass[-1] == pytest.approx(1 / 32, abs=2e-3)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("norm", "norm"),
        (" t(df=5) ", "t(df=5)"),
        ("t(5.0)", "t(5)"),
        ("uniform(-1, 2)", "uniform(-1, 2)"),
        ("norm(loc=0.25, scale=2e-3)", "norm(loc=0.25, scale=0.002)"),
        ("sphere(128)", "sphere(128)"),
        ("sphere(head_dim=128)", "sphere(128)"),
        ("signed_max(64)", "signed_max(64)"),
        (stats.norm(), "norm"),
        (stats.t(df=5), "t(df=5)"),
        (stats.gamma(np.float64(2.5), scale=0.1), "gamma(2.5, scale=0.1)"),
    ],
)
def test_a_name_reads_back_as_the_law(given: object, name: str) -> None:
    known = as_law(given)
    assert str(known) == name
    assert as_law(name) is known or as_law(name).second_moment == known.second_moment
    assert as_law(known) is known


def test_the_same_law_is_the_same_object() -> None:
    assert law("t(df=5)") is as_law(stats.t(df=5))
    assert law("sphere(128)") is sphere(128)


@pytest.mark.parametrize(
    ("text", "symmetric"),
    [
        ("norm", True),
        ("norm(loc=1e-9)", False),
        ("uniform(-1, 2)", True),
        ("uniform(-1, 2.001)", False),
        ("laplace", True),
        ("expon", False),
        ("skewnorm(0.001)", False),
        ("sphere(16)", True),
        ("signed_max(16)", False),
    ],
)
def test_symmetry_is_found(text: str, symmetric: bool) -> None:
    assert law(text).symmetric is symmetric


@pytest.mark.parametrize(
    "text",
    [
        "",
        "norm(",
        "norm()()",
        "norm + 1",
        "norm(scale='1')",
        "norm(True)",
        "norm(1j)",
        "norm(**{'scale': 2})",
        "norm(*[1])",
        "norm(__import__('os'))",
        "stats.norm",
        "(lambda: 0)()",
        "no_such_law",
        "poisson(3)",
        "rv_continuous",
        "multivariate_normal",
        "norm(shape=3)",
        "t",
        "sphere",
        "sphere(1)",
        "sphere(2.5)",
        "sphere(1e999)",
        "sphere(1000000000)",
        "signed_max(0)",
        "signed_max(1, 2)",
        "cauchy",
        "t(df=2)",
        "t(df=-1)",
        "norm(scale=0)",
        "norm(scale=-1)",
        "norm" + "(" * 5000,
        "\0",
    ],
)
def test_texts_that_are_no_law(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(law|head_dim) must "):
        law(text)


class Folded(stats.rv_continuous):
    def _pdf(self, x: Any, *args: Any) -> Any:
        return np.exp(-x)


@pytest.mark.parametrize(
    "given",
    [
        stats.norm,  # not frozen
        stats.poisson(3),
        stats.cauchy(),
        stats.norm(loc=[0, 1]),
        stats.multivariate_normal(),
        Folded(a=0, name="folded")(),
        3,
        None,
    ],
)
def test_what_is_no_law(given: object) -> None:
    with pytest.raises(ValueError, match=r"^law must "):
        as_law(given)
