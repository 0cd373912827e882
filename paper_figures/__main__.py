"""Draw every figure, in the order of `README.md`: `python -m paper_figures --out figures`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from kvq.analysis.measure import Settings
from kvq.data import embedded_sample
from paper_figures import (
    figure_activations,
    figure_bandwidth,
    figure_codebooks,
    figure_error_budget,
    figure_position_shift,
    figure_published,
    figure_quality,
    figure_quantization_error,
    figure_rate_distortion,
    figure_rounding_drift,
    figure_score_bias,
)
from paper_figures.style import save

#: In the order of the paper.
FIGURES = (
    figure_codebooks,
    figure_rate_distortion,
    figure_score_bias,
    figure_rounding_drift,
    figure_activations,
    figure_quality,
    figure_bandwidth,
    figure_published,
    figure_error_budget,
    figure_position_shift,
    figure_quantization_error,
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw every figure of the paper.")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="the folder to write")
    out = parser.parse_args().out
    # The layers of the sample are small: threads would wait for each other.
    torch.set_num_threads(1)
    for figure in FIGURES:
        start = time.perf_counter()
        save(figure.NAME, figure.draw, embedded_sample(), Settings(), out)
        print(f"{figure.NAME}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
