"""A paged write without quantization: the peer of the fused write in `kvq bench write`.

No mirror: it exists to be measured.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels import launch

#: Rows and warps of a program, the fastest of those tried on an H200.
ROWS = 16
WARPS = 8


@triton.jit
def _paged_copy_kernel(
    key_ptr,
    value_ptr,
    key_pages_ptr,
    value_pages_ptr,
    slot_ptr,
    num_rows,
    token_stride,
    block_stride,
    head_stride,
    slot_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    R: tl.constexpr,
):
    is_key = tl.program_id(1) == 0
    source = key_ptr if is_key else value_ptr
    target = key_pages_ptr if is_key else value_pages_ptr
    row = tl.program_id(0) * R + tl.arange(0, R)
    token = row // HEADS
    head = row % HEADS
    column = tl.arange(0, D)[None, :]
    live = row < num_rows
    slot = tl.load(slot_ptr + token, mask=live, other=-1)
    place = source + token.to(tl.int64) * token_stride + head * D
    x = tl.load(place[:, None] + column, mask=live[:, None])
    block = (slot // BLOCK_SIZE).to(tl.int64)
    to = target + block * block_stride + head * head_stride + (slot % BLOCK_SIZE) * slot_stride
    tl.store(to[:, None] + column, x, mask=(live & (slot >= 0))[:, None])


def paged_copy(
    key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
) -> None:
    """Write keys and values to their slots as they are, in one launch.

    Args:
        key: `[T, H, D]`, contiguous, D a power of two.
        value: The same shape, dtype and strides.
        key_pages: `[blocks, H, block_size, D]` of the same dtype.
        value_pages: The same shape and strides.
        slot_mapping: `[T]` int64; a slot < 0 is skipped.
    """
    launch.check_device("key", key)
    tokens, heads, head_dim = key.shape
    _paged_copy_kernel[(triton.cdiv(tokens * heads, ROWS), 2)](
        key,
        value,
        key_pages,
        value_pages,
        slot_mapping,
        tokens * heads,
        key.stride(0),
        *key_pages.stride()[:3],
        HEADS=heads,
        D=head_dim,
        BLOCK_SIZE=key_pages.shape[2],
        R=ROWS,
        **({} if launch.INTERPRETED else {"num_warps": WARPS}),
    )
