"""The operators, and that compiled graphs call them: no graph break, the bits of eager calls."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import kvq
from kvq import operators
from kvq.modes import MODES, Mode, ScaleFit
from kvq.operators import mode_of
from kvq.tier import AttentionFeatures, Layout, PagedKV, Tier, new_paged_kv
from tests.cases import VARIANTS
from tests.compare import assert_bit_exact

HEADS, HEAD_DIM, BLOCKS, BLOCK_SIZE = 2, 32, 4, 5
BACKENDS = ("eager", "aot_eager")
FITTED = VARIANTS["lloyd4+even_11"]
# What torch's own compiler warns of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch._dynamo.reset()


def caches(key_mode: str | Mode = "int4", value_mode: str | Mode = FITTED) -> list[PagedKV]:
    """Keys HND, values NHD, every row of them written."""
    pair = [
        new_paged_kv(BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM, kvq.mode(mode), layout=layout)
        for mode, layout in ((key_mode, Layout.HND), (value_mode, Layout.NHD))
    ]
    tokens = BLOCKS * BLOCK_SIZE
    kvq.reshape_and_cache(rows(tokens), rows(tokens, 1), *pair, torch.arange(tokens))
    return pair


def rows(tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HEADS, HEAD_DIM, generator=generator)


def side(cache: PagedKV) -> tuple[Tensor, Tensor, str, str]:
    return cache.codes, cache.words, cache.mode.text, cache.layout.value


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences of 7 and 9 keys, with 1 and 3 new tokens."""
    return torch.tensor([[0, 1], [3, 2]]), torch.tensor([7, 9]), torch.tensor([0, 1, 4])


def query() -> Tensor:
    return rows(4, 2).repeat(1, 2, 1)


#: One value other than the default for every feature.
FEATURES: dict[str, Any] = {
    "window": 3,
    "soft_cap": 1.5,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]),
    "sink_logits": torch.tensor([0.0, 1.0, 2.0, -1.0]),
    "query_query_bias": torch.tensor([[0.0, 1.0, 2.0], [0.5, 0.0, 3.0], [1.0, -1.0, 0.0]]),
    "logit_bias": torch.linspace(-1, 1, 9).view(1, 1, 9),
    "first_key": torch.tensor([2, 1]),
}


def attention_arguments(
    features: AttentionFeatures, return_lse: bool, tier: str | None = None
) -> tuple[Any, ...]:
    key_cache, value_cache = caches()
    values = [getattr(features, item.name) for item in fields(AttentionFeatures)]
    arguments = (query(), *side(key_cache), *side(value_cache), *batch(), 0.2, *values)
    return (*arguments, return_lse, 3, None, tier)


def operator_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every operator with arguments that it works on."""
    x = rows(12).view(4, 6, HEAD_DIM)
    key_cache, value_cache = caches()
    mapping = torch.tensor([3, -1, 17, 0])
    writes = (*side(key_cache), *side(value_cache), mapping, None, None)
    codes = torch.arange(96, dtype=torch.uint8).view(3, 32) % 16
    parts = [rows(3, seed) for seed in (3, 4)]
    sums = [part[..., 0].contiguous() for part in parts]
    return {
        "quantize": (operators.quantize, (x, "int4", None)),
        "quantize_strided": (operators.quantize, (x.transpose(0, 1), FITTED.text, None)),
        "dequantize": (
            operators.dequantize,
            (*kvq.quantize(x, "lloyd3"), "lloyd3", HEAD_DIM, None),
        ),
        "hadamard_transform": (
            operators.hadamard_transform,
            (rows(3).transpose(0, 1), 2, True, str(2**64 - 1), False, False, True, None),
        ),
        "pack_codes": (operators.pack_codes, (codes, 4, None)),
        "pack_codes_that_are_bytes": (operators.pack_codes, (codes.T, 8, None)),
        "unpack_codes": (operators.unpack_codes, (codes, 4, 64, None)),
        "unpack_codes_that_are_bytes": (operators.unpack_codes, (codes.T, 8, 3, None)),
        "reshape_and_cache": (operators.reshape_and_cache, (rows(4), rows(5)[1:], *writes)),
        "copy_blocks": (
            operators.copy_blocks,
            (*side(key_cache), torch.tensor([[0, 1], [1, 0]]), None, None),
        ),
        "paged_attention": (
            operators.paged_attention,
            attention_arguments(AttentionFeatures(), False),
        ),
        "paged_attention_with_all": (
            operators.paged_attention,
            attention_arguments(AttentionFeatures(**FEATURES), True),
        ),
        "merge_attention": (operators.merge_attention, (parts, sums, torch.zeros(HEADS), None)),
    }


@pytest.mark.parametrize("name", operator_calls())
def test_what_torch_asks_of_an_operator(name: str) -> None:
    operator, arguments = operator_calls()[name]
    opcheck(operator, arguments)


@pytest.mark.parametrize("name", [name for name in vars(Tier) if not name.startswith("_")])
def test_every_function_of_a_tier_is_an_operator(name: str) -> None:
    assert hasattr(torch.ops.kvq, name)


def test_every_feature_crosses() -> None:
    schema = torch.ops.kvq.paged_attention.default._schema
    names = {argument.name for argument in schema.arguments}
    assert names >= {item.name for item in fields(AttentionFeatures)} == set(FEATURES)


@pytest.mark.parametrize("mode", [*MODES.values(), *VARIANTS.values()], ids=str)
def test_a_mode_is_its_text(mode: Mode) -> None:
    assert mode_of(mode.text) == mode
    assert mode_of(mode.text).text == mode.text
    assert set(json.loads(mode.text)) == {item.name for item in fields(mode) if item.init}


def step(
    key: Tensor,
    value: Tensor,
    query: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """What a layer of a model does: write, then read; and work of its own around it."""
    kvq.reshape_and_cache(key + 1.0, value * 2.0, key_cache, value_cache, slot_mapping)
    kvq.copy_blocks(key_cache, torch.tensor([[2, 3]]))
    found = kvq.paged_attention(
        query, key_cache, value_cache, *batch(), scale=0.2, return_lse=True
    )
    assert isinstance(found, tuple)
    merged = kvq.merge_attention([found, found])
    return merged.output * 0.5, merged.log_sum_exp


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_compiles_to_one_graph_with_the_same_bits(backend: str) -> None:
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    got, want = caches(), caches()
    for seed in (5, 6):
        mapping = torch.tensor([6, -1, 2, 12 + seed])
        arguments = rows(4, seed), rows(4, -seed), query()
        outputs = compiled(*arguments, *got, mapping), step(*arguments, *want, mapping)
        for actual, expected in zip(*outputs, strict=True):
            assert_bit_exact(actual, expected)
        for actual, expected in zip(got, want, strict=True):
            assert_bit_exact(actual.codes, expected.codes)
            assert_bit_exact(actual.words, expected.words)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_compile_to_one_graph_with_the_same_bits(backend: str) -> None:
    def there_and_back(x: Tensor) -> tuple[Tensor, ...]:
        codes, words = kvq.quantize(x, "lloyd3")
        y = kvq.dequantize(codes, words, "lloyd3", HEAD_DIM)
        turned = kvq.hadamard_transform(y, kvq.RANDOM_HADAMARD)
        three = kvq.unpack_codes(codes, 3, HEAD_DIM)
        return codes, words, turned, kvq.pack_codes(three, 8), kvq.pack_codes(three, 3)

    x = rows(5)
    compiled = torch.compile(there_and_back, fullgraph=True, backend=backend)
    for actual, expected in zip(compiled(x), there_and_back(x), strict=True):
        assert_bit_exact(actual, expected)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_feature_keeps_its_meaning(feature: str, return_lse: bool) -> None:
    pair = caches()

    def attend(query: Tensor, value: Any) -> Any:
        chosen = AttentionFeatures(**{feature: value})
        return kvq.paged_attention(
            query, *pair, *batch(), scale=0.2, features=chosen, return_lse=return_lse
        )

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    plain = kvq.paged_attention(query(), *pair, *batch(), scale=0.2)
    got, want = compiled(query(), FEATURES[feature]), attend(query(), FEATURES[feature])
    if return_lse:
        assert_bit_exact(got.log_sum_exp, want.log_sum_exp)
        got, want = got.output, want.output
    assert_bit_exact(got, want)
    assert not torch.equal(got, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_any_number_of_tokens(backend: str) -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def write(x: Tensor, pair: list[PagedKV], slot_mapping: Tensor) -> Tensor:
        kvq.reshape_and_cache(x, x, *pair, slot_mapping)
        codes, words = kvq.quantize(x, "int2")
        return kvq.dequantize(codes, words, "int2", HEAD_DIM)

    compiled = torch.compile(write, fullgraph=True, backend=counting, dynamic=True)
    got, want = caches(), caches()
    for tokens in (3, 7, 12, 2):
        arguments = rows(tokens, tokens), torch.randperm(tokens)
        assert_bit_exact(
            compiled(arguments[0], got, arguments[1]), write(arguments[0], want, arguments[1])
        )
        assert_bit_exact(got[0].codes, want[0].codes)
        assert_bit_exact(got[1].words, want[1].words)
    assert len(graphs) == 1


def test_two_modes_of_one_name_stay_two() -> None:
    first = MODES["lloyd2_per_token_head"]
    second = replace(first, scale_fit=ScaleFit.UNIT)
    assert first.name == second.name
    compiled = torch.compile(kvq.quantize, fullgraph=True, backend="aot_eager")
    x = rows(5)
    for mode in (first, second, first):
        assert_bit_exact(compiled(x, mode).words, kvq.quantize(x, mode).words)
    assert not torch.equal(compiled(x, first).words, compiled(x, second).words)


class _Quantizer(torch.nn.Module):
    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, words = kvq.quantize(x, self.mode)
        return codes, words


def test_a_saved_graph_carries_a_fitted_mode() -> None:
    x = rows(5)
    exported = torch.export.export(_Quantizer(FITTED), (x,))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    mode_of.cache_clear()
    codes, words = torch.export.load(file).module()(x)
    want = kvq.quantize(x, FITTED)
    assert_bit_exact(codes, want.codes)
    assert_bit_exact(words, want.words)


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_those_of_an_eager_call(backend: str) -> None:
    pair, x, q = caches(), rows(2), query()
    table, _, starts = batch()

    def write(slot_mapping: Tensor, check: bool | None) -> None:
        kvq.reshape_and_cache(x, x, *pair, slot_mapping, check=check)

    def attend(lengths: Tensor) -> Any:
        return kvq.paged_attention(q, *pair, table, lengths, starts, scale=0.2)

    compiled = torch.compile(write, fullgraph=True, backend=backend)
    with pytest.raises(ValueError, match="slot_mapping must not name a slot twice, got 3"):
        compiled(torch.tensor([3, 3]), None)
    compiled(torch.tensor([3, 3]), False)
    with pytest.raises(ValueError, match="block_table must have 3 entries for the 11 tokens"):
        torch.compile(attend, fullgraph=True, backend=backend)(torch.tensor([11, 9]))


def test_inputs_that_want_a_gradient_are_written_and_get_none() -> None:
    got, want = caches(), caches()
    x = rows(3).requires_grad_()

    def write(x: Tensor, pair: list[PagedKV]) -> Tensor:
        kvq.reshape_and_cache(x, x, *pair, torch.tensor([1, 2, 4]))
        return kvq.quantize(x, "int8").words * 1.0

    compiled = torch.compile(write, fullgraph=True, backend="aot_eager")
    words = compiled(x, got)
    assert_bit_exact(words, write(x, want))
    assert not words.requires_grad
    assert_bit_exact(got[0].codes, want[0].codes)


def test_the_tier_can_be_told_in_a_graph() -> None:
    pytest.importorskip("triton")
    x = rows(5)

    def through(x: Tensor) -> Tensor:
        codes, words = kvq.quantize(x, "int4", tier="kernels")
        return kvq.dequantize(codes, words, "int4", HEAD_DIM, tier="reference")

    compiled = torch.compile(through, fullgraph=True, backend="aot_eager")
    assert_bit_exact(compiled(x), kvq.dequantize(*kvq.quantize(x, "int4"), "int4", HEAD_DIM))
    broken = torch.compile(
        lambda x: kvq.quantize(x, "int4", tier="gpu"), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError, match="tier must be 'reference' or 'kernels', got 'gpu'"):
        broken(x)


@pytest.mark.gpu
def test_a_layer_on_a_gpu_compiles_to_one_graph() -> None:
    def on_gpu(cache: PagedKV) -> PagedKV:
        return cache._replace(codes=cache.codes.cuda(), words=cache.words.cuda())

    def write_and_read(x: Tensor, pair: list[PagedKV], mapping: Tensor) -> Any:
        kvq.reshape_and_cache(x + 1.0, x, *pair, mapping)
        index = [tensor.to(x.device) for tensor in batch()]
        return kvq.paged_attention(x.repeat(1, 2, 1), *pair, *index, scale=0.2)

    mapping = torch.tensor([6, -1, 2, 17], device="cuda")
    got, want = ([on_gpu(cache) for cache in caches()] for _ in range(2))
    compiled = torch.compile(write_and_read, fullgraph=True, backend="inductor")
    x = rows(4).cuda()
    output = compiled(x, got, mapping)
    expected = write_and_read(x, want, mapping)
    torch.testing.assert_close(output, expected)
    for actual, wanted in zip(got, want, strict=True):
        assert_bit_exact(actual.codes, wanted.codes)
        assert_bit_exact(actual.words, wanted.words)
