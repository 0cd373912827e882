"""How many variants of each kernel there are: compiled, or such as a GPU would compile."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

#: Variants of a kernel that calls of one mode may compile; attention has one for one new token of
#: a sequence, for few, for more and for many.
MOST_VARIANTS = defaultdict(lambda: 3, attend_kernel=4, combine_kernel=4)


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    #: What triton makes a variant of: constants and options, and the kinds of other arguments.
    variant: tuple[Any, ...]
    #: The grid, and every argument that is no tensor.
    numbers: tuple[Any, ...]


def _modules() -> list[Any]:
    package = importlib.import_module("kvq.kernels")
    names = [name for _, name, _ in pkgutil.iter_modules(package.__path__, "kvq.kernels.")]
    return [importlib.import_module(name) for name in names]


def count_compiled() -> dict[str, int]:
    """Variants of each kernel that this process has compiled, or found compiled."""
    from triton.runtime.jit import JITFunction

    kernels = {
        id(kernel): kernel
        for module in _modules()
        for kernel in vars(module).values()
        if isinstance(kernel, JITFunction)
    }
    return {
        kernel.fn.__name__: count
        for kernel in kernels.values()
        if (count := sum(len(known[0]) for known in kernel.device_caches.values()))
    }


def _kind(value: object, specialized: bool) -> object:
    """What triton makes a variant of: the width of an integer, and being 1 or divisible by 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        return width, specialized and (value == 1, value % 16 == 0)
    return type(value)


@contextmanager
def recorded_launches(patch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Launches are chosen as on a Hopper GPU, recorded, and not run: results are no numbers."""
    from triton.runtime.interpreter import InterpretedFunction

    from kvq.kernels import attention, launch

    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        parameters = inspect.signature(kernel.fn).parameters
        given = dict(zip(parameters, args, strict=False)) | kwargs
        plain = set(kernel.kwargs.get("do_not_specialize") or ())
        parts = []
        for name, value in given.items():
            constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
            parts.append((name, value if constant else _kind(value, name not in plain)))
        numbers = [item for item in given.items() if not isinstance(item[1], torch.Tensor)]
        found.append(Launch(kernel.fn.__name__, tuple(parts), (grid, *numbers)))

    def forget_choices() -> None:
        for module in _modules():
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()

    forget_choices()
    with patch.context() as here:
        here.setattr(launch, "INTERPRETED", False)
        for name in ("has_e4m3_cast", "has_early_launch"):
            here.setattr(launch, name, lambda device: True)
        here.setattr(launch, "check_device", lambda argument, tensor: None)
        here.setattr(attention, "check_operand_layout", lambda kernel: None)
        here.setattr(
            InterpretedFunction,
            "__getitem__",
            lambda self, grid: partial(run, self, grid=grid, warmup=False),
        )
        yield found
    forget_choices()
