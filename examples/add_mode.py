"""Make modes of your own, and measure them beside those that ship.

A mode is a value made of parts, and what reads modes reads the parts. So one with other parts
(here two rounds of the rotation, and six levels, which take three bits) is made with `replace` or
`with_codebook`, and every measure takes it. To ship it, put it into `_ROWS` of `kvq/modes.py`.

python examples/add_mode.py
"""

from __future__ import annotations

from dataclasses import replace

import kvq
from kvq.analysis.measure import measure
from kvq.data import embedded_sample
from kvq.reference import lloyd_max


def main() -> None:
    """Measure four modes on one layer of the embedded sample."""
    lloyd3 = kvq.mode("lloyd3")
    modes = [
        kvq.mode("int4"),
        lloyd3,
        replace(lloyd3, name="lloyd3_twice", rotation=kvq.Rotation(rounds=2)),
        lloyd3.with_codebook(lloyd_max.fit("norm", 6, name="gaussian_6").codebook),
    ]
    sample = embedded_sample()
    one_layer = replace(sample, layers={12: sample.layers[12]})
    tables = measure(one_layer, modes, only=("quantization_error", "score_bias"))
    errors = tables["quantization_error"].query("tokens == 'all' and metric == 'relative_error'")
    slopes = tables["score_bias"].query("metric == 'slope'")
    head_dim = sample.layers[12].key.shape[-1]
    print("mode, bits per value, error of keys, error of values, slope of scores")
    for mode in modes:
        error = errors[errors["mode"] == mode.name].groupby("side")["value"].mean()
        slope = slopes[slopes["mode"] == mode.name]["value"].mean()
        bits = float(mode.bits_per_value(head_dim))
        print(f"{mode}, {bits:g}, {error['key']:.4f}, {error['value']:.4f}, {slope:.4f}")


if __name__ == "__main__":
    main()
