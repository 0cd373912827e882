"""Compile the fused write for a target without a GPU, and say what the compiler made of it.

A process of its own, since the tests run the kernels interpreted:

    python -m tests.parity.compile_kernels cuda:90 int4 lloyd4

prints one JSON object a line: mode, target, count of fused multiply-adds, forbidden instructions
of the PTX, bytes of local memory.
"""

from __future__ import annotations

import inspect
import json
import re
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
from kvq.kernels.quantize import row_spec
from kvq.modes import Mode
from kvq.modes import mode as find_mode

#: Approximate or flushing forms of what must be exact.
FORBIDDEN = re.compile(r"\b(?:div|sqrt|rcp|add|mul|sub)\.(?:full|approx|ftz|rn\.ftz|rz)[.\w]*f32")


def compile_write(
    mode: Mode, target: GPUTarget, head_dim: int = 128
) -> triton.compiler.CompiledKernel:
    """The fused write of one mode for bf16 keys and values."""
    tile = launch.row_tile(mode, head_dim, 65_536)
    spec = row_spec(mode, head_dim, tile.padded, torch.bfloat16)
    cuda = target.backend == "cuda"
    if not cuda:
        spec = replace(spec, guess=())
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
        r".*_(codes|words)_ptr": "*i32",
        r".*_table_ptr": "*fp32",
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


def local_bytes(compiled: triton.compiler.CompiledKernel) -> int:
    """Bytes of local memory of a thread: what spilled."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        found = subprocess.run(
            (tool, "-res-usage", file.name), capture_output=True, text=True, check=True
        )
    return int(re.findall(r"STACK:(\d+)", found.stdout + found.stderr)[0])


def main() -> None:
    backend, arch = sys.argv[1].split(":")
    target = GPUTarget(
        backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64
    )
    for name in sys.argv[2:]:
        mode = find_mode(name)
        compiled = compile_write(mode, target)
        record: dict[str, object] = {"mode": mode.name, "target": sys.argv[1]}
        if backend == "cuda":
            ptx = compiled.asm["ptx"]
            record["fused"] = len(re.findall(r"\bfma\.", ptx))
            record["forbidden"] = FORBIDDEN.findall(ptx)
            record["local"] = local_bytes(compiled) if int(arch) == 90 else 0
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
