"""The attention function over a layer, against the definition, one query and one key at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvq

pytest.importorskip("transformers")

from kvq.integrations.transformers.attention import packed_attention
from kvq.integrations.transformers.layers import PackedLayer
from kvq.integrations.transformers.mask import expand_bounds, packed_mask
from kvq.integrations.transformers.options import LayerOptions
from kvq.integrations.transformers.static import StaticPackedLayer
from kvq.integrations.transformers.steps import Shared

BATCH, KV_HEADS, HEADS, DIM, TOKENS = 2, 1, 2, 16, 19
PADDING = (5, 0)
CHUNKS = {
    "at once": [TOKENS],
    "in chunks": [9, 2, 3, 5],
    "token by token": [1] * TOKENS,
    "prompt and tokens": [14] + [1] * (TOKENS - 14),
}


def make_layer(options: LayerOptions, window: int | None, static: bool) -> PackedLayer:
    shared = Shared(SimpleNamespace(_attn_implementation="kvq"), block_size=4, capacity=0)
    if static:
        return StaticPackedLayer(options, window, shared, max_cache_len=TOKENS + 3)
    return PackedLayer(options, window, shared)


def run(
    layer: PackedLayer,
    chunks: list[int],
    states: dict[str, Tensor],
    padded: bool,
    boolean: bool = False,
    **features: Any,
) -> Tensor:
    """`[B, T, Hq, D]`: the attention function over the layer, chunk by chunk."""
    outputs, start = [], 0
    for count in chunks:
        chunk = slice(start, start + count)
        columns, offset = layer.get_mask_sizes(count)
        two = torch.ones(BATCH, start + count, dtype=torch.bool)
        if padded:
            two[0, : PADDING[0]] = False
        length = layer.get_seq_length()
        mask = packed_mask(
            BATCH, count, columns, length, offset, attention_mask=two, local_size=None
        )
        if boolean and mask is not None and mask.dtype is not torch.bool:
            mask = expand_bounds(mask, count, columns, None).expand(BATCH, 1, count, columns)
        key, value = layer.update(states["key"][:, :, chunk], states["value"][:, :, chunk])
        output, _ = packed_attention(
            nn.Module(), states["query"][:, :, chunk], key, value, mask, **features
        )
        outputs.append(output)
        start += count
    return torch.cat(outputs, 1)


def expected(
    states: dict[str, Tensor],
    options: LayerOptions,
    window: int | None,
    padded: bool,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """The definition in float64."""
    stored = {
        side: kvq.dequantize(*kvq.quantize(states[side], mode), mode, DIM).double()
        for side, mode in (("key", options.key_mode), ("value", options.value_mode))
    }
    full = {side: states[side].double() for side in ("key", "value")}
    output = torch.zeros(BATCH, TOKENS, HEADS, DIM, dtype=torch.float64)
    for b in range(BATCH):
        first = PADDING[b] if padded else 0
        for h in range(HEADS):
            for p in range(TOKENS):
                logits, values = [], []
                for j in range(first, p + 1):
                    if window is not None and p - j >= window:
                        continue
                    near = p - j < options.recent_tokens or j - first < options.first_tokens
                    source = full if near else stored
                    key = source["key"][b, h // 2, j]
                    logit = float(states["query"][b, h, p].double() @ key) / math.sqrt(DIM)
                    if softcap is not None:
                        logit = softcap * math.tanh(logit / softcap)
                    logits.append(logit)
                    values.append(source["value"][b, h // 2, j])
                if not logits:
                    continue
                sink = [] if s_aux is None else [float(s_aux[h])]
                weights = torch.tensor(logits + sink, dtype=torch.float64).softmax(0)
                output[b, p, h] = weights[: len(logits)] @ torch.stack(values)
    return output


@pytest.fixture(scope="module")
def states() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "query": 2 * torch.randn(BATCH, HEADS, TOKENS, DIM),
        "key": torch.randn(BATCH, KV_HEADS, TOKENS, DIM),
        "value": torch.randn(BATCH, KV_HEADS, TOKENS, DIM),
    }


OPTIONS = {
    "packed": {},
    "first": {"first_tokens": 3},
    "recent": {"recent_tokens": 6},
    "one recent": {"recent_tokens": 1},
    "both": {"first_tokens": 3, "recent_tokens": 6},
    "overlapping": {"first_tokens": 9, "recent_tokens": 40},
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("kept", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_is_the_definition(
    states: dict[str, Tensor], chunks: list[int], kept: dict[str, int], static: bool, padded: bool
) -> None:
    options = LayerOptions(kvq.mode("int4"), kvq.mode("lloyd2"), slack=4, **kept)
    layer = make_layer(options, None, static)
    output = run(layer, chunks, states, padded)
    wanted = expected(states, options, None, padded)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunks", [CHUNKS["in chunks"], CHUNKS["token by token"]], ids=str)
@pytest.mark.parametrize("kept", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("window", [1, 6, 8])
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_with_a_window_a_cap_and_sinks(
    states: dict[str, Tensor], chunks: list[int], kept: dict[str, int], window: int, static: bool
) -> None:
    options = LayerOptions(kvq.mode("int8"), kvq.mode("int4"), slack=0, **kept)
    sinks = torch.tensor([0.5, -1.0])
    layer = make_layer(options, window, static)
    output = run(layer, chunks, states, True, softcap=1.5, s_aux=sinks)
    wanted = expected(states, options, window, True, softcap=1.5, s_aux=sinks)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("window", [None, 6])
def test_with_a_boolean_mask(
    states: dict[str, Tensor], chunks: list[int], window: int | None
) -> None:
    options = LayerOptions(kvq.mode("int8"), kvq.mode("int4"), recent_tokens=2, slack=0)
    output = run(make_layer(options, window, False), chunks, states, True, boolean=True)
    wanted = expected(states, options, window, True)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)


def test_many_queries_at_once() -> None:
    """More than one chunk of queries over their recent tokens."""
    torch.manual_seed(2)
    states = {
        "query": torch.randn(1, 1, 600, DIM),
        "key": torch.randn(1, 1, 600, DIM),
        "value": torch.randn(1, 1, 600, DIM),
    }
    options = LayerOptions(kvq.mode("int2"), kvq.mode("int2"), 2, 100)
    layer = make_layer(options, None, False)
    key, value = layer.update(states["key"], states["value"])
    output, _ = packed_attention(nn.Module(), states["query"], key, value, None)
    stored = [
        kvq.dequantize(*kvq.quantize(states[side], "int2"), "int2", DIM)
        for side in ("key", "value")
    ]
    position = torch.arange(600)
    distance = position[:, None] - position
    near = (distance < 100) | (position < 2)
    scores = torch.where(near, states["query"] @ states["key"].mT, states["query"] @ stored[0].mT)
    weights = (scores / 4).masked_fill(distance < 0, -math.inf).softmax(-1)
    wanted = torch.where(near, weights, 0.0) @ states["value"]
    wanted = wanted + torch.where(near, 0.0, weights) @ stored[1]
    torch.testing.assert_close(output.transpose(1, 2), wanted, rtol=1e-4, atol=1e-5)


def test_a_window_forgets_pages() -> None:
    options = LayerOptions(kvq.mode("int4"), kvq.mode("int4"), slack=4)
    layer = make_layer(options, 8, False)
    token = torch.ones(1, 1, 1, DIM)
    for _ in range(200):
        layer.update(token, token)
    assert layer.get_seq_length() == 200
    assert layer.key_cache.words.shape[0] * 4 <= 2 * (8 + 4) + 8
    layer.crop(-4)
    with pytest.raises(ValueError, match=r"must leave every token of the window of 8"):
        layer.crop(-30)


def test_attention_that_is_not_causal_is_refused(states: dict[str, Tensor]) -> None:
    options = LayerOptions(kvq.mode("int4"), kvq.mode("int4"))

    def call(**arguments: Any) -> None:
        key, value = make_layer(options, None, False).update(states["key"], states["value"])
        mask = arguments.pop("attention_mask", None)
        packed_attention(nn.Module(), states["query"], key, value, mask, **arguments)

    with pytest.raises(ValueError, match="is_causal must be True over a packed cache"):
        call(is_causal=False)
    with pytest.raises(ValueError, match=r"dropout must be 0 over a packed cache, got 0\.5"):
        call(dropout=0.5)
    with pytest.raises(ValueError, match="position_bias must be None"):
        call(position_bias=torch.zeros(1))
    shows = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    with pytest.raises(ValueError, match="attention_mask must hide what comes after a query"):
        call(attention_mask=shows)
    key, value = make_layer(
        LayerOptions(kvq.mode("int4"), kvq.mode("int4"), first_tokens=2), None, False
    ).update(states["key"], states["value"])
    with pytest.raises(ValueError, match="first_tokens must be 0 with an attention mask other"):
        packed_attention(nn.Module(), states["query"], key, value, shows.tril())


def test_what_a_model_may_not_do_with_handles() -> None:
    options = LayerOptions(kvq.mode("int4"), kvq.mode("int4"))
    token = torch.ones(1, 1, 1, DIM)
    key, _ = make_layer(options, None, False).update(token, token)
    with pytest.raises(AttributeError, match=r"untouched .* got a model that asks for \.shape"):
        _ = key.shape
