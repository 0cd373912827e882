"""Frozen dataclasses as JSON objects, and back, checked against their annotations.

`Mode`, `Codebook` and what they are made of travel in the metadata of files this way. A field that
a file does not have takes its default, so that files outlive new fields; a field that the class
does not have is refused. A field that a class works out by itself (`init=False`) stays at home.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from kvq.checks import resolve_enum

_T = TypeVar("_T")


def to_json(value: object) -> Any:
    """A value made of dataclasses, enums, tuples and plain values, as JSON can hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: to_json(getattr(value, item.name)) for item in fields(value) if item.init
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[_T], value: object, argument: str) -> _T:
    """The `kind` that `to_json` turned into `value`.

    Args:
        kind: A dataclass.
        value: What `json.loads` gave.
        argument: What to call it in messages.

    Raises:
        ValueError: A field is missing, unknown, of the wrong kind, or breaks a rule of its class.
    """
    if not is_dataclass(kind):
        raise TypeError(f"kind must be a dataclass, got {kind!r}")
    return cast(_T, _parse(kind, value, argument))


def _parse(kind: Any, value: object, path: str) -> object:
    if is_dataclass(kind):
        return _parse_record(kind, value, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return resolve_enum(path, value, kind)
    arguments = get_args(kind)
    if get_origin(kind) is UnionType:
        (inner,) = (item for item in arguments if item is not NoneType)
        return None if value is None else _parse(inner, value, path)
    if get_origin(kind) is tuple:
        return _parse_tuple(arguments, value, path)
    # JSON writes 1.0 as it likes, and Python counts True among the integers.
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{path} must be a float, got an integer past its range") from None
    if type(value) is not kind:
        raise ValueError(f"{path} must be {kind.__name__}, got {value!r}")
    return value


def _parse_tuple(kinds: tuple[Any, ...], value: object, path: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{path} must be a list, got {value!r}")
    each: Iterable[Any] = kinds
    if kinds[-1] is Ellipsis:
        each = repeat(kinds[0], len(value))
    elif len(value) != len(kinds):
        raise ValueError(f"{path} must hold {len(kinds)} items, got {len(value)}")
    return tuple(
        _parse(kind, item, f"{path}[{index}]")
        for index, (kind, item) in enumerate(zip(each, value, strict=True))
    )


def _parse_record(kind: Any, value: object, path: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{path} must be a JSON object, got {value!r}")
    hints = get_type_hints(kind)
    known = {item.name: item for item in fields(kind) if item.init}
    unknown = value.keys() - known.keys()
    if unknown:
        raise ValueError(f"{path} must have no field {min(unknown)!r}, got one")
    for name, item in known.items():
        if name not in value and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{path}.{name} must be present, got nothing")
    parsed = {name: _parse(hints[name], item, f"{path}.{name}") for name, item in value.items()}
    return kind(**parsed)
