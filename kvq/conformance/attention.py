"""A small paged cache with queries, and what attention over it must give.

It holds what readers get wrong: pages in no order, tables with entries past the end, lengths that
do not fill a page, a sequence that is all new, one new token and several, and query heads that
share a KV head. What no token was written to has NaN for a word and bytes of ones for codes, and
so has the page that the entries past the end name: whatever a reader multiplies by zero, shows.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from kvq.analysis.attention_budget import attention_budget
from kvq.analysis.planted_rows import rows_of_kind
from kvq.conformance.manifest import INDEX, Paged
from kvq.modes import Mode
from kvq.reference import paged_attention, reshape_and_cache
from kvq.tier import PagedKV, new_paged_kv

#: Sequences with one new token, with nothing but new tokens, and with some.
PAGED: Final = Paged(
    num_blocks=7,
    block_size=16,
    query_heads=4,
    kv_heads=2,
    seq_lens=(37, 5, 20),
    query_lens=(1, 5, 3),
)
#: Pages of each sequence; page 3 is nobody's.
_BLOCK_TABLE: Final = ((6, 0, 2, 3), (4, 3, 3, 3), (1, 5, 3, 3))
#: Added to the seed: keys, values and queries are other rows than the planted ones.
_KEYS, _VALUES, _QUERIES = 1001, 2002, 3003


def index_tensors() -> dict[str, Tensor]:
    """`block_table`, `seq_lens` and `query_start_loc`, int32."""
    lengths = torch.tensor(PAGED.query_lens)
    return {
        "block_table": torch.tensor(_BLOCK_TABLE, dtype=torch.int32),
        "seq_lens": torch.tensor(PAGED.seq_lens, dtype=torch.int32),
        "query_start_loc": torch.cat((lengths[:0].new_zeros(1), lengths.cumsum(0))).int(),
    }


def make_query(head_dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """`[tokens, query heads, head_dim]`, near-Gaussian."""
    tokens = sum(PAGED.query_lens)
    return _rows(tokens, PAGED.query_heads, head_dim, seed + _QUERIES).to(dtype)


def attention_case(mode: Mode, query: Tensor, seed: int) -> dict[str, Tensor]:
    """The paged caches, the exact output and the error that is allowed, by part.

    Args:
        mode: How keys and values are stored.
        query: From `make_query`. Keys and values are of its dtype.
        seed: Keys and values depend on it.
    """
    head_dim = query.shape[2]
    index = index_tensors()
    slots = torch.cat(
        [
            blocks.repeat_interleave(PAGED.block_size)[:length] * PAGED.block_size
            + torch.arange(length) % PAGED.block_size
            for blocks, length in zip(index["block_table"].long(), PAGED.seq_lens, strict=True)
        ]
    )
    key, value = (
        _rows(len(slots), PAGED.kv_heads, head_dim, seed + offset).to(query.dtype)
        for offset in (_KEYS, _VALUES)
    )
    key_cache, value_cache = (_poisoned(mode, head_dim) for _ in range(2))
    reshape_and_cache(key, value, key_cache, value_cache, slots)
    exact, allowed = _budget(query, key_cache, value_cache)
    return {
        "key_codes": key_cache.codes,
        "key_words": key_cache.words,
        "value_codes": value_cache.codes,
        "value_words": value_cache.words,
        "output": exact,
        "allowed": allowed,
    }


def _budget(query: Tensor, key_cache: PagedKV, value_cache: PagedKV) -> tuple[Tensor, Tensor]:
    """The exact output, and the error that is allowed.

    A budget of a row that rests on the error of one other computation of that row is a matter of
    luck where nearly all of the error is rounding in float32: the reference itself is over it in
    one row of a hundred. So the largest error of the case counts, and of two computations: of
    torch's attention over rows that are rounded once, and of the reference, whose rows were
    dequantized in float32.
    """
    index, scale = index_tensors(), query.shape[2] ** -0.5
    table, lengths, starts = (index[name] for name in INDEX)
    caches = (key_cache, value_cache)
    budget = attention_budget(query, *caches, table, lengths, starts, scale=scale)
    output = paged_attention(query, *caches, table, lengths, starts, scale=scale)
    assert isinstance(output, Tensor)
    twice = 2 * (output.double() - budget.exact).abs().max()
    largest = torch.maximum(budget.plain.max(), twice)
    return budget.exact, budget.allowed - budget.plain + largest


def _poisoned(mode: Mode, head_dim: int) -> PagedKV:
    cache = new_paged_kv(PAGED.num_blocks, PAGED.block_size, PAGED.kv_heads, head_dim, mode)
    cache.codes.fill_(0xFF)
    cache.words.fill_(math.nan)
    return cache


def _rows(tokens: int, heads: int, head_dim: int, seed: int) -> Tensor:
    return rows_of_kind("gaussian", tokens * heads, head_dim, seed=seed).view(
        tokens, heads, head_dim
    )
