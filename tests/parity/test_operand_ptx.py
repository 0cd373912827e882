"""What only a GPU runs: the instructions that make operands, in numpy, over all integers of codes.

An operand is right if `unit * (operand * weight - offset)` is what its code stands for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvq import reference
from kvq.modes import Mode
from kvq.modes import mode as find_mode
from tests.cases import VARIANTS
from tests.ptx import Register, bytes_of, halves_of, run_ptx

operands = pytest.importorskip("kvq.kernels.operands")
side_spec = pytest.importorskip("kvq.kernels.side_spec")

#: Half an ulp of 1.0.
FLOAT16, BFLOAT16 = 2.0**-11, 2.0**-8
LLOYD1, LLOYD2, LLOYD3, LLOYD4, SMAX2, SMAX3, SMAX4 = (
    find_mode(name) for name in ("lloyd1", "lloyd2", "lloyd3", "lloyd4", "smax2", "smax3", "smax4")
)
INT8, INT4 = find_mode("int8"), find_mode("int4")
AFFINE = [
    INT4,
    find_mode("affine4"),
    *(replace(INT4, name=f"int4@{bits}_bits", bits=bits) for bits in (1, 2)),
]


def every_integer() -> tuple[Register, NDArray[np.uint8]]:
    """All integers of 16 bits as low halves of registers, others above; and both as bytes."""
    low = np.arange(2**16, dtype=np.uint64)
    high = np.random.default_rng(1).permutation(low)
    register = low | high << np.uint64(16)
    return register, register.astype(np.uint32).view(np.uint8).reshape(-1, 2, 2)


def codes_of(rows: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """`[..., bytes]` to `[..., codes]`, by the reference."""
    packed = torch.from_numpy(rows.copy())
    codes = reference.unpack_codes(packed, bits, rows.shape[-1] * 8 // bits)
    return codes.numpy().astype(np.int64)


def levels_of(codes: NDArray[np.int64], mode: Mode) -> NDArray[np.float64]:
    """What codes stand for, without scale and zero-point."""
    if mode.codebook is not None:
        levels = np.array(mode.codebook.levels)
        return levels[np.minimum(codes, len(levels) - 1)]
    if mode.max_code == 127:
        return codes.astype(np.uint8).view(np.int8).astype(np.float64)
    return codes.astype(np.float64)


@pytest.mark.parametrize("mode", [INT8, *AFFINE], ids=str)
def test_codes_where_they_lie(mode: Mode) -> None:
    spec = side_spec.side_spec(mode, 128, 2, FLOAT16, True)
    assert spec.kind == "affine"
    register, rows = every_integer()
    want = levels_of(codes_of(rows, mode.bits), mode)
    for stream in range(spec.streams):
        pair = halves_of(run_ptx(operands._affine_ptx.fn(spec, stream), register))
        read = spec.unit * (pair * spec.weights[stream] - spec.offset)
        assert np.array_equal(read, want[..., stream])


def test_two_levels_are_codes_where_they_lie() -> None:
    spec = side_spec.side_spec(LLOYD1, 128, 2, FLOAT16, True)
    assert spec.kind == "affine"
    register, rows = every_integer()
    want = levels_of(codes_of(rows, 1), LLOYD1)
    for stream in range(16):
        pair = halves_of(run_ptx(operands._affine_ptx.fn(spec, stream), register))
        read = spec.unit * (pair * spec.weights[stream] - spec.offset)
        np.testing.assert_allclose(read, want[..., stream], rtol=1e-15)


def test_e4m3_as_float16() -> None:
    spec = side_spec.side_spec(find_mode("fp8"), 128, 2, FLOAT16, True)
    register, rows = every_integer()
    want = reference.rounding.decode_e4m3(torch.from_numpy(rows.copy())).double().numpy()
    for stream in range(2):
        pair = halves_of(run_ptx(operands._e4m3_ptx.fn(stream), register)) * spec.unit
        number = want[..., stream][~np.isnan(want[..., stream])]
        pair = pair[~np.isnan(want[..., stream])]
        assert np.array_equal(pair, number)
        assert np.array_equal(np.signbit(pair), np.signbit(number))


@pytest.mark.parametrize("mode", [LLOYD2, SMAX2], ids=str)
def test_four_levels_as_bytes(mode: Mode) -> None:
    spec = side_spec.side_spec(mode, 128, 2, BFLOAT16, True)
    assert spec.kind == "bytes"
    assert all(0 <= level <= 127 and level == int(level) for level in spec.levels)
    register, rows = every_integer()
    codes = codes_of(rows, 2)
    for stream in range(8):
        pair = halves_of(run_ptx(operands._bytes_ptx.fn(spec, stream), register))
        read = spec.unit * (pair - spec.offset)
        assert np.array_equal(pair * 2.0**24, np.array(spec.levels)[codes[..., stream]])
        assert_accurate(read, levels_of(codes, mode)[..., stream], BFLOAT16)


def assert_accurate(
    read: NDArray[np.float64], want: NDArray[np.float64], accuracy: float, share: float = 0.25
) -> None:
    """Of equally likely levels the error is a share of the rounding of a query."""
    levels, places = np.unique(want, return_index=True)
    error = read.reshape(-1)[places] - levels
    assert (error**2).sum() <= (share * accuracy) ** 2 * (levels**2).sum()


EVEN_5 = VARIANTS["lloyd4+even_5"]


@pytest.mark.parametrize("mode", [LLOYD4, SMAX4], ids=str)
def test_sixteen_levels_as_two_times_seven_bits(mode: Mode) -> None:
    spec = side_spec.side_spec(mode, 128, 2, BFLOAT16, True)
    assert spec.kind == "sevens"
    assert all(bits & 0x8001 == 0 for bits in spec.level_bits)
    assert side_spec.fit_sevens(mode.codebook.levels).error < 2.0**-11
    register, rows = every_integer()
    codes = codes_of(rows, 4)
    for stream in range(4):
        pair = halves_of(run_ptx(operands._sevens_ptx.fn(spec, stream), register))
        assert np.array_equal(pair, np.array(spec.levels)[codes[..., stream]])
        read = spec.unit * (pair - spec.offset)
        assert_accurate(read, levels_of(codes, mode)[..., stream], BFLOAT16)


@pytest.mark.parametrize("accuracy", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("mode", [LLOYD4, SMAX4], ids=str)
def test_digits_in_two_planes(mode: Mode, accuracy: float) -> None:
    """Levels of keys as integers of 14 bits, seven at a time."""
    spec = side_spec.side_spec(mode, 128, 2, accuracy, True, True)
    assert spec.kind == "planes"
    assert spec.digits
    assert spec.by_register
    register, rows = every_integer()
    # Halves of a register are streams.
    codes = codes_of(rows.reshape(-1, 4, 1), 4).reshape(-1, 2, 4)
    for stream in range(2):
        low, high = (
            bytes_of(run_ptx(operands._plane_ptx.fn(spec, stream, plane), register))
            for plane in range(2)
        )
        assert min(low.min(), high.min()) >= 0
        integer = high * 128 + low
        assert np.array_equal(integer, np.array(spec.levels)[codes[:, stream]])
        read = spec.unit * (integer - spec.offset)
        assert_accurate(read, levels_of(codes[:, stream], mode), accuracy)


@pytest.mark.parametrize("mode", [LLOYD2, SMAX2], ids=str)
def test_four_levels_in_two_planes(mode: Mode) -> None:
    spec = side_spec.side_spec(mode, 128, 2, FLOAT16, True, True)
    assert spec.kind == "planes"
    register, rows = every_integer()
    # Each half of a register is two streams: even and odd crumbs.
    halves = codes_of(rows.reshape(-1, 4, 1), 2).reshape(-1, 2, 8)
    for stream in range(4):
        low, high = (
            bytes_of(run_ptx(operands._plane_ptx.fn(spec, stream, plane), register))
            for plane in range(2)
        )
        codes = halves[:, stream // 2, stream % 2 :: 2]
        assert np.array_equal(high * 128 + low, np.array(spec.levels)[codes])
        read = spec.unit * (high * 128 + low - spec.offset)
        assert_accurate(read, levels_of(codes, mode), FLOAT16)


@pytest.mark.parametrize("mode", [LLOYD4, SMAX4, EVEN_5], ids=str)
def test_levels_that_few_bits_do_not_hold_take_two_whole_bytes(mode: Mode) -> None:
    assert side_spec.side_spec(mode, 128, 2, FLOAT16, True).kind == "halves"
    assert side_spec.side_spec(mode, 128, 2, 2.0**-20, True, True).kind == "halves"


@pytest.mark.parametrize("mode", [LLOYD2, SMAX2, LLOYD4, SMAX4], ids=str)
def test_levels_as_two_bytes(mode: Mode) -> None:
    spec = side_spec.side_spec(mode, 128, 2, 2.0**-14, True)
    assert spec.kind == "halves"
    register, rows = every_integer()
    codes = codes_of(rows, mode.bits)
    for stream in range(spec.streams):
        pair = halves_of(run_ptx(operands._halves_ptx.fn(spec, stream), register))
        assert np.array_equal(pair, np.array(spec.levels)[codes[..., stream]])
        read = spec.unit * (pair - spec.offset)
        assert_accurate(read, levels_of(codes, mode)[..., stream], FLOAT16)


@pytest.mark.parametrize("mode", [LLOYD3, SMAX3, EVEN_5], ids=str)
def test_eight_levels_as_two_bytes(mode: Mode) -> None:
    spec = side_spec.side_spec(mode, 128, 2, FLOAT16, True)
    assert spec.kind == "halves"
    register, rows = every_integer()
    # The high bits of the eight channels of each integer, and above them those of other channels.
    high = np.random.default_rng(2).permutation(register)
    bits = high[:, None] >> np.array([0, 16], dtype=np.uint64) & np.uint64(0xFFFF)
    codes = codes_of(rows, 2)
    for stream in range(8):
        pair = halves_of(run_ptx(operands._halves_ptx.fn(spec, stream), register, high))
        code = codes[..., stream] | (bits >> np.uint64(stream) & np.uint64(1)).astype(int) << 2
        assert np.array_equal(pair, np.array(spec.levels)[code])
        assert_accurate(spec.unit * (pair - spec.offset), levels_of(code, mode), FLOAT16)


@pytest.mark.parametrize("mode", [*AFFINE, LLOYD1, LLOYD2, SMAX2], ids=str)
def test_digits(mode: Mode) -> None:
    """Operands of keys whose queries are integers: four bytes of codes at a time."""
    spec = side_spec.side_spec(mode, 128, 2, BFLOAT16, True, True)
    assert spec.digits
    register, rows = every_integer()
    codes = codes_of(rows.reshape(-1, 4, 1), mode.bits)
    # A register of bytes gives four streams: even and odd crumbs of each half.
    if spec.kind == "bytes":
        wide = codes.reshape(-1, 2, 8)
        codes = np.stack(
            [wide[:, half, parity::2] for half in range(2) for parity in range(2)], axis=-1
        )
    for stream in range(spec.streams):
        four = bytes_of(run_ptx(operands._digit_ptx.fn(spec, stream), register))
        less = 128 if mode.bits == 4 and stream == 1 else 0
        read = spec.unit * ((four + less) / spec.weights[stream] - spec.offset)
        want = levels_of(codes[..., stream], mode)
        if mode.codebook is None:
            assert np.array_equal(read, want)
        else:
            assert_accurate(read, want, BFLOAT16)
