"""Arguments that work, and values that no tensor argument may have."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import kvq
from kvq.tier import PagedKV, new_paged_kv

HEADS, HEAD_DIM = 2, 32
META = torch.device("meta")


def rows(*shape: int) -> Tensor:
    """Numbers from -1 to 1."""
    shape = shape or (3, HEADS, HEAD_DIM)
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def cache(mode: str = "int4", blocks: int = 3, block_size: int = 4) -> PagedKV:
    return new_paged_kv(blocks, block_size, HEADS, HEAD_DIM, mode)


def indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def nested(dense: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor([dense.flatten()])


def no_tensors(argument: str, dense: Tensor) -> list[tuple[Any, type[Exception], str]]:
    """Rows for what is no tensor, or has no strides."""
    wanted = f"{argument} must be a torch.Tensor, got"
    return [
        (None, TypeError, f"{wanted} NoneType"),
        (dense.tolist(), TypeError, f"{wanted} list"),
        (dense.numpy(), TypeError, f"{wanted} ndarray"),
        (
            dense.to_sparse(),
            TypeError,
            f"{argument} must be a dense tensor, got a sparse_coo one",
        ),
        (
            nested(dense),
            TypeError,
            f"{argument} must be a dense tensor, got a nested one",
        ),
    ]


def bad_rows(argument: str, dense: Tensor) -> list[tuple[Any, type[Exception], str]]:
    """Rows for what `quantize` and `hadamard_transform` do not take."""
    wanted = f"{argument} must be float32, float16 or bfloat16, got"
    return [
        *no_tensors(argument, dense),
        (dense.double(), TypeError, f"{wanted} float64"),
        (dense.to(torch.complex64), TypeError, f"{wanted} complex64"),
        (dense.int(), TypeError, f"{wanted} int32"),
        (dense > 0, TypeError, f"{wanted} bool"),
        (
            torch.tensor(1.0),
            ValueError,
            f"{argument} must have at least one axis, got a scalar",
        ),
    ]


def bad_caches(argument: str) -> list[tuple[Any, type[Exception], str]]:
    """Rows for what is no side of a paged cache, under the name that the function has for it."""
    good = cache()
    return [
        (None, TypeError, f"{argument} must be a PagedKV, got NoneType"),
        (tuple(good), TypeError, f"{argument} must be a PagedKV, got tuple"),
        (
            good._replace(mode="int4"),
            TypeError,
            f"{argument}.mode must be a Mode, got str",
        ),
        (
            good._replace(codes=good.codes.int()),
            TypeError,
            f"{argument}.codes must be uint8, got int32",
        ),
        (
            good._replace(codes=good.codes.numpy()),
            TypeError,
            f"{argument}.codes must be a torch.Tensor, got ndarray",
        ),
        (
            good._replace(words=good.words.half()),
            TypeError,
            f"{argument}.words must be float32, got float16",
        ),
        (
            good._replace(words=good.words[:, :1]),
            ValueError,
            f"{argument}.codes must be [blocks, heads, block_size, bytes] in the order of its "
            f"layout, with {argument}.words the same without the last axis, "
            "got [3, 2, 4, 16] and [3, 1, 4]",
        ),
        (
            good._replace(words=good.words.to(META)),
            ValueError,
            f"{argument}.words must be on the device of {argument}.codes (cpu), got meta",
        ),
        (
            good._replace(layout="hnd"),
            ValueError,
            f"{argument}.layout must be one of 'HND', 'NHD', got 'hnd'",
        ),
        (
            good._replace(mode=kvq.mode("int2"), codes=good.codes[..., :3].contiguous()),
            ValueError,
            f"{argument}.codes must hold rows of its mode: "
            "head_dim must be divisible by 16 for a Hadamard rotation, got 12",
        ),
    ]
