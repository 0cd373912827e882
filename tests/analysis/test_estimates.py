"""Standard errors: against the definitions, and against what repeated draws do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvq.analysis.estimates import (
    block_sums,
    blocks_of,
    clustered_error,
    jackknife,
    over_units,
    ratio,
)


def test_blocks_are_numbered_without_gaps() -> None:
    positions = torch.tensor([0, 7, 8, 40, 41, 100])
    assert blocks_of(positions, 8).tolist() == [0, 0, 1, 2, 2, 3]


def test_block_sums_of_nothing() -> None:
    assert block_sums(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).shape == (0, 3)


def test_jackknife_of_a_mean_is_the_usual_standard_error() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = ratio(x, torch.ones_like(x), torch.arange(40))
    assert float(found.value) == pytest.approx(float(x.mean()), rel=1e-12)
    assert float(found.standard_error) == pytest.approx(float(x.std()) / math.sqrt(40), rel=1e-12)


def test_jackknife_leaves_one_block_out() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.uniform(1, 2, (12, 3)), rng.uniform(1, 2, (12, 3))
    blocks = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
    left = np.array([a[blocks != i].sum(0) / b[blocks != i].sum(0) for i in range(4)])
    expected = np.sqrt(3 / 4 * ((left - left.mean(0)) ** 2).sum(0))
    found = ratio(torch.tensor(a), torch.tensor(b), torch.tensor(blocks))
    np.testing.assert_allclose(found.value, a.sum(0) / b.sum(0), rtol=1e-13)
    np.testing.assert_allclose(found.standard_error, expected, rtol=1e-12)


def test_one_unit_has_no_standard_error() -> None:
    one = torch.ones(1, 2, dtype=torch.float64)
    assert jackknife(torch.neg, one).standard_error.isnan().all()
    assert over_units(one).standard_error.isnan().all()
    pairs = torch.ones(3, 4, dtype=torch.float64)
    one_block = torch.zeros(4, dtype=torch.int64)
    assert clustered_error(pairs, torch.zeros(3, dtype=torch.int64), one_block).isnan()


def test_blocks_see_correlation_that_single_tokens_do_not() -> None:
    # An AR(1) of coefficient 0.9: the mean of n has variance about (1 + 0.9) / (1 - 0.9) / n.
    rng = np.random.default_rng(3)
    n, repeats = 1024, 64
    noise = rng.standard_normal((n, repeats)) * math.sqrt(1 - 0.9**2)
    x = np.empty((n, repeats))
    x[0] = rng.standard_normal(repeats)
    for t in range(1, n):
        x[t] = 0.9 * x[t - 1] + noise[t]
    truth = math.sqrt(19 / n)
    series = torch.tensor(x)
    ones = torch.ones_like(series)
    by_token = ratio(series, ones, torch.arange(n)).standard_error.mean()
    by_block = ratio(series, ones, torch.arange(n) // 64).standard_error.mean()
    assert float(by_token) < 0.3 * truth
    assert float(by_block) == pytest.approx(truth, rel=0.15)


def test_clustered_error_is_the_sum_of_its_three_parts() -> None:
    rng = np.random.default_rng(4)
    influence = rng.standard_normal((2, 6, 9))
    queries, keys = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    cells = np.array(
        [
            [influence[:, queries == a][:, :, keys == b].sum((1, 2)) for b in range(3)]
            for a in range(3)
        ]
    )
    by_query, by_key, both = (
        (cells.sum(1) ** 2).sum(0) * 3 / 2,
        (cells.sum(0) ** 2).sum(0) * 3 / 2,
        (cells**2).sum((0, 1)) * 9 / 8,
    )
    expected = np.sqrt(np.maximum(by_query + by_key - both, np.maximum(by_query, by_key)))
    found = clustered_error(torch.tensor(influence), torch.tensor(queries), torch.tensor(keys))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_clustered_error_is_what_repeated_draws_vary_by() -> None:
    # Every query and every key adds something of its own to all its pairs.
    generator = torch.Generator().manual_seed(5)
    repeats, queries, keys = 400, 24, 40
    x = (
        torch.randn(repeats, queries, 1, generator=generator)
        + 0.5 * torch.randn(repeats, 1, keys, generator=generator)
        + torch.randn(repeats, queries, keys, generator=generator)
    ).to(torch.float64)
    mean = x.mean((1, 2))
    influence = (x - mean[:, None, None]) / (queries * keys)
    found = clustered_error(influence, torch.arange(queries), torch.arange(keys))
    assert float(found.square().mean().sqrt()) == pytest.approx(float(mean.std()), rel=0.1)
    # Pairs taken as independent would say a seventh of it.
    naive = x.std((1, 2)) / math.sqrt(queries * keys)
    assert float(naive.mean()) < 0.3 * float(mean.std())
