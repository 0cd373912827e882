"""The argument rules that hold in every tier, and their messages, once.

Messages read `"{argument} must {rule}, got {value}"`. A wrong type is a `TypeError`, a wrong value
a `ValueError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvq.value_checks import (
    check_bool,
    check_choice,
    check_int,
    check_kind,
    check_list,
    check_mapping,
    check_number,
    check_optional,
    check_real,
    check_seed,
    check_share,
    check_strings,
    check_text,
    check_tuple,
    resolve_enum,
)

__all__ = [
    "INPUT_DTYPES",
    "check_bool",
    "check_choice",
    "check_device",
    "check_device_name",
    "check_dtype",
    "check_input",
    "check_int",
    "check_kind",
    "check_list",
    "check_mapping",
    "check_number",
    "check_optional",
    "check_real",
    "check_same_device",
    "check_seed",
    "check_shape",
    "check_share",
    "check_storage",
    "check_strings",
    "check_tensor",
    "check_text",
    "check_tuple",
    "check_values_are_there",
    "dtype_name",
    "resolve_enum",
]

#: The floating-point types a tier widens to float32. float64 is refused: it would round first.
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """`torch.float32` as `float32`."""
    return str(dtype).removeprefix("torch.")


def check_tensor(argument: str, value: object) -> Tensor:
    """`value`, which must be a tensor with strides."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else dtype_name(value.layout)
        raise TypeError(f"{argument} must be a dense tensor, got a {layout} one")
    return value


def check_values_are_there(argument: str, value: Tensor) -> None:
    """A tensor that is worked on must have values, which one on the device `meta` has not."""
    if value.is_meta:
        raise ValueError(f"{argument} must be on a device that holds values, got meta")


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


def check_storage(argument: str, dtype: object) -> torch.dtype:
    """`dtype`, which must be one of `INPUT_DTYPES`."""
    found = check_kind(argument, dtype, torch.dtype)
    if found not in INPUT_DTYPES:
        raise TypeError(
            f"{argument} must be float32, float16 or bfloat16, got {dtype_name(found)}"
        )
    return found


def check_shape(argument: str, value: Tensor, expected: tuple[int | None, ...], axes: str) -> None:
    """The shape of `value` must be `expected`, where `None` stands for any size."""
    shape = tuple(value.shape)
    if len(shape) != len(expected) or any(
        want is not None and have != want for have, want in zip(shape, expected, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{argument} must be {axes} of shape [{wanted}], got {list(shape)}")


def check_device(argument: str, device: torch.device | str) -> torch.device:
    """The device of a name that torch knows, though it may not be there."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{argument} must be one that torch knows, got {device!r}") from None


def check_device_name(device: torch.device | str) -> None:
    """A device that a command is told must be there.

    Raises:
        ValueError: It is none that torch knows, or torch finds none on this machine.
    """
    kind = check_device("device", device)
    module = getattr(torch, kind.type, None)
    if module is None or not module.is_available() or (kind.index or 0) >= module.device_count():
        raise ValueError(f"device must be one that torch finds, got {device!r}")


def check_same_device(argument: str, value: Tensor, other: str, reference: Tensor) -> None:
    """Two tensors of one call must be on one device."""
    if value.device != reference.device:
        raise ValueError(
            f"{argument} must be on the device of {other} ({reference.device}), got {value.device}"
        )
