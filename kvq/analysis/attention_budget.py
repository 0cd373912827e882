"""What error attention over a packed cache may have: derived from float64, row by row.

For each query and head the largest error over the channels may be twice that of plain attention
in the query's dtype over the dequantized cache, plus `2 u A`: u half an ulp of 1.0 in the dtype of
the output, A the largest over channels of the weighted mean of `|v|`. No other constant.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvq.reference.exact import dequantize_exact
from kvq.tier import PagedKV, as_hnd


class Budget(NamedTuple):
    """The exact output and the error that is allowed."""

    #: `[T, Hq, Dv]` float64.
    exact: Tensor
    #: `[T, Hq]` float64: of the largest error over the channels.
    allowed: Tensor
    #: `[T, Hq]` float64: the part of it that is twice the error of plain attention.
    plain: Tensor


def attention_budget(
    query: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
) -> Budget:
    """The budget of plain causal attention, arguments as `kvq.reference.paged_attention` has them.

    The sequences must be at least as long as their queries are many.
    """
    exact, allowed, twice = [], [], []
    half_ulp = torch.finfo(query.dtype).eps / 2
    starts = query_start_loc.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        rows = query[starts[index] : starts[index + 1]].transpose(0, 1)  # [Hq, Q, D]
        group = rows.shape[0] // as_hnd(key_cache)[1].shape[1]
        key, value = (
            _dequantized(cache, block_table[index], length).repeat_interleave(group, 0)
            for cache in (key_cache, value_cache)
        )
        visible = torch.ones(rows.shape[1], length, dtype=torch.bool, device=query.device)
        visible = visible.tril(length - rows.shape[1])
        logits = scale * rows.double() @ key.transpose(1, 2)
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        output = weights @ value
        with sdpa_kernel([SDPBackend.MATH]):
            plain = F.scaled_dot_product_attention(
                rows, key.to(query.dtype), value.to(query.dtype), attn_mask=visible, scale=scale
            )
        error = 2 * (plain.double() - output).abs().amax(-1)
        mean = (weights @ value.abs()).amax(-1)
        exact.append(output.transpose(0, 1))
        allowed.append((error + 2 * half_ulp * mean).transpose(0, 1))
        twice.append(error.transpose(0, 1))
    return Budget(torch.cat(exact), torch.cat(allowed), torch.cat(twice))


def _dequantized(cache: PagedKV, blocks: Tensor, length: int) -> Tensor:
    """The first `length` rows of a sequence, `[Hkv, length, D]` float64."""
    codes, words = as_hnd(cache)
    block_size = codes.shape[2]
    used = blocks[: -(-length // block_size)].long()
    head_dim = cache.mode.head_dim(codes.shape[3])
    rows = dequantize_exact(codes[used], words[used], cache.mode, head_dim)
    return rows.transpose(0, 1).flatten(1, 2)[:, :length]
