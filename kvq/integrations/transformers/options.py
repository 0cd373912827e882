"""How the layers of a cache store their tokens: modes by layer and side, and the full-precision
tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvq.checks import check_bool, check_int, check_kind, check_optional
from kvq.key_transforms import KeyTransform
from kvq.modes import Mode
from kvq.modes import mode as resolve_mode

#: A mode for all layers, a mapping from each layer's index, or a function of it.
LayerModes = Mode | str | Mapping[int, Mode | str] | Callable[[int], Mode | str]


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How one layer stores its tokens. Every token is packed, once, when it comes.

    With `first_tokens = m` and `recent_tokens = n`, the query at position p reads the first m
    tokens of its sequence and the last n up to p in the dtype of the model, and the others packed.
    """

    #: How keys are stored.
    key_mode: Mode
    #: How values are stored.
    value_mode: Mode
    #: Tokens at the beginning of each sequence that are kept in full precision as well.
    first_tokens: int = 0
    #: Tokens up to and with the query that are kept in full precision as well.
    recent_tokens: int = 0
    #: Tokens beyond a window that are kept, so that the sequence can be cropped by so many.
    slack: int = 64
    #: Attend a sequence's first chunk as it came; what is stored is the same.
    full_precision_prompt: bool = False
    #: What keys lose before they are packed, if anything.
    key_transform: KeyTransform | None = None

    def __post_init__(self) -> None:
        check_kind("key_mode", self.key_mode, Mode)
        check_kind("value_mode", self.value_mode, Mode)
        check_bool("full_precision_prompt", self.full_precision_prompt)
        check_optional("key_transform", self.key_transform, KeyTransform)
        for argument in ("first_tokens", "recent_tokens", "slack"):
            value = check_int(argument, getattr(self, argument))
            if value < 0:
                raise ValueError(f"{argument} must not be negative, got {value}")

    @property
    def keeps_full_precision(self) -> bool:
        """Whether some tokens are kept in the dtype of the model."""
        return self.first_tokens > 0 or self.recent_tokens > 0


def layer_mode(argument: str, modes: LayerModes, layer: int) -> Mode:
    """The mode of one layer.

    Args:
        argument: What the modes are called, for messages.
        modes: For all layers, by layer, or as a function of the layer.
        layer: Its index.

    Raises:
        TypeError: It is neither a mode nor a name.
        ValueError: There is no mode of that name, or none for this layer.
    """
    found: object
    if isinstance(modes, Mapping):
        if layer not in modes:
            raise ValueError(
                f"{argument} must have a mode for every layer, got none for layer {layer}"
            )
        found = modes[layer]
    elif isinstance(modes, Mode | str):
        found = modes
    elif callable(modes):
        found = modes(layer)
    else:
        raise TypeError(
            f"{argument} must be a mode, its name, a mapping or a function, "
            f"got {type(modes).__name__}"
        )
    if not isinstance(found, Mode | str):
        raise TypeError(
            f"{argument} must be a mode or its name in layer {layer}, got {type(found).__name__}"
        )
    try:
        return resolve_mode(found)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None
