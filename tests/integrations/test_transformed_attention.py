"""Attention over a layer whose keys lost their mean, against the definition in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvq

pytest.importorskip("transformers")

from kvq.integrations.transformers import transforms
from kvq.integrations.transformers.attention import packed_attention
from kvq.integrations.transformers.layers import PackedLayer
from kvq.integrations.transformers.mask import expand_bounds, packed_mask
from kvq.integrations.transformers.options import LayerOptions
from kvq.integrations.transformers.static import StaticPackedLayer
from kvq.integrations.transformers.steps import Shared
from kvq.integrations.transformers.transforms import layer_transform
from kvq.key_transforms import KeyTransform
from kvq.reference import key_transforms as arithmetic
from kvq.reference.rotary import apply_rotary
from kvq.rotary import RotaryLayout, RotarySpec

BATCH, KV_HEADS, HEADS, DIM, TOKENS = 2, 2, 4, 16, 19
PADDING = (5, 0)
CHUNKS = {"at once": [TOKENS], "in chunks": [9, 2, 3, 5], "one by one": [8] + [1] * (TOKENS - 8)}
SPEC = RotarySpec(
    tuple(torch.tensor([100.0 ** (-i / 6) for i in range(6)]).tolist()),
    12,
    RotaryLayout.INTERLEAVED,
    1.25,
)
CONFIG = SimpleNamespace(_attn_implementation="kvq")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MEAN = 20 * random(KV_HEADS, DIM, seed=1)
SCALE = random(KV_HEADS, DIM // 2, seed=2).exp().repeat_interleave(2, 1)
#: Where the tokens of the latest pass stand.
PASS: dict[str, Tensor] = {}
TELL = {"positions": lambda: PASS.get("ids")}
TRANSFORMS = {
    "mean": KeyTransform(SPEC, mean=MEAN, **TELL),
    "pair": KeyTransform(SPEC, pair_scale=SCALE, **TELL),
    "both": KeyTransform(SPEC, mean=MEAN, pair_scale=SCALE, **TELL),
    "first": KeyTransform(SPEC, mean_tokens=4, pair_scale=SCALE, **TELL),
}


def make_layer(transform: KeyTransform | None, static: bool, **more: Any) -> PackedLayer:
    window = more.pop("window", None)
    options = LayerOptions(
        kvq.mode("int4"), kvq.mode("int8"), slack=4, key_transform=transform, **more
    )
    shared = Shared(CONFIG, block_size=4, capacity=0)
    if static:
        return StaticPackedLayer(options, window, shared, max_cache_len=TOKENS + 3)
    return PackedLayer(options, window, shared)


def positions_of(padded: bool, offset: int) -> Tensor:
    """As transformers makes them of left padding: 1 where it is."""
    positions = torch.arange(TOKENS).expand(BATCH, -1) + offset
    if padded:
        positions = positions - torch.tensor(PADDING)[:, None]
        positions = positions.masked_fill(positions < offset, 1)
    return positions


def make_states(padded: bool, offset: int) -> dict[str, Tensor]:
    """Keys about a mean that was turned with them."""
    positions = positions_of(padded, offset)
    before = random(BATCH, TOKENS, KV_HEADS, DIM, seed=3) + MEAN
    keys = torch.stack([apply_rotary(before[b], positions[b], SPEC) for b in range(BATCH)])
    return {
        "query": random(BATCH, HEADS, TOKENS, DIM, seed=4),
        "key": keys.transpose(1, 2),
        "value": random(BATCH, KV_HEADS, TOKENS, DIM, seed=5),
    }


def run(
    layer: PackedLayer,
    chunks: list[int],
    states: dict[str, Tensor],
    padded: bool,
    offset: int = 0,
    boolean: bool = False,
    **features: Any,
) -> Tensor:
    """`[B, T, Hq, D]`: the attention function over the layer, chunk by chunk."""
    outputs, start = [], 0
    positions = positions_of(padded, offset)
    for count in chunks:
        chunk = slice(start, start + count)
        columns, first = layer.get_mask_sizes(count)
        two = torch.ones(BATCH, start + count, dtype=torch.bool)
        if padded:
            two[0, : PADDING[0]] = False
        length = layer.get_seq_length()
        mask = packed_mask(BATCH, count, columns, length, first, attention_mask=two)
        if boolean and (mask is None or mask.dtype is not torch.bool):
            mask = expand_bounds(mask, count, columns, None).expand(BATCH, 1, count, columns)
        PASS["ids"] = positions[:, chunk]
        key, value = layer.update(states["key"][:, :, chunk], states["value"][:, :, chunk])
        query = states["query"][:, :, chunk]
        outputs.append(packed_attention(nn.Module(), query, key, value, mask, **features)[0])
        start += count
    return torch.cat(outputs, 1)


def stored_keys(
    transform: KeyTransform, states: dict[str, Tensor], padded: bool, offset: int, first: int
) -> Tensor:
    """What the packed keys stand for, float64; `first` tokens came first."""
    shifts = [offset - padding if padded else offset for padding in PADDING]
    rows = arithmetic.rotary_rows(SPEC, 0, TOKENS)
    mean = None
    if transform.mean is not None:
        mean = arithmetic.shift_mean(transform.mean, shifts, SPEC)
    elif transform.mean_tokens:
        padding = [max(0, -shift) for shift in shifts]
        chunk = states["key"][:, :, :first]
        mean = arithmetic.first_mean(chunk, rows, padding, transform.mean_tokens, SPEC)
    scale = transform.pair_scale
    packed = arithmetic.encode_keys(states["key"], mean, scale, rows, SPEC)
    back = kvq.dequantize(*kvq.quantize(packed, "int4"), "int4", DIM)
    found = back.double() if scale is None else back.double() / scale.double()[:, None]
    return found if mean is None else found + arithmetic.turn_mean(mean, rows, SPEC).double()


def expected(
    keys: Tensor, states: dict[str, Tensor], padded: bool, window: int | None = None, **kept: int
) -> Tensor:
    """The definition in float64."""
    value = kvq.dequantize(*kvq.quantize(states["value"], "int8"), "int8", DIM).double()
    output = torch.zeros(BATCH, TOKENS, HEADS, DIM, dtype=torch.float64)
    for b in range(BATCH):
        first = PADDING[b] if padded else 0
        for h in range(HEADS):
            for p in range(first, TOKENS):
                seen = [j for j in range(first, p + 1) if window is None or p - j < window]
                whole = [
                    p - j < kept.get("recent_tokens", 0) or j - first < kept.get("first_tokens", 0)
                    for j in seen
                ]
                pick = [
                    (states["key"].double() if w else keys)[b, h // 2, j]
                    for j, w in zip(seen, whole, strict=True)
                ]
                values = [
                    (states["value"].double() if w else value)[b, h // 2, j]
                    for j, w in zip(seen, whole, strict=True)
                ]
                logits = torch.stack(pick) @ states["query"][b, h, p].double() / math.sqrt(DIM)
                output[b, p, h] = logits.softmax(0) @ torch.stack(values)
    return output


def assert_close(found: Tensor, wanted: Tensor, padded: bool) -> None:
    """But for the queries of the padding. Logits of 100 are held to 1e-5."""
    for b in range(BATCH):
        first = PADDING[b] if padded else 0
        torch.testing.assert_close(
            found[b, first:].double(), wanted[b, first:], rtol=2e-4, atol=2e-4
        )


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_is_the_definition(name: str, chunks: list[int], static: bool, padded: bool) -> None:
    states, transform = make_states(padded, 0), TRANSFORMS[name]
    found = run(make_layer(transform, static), chunks, states, padded)
    keys = stored_keys(transform, states, padded, 0, chunks[0])
    assert_close(found, expected(keys, states, padded), padded)


@pytest.mark.parametrize("kept", [{"first_tokens": 3}, {"recent_tokens": 4}], ids=str)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("boolean", [False, True], ids=["bounds", "boolean"])
@pytest.mark.parametrize("at_once", [2**28, 1000])
def test_with_full_precision_a_window_and_masks(
    kept: dict[str, int],
    window: int | None,
    boolean: bool,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with queries that are taken one or two at a time."""
    if boolean and "first_tokens" in kept:
        pytest.skip("refused")
    monkeypatch.setattr(transforms, "BIAS_BYTES", at_once)
    states, transform = make_states(True, 0), TRANSFORMS["both"]
    keys = stored_keys(transform, states, True, 0, TOKENS)
    wanted = expected(keys, states, True, window, **kept)
    for chunks in CHUNKS.values():
        layer = make_layer(transform, False, window=window, **kept)
        assert_close(run(layer, chunks, states, True, boolean=boolean), wanted, True)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_sequence_that_begins_elsewhere(padded: bool) -> None:
    """Keys are as near to what they were as at the first positions."""
    states, transform = make_states(padded, 30_000), TRANSFORMS["mean"]
    found = run(make_layer(transform, False), CHUNKS["in chunks"], states, padded, 30_000)
    keys = stored_keys(transform, states, padded, 30_000, 9)
    assert_close(found, expected(keys, states, padded), padded)
    real = [slice(PADDING[b] if padded else 0, TOKENS) for b in range(BATCH)]
    errors = [(keys[b] - states["key"][b])[:, real[b]].square().mean().sqrt() for b in range(2)]
    plain = kvq.dequantize(*kvq.quantize(states["key"], "int4"), "int4", DIM) - states["key"]
    assert max(errors) < 0.2 < plain.square().mean().sqrt()


def test_other_implementations_are_given_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    states, transform = make_states(False, 0), TRANSFORMS["both"]
    wanted = stored_keys(transform, states, False, 0, TOKENS)
    monkeypatch.setattr(CONFIG, "_attn_implementation", "sdpa")
    for static in (False, True):
        layer = make_layer(transform, static)
        keys, _ = layer.update(states["key"], states["value"])
        torch.testing.assert_close(keys[:, :, :TOKENS].double(), wanted, rtol=1e-6, atol=1e-5)


def test_what_is_written_is_what_is_read_whatever_the_positions_are() -> None:
    """Positions that a model does not tell make keys coarser, and no answer wrong."""
    states, transform = make_states(False, 50), TRANSFORMS["mean"]
    found = run(make_layer(transform, False), [TOKENS], states, False, 0)
    keys = stored_keys(transform, states, False, 0, TOKENS)
    assert_close(found, expected(keys, states, False), False)


def test_no_tokens_come_first() -> None:
    states, transform = make_states(False, 0), TRANSFORMS["first"]
    for static in (False, True):
        layer = make_layer(transform, static)
        layer.update(states["key"][:, :, :0], states["value"][:, :, :0])
        found = run(layer, [TOKENS], states, False)
        keys = stored_keys(transform, states, False, 0, TOKENS)
        assert_close(found, expected(keys, states, False), False)


def test_a_soft_cap_is_refused() -> None:
    states = make_states(False, 0)
    with pytest.raises(ValueError, match=r"softcap must be None with centered keys, got 2\.0"):
        run(make_layer(TRANSFORMS["mean"], False), [TOKENS], states, False, softcap=2.0)
    run(make_layer(TRANSFORMS["pair"], False), [TOKENS], states, False, softcap=2.0)


def test_transforms_by_layer() -> None:
    one = TRANSFORMS["mean"]
    assert layer_transform(one, 3) is layer_transform({3: one}, 3) is one
    assert layer_transform(None, 3) is None
    assert layer_transform(lambda layer: one if layer else None, 0) is None
    with pytest.raises(ValueError, match="must have one for every layer, got none for layer 2"):
        layer_transform({3: one}, 2)
    with pytest.raises(TypeError, match="must be a KeyTransform in layer 0, got str"):
        layer_transform(lambda _: "mean", 0)  # type: ignore[arg-type,return-value]
    layer = make_layer(KeyTransform(SPEC, mean=MEAN[:1]), False)
    with pytest.raises(ValueError, match=r"mean must be .* of shape \[2, 16\], got \[1, 16\]"):
        layer.update(torch.ones(1, 2, 1, DIM), torch.ones(1, 2, 1, DIM))
