"""The kinds of agreement. A failure says how many differ, where, and in which part of the bits."""

from __future__ import annotations

import torch
from torch import Tensor


def describe_mismatch(actual: Tensor, expected: Tensor) -> str:
    """Empty if equal to the bit; else the count, the first and last place, and the split."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"{list(actual.shape)} {actual.dtype} against {list(expected.shape)} {expected.dtype}"
        )
    actual, expected = actual.cpu().contiguous(), expected.cpu().contiguous()
    if actual.dtype is torch.float32:
        left, right = actual.view(torch.int32), expected.view(torch.int32)
    elif actual.dtype in (torch.float16, torch.bfloat16):
        left, right = actual.view(torch.int16), expected.view(torch.int16)
    else:
        left, right = actual, expected
    differs = (left != right).nonzero()
    if not len(differs):
        return ""
    places = [tuple(differs[i].tolist()) for i in (0, -1)]
    text = f"{len(differs)} of {left.numel()} differ, first {places[0]}, last {places[1]}"
    for place in places:
        text += f"; at {place}: {actual[place].item()!r} not {expected[place].item()!r}"
    if actual.dtype is torch.float32:
        changed = (left ^ right)[tuple(differs.T)]
        parts = {"sign": -0x80000000, "exponent": 0x7F800000, "mantissa": 0x007FFFFF}
        split = {name: int(((changed & mask) != 0).sum()) for name, mask in parts.items()}
        text += f"; {split}"
    return text


def assert_bit_exact(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal to the bit: float32 tensors are compared as int32, those of 16 bits as int16."""
    text = describe_mismatch(actual, expected)
    assert not text, f"{what}: {text}"
