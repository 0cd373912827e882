"""The RoPE of a Hugging Face model: what its modules declare, and whether that made its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from kvq.reference.rotary import apply_rotary
from kvq.rotary import RotaryLayout, RotarySpec

#: How far RoPE, undone or redone, may be from the model's keys: `|a - b| / |b|` over one layer.
#: A 16-bit model rounds its cosines, so there it is two steps of its dtype at 1.
ROTARY_TOLERANCE: Final = 1e-5


def _candidates(model: nn.Module, head_dim: int) -> list[RotarySpec]:
    """What the model's rotary modules declare, in both layouts."""
    specs: dict[RotarySpec, None] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name or buffer.ndim != 1:
                continue
            frequencies = tuple(buffer.float().tolist())
            factor = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0)
            if 0 < 2 * len(frequencies) <= head_dim:
                for layout in RotaryLayout:
                    spec = RotarySpec(frequencies, 2 * len(frequencies), layout, float(factor))
                    specs[spec] = None
    return list(specs)


def rotary_error(spec: RotarySpec, unrotated: Tensor, keys: Tensor, positions: Tensor) -> float:
    """The larger of the relative errors of redoing RoPE and of undoing it, in one layer."""
    redone = apply_rotary(unrotated, positions, spec)
    undone = apply_rotary(keys, positions, spec, inverse=True)
    return max(
        float((redone - keys).norm() / keys.float().norm()),
        float((undone - unrotated).norm() / unrotated.float().norm()),
    )


def find_rotary(
    model: nn.Module,
    keys: Mapping[int, Tensor],
    unrotated: Mapping[int, Tensor],
    positions: Tensor,
) -> tuple[RotarySpec | None, str]:
    """The declared RoPE that made the keys of every layer, if any, and a sentence about it.

    Args:
        model: Whose modules declare it.
        keys: `[T, H, D]` of each layer, after RoPE.
        unrotated: The same before RoPE, of layers of which they are known.
        positions: `[T]` int64.
    """
    some = next(iter(keys.values()))
    candidates = _candidates(model, some.shape[-1])
    if not candidates:
        return None, "unknown: the model has no module with inverse frequencies"
    missing = keys.keys() - unrotated.keys()
    if missing:
        return None, f"unknown: layer {min(missing)} is given no position embeddings"
    # [error, layer] of the worst layer of each candidate
    worst = [
        max((rotary_error(spec, unrotated[i], keys[i], positions), i) for i in keys)
        for spec in candidates
    ]
    (error, layer), spec = min(zip(worst, candidates, strict=True), key=lambda item: item[0])
    limit = max(ROTARY_TOLERANCE, 2 * torch.finfo(some.dtype).eps)
    if not error <= limit:
        return None, (
            "unknown: no RoPE that the model declares makes the keys of every layer; the nearest "
            f"has a relative error of {error:.1e} in layer {layer} (limit {limit:.0e})"
        )
    return spec, (
        "verified: undone and redone in every layer at every position within a relative error "
        f"of {error:.1e} (limit {limit:.0e})"
    )
