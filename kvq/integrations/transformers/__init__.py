"""Hugging Face models on a packed cache.

Importing this registers the attention implementation `"kvq"` with transformers: a function that
reads packed pages, and the masks it takes. Two lines run a model on it:

    model.set_attn_implementation("kvq")
    model.generate(..., cache=KVQuantCache(model.config, "int4", "int4"))
"""

from __future__ import annotations

try:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
except ModuleNotFoundError as error:
    raise ImportError(
        "kvq.integrations.transformers needs transformers: pip install 'kvq[hf]'"
    ) from error

from kvq.integrations.transformers.attention import packed_attention
from kvq.integrations.transformers.cache import KVQuantCache
from kvq.integrations.transformers.mask import packed_mask
from kvq.integrations.transformers.memory import Memory
from kvq.integrations.transformers.options import LayerModes, LayerOptions

__all__ = ["KVQuantCache", "LayerModes", "LayerOptions", "Memory"]

AttentionInterface.register("kvq", packed_attention)
# Without a mask function of the same name a model would pass no mask, and padding would be seen.
AttentionMaskInterface.register("kvq", packed_mask)
