"""Compile packed attention for a target without a GPU, and say what the compiler made of it.

A process of its own, since the tests run the kernels interpreted:

    python -m tests.parity.compile_attention cuda:90 1 int4 int8/int2

refuses kernels whose weights lie where their transposition does not look, and
prints one JSON object for each kernel that `paged_attention` launches for sequences of one new
token: mode, target, kernel, kinds of operands, bytes of local and of shared memory, and for CUDA
90 the instructions of the loop over keys that are whole (`loop`: how many of each kind). The
launches themselves are recorded and compiled, so nothing here repeats what they pass.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvq.kernels import attention, launch, paged_attention
from kvq.kernels.operand_layout import check_operand_layout, transposed_layouts
from kvq.modes import Mode
from kvq.modes import mode as find_mode
from kvq.tier import AttentionFeatures, new_paged_kv
from tests.cases import VARIANTS
from tests.parity.compile_kernels import local_bytes

POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


def source_of(kernel: JITFunction, values: dict[str, object]) -> ASTSource:
    """A launch with these arguments, specialized as a launch is."""
    signature, fixed, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            signature[name], fixed[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            place = value.data_ptr()
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            place = value
        else:
            signature[name], place = "fp32", 1
        if special and place % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, fixed, attributes)


def compile_attention(
    modes: tuple[Mode, Mode],
    target: GPUTarget,
    query_tokens: int,
    *,
    head_dim: int = 128,
    heads: tuple[int, int] = (32, 8),
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    features: AttentionFeatures = AttentionFeatures(),  # noqa: B008 (frozen)
) -> Iterator[tuple[str, list[str], triton.compiler.CompiledKernel]]:
    """Every kernel that is launched for two sequences of `query_tokens` new tokens each, and the
    kinds of operands of attention's keys and values."""
    cuda = target.backend == "cuda"
    launches = []

    def record(kernel, *args, grid, warmup, **kwargs):
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, args, strict=False)) | kwargs
        options = {name: value for name, value in kwargs.items() if name not in names}
        launches.append((kernel, values, options))

    caches = [new_paged_kv(64, block_size, heads[1], head_dim, mode) for mode in modes]
    index = torch.arange(3, dtype=torch.int32)
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(launch, "check_device"),
        mock.patch.object(attention, "check_operand_layout"),
        mock.patch.object(launch, "has_shuffle", return_value=cuda),
        mock.patch.object(launch, "has_early_launch", return_value=cuda and target.arch >= 90),
    ):
        paged_attention(
            torch.zeros(2 * query_tokens, heads[0], head_dim, dtype=dtype),
            *caches,
            torch.zeros(2, 32, dtype=torch.int32),
            index[:2] + 300,
            index * query_tokens,
            scale=1.0,
            features=features,
            check=False,
            max_query_len=query_tokens,
        )
    for kernel, values, options in launches:
        plan = values.get("SPEC")
        if plan is not None and not plan.fewest <= query_tokens <= plan.most:
            continue
        known = {k: v for k, v in options.items() if cuda or k == "num_warps"}
        source = source_of(kernel, values)
        kinds = [plan.key.kind, plan.value.kind] if plan is not None else []
        yield kernel.fn.__name__, kinds, triton.compile(source, target=target, options=known)


def loop_instructions(compiled: triton.compiler.CompiledKernel) -> Counter[str]:
    """Machine instructions, by kind, of the shortest loop with the most matrix operations."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            (tool, "-c", file.name), capture_output=True, text=True, check=True
        ).stdout
    labels: dict[str, int] = {}
    kinds: list[str] = []
    loops = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(kinds)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)(.*);", line):
            kinds.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2]) if found[1] == "BRA" else None
            if target and target[0] in labels:
                loops.append(Counter(kinds[labels[target[0]] :]))
    matrix = [sum(loop[kind] for kind in ("HMMA", "IMMA", "HGMMA", "IGMMA")) for loop in loops]
    return min(
        (loop for loop, count in zip(loops, matrix, strict=True) if count == max(matrix)),
        key=lambda loop: loop.total(),
    )


def find_modes(text: str) -> tuple[Mode, Mode]:
    """`key/value` or one mode for both; the modes of `tests.cases.VARIANTS` too."""
    key, _, value = text.partition("/")
    found = [
        VARIANTS[name] if name in VARIANTS else find_mode(name) for name in (key, value or key)
    ]
    return found[0], found[1]


def main() -> None:
    backend, arch = sys.argv[1].split(":")
    cuda = backend == "cuda"
    target = GPUTarget(backend, int(arch) if cuda else arch, 32 if cuda else 64)
    for name in sys.argv[3:]:
        for kernel, kinds, compiled in compile_attention(
            find_modes(name), target, int(sys.argv[2])
        ):
            if cuda:
                check_operand_layout(compiled)
            record = {
                "mode": name,
                "target": sys.argv[1],
                "kernel": kernel,
                "operands": kinds,
                "shared": compiled.metadata.shared,
                "transposed": sorted(set(transposed_layouts(compiled.asm["ttgir"]))),
            }
            if cuda and int(arch) == 90:
                record["local"] = local_bytes(compiled)
                if kernel == "attend_kernel":
                    record["loop"] = dict(loop_instructions(compiled).most_common())
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
