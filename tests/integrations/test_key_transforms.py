"""Key transforms of models: RoPE verified or refused, biases, calibration, what they are for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from kvq.calibration_files import (
    Calibration,
    LayerCalibration,
    load_calibration,
    save_calibration,
)
from kvq.files import FileFormatError, write_tensors
from kvq.integrations.key_transforms import calibrate, key_transforms, verify_rotary
from kvq.integrations.models import cache_argument
from kvq.integrations.transformers import KVQuantCache
from kvq.key_transforms import KeyTransform
from kvq.reference.key_transforms import shift_mean
from kvq.rotary import RotaryLayout, RotarySpec
from tests.integrations.models import TOKENS, forward, prompt, tiny_model
from tests.position_shift import OFFSET, loses_more, mean_after_rope

THETA = {"rope_theta": 10_000.0, "original_max_position_embeddings": 128}


def layer_of(model: Any, index: int) -> Any:
    return model.model.layers[index].self_attn


# RoPE


@pytest.mark.parametrize(
    ("name", "turned", "layout"),
    [
        ("llama", 16, RotaryLayout.HALF),
        ("qwen2", 16, RotaryLayout.HALF),
        ("phi3", 16, RotaryLayout.HALF),
        ("gpt_neox", 4, RotaryLayout.HALF),
        ("cohere", 16, RotaryLayout.INTERLEAVED),
        ("glm", 8, RotaryLayout.INTERLEAVED),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_is_verified(
    name: str, turned: int, layout: RotaryLayout, dtype: torch.dtype
) -> None:
    model = tiny_model(name).to(dtype)
    rotary, biases = verify_rotary(model)
    assert (rotary.rotary_dim, rotary.layout) == (turned, layout)
    assert list(biases) == [0, 1]
    assert model.config._attn_implementation == "kvq"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_yarn_is_verified() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, **THETA}
    rotary, _ = verify_rotary(tiny_model("llama", "sdpa", rope_parameters=rope))
    assert rotary.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gemma3", {}, "got Gemma3ForCausalLM: unknown: no RoPE that the model declares makes"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **THETA}},
            "got LlamaForCausalLM: unknown: at position 32768 it is not what it is at 0",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "factor": 4.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    **THETA,
                }
            },
            "got LlamaForCausalLM: unknown: at position 32768 it is not what it is at 0",
        ),
    ],
    ids=["two frequencies", "dynamic", "longrope"],
)
def test_rope_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    model = tiny_model(name, "sdpa", **options)
    before = model.model.rotary_emb.inv_freq.clone() if name == "llama" else None
    with pytest.raises(
        ValueError, match=f"model must have a RoPE that can be verified, {message}"
    ):
        key_transforms(model, center="first")
    if before is not None:
        assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_a_model_without_rope_is_refused() -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=97, n_positions=64)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"got GPT2LMHeadModel: unknown: the model has no module"):
        key_transforms(model, center="first")


def test_rope_that_is_not_what_the_model_does_is_refused() -> None:
    model = tiny_model("llama", "sdpa")
    forward_of = layer_of(model, 1).forward

    def other(*args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
        cosine, sine = position_embeddings
        return forward_of(*args, position_embeddings=(cosine, 1.0001 * sine), **kwargs)

    layer_of(model, 1).forward = other
    with pytest.raises(ValueError, match=r"relative error of .* in layer 1 \(limit 1e-05\)"):
        verify_rotary(model)


# Sources


def test_the_bias_is_the_models() -> None:
    model = tiny_model("qwen2")
    found = key_transforms(model, center="bias")
    for index, transform in found.items():
        bias = layer_of(model, index).k_proj.bias.detach().view(2, 16)
        assert torch.equal(transform.mean, bias)
    with pytest.raises(ValueError, match=r"must have a bias on its keys .* got LlamaForCausalLM"):
        key_transforms(tiny_model("llama"), center="bias")


def test_sources_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="center or scale_pairs must be given, got neither"):
        key_transforms(model)
    with pytest.raises(ValueError, match="center must be one of 'bias', 'first', 'calibrated'"):
        key_transforms(model, center="mean")
    for asked in ({"center": "calibrated"}, {"scale_pairs": True}):
        with pytest.raises(ValueError, match="calibration must be given for a calibrated mean"):
            key_transforms(model, **asked)
    calibration = calibrate(model, prompt())
    fewer = Calibration(calibration.rotary, {0: calibration.layers[0]})
    with pytest.raises(ValueError, match="must have every layer, got none for layer 1"):
        key_transforms(model, center="calibrated", calibration=fewer)
    with pytest.raises(ValueError, match="calibration must be of the model's RoPE"):
        key_transforms(tiny_model("glm"), center="calibrated", calibration=calibration)
    wide = tiny_model("llama", num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"calibration.layers.0.mean must be .* \[4, 16\]"):
        key_transforms(wide, center="calibrated", calibration=calibration)


@pytest.mark.parametrize("name", ["qwen2", "glm"])
def test_calibration_is_the_moments_before_rope(name: str) -> None:
    model = tiny_model(name, "sdpa")
    seen: dict[str, Tensor] = {}
    attention = layer_of(model, 1)
    for side in ("q_proj", "k_proj"):
        getattr(attention, side).register_forward_hook(
            lambda _, __, output, side=side, to=seen: to.__setitem__(side, output)
        )
    with torch.no_grad():
        model(prompt(3, 30, seed=8))
    seen = dict(seen)
    found = calibrate(model, prompt(3, 30, seed=8))
    keys = seen["k_proj"].double().view(-1, 2, 16)
    layer = found.layers[1]
    torch.testing.assert_close(layer.mean.double(), keys.mean(0), rtol=1e-5, atol=1e-5)
    moment = seen["q_proj"].double().view(-1, 2, 2, 16).square().mean((0, 2))
    ratio = []
    for value in (moment, keys.var(0, correction=0)):
        turned = value[:, : found.rotary.rotary_dim]
        if found.rotary.layout is RotaryLayout.HALF:
            pairs = turned.unflatten(1, (2, -1)).sum(1)
        else:
            pairs = turned.unflatten(1, (-1, 2)).sum(2)
        ratio.append(pairs)
    first = slice(0, 8) if name == "qwen2" else slice(0, 8, 2)
    scale = layer.pair_scale.double()[:, first].log()
    wanted = (ratio[0] / ratio[1]).log() / 4
    # Up to one factor for each head.
    torch.testing.assert_close(
        scale - scale.mean(1, keepdim=True), wanted - wanted.mean(1, keepdim=True)
    )
    again = calibrate(model, prompt(3, 30, seed=8).flip(0))
    assert again.layers[1].mean.allclose(layer.mean, rtol=1e-6)


def test_calibration_files(tmp_path: Path) -> None:
    calibration = calibrate(tiny_model("llama"), prompt(), provenance={"text": "random"})
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_calibration(path, calibration)
    found = load_calibration(path)
    assert found.rotary == calibration.rotary
    assert found.provenance["text"] == "random"
    assert found.sha256 == calibration.sha256
    for index, layer in found.layers.items():
        assert all(map(torch.equal, layer, calibration.layers[index]))
    save_calibration(other, found)
    assert path.read_bytes() == other.read_bytes()

    from typer.testing import CliRunner

    from kvq.cli import app

    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "16 channels, half" in shown.output
    assert calibration.sha256 in shown.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layers.0.variance": torch.ones(2, 16)},
            "tensors must be named layers.N.mean|pair_scale",
        ),
        ({"layers.0.mean": None}, "layers.0.mean must be present, got nothing"),
        ({"layers.0.mean": torch.ones(2, 12)}, "layers.0.mean must have the 16 channels"),
        ({"layers.0.mean": torch.ones(2, 16).double()}, "layers.0.mean must be float32"),
        ({"layers.0.pair_scale": -torch.ones(2, 16)}, "layers.0.pair_scale must be positive"),
        ({"rotary": None}, "rotary must be present, got nothing"),
        ({"rotary": "[]"}, "rotary must be a JSON object"),
        ({"provenance": "{"}, "Expecting property name"),
        ({"provenance": '{"a": 1}'}, "provenance must be a JSON object of strings"),
    ],
)
def test_calibration_files_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    import json

    rotary = RotarySpec((1.0,) * 8, 16)
    contents: dict[str, Any] = {
        "layers.0.mean": torch.ones(2, 16),
        "layers.0.pair_scale": torch.ones(2, 16),
        "rotary": json.dumps(rotary.to_json()),
        "provenance": "{}",
        **change,
    }
    path = tmp_path / "c.safetensors"
    tensors = {k: v for k, v in contents.items() if isinstance(v, Tensor)}
    texts = {k: v for k, v in contents.items() if isinstance(v, str)}
    write_tensors(path, tensors, "kvq-calibration/1", texts)
    with pytest.raises(FileFormatError) as found:
        load_calibration(path)
    assert message in str(found.value)
    with pytest.raises(ValueError, match="layers must hold at least one layer, got none"):
        Calibration(rotary, {})
    with pytest.raises(ValueError, match=r"layers\.3\.mean must be \[KV heads, head_dim\]"):
        Calibration(rotary, {3: LayerCalibration(torch.ones(16), torch.ones(2, 16))})


# Models on the cache


def logits_of(
    model: Any,
    transforms: dict[int, KeyTransform] | None,
    ids: Tensor,
    chunks: list[int],
    mask: Tensor | None = None,
    offset: int | None = None,
    **options: Any,
) -> Tensor:
    cache = KVQuantCache(model.config, "int4", "int8", key_transforms=transforms, **options)
    parts, start = [], 0
    for count in chunks:
        stop = start + count
        given = {}
        if offset is not None:
            given["position_ids"] = torch.arange(start, stop)[None] + offset
        elif mask is not None:
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
            given["position_ids"] = positions[:, start:stop]
        seen = None if mask is None else mask[:, :stop]
        parts.append(forward(model, ids[:, start:stop], cache, seen, **given))
        start = stop
    return torch.cat(parts, 1)


SOURCES = [
    {"center": "bias"},
    {"center": "first"},
    {"center": "calibrated"},
    {"center": "calibrated", "scale_pairs": True},
]


@pytest.fixture(scope="module")
def qwen() -> Any:
    """Its key biases are far larger than the rest of its keys."""
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def calibration(qwen: Any) -> Calibration:
    return calibrate(qwen, prompt(4, TOKENS, seed=5))


@pytest.fixture(params=SOURCES, ids=str)
def transforms(
    request: pytest.FixtureRequest, qwen: Any, calibration: Calibration
) -> dict[int, KeyTransform]:
    return key_transforms(qwen, calibration=calibration, **request.param)


def full_logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        found: Tensor = model(ids, **options).logits
    model.set_attn_implementation("kvq")
    return found


def test_a_large_bias_costs_nothing_any_more(
    qwen: Any, transforms: dict[int, KeyTransform]
) -> None:
    """`int4` alone loses much to it."""
    ids, chunks = prompt(), [33] + [1] * 7
    full = full_logits(qwen, ids)
    plain = (logits_of(qwen, None, ids, chunks) - full).abs().mean()
    centered = (logits_of(qwen, transforms, ids, chunks) - full).abs().mean()
    assert centered < plain / 4


@pytest.mark.parametrize("chunks", [[20, 20], [20, *[1] * 20]], ids=str)
def test_however_the_prompt_comes(qwen: Any, calibration: Calibration, chunks: list[int]) -> None:
    """At once, in chunks or static: the first mean alone asks which tokens come first."""
    ids = prompt()
    for source in SOURCES:
        found = key_transforms(qwen, calibration=calibration, first_tokens=16, **source)
        wanted = logits_of(qwen, found, ids, [TOKENS])
        for options in ({}, {"max_cache_len": 64}):
            logits = logits_of(qwen, found, ids, chunks, **options)
            # Rows may be rounded to other codes here and there.
            assert (logits - wanted).abs().median() < 1e-5


def test_left_padding(qwen: Any, transforms: dict[int, KeyTransform]) -> None:
    """A padded sequence is centered as it is alone."""
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :9] = 0
    chunks = [TOKENS - 3, 1, 1, 1]
    together = logits_of(qwen, transforms, prompt(), chunks, mask)
    alone = logits_of(qwen, transforms, prompt()[1:, 9:], [TOKENS - 12, 1, 1, 1])
    assert (together[1:, 9:] - alone).abs().median() < 1e-4
    full = full_logits(qwen, prompt()[1:, 9:])
    ours, theirs = ((x - full).abs().mean() for x in (together[1:, 9:], alone))
    assert ours < 1.25 * theirs


def test_a_model_that_tells_its_cache_no_positions() -> None:
    """Its RoPE is told them: padding and the first position become part of the mean."""
    model = tiny_model("gpt_neox")
    for layer in model.gpt_neox.layers:
        torch.nn.init.normal_(layer.attention.query_key_value.bias)
    found = key_transforms(model, center="bias")
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :9] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1) + 100
    for implementation in ("kvq", "sdpa"):
        model.set_attn_implementation(implementation)
        cache = KVQuantCache(model.config, key_transforms=found)
        forward(model, prompt(), copy.deepcopy(cache), mask, position_ids=positions)
        copied = copy.deepcopy(cache)
        forward(model, prompt(), copied, mask, position_ids=positions)
        for index, layer in enumerate(copied.layers):
            mean, rotary = found[index].mean, found[index].rotary
            assert mean.any()
            assert torch.equal(layer.transform.mean, shift_mean(mean, [100, 91], rotary))


def kld(full: Tensor, logits: Tensor) -> list[float]:
    """Mean over positions, of each sequence."""
    p, q = (x.double().log_softmax(-1) for x in (full, logits))
    found: list[float] = (p.exp() * (p - q)).sum(-1).mean(-1).tolist()
    return found


def losses(model: Any, found: dict[int, KeyTransform] | None, ids: Tensor) -> list[list[float]]:
    """KL divergences of each sequence where it begins at 0, and moved."""
    chunks, result = [30] + [1] * 10, []
    for offset in (0, OFFSET):
        positions = torch.arange(TOKENS)[None] + offset
        full = full_logits(model, ids, position_ids=positions)
        result.append(kld(full, logits_of(model, found, ids, chunks, offset=offset)))
    return result


def test_positions_do_not_matter(qwen: Any, transforms: dict[int, KeyTransform]) -> None:
    """The position-shift test, which is mandatory for whatever is calibrated."""
    ids = prompt(12, TOKENS, seed=11)
    here, there = losses(qwen, transforms, ids)
    assert not loses_more(there, here)
    assert sum(there) < sum(losses(qwen, None, ids)[1]) / 4


def test_a_mean_after_rope_is_a_trap(qwen: Any) -> None:
    """Why it is not offered: it fits the positions that it was taken at, and the test finds it."""
    trap = mean_after_rope(qwen, prompt(6, TOKENS, seed=5))
    here, there = losses(qwen, trap, prompt(12, TOKENS, seed=11))
    assert loses_more(there, here)


def test_generation_with_a_compiled_step() -> None:
    """A static decoding step is one graph, with the bits of the step outside it."""
    model = tiny_model("qwen2")
    found = key_transforms(model, center="first")
    caches = [
        KVQuantCache(model.config, "int4", "int4", max_cache_len=64, key_transforms=found)
        for _ in range(2)
    ]
    for cache in caches:
        forward(model, prompt(), cache)
    torch.compiler.reset()
    step = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    for index in range(3):
        token = prompt(2, 4, seed=7)[:, index : index + 1]
        with torch.no_grad():
            compiled = step(input_ids=token, **{cache_argument(model): caches[0]}).logits
        assert torch.equal(compiled, forward(model, token, caches[1]))


@pytest.mark.parametrize("static", [None, 64])
def test_means_go_with_their_sequences(static: int | None) -> None:
    """Of sequences that were centered by their own tokens."""
    model = tiny_model("qwen2")
    found = key_transforms(model, center="first")
    cache = KVQuantCache(model.config, max_cache_len=static, key_transforms=found)
    forward(model, prompt(3), cache)
    means = [layer.transform.mean.clone() for layer in cache.layers]
    places = [layer.transform.mean.data_ptr() for layer in cache.layers]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    for layer, mean, place in zip(cache.layers, means, places, strict=True):
        assert torch.equal(layer.transform.mean, mean[[2, 0, 0]])
        assert not static or layer.transform.mean.data_ptr() == place
    if not static:
        cache.batch_repeat_interleave(2)
        assert torch.equal(cache.layers[1].transform.mean, means[1][[2, 2, 0, 0, 0, 0]])


@pytest.mark.parametrize("static", [None, 64])
def test_a_reset_begins_anew(static: int | None) -> None:
    """The mean of the first tokens is that of the new sequence."""
    model = tiny_model("qwen2")
    found = key_transforms(model, center="first")

    def new() -> KVQuantCache:
        return KVQuantCache(
            model.config, "int4", "int4", max_cache_len=static, key_transforms=found
        )

    cache = new()
    forward(model, prompt(seed=3), cache)
    mean = cache.layers[0].transform.mean.clone()
    cache.reset()
    assert torch.equal(forward(model, prompt(), cache), forward(model, prompt(), new()))
    assert not torch.equal(cache.layers[0].transform.mean, mean)
    cache.crop(-TOKENS)
    assert torch.equal(
        forward(model, prompt(seed=3), cache), forward(model, prompt(seed=3), new())
    )
    assert torch.equal(cache.layers[0].transform.mean, mean)
