"""What quantized keys and values do to attention: its weights and its output."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvq.analysis.estimates import Estimate, ratio


class WeightError(NamedTuple):
    """The error of the attention weights, for each query head: means over queries."""

    #: Kullback-Leibler divergence of the new weights from the old ones, in nats.
    kl_divergence: Estimate
    #: Half the sum of absolute differences, from 0 to 1.
    total_variation: Estimate


def log_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """Logarithms of the attention weights.

    Args:
        scores: `[H, Q, T]` float64.
        visible: `[Q, T]` bool; every query sees a key.

    Returns:
        `[H, Q, T]` float64; -inf where a key is not visible.
    """
    return torch.log_softmax(scores.masked_fill(~visible, -math.inf), dim=-1)


def weight_error(log_p: Tensor, log_p_hat: Tensor, query_blocks: Tensor) -> WeightError:
    """Compare attention weights.

    Args:
        log_p: `[H, Q, T]`, from `log_weights`.
        log_p_hat: The same of the quantized keys.
        query_blocks: `[Q]`, the block of each query: the units of the standard errors. The keys
            are taken as given.

    Returns:
        Estimates of shape `[H]`.
    """
    p = log_p.exp()
    # Invisible keys have -inf on both sides; their difference is not a number.
    log_ratio = torch.where(p > 0, log_p - log_p_hat, 0.0)
    divergence = (p * log_ratio).sum(-1).T
    variation = 0.5 * (p - log_p_hat.exp()).abs().sum(-1).T
    ones = torch.ones_like(divergence)
    return WeightError(ratio(divergence, ones, query_blocks), ratio(variation, ones, query_blocks))


def attention_output(log_p: Tensor, value: Tensor) -> Tensor:
    """`sum_t p_t v_t`.

    Args:
        log_p: `[Hq, Q, T]`, from `log_weights`.
        value: `[T, Hkv, Dv]`; query head `h` reads KV head `h // (Hq / Hkv)`.

    Returns:
        `[Q, Hq, Dv]` float64.
    """
    query_heads, queries, tokens = log_p.shape
    heads = value.shape[1]
    weights = log_p.exp().reshape(heads, -1, tokens)
    output = weights @ value.to(torch.float64).permute(1, 0, 2)
    return output.reshape(query_heads, queries, -1).permute(1, 0, 2)


def output_error(exact: Tensor, approximate: Tensor, query_blocks: Tensor) -> Estimate:
    """`sum |o_hat - o|^2 / sum |o|^2` over the queries, for each query head.

    Args:
        exact: `[Q, Hq, Dv]`, from `attention_output`.
        approximate: The same of quantized keys, values or both.
        query_blocks: `[Q]`, the block of each query: the units of the standard error.

    Returns:
        An estimate of shape `[Hq]`.
    """
    error = (approximate - exact).square().sum(-1)
    return ratio(error, exact.square().sum(-1), query_blocks)
