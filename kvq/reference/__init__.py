"""The reference tier: pure PyTorch, readable, on any device. It is the specification.

`kvq.reference.lloyd_max` fits codebooks; it is loaded on first use, since it needs scipy.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kvq.reference.attention import merge_attention, paged_attention
from kvq.reference.cache import copy_blocks, reshape_and_cache
from kvq.reference.hadamard import hadamard_transform, signs
from kvq.reference.packing import pack_codes, unpack_codes
from kvq.reference.quantize import dequantize, quantize, quantize_stochastic

__all__ = [
    "copy_blocks",
    "dequantize",
    "hadamard_transform",
    "lloyd_max",
    "merge_attention",
    "pack_codes",
    "paged_attention",
    "quantize",
    "quantize_stochastic",
    "reshape_and_cache",
    "signs",
    "unpack_codes",
]


def __getattr__(name: str) -> ModuleType:
    if name == "lloyd_max":
        return importlib.import_module("kvq.reference.lloyd_max")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
