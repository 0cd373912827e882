"""Inline PTX in numpy: what the instructions of an operand do to many registers at a time."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

Register = NDArray[np.uint64]

_WORD: Final = np.uint64(0xFFFFFFFF)


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Bit by bit, the bit of the table at the number that the bits of a, b and c make."""
    out = np.zeros_like(a)
    for index in range(8):
        chosen = [x if index >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
        out |= (table >> np.uint64(index) & np.uint64(1)) * (chosen[0] & chosen[1] & chosen[2])
    return out


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    """Four bytes of `b:a`, by nibbles; bit 3 of a nibble asks for the sign of its byte."""
    data = b << np.uint64(32) | a
    out = np.zeros_like(data)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = data >> np.uint64(8) * (nibble & np.uint64(7)) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        out |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return out


def _shuffle(a: Register, lane: Register, clamp: Register, members: Register) -> Register:
    """What other threads have, `[..., 32]`."""
    assert (clamp == 31).all()
    assert (members == _WORD).all()
    return np.take_along_axis(a, lane.astype(np.int64), axis=-1)


_STEPS: Final = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "setp.eq.u32": lambda a, b: (a == b).astype(np.uint64),
    "setp.ge.u32": lambda a, b: (a >= b).astype(np.uint64),
    "selp.b32": lambda a, b, p: np.where(p == 1, a, b),
    "shfl.sync.idx.b32": _shuffle,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
}


def run_ptx(text: str, *inputs: Register) -> Register:
    """What the instructions leave in `$0`, if `$1`, `$2`, ... hold the inputs (32 bits each)."""
    return run_ptx_to(1, text, *inputs)[0]


def run_ptx_to(outputs: int, text: str, *inputs: Register) -> list[Register]:
    """The same with several outputs before the inputs; the last axis is that of threads, if asked.

    Registers start as noise, so a read of one that was never written shows.
    """
    noise = np.random.default_rng(0)
    registers = {f"${i + outputs}": x.astype(np.uint64) for i, x in enumerate(inputs)}
    lanes = np.arange(inputs[0].shape[-1], dtype=np.uint64)
    registers["%laneid"] = lanes
    registers["%lanemask_lt"] = (np.uint64(1) << lanes % np.uint64(32)) - np.uint64(1)
    for line in text.strip("{} ").split(";"):
        found = re.fullmatch(r"\s*(\S+)\s+(.*?)\s*", line)
        if found is None:
            continue
        names = [re.sub(r"^\.\w+ ", "", name.strip()) for name in found[2].split(",")]
        if found[1] == ".reg":
            for name in names:
                registers[name] = noise.integers(2**32, size=inputs[0].shape, dtype=np.uint64)
            continue
        out, *rest = names
        numbers = [registers[x] if x in registers else np.uint64(int(x, 0)) for x in rest]
        registers[out] = _STEPS[found[1]](*np.broadcast_arrays(*numbers)) & _WORD
    return [registers[f"${i}"] for i in range(outputs)]


def halves_of(register: Register) -> NDArray[np.float64]:
    """The two float16 numbers of a register, `[..., 2]`."""
    halves = np.stack((register & np.uint64(0xFFFF), register >> np.uint64(16)), axis=-1)
    return halves.astype(np.uint16).view(np.float16).astype(np.float64)


def bytes_of(register: Register) -> NDArray[np.int64]:
    """The four signed bytes of a register, `[..., 4]`."""
    parts = [register >> np.uint64(8 * i) & np.uint64(255) for i in range(4)]
    return np.stack(parts, axis=-1).astype(np.uint8).view(np.int8).astype(np.int64)
