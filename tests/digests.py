"""Known answers: SHA-256 of what a tier must give for rows that depend on nothing but themselves.

`tests/digests.json` holds them. They were written when the reference and the oracle agreed on
every row, and change only with the storage formats. To write them again:

    python -m tests.digests
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kvq.analysis.planted_rows import planted_rows, random_rows
from kvq.modes import INT4_FIRST_IMPLEMENTATION, MODES, Mode
from kvq.tier import Tier

PATH: Final = Path(__file__).with_name("digests.json")
#: Rows, head size and dtype of each input; half of the rows are planted, half random.
INPUTS: Final = {
    "4096x128 float32": (4096, 128, torch.float32),
    "1024x96 float32": (1024, 96, torch.float32),
    "1024x64 bfloat16": (1024, 64, torch.bfloat16),
}
#: Trellis modes have answers for every so many rows, of every kind of them.
SEARCHED: Final = 7
#: The modes with known answers.
DIGEST_MODES: Final = (*MODES.values(), INT4_FIRST_IMPLEMENTATION)


def float32_rows(name: str, device: torch.device | str = "cpu") -> Tensor:
    """The rows of one of `INPUTS`, before they are rounded to its dtype."""
    count, head_dim, _ = INPUTS[name]
    half = count // 2
    planted = planted_rows(0, half, head_dim, device=device)
    return torch.cat((planted, random_rows(half, half, head_dim, device=device)))


def sha256(tensor: Tensor) -> str:
    """Of the bytes of a tensor, little-endian."""
    data = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def digests(
    tier: Tier, mode: Mode, name: str, device: torch.device | str = "cpu"
) -> dict[str, str]:
    """SHA-256 of codes, words and values of one of `INPUTS`."""
    x = float32_rows(name, device).to(INPUTS[name][2])
    if mode.trellis is not None:
        # A search takes a thousand times as long as a comparison.
        x = x[::SEARCHED]
    stored = tier.quantize(x, mode)
    values = tier.dequantize(stored.codes, stored.words, mode, x.shape[-1])
    return {
        "codes": sha256(stored.codes),
        "words": sha256(stored.words),
        "values": sha256(values),
    }


def known() -> dict[str, dict[str, dict[str, str]]]:
    """The file: by input, `rows` (its own, as float32) and then by mode."""
    answers: dict[str, dict[str, dict[str, str]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return answers


def main() -> None:
    """Write the file again, from the reference."""
    from kvq import reference

    answers = {
        name: {
            "rows": {"input": sha256(float32_rows(name))},
            **{mode.name: digests(reference, mode, name) for mode in DIGEST_MODES},
        }
        for name in INPUTS
    }
    PATH.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
