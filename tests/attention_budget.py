"""Whether attention is within its error budget: derived from float64, row by row.

For each query and head the largest error over the channels may be twice that of attention in the
query's dtype over keys and values rounded to it, plus `2 u A`: u half an ulp of 1.0 in the dtype
of the output, A the largest over channels of the weighted mean of `|v|`. No other constant. Plain
causal attention is torch's; with features it is the reference on the rounded rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvq.reference import attention
from kvq.tier import AttentionFeatures, AttentionOutput, as_hnd
from tests.attention_cases import PLAIN, Batch

#: The log-sum-exp of keys that are all biased by the least of numbers may stop here.
LEAST_LOG_SUM_EXP = -5e36


class Budget(NamedTuple):
    """What is exact, and the largest error over the channels that is allowed."""

    exact: AttentionOutput
    #: `[T, Hq]` each.
    output: Tensor
    log_sum_exp: Tensor


def attention_budget(batch: Batch, features: AttentionFeatures = PLAIN) -> Budget:
    """The budget of `batch.run(features)`. A sequence whose table is bad is NaN and has none."""
    dtype = batch.query.dtype
    half_ulp = torch.finfo(dtype).eps / 2
    double = replace(batch, query=batch.query.double())
    exact = double.run(features, check=False)
    like_output, like_lse = exact.output.clone(), exact.log_sum_exp.clone()
    size, lse_size = exact.log_sum_exp * 0, exact.log_sum_exp.abs()
    _, kv_heads, block_size = as_hnd(batch.key_cache)[1].shape
    num_blocks = len(batch.key_cache.codes)
    group = batch.query.shape[1] // kv_heads
    for index, (seq_len, q_len) in enumerate(zip(batch.seq_lens, batch.q_lens, strict=True)):
        blocks = batch.block_table[index, : -(-seq_len // block_size)]
        bad = len(blocks) * block_size < seq_len or ((blocks < 0) | (blocks >= num_blocks)).any()
        if bad or not seq_len or not q_len:
            continue
        rows = slice(batch.starts[index], batch.starts[index + 1])
        for kv_head in range(kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            place = attention._Place(index, rows, heads, 0, q_len, seq_len)
            sinks = None if features.sink_logits is None else features.sink_logits[heads]
            key, value = (
                attention._read_rows(cache, blocks, kv_head, seq_len, torch.float64)
                for cache in (batch.key_cache, batch.value_cache)
            )
            query = batch.query[rows, heads]
            scores = batch.scale * (query.double() @ key.T)
            logits, visible = attention._logits(scores, place, features)
            weights, _ = attention._softmax(logits, visible, sinks)
            size[rows, heads] = attention._average(weights, visible, value.abs()).amax(-1)
            terms = (weights * logits.abs()).where(visible & (weights > 0), 0.0).sum(-1)
            lse_size[rows, heads] = torch.maximum(lse_size[rows, heads], terms)

            rounded, values = key.to(dtype), value.to(dtype)
            single = batch.scale * (query.float() @ rounded.float().T)
            logits, visible = attention._logits(single, place, features)
            weights, like_lse[rows, heads] = (
                x.double() for x in attention._softmax(logits, visible, sinks)
            )
            if features == PLAIN and q_len <= seq_len and value.isfinite().all():
                with sdpa_kernel([SDPBackend.MATH]):
                    like = F.scaled_dot_product_attention(
                        query.transpose(0, 1),
                        rounded.expand(group, -1, -1),
                        values.expand(group, -1, -1),
                        attn_mask=visible[:, 0],
                        scale=batch.scale,
                    ).transpose(0, 1)
            else:
                like = attention._average(weights.float(), visible, values.float()).to(dtype)
            like_output[rows, heads] = like.double()
    error = (like_output - exact.output).abs().amax(-1)
    lse_error = torch.where(
        like_lse == exact.log_sum_exp, 0.0, (like_lse - exact.log_sum_exp).abs()
    )
    return Budget(
        exact,
        2 * error + 2 * half_ulp * size,
        2 * lse_error + 2 * half_ulp * lse_size,
    )


def assert_within_budget(
    batch: Batch,
    features: AttentionFeatures = PLAIN,
    *,
    tier: ModuleType,
    check: bool | None = None,
    index_dtype: torch.dtype = torch.int64,
) -> AttentionOutput:
    """What `tier` answers, which must be as close as its budget says."""
    budget = attention_budget(batch, features)
    actual = batch.run(features, tier=tier, check=check, index_dtype=index_dtype)
    assert actual.output.dtype is batch.query.dtype
    assert actual.log_sum_exp.dtype is torch.float32
    exact, unseen = budget.exact, budget.exact.log_sum_exp == -math.inf
    for found, right in zip(actual, exact, strict=True):
        assert torch.equal(found.isnan(), right.isnan()), "NaN elsewhere"
        assert torch.equal(found[unseen].double(), right[unseen]), "nothing is seen"
    found, right = (x.log_sum_exp.double().clamp(min=LEAST_LOG_SUM_EXP) for x in (actual, exact))
    lse_error = (found - right).masked_fill(unseen, 0.0).abs()
    error = (actual.output.double() - exact.output).abs().amax(-1)
    for what, errors, allowed in (
        ("output", error, budget.output),
        ("log-sum-exp", lse_error, budget.log_sum_exp),
    ):
        over = (errors > allowed) & ~unseen
        assert not over.any(), (
            f"{what}: {int(over.sum())} of {over.numel()} over budget, "
            f"up to {float((errors / allowed)[over].max()):.3g} times, "
            f"first {over.nonzero()[0].tolist()}"
        )
    return actual
