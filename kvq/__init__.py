"""kvq: quantization of the KV cache of language models.

`import kvq` loads neither tier, nor triton, scipy or matplotlib; the functions load what they need
when they are called.
"""

from __future__ import annotations

from kvq.codebooks import CODEBOOKS, Codebook
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
from kvq.modes import HADAMARD, MODES, RANDOM_HADAMARD, Mode, Rotation, ScaleFit, mode
from kvq.rounding import Rounding
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
