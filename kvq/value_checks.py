"""The argument rules of plain values, and their messages, once. They need no torch.

`kvq.checks` hands them on beside the rules of tensors. A wrong type is a `TypeError`, a wrong
value a `ValueError`. Where a number is asked for, `True` is none, and numbers of numpy other than
its float64 are refused: much of what is checked here is written to files as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, cast

_E = TypeVar("_E", bound=Enum)
_T = TypeVar("_T")


def check_kind(argument: str, value: object, kind: type[_T], *, none: str = "") -> _T:
    """`value`, which must be a `kind`; `none` is what else the message allows."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOaeio" else "a"
        raise TypeError(
            f"{argument} must be {article} {kind.__name__}{none}, got {type(value).__name__}"
        )
    return value


def check_optional(argument: str, value: object, kind: type[_T]) -> _T | None:
    """`value`, which must be a `kind` or `None`."""
    return None if value is None else check_kind(argument, value, kind, none=" or None")


def check_bool(argument: str, value: object) -> bool:
    """`value`, which must be True or False: any other object would count as one of them."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be a bool, got {type(value).__name__}")
    return value


def check_int(
    argument: str, value: object, least: int | None = None, most: int | None = None
) -> int:
    """`value`, which must be an integer within the bounds that are given."""
    # A size in a graph in the making is torch's `SymInt`.
    if type(value) is not int and (
        isinstance(value, bool) or not (isinstance(value, int) or type(value).__name__ == "SymInt")
    ):
        raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
    number = cast(int, value)
    if least is not None and number < least:
        raise ValueError(f"{argument} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{argument} must be at most {most}, got {number}")
    return number


def check_real(argument: str, value: object) -> float:
    """`value`, which must be a real number, though it may be a NaN or infinite."""
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, int | float)
    ):
        raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
    return cast(float, value)


def check_number(argument: str, value: object, *, positive: bool = False) -> float:
    """`value`, which must be a finite real number, and above 0 if `positive`."""
    number = check_real(argument, value)
    if positive and not 0 < number < math.inf:
        raise ValueError(f"{argument} must be positive and finite, got {number}")
    if not math.isfinite(number):
        raise ValueError(f"{argument} must be finite, got {number}")
    return number


def check_seed(seed: object) -> int:
    """`seed`, which must be one that every generator takes."""
    return check_int("seed", seed, 0, 2**63 - 1)


def check_share(argument: str, value: object) -> float:
    """`value`, which must be a number from 0 to 1."""
    number = check_real(argument, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{argument} must be from 0 to 1, got {number}")
    return number


def check_text(argument: str, value: object) -> str:
    """`value`, which must be a string that is not empty."""
    text = check_kind(argument, value, str)
    if not text:
        raise ValueError(f"{argument} must not be empty, got {text!r}")
    return text


def check_tuple(argument: str, value: object, kind: type[_T] | None = None) -> tuple[_T, ...]:
    """`value`, which must be a tuple: what holds it is compared and hashed.

    With a `kind` of `int` or `float` its items must be such numbers.
    """
    items = check_kind(argument, value, tuple)
    for index, item in enumerate(items):
        if kind is int:
            check_int(f"{argument}[{index}]", item)
        elif kind is float:
            check_real(f"{argument}[{index}]", item)
    return items


def check_mapping(argument: str, value: object) -> Mapping[Any, Any]:
    """`value`, which must be a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{argument} must be a Mapping, got {type(value).__name__}")
    return value


def check_list(argument: str, value: object, kind: type[_T] | None = None) -> Sequence[_T]:
    """`value`, which must be a list or a tuple; with a `kind`, of such items."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{argument} must be a list or a tuple, got {type(value).__name__}")
    for index, item in enumerate(value):
        if kind is int:
            check_int(f"{argument}[{index}]", item)
        elif kind is not None:
            check_kind(f"{argument}[{index}]", item, kind)
    return value


def check_strings(argument: str, value: object) -> Mapping[str, str]:
    """`value`, which must be a mapping of strings by name, as files hold them."""
    strings = check_mapping(argument, value)
    for name, item in strings.items():
        if not isinstance(name, str) or not isinstance(item, str):
            raise TypeError(f"{argument} must hold strings by name, got {item!r} for {name!r}")
    return strings


def check_choice(argument: str, value: object, valid: Sequence[str]) -> str:
    """`value`, which must be one of some names."""
    if not isinstance(value, str) or value not in valid:
        raise ValueError(f"{argument} must be one of {', '.join(valid)}, got {value!r}")
    return value


def resolve_enum(argument: str, value: object, kind: type[_E]) -> _E:
    """A member of `kind`, from the member itself or from its value."""
    if isinstance(value, kind):
        return value
    try:
        return kind(value)
    except ValueError:
        valid = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{argument} must be one of {valid}, got {value!r}") from None
