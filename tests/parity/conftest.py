"""What the interpreted kernels share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    """Calls between `@triton.jit` functions patch `triton.language` once for each file.

    The interpreter does so at each call, which takes a third of the time of a small launch.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patched = set()

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
