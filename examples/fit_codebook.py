"""Fit a codebook, keep it in a file, and store keys with it.

Eight levels are fitted to what a coordinate is after the rotation: one coordinate of a point on a
sphere. The codebook goes into a file and comes back as a mode. Then the keys of one layer of the
embedded sample are stored with it and with `lloyd3`, which was fitted to Gaussian numbers.

python examples/fit_codebook.py sphere_8.safetensors
"""

from __future__ import annotations

import sys

import kvq
from kvq.codebook_files import load_codebook, save_codebook
from kvq.data import embedded_sample
from kvq.reference import lloyd_max


def main(path: str) -> None:
    """Fit to the head size of the sample, save, load, and compare."""
    keys = embedded_sample().layers[0].key.float()
    tokens, heads, head_dim = keys.shape
    fitted = lloyd_max.fit(f"sphere({head_dim})", 8, name=f"sphere{head_dim}_8")
    print(f"levels: {', '.join(f'{level:.4f}' for level in fitted.codebook.levels)}")
    print(f"a fixed point to within {fitted.certificate.stationarity:.1e}")
    save_codebook(path, fitted.codebook)

    base = kvq.mode("lloyd3")
    print(f"relative squared error of {tokens} x {heads} keys:")
    for mode in (base, base.with_codebook(load_codebook(path))):
        stored = kvq.quantize(keys, mode)
        error = kvq.dequantize(*stored, mode, head_dim) - keys
        print(f"  {mode!s:>24}: {error.square().sum() / keys.square().sum():.5f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
