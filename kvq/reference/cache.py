"""The paged cache: writing new tokens to their slots, copying whole blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq.checks import check_values_are_there
from kvq.reference.quantize import quantize
from kvq.tier import PagedKV, as_hnd, check_block_pairs, check_cache_write


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    slot_mapping: Tensor,
    *,
    check: bool | None = None,
) -> None:
    """Quantize new keys and values and write them to their slots of a paged cache, in place.

    Slot `s` is row `s % block_size` of block `s // block_size`. A token whose slot is negative is
    padding and is not written. Nothing but the named slots changes.

    Args:
        key: `[T, H, D]` float32, float16 or bfloat16, any strides.
        value: `[T, H, Dv]`, the same T and H.
        key_cache: D is the head size of its rows.
        value_cache: The same blocks, heads and block size; its mode may differ.
        slot_mapping: `[tokens]` int32 or int64, at most T of them: the slot of each token. Tokens
            past its end are padding.
        check: Refuse slots past the last one and slots named twice; by default on the CPU only.
            Without it the former are skipped, and of the tokens that name one slot the last is
            written.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: Shapes or devices do not fit together, or `check` finds a slot; the message
            names the first one.

    Exactness: bit-exact across tiers.
    """
    check_cache_write(key, value, key_cache, value_cache, slot_mapping, check)
    check_values_are_there("key", key)
    blocks, _, block_size = as_hnd(key_cache)[1].shape
    tokens = _last_writers(slot_mapping.to(torch.int64), blocks * block_size)
    slots = slot_mapping[tokens].to(torch.int64)
    for rows, cache in ((key, key_cache), (value, value_cache)):
        codes, words = as_hnd(cache)
        stored = quantize(rows[tokens], cache.mode)
        codes[slots // block_size, :, slots % block_size] = stored.codes
        words[slots // block_size, :, slots % block_size] = stored.words


def _last_writers(slots: Tensor, num_slots: int) -> Tensor:
    """The tokens that are written: in range, and the last to name their slot."""
    tokens = torch.arange(len(slots), device=slots.device)
    inside = (slots >= 0) & (slots < num_slots)
    tokens, slots = tokens[inside], slots[inside]
    order = slots.argsort(stable=True)
    ordered = slots[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return tokens[order[last]]


def copy_blocks(cache: PagedKV, pairs: Tensor, *, check: bool | None = None) -> None:
    """Copy whole blocks within one side of a paged cache, in place: shared prefixes, beams.

    All sources are read before any target is written, so blocks can be exchanged.

    Args:
        cache: Keys or values.
        pairs: `[n, 2]` int32 or int64: source block, target block.
        check: Refuse blocks that do not exist and targets named twice; by default on the CPU
            only. Without it pairs of the former are skipped, and of the pairs that name one
            target the last counts.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: Shapes or devices do not fit together, or `check` finds a pair; the message
            names the first one.

    Exactness: bit-exact.
    """
    check_block_pairs(cache, pairs, check)
    check_values_are_there("cache.codes", cache.codes)
    codes, words = as_hnd(cache)
    sources, targets = pairs.to(torch.int64).unbind(1)
    targets = targets.where((sources >= 0) & (sources < len(words)), -1)
    last = _last_writers(targets, len(words))
    codes[targets[last]] = codes[sources[last]]
    words[targets[last]] = words[sources[last]]
