"""Seeded inputs: what the analysis measures when it is given no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from kvq.activations import Activations, LayerActivations
from kvq.checks import check_int, check_seed, check_share, check_storage


def gaussian(tokens: int, heads: int, head_dim: int, seed: int = 0) -> Tensor:
    """Independent N(0,1): every row points in a uniformly random direction.

    Args:
        tokens: T.
        heads: H.
        head_dim: D.
        seed: Of the generator.

    Returns:
        `[T, H, D]` float32.
    """
    _check_sizes(tokens, heads, head_dim, seed)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((tokens, heads, head_dim), generator=generator)


def outlier_channel(
    tokens: int, heads: int, head_dim: int, seed: int = 0, *, channel: int = 7, size: float = 60.0
) -> Tensor:
    """`gaussian` with a constant added to one channel, as keys have behind a large bias."""
    x = gaussian(tokens, heads, head_dim, seed)
    x[..., channel % head_dim] += size
    return x


def ties(tokens: int, heads: int, head_dim: int, seed: int = 0) -> Tensor:
    """Integers and a half, and one 127 in every row: steps of 1, and every other entry a tie."""
    _check_sizes(tokens, heads, head_dim, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, heads, head_dim)
    x = torch.randint(-127, 127, shape, generator=generator).to(torch.float32) + 0.5
    x[..., 0] = 127.0
    return x


def zeros(tokens: int, heads: int, head_dim: int, seed: int = 0) -> Tensor:
    """Zeros of both signs."""
    _check_sizes(tokens, heads, head_dim, seed)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (tokens, heads, head_dim), generator=generator)
    return torch.where(signs == 0, 0.0, -0.0)


def subnormals(tokens: int, heads: int, head_dim: int, seed: int = 0) -> Tensor:
    """Multiples of the smallest positive float32."""
    return (gaussian(tokens, heads, head_dim, seed) * 1000).trunc() * 2.0**-149


def _check_sizes(tokens: int, heads: int, head_dim: int, seed: int) -> None:
    """The argument rules of all samples."""
    for argument, size in (("tokens", tokens), ("heads", heads), ("head_dim", head_dim)):
        check_int(argument, size, 0)
    check_seed(seed)


#: The inputs that tests and figures walk, by name. Each takes tokens, heads, head_dim and a seed.
SAMPLES: Final[Mapping[str, Callable[[int, int, int, int], Tensor]]] = MappingProxyType(
    {
        "gaussian": gaussian,
        "outlier_channel": outlier_channel,
        "ties": ties,
        "zeros": zeros,
        "subnormals": subnormals,
    }
)


def synthetic_activations(
    *,
    layers: int = 2,
    tokens: int = 128,
    query_heads: int = 4,
    heads: int = 2,
    head_dim: int = 64,
    queries: int = 16,
    key_mean_share: float = 0.5,
    value_mean_share: float = 0.2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Activations:
    """Activations with the coarse features of a model's: offsets per channel, and a first token
    whose key is large and whose value is small.

    Args:
        layers: How many.
        tokens: T.
        query_heads: Hq, a multiple of `heads`.
        heads: Hkv.
        head_dim: D, of keys and values.
        queries: Tq, evenly spaced; the last stands at the last token.
        key_mean_share: Share of the energy of the keys in their mean per channel.
        value_mean_share: The same of the values.
        dtype: Of the tensors.
        seed: Of the generators.

    Returns:
        Activations whose logits have a standard deviation of about 1.
    """
    for argument, size in (
        ("layers", layers),
        ("tokens", tokens),
        ("query_heads", query_heads),
        ("heads", heads),
        ("head_dim", head_dim),
        ("queries", queries),
    ):
        check_int(argument, size, 1)
    if query_heads % heads:
        raise ValueError(f"query_heads must be a multiple of the {heads} heads, got {query_heads}")
    if queries > tokens:
        raise ValueError(f"queries must be at most the {tokens} tokens, got {queries}")
    check_share("key_mean_share", key_mean_share)
    check_share("value_mean_share", value_mean_share)
    check_storage("dtype", dtype)
    check_seed(seed)
    contents: dict[int, LayerActivations] = {}
    for index in range(layers):
        base = seed + 7919 * index
        key = with_mean(gaussian(tokens, heads, head_dim, base), key_mean_share, base + 1)
        value = with_mean(gaussian(tokens, heads, head_dim, base + 2), value_mean_share, base + 3)
        key[0] *= 4.0
        value[0] *= 0.1
        query = gaussian(queries, query_heads, head_dim, base + 4)
        contents[index] = LayerActivations(query.to(dtype), key.to(dtype), value.to(dtype))
    return Activations(
        contents,
        torch.arange(tokens),
        (torch.arange(1, queries + 1) * tokens) // queries - 1,
        1.0 / math.sqrt(head_dim),
        provenance={"source": "synthetic", "seed": str(seed)},
    )


def with_mean(x: Tensor, share: float, seed: int) -> Tensor:
    """`x` with a random constant per head and channel that holds `share` of its energy.

    Args:
        x: `[T, H, D]`, about N(0,1).
        share: From 0 to 1.
        seed: Of the generator.
    """
    mean = gaussian(1, x.shape[1], x.shape[2], seed)
    return math.sqrt(1.0 - share) * x + math.sqrt(share) * mean
