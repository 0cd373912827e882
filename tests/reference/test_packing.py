"""Packing: every byte, layouts worked by hand, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvq.reference import pack_codes, unpack_codes
from tests import oracle

WIDTHS = (1, 2, 3, 4, 8)
# Codes that fill the fewest whole bytes.
SMALLEST = {1: 8, 2: 4, 3: 8, 4: 2, 8: 1}


def tensor(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def random_codes(bits: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


# Codes and bytes; in the binary numbers the first code stands at the right.
BY_HAND = [
    (1, [1, 0, 0, 0, 0, 0, 0, 0], [0b00000001]),
    (1, [0, 0, 0, 0, 0, 0, 0, 1], [0b10000000]),
    (1, [1, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], [0b00001011, 0b00000010]),
    (2, [1, 2, 3, 0], [0b00_11_10_01]),
    (2, [3, 0, 0, 0, 0, 0, 0, 2], [0b00_00_00_11, 0b10_00_00_00]),
    (4, [0x1, 0xA], [0xA1]),
    (4, [0xF, 0x0, 0x2, 0xC], [0x0F, 0xC2]),
    # Low crumbs 1 2 3 0 | 1 2 3 0 in two bytes, then the high bits 0 0 0 0 1 1 1 1.
    (3, [1, 2, 3, 0, 5, 6, 7, 4], [0b00_11_10_01, 0b00_11_10_01, 0b1111_0000]),
    # All crumbs of the row come before all its high bits.
    (
        3,
        [4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7],
        [0, 0, 0, 0b11_00_00_00, 0b00000001, 0b10000000],
    ),
    (8, [0, 255, 128, 7], [0, 255, 128, 7]),
    (8, [9], [9]),
]


@pytest.mark.parametrize(("bits", "codes", "packed"), BY_HAND)
def test_layout_worked_by_hand(bits: int, codes: list[int], packed: list[int]) -> None:
    assert pack_codes(tensor(codes), bits).tolist() == packed
    assert unpack_codes(tensor(packed), bits, len(codes)).tolist() == codes


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_all_256_bytes(bits: int) -> None:
    per_byte = 8 // bits
    packed = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = [[byte // 2 ** (bits * i) % 2**bits for i in range(per_byte)] for byte in range(256)]
    assert unpack_codes(packed, bits, per_byte).tolist() == codes
    assert torch.equal(pack_codes(torch.tensor(codes, dtype=torch.uint8), bits), packed)


def test_all_codes_of_three_bits_at_all_places() -> None:
    for place in range(16):
        for code in range(8):
            codes = [0] * 16
            codes[place] = code
            packed = [0] * 6
            packed[place // 4] = (code % 4) << (2 * (place % 4))
            packed[4 + place // 8] = (code // 4) << (place % 8)
            assert pack_codes(tensor(codes), 3).tolist() == packed
            assert unpack_codes(tensor(packed), 3, 16).tolist() == codes


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 80, 128, 136])
def test_equals_the_oracle_and_comes_back(bits: int, head_dim: int) -> None:
    codes = random_codes(bits, 3, 5, head_dim)
    packed = pack_codes(codes, bits)
    want = oracle.pack(codes.reshape(-1, head_dim).numpy(), bits)
    assert packed.dtype is torch.uint8
    assert np.array_equal(packed.reshape(15, -1).numpy(), want)
    assert packed.shape == (3, 5, head_dim * bits // 8)
    assert torch.equal(unpack_codes(packed, bits, head_dim), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_byte_string_is_that_of_some_codes(bits: int) -> None:
    packed = random_codes(8, 64, bits)
    assert torch.equal(pack_codes(unpack_codes(packed, bits, 8), bits), packed)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_code_changes_its_own_bits_only(bits: int) -> None:
    codes = random_codes(bits, 16)
    before = unpack_codes(pack_codes(codes, bits), bits, 16)
    for place in range(16):
        changed = codes.clone()
        changed[place] ^= 2**bits - 1
        differs = unpack_codes(pack_codes(changed, bits), bits, 16) != before
        assert differs.nonzero().flatten().tolist() == [place]


@given(st.sampled_from(WIDTHS), st.integers(1, 5), st.data())
def test_round_trip(bits: int, bytes_of_eight: int, data: st.DataObject) -> None:
    length = 8 * bytes_of_eight
    one = st.lists(st.integers(0, 2**bits - 1), min_size=length, max_size=length)
    codes = tensor(data.draw(one))
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits, length), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_last_codes_of_a_short_row_are_kept(bits: int) -> None:
    head_dim = 128 + SMALLEST[bits]
    codes = torch.zeros(head_dim, dtype=torch.uint8)
    codes[-3:] = 2**bits - 1
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits, head_dim), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_strided_input_is_read_by_its_strides_and_left_alone(bits: int) -> None:
    base = random_codes(bits, 6, 3, 32)
    kept = base.clone()
    for view in (base[:, 1], base.transpose(0, 1), base[..., ::2], base[:, :1].expand(6, 3, 32)):
        packed = pack_codes(view, bits)
        assert torch.equal(packed, pack_codes(view.contiguous(), bits))
        again = unpack_codes(packed.transpose(0, -2), bits, view.shape[-1])
        assert torch.equal(again.transpose(0, -2), view)
    assert torch.equal(base, kept)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packed_bytes_share_no_memory_with_the_codes(bits: int) -> None:
    codes = random_codes(bits, 4, 16)
    kept = codes.clone()
    packed = pack_codes(codes, bits)
    again = packed.clone()
    unpack_codes(packed, bits, 16).zero_()
    assert torch.equal(packed, again)
    packed.zero_()
    assert torch.equal(codes, kept)


@pytest.mark.parametrize("bits", WIDTHS)
def test_no_rows(bits: int) -> None:
    packed = pack_codes(torch.empty((0, 16), dtype=torch.uint8), bits)
    assert packed.shape == (0, 2 * bits)
    assert unpack_codes(packed, bits, 16).shape == (0, 16)


REFUSALS: list[tuple[Callable[[], Tensor], type[Exception], str]] = [
    *(
        (
            lambda bits=bits: pack_codes(tensor([0] * 8), bits),
            ValueError,
            f"bits must be one of (1, 2, 3, 4, 8), got {bits}",
        )
        for bits in (0, 5, 6, 7, 9, -1)
    ),
    (
        lambda: unpack_codes(tensor([0] * 5), 5, 8),
        ValueError,
        "bits must be one of (1, 2, 3, 4, 8), got 5",
    ),
    *(
        (
            lambda bits=bits, length=length: pack_codes(tensor([0] * length), bits),
            ValueError,
            f"codes must fill whole bytes with {bits}-bit codes along the last axis, "
            f"got shape [{length}]",
        )
        for bits, length in ((4, 3), (4, 63), (2, 2), (2, 6), (2, 63), (3, 4), (3, 12), (1, 4))
    ),
    (
        lambda: pack_codes(torch.zeros((), dtype=torch.uint8), 8),
        ValueError,
        "codes must fill whole bytes with 8-bit codes along the last axis, got shape []",
    ),
    *(
        (
            lambda bits=bits: pack_codes(tensor([0] * 7 + [2**bits]), bits),
            ValueError,
            f"codes must be below {2**bits} for {bits} bits, got {2**bits}",
        )
        for bits in (1, 2, 3, 4)
    ),
    (
        lambda: pack_codes(torch.zeros(8, dtype=torch.int32), 4),
        TypeError,
        "codes must be uint8, got int32",
    ),
    (
        lambda: pack_codes([1, 2], 4),  # type: ignore[arg-type]
        TypeError,
        "codes must be a torch.Tensor, got list",
    ),
    (
        lambda: unpack_codes(torch.zeros(4, dtype=torch.int8), 4, 8),
        TypeError,
        "packed must be uint8, got int8",
    ),
    *(
        (
            lambda size=size, bits=bits, head_dim=head_dim: unpack_codes(
                tensor([0] * size), bits, head_dim
            ),
            ValueError,
            f"packed must hold {head_dim} codes of {bits} bits along the last axis, "
            f"got shape [{size}]",
        )
        for size, bits, head_dim in (
            *((4, 4, 7), (4, 4, 9), (4, 4, 16), (4, 2, 8), (3, 3, 16), (6, 3, 8)),
            *((1, 1, 16), (8, 8, 4), (0, 4, 0), (0, 8, 0)),
        )
    ),
    (
        lambda: unpack_codes(torch.zeros((), dtype=torch.uint8), 8, 1),
        ValueError,
        "packed must hold 1 codes of 8 bits along the last axis, got shape []",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS)
def test_refusals(call: Callable[[], Tensor], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()
