"""The public functions: each finds the tier by the device of its tensors, or is told.

A CUDA tensor goes to the kernels, any other to the reference, and so does a float64 query.
`tier="reference"` or `tier="kernels"` decides otherwise. What a function means is documented once,
in `kvq.reference`.

While `torch.compile` or `torch.export` traces, each calls its operator in `kvq.operators` instead:
the same work, as one node of the graph. Outside a trace there is no such detour: it would take
time and give nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor
from torch.compiler import is_compiling

from kvq import operators
from kvq.checks import check_kind
from kvq.modes import Mode, Rotation
from kvq.modes import mode as resolve_mode
from kvq.operators import attention_tier, find_tier
from kvq.tier import (
    AttentionFeatures,
    AttentionOutput,
    Layout,
    PagedKV,
    QuantizedKV,
    check_parts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

TierName = Literal["reference", "kernels"]


def quantize(x: Tensor, mode: Mode | str, *, tier: TierName | None = None) -> QuantizedKV:
    """Quantize each row of `x`; see `kvq.reference.quantize`."""
    if is_compiling():
        return QuantizedKV(*operators.quantize(x.detach(), _text(mode), tier))
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
    if is_compiling():
        made: Tensor = operators.dequantize(codes, words, _text(mode), head_dim, tier)
        return made
    return find_tier("codes", codes, "dequantize", tier).dequantize(
        codes, words, resolve_mode(mode), head_dim
    )


def hadamard_transform(
    x: Tensor, rotation: Rotation, *, inverse: bool = False, tier: TierName | None = None
) -> Tensor:
    """Rotate each row of `x`; see `kvq.reference.hadamard_transform`."""
    if is_compiling():
        made: Tensor = operators.hadamard_transform(
            x,
            rotation.rounds,
            rotation.random_signs,
            str(rotation.seed),
            rotation.repeat_block_signs,
            rotation.round_to_input,
            inverse,
            tier,
        )
        return made
    return find_tier("x", x, "hadamard_transform", tier).hadamard_transform(
        x, rotation, inverse=inverse
    )


def pack_codes(codes: Tensor, bits: int, *, tier: TierName | None = None) -> Tensor:
    """Pack codes into bytes; see `kvq.reference.pack_codes`."""
    if is_compiling():
        made: Tensor = operators.pack_codes(codes, bits, tier)
        return made
    return find_tier("codes", codes, "pack_codes", tier).pack_codes(codes, bits)


def unpack_codes(
    packed: Tensor, bits: int, head_dim: int, *, tier: TierName | None = None
) -> Tensor:
    """Undo `pack_codes`; see `kvq.reference.unpack_codes`."""
    if is_compiling():
        made: Tensor = operators.unpack_codes(packed, bits, head_dim, tier)
        return made
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
    if is_compiling():
        operators.reshape_and_cache(
            key.detach(),
            value.detach(),
            *_parts(key_cache),
            *_parts(value_cache),
            slot_mapping,
            check,
            tier,
        )
        return
    find_tier("key", key, "reshape_and_cache", tier).reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping, check=check
    )


def copy_blocks(
    cache: PagedKV, pairs: Tensor, *, check: bool | None = None, tier: TierName | None = None
) -> None:
    """Copy whole blocks of a paged cache; see `kvq.reference.copy_blocks`."""
    if is_compiling():
        operators.copy_blocks(*_parts(cache), pairs, check, tier)
        return
    codes = check_kind("cache", cache, PagedKV).codes
    find_tier("cache.codes", codes, "copy_blocks", tier).copy_blocks(cache, pairs, check=check)


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
    max_query_len: int | None = None,
    check: bool | None = None,
    tier: TierName | None = None,
) -> Tensor | AttentionOutput:
    """Attention over a paged cache; see `kvq.reference.paged_attention`."""
    if is_compiling():
        found = operators.paged_attention(
            query,
            *_parts(key_cache),
            *_parts(value_cache),
            block_table,
            seq_lens,
            query_start_loc,
            scale,
            features.window,
            features.soft_cap,
            features.alibi_slopes,
            features.sink_logits,
            features.query_query_bias,
            features.logit_bias,
            features.first_key,
            return_lse,
            max_query_len,
            check,
            tier,
        )
        return AttentionOutput(*found) if return_lse else found[0]
    return attention_tier(query, tier).paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale=scale,
        features=features,
        return_lse=return_lse,
        max_query_len=max_query_len,
        check=check,
    )


def merge_attention(
    parts: Sequence[AttentionOutput],
    sink_logits: Tensor | None = None,
    *,
    tier: TierName | None = None,
) -> AttentionOutput:
    """Merge attention over disjoint sets of keys; see `kvq.reference.merge_attention`."""
    if is_compiling() and parts:
        outputs, log_sum_exps = [part[0] for part in parts], [part[1] for part in parts]
        return AttentionOutput(
            *operators.merge_attention(outputs, log_sum_exps, sink_logits, tier)
        )
    check_parts(parts)
    found = find_tier("parts", parts[0][0], "merge_attention", tier)
    return found.merge_attention(parts, sink_logits)


def _text(mode: Mode | str) -> str:
    """What an operator takes for a mode; it refuses what is neither a mode nor the name of one."""
    return mode.text if isinstance(mode, Mode) else mode


def _parts(cache: PagedKV) -> tuple[Tensor, Tensor, str, str]:
    """What an operator takes for a side of a cache."""
    layout = cache.layout
    return (
        cache.codes,
        cache.words,
        cache.mode.text,
        layout.value if isinstance(layout, Layout) else layout,
    )
