"""Outside implementations, right and wrong, as `kvq vectors check` calls them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import kvq
from kvq.tier import PagedKV
from tests import oracle

HERE = "tests.conformance.implementations"


def from_the_oracle(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Written from the format page alone, in numpy."""
    assert isinstance(mode, str)
    with np.errstate(all="ignore"):
        codes, words = oracle.encode(mode, x.float().numpy())
    return torch.from_numpy(codes), torch.from_numpy(words.view(np.float32))


def read_by_the_oracle(codes: Tensor, words: Tensor, mode: str, head_dim: int) -> Tensor:
    values = oracle.decode(mode, codes.numpy(), words.numpy().view(np.uint32), head_dim)
    return torch.from_numpy(values)


def flipped_codes(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Bit 5 of byte 9 of row 7, the top bit of byte 0 of rows 12 and 27."""
    codes, words = kvq.quantize(x, mode)
    codes[7, 9] ^= 0x20
    codes[[12, 27], 0] ^= 0x80
    return codes, words


def codes_of_both_planes(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """The first bit of byte 7 and that of byte 8, of row 0."""
    codes, words = kvq.quantize(x, mode)
    codes[0, 7:9] ^= 1
    return codes, words


def flipped_words(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """The last bit of the word of row 5, and the first and the last of that of row 10."""
    codes, words = kvq.quantize(x, mode)
    bits = words.view(torch.int16 if words.dtype is torch.float16 else torch.int32)
    bits[5] ^= 1
    bits[10] ^= torch.iinfo(bits.dtype).min + 1
    return codes, words


def flipped_values(codes: Tensor, words: Tensor, mode: str, head_dim: int) -> Tensor:
    """Zeros of rows of zeros lose their sign, and row 8 is twice as large in channel 3."""
    values = kvq.dequantize(codes, words, mode, head_dim)
    values[22, 1:3] = -0.0
    values[8, 3] *= 2.0
    return values


def in_place(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Right, and leaves nothing of what it was given."""
    stored = kvq.quantize(x, mode)
    x.fill_(math.nan)
    return stored


def no_nan_rows(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Rows that are not finite are stored as zeros."""
    finite = x.isfinite().all(-1, keepdim=True)
    return kvq.quantize(x.where(finite, 0.0), mode)


def shifted_attention(query: Tensor, *args: object, scale: float) -> Tensor:
    """Off by a hundredth in one channel of token 3 and head 1; token 4 is NaN."""
    output = kvq.paged_attention(query, *args, scale=scale)
    output[3, 1, 5] += 0.01
    output[4] = math.nan
    return output


def larger_scale(query: Tensor, *args: object, scale: float) -> Tensor:
    """An eighth too large."""
    return kvq.paged_attention(query, *args, scale=1.125 * scale)


def multiplied_by_zero(
    query: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
) -> Tensor:
    """What is past the end has the weight 0, and is read."""
    output = torch.empty_like(query)
    block_size = key_cache.codes.shape[2]
    for sequence, length in enumerate(seq_lens.tolist()):
        blocks = block_table[sequence, : -(-length // block_size)].long()
        first, last = query_start_loc[sequence : sequence + 2].tolist()
        for head in range(query.shape[1]):
            key, value = (
                kvq.dequantize(
                    cache.codes[blocks, head // 2].flatten(0, 1),
                    cache.words[blocks, head // 2].flatten(),
                    cache.mode,
                    query.shape[2],
                ).double()
                for cache in (key_cache, value_cache)
            )
            places = torch.arange(len(key))
            seen = places <= torch.arange(length - last + first, length)[:, None]
            logits = scale * query[first:last, head].double() @ key.T
            weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
            output[first:last, head] = (weights @ value).to(query.dtype)
    return output


def double_precision(*args: object, scale: float) -> Tensor:
    query, *others = args
    return kvq.paged_attention(query.double(), *others, scale=scale)


def only_codes(x: Tensor, mode: str) -> Tensor:
    return kvq.quantize(x, mode).codes


def integer_codes(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    codes, words = kvq.quantize(x, mode)
    return codes.int(), words


def long_words(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    codes, words = kvq.quantize(x, mode)
    return codes, words[:, None]


def array_codes(x: Tensor, mode: str) -> tuple[object, Tensor]:
    codes, words = kvq.quantize(x, mode)
    return codes.numpy(), words


def raises(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no such kernel")


not_a_function = 3
