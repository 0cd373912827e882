"""The reference gives the known answers, and its inputs are the known ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvq import reference
from kvq.analysis.planted_rows import (
    KINDS,
    hash_counters,
    near_gaussian,
    planted_rows,
    random_rows,
    rows_of_kind,
    uniform,
)
from kvq.modes import RANDOM_HADAMARD, Mode
from kvq.reference.rounding import half_away
from tests.compare import assert_bit_exact
from tests.digests import DIGEST_MODES, INPUTS, digests, float32_rows, known, sha256


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("mode", DIGEST_MODES, ids=str)
def test_known_codes_words_and_values(mode: Mode, name: str, device: torch.device) -> None:
    assert digests(reference, mode, name, device) == known()[name][mode.name]


@pytest.mark.parametrize("name", INPUTS)
def test_known_rows(name: str, device: torch.device) -> None:
    assert sha256(float32_rows(name, device)) == known()[name]["rows"]["input"]


def test_every_answer_belongs_to_a_test() -> None:
    want = {"rows", *(mode.name for mode in DIGEST_MODES)}
    assert {name: set(answers) for name, answers in known().items()} == dict.fromkeys(INPUTS, want)


# ----------------------------------------------------------------------------------- the rows


def _murmur_finalizer(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


@pytest.mark.parametrize("seed", [0, 1, 0x9E3779B9, 0xFFFFFFFF])
def test_the_hash_in_integers_of_python(seed: int) -> None:
    counters = [0, 1, 2, 0xFFFF, 0xFFFFFFFF, 2**32, 2**40 + 12345, 2**62 + 1]
    want = [
        _murmur_finalizer(_murmur_finalizer((c >> 32) ^ seed ^ (c & 0xFFFFFFFF))) for c in counters
    ]
    assert hash_counters(torch.tensor(counters), seed).tolist() == want
    # The finalizer of MurmurHash3 is known: it takes 1 to this.
    assert _murmur_finalizer(1) == 0x514E28B7


def test_uniform_and_near_gaussian_moments() -> None:
    counters = torch.arange(2**16)
    u, z = uniform(counters, 0).double(), near_gaussian(counters, 0).double()
    assert (u >= 0).all()
    assert (u < 1).all()
    # n = 65,536, seed 0: five standard errors. The kurtosis of a sum of four uniforms is 3 - 0.3.
    n = len(counters)
    assert abs(u.mean() - 0.5) <= 5 * (1 / 12 / n) ** 0.5
    assert abs(z.mean()) <= 5 / n**0.5
    assert abs(z.square().mean() - 1) <= 5 * (1.7 / n) ** 0.5
    assert abs(z.pow(4).mean() - 2.7) <= 0.1


@pytest.mark.parametrize("make", [planted_rows, random_rows])
def test_a_row_depends_on_its_index_alone(
    make: Callable[..., torch.Tensor], device: torch.device
) -> None:
    whole = make(0, 3 * len(KINDS), 64)
    for start, count in ((0, 1), (7, 30), (len(KINDS), 5), (59, 1)):
        part = make(start, count, 64, device=device)
        assert_bit_exact(part.cpu(), whole[start : start + count])
    far = make(2**35, 2, 64)
    assert not torch.equal(far, whole[:2])
    assert not torch.equal(make(0, 60, 64, seed=1), whole)


def test_kinds_take_turns() -> None:
    rows = planted_rows(0, 3 * len(KINDS), 64)
    for turn, kind in enumerate(KINDS):
        assert_bit_exact(rows_of_kind(kind, 3, 64), rows[turn :: len(KINDS)], kind)
    with pytest.raises(ValueError, match=r"^kind must be one of gaussian, .*, got 'odd'$"):
        rows_of_kind("odd", 1, 64)


class TestKinds:
    """Each kind is as hard as its name says."""

    def short(self, scale: torch.Tensor) -> bool:
        """All of (1, 7, 13, 41, 61, 95) times powers of two, each of them somewhere."""
        mantissas = (torch.frexp(scale).mantissa * 128).unique().tolist()
        return mantissas == [64.0, 82.0, 95.0, 104.0, 112.0, 122.0]

    def rows(self, kind: str, count: int = 64, head_dim: int = 128) -> torch.Tensor:
        return rows_of_kind(kind, count, head_dim)

    def rotated(self, kind: str) -> torch.Tensor:
        return reference.hadamard_transform(self.rows(kind), RANDOM_HADAMARD)

    def test_zeros_of_both_signs(self) -> None:
        rows = self.rows("zeros")
        assert (rows == 0).all()
        assert set(rows.signbit().unique().tolist()) == {False, True}

    def test_int8_ties_have_exact_scales_and_halves(self) -> None:
        rows = self.rows("int8_ties")
        scale = rows.abs().amax(-1, keepdim=True) / 127
        assert self.short(scale)
        codes = rows / scale
        assert ((codes % 1) == 0.5).float().mean() > 0.4
        assert ((codes % 1) % 0.5 == 0).all()

    def test_rotated_ties_tell_a_fused_sum_and_a_quotient_apart(self) -> None:
        y = self.rotated("rotated_ties")
        y = y[(y.amin(-1) <= 0) & (y.amax(-1) >= 0)]
        scale = (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 15
        zero_point = half_away(-y.amin(-1, keepdim=True) / scale)
        inverse = torch.ones(()) / scale
        codes = half_away(y * inverse + zero_point)
        fused = (y.double() * inverse.double() + zero_point.double()).float()
        assert not torch.equal(half_away(fused), codes)
        assert not torch.equal(half_away(y / scale + zero_point), codes)

    def test_beside_ties_are_one_step_off(self) -> None:
        rows = self.rows("beside_ties")
        near = torch.round(rows * 2) / 2
        off = rows != near
        assert off.float().mean() > 0.9
        steps = (rows.view(torch.int32) - near.view(torch.int32))[off]
        assert set(steps.tolist()) == {-1, 1}
        assert (rows == 0.49999997).any()

    def test_e4m3_ties_meet_nearly_every_midpoint(self) -> None:
        rows = self.rows("e4m3_ties")
        scale = rows.abs().amax(-1, keepdim=True) / 448
        assert self.short(scale)
        table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        middle = ((table[1:] + table[:-1]) / 2).float()
        met = (rows / scale).abs()
        assert torch.isin(met, torch.cat([middle, torch.tensor([448.0])])).all()
        assert torch.isin(middle, met).float().mean() > 0.98

    def test_rotated_ties_lie_on_halves(self) -> None:
        y = self.rotated("rotated_ties")
        scale = (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 15
        assert self.short(scale)
        y = y / scale
        assert ((y * 2) % 1 == 0).all()
        assert (y % 1 == 0.5).float().mean() > 0.4
        low = y.amin(-1)
        assert (low > 0).any()
        assert (low < -15).any()
        assert (low % 1 == 0.5).any()

    def test_rotated_sparse_rows_are_mostly_zero_with_equal_extremes(self) -> None:
        y = self.rotated("rotated_sparse")
        assert (y == 0).float().mean() > 0.8
        largest = y.abs().amax(-1, keepdim=True)
        both = ((y == largest).any(-1) & (y == -largest).any(-1)).float().mean()
        assert both > 0.3

    def test_one_sided_rows(self) -> None:
        for y in (self.rows("one_sided"), self.rotated("rotated_one_sided")):
            positive = (y > 0).all(-1)
            assert (positive | (y < 0).all(-1)).all()
            assert 0 < positive.float().mean() < 1

    def test_spikes(self) -> None:
        first = self.rows("spike_in_channel_0")
        assert (first[:, 0].abs() == 100).all()
        places = self.rows("spike").abs().argmax(-1)
        assert len(places.unique()) > 30
        assert (self.rows("spike").abs().amax(-1) == 100).all()
        hot = self.rows("one_hot")
        assert ((hot != 0).sum(-1) == 1).all()

    def test_small_and_large(self) -> None:
        tiny = self.rows("subnormal")
        assert (tiny.abs() < 2.0**-126).all()
        assert (tiny != 0).float().mean() > 0.9
        extremes = self.rows("float16_extremes")
        assert (extremes == 65504).any()
        assert (extremes == -65504).any()
        assert self.rows("huge").abs().max() > 2.0**120
        near = self.rows("near_floors").abs().amax(-1)
        assert ((near > 2.0**-30) & (near < 2.0**-9)).any()
        assert ((near > 2.0**-75) & (near < 2.0**-58)).any()
        assert not ((near > 2.0**-58) & (near < 2.0**-30)).any()

    def test_not_finite_rows_have_one_such_lane_of_every_sort(self) -> None:
        rows = self.rows("not_finite")
        assert ((~rows.isfinite()).sum(-1) == 1).all()
        bad = rows[~rows.isfinite()].view(torch.int32)
        assert set(bad.tolist()) == {0x7FC00000, 0x7F800000, -0x800000, -0x400000}
