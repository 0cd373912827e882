"""Layers of packed pages: what a cache keeps for one attention layer of the model.

A layer owns one pool of pages for keys and one for values, and sequence `s` owns pages
`s * W, ..., s * W + W - 1`, so everything that is done to sequences (select, repeat, reorder,
crop) moves or forgets packed bytes. Nothing is ever unpacked to be packed again.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import CacheLayerMixin

import kvq
from kvq.integrations.transformers.full_precision import FullPrecision, check_window
from kvq.integrations.transformers.options import LayerOptions
from kvq.integrations.transformers.steps import Shared, Step, make_step
from kvq.integrations.transformers.transforms import LayerTransform
from kvq.tier import Layout, PagedKV, new_paged_kv

#: A pool that is too small grows by at least one part in so many.
GROWTH: Final = 8


class PackedStates:
    """What `update` hands to the attention function `"kvq"` in place of keys and of values."""

    def __init__(
        self,
        layer: PackedLayer,
        step: Step,
        keys: Tensor,
        values: Tensor,
        mask_offset: int,
        unquantized: bool,
    ) -> None:
        #: How the layer stores its tokens.
        self.options = layer.options
        #: A query sees the last so many keys.
        self.window = layer.window
        #: The pools as they are now: the layer may be moved before it is read.
        self.key_cache, self.value_cache = layer.key_cache, layer.value_cache
        self.step = step
        #: The new tokens `[B, H, Q, D]` as they came.
        self.keys, self.values = keys, values
        #: Position of the first column of the model's mask.
        self.mask_offset = mask_offset
        #: Full-precision tokens, if the layer keeps any.
        self.full_precision = layer.full_precision
        #: What the packed keys have lost, if anything.
        self.transform = layer.transform
        #: The tokens before the new ones that the first query may see in full precision.
        self.before = (
            None
            if layer.full_precision is None
            else (layer.full_precision.recent_columns(step.start))
        )
        #: Whether this is the first chunk of the prompt and to be read as it came.
        self.unquantized = unquantized
        self._layer = layer

    def write_first(self, first_key: Tensor) -> None:
        """Keep those of the new tokens that are among the first of their sequence."""
        full = self.full_precision
        if full is None or not full.first:
            return
        full.write_first(self.keys, self.values, self.step.start, first_key)
        kept = self._layer.full_precision
        if kept is not None and kept is not full:  # offloaded since
            for target, source in zip(kept.tensors[:2], full.tensors[:2], strict=True):
                target.copy_(source)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            "keys and values must reach the attention function untouched with "
            f"attn_implementation='kvq', got a model that asks for .{name}; "
            "with another attn_implementation it is given tensors"
        )


class PackedLayer(CacheLayerMixin):
    """Packed keys and values of one attention layer, which grow as tokens come.

    A layer with a sliding window forgets whole pages that no later query can see. With `slack`
    tokens more than the window it stays exact under a `crop` of so many.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, options: LayerOptions, window: int | None, shared: Shared) -> None:
        super().__init__()
        self.options = options
        self.window = window
        self.is_sliding = window is not None
        self.full_precision: FullPrecision | None = None
        self.transform: LayerTransform | None = None
        self._shared = shared
        # Tokens so far, and the position of the first that is in the pages.
        self._length, self._offset = 0, 0
        # Whether the next tokens are the first of their sequences.
        self._begins = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for sequences like `[B, H, T, D]` and `[B, H, T, Dv]`; T may be 0."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.head_dims = (key_states.shape[3], value_states.shape[3])
        for side, mode, size in zip(
            ("key", "value"),
            (self.options.key_mode, self.options.value_mode),
            self.head_dims,
            strict=True,
        ):
            mode.check_head_dim(size, f"head_dim of {side}s")
        self.key_cache, self.value_cache = self._new_pools(self._initial_blocks())
        if self.options.keeps_full_precision:
            self.full_precision = FullPrecision(self.options, key_states, value_states)
        if self.options.key_transform is not None:
            self.transform = LayerTransform(self.options.key_transform, key_states, self._shared)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Pack new tokens `[B, H, Q, D]` and `[B, H, Q, Dv]`, and hand back what is stored.

        Returns:
            For the attention function `"kvq"` a `PackedStates`, twice; for any other keys
            `[B, H, T, D]` and values `[B, H, T, Dv]`, unpacked, in the dtype of the model.

        Raises:
            ValueError: Another batch size than before; or first or recent tokens are to be kept in
                full precision, which only `"kvq"` can read.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise ValueError(
                f"batch size must be that of the tokens in the cache ({self.batch_size}), "
                f"got {key_states.shape[0]}"
            )
        keys, values = key_states.detach(), value_states.detach()
        packed = self._shared.reads_packed()
        if self.full_precision is not None and not packed:
            raise ValueError(
                "attn_implementation must be 'kvq' for a cache with first_tokens or "
                f"recent_tokens, got {self._shared.config._attn_implementation!r}"
            )
        mask_offset = self._offset
        step = self._advance(keys.shape[2])
        prompt = self.options.full_precision_prompt and self._is_first(step)
        written = keys
        if self.transform is not None:
            self.transform.reserve(self._reserved_tokens())
            if self._begins and keys.shape[2] and not is_compiling():
                self.transform.begin(keys)
            written = self.transform.encode(keys, step.start)
        self._begins = self._begins and keys.shape[2] == 0
        kvq.reshape_and_cache(
            _rows(written),
            _rows(values),
            self.key_cache,
            self.value_cache,
            step.slots,
            check=False,
        )
        if not packed:
            return (keys, values) if prompt else self._unpack(mask_offset)
        states = PackedStates(self, step, keys, values, mask_offset, prompt)
        if self.full_precision is not None:
            self.full_precision.write_recent(keys, values, step.start)
        return states, states

    def _is_first(self, step: Step) -> bool:
        """Whether no token came before this step."""
        return bool(step.start == 0)

    def _advance(self, count: int) -> Step:
        """Make room for `count` more tokens and say where they go."""
        self._forget()
        start, self._length = self._length, self._length + count
        self._reserve(self._length - self._offset)
        blocks = self.key_cache.words.shape[0] // self.batch_size
        made_from = (self.batch_size, blocks, start, count, self._offset)
        known = self._shared.steps.get(self.device)
        if known is not None and known[0] == made_from:
            return known[1]
        step = make_step(*made_from, self._shared.block_size, self.device)
        self._shared.steps[self.device] = (made_from, step)
        return step

    def _unpack(self, offset: int) -> tuple[Tensor, Tensor]:
        """Keys and values from position `offset` on, in the dtype of the model."""
        # Pages before `offset` were forgotten in this very step and are not asked for again.
        length = self._columns()
        keys, values = (
            unpack(cache, self.batch_size, head_dim)[:, :, :length]
            for cache, head_dim in zip(
                (self.key_cache, self.value_cache), self.head_dims, strict=True
            )
        )
        if self.transform is not None:
            keys = self.transform.decode(keys, self._offset)
        missing = self._offset - offset
        if missing:
            keys, values = (torch.nn.functional.pad(x, (0, 0, missing, 0)) for x in (keys, values))
        return keys.to(self.dtype), values.to(self.dtype)

    def tokens_in_pages(self) -> int:
        """Tokens of each sequence that are in the pages."""
        return int(self.get_seq_length()) - self._offset

    def _columns(self) -> int:
        """Rows of the pages that `update` hands back unpacked."""
        return self._length - self._offset

    def _reserved_tokens(self) -> int:
        """Tokens, from the first on, that can be asked for now."""
        return self._length

    def tensors(self) -> list[Tensor]:
        """Everything that the layer stores."""
        if not self.is_initialized:
            return []
        full = self.full_precision
        return [
            *self.key_cache[:2],
            *self.value_cache[:2],
            *([] if full is None else full.tensors),
            *([] if self.transform is None else self.transform.tensors),
        ]

    # Pages

    def _new_pools(self, blocks: int) -> tuple[PagedKV, PagedKV]:
        """Pools of `blocks` pages for each sequence."""
        keys, values = (
            new_paged_kv(
                self.batch_size * blocks,
                self._shared.block_size,
                self.num_heads,
                head_dim,
                mode,
                layout=Layout.HND,
                device=self.device,
            )
            for mode, head_dim in zip(
                (self.options.key_mode, self.options.value_mode), self.head_dims, strict=True
            )
        )
        return keys, values

    def _initial_blocks(self) -> int:
        return max(1, -(-self._shared.capacity // self._shared.block_size))

    def _reserve(self, tokens: int) -> None:
        """Let each sequence have pages for `tokens` tokens."""
        blocks = self.key_cache.words.shape[0] // self.batch_size
        needed = -(-tokens // self._shared.block_size)
        if needed > blocks:
            self._move_pages(0, max(needed, blocks + blocks // GROWTH))

    def _move_pages(self, first: int, blocks: int) -> None:
        """Keep each sequence's pages from `first` on, in pools of `blocks` pages for each."""
        old, new = (self.key_cache, self.value_cache), self._new_pools(blocks)
        for source, target in zip(old, new, strict=True):
            for x, y in zip(source[:2], target[:2], strict=True):
                kept = x.unflatten(0, (self.batch_size, -1))[:, first:]
                y.unflatten(0, (self.batch_size, blocks))[:, : kept.shape[1]] = kept
        self.key_cache, self.value_cache = new

    def _forget(self) -> None:
        """Drop pages that no window reaches, once they are half of the pool."""
        if self.window is None:
            return
        kept = self.window - 1 + self.options.slack
        droppable = (self._length - self._offset - kept) // self._shared.block_size
        blocks = self.key_cache.words.shape[0] // self.batch_size
        if droppable > 0 and 2 * droppable >= blocks:
            self._offset += droppable * self._shared.block_size
            needed = -(-(self._length - self._offset) // self._shared.block_size)
            self._move_pages(droppable, max(needed, self._initial_blocks(), blocks - droppable))

    # What transformers asks

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask of the next update, and the position of the first."""
        return self._length - self._offset + query_length, self._offset

    def get_seq_length(self) -> int:
        """Tokens of each sequence, padding included."""
        return self._length

    def get_max_length(self) -> int:
        """-1: without bound."""
        return -1

    # What generation does to sequences

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: 0, or a negative number of them.

        Raises:
            ValueError: It is positive, or more than there are; or a token that would re-enter a
                window is no longer held.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                "tokens_to_remove must be 0 or the negative number of tokens to remove, "
                f"got {tokens_to_remove}"
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        length = self._length + tokens_to_remove
        if length < 0:
            raise ValueError(
                f"tokens_to_remove must be at least -{self._length} for so many tokens, "
                f"got {tokens_to_remove}"
            )
        if self.window is not None:
            check_window(tokens_to_remove, length, self.window, self._offset)
        if self.full_precision is not None:
            self.full_precision.check_crop(tokens_to_remove, length)
        self._length = length
        self._begins = length == 0

    def reset(self) -> None:
        """Forget all tokens, and free their pages."""
        self.is_initialized = False
        self.full_precision = self.transform = None
        self._length = self._offset = 0
        self._begins = True
        for name in ("key_cache", "value_cache", "batch_size"):
            if hasattr(self, name):
                delattr(self, name)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence `i` go on from what was sequence `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        if self.is_initialized:
            sequences = torch.arange(self.batch_size, device=self.device)
            self.batch_select_indices(sequences.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of `indices` `[n]`, in that order; boolean `[B]` is a choice."""
        if not self.is_initialized:
            return
        indices = torch.as_tensor(indices, device=self.device)
        chosen = torch.arange(self.batch_size, device=self.device)[indices]
        self.key_cache, self.value_cache = (
            cache._replace(
                codes=select(cache.codes, chosen, self.batch_size),
                words=select(cache.words, chosen, self.batch_size),
            )
            for cache in (self.key_cache, self.value_cache)
        )
        if self.full_precision is not None:
            self.full_precision = self.full_precision.map(lambda x: x.index_select(0, chosen))
        if self.transform is not None:
            self.transform = self.transform.map(lambda x: x.index_select(0, chosen))
        self.batch_size = len(chosen)

    def offload(self) -> None:
        """Move what is stored to the memory of the host."""
        self._move_to(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring it back to the device of the layer."""
        if self.is_initialized:
            self._move_to(self.device)

    def _move_to(self, device: torch.device) -> None:
        if not self.is_initialized or self.key_cache.codes.device == device:
            return
        self.key_cache, self.value_cache = (
            cache._replace(
                codes=cache.codes.to(device, non_blocking=True),
                words=cache.words.to(device, non_blocking=True),
            )
            for cache in (self.key_cache, self.value_cache)
        )
        if self.full_precision is not None:
            self.full_precision = self.full_precision.map(
                lambda x: x.to(device, non_blocking=True)
            )


def unpack(cache: PagedKV, batch: int, head_dim: int) -> Tensor:
    """All rows of a pool whose pages lie sequence by sequence, `[B, H, tokens, D]` float32."""
    codes, words = (x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3) for x in cache[:2])
    rows: Tensor = kvq.dequantize(codes, words, cache.mode, head_dim)
    return rows


def _rows(x: Tensor) -> Tensor:
    """`[B, H, Q, D]` as `[B * Q, H, D]`."""
    return x.transpose(1, 2).flatten(0, 1)


def select(x: Tensor, chosen: Tensor, batch: int) -> Tensor:
    """The pages of some sequences."""
    pages: Tensor = x.unflatten(0, (batch, -1)).index_select(0, chosen).flatten(0, 1)
    return pages
