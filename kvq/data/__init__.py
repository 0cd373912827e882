"""The sample that comes with the package; `README.md` beside this file says what it is."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvq.activations import Activations

#: The file of the embedded sample, beside this one.
SAMPLE: Final = "smollm2-135m-kjv.safetensors"


def embedded_sample() -> Activations:
    """Queries, keys and values of SmolLM2-135M-Instruct over the beginning of Genesis.

    Layers 0, 4, 8, 12, 17, 21, 25 and 29 of 30; 640 consecutive tokens; all 3 KV heads of 64
    channels; the queries, 9 heads, of the last 64 tokens; float16, after a verified RoPE.

    Returns:
        The activations, with the provenance of model and text.
    """
    from kvq.activations import load_activations

    with as_file(files(__name__) / SAMPLE) as path:
        return load_activations(path)
