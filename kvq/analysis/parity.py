"""Bit-exact parity of the kernels with the reference, on rows from an integer counter hash.

Two sets of rows: the *digest set*, whose SHA-256 must be the same for the reference, the
interpreter and the compiled kernel on any machine; and the *volume set*, millions of rows a mode,
compared where they are made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvq.analysis.planted_rows import planted_rows, random_rows
from kvq.modes import Mode
from kvq.tier import QuantizedKV, Tier

#: Rows of the digest set, half of them planted.
DIGEST_ROWS = 65_536
#: Rows that are made and compared at a time.
CHUNK_ROWS = 2**19
#: Head sizes and input dtypes of the volume set take turns, a chunk each.
FORMS = (
    (128, torch.bfloat16),
    (64, torch.float16),
    (128, torch.float32),
    (96, torch.bfloat16),
    (256, torch.float32),
)


class Mismatches(NamedTuple):
    """What differs in a comparison of rows."""

    #: Rows that differ in a code, in the word or, where it is compared, in a dequantized value.
    rows: int
    #: The first and the last of them; -1 if none.
    first: int
    last: int
    #: Words, and values where they are compared, that differ in the sign, the exponent, the
    #: mantissa.
    sign: int
    exponent: int
    mantissa: int

    def then(self, later: Mismatches, start: int) -> Mismatches:
        """The sum of this and of what differs in later rows, which start at row `start`."""
        if not later.rows:
            return self
        return Mismatches(
            self.rows + later.rows,
            start + later.first if self.first < 0 else self.first,
            start + later.last,
            self.sign + later.sign,
            self.exponent + later.exponent,
            self.mantissa + later.mantissa,
        )


#: Nothing differs.
NONE = Mismatches(0, -1, -1, 0, 0, 0)


def digest(tier: Tier, mode: Mode, *, device: str = "cpu", head_dim: int = 128) -> str:
    """SHA-256 (hex) of the codes, words and dequantized rows of the digest set.

    Args:
        tier: Where it is computed.
        mode: How rows are stored.
        device: Where the rows are.
        head_dim: D.
    """
    found = hashlib.sha256()
    for x in _digest_set(device, head_dim):
        for tensor in _there_and_back(tier, x, mode):
            found.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def compare_digest_set(
    actual: Tier, expected: Tier, mode: Mode, *, device: str = "cpu", head_dim: int = 128
) -> Mismatches:
    """Where two tiers differ whose digests differ: codes, words and dequantized values.

    Args:
        actual: The kernels.
        expected: The reference.
        mode: How rows are stored.
        device: Where the rows are.
        head_dim: D.
    """
    total, start = NONE, 0
    for x in _digest_set(device, head_dim):
        (*left, got), (*right, want) = (_there_and_back(t, x, mode) for t in (actual, expected))
        found = compare(QuantizedKV(*left), QuantizedKV(*right), got, want)
        total, start = total.then(found, start), start + len(x)
    return total


def _digest_set(device: str, head_dim: int) -> Iterator[Tensor]:
    for make in (planted_rows, random_rows):
        yield make(0, DIGEST_ROWS // 2, head_dim, device=device)


def _there_and_back(tier: Tier, x: Tensor, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, words and dequantized rows."""
    stored = tier.quantize(x, mode)
    return *stored, tier.dequantize(stored.codes, stored.words, mode, x.shape[-1])


def compare(
    actual: QuantizedKV,
    expected: QuantizedKV,
    actual_values: Tensor | None = None,
    expected_values: Tensor | None = None,
) -> Mismatches:
    """Count the rows in which two results of `quantize` differ, and split the bits.

    Args:
        actual: Codes `[R, B]` and words `[R]`.
        expected: The same shapes.
        actual_values: `[R, D]` float32, dequantized rows to compare as well.
        expected_values: The same shape.
    """
    changed = _changed_bits(actual.words, expected.words)[:, None]
    if actual_values is not None and expected_values is not None:
        values = actual_values.view(torch.int32) ^ expected_values.view(torch.int32)
        changed = torch.cat((changed, values), dim=1)
    differs = (changed != 0).any(-1) | (actual.codes != expected.codes).any(-1)
    rows = differs.nonzero().flatten()
    if not len(rows):
        return NONE
    changed = changed[rows]
    split = (int(((changed & mask) != 0).sum()) for mask in (-(2**31), 0x7F800000, 0x007FFFFF))
    return Mismatches(len(rows), int(rows[0]), int(rows[-1]), *split)


def _changed_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """The bits that differ between words, int32; those of a float16 where a float32 has them."""
    if actual.dtype is torch.float32:
        return actual.view(torch.int32) ^ expected.view(torch.int32)
    bits = (actual.view(torch.int16) ^ expected.view(torch.int16)).to(torch.int32)
    return (bits & -0x400) << 16 | (bits & 0x3FF) << 13


def compare_volume(
    actual: Tier,
    expected: Tier,
    mode: Mode,
    rows: int,
    *,
    device: str = "cuda",
    watch: Callable[[int], None] = lambda rows: None,
) -> Mismatches:
    """Compare two tiers on many rows of every kind, dtype and head size in turn.

    Args:
        actual: The kernels.
        expected: The reference.
        mode: How rows are stored.
        rows: How many rows at least.
        device: Where they are made and compared.
        watch: Called with the number of rows done so far.

    Returns:
        The total; the first and last place count rows from the start of the set.
    """
    total = NONE
    for start, x in _volume(rows, device):
        total = total.then(compare(actual.quantize(x, mode), expected.quantize(x, mode)), start)
        watch(start + len(x))
    return total


def _volume(rows: int, device: str) -> Iterator[tuple[int, Tensor]]:
    """Chunks of the volume set: one in eight is of planted rows, the rest of random ones."""
    for index, start in enumerate(range(0, rows, CHUNK_ROWS)):
        make = planted_rows if index % 8 == 0 else random_rows
        # Planted rows are sixteen tensors until one is picked of them.
        count = CHUNK_ROWS // 8 if index % 8 == 0 else CHUNK_ROWS
        head_dim, dtype = FORMS[index % len(FORMS)]
        for part in range(start, start + CHUNK_ROWS, count):
            yield part, make(part, count, head_dim, seed=index, device=device).to(dtype)
