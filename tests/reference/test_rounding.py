"""The roundings, and e4m3fn against its enumerated table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq.reference.rounding import (
    E4M3_MAX,
    Rounder,
    decode_e4m3,
    deterministic,
    encode_e4m3,
    half_away,
    stochastic,
)
from kvq.rounding import Rounding
from tests import oracle
from tests.compare import assert_bit_exact

HALF_EVEN = deterministic(Rounding.HALF_EVEN)
TOWARD_ZERO = deterministic(Rounding.TOWARD_ZERO)

# A number, and where it goes: half away, half even, toward zero.
ROUNDED = [
    (0.0, 0.0, 0.0, 0.0),
    (0.25, 0.0, 0.0, 0.0),
    (0.49999994, 0.0, 0.0, 0.0),
    (0.49999997, 1.0, 0.0, 0.0),
    (0.5, 1.0, 0.0, 0.0),
    (0.50000006, 1.0, 1.0, 0.0),
    (1.4999999, 1.0, 1.0, 1.0),
    (1.5, 2.0, 2.0, 1.0),
    (2.4999998, 2.0, 2.0, 2.0),
    (2.5, 3.0, 2.0, 2.0),
    (3.5, 4.0, 4.0, 3.0),
    (126.5, 127.0, 126.0, 126.0),
    (127.49999, 127.0, 127.0, 127.0),
    (127.5, 128.0, 128.0, 127.0),
    (8388607.5, 8388608.0, 8388608.0, 8388607.0),
    # Past 2^23 the sum with a half is a tie itself, and goes to even.
    (8388609.0, 8388610.0, 8388609.0, 8388609.0),
    (8388610.0, 8388610.0, 8388610.0, 8388610.0),
    (16777216.0, 16777216.0, 16777216.0, 16777216.0),
]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["+", "-"])
@pytest.mark.parametrize(("value", "away", "even", "zero"), ROUNDED)
def test_where_numbers_go(
    value: float, away: float, even: float, zero: float, sign: float
) -> None:
    v = torch.tensor(value) * sign
    assert half_away(v) == sign * away
    assert deterministic(Rounding.HALF_AWAY)(v) == sign * away
    assert HALF_EVEN(v) == sign * even
    assert TOWARD_ZERO(v) == sign * zero


def test_half_away_is_literal_unlike_the_round_of_c() -> None:
    below_half = torch.tensor(0x3EFFFFFF, dtype=torch.int32).view(torch.float32)
    assert below_half < 0.5
    assert half_away(below_half) == 1.0
    assert half_away(-below_half) == -1.0


@given(st.floats(-(2.0**22), 2.0**22, width=32))
def test_roundings_against_python(value: float) -> None:
    v = torch.tensor(value, dtype=torch.float32)
    assert HALF_EVEN(v) == round(value)
    assert TOWARD_ZERO(v) == math.trunc(value)
    half = np.copysign(np.float32(0.5), np.float32(value))
    assert half_away(v) == np.trunc(np.float32(value) + half)
    assert half_away(-v) == -half_away(v)


def test_stochastic_is_no_deterministic_rounding() -> None:
    with pytest.raises(ValueError, match=r"^rounding must be deterministic here, got stochastic "):
        deterministic(Rounding.STOCHASTIC)


class TestStochastic:
    def rounder(self, seed: int = 0) -> Rounder:
        return stochastic(torch.Generator().manual_seed(seed))

    @pytest.mark.parametrize("value", [-2.75, -0.5, 0.125, 0.9, 7.0])
    def test_mean_and_variance(self, value: float) -> None:
        n = 40_000
        rounded = self.rounder()(torch.full((n,), value)).double()
        fraction = value - math.floor(value)
        assert set(rounded.tolist()) == {math.floor(value), math.ceil(value)}
        variance = fraction * (1 - fraction)
        # Five standard errors of n = 40,000, seed 0.
        assert abs(rounded.mean() - value) <= 5 * math.sqrt(variance / n)
        assert abs(rounded.var(correction=0) - variance) <= 5 * math.sqrt(variance / n) / 2

    def test_the_generator_decides_and_moves_on(self) -> None:
        v = torch.full((1000,), 0.5)
        rounder = self.rounder()
        first, second = rounder(v), rounder(v)
        assert torch.equal(self.rounder()(v), first)
        assert not torch.equal(first, second)
        assert not torch.equal(self.rounder(seed=1)(v), first)

    def test_lanes_draw_apart(self) -> None:
        rounded = self.rounder()(torch.full((2, 3, 64), 0.5))
        assert rounded.shape == (2, 3, 64)
        assert 0 < rounded[0, 0].sum() < 64
        assert not torch.equal(rounded[0, 0], rounded[1, 0])


# ------------------------------------------------------------------------------------------ e4m3


def encode(values: list[float] | Tensor, rounding: Rounding = Rounding.HALF_EVEN) -> Tensor:
    q = torch.as_tensor(values, dtype=torch.float32)
    return encode_e4m3(q, deterministic(rounding))


TABLE = torch.from_numpy(oracle.e4m3_table())
FINITE = [byte for byte in range(256) if byte & 0x7F != 0x7F]


def test_decoding_gives_the_enumerated_table() -> None:
    values = decode_e4m3(torch.arange(256, dtype=torch.uint8))
    assert values.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert_bit_exact(values[FINITE], TABLE[FINITE])
    assert values[0x7E] == 448.0 == E4M3_MAX
    assert values[1] == 2.0**-9
    # In the other dialect, e4m3fnuz, this byte is 0.5, and 0x80 is NaN.
    assert values[0x38] == 1.0
    assert_bit_exact(values[0x80], torch.tensor(-0.0))


@pytest.mark.parametrize(
    "rounding", [r for r in Rounding if r is not Rounding.STOCHASTIC], ids=str
)
def test_every_number_of_the_table_encodes_to_its_own_byte(rounding: Rounding) -> None:
    assert encode(TABLE[FINITE], rounding).tolist() == FINITE


def magnitudes() -> Tensor:
    """Every number and midpoint of the table with its neighbors, and a dense set in between."""
    exact = TABLE[:127].double()
    places = torch.cat([exact, (exact[1:] + exact[:-1]) / 2]).float()
    beside = [torch.nextafter(places, torch.tensor(side)) for side in (0.0, 448.0)]
    # Every exponent from subnormal float32 to 2^8, with 2^11 mantissas each.
    bits = torch.arange(0, 0x43E00001, 2**12, dtype=torch.int32)
    tiny = torch.arange(0, 3000, dtype=torch.int32)
    every = torch.cat([places, *beside, bits.view(torch.float32), tiny.view(torch.float32)])
    return every.clamp(0.0, 448.0)


def test_half_even_equals_the_oracle_and_the_cast_of_torch() -> None:
    q = magnitudes()
    q = torch.cat([q, -q])
    got = encode(q)
    assert torch.equal(got, torch.from_numpy(oracle.e4m3_encode(q.numpy())))
    assert torch.equal(got, q.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    ("rounding", "tie_goes_up"),
    [(Rounding.HALF_AWAY, (True, True)), (Rounding.HALF_EVEN, (False, True))],
    ids=["half_away", "half_even"],
)
def test_ties(rounding: Rounding, tie_goes_up: tuple[bool, bool]) -> None:
    exact = TABLE[:127].double()
    middle = ((exact[1:] + exact[:-1]) / 2).float()
    want = [byte + tie_goes_up[byte % 2] for byte in range(126)]
    assert encode(middle, rounding).tolist() == want
    assert encode(-middle, rounding).tolist() == [byte + 0x80 for byte in want]


def test_half_away_moves_nothing_but_ties_and_their_lower_neighbors() -> None:
    q = magnitudes()
    differs = encode(q, Rounding.HALF_AWAY) != encode(q)
    exact = TABLE[:127].double()
    middle = ((exact[1:] + exact[:-1]) / 2).float()
    allowed = torch.cat([middle, torch.nextafter(middle, torch.tensor(0.0))])
    assert set(q[differs].tolist()) <= set(allowed.tolist())
    assert set(q[differs].tolist()) >= set(middle[0::2].tolist())


def test_toward_zero_takes_the_number_below() -> None:
    q = magnitudes()
    want = torch.searchsorted(TABLE[:127].contiguous(), q, right=True) - 1
    assert encode(q, Rounding.TOWARD_ZERO).tolist() == want.tolist()
    assert encode(-q, Rounding.TOWARD_ZERO).tolist() == (want + 0x80).tolist()


def test_numbers_that_a_stop_at_half_precision_rounds_twice() -> None:
    q = torch.tensor([400.199585, 272.156555, 136.002075])
    assert decode_e4m3(encode(q)).tolist() == [416.0, 288.0, 144.0]
    assert decode_e4m3(encode(-q)).tolist() == [-416.0, -288.0, -144.0]
    # Cut to half precision on the way they would be ties, and go to the even neighbor below.
    cut = (q.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert cut.tolist() == [400.0, 272.0, 136.0]
    assert decode_e4m3(encode(cut)).tolist() == [384.0, 256.0, 128.0]


def test_the_sign_of_zero_is_kept_and_underflow_keeps_its_sign() -> None:
    q = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 2.0**-10, -(2.0**-10)])
    assert encode(q).tolist() == [0x00, 0x80, 0x00, 0x80, 0x00, 0x80]
    assert encode(torch.tensor([2.0**-10 * 1.0001, -(2.0**-149)])).tolist() == [0x01, 0x80]


def test_a_carry_reaches_the_next_binade() -> None:
    q = torch.tensor([15.9, 31.6, 0.0155, 447.0, 240.1])
    assert decode_e4m3(encode(q)).tolist() == [16.0, 32.0, 2.0**-6, 448.0, 240.0]


def test_no_rounding_can_make_a_nan_of_448() -> None:
    # The largest number that a stochastic rounding adds: 14 + 0.99999994 rounds up to 15.
    codes = encode_e4m3(torch.tensor([448.0, -448.0]), lambda v: torch.floor(v + 0.99999994))
    assert codes.tolist() == [0x7E, 0xFE]


@given(st.floats(0.0, 448.0, width=32))
def test_half_even_is_nearest(value: float) -> None:
    (byte,) = encode([value]).tolist()
    distance = (TABLE[:127].double() - value).abs()
    assert distance[byte] == distance.min()
