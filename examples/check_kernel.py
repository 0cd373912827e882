"""Check a function of your own against the reference, bit for bit.

`my_int8` stands for your kernel: it writes the codes and words of `int8`. The rows are planted to
be hard: ties, rows of zeros, infinities, numbers near the floor of the scale. If it divided by the
scale, and did not multiply by the rounded reciprocal, some codes would differ; `--wrong` does so.

python examples/check_kernel.py
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import kvq
from kvq.analysis.planted_rows import KINDS, planted_rows


def my_int8(x: Tensor, *, divide: bool = False) -> tuple[Tensor, Tensor]:
    """Codes as bytes, and words, of float32 rows `[N, D]`."""
    scale = (x.abs().amax(-1) / torch.tensor(127.0)).clamp_min(1e-6)
    z = x / scale[:, None] if divide else x * (1 / scale)[:, None]
    codes = (z + torch.copysign(torch.tensor(0.5), z)).trunc().clamp(-128, 127)
    broken = ~x.isfinite().all(-1)
    codes[broken], scale[broken] = 0, torch.nan
    return codes.to(torch.int8).view(torch.uint8), scale


def main(divide: bool) -> int:
    """Compare; the exit code is 1 if a bit differs."""
    x = planted_rows(0, 100 * len(KINDS), 64)
    codes, words = my_int8(x, divide=divide)
    expected = kvq.quantize(x, "int8", tier="reference")
    # Words are compared as bits: NaN is not equal to itself, and -0.0 is to 0.0.
    differs = (words.view(torch.int32) != expected.words.view(torch.int32)) | (
        codes != expected.codes
    ).any(-1)
    print(f"{int(differs.sum())} of {len(x)} rows differ")
    for turn, kind in enumerate(KINDS):
        if count := int(differs[turn :: len(KINDS)].sum()):
            print(f"  {kind}: {count}")
    return int(differs.any())


if __name__ == "__main__":
    sys.exit(main("--wrong" in sys.argv))
