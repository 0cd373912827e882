"""Whether the compiler laid weights out as the transposition between threads needs them.

`movmatrix` moves what a thread has in neighboring registers, and Triton does not promise where it
puts an element. So each kernel that transposes is looked at once, when it is compiled.
"""

from __future__ import annotations

import re
from typing import Any, Final

#: Threads of the 16 x 8 result of a matrix operation, and the first of their registers: neighbors
#: along columns, then eight rows further.
_LANES: Final = "lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]"
_REGISTERS: Final = "register = [[0, 1], [8, 0]"
_INSTRUCTION: Final = "movmatrix"

_checked: set[str] = set()


def transposed_layouts(text: str) -> list[str]:
    """The layouts of all that is transposed in a kernel's TTGIR."""
    names = dict(re.findall(r"^(#\w+) = (#.*)$", text, re.MULTILINE))
    found = []
    for line in text.splitlines():
        if _INSTRUCTION in line:
            operand = re.search(r"tensor<\w+, (#\w+)> -> ", line)
            found.append(line if operand is None else names.get(operand[1], operand[1]))
    return found


def check_operand_layout(kernel: Any) -> None:
    """Refuse a compiled kernel whose transposed weights lie elsewhere.

    Args:
        kernel: What a launch hands back.

    Raises:
        RuntimeError: They do; what the kernel answers is wrong.
    """
    if kernel.hash in _checked:
        return
    for layout in transposed_layouts(kernel.asm["ttgir"]):
        if _LANES not in layout or _REGISTERS not in layout:
            raise RuntimeError(
                "attention weights must lie as a matrix operation leaves them to be transposed, "
                f"but this Triton compiler put them in {layout}: its answer would be wrong"
            )
    _checked.add(kernel.hash)
