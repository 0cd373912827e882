"""What the keys of one layer lose before they are packed: the state of its `KeyTransform`.

A key's position is its index in the cache. What else moves the positions of a sequence, padding
before it or a first position that is not 0, is turned into the sequence's own mean when its first
tokens come. From then on writing and reading use that mean: whatever the positions are, what is
subtracted is what is added back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from kvq import key_operators
from kvq.integrations.transformers.steps import Shared
from kvq.key_transforms import KeyTransform
from kvq.reference.key_transforms import first_mean, scale_queries, shift_mean

#: Bytes of the logits' known part that are made at once; the queries of a long prompt are taken
#: in several parts.
BIAS_BYTES: Final = 2**28

#: A transform of all layers, or one for each by its index, or a function of it; `None`: none.
LayerTransforms = (
    KeyTransform | Mapping[int, KeyTransform] | Callable[[int], KeyTransform | None] | None
)


def layer_transform(transforms: LayerTransforms, layer: int) -> KeyTransform | None:
    """The transform of one layer.

    Raises:
        TypeError: It is not a `KeyTransform`.
        ValueError: There is none for this layer in a mapping.
    """
    found: object
    if isinstance(transforms, Mapping):
        if layer not in transforms:
            raise ValueError(
                f"key_transforms must have one for every layer, got none for layer {layer}"
            )
        found = transforms[layer]
    elif transforms is None or isinstance(transforms, KeyTransform):
        found = transforms
    elif callable(transforms):
        found = transforms(layer)
    else:
        raise TypeError(
            "key_transforms must be a KeyTransform, a mapping or a function, "
            f"got {type(transforms).__name__}"
        )
    if found is not None and not isinstance(found, KeyTransform):
        raise TypeError(
            f"key_transforms must be a KeyTransform in layer {layer}, got {type(found).__name__}"
        )
    return found


class LayerTransform:
    """A `KeyTransform` at work for the sequences of one layer."""

    def __init__(self, transform: KeyTransform, keys: Tensor, shared: Shared) -> None:
        """Begin with no token of sequences like `keys` `[B, H, T, D]`."""
        transform.check_keys(keys.shape[1], keys.shape[3])
        self.transform = transform
        self.rotary = transform.rotary
        self._shared = shared
        # `[H, D]` float32, or `None`: the mean that every sequence begins with.
        self._whole = None if transform.mean is None else transform.mean.to(keys.device)
        scale = transform.pair_scale
        #: `[H, D]` float32, or `None`.
        self.pair_scale = None if scale is None else scale.to(keys.device)
        #: `[B, H, D]` float32: the mean of each sequence for its keys' indices, or `None`.
        self.mean: Tensor | None = None
        #: `[rows, 2 * pairs]` float32: cosines and sines of indices.
        self.rows = shared.rotary_rows(self.rotary, keys.device, 0)
        if transform.centers:
            self.mean = keys.new_empty((len(keys), *keys.shape[1::2]), dtype=torch.float32)
            self.restart()

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept of each sequence."""
        return [] if self.mean is None else [self.mean]

    @property
    def constants(self) -> list[Tensor]:
        """What is kept once: the scale, the mean that all sequences begin with, the table."""
        return [x for x in (self._whole, self.pair_scale, self.rows) if x is not None]

    def map(self, change: Callable[[Tensor], Tensor]) -> LayerTransform:
        """The same with other tensors of each sequence."""
        other = copy.copy(self)
        other.mean = None if self.mean is None else change(self.mean)
        return other

    def reserve(self, tokens: int) -> None:
        """Know the turns of so many tokens."""
        if len(self.rows) < tokens:
            self.rows = self._shared.rotary_rows(self.rotary, self.rows.device, tokens)

    def restart(self) -> None:
        """Forget what the sequences' own tokens gave."""
        if self.mean is not None:
            self.mean.zero_()
            if self._whole is not None:
                self.mean.copy_(self._whole.expand_as(self.mean))

    def begin(self, keys: Tensor) -> None:
        """Find the mean of each sequence from its first tokens.

        Args:
            keys: `[B, H, Q, D]`: the first of the cache, at least one.
        """
        if self.mean is None:
            return
        batch, _, count, _ = keys.shape
        shifts = [0] * batch
        say = self.transform.positions
        position_ids = None if say is None else say()
        if position_ids is not None and position_ids.shape in ((1, count), (batch, count)):
            found = (position_ids[:, -1] - (count - 1)).tolist()
            shifts = found if len(found) == batch else found * batch
        if self._whole is None:
            padding = [max(0, -shift) for shift in shifts]
            tokens = self.transform.mean_tokens
            mean = first_mean(keys, self.rows, padding, tokens, self.rotary)
        elif any(shifts):
            mean = shift_mean(self._whole, shifts, self.rotary)
        else:
            mean = self._whole.expand(batch, -1, -1)
        self.mean.copy_(mean)

    def encode(self, keys: Tensor, start: int | Tensor) -> Tensor:
        """What is packed of keys `[B, H, Q, D]` that stand at `start` and after, float32."""
        count = keys.shape[2]
        if isinstance(start, Tensor):
            index = torch.arange(count, device=keys.device) + start
            # Past the end nothing is written.
            rows = self.rows.index_select(0, index.clamp(max=len(self.rows) - 1))
        else:
            rows = self.rows[start : start + count]
        return key_operators.encode_keys(keys, self.mean, self.pair_scale, rows, self.rotary)

    def decode(self, packed: Tensor, offset: int) -> Tensor:
        """Undo `encode` for keys `[B, H, T, D]` that stand at `offset` and after, float32."""
        rows = self.rows[offset : offset + packed.shape[2]]
        return key_operators.decode_keys(packed, self.mean, self.pair_scale, rows, self.rotary)

    def scale_queries(self, query: Tensor) -> Tensor:
        """Queries `[..., Hq, D]` for keys as they are packed."""
        return query if self.pair_scale is None else scale_queries(query, self.pair_scale)

    def logits(self, query: Tensor, offset: int, columns: int, scale: float) -> Tensor | None:
        """What the logits lack over packed keys.

        Args:
            query: `[B, Q, Hq, D]`, not scaled.
            offset: The index of the first key in the pages.
            columns: Keys from there on.
            scale: Of the logits.

        Returns:
            `[B * Q, Hq, columns]` float32, or `None` if they lack nothing.
        """
        if self.mean is None:
            return None
        rows = self.rows[offset : offset + columns]
        found = key_operators.mean_logits(query, self.mean, rows, self.rotary, scale)
        return found.flatten(0, 1)

    def queries_at_once(self, batch: int, heads: int, columns: int) -> int:
        """How many queries of each sequence to take at once."""
        if self.mean is None:
            return 2**31
        return max(1, BIAS_BYTES // (4 * batch * heads * columns))
