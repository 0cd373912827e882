"""The tokens of a layer that are kept in the dtype of the model, and attention over them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvq.integrations.transformers.options import LayerOptions
from kvq.tier import AttentionOutput

#: Queries that attend over their recent tokens at once.
_CHUNK = 256


class Columns(NamedTuple):
    """Keys and values in full precision, and where they stand."""

    #: `[B, H, M, D]`
    keys: Tensor
    #: `[B, H, M, Dv]`
    values: Tensor
    #: `[B or 1, M]`, their positions; negative where there is no token.
    positions: Tensor


class FullPrecision:
    """The first and the recent tokens of each sequence of one layer.

    Recent tokens lie in a ring: position `p` in entry `p % size`.
    """

    def __init__(
        self, options: LayerOptions, keys: Tensor, values: Tensor, oldest: int | Tensor = 0
    ) -> None:
        """Allocate for sequences like `keys` `[B, H, T, D]` and `values` `[B, H, T, Dv]`."""
        self.recent = options.recent_tokens
        #: Position from which on all tokens are in the ring; a tensor `[]` in a static layer.
        self.oldest = oldest
        size = self.recent + options.slack if self.recent else 0
        first = options.first_tokens
        #: keys and values `[B, H, first_tokens, D]`, keys and values `[B, H, size, D]`.
        self.tensors = [
            x.new_zeros((*x.shape[:2], length, x.shape[3]))
            for length in (first, size)
            for x in (keys, values)
        ]

    @property
    def size(self) -> int:
        """Entries of the ring."""
        return int(self.tensors[2].shape[2])

    @property
    def first(self) -> int:
        """How many first tokens are kept."""
        return int(self.tensors[0].shape[2])

    def recent_columns(self, start: int | Tensor) -> Columns:
        """The `recent - 1` tokens before position `start`; zeros before position 0."""
        count = max(self.recent - 1, 0)
        positions = torch.arange(-count, 0, device=self.tensors[2].device) + start
        entries = positions.remainder(max(self.size, 1))
        real = (positions >= 0)[:, None]
        keys, values = (x[:, :, entries].where(real, 0.0) for x in self.tensors[2:])
        return Columns(keys, values, positions[None])

    def write_recent(self, keys: Tensor, values: Tensor, start: int | Tensor) -> None:
        """Put the last of the new tokens, which stand at `start` and after, into the ring."""
        count = min(self.size, keys.shape[2])
        skipped = keys.shape[2] - count
        positions = torch.arange(count, device=keys.device) + (start + skipped)
        entries = positions.remainder(max(self.size, 1))
        for ring, x in zip(self.tensors[2:], (keys, values), strict=True):
            ring.index_copy_(2, entries, x[:, :, skipped:])
        oldest = start + keys.shape[2] - self.size
        if isinstance(self.oldest, Tensor):
            self.oldest.copy_(torch.maximum(self.oldest, torch.as_tensor(oldest)))
        else:
            self.oldest = max(self.oldest, int(oldest))

    def check_crop(self, asked: int, length: int) -> None:
        """A crop to `length` tokens must leave the recent tokens of the next query.

        Raises:
            ValueError: One of them is no longer held.
        """
        if self.recent:
            check_window(asked, length, self.recent, int(self.oldest))

    def map(self, change: Callable[[Tensor], Tensor]) -> FullPrecision:
        """The same with other tensors."""
        other = copy.copy(self)
        other.tensors = [change(x) for x in self.tensors]
        return other

    def write_first(
        self, keys: Tensor, values: Tensor, start: int | Tensor, first_key: Tensor
    ) -> None:
        """Keep those of the new tokens that are among the first of their sequence.

        Args:
            keys: `[B, H, Q, D]`, the new tokens, which stand at `start` and after.
            values: `[B, H, Q, Dv]`.
            start: Their first position.
            first_key: `[B or 1]`, where each sequence begins.
        """
        wanted = first_key[:, None] + torch.arange(self.first, device=keys.device) - start
        inside = ((wanted >= 0) & (wanted < keys.shape[2]))[:, None, :, None]
        index = wanted.clamp(0, keys.shape[2] - 1)[:, None, :, None]
        for kept, x in zip(self.tensors[:2], (keys, values), strict=True):
            found = x.gather(2, index.expand(kept.shape))
            kept.copy_(torch.where(inside, found, kept))

    def first_columns(self, first_key: Tensor) -> Columns:
        """The first tokens of sequences that begin at `first_key` `[B or 1]`."""
        positions = first_key[:, None] + torch.arange(self.first, device=first_key.device)
        return Columns(self.tensors[0], self.tensors[1], positions)


def check_window(asked: int, length: int, window: int, oldest: int) -> None:
    """After a crop to `length` tokens the next query's window must be held from `oldest` on.

    Raises:
        ValueError: It is not.
    """
    if max(0, length - (window - 1)) < oldest:
        most = max(0, length - asked - (window - 1) - oldest)
        raise ValueError(
            f"tokens_to_remove must leave every token of the window of {window}, of which older "
            f"ones are gone: at least -{most}, got {asked}"
        )


class Query(NamedTuple):
    """The queries of one call, and what they may see."""

    #: `[B, Hq, Q, D]`
    states: Tensor
    #: Position of the first, in all sequences.
    start: int | Tensor
    #: `[B or 1]`, where each sequence begins.
    first_key: Tensor
    #: `[B, Hq or 1, Q, K]` float32 to add to the logits, or `None`.
    bias: Tensor | None
    #: Position of its first column.
    bias_offset: int
    #: A query sees the last so many keys.
    window: int | None
    scale: float
    soft_cap: float | None


def attend(query: Query, recent: int, rows: Columns, first: Columns) -> AttentionOutput:
    """Attention over the first tokens and, for each query, the last `recent` up to itself.

    Args:
        query: The queries.
        recent: How many recent tokens each sees; 0: none, not even itself.
        rows: The `recent - 1` tokens before the first query and the queries' own, in order.
        first: The first tokens; those that are recent count once.

    Returns:
        `[B * Q, Hq, Dv]` and the log-sum-exp `[B * Q, Hq]`, computed in float32.
    """
    states = query.states
    count = states.shape[2]
    outputs, sums = [], []
    for begin in range(0, count, _CHUNK):
        end = min(begin + _CHUNK, count)
        own = torch.arange(begin, end, device=states.device) + query.start  # positions [Q]
        parts = []
        if recent:
            columns = slice(begin, end + recent - 1)
            part = Columns(
                rows.keys[:, :, columns], rows.values[:, :, columns], rows.positions[:, columns]
            )
            distance = own[:, None] - part.positions[:, None]  # [1, Q, M]
            visible = (distance >= 0) & (distance < recent)
            visible = visible & (part.positions >= query.first_key[:, None])[:, None]
            parts.append((part, _in_window(visible, distance, query.window)))
        if first.keys.shape[2]:
            distance = own[:, None] - first.positions[:, None]
            visible = distance >= recent
            parts.append((first, _in_window(visible, distance, query.window)))
        output, total = _softmax_attention(query, slice(begin, end), parts)
        outputs.append(output)
        sums.append(total)
    return AttentionOutput(
        torch.cat(outputs, 1).flatten(0, 1).to(states.dtype), torch.cat(sums, 1).flatten(0, 1)
    )


def _in_window(visible: Tensor, distance: Tensor, window: int | None) -> Tensor:
    return visible if window is None else visible & (distance < window)


def _softmax_attention(
    query: Query, chunk: slice, parts: list[tuple[Columns, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Output `[B, Q, Hq, Dv]` and log-sum-exp `[B, Q, Hq]` of a chunk over columns, float32."""
    states = query.states[:, :, chunk].float()
    batch, heads = states.shape[:2]
    logits, values = [], []
    for columns, visible in parts:
        kv_heads = columns.keys.shape[1]
        grouped = states.unflatten(1, (kv_heads, heads // kv_heads))  # [B, H, G, Q, D]
        scores = query.scale * grouped @ columns.keys.float()[:, :, None].mT
        scores = scores.flatten(1, 2)  # [B, Hq, Q, M]
        if query.soft_cap is not None:
            scores = query.soft_cap * torch.tanh(scores / query.soft_cap)
        if query.bias is not None:
            scores = scores + _bias_of(query.bias[:, :, chunk], columns, query.bias_offset)
        logits.append(scores.masked_fill(~visible[:, None], -math.inf))
        values.append(columns.values.float().expand(batch, -1, -1, -1))
    joined, value = torch.cat(logits, -1), torch.cat(values, 2)
    total = joined.logsumexp(-1)
    weights = (joined - total[..., None]).exp().where(total[..., None] > -math.inf, 0.0)
    grouped = weights.unflatten(1, (value.shape[1], heads // value.shape[1]))
    output = (grouped @ value[:, :, None]).flatten(1, 2)
    return output.transpose(1, 2), total.transpose(1, 2)


def _bias_of(bias: Tensor, columns: Columns, offset: int) -> Tensor:
    """The columns of a bias `[B, h, Q, K]` at some positions, `[B, h, Q, M]`."""
    index = (columns.positions - offset).clamp(0, bias.shape[3] - 1)
    return bias.gather(3, index[:, None, None].expand(*bias.shape[:3], -1))
