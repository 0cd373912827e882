"""Captured keys as a calibration leaves them: without their mean, and with scaled pairs."""

from __future__ import annotations

from dataclasses import replace

from kvq.activations import Activations
from kvq.calibration_files import Calibration
from kvq.reference.key_transforms import encode_keys, rotary_rows


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
    if activations.rotary != calibration.rotary:
        known = "none that is known" if activations.rotary is None else "another"
        raise ValueError(f"activations must have the RoPE of the calibration, got {known}")
    last = int(activations.positions[-1])
    rows = rotary_rows(calibration.rotary, 0, last + 1)[activations.positions]
    layers = {}
    for index, layer in activations.layers.items():
        if index not in calibration.layers:
            raise ValueError(f"calibration must have every layer, got none for layer {index}")
        mean, scale = calibration.layers[index]
        if mean.shape != layer.key.shape[1:]:
            raise ValueError(
                f"calibration.layers.{index} must be of {list(layer.key.shape[1:])} heads and "
                f"channels, got {list(mean.shape)}"
            )
        keys = layer.key.transpose(0, 1)[None]
        packed = encode_keys(keys, mean[None], scale, rows, calibration.rotary)
        layers[index] = layer._replace(key=packed[0].transpose(0, 1).contiguous())
    return replace(activations, layers=layers)
