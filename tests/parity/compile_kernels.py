"""Compile the fused write for a target without a GPU, and say what the compiler made of it.

A process of its own, since the tests run the kernels interpreted:

    python -m tests.parity.compile_kernels cuda:90 int4 lloyd4

prints one JSON object a line: mode, target, kernel, count of fused multiply-adds, how many of them
the guess of a code does not explain, forbidden instructions, bytes of local memory. A trellis mode
has two kernels: the search goes before the write.
"""

from __future__ import annotations

import inspect
import json
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvq.kernels import cache, launch
from kvq.kernels import trellis as search_kernels
from kvq.kernels.quantize import row_spec
from kvq.modes import Mode
from kvq.modes import mode as find_mode
from kvq.trellis import Trellis

#: Approximate, flushing or truncating forms of what must be exact: in PTX, in LLVM's flags and
#: attributes, and in AMD's assembly, where mode 3 keeps subnormals.
FORBIDDEN_PTX = re.compile(
    r"\b\w+(?:\.\w+)*\.(?:full|approx|ftz)\b[.\w]*|\b(?:div|sqrt|rcp|add|mul|sub)\.rz[.\w]*f32"
)
FORBIDDEN_LLVM = re.compile(
    r"\bf(?:add|sub|mul|div)(?: \w+)*? (?:fast|contract|reassoc|arcp|afn)\b"
    r"|\"denormal-fp-math(?:-f32)?\"=\"(?!ieee)[^\"]*\"|@llvm\.fmuladd\.\w+"
)
FORBIDDEN_AMD = re.compile(r"float_denorm_mode_32 [^3\s]|\bv_(?:mad|mac)_f32\w*")


def compile_write(
    mode: Mode, target: GPUTarget, head_dim: int = 128
) -> triton.compiler.CompiledKernel:
    """The fused write of one mode for bf16 keys and values."""
    tile = launch.row_tile(mode, head_dim, 65_536)
    spec = row_spec(mode, head_dim, tile.padded, torch.bfloat16)
    cuda = target.backend == "cuda"
    if not cuda:
        spec = replace(spec, guess=(), ptx=False)
    kernel = cache._reshape_and_cache_kernel
    names = list(inspect.signature(kernel.fn).parameters)
    fixed = {
        "KEY_SPEC": spec,
        "VALUE_SPEC": spec,
        "KEY_R": tile.rows,
        "VALUE_R": tile.rows,
        "KEY_UNIT": 4,
        "VALUE_UNIT": 4,
        "KEY_ALIGN": 4,
        "VALUE_ALIGN": 4,
        "CAST": cuda and int(target.arch) >= 90,
        "ONE_PATH": True,
        "SCAN": False,
        "WIDTH": 32,
        "TOKENS": tile.rows,
    }
    kinds = {
        r".*_codes_ptr": "*i32",
        r".*_words_ptr": f"*i{8 * mode.word.num_bytes}",
        r".*_table_ptr": "*fp32",
        r".*_states_ptr": "*i16",
        r"slot_ptr": "*i64",
        r"claims_ptr": "*i32",
        r"(key|value)_ptr": "*bf16",
        r".*_block|num_slots": "i64",
    }
    signature = {
        name: "constexpr"
        if name in fixed
        else next((kind for form, kind in kinds.items() if re.fullmatch(form, name)), "i32")
        for name in names
    }
    aligned = [n for n in names if n.endswith("_ptr") or n in ("key_token", "key_head")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = launch.options(tile, mode)
    if not cuda:
        options.pop("maxnreg")
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=target, options=options)


def compile_search(
    trellis: Trellis, target: GPUTarget, head_dim: int = 128
) -> triton.compiler.CompiledKernel:
    """The search of a trellis, which goes before the write."""
    kernel = search_kernels._search_kernel
    plan = launch.search_plan(65_536)
    fixed = {"D": head_dim, "BITS": trellis.bits, "WINDOW_BITS": trellis.window_bits}
    fixed["R"] = plan.rows
    kinds = {"z_ptr": "*fp32", "states_ptr": "*i16", "choices_ptr": "*u8", "table_ptr": "*fp32"}
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in kinds}
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=target, options=plan.options())


def local_bytes(compiled: triton.compiler.CompiledKernel) -> int:
    """Bytes of local memory of a thread: what spilled."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        found = subprocess.run(
            (tool, "-res-usage", file.name), capture_output=True, text=True, check=True
        )
    return int(re.findall(r"STACK:(\d+)", found.stdout + found.stderr)[0])


def unexplained_sums(ptx: str, guess: tuple[float, ...]) -> int:
    """Fused multiply-adds whose addend is no constant of `search_guess`: contracted sums."""
    constants = {as_bits(value) for value in (*guess[1:], 12582912.0)}
    held = dict(re.findall(r"\bmov\.\w+\s+(%\w+), (0f[0-9A-Fa-f]{8}|-?\d+);", ptx))
    packed = dict(re.findall(r"\bmov\.b64\s+(%\w+), \{(%\w+), ?\2\};", ptx))
    found = []
    for operand in re.findall(r"\bfma\.[\w.]+\s+[^;]*?([%\w]+)\s*;", ptx):
        register = packed.get(operand, operand)
        value = held.get(register, register)
        if re.fullmatch(r"-?\d+", value):
            value = f"{int(value) % 2**32:08X}"
        found.append(value.removeprefix("0f").upper())
    return sum(bits not in constants for bits in found)


def as_bits(value: float) -> str:
    """The bits of a float32, in hexadecimal."""
    return struct.pack(">f", value).hex().upper()


def amd_fused(assembly: str) -> tuple[int, int]:
    """Fused multiply-adds, and those beyond the five that a division or a square root may take."""
    fused, exact = (
        len(re.findall(rf"\bv_{form}\w*", assembly))
        for form in (r"(?:pk_)?(?:fma|fmac|fmaak|fmamk)_f32", r"(?:div_fixup|sqrt|rsq)_f32")
    )
    return fused, max(0, fused - 5 * exact)


def examine(
    compiled: triton.compiler.CompiledKernel, target: GPUTarget, guess: tuple[float, ...] = ()
) -> dict[str, object]:
    """What the compiler made of a kernel whose codes are guessed so."""
    if target.backend != "cuda":
        assembly = compiled.asm["amdgcn"]
        fused, unexplained = amd_fused(assembly)
        forbidden = FORBIDDEN_LLVM.findall(compiled.asm["llir"]) + FORBIDDEN_AMD.findall(assembly)
        return {"fused": fused, "unexplained": unexplained, "forbidden": forbidden, "local": 0}
    ptx = compiled.asm["ptx"]
    return {
        "fused": len(re.findall(r"\bfma\.", ptx)),
        "unexplained": unexplained_sums(ptx, guess),
        "forbidden": FORBIDDEN_PTX.findall(ptx),
        "local": local_bytes(compiled) if int(target.arch) == 90 else 0,
    }


def main() -> None:
    backend, arch = sys.argv[1].split(":")
    target = GPUTarget(
        backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64
    )
    for name in sys.argv[2:]:
        mode = find_mode(name)
        spec = row_spec(mode, 128, 128, torch.bfloat16)
        found = {"write": examine(compile_write(mode, target), target, spec.guess)}
        if mode.trellis is not None:
            found["search"] = examine(compile_search(mode.trellis, target), target)
        for kernel, record in found.items():
            about = {"mode": mode.name, "target": sys.argv[1], "kernel": kernel}
            print(json.dumps(about | record), flush=True)


if __name__ == "__main__":
    main()
