"""Lloyd-Max fits of laws: published and exact values, identities, what is shipped."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.special import ndtr

from kvq.codebooks import CODEBOOKS, Codebook
from kvq.reference import lloyd_max
from kvq.reference.lloyd_max import (
    LloydMaxFit,
    distortion_rate,
    fit,
    gaussian_distortion,
    law,
    panter_dite,
    signed_max,
    sphere,
)

# theory.md 3a, computed with mpmath at 34 digits: mean squared error, entropy in bits, and the
# ratio to Panter-Dite.
GAUSSIAN = {
    2: (0.363380227632418657, 1.0, 0.5342453854),
    3: (0.190174039247901479, 1.53578934831, 0.629090658),
    4: (0.117481847829329287, 1.91109876622, 0.6908921322),
    8: (0.0345477607885037303, 2.82486521427, 0.8126796286),
    16: (0.00950100800819188611, 3.76532847252, 0.8939827628),
    32: (0.00250466835567479914, 4.72978353909, 0.9426916952),
    256: (0.0000411850828671174858, 7.69411910646, 0.9920632693),
}
# theory.md 3a: the positive centroids and the thresholds that are not negative.
LEVELS = {
    2: ([0.7978845608028653], [0.0]),
    3: ([1.2240063619249615], [0.6120031809624807]),
    4: ([0.4527800346364920, 1.5104176084990954], [0.0, 0.9815988215677937]),
    8: (
        [0.2450941789442216, 0.7560052812058772, 1.3439092785049998, 2.1519457045369872],
        [0.0, 0.5005497300750494, 1.0499572798554385, 1.7479274915209935],
    ),
    16: (
        [
            0.1283950298511470,
            0.3880482994902901,
            0.6567591185324633,
            0.9423404564869613,
            1.2562311973471771,
            1.6180463860218826,
            2.0690172265313865,
            2.7325895709951630,
        ],
        [
            0.0,
            0.2582216646707186,
            0.5224037090113767,
            0.7995497875097123,
            1.0992858269170692,
            1.4371387916845298,
            1.8435318062766346,
            2.4008033987632748,
        ],
    ),
}
# theory.md 3d: mean squared error of 1 to 4 bits on the sphere.
SPHERE = {
    32: (0.3533565676, 0.1116003203, 0.0322610657, 0.0087738256),
    64: (0.3583873608, 0.1145257568, 0.0333908341, 0.0091315176),
    128: (0.3608885937, 0.1160000703, 0.0339659258, 0.0093147880),
    256: (0.3621356178, 0.1167400388, 0.0342560036, 0.0094075294),
    512: (0.3627582254, 0.1171107149, 0.0344016727, 0.0094541766),
}
# theory.md 3d: 4 bits on the sphere with the levels of N(0,1).
MISMATCHED = {
    32: 0.0089266660,
    64: 0.0091711638,
    128: 0.0093248616,
    256: 0.0094100671,
    512: 0.0094548134,
}
SOME = (5, 6, 7, 9, 11, 13, 15, 17, 24, 31, 33, 48, 64, 65, 100, 127, 128, 129, 200, 255)


def check_certificate(fitted: LloydMaxFit, tolerance: float) -> None:
    certificate = fitted.certificate
    assert certificate.converged
    assert certificate.stationarity < tolerance
    assert abs(certificate.mean) < tolerance
    assert abs(certificate.projection) < tolerance
    assert abs(certificate.variance) < tolerance
    assert certificate.smallest_probability > 0


def check_gaussian_fixed_point(fitted: LloydMaxFit) -> None:
    """The identities, from closed forms of N(0,1) and nothing that made the fit."""
    levels = np.array(fitted.exact_levels)
    edges = np.concatenate([[-np.inf], (levels[:-1] + levels[1:]) / 2, [np.inf]])
    upper = edges[:-1] > 0
    mass = np.where(upper, -np.diff(ndtr(-edges)), np.diff(ndtr(edges)))
    first = -np.diff(np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi))
    assert (np.diff(levels) > 0).all()
    assert (levels == -levels[::-1]).all()
    assert mass.min() > 0
    # A difference of densities loses digits of a thin cell, and no others.
    assert np.abs(first - levels * mass).max() < 5e-16
    distortion = 1 - 2 * (levels @ first) + levels**2 @ mass
    assert abs(levels @ mass) < 1e-14
    assert levels @ first == pytest.approx(levels**2 @ mass, abs=1e-13)
    assert levels**2 @ mass == pytest.approx(1 - fitted.distortion, abs=1e-13)
    assert fitted.distortion == pytest.approx(distortion, abs=1e-13)
    assert fitted.certificate.entropy == pytest.approx(-(mass @ np.log2(mass)), rel=1e-12)
    assert fitted.certificate.smallest_probability == pytest.approx(mass.min(), rel=1e-10)


@pytest.mark.parametrize("num_levels", GAUSSIAN)
def test_gaussian_errors_are_exact(num_levels: int) -> None:
    distortion, entropy, ratio = GAUSSIAN[num_levels]
    fitted = fit("norm", num_levels)
    assert fitted.distortion == pytest.approx(distortion, rel=1e-12)
    assert fitted.relative_distortion == fitted.distortion
    assert gaussian_distortion(num_levels) == fitted.distortion
    assert fitted.certificate.entropy == pytest.approx(entropy, rel=1e-11)
    assert fitted.distortion / panter_dite(num_levels, "norm") == pytest.approx(ratio, rel=1e-9)
    check_certificate(fitted, 1e-12)
    check_gaussian_fixed_point(fitted)


@pytest.mark.parametrize("num_levels", LEVELS)
def test_gaussian_levels_are_exact(num_levels: int) -> None:
    levels, thresholds = LEVELS[num_levels]
    fitted = fit("norm", num_levels)
    exact = np.array(fitted.exact_levels)
    assert exact[exact > 0] == pytest.approx(levels, rel=4e-15)
    middle = (exact[:-1] + exact[1:]) / 2
    assert middle[middle >= 0] == pytest.approx(thresholds, rel=4e-15)
    assert fitted.codebook.levels == tuple(exact.astype(np.float32).tolist())
    assert fitted.codebook.thresholds == tuple(middle.astype(np.float32).tolist())


@pytest.mark.parametrize("num_levels", SOME)
def test_gaussian_identities(num_levels: int) -> None:
    fitted = fit("norm", num_levels)
    check_certificate(fitted, 1e-12)
    check_gaussian_fixed_point(fitted)


@pytest.mark.slow
@pytest.mark.parametrize("num_levels", sorted(set(range(2, 257)) - set(SOME) - set(GAUSSIAN)))
def test_gaussian_identities_of_every_size(num_levels: int) -> None:
    test_gaussian_identities(num_levels)


def test_two_levels_in_closed_form() -> None:
    # theory.md 3a: c = sqrt(2/pi), D = 1 - 2/pi.
    fitted = fit("norm", 2)
    assert fitted.exact_levels[1] == pytest.approx(math.sqrt(2 / math.pi), rel=1e-15)
    assert fitted.distortion == pytest.approx(1 - 2 / math.pi, rel=1e-15)


def test_published_values() -> None:
    # theory.md 3a: Max 1960 printed 0.3634 and 0.1175; where the tables that are copied from him
    # read 0.03454, 0.009497 and 0.002499, the right digits are these.
    printed = {2: "0.3634", 4: "0.1175", 8: "0.03455", 16: "0.009501", 32: "0.002505"}
    for num_levels, digits in printed.items():
        assert f"{gaussian_distortion(num_levels):.4g}" == f"{float(digits):.4g}"


def test_bounds() -> None:
    # theory.md 3c.
    for bits, ratio in ((1, 1.4535), (2, 1.8797), (3, 2.2111), (4, 2.4323)):
        rate = distortion_rate(2**bits)
        assert rate == 4.0**-bits
        assert gaussian_distortion(2**bits) / rate == pytest.approx(ratio, abs=5e-5)
    for num_levels in (2, 3, 16, 200):
        distortion = gaussian_distortion(num_levels)
        assert distortion_rate(num_levels) < distortion < panter_dite(num_levels, "norm")
    assert distortion_rate(4, variance=9.0) == 9 / 16


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("norm", math.sqrt(3) * math.pi / 2),
        ("norm(loc=-2, scale=3)", 9 * math.sqrt(3) * math.pi / 2),
        ("laplace", 9.0),
        ("uniform", 1 / 12),
        ("expon", 9 / 4),
        ("sphere(3)", 1.0),
    ],
)
def test_panter_dite_in_closed_form(text: str, value: float) -> None:
    assert panter_dite(10, text) == pytest.approx(value / 100, rel=1e-8)


@pytest.mark.parametrize("head_dim", SPHERE)
def test_sphere_errors(head_dim: int) -> None:
    for bits, distortion in enumerate(SPHERE[head_dim], start=1):
        fitted = fit(sphere(head_dim), 2**bits)
        assert fitted.distortion == pytest.approx(distortion, abs=6e-11)
        assert fitted.codebook.symmetric
        check_certificate(fitted, 1e-12)


def test_sphere_levels() -> None:
    # theory.md 3d.
    levels = fit(sphere(128), 4).exact_levels
    assert levels[2:] == pytest.approx((0.45245325, 1.50519298), abs=5e-9)


@pytest.mark.parametrize("head_dim", MISMATCHED)
def test_gaussian_levels_on_the_sphere(head_dim: int) -> None:
    levels = np.array(fit("norm", 16).exact_levels)[8:]
    edges = [0.0, *(levels[:-1] + levels[1:]) / 2, math.sqrt(head_dim)]
    density = sphere(head_dim).density
    error = 2 * sum(
        quad(lambda x, c=c: float((x - c) ** 2 * density(np.array(x))), low, high)[0]
        for c, low, high in zip(levels, edges[:-1], edges[1:], strict=True)
    )
    assert error == pytest.approx(MISMATCHED[head_dim], abs=6e-11)
    assert error > fit(sphere(head_dim), 16).distortion


CATALAN = 0.915965594177219015
#: Two levels of a law that is symmetric about its mean: variance less squared mean deviation.
TWO_LEVELS = {
    "laplace": 1.0,
    "laplace(0.3)": 1.0,
    "logistic": math.pi**2 / 3 - (2 * math.log(2)) ** 2,
    "uniform": 1 / 48,
    "uniform(-1, 2)": 1 / 12,
    "t(df=3)": 3 - (2 * math.sqrt(3) / math.pi) ** 2,
    "hypsecant": (math.pi / 2) ** 2 - (4 * CATALAN / math.pi) ** 2,
    "dgamma(0.5)": 0.5,
    "arcsine": 1 / 8 - 1 / math.pi**2,
    "sphere(2)": 1 - 8 / math.pi**2,
    "norm(loc=3, scale=0.1)": 0.01 * (1 - 2 / math.pi),
}


@pytest.mark.parametrize("text", TWO_LEVELS)
def test_two_levels_of_other_laws(text: str) -> None:
    fitted = fit(text, 2)
    assert fitted.distortion == pytest.approx(TWO_LEVELS[text], rel=1e-12)
    check_certificate(fitted, 1e-12)


@pytest.mark.parametrize("num_levels", [2, 3, 7, 100])
def test_uniform_levels(num_levels: int) -> None:
    fitted = fit("uniform", num_levels)
    exact = (np.arange(num_levels) + 0.5) / num_levels
    assert np.array(fitted.exact_levels) == pytest.approx(exact, abs=1e-13)
    assert fitted.distortion == pytest.approx(1 / (12 * num_levels**2), rel=1e-12)
    assert fitted.certificate.entropy == pytest.approx(math.log2(num_levels), rel=1e-13)


def test_exponential_levels() -> None:
    # Without memory, the levels of N cells are those of N - 1, moved up by one step.
    three, four = (np.array(fit("expon", n).exact_levels) for n in (3, 4))
    assert np.diff(four[1:]) == pytest.approx(np.diff(three), abs=1e-13)


@pytest.mark.parametrize(
    ("text", "num_levels"),
    [
        ("t(df=3)", 16),
        ("gamma(0.5)", 16),
        ("beta(0.5, 0.5)", 5),
        ("lognorm(1)", 16),
        ("pareto(3)", 16),
        ("triang(0.3)", 9),
    ],
)
def test_laws_with_tails_kinks_and_poles(text: str, num_levels: int) -> None:
    fitted = fit(text, num_levels)
    check_certificate(fitted, 1e-12)
    levels = np.array(fitted.exact_levels)
    inner = (levels[:-1] + levels[1:]) / 2
    (low, high), density = law(text).support, law(text).density
    error = sum(
        quad(lambda x, c=c: (x - c) ** 2 * float(density(np.array(x))), a, b, limit=200)[0]
        for c, a, b in zip(levels, [low, *inner], [*inner, high], strict=True)
    )
    assert fitted.distortion == pytest.approx(error, rel=1e-7)


@pytest.mark.parametrize("text", ["t(df=3)", "gamma(0.5)"])
def test_many_levels_near_panter_dite(text: str) -> None:
    fitted = fit(text, 256)
    check_certificate(fitted, 1e-12)
    assert 0.95 < fitted.distortion / panter_dite(256, text) < 1


def test_scipy_and_text_are_one_law() -> None:
    assert fit(stats.norm(), 4) is fit("norm", 4) is fit(law("norm"), 4)


def test_scaling_a_law_scales_the_levels() -> None:
    one = np.array(fit("norm", 5).exact_levels)
    other = np.array(fit("norm(loc=3, scale=0.1)", 5).exact_levels)
    assert other == pytest.approx(3 + one / 10, abs=1e-14)


def test_a_symmetric_law_need_not_be_fitted_so() -> None:
    # One fixed point: from the whole line the same levels are reached (Fleischer 1964).
    free = fit("norm", 7, symmetric=False)
    assert np.array(free.exact_levels) == pytest.approx(
        np.array(fit("norm", 7).exact_levels), abs=1e-13
    )
    assert not free.codebook.recipe.symmetric
    assert fit("norm", 7).codebook.levels[3] == 0.0


@pytest.mark.parametrize("codebook", CODEBOOKS.values(), ids=str)
def test_what_ships_is_what_its_recipe_fits(codebook: Codebook) -> None:
    recipe = codebook.recipe
    fitted = fit(recipe.distribution, recipe.num_levels, symmetric=recipe.symmetric)
    assert fitted.codebook.levels == codebook.levels
    assert fitted.codebook.thresholds == codebook.thresholds
    assert fitted.codebook.recipe == recipe


@pytest.mark.parametrize("num_levels", [2, 4, 5, 8, 16])
def test_signed_max_certificate(num_levels: int) -> None:
    fitted = fit(signed_max(128), num_levels)
    check_certificate(fitted, 1e-12)
    assert fitted.relative_distortion == pytest.approx(
        fitted.distortion / signed_max(128).second_moment, rel=1e-15
    )


@pytest.mark.parametrize(("num_levels", "target"), [(4, 0.1170), (8, 0.0322), (16, 0.0081)])
def test_signed_max_on_gaussian_rows(num_levels: int, target: float) -> None:
    rows = torch.randn(
        20_000, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    codebook = CODEBOOKS[f"signed_max_{num_levels}"]
    levels, thresholds = (
        torch.tensor(row, dtype=torch.float64) for row in (codebook.levels, codebook.thresholds)
    )
    chosen = levels[torch.bucketize(rows / largest, thresholds, right=True)]
    # As it was fitted: within 4 standard errors of the exact value.
    error = (rows - largest * chosen).square().mean(dim=1)
    exact = fit(signed_max(128), num_levels).relative_distortion
    assert abs(error.mean() - exact) < 4 * error.std() / math.sqrt(len(error))
    # With the least-squares word, the relative error of the mode.
    word = (rows * chosen).sum(dim=1) / chosen.square().sum(dim=1)
    left = (rows - word[:, None] * chosen).square().sum(dim=1) / rows.square().sum(dim=1)
    assert left.mean() + 2 * left.std() / math.sqrt(len(left)) < target


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("norm", range(1, 9)), ("sphere(64)", (1, 4, 7)), ("sphere(1024)", (2, 3, 8))],
)
def test_no_level_is_dead(text: str, sizes: Iterable[int]) -> None:
    # A start over the whole support left most of 256 levels unused elsewhere.
    for bits in sizes:
        fitted = fit(text, 2**bits)
        levels = np.array(fitted.codebook.levels)
        assert levels.size == 2**bits
        assert (np.diff(levels) > 0).all()
        assert (levels == -levels[::-1]).all()
        assert fitted.certificate.smallest_probability > 1e-7
        assert fitted.certificate.converged


def test_256_levels_are_fast() -> None:
    start = time.perf_counter()
    lloyd_max._fit_law.__wrapped__(law("norm"), 256, True, None)
    assert time.perf_counter() - start < 5


def test_fits_are_remembered() -> None:
    # The second time takes no time and gives the same levels.
    first = fit("sphere(96)", 16)
    start = time.perf_counter()
    second = fit("sphere(96)", 16)
    assert time.perf_counter() - start < 1e-3
    assert second is first


def test_importing_fits_nothing() -> None:
    program = (
        "import kvq, sys; assert 'scipy' not in sys.modules; "
        "from kvq.reference import laws, lloyd_max as m; "
        "caches = (m._fit_law, laws.law, laws.sphere, laws.signed_max); "
        "assert not any(cache.cache_info().currsize for cache in caches)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_a_fit_that_stopped_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lloyd_max, "_NEWTON_STEPS", 1)
    fitted = lloyd_max._fit_law.__wrapped__(law("norm"), 64, True, None)
    assert not fitted.certificate.converged
    assert 1e-10 < fitted.certificate.stationarity < 1e-2
    assert abs(fitted.certificate.projection) > 1e-12


def test_lloyd_steps_where_newton_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_step(law: Any, state: Any, shape: Any) -> Any:
        return np.full_like(state.levels, np.nan)

    monkeypatch.setattr(lloyd_max, "_newton_step", no_step)
    fitted = lloyd_max._fit_law.__wrapped__(law("norm"), 4, True, None)
    assert fitted.certificate.converged
    assert fitted.certificate.iterations > 5
    assert fitted.distortion == pytest.approx(GAUSSIAN[4][0], rel=1e-12)


def test_name_recipe_and_provenance() -> None:
    codebook = fit("t(df=5)", 3).codebook
    assert codebook.name == "t_df_5_3"
    assert codebook.recipe.distribution == "t(df=5)"
    assert not codebook.recipe.weighted
    assert [name for name, _ in codebook.provenance.versions] == ["kvq", "numpy", "scipy"]
    assert codebook.provenance.data_sha256 == ""
    assert fit("t(df=5)", 3, name="mine").codebook.name == "mine"
    assert fit(signed_max(16), 3).codebook.recipe.weighted
    with pytest.raises(ValueError, match="name must be made of"):
        fit("norm", 3, name="not a name")


@pytest.mark.parametrize("num_levels", [1, 0, -4, 257])
def test_num_levels_out_of_range(num_levels: int) -> None:
    for call in (
        lambda: fit("norm", num_levels),
        lambda: panter_dite(num_levels, "norm"),
        lambda: distortion_rate(num_levels),
        lambda: gaussian_distortion(num_levels),
    ):
        with pytest.raises(ValueError, match=rf"num_levels must be 2 to 256, got {num_levels}"):
            call()


@pytest.mark.parametrize("num_levels", [4.0, True, "4"])
def test_num_levels_of_another_type(num_levels: Any) -> None:
    with pytest.raises(TypeError, match="num_levels must be an int"):
        fit("norm", num_levels)


def test_symmetric_levels_of_an_asymmetric_law() -> None:
    with pytest.raises(ValueError, match="symmetric must be False"):
        fit("expon", 4, symmetric=True)


@pytest.mark.parametrize("text", ["norm(loc=1e8)", "norm(scale=1e39)"])
def test_levels_that_float32_cannot_hold(text: str) -> None:
    with pytest.raises(ValueError, match="finite and distinct as float32"):
        fit(text, 16)


def test_certificates_are_values() -> None:
    certificate = fit("norm", 2).certificate
    with pytest.raises(dataclasses.FrozenInstanceError):
        certificate.converged = False  # type: ignore[misc]
