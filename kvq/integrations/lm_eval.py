"""An adapter for lm-evaluation-harness: the model `kvq`, in likelihood and in generation.

The harness's own adapter of Hugging Face models runs likelihood tasks in one pass without a cache,
so whatever the cache does, those tasks do not see it. This one attends the packed cache in both:

    import kvq.integrations.lm_eval  # registers it
    lm_eval.simple_evaluate(
        "kvq", {"pretrained": folder, "key_mode": "int4", "value_mode": "int2"}, tasks=[...]
    )
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvq.integrations.lm_eval needs {error.name}: pip install 'kvq[eval]'"
    ) from error

from kvq.integrations.models import cache_argument, run_model
from kvq.integrations.transformers import KVQuantCache


@register_model("kvq")
class PackedLM(HFLM):  # type: ignore[misc]
    """A causal model of transformers on a packed cache.

    Args:
        pretrained: As for `HFLM`: a folder, or a model (with `tokenizer`).
        key_mode: Of `KVQuantCache`.
        value_mode: Of `KVQuantCache`.
        first_tokens: Of `KVQuantCache`.
        recent_tokens: Of `KVQuantCache`.
        options: Of `HFLM`.
    """

    def __init__(
        self,
        pretrained: Any,
        key_mode: str = "int4",
        value_mode: str = "int4",
        first_tokens: int = 0,
        recent_tokens: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(pretrained=pretrained, **options)
        self._cache_options: dict[str, Any] = {
            "key_mode": key_mode,
            "value_mode": value_mode,
            "first_tokens": first_tokens,
            "recent_tokens": recent_tokens,
        }
        self.model.set_attn_implementation("kvq")
        self._new_cache()  # says now what is not allowed

    def _new_cache(self) -> KVQuantCache:
        return KVQuantCache(self.model.config, **self._cache_options)

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Logits of a batch, whose padding, if any, is on the right and seen by no token."""
        with torch.no_grad():
            return run_model(self.model, inps, self._new_cache())

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Any:
        generation_kwargs[cache_argument(self.model)] = self._new_cache()
        return super()._model_generate(context, max_length, stop, **generation_kwargs)
