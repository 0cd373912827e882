"""Lloyd-Max fits of samples: against brute force, invariances, refusals."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvq.reference import lloyd_max
from kvq.reference.lloyd_max import LloydMaxFit, fit, fit_samples

Array = npt.NDArray[np.float64]


def check(fitted: LloydMaxFit, samples: Any, weights: Any = None) -> None:
    """A fixed point of these samples, by a walk through all of them, and a sound codebook."""
    x = np.asarray(samples, dtype=np.float32).astype(np.float64)
    w = np.ones(x.size) if weights is None else np.asarray(weights, dtype=np.float64)
    levels = np.array(fitted.exact_levels)
    if fitted.codebook.recipe.symmetric:
        x, w = np.concatenate([x, -x]), np.concatenate([w, w])
        assert (levels == -levels[::-1]).all()
        assert fitted.codebook.symmetric
    w = w / w.sum()
    scale = max(x.std(), np.abs(x).max() * 1e-3)
    code = np.abs(x[:, None] - levels).argmin(axis=1)
    for k, level in enumerate(levels):
        mine = (code == k) & (w > 0)
        assert mine.any(), f"level {k} is dead"
        if not fitted.codebook.recipe.symmetric:  # a tie at a mirrored threshold may go both ways
            centroid = np.average(x[mine], weights=w[mine])
            assert level == pytest.approx(centroid, abs=1e-12 * scale, rel=1e-12)
    error = w @ (x - levels[code]) ** 2
    assert fitted.distortion == pytest.approx(error, rel=1e-9, abs=1e-24 * scale**2)
    assert fitted.relative_distortion == pytest.approx(fitted.distortion / (w @ x**2), rel=1e-9)
    assert fitted.certificate.converged
    assert abs(fitted.certificate.mean) < 1e-12 * scale
    assert abs(fitted.certificate.projection) < 1e-12 * (w @ x**2)
    assert abs(fitted.certificate.variance) < 1e-12 * (w @ x**2)
    assert fitted.certificate.smallest_probability > 0
    assert np.isfinite(levels).all()
    for row in (fitted.codebook.levels, fitted.codebook.thresholds):
        assert (np.diff(row) > 0).all()


def least_error(samples: Any, num_levels: int, weights: Any = None) -> Fraction:
    """The least squared error there is, by trying every partition in exact arithmetic."""
    weights = [1] * len(samples) if weights is None else weights
    points = sorted(zip(map(Fraction, samples), map(Fraction, weights), strict=True))
    best = None
    for cuts in itertools.combinations(range(1, len(points)), num_levels - 1):
        error = Fraction(0)
        for begin, end in itertools.pairwise((0, *cuts, len(points))):
            mass = sum(w for _, w in points[begin:end])
            if mass:
                center = sum(w * x for x, w in points[begin:end]) / mass
                error += sum(w * (x - center) ** 2 for x, w in points[begin:end])
        best = error if best is None else min(best, error)
    assert best is not None
    return best / sum(w for _, w in points)


def dynamic_program(samples: Array, num_levels: int) -> float:
    """The least squared error there is, over all ends of cells among the samples."""
    x = np.sort(samples.astype(np.float32)).astype(np.longdouble)
    x = x - np.median(x)
    first, second = (np.append(np.longdouble(0), np.cumsum(x**k)) for k in (1, 2))
    best = np.full((num_levels + 1, x.size + 1), np.inf)
    best[0, 0] = 0
    for end in range(1, x.size + 1):
        mass = np.arange(end, 0, -1)
        cost = second[end] - second[:end] - (first[end] - first[:end]) ** 2 / mass
        best[1:, end] = (best[:-1, :end] + cost.astype(np.float64)).min(axis=1)
    return float(best[-1, -1]) / x.size


def k_means(samples: Array, num_levels: int, restarts: int) -> float:
    """The best of many runs of Lloyd's algorithm from random samples."""
    x = np.sort(samples.astype(np.float32).astype(np.float64))
    rng = np.random.default_rng(1)
    best = math.inf
    for _ in range(restarts):
        levels = np.sort(rng.choice(x, num_levels, replace=False))
        for _ in range(100):
            code = np.searchsorted((levels[:-1] + levels[1:]) / 2, x)
            count = np.bincount(code, minlength=num_levels)
            total = np.bincount(code, x, num_levels)
            moved = np.where(count > 0, total / np.maximum(count, 1), levels)
            if np.array_equal(moved, levels):
                break
            levels = np.sort(moved)
        best = min(best, float(((x - levels[code]) ** 2).mean()))
    return best


small = st.lists(st.integers(-50, 50), min_size=3, max_size=9)


@given(samples=small, num_levels=st.integers(2, 4))
def test_few_samples_have_the_least_error(samples: list[int], num_levels: int) -> None:
    assume(len(set(samples)) >= num_levels)
    fitted = fit_samples(samples, num_levels)
    check(fitted, samples)
    assert fitted.distortion == pytest.approx(float(least_error(samples, num_levels)), abs=1e-12)


@given(
    pairs=st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 20)), min_size=3, max_size=9),
    num_levels=st.integers(2, 4),
)
def test_few_weighted_samples_have_the_least_error(
    pairs: list[tuple[int, int]], num_levels: int
) -> None:
    pairs = [(x, w) for x, w in pairs if w]
    assume(len({x for x, _ in pairs}) >= num_levels)
    samples, weights = zip(*pairs, strict=True)
    fitted = fit_samples(samples, num_levels, weights=weights)
    check(fitted, samples, weights)
    error = float(least_error(samples, num_levels, weights))
    assert fitted.distortion == pytest.approx(error, abs=1e-12)
    # A weight is a number of repetitions.
    repeated = fit_samples(np.repeat(samples, weights), num_levels)
    assert repeated.exact_levels == fitted.exact_levels
    assert repeated.distortion == fitted.distortion


@given(samples=small, half=st.integers(1, 2))
def test_levels_with_a_zero_have_the_least_error_on_magnitudes(
    samples: list[int], half: int
) -> None:
    assume(len(set(samples)) > 1)
    points = sorted(abs(x) for x in samples)
    errors = []
    for cut in range(1, len(points) - half + 1):
        if points[cut - 1] == points[cut]:
            continue
        zero = sum(Fraction(x) ** 2 for x in points[:cut])
        errors.append(zero + least_error(points[cut:], half) * (len(points) - cut))
    try:
        fitted = fit_samples(samples, 2 * half + 1, symmetric=True)
    except ValueError as error:
        assert "num_levels must be" in str(error)  # noqa: PT017
        return
    check(fitted, samples)
    assert fitted.distortion == pytest.approx(float(min(errors)) / len(points), abs=1e-12)


@given(samples=small, half=st.integers(1, 2))
def test_symmetric_levels_have_the_least_error_on_magnitudes(
    samples: list[int], half: int
) -> None:
    magnitudes = [abs(x) for x in samples]
    assume(0 not in magnitudes and len(set(magnitudes)) >= half)
    assume(len(set(samples)) > 1)
    fitted = fit_samples(samples, 2 * half, symmetric=True)
    check(fitted, samples)
    error = float(least_error(magnitudes, half))
    assert fitted.distortion == pytest.approx(error, abs=1e-12)


def heavy(name: str, size: int) -> Array:
    if name == "cauchy":
        return np.random.default_rng(0).standard_cauchy(size)
    if name == "t2":
        return np.random.default_rng(0).standard_t(2, size)
    if name == "fifth power":
        return np.random.default_rng(0).standard_normal(size) ** 5
    far = np.random.default_rng(0).standard_normal(size)
    far[: size // 3] = far[: size // 3] / 10 + 40
    return far


@pytest.mark.parametrize("name", ["cauchy", "t2", "fifth power", "two clusters"])
@pytest.mark.parametrize("num_levels", [2, 8])
def test_many_samples_have_almost_the_least_error(name: str, num_levels: int) -> None:
    samples = heavy(name, 2500)
    fitted = fit_samples(samples, num_levels)
    check(fitted, samples)
    least = dynamic_program(samples, num_levels)
    assert least * (1 - 1e-9) <= fitted.distortion <= least * (1 + 1e-5)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("num_levels", [4, 15, 16])
def test_cauchy_against_k_means(num_levels: int, symmetric: bool) -> None:
    samples = heavy("cauchy", 10_000)
    start = time.perf_counter()
    fitted = fit_samples(samples, num_levels, symmetric=symmetric)
    assert time.perf_counter() - start < 5
    check(fitted, samples)
    if not symmetric:
        assert fitted.distortion <= k_means(samples, num_levels, 30) * (1 + 1e-9)


@pytest.mark.parametrize("num_levels", [16, 64])
def test_gaussian_samples_against_the_law_and_k_means(num_levels: int) -> None:
    samples = np.random.default_rng(0).standard_normal(20_000)
    fitted = fit_samples(samples, num_levels)
    check(fitted, samples)
    levels = np.array(fit("norm", num_levels).exact_levels)
    code = np.searchsorted((levels[:-1] + levels[1:]) / 2, samples)
    assert fitted.distortion < ((samples - levels[code]) ** 2).mean()
    assert fitted.distortion < k_means(samples, num_levels, 10)


def test_a_million_samples() -> None:
    samples = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    start = time.perf_counter()
    fitted = fit_samples(samples, 16)
    assert time.perf_counter() - start < 10
    exact = fit("norm", 16)
    assert fitted.certificate.converged
    assert np.array(fitted.exact_levels) == pytest.approx(exact.exact_levels, abs=0.03)
    assert fitted.distortion == pytest.approx(exact.distortion, rel=0.01)


@given(seed=st.integers(0, 2**32 - 1), num_levels=st.integers(2, 20), symmetric=st.booleans())
def test_order_does_not_matter(seed: int, num_levels: int, symmetric: bool) -> None:
    rng = np.random.default_rng(seed)
    # Rounding gives repeated values.
    samples, weights = rng.standard_normal(200).round(1), 10.0 ** rng.uniform(-12, 12, 200)
    order = rng.permutation(200)
    # Half of an even number of symmetric levels may not meet at zero.
    assume(not symmetric or num_levels % 2 == 1)
    one = fit_samples(samples, num_levels, weights=weights, symmetric=symmetric)
    other = fit_samples(samples[order], num_levels, weights=weights[order], symmetric=symmetric)
    assert one.codebook.levels == other.codebook.levels
    assert one.exact_levels == other.exact_levels
    assert one.distortion == other.distortion
    assert one.certificate == other.certificate


@given(
    seed=st.integers(0, 2**32 - 1),
    num_levels=st.integers(2, 16),
    exponent=st.integers(-60, 60),
    sign=st.sampled_from([-1.0, 1.0]),
)
def test_scaling(seed: int, num_levels: int, exponent: int, sign: float) -> None:
    samples = np.random.default_rng(seed).standard_t(3, 300).astype(np.float32)
    factor = sign * 2.0**exponent
    one, other = fit_samples(samples, num_levels), fit_samples(factor * samples, num_levels)
    levels = np.sort(factor * np.array(one.exact_levels))
    if sign > 0:  # A power of two changes no digit.
        assert (np.array(other.exact_levels) == levels).all()
    assert np.array(other.exact_levels) == pytest.approx(levels, rel=1e-9, abs=1e-9 * abs(factor))
    assert other.distortion == pytest.approx(factor**2 * one.distortion, rel=1e-9)


@given(seed=st.integers(0, 2**32 - 1), num_levels=st.integers(2, 16), by=st.integers(-4096, 4096))
def test_translation(seed: int, num_levels: int, by: int) -> None:
    # On a grid that float32 holds before and after.
    samples = np.random.default_rng(seed).integers(-4000, 4000, 300) / 1024
    one, other = fit_samples(samples, num_levels), fit_samples(samples + by, num_levels)
    assert other.distortion == pytest.approx(one.distortion, rel=1e-9)
    assert np.array(other.exact_levels) - by == pytest.approx(np.array(one.exact_levels), abs=1e-9)


def test_far_from_zero() -> None:
    samples = 3e6 + np.random.default_rng(0).integers(0, 1000, 5000)
    fitted = fit_samples(samples, 8)
    check(fitted, samples)
    assert fitted.distortion == pytest.approx(1000**2 / 12 / 64, rel=0.02)


def test_as_many_levels_as_samples() -> None:
    samples = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    fitted = fit_samples(samples, 256)
    assert fitted.codebook.levels == tuple(np.sort(samples).tolist())
    assert fitted.distortion < 1e-30
    assert fitted.certificate.entropy == pytest.approx(8)


def test_a_distant_sample_costs_one_level() -> None:
    # Sums from one end to the other would lose all other samples beside it.
    bulk = np.random.default_rng(0).standard_normal(20_000).astype(np.float32).astype(np.float64)
    levels = np.array(fit_samples(np.append(bulk, -3e37), 9).exact_levels)
    assert levels[0] == np.float32(-3e37)
    code = np.abs(bulk[:, None] - levels[1:]).argmin(axis=1)
    centroids = [bulk[code == k].mean() for k in range(8)]
    assert levels[1:] == pytest.approx(centroids, rel=1e-12, abs=1e-12)
    error = ((bulk - levels[1:][code]) ** 2).mean()
    assert error == pytest.approx(fit_samples(bulk, 8).distortion, rel=1e-4)


def test_samples_and_weights_of_all_magnitudes() -> None:
    rng = np.random.default_rng(0)
    samples = np.concatenate([rng.standard_normal(3000), [-1e30, 2e30, 3e37, -1e-40]])
    check(fit_samples(samples, 5), samples)
    samples = rng.standard_normal(3000)
    weights = np.float32(10.0 ** rng.uniform(-30, 30, 3000))
    check(fit_samples(samples, 16, weights=weights), samples, weights)


@pytest.mark.parametrize("num_levels", [3, 4, 9, 16])
def test_symmetric_fits(num_levels: int) -> None:
    samples = np.random.default_rng(0).standard_normal(4000) + 0.3
    fitted = fit_samples(samples, num_levels, symmetric=True)
    check(fitted, samples)
    both = fit_samples(np.concatenate([samples, -samples]), num_levels)
    assert fitted.distortion == pytest.approx(both.distortion, rel=2e-3)
    assert fitted.distortion > fit_samples(samples, num_levels).distortion
    if num_levels % 2:
        assert fitted.codebook.levels[num_levels // 2] == 0.0
    assert fit_samples([-1.0, 1.0], 2, symmetric=True).exact_levels == (-1.0, 1.0)


@pytest.mark.parametrize("odd", [False, True])
def test_a_bad_start_leaves_no_level_dead(odd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(0).standard_normal(3000)

    def far(points: Array, shares: Array, shape: Any) -> Array:
        return np.linspace(points[-1] + 1, points[-1] + 2, shape.free)

    monkeypatch.setattr(lloyd_max, "_start", far)
    # All at the top: with a level at zero, the highest samples still reach the others.
    fitted = fit_samples(samples, 16 - odd, symmetric=odd)
    check(fitted, samples)
    monkeypatch.undo()
    assert fitted.distortion < 1.3 * fit_samples(samples, 16 - odd, symmetric=odd).distortion


@pytest.mark.parametrize(
    "samples",
    [torch.arange(9.0), list(range(9)), tuple(range(9)), np.arange(9, dtype=np.uint8)],
    ids=["torch", "list", "tuple", "uint8"],
)
def test_what_samples_may_be(samples: Any) -> None:
    assert fit_samples(samples, 3).exact_levels == pytest.approx((1.0, 4.0, 7.0))


def test_recipe_and_provenance() -> None:
    samples = np.array([1.5, 2.5, -3.25], dtype=np.float64)
    weights = np.array([1, 2, 0])
    codebook = fit_samples(samples, 2, weights=weights, source="layer 3, keys").codebook
    assert codebook.name == "samples_2"
    assert codebook.recipe.distribution == "samples"
    assert codebook.recipe.weighted
    assert codebook.provenance.source == "layer 3, keys"
    raw = samples.astype(np.float32).tobytes() + weights.astype(np.float32).tobytes()
    assert codebook.provenance.data_sha256 == hashlib.sha256(raw).hexdigest()
    assert [name for name, _ in codebook.provenance.versions] == ["kvq", "numpy", "scipy"]
    assert fit_samples(samples, 2, name="mine").codebook.name == "mine"
    assert not fit_samples(samples, 2).codebook.recipe.weighted


many = [0.0] * 1000 + [1.0] * 3


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        # What became NaN elsewhere, or never ended.
        (many, {"num_levels": 16}, "num_levels must be at most .*, got 16 for 2 distinct samples"),
        ([1, 2, 3], {"num_levels": 4}, "num_levels must be at most .*, got 4 for 3 distinct"),
        ([], {}, "samples must not be empty"),
        ([2.5] * 10, {}, "samples must not all be equal, got only 2.5"),
        ([1.0, math.nan, 2.0], {}, "samples must be finite as float32, got nan at 1"),
        ([1.0, 2.0, math.inf], {}, "samples must be finite as float32, got inf at 2"),
        ([1.0, 2.0, 1e39], {}, "samples must be finite as float32, got 1e.39 at 2"),
        ([[1.0, 2.0], [3.0, 4.0]], {}, "samples must have one dimension, got 2"),
        (3.0, {}, "samples must have one dimension, got 0"),
        ([1.0, -1.0, 1.0], {"num_levels": 4, "symmetric": True}, "for 1 distinct magnitudes"),
        ([1, 2, 3], {"num_levels": 1}, "num_levels must be 2 to 256, got 1"),
        ([1, 2, 3], {"num_levels": 257}, "num_levels must be 2 to 256, got 257"),
        ([1, 2, 3], {"weights": [1, 1]}, "weights must be as many as samples, 3, got 2"),
        ([1, 2, 3], {"weights": [1, -1, 1]}, "weights must not be negative, got -1"),
        ([1, 2, 3], {"weights": [0, 0, 0]}, "weights must not all be zero"),
        ([1, 2, 3], {"weights": [1, math.nan, 1]}, "weights must be finite as float32, got nan"),
        ([1, 2, 3], {"weights": [1, math.inf, 1]}, "weights must be finite as float32, got inf"),
        ([1, 2, 3], {"weights": [[1, 1, 1]]}, "weights must have one dimension, got 2"),
        ([1, 2, 3], {"weights": []}, "weights must not be empty"),
        ([1, 2, 3], {"weights": [0, 1, 0]}, "samples must not all be equal, got only 2.0"),
        ([1, 2, 3], {"weights": [1, 1e-50, 0]}, "samples must not all be equal, got only 1.0"),
        ([1, 2, 3], {"name": "a b"}, "name must be made of"),
        ([-1, 1, 1.1], {"num_levels": 3, "symmetric": True}, "num_levels must be even for a symm"),
        (many, {"num_levels": 4, "symmetric": True}, "num_levels must be odd for a symmetric"),
        (1 + np.arange(1, 4) * 2.0**-23, {"num_levels": 3}, "distinct as float32"),
    ],
)
def test_refusals(samples: Any, options: dict[str, Any], message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        fit_samples(samples, **{"num_levels": 2, **options})
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("samples", [["a", "b"], [1j, 2], [True, False], [None, 1.0]])
def test_samples_that_are_no_numbers(samples: Any) -> None:
    with pytest.raises(TypeError, match="samples must be real numbers"):
        fit_samples(samples, 2)
    with pytest.raises(TypeError, match="weights must be real numbers"):
        fit_samples([1.0, 2.0], 2, weights=samples)
