"""Running a causal model of transformers with a cache, whatever its release calls the argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


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


def full_precision_cache(model: Any) -> Any:
    """An empty cache of transformers' own, which grows."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


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
