"""Whether the compiler laid tensors out as the moves between threads need them.

`movmatrix` transposes what a thread has in neighboring registers, `shfl` asks a certain thread for
what follows its codes, and Triton does not promise where it puts an element. So each kernel that
moves something is looked at once, when it is compiled.
"""

from __future__ import annotations

import re
from typing import Any, Final

#: Threads of the 16 x 8 result of a matrix operation, and the first of their registers: neighbors
#: along columns, then eight rows further.
_LANES: Final = "lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]"
_REGISTERS: Final = "register = [[0, 1], [8, 0]"
_INSTRUCTION: Final = "movmatrix"
#: What `next_ptx` asks for, by the step to the next thread: neighbors along the integers of a key,
#: or tokens four at a time, of an operand of the older matrix operation, for one warp.
_STEP: Final = re.compile(r"add\.u32 n, l, (\d);")
_WIDTHS: Final = {"1": 2, "4": 4}
_OPERAND: Final = re.compile(
    r"tensor<16x16xi16, #ttg\.dot_op<\{opIdx = 0, parent = (#\w+), kWidth = (\d+)\}>> -> "
)
_MATRIX: Final = re.compile(r"versionMajor = 2, .*warpsPerCTA = \[1, 1\]")

_checked: set[str] = set()


def _layouts(text: str) -> dict[str, str]:
    """The layouts that a kernel's TTGIR names."""
    return dict(re.findall(r"^(#\w+) = (#.*)$", text, re.MULTILINE))


def transposed_layouts(text: str) -> list[str]:
    """The layouts of all that is transposed in a kernel's TTGIR."""
    names = _layouts(text)
    found = []
    for line in text.splitlines():
        if _INSTRUCTION in line:
            operand = re.search(r"tensor<\w+, (#\w+)> -> ", line)
            found.append(line if operand is None else names.get(operand[1], operand[1]))
    return found


def misplaced_neighbors(text: str) -> list[str]:
    """The instructions of a kernel's TTGIR that ask the wrong threads for what follows."""
    names = _layouts(text)
    found = []
    for line in text.splitlines():
        if "shfl.sync" in line:
            step, operand = _STEP.search(line), _OPERAND.search(line)
            if (
                step is None
                or operand is None
                or int(operand[2]) != _WIDTHS.get(step[1])
                or not _MATRIX.search(names.get(operand[1], ""))
            ):
                found.append(line.strip())
    return found


def check_operand_layout(kernel: Any) -> None:
    """Refuse a compiled kernel whose transposed weights, or shifted codes, lie elsewhere.

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
    if misplaced := misplaced_neighbors(kernel.asm["ttgir"]):
        raise RuntimeError(
            "codes of a trellis must lie as operands of a matrix operation to be shifted, but "
            f"this Triton compiler put them elsewhere: its answer would be wrong: {misplaced[0]}"
        )
    _checked.add(kernel.hash)
