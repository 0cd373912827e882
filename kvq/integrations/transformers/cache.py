"""The cache of a model: a packed layer for each of its attention layers."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    get_layer_types_and_kwargs,
)

from kvq.checks import check_bool, check_int
from kvq.integrations.models import check_config
from kvq.integrations.transformers.layers import PackedLayer
from kvq.integrations.transformers.memory import Memory, measure_memory
from kvq.integrations.transformers.options import LayerModes, LayerOptions, layer_mode
from kvq.integrations.transformers.static import StaticPackedLayer
from kvq.integrations.transformers.steps import Shared
from kvq.integrations.transformers.transforms import LayerTransforms, layer_transform

#: Layers with keys and values for each token; a chunk is the model's mask's business.
_PACKED: Final = ("full_attention", "sliding_attention", "chunked_attention")
#: Layers without, which transformers' own classes serve.
_UNPACKED: Final = ("linear_attention", "conv", "dummy")


class KVQuantCache(Cache):
    """A packed cache of keys and values, for a model's `cache` (`past_key_values` before 5.24).

    Every token is packed once, when it comes. With the attention implementation `"kvq"`, which
    importing this module registers, attention reads the packed pages; with any other it is given
    unpacked tensors. The prompt is attended through what is stored, as later tokens are.

    >>> import torch, transformers
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    ...     vocab_size=99, eos_token_id=None,
    ... )
    >>> model = transformers.LlamaForCausalLM(config)
    >>> model.set_attn_implementation("kvq")
    >>> cache = KVQuantCache(model.config, key_mode="int4", value_mode="int2")
    >>> prompt = torch.ones(1, 5, dtype=torch.int64)
    >>> model.generate(prompt, cache=cache, max_new_tokens=3).shape
    torch.Size([1, 8])
    >>> cache.get_seq_length(), cache.memory().words
    (7, 2048)
    """

    def __init__(
        self,
        config: Any,
        key_mode: LayerModes = "int4",
        value_mode: LayerModes = "int4",
        *,
        first_tokens: int = 0,
        recent_tokens: int = 0,
        slack: int = 64,
        full_precision_prompt: bool = False,
        max_cache_len: int | None = None,
        key_transforms: LayerTransforms = None,
        capacity: int = 0,
        block_size: int = 64,
        offloading: bool = False,
    ) -> None:
        """Make an empty cache. Nothing is allocated before the first tokens come.

        Args:
            config: `model.config`, the object itself: the cache asks it which attention
                implementation is set.
            key_mode: How keys are stored: a mode or its name, a mapping from each layer's index,
                or a function of it. Modes with fitted codebooks are modes.
            value_mode: The same for values.
            first_tokens: Tokens at the beginning of each sequence, after its padding, that queries
                see in full precision. They need the implementation `"kvq"`, and so do:
            recent_tokens: Tokens up to and with the query that it sees in full precision.
            slack: Tokens that are kept beyond the recent ones, and beyond a sliding window, so
                that `crop` by so many stays exact.
            full_precision_prompt: Attend the first chunk of an empty cache as it came. What is
                stored is the same.
            max_cache_len: Make it static, for so many tokens: every tensor stays where it is, and
                decoding can be compiled. `generate` then does so on a GPU.
            key_transforms: What keys lose before they are packed and get back when they are read:
                a mean, a scale of each pair. As `kvq.integrations.key_transforms` makes them of a
                model, or a function of the layer.
            capacity: Tokens to reserve at first in a cache that grows.
            block_size: Tokens in a page.
            offloading: Keep the layers that are not at work in the memory of the host.

        Raises:
            TypeError: A mode is neither a mode nor a name; or a transform is none.
            ValueError: An option is out of range; or the model has latent attention, cross
                attention, layers that share keys and values, or layers of a kind that is not
                known; the message names it.
        """
        decoder = check_config(config).get_text_config(decoder=True)
        _check_config(config, decoder)
        for argument, value, least in (
            ("max_cache_len", 1 if max_cache_len is None else max_cache_len, 1),
            ("capacity", capacity, 0),
            ("block_size", block_size, 1),
        ):
            check_int(argument, value, least)
        check_bool("full_precision_prompt", full_precision_prompt)
        check_bool("offloading", offloading)
        self._shared = Shared(decoder, block_size, capacity)
        types, arguments = get_layer_types_and_kwargs(decoder)
        if isinstance(arguments, dict):  # Before 5.24: the same for every layer.
            arguments = [arguments] * len(types)
        layers: list[Any] = []
        for index, (kind, kwargs) in enumerate(zip(types, arguments, strict=True)):
            if kind in _UNPACKED:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs))
                continue
            if kind not in _PACKED:
                raise ValueError(
                    f"config must have layers of {', '.join(_PACKED + _UNPACKED)}, "
                    f"got {kind} in layer {index}"
                )
            options = LayerOptions(
                layer_mode("key_mode", key_mode, index),
                layer_mode("value_mode", value_mode, index),
                first_tokens,
                recent_tokens,
                slack,
                full_precision_prompt,
                layer_transform(key_transforms, index),
            )
            window = kwargs.get("sliding_window") if kind == "sliding_attention" else None
            layers.append(
                PackedLayer(options, window, self._shared)
                if max_cache_len is None
                else StaticPackedLayer(options, window, self._shared, max_cache_len)
            )
        super().__init__(layers=layers, offloading=offloading)

    def memory(self) -> Memory:
        """What is stored now, in bytes. The sum is that of the storage of all tensors."""
        return measure_memory(self.layers, self._index())

    def _index(self) -> list[Tensor]:
        """What the layers share."""
        steps = [step for _, step in self._shared.steps.values()]
        steps += [clock.step for clock in self._shared.clocks.values() if clock.step is not None]
        return [tensor for step in steps for tensor in step if isinstance(tensor, Tensor)]

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._shared.steps.clear()
        self._shared.turns.clear()


def _check_config(config: Any, decoder: Any) -> None:
    """Refuse models whose layers do not store the keys and values of each token and head."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(
        decoder, "add_cross_attention", False
    ):
        raise ValueError(f"config must have no cross attention, got {name}")
    if getattr(decoder, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"config must have no multi-head latent attention (kv_lora_rank), got {name}"
        )
    modes = getattr(decoder, "kv_sharing_modes", None) or ()
    if "reuse" in modes or getattr(decoder, "num_kv_shared_layers", None):
        raise ValueError(f"config must have no layers that share keys and values, got {name}")
