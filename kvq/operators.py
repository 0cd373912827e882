"""The `torch.library` operators of namespace `kvq`, which a compiled graph calls.

`torch.compile` sees one opaque call where a public function of `kvq.dispatch` stands: no graph
break, nothing of a tier traced, and the looks at values that `check` asks for stay inside. An
operator takes tensors and plain values, so a mode crosses as `Mode.text`, all of it: two modes of
one name stay two, a mode that was fitted a moment ago needs no registration, and a saved graph
means the same in another process. Each operator has the bits, the errors and the tier of its
function; the fake implementations give shapes, dtypes and devices. No operator has a gradient.

What torch cannot do: compile a write to a cache whose codes and words are views of one buffer
(AOTAutograd refuses to mutate views of different dtypes). No argument is called `mode`, the name
of an argument of torch's functionalization.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, cast

import torch
from torch import Tensor
from torch.library import custom_op

from kvq.checks import check_tensor
from kvq.modes import Mode, Rotation
from kvq.modes import mode as resolve_mode
from kvq.records import from_json
from kvq.tier import AttentionFeatures, AttentionOutput, Layout, PagedKV, Tier, word_dtype

#: Devices that neither tier works on, and what a device must have instead.
_REFUSED: Final = {"meta": "that holds values", "mps": "with float64"}


def find_tier(argument: str, tensor: object, function: str, tier: str | None = None) -> Tier:
    """The tier that works on `tensor`.

    Args:
        argument: Its name, for messages.
        tensor: The tensor whose device decides.
        function: What the tier must offer; what has no kernel runs in the reference.
        tier: `"reference"`, `"kernels"`, or `None` to go by the device.

    Raises:
        TypeError: It is no tensor.
        ValueError: There is no such tier, or it has no such function, or neither works on the
            device.
        ImportError: The kernels are asked for and triton is not installed.
    """
    device = check_tensor(argument, tensor).device.type
    if device in _REFUSED:
        raise ValueError(f"{argument} must be on a device {_REFUSED[device]}, got {device}")
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


def attention_tier(query: object, tier: str | None = None) -> Tier:
    """The tier of `paged_attention`: a float64 query is the reference's wherever it is."""
    if tier is None and isinstance(query, Tensor) and query.dtype is torch.float64:
        tier = "reference"
    return find_tier("query", query, "paged_attention", tier)


@lru_cache(maxsize=1024)
def mode_of(text: str) -> Mode:
    """The mode of a `Mode.text`, or of a name that `kvq.mode` knows."""
    if text.startswith("{"):
        return from_json(Mode, json.loads(text), "mode")
    return resolve_mode(text)


@custom_op("kvq::quantize", mutates_args=())
def quantize(x: Tensor, mode_text: str, tier: str | None) -> tuple[Tensor, Tensor]:
    """`kvq.quantize`: codes and words."""
    codes, words = find_tier("x", x, "quantize", tier).quantize(x, mode_of(mode_text))
    return codes, words


@quantize.register_fake
def _(x: Tensor, mode_text: str, tier: str | None) -> tuple[Tensor, Tensor]:
    mode = mode_of(mode_text)
    codes = x.new_empty((*x.shape[:-1], mode.bytes_per_row(x.shape[-1])), dtype=torch.uint8)
    return codes, x.new_empty(x.shape[:-1], dtype=word_dtype(mode))


@custom_op("kvq::dequantize", mutates_args=())
def dequantize(
    codes: Tensor, words: Tensor, mode_text: str, head_dim: int, tier: str | None
) -> Tensor:
    """`kvq.dequantize`."""
    found = find_tier("codes", codes, "dequantize", tier)
    return found.dequantize(codes, words, mode_of(mode_text), head_dim)


@dequantize.register_fake
def _(codes: Tensor, words: Tensor, mode_text: str, head_dim: int, tier: str | None) -> Tensor:
    return words.new_empty((*words.shape, head_dim), dtype=torch.float32)


@custom_op("kvq::hadamard_transform", mutates_args=())
def hadamard_transform(
    x: Tensor,
    rounds: int,
    random_signs: bool,
    seed: str,
    repeat_block_signs: bool,
    round_to_input: bool,
    inverse: bool,
    tier: str | None,
) -> Tensor:
    """`kvq.hadamard_transform`. The seed, of 64 bits without a sign, comes as text."""
    rotation = Rotation(rounds, random_signs, int(seed), repeat_block_signs, round_to_input)
    found = find_tier("x", x, "hadamard_transform", tier)
    return found.hadamard_transform(x, rotation, inverse=inverse)


@hadamard_transform.register_fake
def _(
    x: Tensor,
    rounds: int,
    random_signs: bool,
    seed: str,
    repeat_block_signs: bool,
    round_to_input: bool,
    inverse: bool,
    tier: str | None,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


@custom_op("kvq::pack_codes", mutates_args=())
def pack_codes(codes: Tensor, bits: int, tier: str | None) -> Tensor:
    """`kvq.pack_codes`; always a tensor of its own, also where codes are bytes already."""
    packed = find_tier("codes", codes, "pack_codes", tier).pack_codes(codes, bits)
    return _own(packed, codes)


@pack_codes.register_fake
def _(codes: Tensor, bits: int, tier: str | None) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], codes.shape[-1] * bits // 8))


@custom_op("kvq::unpack_codes", mutates_args=())
def unpack_codes(packed: Tensor, bits: int, head_dim: int, tier: str | None) -> Tensor:
    """`kvq.unpack_codes`; always a tensor of its own, also where codes are bytes already."""
    found = find_tier("packed", packed, "unpack_codes", tier)
    return _own(found.unpack_codes(packed, bits, head_dim), packed)


@unpack_codes.register_fake
def _(packed: Tensor, bits: int, head_dim: int, tier: str | None) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], head_dim))


@custom_op(
    "kvq::reshape_and_cache",
    mutates_args=("key_codes", "key_words", "value_codes", "value_words"),
)
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_codes: Tensor,
    key_words: Tensor,
    key_mode: str,
    key_layout: str,
    value_codes: Tensor,
    value_words: Tensor,
    value_mode: str,
    value_layout: str,
    slot_mapping: Tensor,
    check: bool | None,
    tier: str | None,
) -> None:
    """`kvq.reshape_and_cache`: writes to the codes and words of both sides."""
    find_tier("key", key, "reshape_and_cache", tier).reshape_and_cache(
        key,
        value,
        _paged(key_codes, key_words, key_mode, key_layout),
        _paged(value_codes, value_words, value_mode, value_layout),
        slot_mapping,
        check=check,
    )


@reshape_and_cache.register_fake
def _(
    key: Tensor,
    value: Tensor,
    key_codes: Tensor,
    key_words: Tensor,
    key_mode: str,
    key_layout: str,
    value_codes: Tensor,
    value_words: Tensor,
    value_mode: str,
    value_layout: str,
    slot_mapping: Tensor,
    check: bool | None,
    tier: str | None,
) -> None:
    return None


@custom_op("kvq::copy_blocks", mutates_args=("codes", "words"))
def copy_blocks(
    codes: Tensor,
    words: Tensor,
    mode_text: str,
    layout: str,
    pairs: Tensor,
    check: bool | None,
    tier: str | None,
) -> None:
    """`kvq.copy_blocks`: writes to the codes and words of the cache."""
    cache = _paged(codes, words, mode_text, layout)
    find_tier("cache.codes", codes, "copy_blocks", tier).copy_blocks(cache, pairs, check=check)


@copy_blocks.register_fake
def _(
    codes: Tensor,
    words: Tensor,
    mode_text: str,
    layout: str,
    pairs: Tensor,
    check: bool | None,
    tier: str | None,
) -> None:
    return None


@custom_op("kvq::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,
    key_codes: Tensor,
    key_words: Tensor,
    key_mode: str,
    key_layout: str,
    value_codes: Tensor,
    value_words: Tensor,
    value_mode: str,
    value_layout: str,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sink_logits: Tensor | None,
    query_query_bias: Tensor | None,
    logit_bias: Tensor | None,
    first_key: Tensor | None,
    return_lse: bool,
    max_query_len: int | None,
    check: bool | None,
    tier: str | None,
) -> list[Tensor]:
    """`kvq.paged_attention`: the output and, with `return_lse`, the log-sum-exp."""
    found = attention_tier(query, tier).paged_attention(
        query,
        _paged(key_codes, key_words, key_mode, key_layout),
        _paged(value_codes, value_words, value_mode, value_layout),
        block_table,
        seq_lens,
        query_start_loc,
        scale=scale,
        features=AttentionFeatures(
            window,
            soft_cap,
            alibi_slopes,
            sink_logits,
            query_query_bias,
            logit_bias,
            first_key,
        ),
        return_lse=return_lse,
        max_query_len=max_query_len,
        check=check,
    )
    return [found] if isinstance(found, Tensor) else list(found)


@paged_attention.register_fake
def _(
    query: Tensor,
    key_codes: Tensor,
    key_words: Tensor,
    key_mode: str,
    key_layout: str,
    value_codes: Tensor,
    value_words: Tensor,
    value_mode: str,
    value_layout: str,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sink_logits: Tensor | None,
    query_query_bias: Tensor | None,
    logit_bias: Tensor | None,
    first_key: Tensor | None,
    return_lse: bool,
    max_query_len: int | None,
    check: bool | None,
    tier: str | None,
) -> list[Tensor]:
    rows = query.shape[:2]
    output = query.new_empty((*rows, mode_of(value_mode).head_dim(value_codes.shape[3])))
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return [output, query.new_empty(rows, dtype=dtype)] if return_lse else [output]


@custom_op("kvq::merge_attention", mutates_args=())
def merge_attention(
    outputs: Sequence[Tensor],
    log_sum_exps: Sequence[Tensor],
    sink_logits: Tensor | None,
    tier: str | None,
) -> tuple[Tensor, Tensor]:
    """`kvq.merge_attention`: output and log-sum-exp."""
    parts = [AttentionOutput(*pair) for pair in zip(outputs, log_sum_exps, strict=True)]
    found = find_tier("parts", outputs[0], "merge_attention", tier)
    output, log_sum_exp = found.merge_attention(parts, sink_logits)
    return output, log_sum_exp


@merge_attention.register_fake
def _(
    outputs: Sequence[Tensor],
    log_sum_exps: Sequence[Tensor],
    sink_logits: Tensor | None,
    tier: str | None,
) -> tuple[Tensor, Tensor]:
    return (
        outputs[0].new_empty(outputs[0].shape),
        log_sum_exps[0].new_empty(log_sum_exps[0].shape),
    )


def _paged(codes: Tensor, words: Tensor, mode_text: str, layout: str) -> PagedKV:
    return PagedKV(codes, words, mode_of(mode_text), Layout(layout))


def _own(result: Tensor, argument: Tensor) -> Tensor:
    """`result`, contiguous and not `argument` itself, which an operator may not hand back."""
    return result.clone(memory_format=torch.contiguous_format) if result is argument else result
