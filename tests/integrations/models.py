"""Tiny random models of many architectures, from small configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from kvq.integrations.models import cache_argument

VOCABULARY = 97
#: A prompt of every model.
TOKENS = 40
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"]

#: By name: the class of the configuration and what it is given beyond the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "mixed_windows": (
        "Qwen2Config",
        {"layer_types": _ALTERNATING, "sliding_window": 12, "use_sliding_window": True},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 12,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 12, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": 12,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": 12,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "cohere": ("CohereConfig", {}),
    "glm": ("GlmConfig", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 0,
            "mlp_only_layers": [0, 1],
        },
    ),
}


def tiny_config(name: str, **options: Any) -> Any:
    """The configuration of a tiny model."""
    kind, more = MODELS[name]
    return getattr(transformers, kind)(**{**_SMALL, **more, **options})


def tiny_model(name: str, implementation: str = "kvq", seed: int = 0, **options: Any) -> Any:
    """A tiny model with random weights, in evaluation mode.

    Its weights are larger than usual, so that attention is not uniform; `qwen2` has key biases
    far larger than the keys, as trained ones have; `gpt_oss` has sinks.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, **options)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(12.0)
            if parameter_name.endswith("sinks"):
                nn.init.normal_(parameter)
            if name == "qwen2" and parameter_name.endswith("k_proj.bias"):
                nn.init.normal_(parameter, std=20.0)
    model.set_attn_implementation(implementation)
    return model


def prompt(batch: int = 2, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    """Random tokens, without the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)


def forward(
    model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Logits `[B, Q, V]` of the next tokens of a cache."""
    with torch.no_grad():
        options[cache_argument(model)] = cache
        return model(input_ids=ids, attention_mask=mask, **options).logits
