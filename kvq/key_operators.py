"""The arithmetic of `KeyTransform` as `torch.library` operators, which a compiled graph calls.

A compiler would contract products and sums, and codes would have other bits than outside a graph.
See `kvq.operators`; the functions are those of `kvq.reference.key_transforms`.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor
from torch.compiler import is_compiling
from torch.library import custom_op

from kvq.reference import key_transforms
from kvq.rotary import RotaryLayout, RotarySpec


@lru_cache(maxsize=64)
def _spec(rotary_dim: int, interleaved: bool) -> RotarySpec:
    """What says which channels are pairs: tables bring the angles."""
    layout = RotaryLayout.INTERLEAVED if interleaved else RotaryLayout.HALF
    return RotarySpec((0.0,) * (rotary_dim // 2), rotary_dim, layout)


def _pairs(spec: RotarySpec) -> tuple[int, bool]:
    """What an operator takes for a spec."""
    return spec.rotary_dim, spec.layout is RotaryLayout.INTERLEAVED


@custom_op("kvq::encode_keys", mutates_args=())
def _encode(
    keys: Tensor,
    mean: Tensor | None,
    pair_scale: Tensor | None,
    rows: Tensor,
    rotary_dim: int,
    interleaved: bool,
) -> Tensor:
    found = key_transforms.encode_keys(
        keys, mean, pair_scale, rows, _spec(rotary_dim, interleaved)
    )
    return found.clone() if found is keys else found


@_encode.register_fake
def _(
    keys: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, *_: object
) -> Tensor:
    return rows.new_empty(keys.shape)


@custom_op("kvq::decode_keys", mutates_args=())
def _decode(
    packed: Tensor,
    mean: Tensor | None,
    pair_scale: Tensor | None,
    rows: Tensor,
    rotary_dim: int,
    interleaved: bool,
) -> Tensor:
    found = key_transforms.decode_keys(
        packed, mean, pair_scale, rows, _spec(rotary_dim, interleaved)
    )
    return found.clone() if found is packed else found


@_decode.register_fake
def _(packed: Tensor, *_: object) -> Tensor:
    return packed.new_empty(packed.shape)


@custom_op("kvq::mean_logits", mutates_args=())
def _mean_logits(
    query: Tensor, mean: Tensor, rows: Tensor, rotary_dim: int, interleaved: bool, scale: float
) -> Tensor:
    return key_transforms.mean_logits(query, mean, rows, _spec(rotary_dim, interleaved), scale)


@_mean_logits.register_fake
def _(query: Tensor, mean: Tensor, rows: Tensor, *_: object) -> Tensor:
    return rows.new_empty((*query.shape[:3], len(rows)))


def encode_keys(
    keys: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec: RotarySpec
) -> Tensor:
    """See `kvq.reference.key_transforms.encode_keys`."""
    if is_compiling():
        made: Tensor = _encode(keys, mean, pair_scale, rows, *_pairs(spec))
        return made
    return key_transforms.encode_keys(keys, mean, pair_scale, rows, spec)


def decode_keys(
    packed: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec: RotarySpec
) -> Tensor:
    """See `kvq.reference.key_transforms.decode_keys`."""
    if is_compiling():
        made: Tensor = _decode(packed, mean, pair_scale, rows, *_pairs(spec))
        return made
    return key_transforms.decode_keys(packed, mean, pair_scale, rows, spec)


def mean_logits(
    query: Tensor, mean: Tensor, rows: Tensor, spec: RotarySpec, scale: float
) -> Tensor:
    """See `kvq.reference.key_transforms.mean_logits`."""
    if is_compiling():
        made: Tensor = _mean_logits(query, mean, rows, *_pairs(spec), scale)
        return made
    return key_transforms.mean_logits(query, mean, rows, spec, scale)
