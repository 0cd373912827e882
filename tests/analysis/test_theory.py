"""The predictions against published and independently computed values.

The tables are those of the theory of scalar quantization on the sphere: quadrature at 34 digits
for the exact ones, Monte Carlo at head size 128 for those that say so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate, special

from kvq.analysis.theory import (
    Kind,
    codebook_moments,
    limit,
    predict,
    rate_distortion,
    truncation_gain,
)
from kvq.codebooks import CODEBOOKS, Codebook
from kvq.modes import MODES, mode
from kvq.reference.laws import law, sphere
from kvq.reference.lloyd_max import fit
from kvq.rounding import Rounding

#: Distortion of Lloyd-Max for N(0,1), by bits.
GAUSSIAN = {
    1: 0.363380227632418657,
    2: 0.117481847829329287,
    3: 0.0345477607885037303,
    4: 0.00950100800819188611,
}
#: Lloyd-Max for the sphere law itself, by head size and bits.
SPHERE = {
    32: (0.3533565676, 0.1116003203, 0.0322610657, 0.0087738256),
    64: (0.3583873608, 0.1145257568, 0.0333908341, 0.0091315176),
    128: (0.3608885937, 0.1160000703, 0.0339659258, 0.0093147880),
    256: (0.3621356178, 0.1167400388, 0.0342560036, 0.0094075294),
    512: (0.3627582254, 0.1171107149, 0.0344016727, 0.0094541766),
}
#: The N(0,1) codebook of 4 bits under the sphere law.
GAUSSIAN_ON_SPHERE = {
    32: 0.0089266660,
    64: 0.0091711638,
    128: 0.0093248616,
    256: 0.0094100671,
    512: 0.0094548134,
}


@pytest.mark.parametrize(("bits", "distortion"), GAUSSIAN.items())
def test_gaussian_codebooks_have_the_known_distortion(bits: int, distortion: float) -> None:
    moments = codebook_moments(CODEBOOKS[f"gaussian_{2**bits}"], law("norm"))
    assert moments.distortion == pytest.approx(distortion, rel=1e-12)
    # At a fixed point of Lloyd-Max both moments are 1 - D; the levels are rounded to float32.
    assert moments.cross == pytest.approx(1 - distortion, abs=1e-7)
    assert moments.square == pytest.approx(1 - distortion, abs=1e-7)


@pytest.mark.parametrize(("head_dim", "distortion"), GAUSSIAN_ON_SPHERE.items())
def test_gaussian_codebook_on_the_sphere(head_dim: int, distortion: float) -> None:
    found = predict(mode("lloyd4_unit"), head_dim)
    assert found.kind is Kind.EXACT
    # The shipped levels are rounded to float32, which moves the tenth digit.
    assert found.relative_error == pytest.approx(distortion, abs=5e-10)
    assert found.relative_error_se == found.gain_se == 0.0


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", SPHERE)
def test_codebooks_of_the_sphere_are_better_by_what_the_table_says(
    head_dim: int, bits: int
) -> None:
    codebook = fit(f"sphere({head_dim})", 2**bits).codebook
    fitted = mode(f"lloyd{bits}_unit").with_codebook(codebook)
    assert predict(fitted, head_dim).relative_error == pytest.approx(
        SPHERE[head_dim][bits - 1], abs=5e-10
    )
    assert predict(mode(f"lloyd{bits}_unit"), head_dim).relative_error > SPHERE[head_dim][bits - 1]


@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_moments_against_quadrature(head_dim: int) -> None:
    codebook = CODEBOOKS["signed_max_8"]
    levels, cuts = np.array(codebook.levels), np.array(codebook.thresholds)
    radius = np.sqrt(head_dim)

    def density(z: float) -> float:
        return float((1 - z * z / head_dim) ** ((head_dim - 3) / 2))

    edges = [-radius, *cuts, radius]
    pieces = list(zip(edges, edges[1:], levels, strict=False))
    mass = 2 * integrate.quad(density, 0, radius)[0]
    squared = sum(
        integrate.quad(lambda z, c=c: (z - c) ** 2 * density(z), a, b)[0] for a, b, c in pieces
    )
    crossed = sum(integrate.quad(lambda z, c=c: z * c * density(z), a, b)[0] for a, b, c in pieces)
    moments = codebook_moments(codebook, sphere(head_dim))
    assert moments.distortion == pytest.approx(squared / mass, rel=1e-9)
    assert moments.cross == pytest.approx(crossed / mass, rel=1e-9)
    assert moments.distortion == pytest.approx(1 - 2 * moments.cross + moments.square, rel=1e-11)


def test_thresholds_beyond_the_sphere_hold_nothing() -> None:
    book = CODEBOOKS["gaussian_4"]
    wide = Codebook(
        "wide",
        (*book.levels, 9.0),
        (*book.thresholds, 8.0),
        replace(book.recipe, num_levels=5, symmetric=False),
        book.provenance,
    )
    assert codebook_moments(wide, sphere(16)) == pytest.approx(codebook_moments(book, sphere(16)))


#: relMSE and gain for large heads, by fit: functions of the distortion D.
LIMITS = {
    "_unit": (lambda d: d, lambda d: 1 - d),
    "": (lambda d: d, lambda d: 1 - d),
    "_norm_match": (lambda d: 2 * (1 - (1 - d) ** 0.5), lambda d: (1 - d) ** 0.5),
    "_unbiased": (lambda d: d / (1 - d), lambda d: 1.0),
}


@pytest.mark.parametrize("bits", GAUSSIAN)
@pytest.mark.parametrize("ending", LIMITS)
def test_limits_for_large_heads(ending: str, bits: int) -> None:
    found = limit(mode(f"lloyd{bits}{ending}"))
    assert found is not None
    error, gain = (law(GAUSSIAN[bits]) for law in LIMITS[ending])
    assert found.relative_error == pytest.approx(error, rel=1e-6)
    assert found.gain == pytest.approx(gain, rel=1e-6)


def test_limits_of_the_table() -> None:
    table = {
        "_norm_match": (0.404231, 0.121151, 0.034851, 0.009524),
        "_unbiased": (0.570796, 0.133121, 0.035784, 0.009592),
    }
    for ending, row in table.items():
        for bits, value in enumerate(row, start=1):
            found = limit(mode(f"lloyd{bits}{ending}"))
            assert found is not None
            assert found.relative_error == pytest.approx(value, abs=6e-7)


def test_modes_without_a_law_have_no_limit() -> None:
    for name in ("int8", "fp8", "int4", "smax4", "affine4"):
        assert limit(mode(name)) is None
        assert predict(mode(name), 32, rows=16).kind is Kind.MONTE_CARLO


@pytest.mark.parametrize(
    ("name", "error", "tolerance"),
    [
        # Least squares at head size 128, Monte Carlo themselves: to the digits that are given.
        ("lloyd1", 0.36073, 2e-4),
        ("lloyd2", 0.11539, 2e-4),
        ("lloyd3", 0.03352, 5e-5),
        ("lloyd4", 0.00917, 2e-5),
        ("lloyd2_unbiased", 0.13079, 3e-4),
        ("int4", 0.00997, 1.5e-4),
        ("int8", 4.2e-5, 4e-7),
    ],
)
def test_monte_carlo_at_head_size_128(name: str, error: float, tolerance: float) -> None:
    found = predict(mode(name), 128, rows=4096)
    assert found.kind is Kind.MONTE_CARLO
    assert abs(found.relative_error - error) < tolerance + 4 * found.relative_error_se
    assert 0 < found.relative_error_se < 0.005 * error


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_what_holds_between_the_fits(bits: int) -> None:
    found = {
        ending: predict(mode(f"lloyd{bits}{ending}"), 64, rows=2048)
        for ending in ("", "_norm_match", "_unbiased")
    }
    exact = predict(mode(f"lloyd{bits}_unit"), 64)
    # The rows are the same for all three, so these hold without statistics.
    assert found[""].relative_error < found["_norm_match"].relative_error
    assert found[""].relative_error < found["_unbiased"].relative_error
    assert found[""].gain == pytest.approx(1 - found[""].relative_error, abs=1e-6)
    assert found["_unbiased"].gain == pytest.approx(1.0, abs=1e-6)
    assert found[""].relative_error < exact.relative_error + 4 * found[""].relative_error_se


def test_exact_law_against_monte_carlo() -> None:
    # The same mode through the quantizer: a norm-matched codebook without its fit.
    for bits in (1, 2, 3, 4):
        unit = mode(f"lloyd{bits}_unit")
        exact = predict(unit, 64)
        sampled = _monte_carlo(unit.name, 64)
        assert abs(sampled[0] - exact.relative_error) < 4 * sampled[1]
        assert abs(sampled[2] - exact.gain) < 4 * sampled[3]


def _monte_carlo(name: str, head_dim: int) -> tuple[float, float, float, float]:
    from kvq import reference
    from kvq.analysis.samples import gaussian

    x = gaussian(8192, 1, head_dim, 5)[:, 0]
    x_hat = reference.dequantize(*reference.quantize(x, MODES[name]), MODES[name], head_dim)
    exact, approximate = x.double().numpy(), x_hat.double().numpy()
    energy = (exact**2).sum(1)
    error = ((approximate - exact) ** 2).sum(1) / energy
    gain = (approximate * exact).sum(1) / energy
    root = len(x) ** 0.5
    return error.mean(), error.std(ddof=1) / root, gain.mean(), gain.std(ddof=1) / root


def test_truncation_of_int8_shrinks_as_measured() -> None:
    # The step of an absmax row of 128 Gaussians is 0.0218 of their deviation: g = 0.99128.
    truncated = mode("int8").with_rounding(Rounding.TOWARD_ZERO)
    found = predict(truncated, 128, rows=4096)
    assert found.gain == pytest.approx(0.99128, abs=1e-4)
    assert found.relative_error == pytest.approx(1.67e-4, rel=0.01)
    largest = integrate.quad(
        lambda m: 1 - special.erf(m / 2**0.5) ** 128, 0, 12, epsabs=0, epsrel=1e-10
    )[0]
    assert truncation_gain(largest / 127) == pytest.approx(found.gain, abs=3e-4)


def test_truncation_of_int4_is_a_floor() -> None:
    truncated = mode("int4").with_rounding(Rounding.TOWARD_ZERO)
    found = predict(truncated, 128, rows=4096)
    assert found.gain == pytest.approx(0.990, abs=1e-3)
    assert found.relative_error == pytest.approx(0.0402, rel=0.02)


def test_no_mode_passes_the_rate_distortion_bound() -> None:
    for each in MODES.values():
        assert predict(each, 64, rows=512).relative_error > rate_distortion(each.bits)
