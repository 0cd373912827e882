"""Keys without their mean, and scaled pairs: against numpy, and attention against float64."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvq
from kvq import reference
from kvq.key_transforms import KeyTransform
from kvq.reference import key_transforms as arithmetic
from kvq.reference.exact import dequantize_exact
from kvq.reference.rotary import apply_rotary
from kvq.rotary import RotaryLayout, RotarySpec
from kvq.tier import AttentionFeatures, new_paged_kv

HEADS, DIM = 2, 16
LAYOUTS = pytest.mark.parametrize("layout", list(RotaryLayout), ids=str)


def make_spec(
    layout: RotaryLayout = RotaryLayout.HALF, pairs: int = 6, factor: float = 1.0
) -> RotarySpec:
    """By default 12 of the 16 channels are turned."""
    frequencies = torch.tensor([1e4 ** (-i / pairs) for i in range(pairs)], dtype=torch.float32)
    return RotarySpec(tuple(frequencies.tolist()), 2 * pairs, layout, factor)


def random(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair_index(spec: RotarySpec) -> tuple[list[int], list[int]]:
    """Channels of the first and of the second of each pair."""
    pairs = spec.rotary_dim // 2
    if spec.layout is RotaryLayout.HALF:
        return list(range(pairs)), list(range(pairs, 2 * pairs))
    return list(range(0, 2 * pairs, 2)), list(range(1, 2 * pairs, 2))


def random_scale(spec: RotarySpec) -> Tensor:
    scale = random(HEADS, DIM, seed=8).exp()
    first, second = pair_index(spec)
    scale[:, second] = scale[:, first]
    return scale


def turned_in_numpy(mean: np.ndarray, positions: list[int], spec: RotarySpec) -> np.ndarray:
    """`R_p mean`, `[S, H, T, D]`, float32 operation by operation."""
    frequencies = np.array(spec.inverse_frequencies, dtype=np.float32).astype(np.float64)
    angles = np.array(positions, dtype=np.float64)[:, None] * frequencies
    factor = spec.attention_factor
    cosine = (np.cos(angles) * factor).astype(np.float32)
    sine = (np.sin(angles) * factor).astype(np.float32)
    out = np.repeat(mean[:, :, None], len(positions), axis=2)
    first, second = pair_index(spec)
    a, b = mean[:, :, None, first], mean[:, :, None, second]
    out[..., first] = a * cosine - b * sine
    out[..., second] = b * cosine + a * sine
    return out


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_float32_operation_by_operation(layout: RotaryLayout, dtype: torch.dtype) -> None:
    spec = make_spec(layout, factor=1.25)
    keys, mean = random(3, HEADS, 7, DIM, dtype=dtype), 30 * random(3, HEADS, DIM, seed=4)
    scale = random_scale(spec)
    rows = arithmetic.rotary_rows(spec, 30_000, 7)
    turned = turned_in_numpy(mean.numpy(), list(range(30_000, 30_007)), spec)
    assert turned.dtype == np.float32
    wide = keys.float().numpy()
    packed = arithmetic.encode_keys(keys, mean, scale, rows, spec)
    expected = (wide - turned) * scale.numpy()[:, None]
    np.testing.assert_array_equal(packed.numpy(), expected)
    back = arithmetic.decode_keys(packed, mean, scale, rows, spec)
    np.testing.assert_array_equal(back.numpy(), expected / scale.numpy()[:, None] + turned)
    np.testing.assert_array_equal(
        arithmetic.encode_keys(keys, mean, None, rows, spec).numpy(), wide - turned
    )
    np.testing.assert_array_equal(
        arithmetic.encode_keys(keys, None, scale, rows, spec).numpy(),
        wide * scale.numpy()[:, None],
    )


def test_keys_come_back() -> None:
    spec = make_spec()
    keys, mean, scale = random(2, HEADS, 9, DIM), random(1, HEADS, DIM, seed=4), random_scale(spec)
    rows = arithmetic.rotary_rows(spec, 0, 9)
    packed = arithmetic.encode_keys(keys, mean, scale, rows, spec)
    back = arithmetic.decode_keys(packed, mean, scale, rows, spec)
    torch.testing.assert_close(back, keys, rtol=1e-6, atol=1e-6)


@LAYOUTS
def test_keys_that_are_their_mean_leave_next_to_nothing(layout: RotaryLayout) -> None:
    """Turned by RoPE as models do it: what is left is the rounding of their angles."""
    spec = make_spec(layout, factor=0.5)
    mean = random(1, HEADS, DIM)
    for start in (0, 30_000):
        positions = torch.arange(start, start + 5)
        keys = apply_rotary(mean.expand(5, -1, -1), positions, spec).transpose(0, 1)[None]
        rows = arithmetic.rotary_rows(spec, start, 5)
        left = arithmetic.encode_keys(keys, mean, None, rows, spec)
        # The pair of frequency 1 is turned by up to half an ulp of the position too much.
        assert left.abs().max() < 1e-6 + 2.0**-24 * start * float(mean.abs().max())
        after = arithmetic.turn_mean(mean, arithmetic.rotary_rows(spec, 7, 1), spec)
        assert (keys - after).abs().max() > 0.1  # a mean that stays where it is does not fit


@LAYOUTS
def test_turns_compose(layout: RotaryLayout) -> None:
    spec = make_spec(layout, factor=1.5)
    mean = random(HEADS, DIM)
    shifts = [30_000, 0, -7]
    shifted = arithmetic.shift_mean(mean, shifts, spec)
    assert torch.equal(shifted[1], mean)
    rows = arithmetic.rotary_rows(spec, 0, 20)
    for sequence, shift in enumerate(shifts):
        direct = arithmetic.turn_mean(mean[None], arithmetic.rotary_rows(spec, shift, 20), spec)
        composed = arithmetic.turn_mean(shifted[sequence, None], rows, spec)
        torch.testing.assert_close(composed, direct, rtol=0, atol=1e-6)


@LAYOUTS
@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_mean_adds_to_logits(layout: RotaryLayout, batch: int) -> None:
    spec = make_spec(layout, factor=1.25)
    query, mean = random(2, 3, 6, DIM), random(batch, HEADS, DIM, seed=5)
    rows = arithmetic.rotary_rows(spec, 100, 9)
    found = arithmetic.mean_logits(query, mean, rows, spec, 0.3)
    turned = arithmetic.turn_mean(mean, rows, spec).double()  # [batch, H, 9, D]
    grouped = query.double().unflatten(2, (HEADS, 3))
    expected = 0.3 * torch.einsum("bqhgd,bhkd->bqhgk", grouped, turned.expand(2, -1, -1, -1))
    torch.testing.assert_close(found.double(), expected.flatten(2, 3), rtol=1e-5, atol=1e-5)


def test_the_product_is_float32_whatever_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, product = make_spec(), torch.addmm
    told: list[str] = []

    def addmm(*factors: Tensor) -> Tensor:
        assert all(factor.dtype is torch.float32 for factor in factors)
        told.append(torch.get_float32_matmul_precision())
        return product(*factors)

    monkeypatch.setattr(torch, "addmm", addmm)
    query, mean = random(1, 2, 4, DIM, dtype=torch.bfloat16), random(1, HEADS, DIM)
    try:
        torch.set_float32_matmul_precision("medium")
        arithmetic.mean_logits(query, mean, arithmetic.rotary_rows(spec, 0, 3), spec, 1.0)
        told.append(torch.get_float32_matmul_precision())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert told == ["highest", "medium"]


def test_a_scale_of_pairs_commutes_with_rope() -> None:
    spec = make_spec(pairs=8)
    scale = random_scale(spec)
    keys, positions = random(5, HEADS, DIM), torch.arange(40, 45)
    turned = apply_rotary(keys * scale, positions, spec)
    torch.testing.assert_close(turned, apply_rotary(keys, positions, spec) * scale)


def test_queries_are_scaled_by_their_kv_head() -> None:
    scale = random_scale(make_spec())
    query = random(4, 6, DIM, dtype=torch.bfloat16)
    found = arithmetic.scale_queries(query, scale)
    assert found.dtype is torch.bfloat16
    for head in range(6):
        assert torch.equal(found[:, head], (query[:, head].float() / scale[head // 3]).bfloat16())


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_the_mean_of_first_keys(factor: float, count: int) -> None:
    """Before RoPE, of those after the padding, at most so many, neighbors first."""
    spec = make_spec(factor=factor)
    before = random(9, 3 * HEADS, DIM)
    keys = apply_rotary(before, torch.arange(9), spec)
    keys = keys.unflatten(1, (3, HEADS)).permute(1, 2, 0, 3)[:, :, :count]
    rows = arithmetic.rotary_rows(spec, 0, 12)
    found = arithmetic.first_mean(keys, rows, [0, 3, 20], 4, spec)
    plain = before.unflatten(1, (3, HEADS)).permute(1, 2, 0, 3)[:, :, :count]
    for sequence, padding in enumerate([0, 3, 20]):
        part = plain[sequence, :, padding : padding + 4]
        wanted = part.mean(1) if part.shape[1] else torch.zeros(HEADS, DIM)
        torch.testing.assert_close(found[sequence], wanted, rtol=1e-5, atol=1e-5)
    # Not one bit depends on the other sequences or on what comes later.
    alone = arithmetic.first_mean(keys[1:2], rows, [3], 4, spec)
    assert torch.equal(alone, found[1:2])
    if count == 9:
        assert torch.equal(arithmetic.first_mean(keys[:1, :, :4], rows, [0], 4, spec), found[:1])


def test_first_keys_are_summed_in_a_tree() -> None:
    spec = RotarySpec((0.0,), 2)
    values = [1e8, 1.0, -1e8, 1.0, 3.0]
    keys = torch.tensor(values)[None, None, :, None].expand(1, 1, 5, 2)
    rows = arithmetic.rotary_rows(spec, 0, 5)
    a, b, c, d, e = (np.float32(x) for x in values)
    expected = (((a + b) + (c + d)) + e) / np.float32(5)
    assert float(arithmetic.first_mean(keys, rows, [0], 64, spec)[0, 0, 0]) == expected
    assert expected != np.float32(1.0)


def test_the_scale_makes_keys_as_large_as_what_is_asked_of_them() -> None:
    spec = make_spec()
    variance = random(HEADS, DIM, seed=1).exp().double()
    moment = random(HEADS, DIM, seed=2).exp().double()
    scale = arithmetic.find_pair_scale(variance, moment, spec).double()
    KeyTransform(spec, pair_scale=scale.float())  # alike in both channels
    torch.testing.assert_close(
        scale.log().mean(-1), torch.zeros(HEADS).double(), atol=1e-6, rtol=0
    )
    first, second = pair_index(spec)
    key = (variance * scale**2)[:, first] + (variance * scale**2)[:, second]
    query = (moment / scale**2)[:, first] + (moment / scale**2)[:, second]
    ratio = query / key
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5, atol=0)
    bounded = arithmetic.find_pair_scale(variance * 0, moment, spec)
    assert torch.equal(bounded, torch.ones_like(bounded)) or bounded.isfinite().all()
    variance[:, first[0]] = variance[:, second[0]] = 0
    assert float(arithmetic.find_pair_scale(variance, moment, spec).max()) == pytest.approx(16)


@pytest.mark.parametrize("tier", ["reference", "kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("large", [0.0, 30.0])
def test_attention_is_within_its_budget(tier: str, dtype: torch.dtype, large: float) -> None:
    """Of packed keys with the known term, against float64 attention over what they stand for.

    The budget is that of `tests.attention_budget`: twice the error of SDPA in the dtype of the
    queries over keys and values rounded to it, plus `2 u A`; and the rounding of the known term.
    """
    module: ModuleType = reference
    if tier == "kernels":
        pytest.importorskip("triton")
        from kvq import kernels

        module = kernels
    device = "cuda" if tier == "kernels" and torch.cuda.is_available() else "cpu"
    tokens, group = 33, 2
    spec = make_spec()
    keys = random(1, HEADS, tokens, DIM)
    values = random(1, HEADS, tokens, DIM, seed=6)
    mean = large * random(1, HEADS, DIM, seed=4) + 1.0
    scale = random_scale(spec)
    rows = arithmetic.rotary_rows(spec, 0, tokens)
    keys = keys + arithmetic.turn_mean(mean, rows, spec)
    query = random(tokens, HEADS * group, DIM, seed=9, dtype=dtype)
    packed = arithmetic.encode_keys(keys, mean, scale, rows, spec)
    caches = []
    for mode in ("int4", "smax4"):
        caches.append(new_paged_kv(5, 8, HEADS, DIM, mode, device=device))
    slots = torch.arange(tokens, device=device)
    kvq.reshape_and_cache(
        *(x[0].transpose(0, 1).contiguous().to(device) for x in (packed, values)), *caches, slots
    )
    bias = arithmetic.mean_logits(query[None], mean, rows, spec, DIM**-0.5)[0]
    output = module.paged_attention(
        arithmetic.scale_queries(query, scale).to(device),
        *caches,
        torch.arange(5, device=device)[None],
        torch.tensor([tokens], device=device),
        torch.tensor([0, tokens], device=device),
        scale=DIM**-0.5,
        features=AttentionFeatures(logit_bias=bias.to(device)),
    ).cpu()

    stored = [
        dequantize_exact(c.codes.cpu(), c.words.cpu(), c.mode, DIM).transpose(0, 1).flatten(1, 2)
        for c in caches
    ]
    exact_keys = stored[0][:, :tokens] / scale.double()[:, None]
    exact_keys = exact_keys + arithmetic.turn_mean(mean, rows, spec)[0].double()
    exact_values = stored[1][:, :tokens]
    assert exact_keys.dtype is torch.float64
    for head in range(HEADS * group):
        key, value = exact_keys[head // group], exact_values[head // group]
        q = query[:, head].double()
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = (DIM**-0.5 * q @ key.T).masked_fill(hidden, -math.inf).softmax(-1)
        exact = weights @ value
        with sdpa_kernel([SDPBackend.MATH]):
            like = F.scaled_dot_product_attention(
                query[None, :, head], key[None].to(dtype), value[None].to(dtype), is_causal=True
            )[0].double()
        allowed = 2 * (like - exact).abs().amax(-1)
        size = (weights @ value.abs()).amax(-1)
        allowed = allowed + 2 * torch.finfo(dtype).eps / 2 * size
        # A known term of size L is held to within L / 2**24, and weights to within twice that.
        known = bias[:, head].double().abs().masked_fill(hidden, 0.0).amax(-1)
        allowed = allowed + 2 * 2.0**-24 * known * size
        error = (output[:, head].double() - exact).abs().amax(-1)
        assert bool((error <= allowed).all()), (head, float((error / allowed).max()))


def test_refuses() -> None:
    spec = make_spec()
    row, scale = torch.ones(HEADS, DIM), random_scale(spec)
    for arguments, message in (
        ({}, "mean, mean_tokens or pair_scale must be given, got none"),
        ({"mean": row, "mean_tokens": 3}, "mean_tokens must be 0 with a mean, got 3"),
        ({"mean_tokens": -1}, "mean_tokens must not be negative, got -1"),
        ({"mean": row[0]}, r"mean must be \[KV heads, head_dim\]"),
        ({"mean": row, "pair_scale": scale[:1]}, r"pair_scale must be .* of shape \[2, 16\]"),
        ({"mean": row[:, :8]}, "mean must have the 12 channels that are rotated, got 8"),
        ({"mean": row * math.nan}, "mean must be finite, got a NaN or an infinity"),
        ({"pair_scale": 0 * row}, r"pair_scale must be positive, got 0\.0"),
        ({"pair_scale": random(HEADS, DIM).exp()}, "the same in both channels of a RoPE pair"),
    ):
        with pytest.raises(ValueError, match=message):
            KeyTransform(spec, **arguments)
    with pytest.raises(TypeError, match="mean must be float32, got float64"):
        KeyTransform(spec, mean=row.double())
    with pytest.raises(TypeError, match="mean_tokens must be an int, got float"):
        KeyTransform(spec, mean_tokens=2.0)  # type: ignore[arg-type]
