"""What a mode stores, counted in the bytes of the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from kvq.modes import Mode
from kvq.reference.hadamard import signs
from kvq.tier import QuantizedKV, new_paged_kv
from kvq.trellis import state_levels

#: Bytes of one value in the cache that is compared with.
BASELINE_BYTES = 2


class Accounting(NamedTuple):
    """The bytes of a cache, keys and values together."""

    #: Packed codes.
    code_bytes: int
    #: Stored words.
    word_bytes: int
    #: What all rows share: sign tables, levels and thresholds. Counted once.
    table_bytes: int
    #: Slots of the last pages that no token fills, codes and words.
    padding_bytes: int
    #: Key and value entries that the tokens have.
    values: int

    @property
    def stored_bytes(self) -> int:
        """Every stored tensor, rows without padding."""
        return self.code_bytes + self.word_bytes + self.table_bytes

    @property
    def paged_bytes(self) -> int:
        """Every stored tensor, the padding of a paged cache included."""
        return self.stored_bytes + self.padding_bytes

    @property
    def baseline_bytes(self) -> int:
        """The same keys and values at 16 bits each, without padding."""
        return BASELINE_BYTES * self.values

    @property
    def bits_per_value(self) -> Fraction:
        """Stored bits for each value, everything but padding counted."""
        return Fraction(8 * self.stored_bytes, self.values)

    @property
    def compression(self) -> Fraction:
        """The 16-bit bytes over the stored bytes, everything but padding counted."""
        return Fraction(self.baseline_bytes, self.stored_bytes)

    @property
    def paged_compression(self) -> Fraction:
        """The 16-bit bytes, which have no padding, over the bytes of a paged cache, which has."""
        return Fraction(self.baseline_bytes, self.paged_bytes)


def shared_tables(mode: Mode, head_dim: int) -> dict[str, Tensor]:
    """The tensors that a mode's rows of one head size share, by name."""
    tables: dict[str, Tensor] = {}
    if mode.rotation is not None and mode.rotation.random_signs:
        for index in range(mode.rotation.rounds):
            tables[f"signs_{index}"] = signs(head_dim, mode.rotation, index)
    if mode.codebook is not None:
        tables["levels"] = torch.tensor(mode.codebook.levels)
        tables["thresholds"] = torch.tensor(mode.codebook.thresholds)
    if mode.trellis is not None:
        tables["levels"] = torch.tensor(state_levels(mode.trellis))
    return tables


def account(mode: Mode, stored: Sequence[QuantizedKV], block_size: int = 16) -> Accounting:
    """Count what a mode stores.

    Args:
        mode: How the rows are stored.
        stored: Codes `[T, H, B]` and words `[T, H]`, keys and values of all layers.
        block_size: Slots of a page, for the padding.
    """
    head_dims = [mode.head_dim(rows.codes.shape[-1]) for rows in stored]
    code_bytes = size_in_bytes(rows.codes for rows in stored)
    word_bytes = size_in_bytes(rows.words for rows in stored)
    # Codebooks do not depend on the head size, so a second one brings its signs alone.
    tables = {
        name if name in ("levels", "thresholds") else f"{name}_{head_dim}": table
        for head_dim in head_dims
        for name, table in shared_tables(mode, head_dim).items()
    }
    paged_bytes = 0
    for rows, head_dim in zip(stored, head_dims, strict=True):
        tokens, heads = rows.words.shape
        pages = -(-tokens // block_size)
        cache = new_paged_kv(pages, block_size, heads, head_dim, mode, device="meta")
        paged_bytes += size_in_bytes((cache.codes, cache.words))
    return Accounting(
        code_bytes,
        word_bytes,
        size_in_bytes(tables.values()),
        paged_bytes - code_bytes - word_bytes,
        sum(
            rows.words.numel() * head_dim for rows, head_dim in zip(stored, head_dims, strict=True)
        ),
    )


def size_in_bytes(tensors: Iterable[Tensor]) -> int:
    """`numel * element_size`, summed."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
