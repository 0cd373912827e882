"""Running a causal model of transformers with a cache, whatever its release calls the argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from kvq.checks import check_choice, check_device_name, check_storage
from kvq.integrations.observe import import_optional

#: Shapes of models, by name.
_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
    },
}


def check_model(model: Any) -> Any:
    """`model`, which must be a model of transformers, or wrap one.

    Raises:
        TypeError: It is not.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    return model


def check_config(config: Any) -> Any:
    """`config`, which must be the configuration of a model of transformers.

    Raises:
        TypeError: It is not.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            f"config must be a configuration of transformers, got {type(config).__name__}"
        )
    return config


def check_token_ids(argument: str, ids: Tensor, model: Any) -> None:
    """Token ids must be in the vocabulary of a model.

    Raises:
        ValueError: One is not.
    """
    last = model.config.get_text_config().vocab_size - 1
    if ids.numel():
        for found in (int(ids.min()), int(ids.max())):
            if not 0 <= found <= last:
                raise ValueError(f"{argument} must be from 0 to {last}, got {found}")


def cache_argument(model: Any) -> str:
    """What the model's forward function calls its cache."""
    named = inspect.signature(model.forward).parameters
    return "cache" if "cache" in named else "past_key_values"


def run_model(model: Any, input_ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """Logits `[B, Q, V]` of the tokens `[B, Q]` that follow those in a cache, or stand alone."""
    if cache is not None:
        options[cache_argument(model)] = cache
    logits: Tensor = model(input_ids=input_ids, use_cache=cache is not None, **options).logits
    return logits


def transformers_cache(model: Any, max_cache_len: int | None = None) -> Any:
    """An empty cache of transformers' own: one that grows, or a static one of that size."""
    from transformers import DynamicCache, StaticCache

    if max_cache_len is None:
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=max_cache_len)


def random_model(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A Llama with random weights, for what does not depend on them.

    Args:
        shape: `llama3-8b`, or `tiny`.
        device: Where it is made.
        dtype: Of its weights.

    Raises:
        ValueError: There is no such shape.
    """
    transformers = import_optional("transformers")
    check_choice("shape", shape, tuple(_SHAPES))
    check_device_name(device)
    check_storage("dtype", dtype)
    config = transformers.LlamaConfig(
        **_SHAPES[shape], eos_token_id=None, bos_token_id=None, dtype=dtype
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def attending(model: Any, implementation: str | None) -> Iterator[None]:
    """Let a model attend by an implementation, or by its own (`None`), and then as before."""
    if implementation is None:
        yield
        return
    if implementation == "kvq":
        import kvq.integrations.transformers  # noqa: F401  (registers it)
    config = model.config.get_text_config()
    before = config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
