"""Whole models of many architectures on the packed cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from kvq.integrations.transformers import KVQuantCache
from tests.integrations.models import MODELS, TOKENS, forward, prompt, tiny_config, tiny_model


def left_padding(lengths: tuple[int, ...]) -> Tensor:
    """`[B, TOKENS]` with that many tokens at the right end."""
    return torch.stack([torch.arange(TOKENS) >= TOKENS - length for length in lengths]).long()


def differs_by(a: Tensor, b: Tensor, mask: Tensor | None = None) -> float:
    """The largest difference where there is no padding."""
    difference = (a - b).abs().amax(-1)
    return float((difference if mask is None else difference[mask.bool()]).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_reads_packed_what_others_are_given_unpacked(name: str, padded: bool) -> None:
    """Chunked prefill, then a token at a time, as eager attention has it on unpacked tensors."""
    if padded and name == "qwen3_next":
        pytest.skip("a chunk of padding alone disturbs linear attention")
    model = tiny_model(name)
    ids, mask = prompt(), left_padding((TOKENS, 31))
    logits: dict[str, Tensor] = {}
    for implementation in ("kvq", "eager"):
        model.set_attn_implementation(implementation)
        cache = KVQuantCache(model.config, "int4", "int4", block_size=8, slack=2)
        parts, start = [], 0
        for count in (17, 16, *[1] * 7):
            end = start + count
            part = mask[:, :end] if padded else None
            parts.append(forward(model, ids[:, start:end], cache, part))
            start = end
        logits[implementation] = torch.cat(parts, 1)
    shown = mask if padded else None
    # Keys differ in the last bits, and a code may fall to the other side of a threshold.
    assert differs_by(logits["kvq"], logits["eager"], shown) < 0.02
    assert logits["kvq"].isfinite().all()
    median = (logits["kvq"] - logits["eager"]).abs().amax(-1)[mask.bool()].median()
    assert median < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_without_a_cache_it_is_the_model(name: str) -> None:
    model, mask = tiny_model(name, "eager"), left_padding((TOKENS, 31))
    with torch.no_grad():
        eager = model(prompt(), attention_mask=mask, use_cache=False).logits
        model.set_attn_implementation("kvq")
        packed = model(prompt(), attention_mask=mask, use_cache=False).logits
    assert differs_by(packed, eager, mask) < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_with_the_cache_of_transformers_it_is_the_model(name: str) -> None:
    model = tiny_model(name, "eager")
    ids, mask = prompt(), left_padding((TOKENS, 31))
    caches = {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=48),
    }
    for make in caches.values():
        logits = []
        for implementation in ("eager", "kvq"):
            model.set_attn_implementation(implementation)
            cache = make()
            parts = [
                forward(model, ids[:, :30], cache, mask[:, :30]),
                *(
                    forward(model, ids[:, i : i + 1], cache, mask[:, : i + 1])
                    for i in range(30, 40)
                ),
            ]
            logits.append(torch.cat(parts, 1))
        assert differs_by(logits[1], logits[0], mask) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("kept", [{}, {"first_tokens": 3, "recent_tokens": 9}], ids=str)
def test_padding_is_not_seen(name: str, kept: dict[str, int]) -> None:
    """A sequence in a padded batch gives what it gives alone."""
    model, ids = tiny_model(name), prompt()
    mask = left_padding((TOKENS, 31))
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    def cache() -> KVQuantCache:
        return KVQuantCache(model.config, "int8", "int8", **kept)

    together = forward(model, ids, cache(), mask, **positions)
    alone = forward(model, ids[1:, -31:], cache())
    other = ids.clone()
    other[1, :9] = 5
    again = forward(model, other, cache(), mask, **positions)
    assert (together[1:, -31:] - alone).abs().amax(-1).median() < 1e-5
    assert torch.equal(together[1, -31:], again[1, -31:])


def test_right_padding_is_not_seen() -> None:
    model, ids = tiny_model("llama"), prompt()
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 20:] = 0
    cache = KVQuantCache(model.config, "int8", "int8")
    logits = [forward(model, ids, cache, mask)]
    mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.int64)), 1)
    logits.append(forward(model, ids[:, :1], cache, mask))
    other = ids.clone()
    other[1, 20:] = 5
    cache = KVQuantCache(model.config, "int8", "int8")
    forward(model, other, cache, mask[:, :-1])
    assert torch.equal(forward(model, ids[:, :1], cache, mask)[1], logits[1][1])
    assert torch.equal(
        forward(model, other, KVQuantCache(model.config, "int8", "int8"))[1, :20],
        forward(model, ids, KVQuantCache(model.config, "int8", "int8"))[1, :20],
    )


def test_the_prompt_is_attended_through_what_is_stored() -> None:
    model, ids = tiny_model("llama"), prompt()
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    through = forward(model, ids, KVQuantCache(model.config, "int2", "int2"))
    cache = KVQuantCache(model.config, "int2", "int2", full_precision_prompt=True)
    as_it_came = forward(model, ids, cache)
    assert torch.equal(as_it_came, full)
    assert differs_by(through, full) > 0.05
    other = KVQuantCache(model.config, "int2", "int2")
    forward(model, ids, other)
    for a, b in zip(cache.layers[:1], other.layers[:1], strict=True):
        assert torch.equal(a.key_cache.codes, b.key_cache.codes)


@pytest.mark.parametrize("name", ["llama", "mixed_windows"])
@pytest.mark.parametrize(
    "kept",
    [{}, {"first_tokens": 2}, {"recent_tokens": 5}, {"first_tokens": 2, "recent_tokens": 7}],
    ids=str,
)
def test_a_static_cache_gives_what_a_growing_one_does(name: str, kept: dict[str, int]) -> None:
    model, ids, mask = tiny_model(name), prompt(), left_padding((TOKENS, 31))
    logits = []
    for more in ({}, {"max_cache_len": 45}):
        cache = KVQuantCache(model.config, "int4", "lloyd2", block_size=8, **kept, **more)
        parts = [
            forward(model, ids[:, :25], cache, mask[:, :25]),
            *(forward(model, ids[:, i : i + 1], cache, mask[:, : i + 1]) for i in range(25, 40)),
        ]
        logits.append(torch.cat(parts, 1))
    assert differs_by(logits[0], logits[1], mask) < 1e-5


def test_modes_by_layer_and_side() -> None:
    from kvq import mode

    model, ids = tiny_model("llama", num_hidden_layers=4), prompt()
    by_mapping = KVQuantCache(
        model.config,
        {0: "int8", 1: "int4", 2: "int4", 3: "fp8"},
        lambda layer: f"lloyd{1 + layer}",
    )
    assert [str(layer.options.value_mode) for layer in by_mapping.layers] == [
        f"lloyd{bits}_per_token_head" for bits in (1, 2, 3, 4)
    ]
    forward(model, ids, by_mapping)
    codes = [layer.key_cache.codes.shape[-1] for layer in by_mapping.layers]
    assert codes == [16, 8, 8, 16]
    assert [layer.value_cache.codes.shape[-1] for layer in by_mapping.layers] == [2, 4, 6, 8]
    with pytest.raises(ValueError, match="key_mode must have a mode for every layer, got none"):
        KVQuantCache(model.config, {0: "int8"}, "int8")
    with pytest.raises(TypeError, match="value_mode must be a mode or its name in layer 0"):
        KVQuantCache(model.config, "int8", lambda layer: None)
    with pytest.raises(ValueError, match="int5"):
        KVQuantCache(model.config, "int5")
    assert mode("int8") == KVQuantCache(model.config, "int8").layers[0].options.key_mode


def test_fitted_codebooks_by_layer() -> None:
    from dataclasses import replace

    from kvq import CODEBOOKS, mode

    model, ids = tiny_model("llama"), prompt()
    book = CODEBOOKS["gaussian_8"]
    wider = replace(
        book,
        name="wider",
        levels=tuple(2 * x for x in book.levels),
        thresholds=tuple(2 * x for x in book.thresholds),
    )
    fitted = mode("lloyd3").with_codebook(wider)
    cache = KVQuantCache(model.config, lambda layer: fitted if layer == 1 else "lloyd3", "int8")
    same = KVQuantCache(model.config, "lloyd3", "int8")
    forward(model, ids, cache)
    forward(model, ids, same)
    equal = [
        torch.equal(a.key_cache.codes, b.key_cache.codes)
        for a, b in zip(cache.layers, same.layers, strict=True)
    ]
    assert equal == [True, False]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DeepseekV3Config", {}, "multi-head latent attention .* got DeepseekV3Config"),
    ("Gemma3nTextConfig", {}, "share keys and values, got Gemma3nTextConfig"),
    ("T5Config", {}, "no cross attention, got T5Config"),
    ("GPT2Config", {"add_cross_attention": True}, "no cross attention, got GPT2Config"),
    ("FalconH1Config", {}, "got hybrid in layer 0"),
]


@pytest.mark.parametrize(("kind", "more", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refuses_by_name(kind: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVQuantCache(getattr(transformers, kind)(**more))


def test_refuses_options() -> None:
    config = tiny_config("llama")
    for name, value in (
        ("first_tokens", -1),
        ("recent_tokens", -1),
        ("slack", -1),
        ("max_cache_len", 0),
        ("capacity", -1),
        ("block_size", 0),
    ):
        with pytest.raises(ValueError, match=f"{name} must"):
            KVQuantCache(config, **{name: value})
    with pytest.raises(TypeError, match="first_tokens must be an int, got float"):
        KVQuantCache(config, first_tokens=1.0)
    model = tiny_model("llama", "sdpa")
    with pytest.raises(ValueError, match=r"must be 'kvq' for a cache with .*, got 'sdpa'"):
        forward(model, prompt(), KVQuantCache(model.config, recent_tokens=2))
    cache = KVQuantCache(model.config)
    forward(model, prompt(), cache)
    with pytest.raises(ValueError, match=r"batch size must be .* \(2\), got 1"):
        forward(model, prompt(1), cache)
    small = KVQuantCache(model.config, max_cache_len=TOKENS - 1)
    with pytest.raises(ValueError, match=r"max_cache_len must be at least .* 40, got 39"):
        forward(model, prompt(), small)


def test_refuses_a_head_size_by_name() -> None:
    config = transformers.LlamaConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        vocab_size=97,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"head_dim.* must be divisible by 16 .*, got 24"):
        forward(model, prompt(), KVQuantCache(config, "int4"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    ids = prompt()
    for kept in ({}, {"first_tokens": 2, "recent_tokens": 4}):
        cache = KVQuantCache(model.config, "int8", "int8", **kept)
        packed = forward(model, ids, cache)
        assert packed.dtype is dtype
    model.set_attn_implementation("sdpa")
    cache = KVQuantCache(model.config, "int8", "int8")
    unpacked = forward(model, ids, cache)
    assert float((packed - unpacked).abs().max()) < 0.1
    key, value = cache.update(torch.ones(2, 2, 1, 16, dtype=dtype), torch.ones(2, 2, 1, 16), 0)
    assert key.dtype is value.dtype is dtype
    assert key.shape == (2, 2, TOKENS + 1, 16)
