"""Functions from outside: found by name, called, and told apart from what they are asked."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from kvq.modes import Mode


def load_function(option: str, text: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules of the working folder are found too.

    Args:
        option: What to call it in messages.
        text: Such as `my_kernels.int4:quantize`.

    Raises:
        ValueError: There is no such module or function, or the module cannot be imported.
    """
    module_name, colon, path = text.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{option} must be module:function, got {text!r}")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{option} must name a module that can be imported, got {text!r} ({reason})"
        ) from error
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ValueError(f"{option} must name a function of {module_name}, got {path!r}")
    function: Callable[..., Any] = found
    return function


def mode_argument(function: Callable[..., Any], mode: Mode) -> Mode | str:
    """What a function is told of a mode: its full name, or the mode itself if it is kvq's."""
    module = getattr(function, "__module__", None) or ""
    return mode if module.partition(".")[0] == "kvq" else mode.name


def call(
    option: str, function: Callable[..., Any], case: str, *arguments: object, **named: object
) -> Any:
    """What the function returns.

    Raises:
        ValueError: It raised; the message says what, and for which case.
    """
    try:
        return function(*arguments, **named)
    except Exception as error:  # whatever it is, it is the function's
        raise ValueError(
            f"{option} must return, got {type(error).__name__} for {case}: {error}"
        ) from error
