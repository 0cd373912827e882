"""`generate` of transformers on the packed cache: every way of decoding that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from kvq.integrations.models import cache_argument
from kvq.integrations.transformers import KVQuantCache
from tests.integrations.models import TOKENS, forward, prompt, tiny_model

NEW = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {},
    "mixed": {"first_tokens": 3, "recent_tokens": 6},
    "static": {"max_cache_len": 64},
}


@pytest.fixture(params=["llama", "mixed_windows"], scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def cache(request: pytest.FixtureRequest, model: Any) -> KVQuantCache:
    return KVQuantCache(model.config, "int4", "int4", block_size=8, **request.param)


def fresh(cache: KVQuantCache, model: Any) -> KVQuantCache:
    """An empty cache with the options of another."""
    options = cache.layers[0].options
    return KVQuantCache(
        model.config,
        options.key_mode,
        options.value_mode,
        block_size=8,
        first_tokens=options.first_tokens,
        recent_tokens=options.recent_tokens,
        max_cache_len=getattr(cache.layers[0], "max_cache_len", None),
    )


def generate(model: Any, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    options[cache_argument(model)] = cache
    return model.generate(ids, **options)


def greedy(model: Any, ids: Tensor, cache: KVQuantCache) -> Tensor:
    """Greedy decoding, written out."""
    logits = forward(model, ids, cache)
    for _ in range(NEW):
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        if ids.shape[1] < TOKENS + NEW:
            logits = forward(model, ids[:, -1:], cache)
    return ids


def test_greedy(model: Any, cache: KVQuantCache) -> None:
    found = generate(model, prompt(), cache)
    assert torch.equal(found, greedy(model, prompt(), fresh(cache, model)))
    assert int(cache.get_seq_length()) == TOKENS + NEW - 1


def test_a_second_generation_goes_on(model: Any, cache: KVQuantCache) -> None:
    """Two generations on one cache are one, and a reset begins anew."""
    once = generate(model, prompt(), fresh(cache, model))
    first = generate(model, prompt(), cache, max_new_tokens=5)
    assert torch.equal(generate(model, first, cache, max_new_tokens=NEW - 5), once)
    cache.reset()
    assert torch.equal(generate(model, prompt(), cache), once)


def test_beam_search(model: Any, cache: KVQuantCache) -> None:
    """As with unpacked tensors, which transformers reorders itself."""
    if cache.is_compileable:
        pytest.skip("a static cache takes the batch of its first tokens")
    found = generate(model, prompt(), cache, num_beams=3)
    again = generate(model, prompt(), fresh(cache, model), num_beams=3)
    assert torch.equal(found, again)
    assert cache.layers[0].batch_size == 6
    score_of = {"output_scores": True, "return_dict_in_generate": True}
    beams = generate(model, prompt(), fresh(cache, model), num_beams=3, **score_of)
    # The score of the best beam is that of its tokens, run at once on a cache of their own.
    whole = forward(model, found, fresh(cache, model)).log_softmax(-1)[:, :-1]
    own = whole.gather(2, found[:, 1:, None])[:, TOKENS - 1 :, 0].sum(-1)
    torch.testing.assert_close(own / NEW, beams.sequences_scores, rtol=0.05, atol=0.05)


def test_prompt_lookup_is_greedy(model: Any, cache: KVQuantCache) -> None:
    ids = prompt(1).repeat(1, 2)[:, :TOKENS]  # something to look up
    found = generate(model, ids, cache, prompt_lookup_num_tokens=4)
    assert torch.equal(found, greedy(model, ids, fresh(cache, model)))


def test_assisted_decoding_is_greedy(model: Any, cache: KVQuantCache) -> None:
    assistant = tiny_model("llama", seed=5)
    ids = prompt(1)
    found = generate(model, ids, cache, assistant_model=assistant)
    assert torch.equal(found, greedy(model, ids, fresh(cache, model)))


def test_chunked_prefill(model: Any, cache: KVQuantCache) -> None:
    found = generate(model, prompt(), cache, prefill_chunk_size=16)
    assert torch.equal(found, greedy(model, prompt(), fresh(cache, model)))


def test_left_padding(model: Any, cache: KVQuantCache) -> None:
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :9] = 0
    together = generate(model, prompt(), cache, attention_mask=mask)
    options = cache.layers[0].options
    alone = KVQuantCache(
        model.config,
        options.key_mode,
        options.value_mode,
        first_tokens=options.first_tokens,
        recent_tokens=options.recent_tokens,
    )
    assert torch.equal(together[1:, 9:], generate(model, prompt()[1:, 9:], alone))


def test_several_sequences_of_one_prompt(model: Any, cache: KVQuantCache) -> None:
    torch.manual_seed(3)
    found = generate(model, prompt(1), cache, do_sample=True, num_return_sequences=3)
    assert found.shape == (3, TOKENS + NEW)
    assert len({tuple(row) for row in found.tolist()}) == 3


@pytest.mark.parametrize("kept", [{}, {"first_tokens": 3, "recent_tokens": 6}], ids=str)
def test_a_static_decoding_step_is_one_graph(kept: dict[str, int]) -> None:
    """No graph break, and the same graph for every token."""
    model = tiny_model("llama")
    ids = prompt()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    cache = KVQuantCache(model.config, "int4", "int4", max_cache_len=64, **kept)
    eager = KVQuantCache(model.config, "int4", "int4", max_cache_len=64, **kept)
    forward(model, ids, cache)
    forward(model, ids, eager)
    torch.compiler.reset()
    step = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for index in range(4):
        token = prompt(2, 4, seed=7)[:, index : index + 1]
        with torch.no_grad():
            found = step(input_ids=token, **{cache_argument(model): cache}).logits
        assert torch.equal(found, forward(model, token, eager))
    assert len(graphs) == 1
    called = {str(node.target) for node in graphs[0].graph.nodes}
    assert any("kvq" in name for name in called)
