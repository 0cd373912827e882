"""The argument rules that hold in every tier, and their messages, once.

Messages read `"{argument} must {rule}, got {value}"`. A wrong type is a `TypeError`, a wrong value
a `ValueError`.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

#: The floating-point types a tier widens to float32. float64 is refused: it would round first.
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_E = TypeVar("_E", bound=Enum)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as `float32`."""
    return str(dtype).removeprefix("torch.")


def check_tensor(argument: str, value: object) -> Tensor:
    """`value`, which must be a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(value).__name__}")
    return value


def check_input(argument: str, value: object) -> Tensor:
    """`value`, which must be a tensor of rows in one of `INPUT_DTYPES`."""
    tensor = check_tensor(argument, value)
    if tensor.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"{argument} must be float32, float16 or bfloat16, got {dtype_name(tensor.dtype)}"
        )
    if tensor.ndim == 0:
        raise ValueError(f"{argument} must have at least one axis, got a scalar")
    return tensor


def check_dtype(argument: str, value: Tensor, *allowed: torch.dtype) -> None:
    """The dtype of `value` must be one of `allowed`."""
    if value.dtype not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in allowed)
        raise TypeError(f"{argument} must be {names}, got {dtype_name(value.dtype)}")


def check_shape(argument: str, value: Tensor, expected: tuple[int | None, ...], axes: str) -> None:
    """The shape of `value` must be `expected`, where `None` stands for any size."""
    shape = tuple(value.shape)
    if len(shape) != len(expected) or any(
        want is not None and have != want for have, want in zip(shape, expected, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{argument} must be {axes} of shape [{wanted}], got {list(shape)}")


def check_device_name(device: str) -> None:
    """A device that a command is told must be there.

    Raises:
        ValueError: It is a CUDA device, and torch finds none.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device must be one that torch finds, got {device!r}")


def check_same_device(argument: str, value: Tensor, other: str, reference: Tensor) -> None:
    """Two tensors of one call must be on one device."""
    if value.device != reference.device:
        raise ValueError(
            f"{argument} must be on the device of {other} ({reference.device}), got {value.device}"
        )


def resolve_enum(argument: str, value: object, kind: type[_E]) -> _E:
    """A member of `kind`, from the member itself or from its value."""
    if isinstance(value, kind):
        return value
    try:
        return kind(value)
    except ValueError:
        valid = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{argument} must be one of {valid}, got {value!r}") from None
