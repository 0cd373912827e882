"""What Triton's interpreter needs in order to run here."""

from __future__ import annotations

from typing import Any


def take_one_element_bounds() -> None:
    """Let loops have bounds that are known at run time, with triton 3.6 and numpy 2.4 or later.

    There it makes integers of arrays of one element, which numpy refuses; one function sets up
    what its tensors do, and is wrapped.
    """
    from triton.runtime import interpreter

    set_up = interpreter._patch_lang_tensor

    def wrapped(tensor: Any, scope: Any) -> None:
        set_up(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = wrapped
