"""What quantized keys do to the scores `scale * q.k`: bias and spread, in units of the logit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvq.analysis.estimates import Estimate, clustered_error
from kvq.checks import check_dtype, check_number, check_shape, check_tensor


class ScoreBias(NamedTuple):
    """The error of the scores, for each query head.

    Softmax does not see a number added to all scores of a query, so `slope`, `spread` and
    `centered_rmse` are taken after the mean over its visible keys is removed, query by query;
    `mean_error` and `rmse` are not.
    """

    #: Mean signed error over the visible pairs.
    mean_error: Estimate
    #: Regression slope of the new score on the old one, with an intercept for each query. Below 1
    #: the scores shrink, as by a higher temperature.
    slope: Estimate
    #: Standard deviation of what that regression leaves.
    spread: Estimate
    #: Root mean square error after the mean of each query is removed.
    centered_rmse: Estimate
    #: Root mean square error.
    rmse: Estimate


class PairErrors(NamedTuple):
    """Scores and their errors over the visible pairs, `[H, Q, T]` float64, 0 elsewhere."""

    #: The error.
    error: Tensor
    #: The error less its mean over the query's keys.
    centered_error: Tensor
    #: The score less its mean over the query's keys.
    centered_score: Tensor
    #: How many pairs are visible.
    num_pairs: Tensor


def scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """`scale * q.k` of every pair, in float64.

    Args:
        query: `[Q, Hq, D]`.
        key: `[T, Hkv, D]`; query head `h` reads KV head `h // (Hq / Hkv)`.
        scale: The softmax scale.

    Returns:
        `[Hq, Q, T]` float64.
    """
    for argument, rows, axes in (("query", query, "[Q, Hq, D]"), ("key", key, "[T, Hkv, D]")):
        check_shape(argument, check_tensor(argument, rows), (None, None, None), axes)
    check_number("scale", scale)
    if query.shape[2] != key.shape[2] or query.shape[1] % max(1, key.shape[1]):
        raise ValueError(
            "query must have the key's channels and a multiple of its heads, "
            f"got {list(query.shape)} for keys of {list(key.shape)}"
        )
    q, k = query.to(torch.float64), key.to(torch.float64)
    queries, query_heads, head_dim = q.shape
    tokens, heads, _ = k.shape
    grouped = q.permute(1, 0, 2).reshape(heads, -1, head_dim)
    product = grouped @ k.permute(1, 2, 0)
    return product.reshape(query_heads, queries, tokens) * scale


def pair_errors(exact: Tensor, approximate: Tensor, visible: Tensor) -> PairErrors:
    """Errors of scores, raw and centered query by query.

    Args:
        exact: `[H, Q, T]` float64.
        approximate: The same shape.
        visible: `[Q, T]` bool; every query sees a key.
    """
    seen = visible.to(torch.float64)
    per_query = seen.sum(-1)
    error = (approximate - exact) * seen
    return PairErrors(
        error,
        _center(error, seen, per_query),
        _center(exact * seen, seen, per_query),
        per_query.sum(),
    )


def _center(x: Tensor, seen: Tensor, per_query: Tensor) -> Tensor:
    return x - (x.sum(-1) / per_query)[..., None] * seen


def slope_of(pairs: PairErrors) -> Tensor:
    """The regression slope, `[H]`: 1 plus that of the error on the score."""
    squares = pairs.centered_score.square().sum((-1, -2))
    return 1.0 + (pairs.centered_score * pairs.centered_error).sum((-1, -2)) / squares


def score_bias(
    exact: Tensor, approximate: Tensor, visible: Tensor, query_blocks: Tensor, key_blocks: Tensor
) -> ScoreBias:
    """Compare scores of quantized keys with those of the keys.

    Args:
        exact: `[H, Q, T]`, from `scores`.
        approximate: The same of the quantized keys.
        visible: `[Q, T]` bool: whether the query sees the key; every query sees one.
        query_blocks: `[Q]`, the block of each query.
        key_blocks: `[T]`, the block of each key. Both kinds of blocks are the units of the
            standard errors.

    Returns:
        Estimates of shape `[H]`.
    """
    _check_scores(exact, approximate, visible, query_blocks, key_blocks)
    pairs = pair_errors(exact, approximate, visible)
    seen = visible.to(torch.float64)

    def mean(x: Tensor) -> Estimate:
        value = x.sum((-1, -2)) / pairs.num_pairs
        influence = (x - value[:, None, None] * seen) / pairs.num_pairs
        return Estimate(value, clustered_error(influence, query_blocks, key_blocks))

    slope = slope_of(pairs)
    x = pairs.centered_score
    residual = pairs.centered_error - (slope - 1.0)[:, None, None] * x
    influence = x * residual / x.square().sum((-1, -2), keepdim=True)
    return ScoreBias(
        mean_error=mean(pairs.error),
        slope=Estimate(slope, clustered_error(influence, query_blocks, key_blocks)),
        spread=_root(mean(residual.square())),
        centered_rmse=_root(mean(pairs.centered_error.square())),
        rmse=_root(mean(pairs.error.square())),
    )


def _check_scores(
    exact: Tensor, approximate: Tensor, visible: Tensor, query_blocks: Tensor, key_blocks: Tensor
) -> None:
    """The argument rules of `score_bias`."""
    check_shape("exact", check_tensor("exact", exact), (None, None, None), "[H, Q, T]")
    shape = tuple(exact.shape)
    check_shape("approximate", check_tensor("approximate", approximate), shape, "[H, Q, T]")
    check_dtype("visible", check_tensor("visible", visible), torch.bool)
    check_shape("visible", visible, shape[1:], "[Q, T]")
    for argument, blocks, length, axes in (
        ("query_blocks", query_blocks, shape[1], "[Q]"),
        ("key_blocks", key_blocks, shape[2], "[T]"),
    ):
        check_shape(argument, check_tensor(argument, blocks), (length,), axes)
    blind = (~visible.any(-1)).nonzero()
    if len(blind):
        raise ValueError(
            f"visible must have a key for every query, got none for query {int(blind[0])}"
        )


def _root(square: Estimate) -> Estimate:
    root = square.value.sqrt()
    return Estimate(root, square.standard_error / (2.0 * root))
