"""Estimates with standard errors, for numbers that are correlated along the tokens.

Neighboring tokens share a text, so a token is no unit of its own: the units are blocks of
consecutive positions. Sums over blocks go into a delete-one-block jackknife. Numbers that belong
to a pair (query, key) vary with both, and neither alone tells how much: their error is clustered
by blocks of queries and by blocks of keys at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """A value and its standard error, which is NaN where there are fewer than two units."""

    #: `[...]` float64.
    value: Tensor
    #: The same shape, float64.
    standard_error: Tensor


def blocks_of(positions: Tensor, size: int) -> Tensor:
    """The block of each position: numbered from 0, without gaps.

    Args:
        positions: `[T]` int64.
        size: Positions in a block.

    Returns:
        `[T]` int64.
    """
    blocks: Tensor = torch.unique(positions // size, return_inverse=True)[1]
    return blocks


def block_sums(x: Tensor, blocks: Tensor) -> Tensor:
    """Sums of `x` `[T, ...]` over each block, `[B, ...]` float64."""
    count = int(blocks.max()) + 1 if len(blocks) else 0
    out = torch.zeros((count, *x.shape[1:]), dtype=torch.float64, device=x.device)
    return out.index_add_(0, blocks, x.to(torch.float64))


def jackknife(statistic: Callable[..., Tensor], *sums: Tensor) -> Estimate:
    """A function of sums over blocks, and its delete-one-block jackknife standard error.

    Args:
        statistic: Takes as many tensors as there are `sums`, without their first axis or with it.
        sums: `[B, ...]` each, sums over every block.
    """
    totals = [part.sum(0) for part in sums]
    value = statistic(*totals)
    count = len(sums[0])
    if count < 2:
        return Estimate(value, torch.full_like(value, math.nan))
    left = statistic(*(total - part for total, part in zip(totals, sums, strict=True)))
    variance = (left - left.mean(0)).square().sum(0) * ((count - 1) / count)
    return Estimate(value, variance.sqrt())


def ratio(numerator: Tensor, denominator: Tensor, blocks: Tensor) -> Estimate:
    """`sum(numerator) / sum(denominator)` over the first axis, by blocks.

    Args:
        numerator: `[T, ...]`.
        denominator: The same shape.
        blocks: `[T]`, the block of each.
    """
    return jackknife(torch.divide, block_sums(numerator, blocks), block_sums(denominator, blocks))


def clustered_error(influence: Tensor, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
    """The standard error of a number estimated from pairs (query, key), clustered both ways.

    The variance between blocks of queries, plus that between blocks of keys, less that between
    their intersections, which both have counted (Cameron, Gelbach and Miller, 2011); never less
    than either alone.

    Args:
        influence: `[..., Q, T]`: how much each pair moves the estimate; 0 for pairs that are not
            seen. It sums to 0.
        query_blocks: `[Q]`, the block of each query.
        key_blocks: `[T]`, the block of each key.

    Returns:
        `[...]` float64; NaN with fewer than two blocks of keys. With one block of queries the
        queries are taken as given.
    """
    cells = _sum_pairs(influence, query_blocks, key_blocks)
    rows, columns = cells.shape[-2:]
    by_key = _between(cells.sum(-2).square().sum(-1), columns)
    if rows < 2:
        return by_key.sqrt()
    by_query = _between(cells.sum(-1).square().sum(-1), rows)
    both = _between(cells.square().sum((-1, -2)), rows * columns)
    return torch.maximum(by_query + by_key - both, torch.maximum(by_query, by_key)).sqrt()


def _sum_pairs(influence: Tensor, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
    """Sums over blocks by blocks, `[..., Bq, Bk]`."""
    left = torch.nn.functional.one_hot(query_blocks).to(influence.dtype)
    right = torch.nn.functional.one_hot(key_blocks).to(influence.dtype)
    return left.T @ (influence @ right)


def _between(squares: Tensor, count: int) -> Tensor:
    return squares * (count / (count - 1)) if count > 1 else torch.full_like(squares, math.nan)


def over_units(values: Tensor) -> Estimate:
    """The mean over the first axis, whose entries are the units, and its standard error."""
    count = len(values)
    if count < 2:
        return Estimate(values.mean(0), torch.full_like(values[0], math.nan))
    return Estimate(values.mean(0), values.std(0) / math.sqrt(count))
