"""Captured keys as a calibration leaves them: without their mean, and with scaled pairs."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvq.activations import Activations
from kvq.calibration_files import Calibration
from kvq.reference.key_transforms import encode_keys, rotary_at
from kvq.rotary import RotarySpec


def centered_activations(activations: Activations, calibration: Calibration) -> Activations:
    """Activations whose keys are what a cache with this calibration packs.

    Args:
        activations: Of a model whose RoPE is known.
        calibration: Of the same model, with every layer that they hold.

    Returns:
        The same queries, values and positions; keys float32, no longer those of the model.

    Raises:
        ValueError: RoPE is not known or not that of the calibration, or a layer is missing or of
            another shape; the message names it.
    """
    layers = {
        index: layer._replace(
            key=centered_keys(
                layer.key, activations.positions, index, activations.rotary, calibration
            )
        )
        for index, layer in activations.layers.items()
    }
    return replace(activations, layers=layers)


def centered_keys(
    keys: Tensor,
    positions: Tensor,
    layer: int,
    rotary: RotarySpec | None,
    calibration: Calibration,
) -> Tensor:
    """The keys of one layer as a cache with this calibration packs them.

    Args:
        keys: `[T, H, D]`, after RoPE.
        positions: `[T]` int64.
        layer: Its index.
        rotary: The RoPE of the model, if it is known.
        calibration: Of the same model.

    Returns:
        `[T, H, D]` float32.

    Raises:
        ValueError: As for `centered_activations`.
    """
    if rotary != calibration.rotary:
        known = "none that is known" if rotary is None else "another"
        raise ValueError(f"activations must have the RoPE of the calibration, got {known}")
    if layer not in calibration.layers:
        raise ValueError(f"calibration must have every layer, got none for layer {layer}")
    mean, scale = calibration.layers[layer]
    if mean.shape != keys.shape[1:]:
        raise ValueError(
            f"calibration.layers.{layer} must be of {list(keys.shape[1:])} heads and "
            f"channels, got {list(mean.shape)}"
        )
    rows = rotary_at(calibration.rotary, positions)
    packed = encode_keys(keys.transpose(0, 1)[None], mean[None], scale, rows, calibration.rotary)
    return packed[0].transpose(0, 1).contiguous()
