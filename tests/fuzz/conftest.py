"""What the interpreted kernels share here too."""

from __future__ import annotations

from tests.parity.conftest import _quick_interpreter

__all__ = ["_quick_interpreter"]
