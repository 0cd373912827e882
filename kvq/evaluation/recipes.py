"""Recipes: how a whole model stores its tokens, in one line of text.

`int4` is a mode for keys and values. `k=int8,v=int2,first=4,recent=64` chooses by side and keeps
tokens in full precision; `k0=int8` is a mode for the keys of layer 0; `prompt=full` attends the
prompt as it came. `center=bias`, `center=first` and `center=calibrated` take the mean from keys
before they are packed, and `pair=calibrated` scales their RoPE pairs. A mode may be followed by
`@unrotated` or `@` and a rounding, and by `+` and a codebook file: `int4@toward_zero`,
`lloyd3+keys.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvq.calibration_files import Calibration
from kvq.checks import check_int, check_kind, resolve_enum
from kvq.codebook_files import load_codebook
from kvq.key_transforms import KeyTransform
from kvq.modes import MODES, Mode
from kvq.modes import mode as resolve_mode
from kvq.rounding import Rounding

if TYPE_CHECKING:
    from kvq.integrations.transformers import KVQuantCache

#: Bits of a value in full precision, wherever sizes are compared.
FULL_BITS: Final = 16
#: Tokens beyond the recent ones that a cache keeps for `crop`.
SLACK: Final = 64

#: Where the mean of `center=` comes from.
CENTERS: Final = ("bias", "first", "calibrated")

#: Recipes beyond one mode for all, measured by default.
BEST: Final = (
    "k=int8,v=int4",
    "k=int8,v=lloyd2_unbiased",
    "k=int4,v=lloyd2_unbiased",
    "k=smax4,v=smax4",
    "k=affine4,v=affine4,first=4",
    "k=affine4,v=affine4,first=4,recent=64",
    "k=smax3,v=lloyd3_unbiased,first=4,recent=64",
    "k=lloyd2_norm_match,v=lloyd2_unbiased,first=4,recent=64",
    "int4@unrotated",
    "int4@toward_zero",
    "k=fp8,v=int2",
    "k=int2,v=fp8",
)

#: Recipes by name: what is recommended near 4, 3 and 2 bits a value, for models whose RoPE can be
#: verified, with a calibration of the model (`kvq calibrate`). Keys keep their length or have the
#: least error, values of 2 and 3 bits do not shrink, and the first tokens, which draw attention,
#: stay as they came.
NAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kvq4": "k=smax4_search_w16,v=smax4_search_w16,first=4,center=calibrated,pair=calibrated",
        "kvq3": "k=smax3_search_norm_match_w16,v=smax3_search_unbiased_w16,first=4,"
        "center=calibrated,pair=calibrated",
        "kvq2": "k=trellis2_norm_match_w16,v=trellis2_unbiased_w16,first=4,center=calibrated,"
        "pair=calibrated",
    }
)

_SIDE = re.compile(r"([kv])(\d*)")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the tokens of a model are stored. `str(recipe)` is its text."""

    #: The text it was read from.
    text: str
    #: How keys are stored.
    key_mode: Mode
    #: How values are stored.
    value_mode: Mode
    #: Layers whose keys are stored otherwise.
    key_layers: Mapping[int, Mode] = field(default_factory=dict)
    #: Layers whose values are stored otherwise.
    value_layers: Mapping[int, Mode] = field(default_factory=dict)
    #: Tokens at the beginning that are seen in full precision.
    first_tokens: int = 0
    #: Tokens up to and with the query that are seen in full precision.
    recent_tokens: int = 0
    #: Attend the prompt as it came.
    full_precision_prompt: bool = False
    #: Where the mean of the keys comes from; `None`: it is left in them.
    center: str | None = None
    #: Scale RoPE pairs as a calibration says.
    scale_pairs: bool = False
    #: What the keys of each layer of one model lose: see `bind`.
    key_transforms: Mapping[int, KeyTransform] | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether it is for models with a calibration."""
        return self.center == "calibrated" or self.scale_pairs

    def bind(self, model: Any, calibration: Calibration | None = None) -> Recipe:
        """The recipe for one model: what its keys lose is worked out.

        Args:
            model: A causal model of transformers.
            calibration: Of this model, for a recipe that needs one.

        Raises:
            ValueError: The recipe cannot be had for the model; see `key_transforms` of
                `kvq.integrations.key_transforms`.
        """
        if self.center is None and not self.scale_pairs:
            return self
        from kvq.integrations.key_transforms import key_transforms

        try:
            found = key_transforms(
                model, center=self.center, scale_pairs=self.scale_pairs, calibration=calibration
            )
        except ValueError as error:
            raise ValueError(f"recipe {self.text!r} cannot be had: {error}") from None
        return replace(self, key_transforms=found)

    def new_cache(self, config: Any, **options: Any) -> KVQuantCache:
        """An empty cache of a model with this configuration.

        Args:
            config: `model.config`.
            options: Of `KVQuantCache`, beyond those of the recipe.

        Raises:
            ValueError: The recipe names a layer that the model does not have, or takes something
                from keys and is not bound to the model.
        """
        from kvq.integrations.models import check_config
        from kvq.integrations.transformers import KVQuantCache

        layers = check_config(config).get_text_config(decoder=True).num_hidden_layers
        for layer in (*self.key_layers, *self.value_layers):
            if layer >= layers:
                raise ValueError(f"recipe must name layers below {layers}, got {layer}")
        if (self.center is not None or self.scale_pairs) and self.key_transforms is None:
            raise ValueError(f"recipe must be bound to a model, got {self.text!r}")
        return KVQuantCache(
            config,
            lambda layer: self.key_layers.get(layer, self.key_mode),
            lambda layer: self.value_layers.get(layer, self.value_mode),
            first_tokens=self.first_tokens,
            recent_tokens=self.recent_tokens,
            slack=SLACK,
            full_precision_prompt=self.full_precision_prompt,
            key_transforms=self.key_transforms,
            **options,
        )

    def bits_per_value(self, layers: int, head_dim: int, context: int) -> float:
        """Stored bits for each value of a sequence, words and full-precision tokens counted.

        Args:
            layers: Of the model.
            head_dim: Channels of a row.
            context: Tokens of the sequence. What full precision takes is spread over them, at 16
                bits a value, and tokens that are kept in full precision are stored packed as well;
                and so is the mean of a sequence's own keys, at 32 bits a channel.
        """
        check_int("layers", layers, 1)
        check_int("context", context, 1)
        total = sum(
            float(by_layer.get(layer, mode).bits_per_value(head_dim))
            for mode, by_layer in (
                (self.key_mode, self.key_layers),
                (self.value_mode, self.value_layers),
            )
            for layer in range(layers)
        )
        recent = self.recent_tokens + SLACK if self.recent_tokens else 0
        full = min(context, self.first_tokens + recent)
        # A row of float32 for keys and none for values.
        mean = 32 / 2 if self.center == "first" else 0
        return total / (2 * layers) + (FULL_BITS * full + mean) / context

    def __str__(self) -> str:
        return self.text


def parse_recipe(text: str) -> Recipe:
    """The recipe of a text, or of one of the names of `NAMED`, which stands for its text.

    Raises:
        ValueError: It is none; the message names the part.
        FileFormatError: A codebook file is not valid.
    """
    text = NAMED.get(check_kind("recipe", text, str), text)
    if "=" not in text:
        mode = parse_mode(text)
        return Recipe(text, mode, mode)
    sides: dict[str, dict[str, Mode]] = {"k": {}, "v": {}}
    options: dict[str, Any] = {}
    seen: set[str] = set()
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        side = _SIDE.fullmatch(name)
        # `k0` and `k00` are one layer.
        what = name if side is None or not side[2] else f"{side[1]}{int(side[2])}"
        if what in seen:
            raise ValueError(f"recipe must name a part once, got {part!r} in {text!r}")
        seen.add(what)
        if side is not None:
            sides[side[1]][side[2]] = parse_mode(value)
        elif name in ("first", "recent") and value.isdecimal():
            options[f"{name}_tokens"] = int(value)
        elif name == "center" and value in CENTERS:
            options["center"] = value
        elif name == "pair" and value == "calibrated":
            options["scale_pairs"] = True
        elif name == "prompt" and value in ("full", "packed"):
            options["full_precision_prompt"] = value == "full"
        else:
            raise ValueError(
                "recipe must be a mode, or parts among k=, v=, k<layer>=, v<layer>=, first=, "
                f"recent=, prompt=full, center={'|'.join(CENTERS)} and pair=calibrated, "
                f"got {part!r} in {text!r}"
            )
    modes = {side: by_layer.pop("", None) for side, by_layer in sides.items()}
    if modes["k"] is None or modes["v"] is None:
        raise ValueError(f"recipe must have k= and v=, got {text!r}")
    key_layers, value_layers = (
        {int(layer): mode for layer, mode in by_layer.items()} for by_layer in sides.values()
    )
    return Recipe(text, modes["k"], modes["v"], key_layers, value_layers, **options)


def check_named_once(recipes: Sequence[Recipe]) -> None:
    """Recipes are told apart by their texts.

    Raises:
        ValueError: Two have the same.
    """
    names = [str(recipe) for recipe in recipes]
    if len(set(names)) < len(names):
        raise ValueError(f"recipes must each be named once, got {', '.join(names)}")


def parse_mode(text: str) -> Mode:
    """The mode of `name`, `name@unrotated`, `name@rounding` or `name+codebook file`.

    Raises:
        ValueError: There is no such mode, or it takes no such part.
    """
    name, plus, file = check_kind("mode", text, str).partition("+")
    name, *parts = name.split("@")
    mode = resolve_mode(name)
    for part in parts:
        if part == "unrotated":
            mode = mode.without_rotation()
        else:
            mode = mode.with_rounding(resolve_enum("rounding", part, Rounding))
    return mode.with_codebook(load_codebook(Path(file))) if plus else mode


def default_recipes() -> list[Recipe]:
    """Every shipped mode, and `BEST`."""
    return [parse_recipe(text) for text in (*map(str, MODES), *BEST)]
