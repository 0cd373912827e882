"""A guard against a write path that has become several times slower."""

from __future__ import annotations

import time

import torch

from kvq.modes import MODES
from kvq.reference import quantize


def test_int4_encodes_65536_rows_of_128_within_its_time() -> None:
    # Twice to three times what one core of a laptop needs. Other work on the machine may hold up
    # any one try, so it has several, and the processor time counts where that is shorter.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(65536, 128, generator=generator)
    quantize(x[:64], MODES["int4_per_token_head"])
    seconds = []
    for _ in range(6):
        wall, processor = time.perf_counter(), time.process_time()
        quantize(x, MODES["int4_per_token_head"])
        seconds.append(min(time.perf_counter() - wall, time.process_time() - processor))
        if seconds[-1] <= 0.8:
            return
    raise AssertionError(f"int4 must encode 65,536 x 128 in 0.8 s, got {min(seconds):.2f} s")
