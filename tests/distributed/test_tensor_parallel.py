"""A model with its heads shared out: each process packs its own, to the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from kvq.distributed import processes
from kvq.integrations.key_transforms import calibrate, key_transforms
from kvq.integrations.models import cache_argument
from kvq.integrations.transformers import KVQuantCache
from kvq.reference import dequantize
from tests.distributed.launch import run_processes
from tests.integrations.models import prompt

HEADS = 4
#: What a cache is given beyond its modes, and whether keys are centered by a calibration.
CACHES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "kept": ({"first_tokens": 2, "recent_tokens": 5}, False),
    "static": ({"max_cache_len": 32}, False),
    "centered": ({}, True),
}


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def load_model(folder: Path, size: int, device: str) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if size == 1:
        return transformers.LlamaForCausalLM.from_pretrained(folder).eval().to(device)
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=size)
    return transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=config).eval()


@torch.no_grad()
def run(folder: Path, size: int, device: str = "cpu") -> dict[str, Any]:
    """Logits of a prompt and of three tokens after it, and what the first layer has packed.

    Arrays, which travel between processes by value.
    """
    model = load_model(folder, size, device)
    whole = model if size == 1 else load_model(folder, 1, device)
    with processes(device) as together:
        # Three windows: some processes have one less, or none.
        calibration = calibrate(whole, prompt(3, 12, 5), processes=together)
    ids = prompt(2, 14, 3).to(device)
    model.set_attn_implementation("sdpa")
    found = {"unquantized": model(ids, use_cache=False).logits.cpu().numpy()}
    transforms = key_transforms(model, center="calibrated", calibration=calibration)
    found["calibration"] = calibration.sha256
    found["mean"] = transforms[0].mean.cpu().numpy()
    model.set_attn_implementation("kvq")
    for name, (options, centered) in CACHES.items():
        cache = KVQuantCache(
            model.config,
            "int8",
            "int4",
            block_size=4,
            key_transforms=transforms if centered else None,
            **options,
        )
        argument = {cache_argument(model): cache}
        steps = [model(ids[:, :11], **argument).logits[:, -1:]]
        steps += [model(ids[:, i : i + 1], **argument).logits for i in range(11, 14)]
        found[name] = torch.cat(steps, 1).cpu().numpy()
        layer = cache.layers[0]
        assert layer.num_heads == layer.key_cache.words.shape[1] == HEADS // size
        rows = dequantize(*layer.key_cache[:2], layer.key_cache.mode, 16)
        found[f"{name} keys"] = rows[:3].cpu().numpy()  # the pages that are full
        found[f"{name} bytes"] = cache.memory().codes
    cache = KVQuantCache(model.config, "int4", "int4")
    generated = model.generate(
        ids, **{cache_argument(model): cache}, max_new_tokens=4, do_sample=False
    )
    found["generated"] = generated.cpu().numpy()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_in_parts(size: int, tmp_path: Path) -> None:
    save_model(tmp_path)
    check(run(tmp_path, 1), run_processes(size, run, tmp_path, size))


@pytest.mark.gpu
def test_a_model_on_two_devices(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, found {torch.cuda.device_count()}")
    save_model(tmp_path)
    parts = run_processes(2, run, tmp_path, 2, "cuda", backend="nccl")
    check(run(tmp_path, 1, "cuda"), parts)


def check(alone: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    size = len(parts)
    for rank, found in enumerate(parts):
        heads = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        assert found["calibration"] == alone["calibration"]
        assert np.array_equal(found["mean"], alone["mean"][heads])
        assert np.array_equal(found["generated"], alone["generated"])
        # Sums of partial products round otherwise: the model differs without a cache too. Twice,
        # as it is the largest of other numbers.
        differ = np.abs(found["unquantized"] - alone["unquantized"]).max()
        assert 0 < differ < 1e-5
        for name in CACHES:
            assert np.abs(found[name] - alone[name]).max() <= 2 * differ
            mine, theirs = found[f"{name} keys"], alone[f"{name} keys"][:, heads]
            # At most one step of 8 bits, where a product that rounds otherwise meets a threshold.
            assert np.abs(mine - theirs).max() <= np.abs(theirs).max() / 127
            assert found[f"{name} bytes"] * size == alone[f"{name} bytes"]
