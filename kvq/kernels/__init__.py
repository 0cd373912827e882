"""The kernel tier: the functions of `kvq.reference` in Triton, with the same bits.

The write path only; attention over a paged cache is the reference tier's.
"""

from __future__ import annotations

from kvq.kernels.cache import copy_blocks, reshape_and_cache
from kvq.kernels.hadamard import hadamard_transform
from kvq.kernels.packing import pack_codes, unpack_codes
from kvq.kernels.quantize import dequantize, quantize

__all__ = [
    "copy_blocks",
    "dequantize",
    "hadamard_transform",
    "pack_codes",
    "quantize",
    "reshape_and_cache",
    "unpack_codes",
]
