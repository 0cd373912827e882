"""How a model applied RoPE to its queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kvq.checks import check_int, check_kind, check_number, check_tuple, resolve_enum


class RotaryLayout(Enum):
    """Which two channels make a RoPE pair."""

    #: Channel `i` and channel `i + rotary_dim / 2` (Llama, Qwen, Gemma, NeoX).
    HALF = "half"
    #: Channel `2i` and channel `2i + 1` (GPT-J, Cohere).
    INTERLEAVED = "interleaved"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """RoPE: pair `i` is turned by `position * inverse_frequencies[i]` and then scaled.

    Channels from `rotary_dim` on pass through.
    """

    #: Radians per position, one for each pair; float32 numbers.
    inverse_frequencies: tuple[float, ...]
    #: How many channels are rotated: twice the number of pairs.
    rotary_dim: int
    #: Which channels make a pair.
    layout: RotaryLayout = RotaryLayout.HALF
    #: Multiplies cosine and sine (YaRN's attention factor); 1 for most models.
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        check_tuple("inverse_frequencies", self.inverse_frequencies, float)
        check_int("rotary_dim", self.rotary_dim)
        check_kind("layout", self.layout, RotaryLayout)
        check_number("attention_factor", self.attention_factor, positive=True)
        if self.rotary_dim <= 0 or self.rotary_dim != 2 * len(self.inverse_frequencies):
            raise ValueError(
                "rotary_dim must be twice the number of inverse frequencies "
                f"({2 * len(self.inverse_frequencies)}), got {self.rotary_dim}"
            )
        for value in self.inverse_frequencies:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"inverse_frequencies must be finite and not negative, got {value}"
                )

    def to_json(self) -> dict[str, object]:
        """A JSON object; `from_json` gives back an equal spec."""
        return {
            "inverse_frequencies": list(self.inverse_frequencies),
            "rotary_dim": self.rotary_dim,
            "layout": self.layout.value,
            "attention_factor": self.attention_factor,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> RotarySpec:
        """A spec from its JSON object.

        Raises:
            ValueError: A field is missing, unknown or of the wrong kind.
        """
        known = {"inverse_frequencies", "rotary_dim", "layout", "attention_factor"}
        if not isinstance(value, Mapping) or set(value) != known:
            raise ValueError(
                f"rotary must be a JSON object with the fields {sorted(known)}, got {value!r}"
            )
        frequencies = value["inverse_frequencies"]
        if not isinstance(frequencies, list) or not all(
            isinstance(item, (int, float)) and not isinstance(item, bool) for item in frequencies
        ):
            raise ValueError(f"inverse_frequencies must be a list of numbers, got {frequencies!r}")
        rotary_dim, factor = value["rotary_dim"], value["attention_factor"]
        if not isinstance(rotary_dim, int) or not isinstance(factor, (int, float)):
            raise ValueError(
                "rotary_dim must be an integer and attention_factor a number, "
                f"got {rotary_dim!r} and {factor!r}"
            )
        return cls(
            tuple(float(item) for item in frequencies),
            rotary_dim,
            resolve_enum("layout", value["layout"], RotaryLayout),
            float(factor),
        )


def split_pairs(x: Tensor, spec: RotarySpec) -> tuple[Tensor, Tensor, Tensor]:
    """The channels of `x` `[..., D]`: the first of each pair, the second, and those of no pair."""
    turned, rest = x[..., : spec.rotary_dim], x[..., spec.rotary_dim :]
    if spec.layout is RotaryLayout.HALF:
        half = spec.rotary_dim // 2
        return turned[..., :half], turned[..., half:], rest
    return turned[..., 0::2], turned[..., 1::2], rest


def join_pairs(first: Tensor, second: Tensor, rest: Tensor, spec: RotarySpec) -> Tensor:
    """Undo `split_pairs`."""
    if spec.layout is RotaryLayout.HALF:
        return torch.cat((first, second, rest), dim=-1)
    return torch.cat((torch.stack((first, second), dim=-1).flatten(-2), rest), dim=-1)
