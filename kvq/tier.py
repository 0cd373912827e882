"""What every tier offers: the values that go in and out, and the functions.

A tier is a module. `kvq.reference` and `kvq.kernels` both satisfy `Tier`, so the analysis and the
tests take either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvq.checks import check_tensor, resolve_enum
from kvq.modes import Mode, Rotation


class Layout(Enum):
    """The order of the axes of a paged cache."""

    #: `[blocks, heads, block_size, ...]`
    HND = "HND"
    #: `[blocks, block_size, heads, ...]`
    NHD = "NHD"

    def __str__(self) -> str:
        return self.value


class QuantizedKV(NamedTuple):
    """Rows of packed codes and their stored words."""

    #: `[..., B]` uint8, first code in the lowest bits.
    codes: Tensor
    #: `[...]` float32, one word per row; compare it as int32, since its bits may hold two numbers.
    words: Tensor


class PagedKV(NamedTuple):
    """One side (keys or values) of a paged cache: a view, which owns and clears nothing."""

    #: `[blocks, heads, block_size, B]` (HND) or `[blocks, block_size, heads, B]` (NHD) uint8.
    codes: Tensor
    #: The same axes without the last, float32.
    words: Tensor
    #: How its rows are stored.
    mode: Mode
    #: The order of its axes.
    layout: Layout


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """What attention may do beyond causal softmax. Tensors are float32 unless said otherwise."""

    #: Sliding window: a query sees the last `window` keys up to and with its own position.
    window: int | None = None
    #: Logits become `soft_cap * tanh(logit / soft_cap)`, before the mask.
    soft_cap: float | None = None
    #: `[Hq]`: `slope * (key position - query position)` is added to the logit after the mask.
    alibi_slopes: Tensor | None = None
    #: `[Hq]`: one more logit per head, neither scaled nor capped, in the denominator only.
    sink_logits: Tensor | None = None
    #: `[S, S]` for every sequence, or `[sequences, S, S]`: entry `(i, s)` is added to the logit of
    #: the `i`-th new token of a sequence and its `s`-th new token as a key; other pairs get
    #: nothing. -inf hides a key: a speculative tree.
    query_query_bias: Tensor | None = None
    #: `[T or 1, Hq or 1, K]`, K at least the longest sequence: added to the logit last, by the
    #: key's index in its sequence.
    logit_bias: Tensor | None = None
    #: `[sequences]` int32 or int64: keys before it are hidden (left padding), and positions count
    #: from it.
    first_key: Tensor | None = None


class AttentionOutput(NamedTuple):
    """Attention output and, when asked for, its log-sum-exp."""

    #: `[T, Hq, Dv]` in the query's dtype.
    output: Tensor
    #: `[T, Hq]` float32, natural logarithm of the softmax denominator (the sink included); -inf
    #: where no key is visible.
    log_sum_exp: Tensor


def new_paged_kv(
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_dim: int,
    mode: Mode,
    *,
    layout: Layout | str = Layout.HND,
    device: torch.device | str | None = None,
) -> PagedKV:
    """Allocate one side of a paged cache, filled with zeros.

    Args:
        num_blocks: Pages.
        block_size: Tokens in a page; need not be a power of two.
        num_heads: KV heads.
        head_dim: Channels of a row.
        mode: How rows are stored.
        layout: Order of the axes.
        device: Where; torch's default device if not given.

    Returns:
        A `PagedKV` of contiguous tensors.

    Raises:
        ValueError: A size is not positive, or `head_dim` does not suit the mode.
    """
    for argument, size in (
        ("num_blocks", num_blocks),
        ("block_size", block_size),
        ("num_heads", num_heads),
    ):
        if size < 1:
            raise ValueError(f"{argument} must be at least 1, got {size}")
    order = resolve_enum("layout", layout, Layout)
    inner = (num_heads, block_size) if order is Layout.HND else (block_size, num_heads)
    codes = torch.zeros(
        (num_blocks, *inner, mode.bytes_per_row(head_dim)), dtype=torch.uint8, device=device
    )
    words = torch.zeros((num_blocks, *inner), dtype=torch.float32, device=device)
    return PagedKV(codes, words, mode, order)


def as_hnd(cache: PagedKV) -> tuple[Tensor, Tensor]:
    """Codes and words of a cache as `[blocks, heads, block_size, ...]` views.

    Raises:
        TypeError, ValueError: The tensors of `cache` do not fit together; the message says how.
    """
    codes = check_tensor("cache.codes", cache.codes)
    words = check_tensor("cache.words", cache.words)
    if codes.dtype is not torch.uint8:
        raise TypeError(f"cache.codes must be uint8, got {codes.dtype}")
    if words.dtype is not torch.float32:
        raise TypeError(f"cache.words must be float32, got {words.dtype}")
    if codes.ndim != 4 or codes.shape[:3] != words.shape:
        raise ValueError(
            "cache.codes must be [blocks, heads, block_size, bytes] in the order of its layout, "
            f"with cache.words the same without the last axis, got {list(codes.shape)} "
            f"and {list(words.shape)}"
        )
    if codes.device != words.device:
        raise ValueError(
            f"cache.words must be on the device of cache.codes ({codes.device}), "
            f"got {words.device}"
        )
    cache.mode.head_dim(codes.shape[3])
    if resolve_enum("cache.layout", cache.layout, Layout) is Layout.NHD:
        return codes.transpose(1, 2), words.transpose(1, 2)
    return codes, words


class Tier(Protocol):
    """The functions of a tier; see `kvq.reference` for what each means."""

    def quantize(self, x: Tensor, mode: Mode) -> QuantizedKV: ...

    def dequantize(self, codes: Tensor, words: Tensor, mode: Mode, head_dim: int) -> Tensor: ...

    def hadamard_transform(
        self, x: Tensor, rotation: Rotation, *, inverse: bool = False
    ) -> Tensor: ...

    def pack_codes(self, codes: Tensor, bits: int) -> Tensor: ...

    def unpack_codes(self, packed: Tensor, bits: int, head_dim: int) -> Tensor: ...

    def reshape_and_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: PagedKV,
        value_cache: PagedKV,
        slot_mapping: Tensor,
        *,
        check: bool | None = None,
    ) -> None: ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: PagedKV,
        value_cache: PagedKV,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        scale: float,
        features: AttentionFeatures = AttentionFeatures(),
        return_lse: bool = False,
    ) -> Tensor | AttentionOutput: ...
