"""What keys lose before they are packed: a mean, subtracted before RoPE, and a scale of each pair.

A key projection's bias, or whatever else all keys of a head have in common, takes the levels that
their differences need. Before RoPE it is one vector for all positions; after RoPE it is another at
each. So the vector is kept as it is before RoPE, and turned to a key's position when the key is
packed and when it is read. A mean taken after RoPE would fit the positions that it was taken at
and no others, and is not offered.

The scale multiplies both channels of a RoPE pair alike, so it commutes with RoPE, and is divided
out of the queries: nothing is left to do for it when keys are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.checks import check_dtype, check_int, check_kind, check_shape, check_tensor
from kvq.rotary import RotarySpec, split_pairs


@dataclass(frozen=True, slots=True, eq=False)
class KeyTransform:
    """What the keys of one layer lose before they are packed, and get back when they are read.

    At least one of the three is given; `mean` and `mean_tokens` exclude each other.
    """

    #: How the model applies RoPE.
    rotary: RotarySpec
    #: `[H, D]` float32: the mean of the keys before RoPE.
    mean: Tensor | None = None
    #: Take the mean of each sequence's own first keys, at most so many; 0: do not.
    mean_tokens: int = 0
    #: `[H, D]` float32, positive, the same in both channels of a pair: multiplies the keys.
    pair_scale: Tensor | None = None
    #: Says where the tokens of the model's latest pass stand, `[B or 1, Q]`, if anything does; a
    #: key's position is its index else.
    positions: Callable[[], Tensor | None] | None = None

    def __post_init__(self) -> None:
        check_kind("rotary", self.rotary, RotarySpec)
        check_int("mean_tokens", self.mean_tokens)
        if self.positions is not None and not callable(self.positions):
            raise TypeError(
                f"positions must be a function or None, got {type(self.positions).__name__}"
            )
        if self.mean_tokens < 0:
            raise ValueError(f"mean_tokens must not be negative, got {self.mean_tokens}")
        if self.mean is not None and self.mean_tokens:
            raise ValueError(f"mean_tokens must be 0 with a mean, got {self.mean_tokens}")
        if not self.centers and self.pair_scale is None:
            raise ValueError("mean, mean_tokens or pair_scale must be given, got none")
        shape = None
        for name, value in (("mean", self.mean), ("pair_scale", self.pair_scale)):
            if value is None:
                continue
            check_dtype(name, check_tensor(name, value), torch.float32)
            check_shape(name, value, shape or (None, None), "[KV heads, head_dim]")
            shape = (value.shape[0], value.shape[1])
            if shape[0] == 0:
                raise ValueError(f"{name} must have at least one KV head, got {list(shape)}")
            if value.shape[1] < self.rotary.rotary_dim:
                raise ValueError(
                    f"{name} must have the {self.rotary.rotary_dim} channels that are rotated, "
                    f"got {value.shape[1]}"
                )
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} must be finite, got a NaN or an infinity")
        if self.pair_scale is not None:
            if not bool((self.pair_scale > 0).all()):
                raise ValueError(
                    f"pair_scale must be positive, got {float(self.pair_scale.min())}"
                )
            first, second, _ = split_pairs(self.pair_scale, self.rotary)
            if not torch.equal(first, second):
                raise ValueError(
                    "pair_scale must be the same in both channels of a RoPE pair, got two that "
                    "differ"
                )

    @property
    def centers(self) -> bool:
        """Whether a mean is subtracted."""
        return self.mean is not None or self.mean_tokens > 0

    def check_keys(self, heads: int, head_dim: int) -> None:
        """It must fit keys of so many heads and channels.

        Raises:
            ValueError: It does not; the message names what.
        """
        check_int("heads", heads)
        check_int("head_dim", head_dim)
        for name, value in (("mean", self.mean), ("pair_scale", self.pair_scale)):
            if value is not None:
                check_shape(name, value, (heads, head_dim), "[KV heads, head_dim]")
        if head_dim < self.rotary.rotary_dim:
            raise ValueError(
                f"keys must have the {self.rotary.rotary_dim} channels that are rotated, "
                f"got {head_dim}"
            )
