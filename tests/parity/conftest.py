"""What the interpreted kernels share."""

from __future__ import annotations

from types import ModuleType

import pytest

from kvq import reference


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> ModuleType:
    """The tier of that name, for tests that ask the same of both."""
    return reference if request.param == "reference" else pytest.importorskip("kvq.kernels")


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
