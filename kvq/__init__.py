"""kvq: quantization of the KV cache of language models.

`import kvq` loads the table of modes and neither tier, torch, triton, scipy nor matplotlib; the
functions load what they need when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvq.codebooks import CODEBOOKS, Codebook
from kvq.modes import HADAMARD, MODES, RANDOM_HADAMARD, Mode, Rotation, ScaleFit, mode
from kvq.rounding import Rounding

if TYPE_CHECKING:
    from kvq.dispatch import (
        copy_blocks,
        dequantize,
        hadamard_transform,
        merge_attention,
        pack_codes,
        paged_attention,
        quantize,
        reshape_and_cache,
        unpack_codes,
    )
    from kvq.tier import (
        AttentionFeatures,
        AttentionOutput,
        Layout,
        PagedKV,
        QuantizedKV,
        new_paged_kv,
    )

__version__ = "0.1.0"

__all__ = [
    "CODEBOOKS",
    "HADAMARD",
    "MODES",
    "RANDOM_HADAMARD",
    "AttentionFeatures",
    "AttentionOutput",
    "Codebook",
    "Layout",
    "Mode",
    "PagedKV",
    "QuantizedKV",
    "Rotation",
    "Rounding",
    "ScaleFit",
    "copy_blocks",
    "dequantize",
    "hadamard_transform",
    "merge_attention",
    "mode",
    "new_paged_kv",
    "pack_codes",
    "paged_attention",
    "quantize",
    "reshape_and_cache",
    "unpack_codes",
]


def __getattr__(name: str) -> Any:
    """What needs torch: the functions of `kvq.dispatch`, and the values of `kvq.tier`."""
    if name in __all__:
        for room in ("kvq.tier", "kvq.dispatch"):
            found = getattr(importlib.import_module(room), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
