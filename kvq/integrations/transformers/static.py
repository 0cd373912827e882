"""Layers of fixed size, whose decoding steps can be compiled and captured in CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kvq.integrations.transformers.full_precision import FullPrecision
from kvq.integrations.transformers.layers import PackedLayer, select
from kvq.integrations.transformers.options import LayerOptions
from kvq.integrations.transformers.steps import Shared, Step, make_step


class Clock:
    """How many tokens there are, on one device, for all its static layers.

    The first layer of the device moves it on; models update their layers in order.
    """

    def __init__(self, leader: StaticPackedLayer, device: torch.device) -> None:
        self.leader = leader
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        #: Where the tokens of the last update went: the other layers need not work it out again.
        self.step: Step | None = None


class StaticPackedLayer(PackedLayer):
    """Packed keys and values of one attention layer, for at most `max_cache_len` tokens.

    Every tensor stays where it is, and the number of tokens is known to the device alone. A
    sliding window hides tokens and forgets none. Tokens past the end are not written, and
    attention after them gives NaN; on a CPU, `update` raises.
    """

    is_compileable = True

    def __init__(
        self, options: LayerOptions, window: int | None, shared: Shared, max_cache_len: int
    ) -> None:
        super().__init__(options, window, shared)
        self.max_cache_len = max_cache_len
        self._clock: Clock | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for sequences like `[B, H, T, D]` and `[B, H, T, Dv]`; T may be 0."""
        super().lazy_initialization(key_states, value_states)
        clocks = self._shared.clocks
        self._clock = clocks.setdefault(self.device, Clock(self, self.device))
        if self.options.keeps_full_precision:
            oldest = torch.zeros((), dtype=torch.int64, device=self.device)
            self.full_precision = FullPrecision(self.options, key_states, value_states, oldest)
        if self.transform is not None:
            self.transform.reserve(self._reserved_tokens())
        if not is_compiling():
            constants = [] if self.transform is None else self.transform.constants
            for tensor in (*self.tensors(), *constants):
                torch._dynamo.mark_static_address(tensor)

    def tensors(self) -> list[Tensor]:
        """Everything that the layer stores, and the number of tokens if it counts them."""
        if self._clock is None:
            return []
        counts = [self._clock.length] if self._clock.leader is self else []
        if self.full_precision is not None and isinstance(self.full_precision.oldest, Tensor):
            counts.append(self.full_precision.oldest)
        return [*super().tensors(), *counts]

    @property
    def _tokens(self) -> Tensor:
        assert self._clock is not None
        return self._clock.length

    def _advance(self, count: int) -> Step:
        assert self._clock is not None
        if self._clock.leader is self:
            if not is_compiling() and self.device.type == "cpu":
                self._check_room(count)
            self._tokens.add_(count)
        elif self._clock.step is not None and not is_compiling():
            return self._clock.step
        start = self._tokens - count
        blocks = self.key_cache.words.shape[0] // self.batch_size
        step = make_step(
            self.batch_size, blocks, start, count, 0, self._shared.block_size, self.device
        )
        # A graph in the making finds what is common to the layers by itself.
        self._clock.step = None if is_compiling() else step
        return step

    def _check_room(self, count: int) -> None:
        if int(self._tokens) + count > self.max_cache_len:
            raise ValueError(
                f"max_cache_len must be at least the number of tokens, "
                f"{int(self._tokens) + count}, got {self.max_cache_len}"
            )

    def _is_first(self, step: Step) -> bool:
        return not is_compiling() and int(step.start) == 0

    def _columns(self) -> int:
        return self.max_cache_len

    def _reserved_tokens(self) -> int:
        return self._initial_blocks() * self._shared.block_size

    def _initial_blocks(self) -> int:
        return -(-self.max_cache_len // self._shared.block_size)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns there can be, from position 0."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> Any:
        """Tokens of each sequence: a tensor `[]`, or 0 before the first update."""
        return self._tokens if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Tokens there is room for."""
        return self.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        """As `PackedLayer.crop`; waits for the device."""
        if not self.is_initialized or self._clock is None:
            return
        if self._clock.leader is not self:
            # The first layer has cropped them all, or refused.
            self._begins = int(self._tokens) == 0
            return
        self._length = int(self._tokens)
        super().crop(tokens_to_remove)
        self._tokens.fill_(self._length)

    def reset(self) -> None:
        """Forget all tokens; every tensor stays where it is."""
        self._begins = True
        if self.is_initialized:
            self._tokens.zero_()
            if self.transform is not None:
                self.transform.restart()
            if self.full_precision is not None and isinstance(self.full_precision.oldest, Tensor):
                self.full_precision.oldest.zero_()

    def batch_select_indices(self, indices: Tensor) -> None:
        """As `PackedLayer.batch_select_indices`, in place.

        Raises:
            ValueError: The number of sequences would change.
        """
        if not self.is_initialized:
            return
        indices = torch.as_tensor(indices, device=self.device)
        chosen = torch.arange(self.batch_size, device=self.device)[indices]
        if len(chosen) != self.batch_size:
            raise ValueError(
                f"indices must keep the {self.batch_size} sequences of a cache with "
                f"max_cache_len, got {len(chosen)}"
            )
        for pages in (*self.key_cache[:2], *self.value_cache[:2]):
            pages.copy_(select(pages, chosen, self.batch_size))
        kept = [] if self.full_precision is None else self.full_precision.tensors
        for tensor in (*kept, *([] if self.transform is None else self.transform.tensors)):
            tensor.copy_(tensor.index_select(0, chosen))
