"""Where tokens go: the indices of one update, which the layers of a device share."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvq.reference.key_transforms import rotary_rows
from kvq.rotary import RotarySpec


class Step(NamedTuple):
    """Where the new tokens of one update stand. Layers of one device share it."""

    #: Position of the first new token; a tensor `[]` in a static layer.
    start: int | Tensor
    #: New tokens of each sequence, Q.
    q_len: int
    #: Position of the first token in the pages.
    offset: int
    #: `[B * Q]` int64
    slots: Tensor
    #: `[B, W]` int32
    block_table: Tensor
    #: `[B]` int32: tokens in the pages, the new ones included.
    seq_lens: Tensor
    #: `[B + 1]` int32
    query_start_loc: Tensor


@dataclass(slots=True)
class Shared:
    """What the layers of one cache have in common."""

    #: The decoder's configuration.
    config: Any
    #: Tokens in a page.
    block_size: int
    #: Tokens to reserve at first.
    capacity: int
    #: The last step of each device, with what it was made from.
    steps: dict[torch.device, tuple[tuple[int, ...], Step]] = field(default_factory=dict)
    #: What counts the tokens of the static layers of each device.
    clocks: dict[torch.device, Any] = field(default_factory=dict)
    #: Cosines and sines of positions from 0 on, of each device.
    turns: dict[tuple[RotarySpec, torch.device], Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        # A copy of a cache belongs to the same model.
        other = memo[id(self)] = Shared(self.config, self.block_size, self.capacity)
        other.clocks = copy.deepcopy(self.clocks, memo)
        other.turns = copy.deepcopy(self.turns, memo)
        return other

    def reads_packed(self) -> bool:
        """Whether the model's attention function is the one that reads packed pages."""
        return bool(self.config._attn_implementation == "kvq")

    def rotary_rows(self, spec: RotarySpec, device: torch.device, tokens: int) -> Tensor:
        """Cosines and sines of at least so many positions, `[rows, 2 * pairs]` float32."""
        known = self.turns.get((spec, device))
        if known is None or len(known) < tokens:
            rows = max(tokens, self.capacity, 0 if known is None else 2 * len(known), 1)
            known = rotary_rows(spec, 0, rows).to(device)
            self.turns[spec, device] = known
        return known


def make_step(
    batch: int,
    blocks: int,
    start: int | Tensor,
    count: int,
    offset: int,
    block_size: int,
    device: torch.device,
) -> Step:
    """The step in which each of `batch` sequences, of `blocks` pages each, gets `count` tokens.

    A token past the last page of its sequence gets no slot.
    """
    sequence = torch.arange(batch, device=device)
    place = torch.arange(count, device=device) + (start - offset)
    slots = sequence[:, None] * (blocks * block_size) + place
    slots = slots.where(place < blocks * block_size, -1)
    table = torch.arange(batch * blocks, dtype=torch.int32, device=device)
    end = torch.as_tensor(start - offset + count, dtype=torch.int32, device=device)
    return Step(
        start,
        count,
        offset,
        slots.flatten(),
        table.view(batch, blocks),
        end.expand(batch).contiguous(),
        torch.arange(batch + 1, dtype=torch.int32, device=device) * count,
    )
