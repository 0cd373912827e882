"""The public functions: each finds the tier by the device of its tensors, or is told.

A CUDA tensor goes to the kernels, any other to the reference. `tier="reference"` or
`tier="kernels"` decides otherwise. What a function means is documented once, in `kvq.reference`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Literal, cast

from torch import Tensor

from kvq.checks import check_tensor
from kvq.modes import Mode, Rotation
from kvq.modes import mode as resolve_mode
from kvq.tier import AttentionFeatures, AttentionOutput, PagedKV, QuantizedKV, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

TierName = Literal["reference", "kernels"]


def find_tier(argument: str, tensor: object, function: str, tier: str | None = None) -> Tier:
    """The tier that works on `tensor`.

    Args:
        argument: Its name, for messages.
        tensor: The tensor whose device decides.
        function: What the tier must offer; what has no kernel runs in the reference.
        tier: `"reference"`, `"kernels"`, or `None` to go by the device.

    Raises:
        TypeError: It is no tensor.
        ValueError: There is no such tier, or it has no such function.
        ImportError: The kernels are asked for and triton is not installed.
    """
    device = check_tensor(argument, tensor).device.type
    name = tier if tier is not None else ("kernels" if device == "cuda" else "reference")
    if name not in ("reference", "kernels"):
        raise ValueError(f"tier must be 'reference' or 'kernels', got {tier!r}")
    if name == "kernels" and importlib.util.find_spec("triton") is None:
        raise ImportError(
            "tier must be 'reference' without triton, got 'kernels' "
            "(install it with: pip install 'kvq[kernels]')"
        )
    module = importlib.import_module(f"kvq.{name}")
    if not hasattr(module, function):
        if tier is not None:
            raise ValueError(f"tier must be 'reference' for {function}, got {tier!r}")
        module = importlib.import_module("kvq.reference")
    return cast("Tier", module)


def quantize(x: Tensor, mode: Mode | str, *, tier: TierName | None = None) -> QuantizedKV:
    """Quantize each row of `x`; see `kvq.reference.quantize`."""
    return find_tier("x", x, "quantize", tier).quantize(x, resolve_mode(mode))


def dequantize(
    codes: Tensor,
    words: Tensor,
    mode: Mode | str,
    head_dim: int,
    *,
    tier: TierName | None = None,
) -> Tensor:
    """Turn codes and words back into rows; see `kvq.reference.dequantize`."""
    return find_tier("codes", codes, "dequantize", tier).dequantize(
        codes, words, resolve_mode(mode), head_dim
    )


def hadamard_transform(
    x: Tensor, rotation: Rotation, *, inverse: bool = False, tier: TierName | None = None
) -> Tensor:
    """Rotate each row of `x`; see `kvq.reference.hadamard_transform`."""
    return find_tier("x", x, "hadamard_transform", tier).hadamard_transform(
        x, rotation, inverse=inverse
    )


def pack_codes(codes: Tensor, bits: int, *, tier: TierName | None = None) -> Tensor:
    """Pack codes into bytes; see `kvq.reference.pack_codes`."""
    return find_tier("codes", codes, "pack_codes", tier).pack_codes(codes, bits)


def unpack_codes(
    packed: Tensor, bits: int, head_dim: int, *, tier: TierName | None = None
) -> Tensor:
    """Undo `pack_codes`; see `kvq.reference.unpack_codes`."""
    return find_tier("packed", packed, "unpack_codes", tier).unpack_codes(packed, bits, head_dim)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    slot_mapping: Tensor,
    *,
    check: bool | None = None,
    tier: TierName | None = None,
) -> None:
    """Quantize keys and values into a paged cache; see `kvq.reference.reshape_and_cache`."""
    find_tier("key", key, "reshape_and_cache", tier).reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping, check=check
    )


def copy_blocks(
    cache: PagedKV, pairs: Tensor, *, check: bool | None = None, tier: TierName | None = None
) -> None:
    """Copy whole blocks of a paged cache; see `kvq.reference.copy_blocks`."""
    find_tier("cache.codes", cache.codes, "copy_blocks", tier).copy_blocks(
        cache, pairs, check=check
    )


def paged_attention(
    query: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    features: AttentionFeatures = AttentionFeatures(),  # noqa: B008 (frozen)
    return_lse: bool = False,
    check: bool | None = None,
    tier: TierName | None = None,
) -> Tensor | AttentionOutput:
    """Attention over a paged cache; see `kvq.reference.paged_attention`."""
    return find_tier("query", query, "paged_attention", tier).paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale=scale,
        features=features,
        return_lse=return_lse,
        check=check,
    )


def merge_attention(
    parts: Sequence[AttentionOutput],
    sink_logits: Tensor | None = None,
    *,
    tier: TierName | None = None,
) -> AttentionOutput:
    """Merge attention over disjoint sets of keys; see `kvq.reference.merge_attention`."""
    output = parts[0].output if parts else None
    return find_tier("parts", output, "merge_attention", tier).merge_attention(parts, sink_logits)
