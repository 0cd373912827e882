"""What the interpreted kernels share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    """Calls between `@triton.jit` functions, without patching `triton.language` at each again.

    The launch has patched it, and undoes it; that takes half of the time of a small launch.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return

    def call(self, *args, **kwargs):
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
