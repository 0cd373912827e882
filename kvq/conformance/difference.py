"""Where an answer differs from a vector: how often, the first and the last place, which bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvq.modes import Grid, Mode
from kvq.reference.packing import unpack_codes
from kvq.reference.rounding import decode_e4m3
from kvq.reference.scaling import decode_float16_pair, decode_zero_point
from kvq.scale_word import StoredWord

#: The fields of a float32 and of a float16, as masks.
_FLOAT32: Final = {"sign": 0x80000000, "exponent": 0x7F800000, "mantissa": 0x007FFFFF}
_FLOAT16: Final = {"sign": 0x8000, "exponent": 0x7C00, "mantissa": 0x03FF}
#: The fields of each kind of word.
WORD_FIELDS: Final[Mapping[StoredWord, Mapping[str, int]]] = {
    StoredWord.FLOAT32: _FLOAT32,
    StoredWord.FLOAT16: _FLOAT16,
    StoredWord.FLOAT32_ZERO_POINT: {**_FLOAT32, "mantissa": 0x007FFFF0, "zero-point": 0xF},
    StoredWord.FLOAT16_PAIR: {
        **{f"scale {field}": mask for field, mask in _FLOAT16.items()},
        **{f"smallest {field}": mask << 16 for field, mask in _FLOAT16.items()},
    },
}


class Place(NamedTuple):
    """One number that differs."""

    #: The row.
    row: int
    #: The kind of planted row; of a row of attention its token and head.
    kind: str
    #: Where in the row.
    where: str
    expected: str
    found: str
    #: The fields of the number that differ.
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"row {self.row} ({self.kind})" + (f", {self.where}" if self.where else "")
        text = f"{place}: expected {self.expected}, found {self.found}"
        return text + (f"; {', '.join(self.fields)}" if self.fields else "")


class Difference(NamedTuple):
    """How one part of one case compares."""

    #: `{mode}.{dtype}.{head_dim}.{part}`
    name: str
    #: Rows that were compared, and those that differ; each token and head is one of attention.
    rows: int
    differ: int
    #: Bytes, words or values that differ in them.
    numbers: int
    #: The rows that differ, by kind of planted row; those of attention by query head.
    kinds: Mapping[str, int]
    #: Numbers that differ in each of their fields.
    fields: Mapping[str, int]
    first: Place | None
    last: Place | None


def compare_rows(
    name: str,
    found: Tensor,
    expected: Tensor,
    mode: Mode,
    row_kinds: Sequence[str],
    skip_kinds: Sequence[str] = (),
) -> Difference:
    """Compare codes, words or values of the same shape and dtype, bit for bit.

    Args:
        name: Ends in `.codes`, `.words` or `.values`.
        found: `[rows, ...]`
        expected: The same.
        mode: How the rows are stored.
        row_kinds: The kind of each row.
        skip_kinds: Kinds whose rows are left out.
    """
    part = name.rpartition(".")[2]
    rows = [row for row, kind in enumerate(row_kinds) if kind not in skip_kinds]
    bits = [_bits(tensor[rows]).reshape(len(rows), -1) for tensor in (found, expected)]
    places = (bits[0] != bits[1]).nonzero()
    masks: Mapping[str, int] = {}
    if part != "codes":
        masks = WORD_FIELDS[mode.word] if part == "words" else _FLOAT32
    changed = bits[0][tuple(places.T)] ^ bits[1][tuple(places.T)]
    differing = [rows[index] for index in sorted(set(places[:, 0].tolist()))]
    ends: list[Place | None] = [None, None]
    for end in (0, -1) if len(places) else ():
        index, column = places[end].tolist()
        row = rows[index]
        fields = tuple(field for field, mask in masks.items() if int(changed[end]) & mask)
        texts = _texts(part, found[row], expected[row], column, mode)
        ends[end] = Place(row, row_kinds[row], *texts, fields)
    return Difference(
        name,
        len(rows),
        len(differing),
        len(places),
        Counter(row_kinds[row] for row in differing),
        {field: int(((changed & mask) != 0).sum()) for field, mask in masks.items()},
        *ends,
    )


def compare_attention(name: str, found: Tensor, exact: Tensor, allowed: Tensor) -> Difference:
    """Compare the output of attention with what is exact, in view of the error that is allowed.

    Args:
        name: Ends in `.output`.
        found: `[tokens, query heads, head_dim]`
        exact: The same, float64.
        allowed: `[tokens, query heads]` float64.
    """
    errors, channels = (found.double() - exact).abs().max(-1)  # NaN is the largest
    places = (~(errors <= allowed)).nonzero()
    ends: list[Place | None] = [None, None]
    for end in (0, -1) if len(places) else ():
        token, head = place = tuple(places[end].tolist())
        ends[end] = Place(
            token * allowed.shape[1] + head,
            f"token {token}, query head {head}",
            f"channel {int(channels[place])}",
            f"an error of at most {float(allowed[place]):.3g}",
            f"{float(errors[place]):.3g}",
        )
    counts = Counter(f"query head {head}" for head in places[:, 1].tolist())
    return Difference(name, allowed.numel(), len(places), len(places), counts, {}, *ends)


def _bits(tensor: Tensor) -> Tensor:
    """The bits of numbers as integers that are not negative."""
    if tensor.dtype is torch.uint8:
        return tensor.to(torch.int64)
    if tensor.dtype is torch.float16:
        return tensor.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    return tensor.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _texts(
    part: str, found: Tensor, expected: Tensor, column: int, mode: Mode
) -> tuple[str, str, str]:
    """Where in a row a number differs, what is expected there, and what is found."""
    if part == "codes":
        return _code_texts(found, expected, column, mode)
    if part == "words":
        return "", _word_text(expected, mode), _word_text(found, mode)
    return f"channel {column}", _float_text(expected[column]), _float_text(found[column])


def _code_texts(found: Tensor, expected: Tensor, byte: int, mode: Mode) -> tuple[str, str, str]:
    """As `_texts`, of a byte of packed codes: with the first code in it that differs."""
    mixed = expected.clone()
    mixed[byte] = found[byte]  # this byte alone, whose codes may be anywhere in the row
    head_dim = mode.head_dim(len(expected))
    want, got = (unpack_codes(row, mode.bits, head_dim) for row in (expected, mixed))
    channel = int((want != got).nonzero()[0])
    return (
        f"byte {byte}, channel {channel}",
        f"{_hex(expected[byte])} (code {_code(want[channel], mode)})",
        f"{_hex(found[byte])} (code {_code(got[channel], mode)})",
    )


def _code(code: Tensor, mode: Mode) -> str:
    if mode.grid is Grid.SIGNED:
        return str(int(code.view(torch.int8)))
    if mode.grid is Grid.E4M3:
        return f"{float(decode_e4m3(code[None])[0]):g}"
    return str(int(code))


def _word_text(word: Tensor, mode: Mode) -> str:
    if mode.word is StoredWord.FLOAT32_ZERO_POINT:
        scale, zero_point = (float(number) for number in decode_zero_point(word[None]))
        numbers = f"scale {scale:.9g}, zero-point {zero_point:g}"
    elif mode.word is StoredWord.FLOAT16_PAIR:
        scale, smallest = (float(number) for number in decode_float16_pair(word[None]))
        numbers = f"smallest {smallest:.5g}, scale {scale:.5g}"
    else:
        return _float_text(word)
    return f"{_hex(word)} ({numbers})"


def _float_text(number: Tensor) -> str:
    return f"{_hex(number)} ({float(number):.9g})"


def _hex(number: Tensor) -> str:
    return f"0x{int(_bits(number)):0{2 * number.element_size()}x}"
