"""The read path: attention over a paged cache, one sequence and one KV head at a time.

It is written to be read. Keys and values are dequantized and the definition is applied to them;
nothing is fused and nothing is skipped, except that the queries of a long prompt are taken a few
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvq.checks import check_values_are_there
from kvq.reference.exact import dequantize_exact
from kvq.reference.quantize import dequantize
from kvq.tier import (
    AttentionFeatures,
    AttentionOutput,
    PagedKV,
    as_hnd,
    check_attention,
    check_merge,
)

#: Logits in memory at once, beyond which queries are taken in several chunks.
LOGITS_AT_ONCE = 2**22


def paged_attention(
    query: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    features: AttentionFeatures = AttentionFeatures(),  # noqa: B008 (frozen)
    return_lse: bool = False,
    max_query_len: int | None = None,
    check: bool | None = None,
) -> Tensor | AttentionOutput:
    """Causal attention of new tokens over a quantized, paged cache that already holds them.

    Query `i` of a sequence stands at `pos = seq_len - q_len + i`. It sees the keys `j` of its
    sequence with `j <= pos`, with `pos - j < window`, with `j >= first_key`, and with no bias of
    -inf. The logit of a key it sees is

        soft_cap * tanh(scale * q.k / soft_cap) + slope * (j - pos)
            + query_query_bias[i, j - (seq_len - q_len)] + logit_bias[j]

    (each part where the feature is given), and the sink is one more logit that adds to the
    denominator of the softmax and to nothing else. What a query does not see is selected away,
    never multiplied by zero: its bytes may be anything. A query that sees no key gives output 0
    and log-sum-exp -inf, whatever the sink; so do the queries at negative positions of a sequence
    with `q_len > seq_len`, such as a padding sequence of length 0. A NaN row makes the queries
    that see it NaN, and no others.

    Args:
        query: `[T, Hq, D]` float32, float16, bfloat16 or float64, any strides; the new tokens of
            all sequences, one sequence after the other. Query head `h` reads KV head
            `h // (Hq / Hkv)`.
        key_cache: D is the head size of its rows.
        value_cache: The same blocks, KV heads and block size; its mode and its head size Dv may
            differ.
        block_table: `[sequences, W]` int32 or int64: key `j` lies in block
            `block_table[sequence, j // block_size]`. Only the first `ceil(seq_len / block_size)`
            entries of a row are looked at.
        seq_lens: `[sequences]` int32 or int64: keys of each sequence, the new ones included.
        query_start_loc: `[sequences + 1]` int32 or int64: where each sequence's queries start,
            from 0 to T. A sequence may have none.
        scale: Multiplies `q.k`; usually `1 / sqrt(D)`.
        features: Whatever is more than causal softmax.
        return_lse: Return the log-sum-exp as well.
        max_query_len: A promise that no sequence has more queries than this: 1 when each adds one
            token. Kernels leave out what is for more. It changes no bit; where it is broken and
            not checked, the output of the sequence is undefined.
        check: Look at the values of `block_table`, `seq_lens` and `query_start_loc`, and at the
            length of `logit_bias`; by default on the CPU only. Without it a sequence whose row of
            `block_table` is too short, or names a block that does not exist, gives NaN for output
            and log-sum-exp; a query that belongs to no sequence sees no key; and a key past the
            end of `logit_bias` gets no bias.

    Returns:
        `[T, Hq, Dv]` in the query's dtype; with `return_lse` an `AttentionOutput`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: Shapes or devices do not fit together, `scale` is not finite, or a value that
            `check` looks at is out of range; the message names the first one.

    Exactness: within an error budget across tiers; the same bits for a sequence whatever else is
    in the batch. A float64 query is answered in float64 from the exact values of codes and words;
    any other in float32 from `dequantize`d rows.
    """
    check_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale,
        features,
        return_lse,
        max_query_len,
        check,
    )
    check_values_are_there("query", query)
    key_words, value_codes = as_hnd(key_cache)[1], as_hnd(value_cache)[0]
    num_blocks, num_kv_heads, block_size = key_words.shape
    num_tokens, num_heads = query.shape[:2]
    group = num_heads // num_kv_heads
    compute = torch.float64 if query.dtype is torch.float64 else torch.float32

    value_dim = value_cache.mode.head_dim(value_codes.shape[3])
    output = query.new_zeros((num_tokens, num_heads, value_dim))
    log_sum_exp = query.new_full((num_tokens, num_heads), -math.inf, dtype=compute)
    starts = query_start_loc.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        if seq_len <= 0:
            continue
        first, last = starts[index], starts[index + 1]
        blocks = block_table[index, : -(-seq_len // block_size)]
        if len(blocks) * block_size < seq_len or ((blocks < 0) | (blocks >= num_blocks)).any():
            output[first:last] = math.nan
            log_sum_exp[first:last] = math.nan
            continue
        step = max(1, LOGITS_AT_ONCE // (group * seq_len))
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            keys = _read_rows(key_cache, blocks, kv_head, seq_len, compute)
            values = _read_rows(value_cache, blocks, kv_head, seq_len, compute)
            sinks = None if features.sink_logits is None else features.sink_logits[heads]
            for start in range(first, last, step):
                rows = slice(start, min(start + step, last))
                place = _Place(index, rows, heads, start - first, last - first, seq_len)
                # A fresh copy: the bits of a product depend on the strides of its factors.
                q = query[rows, heads].to(compute).clone(memory_format=torch.contiguous_format)
                logits, visible = _logits(scale * (q @ keys.T), place, features)
                weights, log_sum_exp[rows, heads] = _softmax(logits, visible, sinks)
                output[rows, heads] = _average(weights, visible, values).to(output.dtype)
    return AttentionOutput(output, log_sum_exp) if return_lse else output


class _Place(NamedTuple):
    """Which queries a block of logits belongs to."""

    #: Of the sequence in the batch.
    sequence: int
    #: Of the queries among all T.
    rows: slice
    #: Of the query heads among all Hq.
    heads: slice
    #: Of the first of the queries among the new tokens of its sequence.
    first: int
    #: New tokens of the sequence.
    q_len: int
    #: Keys of the sequence.
    seq_len: int


def _read_rows(
    cache: PagedKV, blocks: Tensor, kv_head: int, length: int, dtype: torch.dtype
) -> Tensor:
    """The first `length` rows of one KV head in `blocks`, `[length, D]`."""
    codes, words = as_hnd(cache)
    head_dim = cache.mode.head_dim(codes.shape[3])
    read = dequantize_exact if dtype is torch.float64 else dequantize
    row_codes = codes[blocks, kv_head].flatten(0, 1)[:length]
    row_words = words[blocks, kv_head].flatten(0, 1)[:length]
    return read(row_codes, row_words, cache.mode, head_dim)


def _logits(scores: Tensor, place: _Place, features: AttentionFeatures) -> tuple[Tensor, Tensor]:
    """Scores `[Q, G, K]` capped and biased, and which of them are visible (`[Q, G or 1, K]`)."""
    num_queries, _, num_keys = scores.shape
    first_position = place.seq_len - place.q_len + place.first
    position = torch.arange(first_position, first_position + num_queries, device=scores.device)
    key = torch.arange(num_keys, device=scores.device)
    offset = key - position[:, None]  # [Q, K]

    visible = offset <= 0
    if features.window is not None:
        visible &= offset > -features.window
    if features.first_key is not None:
        visible &= key >= features.first_key[place.sequence]

    if features.soft_cap is not None:
        scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
    bias = scores.new_zeros((1, 1, 1))
    if features.alibi_slopes is not None:
        slopes = features.alibi_slopes[place.heads].to(bias.dtype)
        bias = bias + slopes[:, None] * offset[:, None]
    if features.query_query_bias is not None:
        bias = bias + _query_query_bias(features.query_query_bias, place)[:, None]
    if features.logit_bias is not None:
        bias = bias + _logit_bias(features.logit_bias, place)
    return scores + bias, visible[:, None] & (bias != -math.inf)


def _query_query_bias(bias: Tensor, place: _Place) -> Tensor:
    """`[Q, K]`: `query_query_bias` where query and key are both new tokens, 0 elsewhere."""
    if bias.ndim == 3:
        bias = bias[place.sequence]
    num_queries = place.rows.stop - place.rows.start
    # New token s is key context + s; with q_len > seq_len the first ones are no keys.
    context = place.seq_len - place.q_len
    bias = bias[place.first : place.first + num_queries, max(0, -context) :]
    left = max(0, context)
    right = place.seq_len - left - bias.shape[1]
    return F.pad(bias, (left, right, 0, num_queries - bias.shape[0]))


def _logit_bias(bias: Tensor, place: _Place) -> Tensor:
    """`[Q or 1, G or 1, K]`: the rows and heads of `logit_bias` that belong to `place`."""
    if bias.shape[0] > 1:
        bias = bias[place.rows]
    if bias.shape[1] > 1:
        bias = bias[:, place.heads]
    return F.pad(bias, (0, place.seq_len - bias.shape[2]))


def _average(weights: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    """Weights `[Q, G, K]` times values `[K, Dv]`; a row of NaN counts where it is visible."""
    finite = values.isfinite().all(-1)
    mean = weights @ values.where(finite[:, None], 0.0)
    return mean.masked_fill((visible & ~finite).any(-1, keepdim=True), math.nan)


def _softmax(logits: Tensor, visible: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the visible logits and the sinks.

    Args:
        logits: `[..., H, K]`.
        visible: The same, or with axes of 1.
        sink_logits: `[H]`.

    Returns:
        weights `[..., H, K]`, 0 where nothing is visible; log-sum-exps `[..., H]`, -inf there.
    """
    if sink_logits is None:
        sink_logits = logits.new_full(logits.shape[-2:-1], -math.inf)
    sinks = sink_logits.to(logits.dtype).expand(logits.shape[:-1])
    logits = torch.cat((logits.where(visible, -math.inf), sinks[..., None]), dim=-1)
    peak = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - peak)
    denominator = weights.sum(-1, keepdim=True)
    seen = visible.any(-1, keepdim=True)
    log_sum_exp = (peak + denominator.log()).where(seen, -math.inf)
    return (weights / denominator).where(seen, 0.0)[..., :-1], log_sum_exp[..., 0]


def merge_attention(
    parts: Sequence[AttentionOutput], sink_logits: Tensor | None = None
) -> AttentionOutput:
    """Attention over the union of disjoint sets of keys, from attention over each.

    `sum_i exp(lse_i) output_i / (sum_i exp(lse_i) + exp(sink))`. A part that sees no key
    (log-sum-exp -inf) adds nothing, whatever its output holds.

    Args:
        parts: For each set of keys output `[T, Hq, Dv]` and log-sum-exp `[T, Hq]`, computed
            without sinks, all of one dtype.
        sink_logits: `[Hq]` float32: one more logit for each head, in the denominator only.

    Returns:
        What `paged_attention` gives for the union.

    Raises:
        TypeError: Dtypes differ, an output is not of floating point, or `sink_logits` is not
            float32.
        ValueError: There are no parts, or shapes or devices differ.

    Exactness: exact but for rounding; a part in half precision was rounded already. Computed in
    the dtype of the log-sum-exp.
    """
    check_merge(parts, sink_logits)
    check_values_are_there("parts", parts[0][0])
    logits = torch.stack([lse for _, lse in parts], dim=-1)  # [T, Hq, parts]
    outputs = torch.stack([output for output, _ in parts], dim=-2)  # [T, Hq, parts, Dv]
    visible = logits != -math.inf
    weights, log_sum_exp = _softmax(logits, visible, sink_logits)
    mean = (weights[..., None] * outputs.where(visible[..., None], 0.0)).sum(-2)
    return AttentionOutput(mean.to(outputs.dtype), log_sum_exp)
