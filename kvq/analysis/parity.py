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
CHUNK_ROWS = 2**20
#: Head sizes of the volume set take turns, a chunk each.
HEAD_DIMS = (64, 128, 96)
#: Input dtypes take turns as well.
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


class Mismatches(NamedTuple):
    """What differs in a comparison of rows."""

    #: Rows that differ in a code or in the word.
    rows: int
    #: The first and the last of them; -1 if none.
    first: int
    last: int
    #: Words that differ in the sign, the exponent, the mantissa.
    sign: int
    exponent: int
    mantissa: int


def digest(tier: Tier, mode: Mode, *, device: str = "cpu", head_dim: int = 128) -> str:
    """SHA-256 (hex) of the codes, words and dequantized rows of the digest set.

    Args:
        tier: Where it is computed.
        mode: How rows are stored.
        device: Where the rows are.
        head_dim: D.
    """
    found = hashlib.sha256()
    half = DIGEST_ROWS // 2
    for make in (planted_rows, random_rows):
        x = make(0, half, head_dim, device=device)
        stored = tier.quantize(x, mode)
        rows = tier.dequantize(stored.codes, stored.words, mode, head_dim)
        for tensor in (stored.codes, stored.words, rows):
            found.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def compare(actual: QuantizedKV, expected: QuantizedKV) -> Mismatches:
    """Count the rows in which two results of `quantize` differ, and split the words' bits."""
    left, right = actual.words.view(torch.int32), expected.words.view(torch.int32)
    differs = (left != right) | (actual.codes != expected.codes).any(-1)
    rows = differs.nonzero().flatten()
    if not len(rows):
        return Mismatches(0, -1, -1, 0, 0, 0)
    changed = (left ^ right)[rows]
    split = (int(((changed & mask) != 0).sum()) for mask in (-(2**31), 0x7F800000, 0x007FFFFF))
    return Mismatches(len(rows), int(rows[0]), int(rows[-1]), *split)


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
    total = Mismatches(0, -1, -1, 0, 0, 0)
    for start, x in _volume(rows, device):
        found = compare(actual.quantize(x, mode), expected.quantize(x, mode))
        if found.rows:
            first = start + found.first if total.first < 0 else total.first
            total = Mismatches(
                total.rows + found.rows,
                first,
                start + found.last,
                total.sign + found.sign,
                total.exponent + found.exponent,
                total.mantissa + found.mantissa,
            )
        watch(start + len(x))
    return total


def _volume(rows: int, device: str) -> Iterator[tuple[int, Tensor]]:
    """Chunks of the volume set: one in eight is of planted rows, the rest of random ones."""
    for index, start in enumerate(range(0, rows, CHUNK_ROWS)):
        make = planted_rows if index % 8 == 0 else random_rows
        # Planted rows are sixteen tensors until one is picked of them.
        count = CHUNK_ROWS // 8 if index % 8 == 0 else CHUNK_ROWS
        head_dim = HEAD_DIMS[index % len(HEAD_DIMS)]
        dtype = DTYPES[index // len(HEAD_DIMS) % len(DTYPES)]
        for part in range(start, start + CHUNK_ROWS, count):
            yield part, make(part, count, head_dim, seed=index, device=device).to(dtype)
