"""What every tier offers: the values that go in and out, and the functions.

A tier is a module. `kvq.reference` and `kvq.kernels` both satisfy `Tier`, so the analysis and the
tests take either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvq.checks import (
    INPUT_DTYPES,
    check_bool,
    check_device,
    check_dtype,
    check_input,
    check_int,
    check_kind,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
    resolve_enum,
)
from kvq.modes import Mode, Rotation
from kvq.modes import mode as resolve_mode
from kvq.scale_word import StoredWord

#: The dtypes of slots, blocks and lengths.
INDEX_DTYPES = (torch.int32, torch.int64)


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
    #: `[...]` float32 or float16 (see `word_dtype`), one word per row. Compare it as integers,
    #: since its bits may hold two numbers.
    words: Tensor


class PagedKV(NamedTuple):
    """One side (keys or values) of a paged cache: a view, which owns and clears nothing."""

    #: `[blocks, heads, block_size, B]` (HND) or `[blocks, block_size, heads, B]` (NHD) uint8; any
    #: strides, but the bytes of a row lie side by side.
    codes: Tensor
    #: The same axes without the last, float32 or float16 (see `word_dtype`).
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
    #: nothing. -inf hides a key as the mask does: a speculative tree.
    query_query_bias: Tensor | None = None
    #: `[T or 1, Hq or 1, K]`, K at least the longest sequence: added to the logit last, by the
    #: key's index in its sequence. -inf hides a key as the mask does.
    logit_bias: Tensor | None = None
    #: `[sequences]` int32 or int64: keys before it are hidden (left padding), and positions count
    #: from it. Distances do not change, so nothing but the hiding can be seen.
    first_key: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check_int("window", self.window, 1)
        if self.soft_cap is not None:
            check_number("soft_cap", self.soft_cap, positive=True)
        for argument, value in self._tensors().items():
            allowed = INDEX_DTYPES if argument == "first_key" else (torch.float32,)
            check_dtype(argument, check_tensor(argument, value), *allowed)

    def check(self, query: Tensor, num_sequences: int) -> None:
        """The features must fit a query `[T, Hq, D]` of `num_sequences` sequences.

        Raises:
            ValueError: One has another shape or is on another device; the message names it.
        """
        num_tokens, num_heads = query.shape[:2]
        for argument, value in self._tensors().items():
            check_same_device(argument, value, "query", query)
        for argument, per_head in (
            ("alibi_slopes", self.alibi_slopes),
            ("sink_logits", self.sink_logits),
        ):
            if per_head is not None:
                check_shape(argument, per_head, (num_heads,), "[query heads]")
        if self.first_key is not None:
            check_shape("first_key", self.first_key, (num_sequences,), "[sequences]")
        if (bias := self.query_query_bias) is not None:
            shape = tuple(bias.shape)
            if shape[-1:] != shape[-2:-1] or shape[:-2] not in ((), (num_sequences,)):
                raise ValueError(
                    f"query_query_bias must be [S, S] or [sequences, S, S] with {num_sequences} "
                    f"sequences, got {list(shape)}"
                )
        if (bias := self.logit_bias) is not None and (
            bias.ndim != 3
            or bias.shape[0] not in (1, num_tokens)
            or bias.shape[1] not in (1, num_heads)
        ):
            raise ValueError(
                f"logit_bias must be [{num_tokens} or 1, {num_heads} or 1, keys], "
                f"got {list(bias.shape)}"
            )

    def _tensors(self) -> dict[str, Tensor]:
        """The features that are tensors and given, by name."""
        named = {
            "alibi_slopes": self.alibi_slopes,
            "sink_logits": self.sink_logits,
            "query_query_bias": self.query_query_bias,
            "logit_bias": self.logit_bias,
            "first_key": self.first_key,
        }
        return {name: value for name, value in named.items() if value is not None}


class AttentionOutput(NamedTuple):
    """Attention output and, when asked for, its log-sum-exp."""

    #: `[T, Hq, Dv]` in the query's dtype.
    output: Tensor
    #: `[T, Hq]` float32 (float64 for a float64 query), natural logarithm of the softmax
    #: denominator (the sink included); -inf where no key is visible.
    log_sum_exp: Tensor


def check_tier(tier: object) -> None:
    """A tier must offer what a tier offers.

    Raises:
        TypeError: It does not.
    """
    if not hasattr(tier, "quantize") or not hasattr(tier, "dequantize"):
        raise TypeError(
            f"tier must be a module with the functions of a tier, got {type(tier).__name__}"
        )


def word_dtype(mode: Mode) -> torch.dtype:
    """The dtype of a mode's stored words: float32, or float16 for `StoredWord.FLOAT16`."""
    return torch.float16 if mode.word is StoredWord.FLOAT16 else torch.float32


def new_paged_kv(
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_dim: int,
    mode: Mode | str,
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
        mode: How rows are stored, or the name of it.
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
        check_int(argument, size, 1)
    mode = resolve_mode(mode)
    if device is not None:
        check_device("device", device)
    order = resolve_enum("layout", layout, Layout)
    inner = (num_heads, block_size) if order is Layout.HND else (block_size, num_heads)
    codes = torch.zeros(
        (num_blocks, *inner, mode.bytes_per_row(head_dim)), dtype=torch.uint8, device=device
    )
    words = torch.zeros((num_blocks, *inner), dtype=word_dtype(mode), device=device)
    return PagedKV(codes, words, mode, order)


def as_hnd(cache: PagedKV, argument: str = "cache") -> tuple[Tensor, Tensor]:
    """Codes and words of a cache as `[blocks, heads, block_size, ...]` views.

    Args:
        cache: Keys or values.
        argument: What the caller calls it, for messages.

    Raises:
        TypeError, ValueError: The tensors of `cache` do not fit together; the message says how.
    """
    check_kind(argument, cache, PagedKV)
    check_kind(f"{argument}.mode", cache.mode, Mode)
    codes = check_tensor(f"{argument}.codes", cache.codes)
    words = check_tensor(f"{argument}.words", cache.words)
    check_dtype(f"{argument}.codes", codes, torch.uint8)
    check_dtype(f"{argument}.words", words, word_dtype(cache.mode))
    if codes.ndim != 4 or codes.shape[:3] != words.shape:
        raise ValueError(
            f"{argument}.codes must be [blocks, heads, block_size, bytes] in the order of its "
            f"layout, with {argument}.words the same without the last axis, "
            f"got {list(codes.shape)} and {list(words.shape)}"
        )
    check_same_device(f"{argument}.words", words, f"{argument}.codes", codes)
    try:
        cache.mode.head_dim(codes.shape[3])
    except ValueError as error:
        raise ValueError(f"{argument}.codes must hold rows of its mode: {error}") from None
    if codes.shape[3] > 1 and codes.stride(3) != 1:
        raise ValueError(
            f"{argument}.codes must have the bytes of a row side by side, got a stride of "
            f"{codes.stride(3)}"
        )
    if resolve_enum(f"{argument}.layout", cache.layout, Layout) is Layout.NHD:
        return codes.transpose(1, 2), words.transpose(1, 2)
    return codes, words


def checks_values(check: bool | None, tensor: Tensor) -> bool:
    """Whether to look at the values of slots, blocks and lengths: by default on the CPU only.

    Elsewhere a look would wait for the device.
    """
    if check is None:
        return tensor.device.type == "cpu"
    if check_bool("check", check) and tensor.is_meta:
        raise ValueError("check must be False for tensors without values, got True")
    return check


def check_cache_pair(key_cache: PagedKV, value_cache: PagedKV) -> tuple[int, int, int]:
    """Blocks, KV heads and block size, which keys and values must share.

    Raises:
        TypeError, ValueError: They do not, or a cache is not well formed.
    """
    keys = as_hnd(key_cache, "key_cache")[1]
    values = as_hnd(value_cache, "value_cache")[1]
    check_same_device("value_cache", values, "key_cache", keys)
    check_shape("value_cache", values, tuple(keys.shape), "[blocks, heads, block_size]")
    if 0 in keys.shape[1:]:
        raise ValueError(
            f"key_cache must have heads and slots in its blocks, got {list(keys.shape)}"
        )
    blocks, heads, block_size = keys.shape
    return blocks, heads, block_size


def check_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    slot_mapping: Tensor,
    check: bool | None,
) -> None:
    """The argument rules of `reshape_and_cache`; `check` as `checks_values` takes it.

    Raises:
        TypeError, ValueError: A rule is broken; the message names argument, rule and value.
    """
    num_blocks, num_heads, block_size = check_cache_pair(key_cache, value_cache)
    num_tokens = len(check_input("key", key))
    for argument, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        head_dim = cache.mode.head_dim(cache.codes.shape[3])
        check_shape(
            argument,
            check_input(argument, rows),
            (None if argument == "key" else num_tokens, num_heads, head_dim),
            "[tokens, heads, head_dim]",
        )
        check_same_device(argument, rows, "its cache", cache.codes)
    check_dtype("slot_mapping", check_tensor("slot_mapping", slot_mapping), *INDEX_DTYPES)
    check_shape("slot_mapping", slot_mapping, (None,), "[tokens]")
    check_same_device("slot_mapping", slot_mapping, "key", key)
    if len(slot_mapping) > num_tokens:
        raise ValueError(
            f"slot_mapping must have at most one entry for each of the {num_tokens} tokens, "
            f"got {len(slot_mapping)}"
        )
    if not checks_values(check, slot_mapping):
        return
    writers: dict[int, int] = {}
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= num_blocks * block_size:
            raise ValueError(
                f"slot_mapping must be below {num_blocks * block_size} (blocks x block_size), "
                f"got {slot} for token {token}"
            )
        if slot in writers:
            raise ValueError(
                "slot_mapping must not name a slot twice, "
                f"got {slot} for token {writers[slot]} and token {token}"
            )
        if slot >= 0:
            writers[slot] = token


def check_block_pairs(cache: PagedKV, pairs: Tensor, check: bool | None) -> None:
    """The argument rules of `copy_blocks`; `check` as `checks_values` takes it.

    Raises:
        TypeError, ValueError: A rule is broken; the message names argument, rule and value.
    """
    _, words = as_hnd(cache)
    check_dtype("pairs", check_tensor("pairs", pairs), *INDEX_DTYPES)
    check_shape("pairs", pairs, (None, 2), "[pairs, source and target]")
    check_same_device("pairs", pairs, "cache", words)
    if not checks_values(check, pairs):
        return
    seen: set[int] = set()
    for index, (source, target) in enumerate(pairs.tolist()):
        for block in (source, target):
            if not 0 <= block < len(words):
                raise ValueError(
                    f"pairs must name blocks from 0 to {len(words) - 1}, "
                    f"got {block} in pair {index}"
                )
        if target in seen:
            raise ValueError(
                f"pairs must not name a target twice, got {target} again in pair {index}"
            )
        seen.add(target)


def check_attention(
    query: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    features: AttentionFeatures,
    return_lse: bool,
    max_query_len: int | None,
    check: bool | None,
) -> None:
    """The argument rules of `paged_attention`; `check` as `checks_values` takes it.

    Raises:
        TypeError, ValueError: A rule is broken; the message names argument, rule and value.
    """
    num_blocks, num_kv_heads, block_size = check_cache_pair(key_cache, value_cache)
    head_dim = key_cache.mode.head_dim(key_cache.codes.shape[3])
    check_dtype("query", check_tensor("query", query), *INPUT_DTYPES, torch.float64)
    check_shape("query", query, (None, None, head_dim), "[tokens, query heads, head_dim]")
    check_same_device("query", query, "key_cache", key_cache.codes)
    num_tokens, num_heads = query.shape[:2]
    if not num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"query must have a multiple of the {num_kv_heads} KV heads, got {num_heads} heads"
        )
    for argument, index in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        check_dtype(argument, check_tensor(argument, index), *INDEX_DTYPES)
        check_same_device(argument, index, "query", query)
    check_shape("seq_lens", seq_lens, (None,), "[sequences]")
    num_sequences = len(seq_lens)
    check_shape("block_table", block_table, (num_sequences, None), "[sequences, blocks]")
    check_shape("query_start_loc", query_start_loc, (num_sequences + 1,), "[sequences + 1]")
    check_number("scale", scale)
    check_kind("features", features, AttentionFeatures).check(query, num_sequences)
    check_bool("return_lse", return_lse)
    if max_query_len is not None:
        check_int("max_query_len", max_query_len, 1)
    if not checks_values(check, query):
        return
    _check_starts(query_start_loc.tolist(), num_tokens, max_query_len)
    lengths = seq_lens.tolist()
    _check_blocks(block_table, lengths, num_blocks, block_size)
    if features.logit_bias is not None and features.logit_bias.shape[2] < max(lengths, default=0):
        raise ValueError(
            f"logit_bias must be at least as long as the longest sequence ({max(lengths)}), "
            f"got {features.logit_bias.shape[2]}"
        )


def _check_starts(starts: list[int], num_tokens: int, max_query_len: int | None) -> None:
    if starts[0] != 0:
        raise ValueError(f"query_start_loc must start at 0, got {starts[0]}")
    for before, after in pairwise(starts):
        if after < before:
            raise ValueError(f"query_start_loc must not decrease, got {after} after {before}")
        if max_query_len is not None and after - before > max_query_len:
            raise ValueError(
                f"query_start_loc must give a sequence at most max_query_len ({max_query_len}) "
                f"queries, got {after - before}"
            )
    if starts[-1] != num_tokens:
        raise ValueError(
            f"query_start_loc must end at the number of query tokens ({num_tokens}), "
            f"got {starts[-1]}"
        )


def _check_blocks(
    block_table: Tensor, lengths: list[int], num_blocks: int, block_size: int
) -> None:
    for sequence, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"seq_lens must not be negative, got {length} for sequence {sequence}"
            )
        needed = -(-length // block_size)
        if needed > block_table.shape[1]:
            raise ValueError(
                f"block_table must have {needed} entries for the {length} tokens of sequence "
                f"{sequence} in blocks of {block_size}, got {block_table.shape[1]}"
            )
        for entry, block in enumerate(block_table[sequence, :needed].tolist()):
            if not 0 <= block < num_blocks:
                raise ValueError(
                    f"block_table must name blocks from 0 to {num_blocks - 1}, "
                    f"got {block} for entry {entry} of sequence {sequence}"
                )


def check_merge(parts: Sequence[AttentionOutput], sink_logits: Tensor | None) -> None:
    """The argument rules of `merge_attention`.

    Raises:
        TypeError, ValueError: A rule is broken; the message names argument, rule and value.
    """
    check_parts(parts)
    like_output, like_lse = parts[0]
    first, lse = "parts[0].output", "parts[0].log_sum_exp"
    check_dtype(first, check_tensor(first, like_output), *INPUT_DTYPES, torch.float64)
    check_dtype(lse, check_tensor(lse, like_lse), torch.float32, torch.float64)
    check_shape(lse, like_lse, tuple(like_output.shape[:-1]), "[tokens, heads]")
    check_same_device(lse, like_lse, first, like_output)
    for index, part in enumerate(parts[1:], 1):
        for argument, value, like in (
            (f"parts[{index}].output", part[0], like_output),
            (f"parts[{index}].log_sum_exp", part[1], like_lse),
        ):
            check_dtype(argument, check_tensor(argument, value), like.dtype)
            check_shape(argument, value, tuple(like.shape), "as in the first part,")
            check_same_device(argument, value, "the first part", like)
    if sink_logits is not None:
        check_dtype("sink_logits", check_tensor("sink_logits", sink_logits), torch.float32)
        check_shape("sink_logits", sink_logits, tuple(like_lse.shape[-1:]), "[query heads]")
        check_same_device("sink_logits", sink_logits, "parts", like_lse)


def check_parts(parts: Sequence[AttentionOutput]) -> None:
    """What is merged must be pairs of an output and its log-sum-exp.

    Raises:
        TypeError, ValueError: It is not, or there is nothing to merge.
    """
    if not isinstance(parts, list | tuple):
        raise TypeError(f"parts must be a list or a tuple, got {type(parts).__name__}")
    if not parts:
        raise ValueError("parts must hold at least one attention output, got none")
    for index, part in enumerate(parts):
        if not isinstance(part, tuple) or len(part) != 2:
            raise TypeError(
                f"parts[{index}] must be an output and its log-sum-exp, got {type(part).__name__}"
            )


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

    def copy_blocks(self, cache: PagedKV, pairs: Tensor, *, check: bool | None = None) -> None: ...

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
        max_query_len: int | None = None,
        check: bool | None = None,
    ) -> Tensor | AttentionOutput: ...

    def merge_attention(
        self, parts: Sequence[AttentionOutput], sink_logits: Tensor | None = None
    ) -> AttentionOutput: ...
