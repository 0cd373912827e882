"""What generation does to a cache, exact to the bit: against a cache built fresh in that state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from kvq.integrations.key_transforms import key_transforms
from kvq.integrations.transformers import KVQuantCache
from tests.integrations.models import forward, prompt, tiny_model

KEPT = [
    {},
    {"first_tokens": 2, "recent_tokens": 5, "slack": 8},
    {"center": "first"},
]
NAMES = ["llama", "mixed_windows"]
STATIC = [None, 64]


@pytest.fixture(params=NAMES, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(params=KEPT, ids=["packed", "mixed", "centered"])
def new_cache(request: pytest.FixtureRequest, model: Any) -> Callable[..., KVQuantCache]:
    options = {"slack": 8, **request.param}
    if "center" in options:
        options["key_transforms"] = key_transforms(model, center=options.pop("center"))

    def make(**more: Any) -> KVQuantCache:
        return KVQuantCache(model.config, "int4", "lloyd2", block_size=8, **{**options, **more})

    return make


def stored(cache: KVQuantCache) -> list[Tensor]:
    """Every row in use: codes and words of the pages, in the order of the tokens."""
    rows = []
    for layer in cache.layers:
        assert layer.is_initialized
        tokens = layer.tokens_in_pages()
        for pool in (layer.key_cache, layer.value_cache):
            for pages in (pool.codes, pool.words.view(torch.int32)[..., None]):
                sequences = pages.unflatten(0, (layer.batch_size, -1)).transpose(1, 2)
                rows.append(sequences.flatten(2, 3)[:, :, :tokens])
    return rows


def assert_same(a: KVQuantCache, b: KVQuantCache, model: Any, rows: Tensor | None = None) -> None:
    """Two caches hold the same bits, and give the same logits for the next tokens."""
    assert a.get_seq_length() == b.get_seq_length()
    for x, y in zip(stored(a), stored(b), strict=True):
        common = min(x.shape[2], y.shape[2])  # a window may have forgotten more in one of them
        assert torch.equal(x[:, :, -common:], y[:, :, -common:])
    batch = a.layers[0].batch_size
    ids = prompt(batch, 3, seed=9)
    assert torch.equal(forward(model, ids, a), forward(model, ids, b))
    assert torch.equal(forward(model, ids[:, :1], a), forward(model, ids[:, :1], b))


def filled(model: Any, cache: KVQuantCache, ids: Tensor) -> KVQuantCache:
    """Run all tokens: those before position 18 six at a time, the others one at a time."""
    start = 0
    while start < ids.shape[1]:
        count = 6 if int(cache.get_seq_length()) < 18 else 1
        forward(model, ids[:, start : start + count], cache)
        start += count
    return cache


def rows_of(
    model: Any, new_cache: Callable[..., KVQuantCache], ids: Tensor, order: list[int]
) -> KVQuantCache:
    """A fresh cache of the sequences `ids[order]`.

    The bits of a matrix product depend on the shape of the batch, so each sequence is computed in
    a batch like `ids`, and its row is taken.
    """
    target = filled(model, new_cache(), ids[order])
    whole = filled(model, new_cache(), ids)
    for mine, theirs in zip(target.layers, whole.layers, strict=True):
        for x, y in zip(mine.tensors(), theirs.tensors(), strict=True):
            x.view(len(order), -1).copy_(y.view(len(ids), -1)[order])
    return target


def test_select_repeat_and_reorder(model: Any, new_cache: Callable[..., KVQuantCache]) -> None:
    ids = prompt(3, 24)
    for change, order in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = filled(model, new_cache(), ids)
        change(cache)
        assert_same(cache, rows_of(model, new_cache, ids, order), model)


def test_fifty_reorders_are_one(model: Any, new_cache: Callable[..., KVQuantCache]) -> None:
    ids = prompt(3, 24)
    cache, order = filled(model, new_cache(), ids), torch.arange(3)
    turn = torch.tensor([1, 2, 0])
    for _ in range(50):
        cache.reorder_cache(turn)
        order = order[turn]
    assert_same(cache, rows_of(model, new_cache, ids, order.tolist()), model)


@pytest.mark.parametrize("static", STATIC)
@pytest.mark.parametrize("removed", [0, 1, 5])
def test_crop(
    model: Any, new_cache: Callable[..., KVQuantCache], static: int | None, removed: int
) -> None:
    ids = prompt(2, 24)
    cache = filled(model, new_cache(max_cache_len=static), ids)
    cache.crop(-removed)
    fresh = filled(model, new_cache(max_cache_len=static), ids[:, : 24 - removed])
    assert_same(cache, fresh, model)


def test_crop_and_go_on(model: Any, new_cache: Callable[..., KVQuantCache]) -> None:
    """Tokens that were cropped leave no trace in what is read later."""
    ids, others = prompt(2, 24), prompt(2, 24, seed=5)
    cache = filled(model, new_cache(), ids[:, :20])
    forward(model, others[:, :6], cache)
    cache.crop(-6)
    filled(model, cache, ids[:, 20:])
    assert_same(cache, filled(model, new_cache(), ids), model)


def test_crop_to_nothing_and_go_on(model: Any, new_cache: Callable[..., KVQuantCache]) -> None:
    ids, others = prompt(2, 20), prompt(2, 7, seed=5)
    cache = filled(model, new_cache(), others)
    cache.crop(-7)
    assert cache.get_seq_length() == 0
    assert_same(filled(model, cache, ids), filled(model, new_cache(), ids), model)


@pytest.mark.parametrize("static", STATIC)
def test_crop_refuses(model: Any, static: int | None) -> None:
    def make(**more: Any) -> KVQuantCache:
        cache = KVQuantCache(model.config, "int4", "int4", max_cache_len=static, **more)
        return filled(model, cache, prompt(2, 24))

    with pytest.raises(ValueError, match="tokens_to_remove must be 0 or the negative number"):
        make().crop(5)
    with pytest.raises(ValueError, match=r"must be at least -24 for so many tokens, got -25"):
        make().crop(-25)
    cache = make(recent_tokens=5, slack=8)
    with pytest.raises(ValueError, match=r"window of 5, of which .* at least -9, got -10"):
        cache.crop(-10)
    cache.crop(-9)
    assert int(cache.get_seq_length()) == 15


@pytest.mark.parametrize("static", STATIC)
def test_reset(model: Any, new_cache: Callable[..., KVQuantCache], static: int | None) -> None:
    cache = filled(model, new_cache(max_cache_len=static), prompt(2, 24, seed=4))
    places = [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    ids = prompt(2, 22)
    assert_same(
        filled(model, cache, ids),
        filled(model, new_cache(max_cache_len=static), ids),
        model,
    )
    if static:
        assert places == [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
    else:
        cache.reset()
        assert cache.memory().total == 0
        filled(model, cache, prompt(5, 3))  # of another batch size


@pytest.mark.parametrize("static", STATIC)
def test_copies_go_their_own_ways(
    model: Any, new_cache: Callable[..., KVQuantCache], static: int | None
) -> None:
    """A prompt that is computed once and continued twice."""
    ids = prompt(2, 24)
    cache = filled(model, new_cache(max_cache_len=static), ids[:, :20])
    other = copy.deepcopy(cache)
    forward(model, prompt(2, 5, seed=6), other)
    forward(model, ids[:, 20:], cache)
    fresh = filled(model, new_cache(max_cache_len=static), ids[:, :20])
    forward(model, ids[:, 20:], fresh)
    assert int(other.get_seq_length()) == 25
    assert_same(cache, fresh, model)
    assert copy.deepcopy(cache)._shared.config is model.config


def test_static_batches_are_reordered_in_place(model: Any) -> None:
    ids = prompt(3, 24)
    cache = filled(model, KVQuantCache(model.config, max_cache_len=64, recent_tokens=3), ids)
    other = filled(model, KVQuantCache(model.config, recent_tokens=3), ids)
    places = [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    other.reorder_cache(torch.tensor([2, 0, 0]))
    assert places == [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
    assert_same(cache, other, model)
    with pytest.raises(ValueError, match=r"indices must keep the 3 sequences .* got 1"):
        cache.batch_select_indices(torch.tensor([1]))


def test_growing_does_not_change_a_bit(model: Any, new_cache: Callable[..., KVQuantCache]) -> None:
    ids = prompt(2, 30)
    roomy = filled(model, new_cache(capacity=100), ids)
    assert_same(filled(model, new_cache(), ids), roomy, model)


def test_nothing_is_quantized_twice(
    model: Any, new_cache: Callable[..., KVQuantCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is written once, in every operation: the written rows are the tokens."""
    import kvq

    written: list[int] = []
    write = kvq.reshape_and_cache

    def counting(key: Tensor, *args: Any, **kwargs: Any) -> None:
        written.append(len(key))
        write(key, *args, **kwargs)

    monkeypatch.setattr(kvq, "reshape_and_cache", counting)
    cache = filled(model, new_cache(), prompt(2, 24))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    forward(model, prompt(4, 2), cache)
    assert sum(written) == len(cache.layers) * (2 * 24 + 4 * 2)


def test_memory_is_every_stored_byte(model: Any, new_cache: Callable[..., KVQuantCache]) -> None:
    cache = filled(model, new_cache(), prompt(2, 33))
    memory = cache.memory()
    steps = [step for _, step in cache._shared.steps.values()]
    tensors = [x for layer in cache.layers for x in layer.tensors()]
    tensors += [x for step in steps for x in step if isinstance(x, Tensor)]
    transforms = [layer.transform for layer in cache.layers if layer.transform is not None]
    tensors += [x for transform in transforms for x in transform.constants]
    assert (memory.key_transforms > 0) == bool(transforms)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    assert memory.total == sum(storages.values())
    layer = cache.layers[-1]
    pages = 2 * -(-33 // 8)
    assert layer.key_cache.words.numel() == pages * 2 * 8
    assert memory.codes == 2 * pages * 2 * 8 * (8 + 4)
    assert memory.words == 2 * pages * 2 * 8 * (4 + 4)
    assert memory.values == 2 * 2 * 2 * 33 * 32
    assert memory.unpacked == 4 * memory.values
    assert memory.bits_per_value == 8 * memory.total / memory.values


@pytest.mark.parametrize(("mode", "ratio"), [("int8", 1.9394), ("int4", 3.7647), ("int2", 7.1111)])
def test_bits_per_value_are_those_of_the_mode(mode: str, ratio: float) -> None:
    import kvq
    from kvq.integrations.transformers.layers import PackedLayer
    from kvq.integrations.transformers.memory import measure_memory
    from kvq.integrations.transformers.options import LayerOptions
    from kvq.integrations.transformers.steps import Shared

    config = type("config", (), {"_attn_implementation": "kvq"})
    shared = Shared(config, block_size=50, capacity=1000)
    layer = PackedLayer(LayerOptions(kvq.mode(mode), kvq.mode(mode)), None, shared)
    rows = torch.randn(1, 8, 1000, 128)
    layer.update(rows, rows)
    memory = measure_memory([layer], [])
    assert 2 * memory.values / memory.total == pytest.approx(ratio, abs=1e-4)
    assert memory.bits_per_value == float(kvq.mode(mode).bits_per_value(128))
