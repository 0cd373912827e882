"""Failures that other quantizers had, asked of the reference alone.

`tests/test_known_failures.py` says where each was reported. What both tiers are asked is in
`tests/parity/test_known_failures.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvq.modes import LEVEL_GRIDS, Mode, ScaleFit
from kvq.modes import mode as find_mode
from kvq.reference import dequantize, quantize, reshape_and_cache
from kvq.tier import QuantizedKV, new_paged_kv
from tests.cases import modes_where
from tests.peak_memory import memory_of

#: The mean squared error of the Lloyd-Max levels of N(0,1), by bits.
DISTORTION = {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.00950}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", modes_where(lambda mode: mode.grid in LEVEL_GRIDS), ids=str)
def test_levels_are_not_stretched_to_the_largest_entry(mode: Mode) -> None:
    """Levels of unit variance on rows divided by their maximum: 5.7 dB at 2 bits, and not 9.3."""
    x = randn(256 if mode.trellis else 1024, 128)
    read = dequantize(*quantize(x, mode), mode, 128)
    error = (read - x).double().square().sum() / x.double().square().sum()
    least = DISTORTION[mode.bits]
    # What a scale that keeps the length, or the projection, costs over the best one.
    if mode.scale_fit is ScaleFit.NORM_MATCH:
        least = 2 * (1 - math.sqrt(1 - least))
    elif mode.scale_fit is ScaleFit.UNBIASED:
        least /= 1 - least
    assert -10 * math.log10(error) > -10 * math.log10(least) - 0.2


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_no_copy_in_float32_is_made_of_all_rows(name: str) -> None:
    """Beyond its result a call takes less than its input in float16, and keeps nothing."""
    mode = find_mode(name)
    x = randn(8, 16_384, 128).half()
    given = x.numel() * x.element_size()
    quantize(x[:, :1], mode)  # Tables are made once, and kept.
    stored: list[QuantizedKV] = []
    memory = memory_of(lambda: stored.append(quantize(x, mode)))
    result = sum(part.numel() * part.element_size() for part in stored[0])
    assert memory.kept == result
    assert memory.peak - result < given
    caches = [new_paged_kv(256, 64, 8, 128, mode) for _ in "kv"]
    rows, slots = x.transpose(0, 1), torch.arange(16_384)
    memory = memory_of(lambda: reshape_and_cache(rows, rows, *caches, slots, check=False))
    assert memory.kept == 0
    # A head-first tensor is copied once, as it is, and its result before it is scattered.
    assert memory.peak < 2 * given + result
