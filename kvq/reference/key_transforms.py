"""The arithmetic of `KeyTransform`: keys without their mean, and what attention adds for it.

A mean `m` stands before RoPE; `R_p m` is what RoPE makes of it at position p. Keys are packed as
`(k - R_p m) s`, so a logit `q.k` is `(q / s).(packed) + q.(R_p m)`: the second term is known, and
depends on the key through its position alone.

Turns compose: `R_{a + b} m = R_a (R_b m)`. So whatever moves all positions of a sequence, be it
padding before it, is turned into its mean once, by `shift_mean`, and from then on a key's position
is its index. Angles are exact for that; a model's are rounded to float32, by at most
`2**-24 * position` radians, and what that leaves of the mean is packed with the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kvq.rotary import RotarySpec, join_pairs, split_pairs

#: Logarithm of the largest pair scale.
LARGEST_SCALE: Final = math.log(16.0)


def rotary_rows(spec: RotarySpec, start: int, count: int) -> Tensor:
    """Cosines and sines of positions `start` to `start + count - 1`, times the attention factor.

    Args:
        spec: How the model applies RoPE.
        start: The first position; may be negative.
        count: How many positions.

    Returns:
        `[count, 2 * pairs]` float32 on the CPU: the cosine of each pair, then the sine of each.

    Exactness: angles, cosines and sines in float64, rounded to float32 once. Made on the CPU
    wherever the keys are, so all devices have the same bits.
    """
    return rotary_at(spec, torch.arange(start, start + count))


def rotary_at(spec: RotarySpec, positions: Tensor) -> Tensor:
    """The rows of `rotary_rows` for positions `[count]` int64 in any order."""
    frequencies = torch.tensor(spec.inverse_frequencies, dtype=torch.float32).double()
    angles = positions.double()[:, None] * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * spec.attention_factor).float()


def shift_mean(mean: Tensor, shifts: Sequence[int], spec: RotarySpec) -> Tensor:
    """The mean for sequences in which the key of index `i` stands at position `i + shift`.

    Args:
        mean: `[H, D]` float32, before RoPE.
        shifts: One of each sequence.
        spec: How the model applies RoPE.

    Returns:
        `[sequences, H, D]` float32 on the device of `mean`, which may be used with the rows of a
        key's index.

    Exactness: in float64 on the CPU, rounded once.
    """
    turn = RotarySpec(spec.inverse_frequencies, spec.rotary_dim, spec.layout)
    frequencies = torch.tensor(turn.inverse_frequencies, dtype=torch.float32).double()
    angles = torch.tensor(shifts, dtype=torch.float64)[:, None, None] * frequencies
    first, second, rest = split_pairs(mean.cpu().double(), turn)
    cosine, sine = angles.cos(), angles.sin()
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    joined = join_pairs(*turned, rest.expand(len(shifts), -1, -1), turn)
    return joined.float().to(mean.device)


def turn_mean(mean: Tensor, rows: Tensor, spec: RotarySpec) -> Tensor:
    """What RoPE makes of a mean at some positions.

    Args:
        mean: `[sequences or 1, H, D]` float32.
        rows: `[T, 2 * pairs]` float32, as `rotary_rows` makes them.
        spec: How the model applies RoPE.

    Returns:
        `[sequences or 1, H, T, D]` float32.

    Exactness: the same on every device: each product, difference and sum is rounded once.
    """
    first, second, rest = split_pairs(mean[:, :, None], spec)  # [S, H, 1, pairs]
    cosine, sine = rows.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return join_pairs(*turned, rest.expand(-1, -1, len(rows), -1), spec)


def encode_keys(
    keys: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec: RotarySpec
) -> Tensor:
    """What is packed of keys: `(k - R_p mean) * pair_scale`.

    Args:
        keys: `[B, H, T, D]` float32, float16 or bfloat16, after RoPE.
        mean: `[B or 1, H, D]` float32, or `None`.
        pair_scale: `[H, D]` float32, or `None`.
        rows: `[T, 2 * pairs]` float32: of the positions of the keys.
        spec: How the model applies RoPE.

    Returns:
        `[B, H, T, D]` float32.

    Exactness: the same on every device: one rounded subtraction from the exactly widened key, and
    one rounded product.
    """
    found = keys.float()
    if mean is not None:
        found = found - turn_mean(mean, rows, spec)
    return found if pair_scale is None else found * pair_scale[:, None]


def decode_keys(
    packed: Tensor, mean: Tensor | None, pair_scale: Tensor | None, rows: Tensor, spec: RotarySpec
) -> Tensor:
    """Undo `encode_keys`: `packed / pair_scale + R_p mean`, `[B, H, T, D]` float32.

    Exactness: the same on every device: one rounded division and one rounded sum. The key comes
    back but for their roundings.
    """
    found = packed if pair_scale is None else packed / pair_scale[:, None]
    return found if mean is None else found + turn_mean(mean, rows, spec)


def scale_queries(query: Tensor, pair_scale: Tensor) -> Tensor:
    """Queries `[..., Hq, D]` over the scale `[H, D]` of their KV heads, in their own dtype.

    Exactness: a division in float32, rounded to the dtype of the queries.
    """
    by_head = (*query.shape[:-2], len(pair_scale), -1, query.shape[-1])
    grouped = query.float().reshape(by_head) / pair_scale[:, None]
    return grouped.flatten(-3, -2).to(query.dtype)


def mean_logits(
    query: Tensor, mean: Tensor, rows: Tensor, spec: RotarySpec, scale: float
) -> Tensor:
    """The part of the logits that a mean takes with it: `scale * q.(R_p mean)`.

    Each pair of channels gives two factors of a query, one of the cosine and one of the sine of
    the key's angle; so this is one matrix product, of a few numbers of each query with a table
    that all layers, heads and sequences share.

    Args:
        query: `[B, Q, Hq, D]`, not divided by a pair scale.
        mean: `[B or 1, H, D]` float32.
        rows: `[K, 2 * pairs]` float32: of the positions of the keys.
        spec: How the model applies RoPE.
        scale: Of the logits.

    Returns:
        `[B, Q, Hq, K]` float32, to be added to the logits before a soft cap.

    Exactness: within an error budget: in float32, whatever torch is told of matrix products; for
    float32 queries in float64.
    """
    by_head = (*query.shape[:2], mean.shape[1], -1, query.shape[3])
    # As the packed part of the logits is: a float32 query is answered in float64.
    compute = torch.float64 if query.dtype in (torch.float32, torch.float64) else torch.float32
    wide = (scale * query.to(compute)).reshape(by_head)  # [B, Q, H, G, D]
    q_first, q_second, q_rest = split_pairs(wide, spec)
    first, second, rest = split_pairs(mean.to(compute)[:, None, :, None], spec)
    factors = torch.cat(
        (q_first * first + q_second * second, q_second * first - q_first * second), dim=-1
    )
    constant = (q_rest * rest).sum(-1, keepdim=True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        table = rows.T.to(compute)
        logits = torch.addmm(constant.flatten(0, -2), factors.flatten(0, -2), table).float()
    finally:
        torch.set_float32_matmul_precision(before)
    return logits.view(*query.shape[:3], len(rows))


def first_mean(
    keys: Tensor, rows: Tensor, padding: Sequence[int], tokens: int, spec: RotarySpec
) -> Tensor:
    """The mean of each sequence's own first keys before RoPE.

    Args:
        keys: `[B, H, T, D]` float32, float16 or bfloat16, after RoPE: the first of the cache.
        rows: `[T or more, 2 * pairs]` float32: of the keys' indices.
        padding: How many of each sequence's keys are padding, and do not count.
        tokens: At most so many keys after them count.
        spec: How the model applies RoPE.

    Returns:
        `[B, H, D]` float32, before RoPE where a key's position is its index; 0 where no key
        counts.

    Exactness: the same on every device: RoPE is undone product by product, keys are summed
    neighbors first, and the sum is divided.
    """
    count = keys.shape[2]
    starts = torch.tensor(padding, device=keys.device)
    index = starts[:, None] + torch.arange(min(tokens, count), device=keys.device)  # [B, n]
    counts = index < count
    index = index.clamp(max=count - 1)
    found = keys.gather(2, index[:, None, :, None].expand(-1, *keys.shape[1:2], -1, keys.shape[3]))
    first, second, rest = split_pairs(found.float(), spec)
    cosine, sine = rows[index][:, None].chunk(2, dim=-1)  # [B, 1, n, pairs]
    square = torch.tensor(spec.attention_factor**2, dtype=torch.float32, device=keys.device)
    back = (
        (first * cosine + second * sine) / square,
        (second * cosine - first * sine) / square,
    )
    total = join_pairs(*back, rest, spec).where(counts[:, None, :, None], 0.0)
    width = 1 << (total.shape[2] - 1).bit_length()
    total = F.pad(total, (0, 0, 0, width - total.shape[2]))
    while total.shape[2] > 1:
        total = total[:, :, 0::2] + total[:, :, 1::2]
    return total[:, :, 0] / counts.sum(-1).clamp(min=1).float()[:, None, None]


def find_pair_scale(key_variance: Tensor, query_moment: Tensor, spec: RotarySpec) -> Tensor:
    """The scale that makes the keys of each pair of channels as large as what queries ask of them.

    `s = (query moment / key variance)^(1/4)`, both summed over the pair: then `s^2` times the
    variance is the moment over `s^2`. A channel of no pair is a pair by itself.

    Args:
        key_variance: `[H, D]` float64, of keys before RoPE.
        query_moment: `[H, D]` float64: the mean square of the queries of each KV head.
        spec: How the model applies RoPE.

    Returns:
        `[H, D]` float32 of geometric mean 1 over the channels, then held within 1/16 and 16.

    Exactness: in float64, rounded once.
    """
    ratios = []
    for moment in (query_moment, key_variance):
        first, second, rest = split_pairs(moment.double(), spec)
        both = first + second
        ratios.append(join_pairs(both, both, rest, spec).clamp(min=1e-30))
    logarithms = (ratios[0].log() - ratios[1].log()) / 4
    logarithms = logarithms - logarithms.mean(-1, keepdim=True)
    return logarithms.clamp(-LARGEST_SCALE, LARGEST_SCALE).exp().float()
