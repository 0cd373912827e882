"""The arithmetic of `KeyTransform` as `torch.library` operators, which a compiled graph calls.

A compiler would contract products and sums, and codes would have other bits than outside a graph.
See `kvq.operators`; the functions are those of `kvq.reference.key_transforms`.
"""

from __future__ import annotations

import json
from functools import lru_cache

from torch import Tensor
from torch.compiler import is_compiling
from torch.library import custom_op

from kvq.reference import key_transforms
from kvq.rotary import RotarySpec


@lru_cache(maxsize=64)
def _spec_of(text: str) -> RotarySpec:
    return RotarySpec.from_json(json.loads(text))


@lru_cache(maxsize=64)
def _text_of(spec: RotarySpec) -> str:
    return json.dumps(spec.to_json())


@custom_op("kvq::encode_keys", mutates_args=())
def _encode(
    keys: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec_text: str
) -> Tensor:
    found = key_transforms.encode_keys(keys, mean, pair_scale, rows, _spec_of(spec_text))
    return found.clone() if found is keys else found


@_encode.register_fake
def _(
    keys: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec_text: str
) -> Tensor:
    return rows.new_empty(keys.shape)


@custom_op("kvq::decode_keys", mutates_args=())
def _decode(
    packed: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec_text: str
) -> Tensor:
    found = key_transforms.decode_keys(packed, mean, pair_scale, rows, _spec_of(spec_text))
    return found.clone() if found is packed else found


@_decode.register_fake
def _(
    packed: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec_text: str
) -> Tensor:
    return packed.new_empty(packed.shape)


@custom_op("kvq::mean_logits", mutates_args=())
def _mean_logits(
    query: Tensor, mean: Tensor, rows: Tensor, spec_text: str, scale: float
) -> Tensor:
    return key_transforms.mean_logits(query, mean, rows, _spec_of(spec_text), scale)


@_mean_logits.register_fake
def _(query: Tensor, mean: Tensor, rows: Tensor, spec_text: str, scale: float) -> Tensor:
    return rows.new_empty((*query.shape[:3], len(rows)))


def encode_keys(
    keys: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec: RotarySpec
) -> Tensor:
    """See `kvq.reference.key_transforms.encode_keys`."""
    if is_compiling():
        made: Tensor = _encode(keys, mean, pair_scale, rows, _text_of(spec))
        return made
    return key_transforms.encode_keys(keys, mean, pair_scale, rows, spec)


def decode_keys(
    packed: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec: RotarySpec
) -> Tensor:
    """See `kvq.reference.key_transforms.decode_keys`."""
    if is_compiling():
        made: Tensor = _decode(packed, mean, pair_scale, rows, _text_of(spec))
        return made
    return key_transforms.decode_keys(packed, mean, pair_scale, rows, spec)


def mean_logits(
    query: Tensor, mean: Tensor, rows: Tensor, spec: RotarySpec, scale: float
) -> Tensor:
    """See `kvq.reference.key_transforms.mean_logits`."""
    if is_compiling():
        made: Tensor = _mean_logits(query, mean, rows, _text_of(spec), scale)
        return made
    return key_transforms.mean_logits(query, mean, rows, spec, scale)
