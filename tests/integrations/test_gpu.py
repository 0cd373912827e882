"""The packed cache on a GPU: the kernels' bits, CUDA graphs, the allocator, offloading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import kvq
from kvq.integrations.key_transforms import key_transforms
from kvq.integrations.models import cache_argument
from kvq.integrations.transformers import KVQuantCache
from kvq.integrations.transformers.attention import packed_attention
from kvq.integrations.transformers.layers import PackedLayer
from kvq.integrations.transformers.options import LayerOptions
from kvq.integrations.transformers.steps import Shared
from kvq.key_transforms import KeyTransform
from kvq.rotary import RotarySpec
from tests.integrations.models import MODELS, forward, prompt, tiny_model

pytestmark = pytest.mark.gpu

KEPT: list[dict[str, int]] = [{}, {"first_tokens": 3, "recent_tokens": 9}]


def on_gpu(name: str, implementation: str = "kvq", dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model(name, implementation).to("cuda", dtype)


def ids(batch: int = 2, tokens: int = 40, seed: int = 1) -> Tensor:
    return prompt(batch, tokens, seed).cuda()


def greedy(model: Any, cache: KVQuantCache, count: int) -> Tensor:
    options = {cache_argument(model): cache}
    return model.generate(ids(), max_new_tokens=count, do_sample=False, **options)


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("mode", ["int8", "fp8", "int4", "int2", "lloyd3", "smax4", "affine4"])
def test_has_the_bits_and_the_attention_of_the_reference(mode: str, kept: dict[str, int]) -> None:
    check_against_the_reference(LayerOptions(kvq.mode(mode), kvq.mode(mode), **kept))


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("source", ["mean", "first"])
def test_centered_keys_have_the_bits_of_the_reference(source: str, kept: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    scale = torch.randn(2, 32, generator=generator).div(4).exp()
    transform = KeyTransform(
        RotarySpec(tuple((1e4 ** (-torch.arange(32) / 32)).tolist()), 64),
        mean=torch.randn(2, 64, generator=generator) if source == "mean" else None,
        mean_tokens=64 if source == "first" else 0,
        pair_scale=torch.cat((scale, scale), dim=-1),
    )
    mode = kvq.mode("int4")
    check_against_the_reference(LayerOptions(mode, mode, key_transform=transform, **kept))


def check_against_the_reference(options: LayerOptions) -> None:
    """A layer on the GPU beside one on the CPU."""
    config = type("config", (), {"_attn_implementation": "kvq"})
    generator = torch.Generator().manual_seed(3)
    states = {
        name: torch.randn(2, heads, 300, 64, generator=generator)
        for name, heads in (("query", 8), ("key", 2), ("value", 2))
    }
    outputs, layers = [], []
    for device in ("cpu", "cuda"):
        layer = PackedLayer(options, None, Shared(config, 32, 0))
        parts, start = [], 0
        for count in (280, 1, 7, 12):
            chunk = slice(start, start + count)
            query, key, value = (states[x][:, :, chunk].to(device) for x in states)
            key, value = layer.update(key, value)
            parts.append(packed_attention(nn.Module(), query, key, value, None)[0].cpu())
            start += count
        outputs.append(torch.cat(parts, 1))
        layers.append(layer)
    for pool in ("key_cache", "value_cache"):
        ours, theirs = (getattr(layer, pool) for layer in layers)
        assert torch.equal(ours.codes, theirs.codes.cpu())
        assert torch.equal(ours.words.view(torch.int32), theirs.words.cpu().view(torch.int32))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_models_agree_with_unpacked_tensors(name: str) -> None:
    model = on_gpu(name)
    logits = []
    for implementation in ("kvq", "eager"):
        model.set_attn_implementation(implementation)
        cache = KVQuantCache(model.config, "int8", "int8")
        parts = [forward(model, ids()[:, :33], cache)]
        parts += [forward(model, ids()[:, i : i + 1], cache) for i in range(33, 40)]
        logits.append(torch.cat(parts, 1))
    assert (logits[0] - logits[1]).abs().amax(-1).median() < 2e-3


@pytest.mark.parametrize("kept", [*KEPT, {"center": "first"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "mixed_windows"])
def test_a_captured_step_is_the_step(name: str, kept: dict[str, Any]) -> None:
    """CUDA graphs: one capture, replayed while the cache goes on; and no wait for the device."""
    model = on_gpu(name)
    options = dict(kept)
    if "center" in options:
        options["key_transforms"] = key_transforms(model, center=options.pop("center"))
    caches = [
        KVQuantCache(model.config, "int4", "int4", max_cache_len=64, **options) for _ in range(2)
    ]
    for cache in caches:
        forward(model, ids(), cache)
    token = ids(2, 1, 5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward(model, token, caches[0])
    torch.cuda.current_stream().wait_stream(side)
    caches[0].crop(-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = forward(model, token, caches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in range(5):
        token.copy_(ids(2, 1, 6 + step))
        graph.replay()
        expected = forward(model, token, caches[1])
        torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-4)
    assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()) == 45


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_a_compiled_step_is_the_step(kept: dict[str, int]) -> None:
    """`torch.compile(mode="reduce-overhead")`, whole graph, compiled once."""
    model = on_gpu("llama")
    caches = [
        KVQuantCache(model.config, "int4", "int4", max_cache_len=64, **kept) for _ in range(2)
    ]
    for cache in caches:
        forward(model, ids(), cache)
    torch.compiler.reset()
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
    torch._dynamo.utils.counters.clear()
    for index in range(6):
        token = ids(2, 1, 5 + index)
        with torch.no_grad():
            found = step(input_ids=token, **{cache_argument(model): caches[0]}).logits.clone()
        expected = forward(model, token, caches[1])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["inductor"].get("cudagraph_skips", 0)


def test_generate_compiles_a_static_cache() -> None:
    model = on_gpu("llama")
    found = [
        greedy(model, KVQuantCache(model.config, **more), 12)
        for more in ({"max_cache_len": 64}, {})
    ]
    assert torch.equal(found[0], found[1])


def test_memory_is_the_allocators_growth() -> None:
    """With a page of slack for each tensor, which the allocator rounds up to 512 bytes."""
    model = on_gpu("llama")
    cache = KVQuantCache(model.config, "int4", "int2", recent_tokens=8, first_tokens=2)
    forward(model, ids(4, 300), KVQuantCache(model.config, "int4", "int2", recent_tokens=8))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    forward(model, ids(4, 300), cache)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    tensors = sum(len(layer.tensors()) for layer in cache.layers) + 4
    assert 0 <= grown - cache.memory().total <= 512 * tensors


def test_offloading_changes_no_bit() -> None:
    model = on_gpu("llama")
    for kept in KEPT:
        found = []
        for offloading in (False, True):
            cache = KVQuantCache(model.config, "int4", "int4", offloading=offloading, **kept)
            found.append(greedy(model, cache, 12))
            if offloading:
                assert cache.layers[-1].key_cache.codes.device.type == "cpu"
        assert torch.equal(found[0], found[1])


def test_layers_on_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from accelerate import dispatch_model

    model = on_gpu("llama")
    alone = greedy(model, KVQuantCache(model.config), 8)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    spread = dispatch_model(model, places)
    cache = KVQuantCache(model.config)
    assert torch.equal(greedy(spread, cache, 8), alone)
    assert [layer.key_cache.codes.device.index for layer in cache.layers] == [0, 1]
