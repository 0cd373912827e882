"""The kernel tier: the functions of `kvq.reference` in Triton.

What writes and reads rows has the same bits; attention stays within an error budget, and does not
take float64 queries.
"""

from __future__ import annotations

from kvq.kernels.attention import merge_attention, paged_attention
from kvq.kernels.cache import copy_blocks, reshape_and_cache
from kvq.kernels.hadamard import hadamard_transform
from kvq.kernels.packing import pack_codes, unpack_codes
from kvq.kernels.quantize import dequantize, quantize

__all__ = [
    "copy_blocks",
    "dequantize",
    "hadamard_transform",
    "merge_attention",
    "pack_codes",
    "paged_attention",
    "quantize",
    "reshape_and_cache",
    "unpack_codes",
]
