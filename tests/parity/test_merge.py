"""`merge_attention`: the kernel against the reference and the definition."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from kvq import reference
from kvq.tier import AttentionOutput
from tests.reference.test_attention import BAD_MERGES

kernels = pytest.importorskip("kvq.kernels")

#: Half an ulp of 1.0 of each dtype of an output, and of a log-sum-exp.
UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
DTYPES = [
    *((dtype, torch.float32) for dtype in UNIT),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float64),
]


def make_parts(
    number: int,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    spread: float = 3.0,
) -> list[AttentionOutput]:
    """Gaussian parts, some of them empty, NaN then in their output."""
    generator = torch.Generator().manual_seed(number)
    parts = []
    for _ in range(number):
        output = torch.randn(shape, generator=generator)
        lse = torch.randn(shape[:2], generator=generator) * spread
        empty = torch.rand(shape[:2], generator=generator) < 0.3
        output[empty], lse[empty] = math.nan, -math.inf
        parts.append(AttentionOutput(output.to(device, dtypes[0]), lse.to(device, dtypes[1])))
    return parts


def assert_within_budget(parts: list[AttentionOutput], sinks: Tensor | None = None) -> None:
    """Twice the error of the reference in the dtypes of the parts, and of rounding once more."""
    exact = [AttentionOutput(o.double(), lse.double()) for o, lse in parts]
    expected = reference.merge_attention(exact, sinks)
    like = reference.merge_attention(parts, sinks)
    actual = kernels.merge_attention(parts, sinks)
    magnitudes = [AttentionOutput(o.abs(), lse) for o, lse in exact]
    for name, size in (
        ("output", reference.merge_attention(magnitudes, sinks).output.amax(-1)),
        ("log_sum_exp", expected.log_sum_exp.abs()),
    ):
        found, right, near = (getattr(x, name) for x in (actual, expected, like))
        assert found.dtype is near.dtype
        assert found.shape == near.shape
        assert torch.equal(found.isnan(), near.isnan())
        finite = near.isfinite()
        assert torch.equal(found[~finite & ~near.isnan()], near[~finite & ~near.isnan()])
        error, own = ((x.double() - right).masked_fill(~finite, 0.0).abs() for x in (found, near))
        if name == "output":
            error, own = error.amax(-1), own.amax(-1)
            finite = finite.any(-1)
        # Where the oracle is no finer than what it judges, its own error counts too.
        finest = found.dtype is torch.float64
        budget = 2 * own + (2 + 2 * len(parts) * finest) * UNIT[found.dtype] * size
        assert (error <= budget)[finite].all(), name


@pytest.mark.parametrize("number", [1, 2, 3, 9])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_any_number_of_parts(
    number: int, with_sinks: bool, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(number)
    sinks = torch.randn(3, generator=generator).to(device) if with_sinks else None
    assert_within_budget(make_parts(number, (7, 3, 40), dtypes, device), sinks)


@pytest.mark.parametrize("spread", [0.0, 30.0, 3e4])
def test_far_apart(spread: float, device: torch.device) -> None:
    dtypes = (torch.float32, torch.float32)
    assert_within_budget(make_parts(4, (5, 2, 16), dtypes, device, spread))


def test_what_is_not_finite(device: torch.device) -> None:
    values = (-math.inf, math.inf, math.nan, 0.0, -3e38, 3e38)
    lse = torch.cartesian_prod(*[torch.tensor(values)] * 2)[:, None]  # [36, 1 head]
    for output in ((1.0, 2.0), (math.nan, 2.0), (math.inf, -math.inf), (3e38, 3e38)):
        parts = [
            AttentionOutput(
                torch.full((36, 1, 2), output[i], device=device), lse[..., i].to(device)
            )
            for i in range(2)
        ]
        for sink in (None, -math.inf, math.inf, math.nan, 1.0):
            sinks = None if sink is None else torch.tensor([sink], device=device)
            actual = kernels.merge_attention(parts, sinks)
            expected = reference.merge_attention(parts, sinks)
            torch.testing.assert_close(actual, expected, equal_nan=True, rtol=2e-7, atol=0)


def test_a_part_that_sees_nothing_changes_no_bit(device: torch.device) -> None:
    parts = make_parts(3, (6, 2, 24), (torch.bfloat16, torch.float32), device)
    empty = AttentionOutput(
        torch.full_like(parts[0].output, math.nan),
        torch.full_like(parts[0].log_sum_exp, -math.inf),
    )
    alone = kernels.merge_attention(parts)
    for place in range(4):
        more = kernels.merge_attention([*parts[:place], empty, *parts[place:]])
        assert torch.equal(more.output, alone.output)
        assert torch.equal(more.log_sum_exp, alone.log_sum_exp)


def test_a_row_is_its_own(device: torch.device) -> None:
    parts = make_parts(3, (9, 4, 24), (torch.float16, torch.float32), device)
    whole = kernels.merge_attention(parts)
    for token in range(9):
        alone = kernels.merge_attention(
            [AttentionOutput(o[token : token + 1], lse[token : token + 1]) for o, lse in parts]
        )
        assert torch.equal(alone.output[0], whole.output[token])
        assert torch.equal(alone.log_sum_exp[0], whole.log_sum_exp[token])


def test_views_are_read_as_they_lie(device: torch.device) -> None:
    parts = make_parts(2, (6, 4, 24), (torch.float32, torch.float32), device)
    expected = kernels.merge_attention(parts, torch.arange(4.0, device=device))
    views = [
        AttentionOutput(o.transpose(0, 1).contiguous().transpose(0, 1), lse.T.contiguous().T)
        for o, lse in parts
    ]
    sinks = torch.arange(0, 4, 0.5, device=device)[::2]
    for actual, right in zip(kernels.merge_attention(views, sinks), expected, strict=True):
        assert torch.equal(actual, right)


def test_no_tokens(device: torch.device) -> None:
    parts = make_parts(2, (0, 4, 24), (torch.float32, torch.float32), device)
    output, lse = kernels.merge_attention(parts)
    assert output.shape == (0, 4, 24)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("parts", "sinks", "error", "message"), BAD_MERGES.values(), ids=BAD_MERGES
)
def test_bad_merges(
    parts: list[AttentionOutput], sinks: Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        kernels.merge_attention(parts, sinks)
