"""The position-shift test: does a text lose more once it is moved to other positions?

Each window is its own control, and differences between windows are what there is to go by: a
paired t-test, one-sided, at 1%.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from kvq.integrations.observe import attention_modules, observe
from kvq.key_transforms import KeyTransform
from kvq.rotary import RotarySpec

#: Where windows are moved to.
OFFSET = 30_000


def loses_more(there: Sequence[float], here: Sequence[float]) -> bool:
    """Whether the KL divergences of the same windows are larger in one place than in another."""
    return bool(stats.ttest_rel(there, here, alternative="greater").pvalue < 0.01)


def mean_after_rope(model: Any, windows: Tensor) -> dict[int, KeyTransform]:
    """What is not offered: the mean of keys after RoPE, the same at every position."""
    keys: dict[int, list[Tensor]] = {}

    def keep(index: int, query: Tensor, key: Tensor, *_: object) -> None:
        keys.setdefault(index, []).append(key[0].float())

    modules = attention_modules(model, windows[0, :1])
    with torch.no_grad():
        for ids in windows:
            observe(model, ids, modules, keep)
    dim = next(iter(keys.values()))[0].shape[-1]
    still = RotarySpec((0.0,) * (dim // 2), dim)  # turns nothing
    return {
        index: KeyTransform(still, mean=torch.cat(found, 1).mean(1))
        for index, found in keys.items()
    }
