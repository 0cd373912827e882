"""Failures that other quantized caches had in generation, for every mode of this one.

`tests/test_known_failures.py` says where each was reported; `test_operations.py` asks more of some
modes, in a model.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import kvq
from kvq.integrations.transformers import KVQuantCache
from kvq.integrations.transformers.attention import packed_attention
from kvq.integrations.transformers.layers import PackedLayer
from kvq.integrations.transformers.options import LayerOptions
from kvq.integrations.transformers.static import StaticPackedLayer
from kvq.integrations.transformers.steps import Shared
from tests.integrations.models import tiny_config
from tests.peak_memory import memory_of

NAMES = list(kvq.MODES)
HEADS, DIM, TOKENS = 2, 16, 40


def make_layer(
    key: kvq.Mode, value: kvq.Mode, *, static: bool = False, packed: bool = False, **options: Any
) -> PackedLayer:
    implementation = "kvq" if packed else "eager"
    shared = Shared(SimpleNamespace(_attn_implementation=implementation), 8, 0)
    chosen = LayerOptions(key, value, **options)
    if static:
        return StaticPackedLayer(chosen, None, shared, max_cache_len=TOKENS + 24)
    return PackedLayer(chosen, None, shared)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(layer: PackedLayer, seed: int = 9) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens, after one more that is the same for every sequence."""
    token = randn(1, HEADS, 1, DIM, seed=seed).expand(layer.batch_size, -1, -1, -1)
    return layer.update(token, token)


Change = Callable[[PackedLayer], object]
#: What is done to a batch of three, the sequences that are left in their order, and their tokens.
CHANGES: dict[str, tuple[Change, list[int], int]] = {
    "reorder": (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0], TOKENS),
    "select": (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1], TOKENS),
    "repeat": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], TOKENS),
    "crop nothing": (lambda layer: layer.crop(0), [0, 1, 2], TOKENS),
    "crop 3": (lambda layer: layer.crop(-3), [0, 1, 2], TOKENS - 3),
    "crop 35": (lambda layer: layer.crop(5 - TOKENS), [0, 1, 2], 5),
    "fifty": (
        lambda layer: [layer.reorder_cache(torch.tensor([1, 2, 0])) for _ in range(50)],
        [2, 0, 1],
        TOKENS,
    ),
}


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_what_is_done_to_sequences_is_done_to_all_that_is_stored(index: int) -> None:
    """To the bit what a cache holds that was built so: nothing is quantized again, or left out."""
    modes = kvq.mode(NAMES[index]), kvq.mode(NAMES[(index + 7) % len(NAMES)])
    key, value = randn(3, HEADS, TOKENS, DIM), randn(3, HEADS, TOKENS, DIM, seed=1)
    names = list(CHANGES)
    # Two a mode, so that each meets many.
    for name in (names[index % 7], names[(3 * index + 1) % 7]):
        change, order, tokens = CHANGES[name]
        layer, fresh = make_layer(*modes), make_layer(*modes)
        layer.update(key[:, :, :31], value[:, :, :31])
        layer.update(key[:, :, 31:], value[:, :, 31:])
        change(layer)
        fresh.update(key[order, :, :tokens], value[order, :, :tokens])
        assert layer.get_seq_length() == fresh.get_seq_length() == tokens
        for found, right in zip(read(layer), read(fresh), strict=True):
            assert found.shape == (len(order), HEADS, tokens + 1, DIM)
            assert torch.equal(found, right)
        # And what comes after a crop is kept.
        for found, right in zip(read(layer, seed=5), read(fresh, seed=5), strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("static", [None, 64], ids=["growing", "static"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_length_and_the_dtype_after_every_update(
    dtype: torch.dtype, static: int | None
) -> None:
    """Seven tokens and two more are nine, in the first layer and the last."""
    config = tiny_config("llama", num_hidden_layers=4)
    config._attn_implementation = "eager"
    cache = KVQuantCache(config, "int4", "int2", max_cache_len=static)
    for turn in range(2):
        written = 0
        for tokens in (7, 1, 1):
            written += tokens
            for layer in range(4):
                states = randn(2, HEADS, tokens, DIM, seed=layer).to(dtype)
                for side in cache.update(states, states, layer):
                    assert side.dtype is dtype
                    assert side.device == states.device
                    assert side.shape == (2, HEADS, static or written, DIM)
            assert [int(cache.get_seq_length(layer)) for layer in range(4)] == [written] * 4
        cache.reset()
        assert int(cache.get_seq_length(turn)) == 0


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("mode", ["int8", "int4", "int2"])
def test_the_first_tokens_can_be_kept_as_they_came(mode: str, static: bool) -> None:
    """A first token 25 times as long costs no other token a bit, and is exact where it is kept."""
    chosen = kvq.mode(mode)
    states = randn(1, HEADS, TOKENS, DIM)
    loud = states.clone()
    loud[:, :, 0] *= 25
    rows = []
    for x in (states, loud):
        layer = make_layer(chosen, chosen, static=static)
        rows.append(layer.update(x, x)[0])
    assert torch.equal(rows[0][:, :, 1:TOKENS], rows[1][:, :, 1:TOKENS])
    layer = make_layer(chosen, chosen, static=static, packed=True, first_tokens=1)
    handles = layer.update(loud, loud)
    assert layer.full_precision is not None
    # A query that looks at the first token alone reads it as it came.
    query = torch.zeros(1, HEADS, TOKENS, DIM)
    query[:, :, -1] = 100 * loud[:, :, 0]
    found, _ = packed_attention(nn.Module(), query, *handles, None)
    torch.testing.assert_close(found[:, -1], loud[:, :, 0], rtol=1e-6, atol=1e-6)


def test_an_update_keeps_no_copy_in_float32() -> None:
    """Beyond what is stored an update takes about what its rows are in float16, for a while."""
    mode = kvq.mode("int4")
    layer = make_layer(mode, mode, packed=True)
    layer.update(randn(1, 8, 8, 128).half(), randn(1, 8, 8, 128).half())
    x = randn(1, 8, 8192, 128).half()
    held = sum(tensor.nbytes for tensor in layer.tensors())
    memory = memory_of(lambda: layer.update(x, x))
    stored = sum(tensor.nbytes for tensor in layer.tensors())
    # The index of the step stays too: a slot for each token, and less.
    assert 0 <= memory.kept - (stored - held) <= 64 * 8192
    assert memory.peak - memory.kept < 3 * x.nbytes
