"""What the entry points of the analysis refuse."""

# A line of a table is a line here.
# ruff: noqa: E501

from __future__ import annotations

import dataclasses
import math

import torch

import kvq
from kvq.activations import Activations
from kvq.analysis import (
    measure,
    normalized_values,
    prediction,
    ranking,
    recommend,
    report,
    samples,
    score_bias,
    theory,
)
from kvq.files import FileFormatError
from tests.bad_input.cache_rows import number
from tests.bad_input.file_rows import ACTS, written
from tests.bad_input.mode_rows import flag, kind
from tests.bad_input.model_rows import count
from tests.bad_input.table import Call, Made, Row
from tests.bad_input.tensors import bad_rows, no_tensors, rows

INT8, INT2 = kvq.mode("int8"), kvq.mode("int2")
ALONE_ACTS = Activations(
    {0: ACTS.layers[0]._replace(query=None)}, ACTS.positions, ACTS.positions[:0], 0.2
)
THIN = Activations(
    {0: ACTS.layers[0]._replace(value=rows(3, 2, 12))}, ACTS.positions, ACTS.positions, 0.2
)
SOURCE: list[Row] = kind("activations", "an Activations", None, "sample", ACTS.layers)
MODES: list[Row] = [
    ([], ValueError, "modes must hold at least one mode, got none"),
    ("int8", TypeError, "modes must be a list or a tuple, got str"),
    (None, TypeError, "modes must be a list or a tuple, got NoneType"),
    ([None], TypeError, "modes[0] must be a Mode, got NoneType"),
    ([INT8, INT8], ValueError, "modes must have different names, got 'int8_per_token_head' twice"),
]
SEED: list[Row] = [
    *kind("seed", "an int", "0", 0.5, True, None),
    (-1, ValueError, "seed must be at least 0, got -1"),
    (2**63, ValueError, f"seed must be at most {2**63 - 1}, got {2**63}"),
]
SIZES = measure.Settings()


def sizes() -> dict[str, list[Row]]:
    """Rows for the sizes of a report."""
    found = {
        item.name: count(item.name, 1)
        for item in dataclasses.fields(SIZES)
        if item.name != "drift_queries"
    }
    return found | {
        "drift_queries": [
            *number("drift_queries"),
            (0.0, ValueError, "drift_queries must be positive and finite, got 0.0"),
            (1.5, ValueError, "drift_queries must be at most 1, got 1.5"),
        ]
    }


def shapes(*names: str) -> dict[str, list[Row]]:
    return {name: count(name, 1) for name in names}


CALLS: list[Call] = [
    Call("analysis.Settings", measure.Settings, lambda _: {}, sizes()),
    Call(
        "analysis.measure",
        measure.measure,
        lambda _: {"activations": ACTS, "modes": [INT8], "only": ("accounting",)},
        {
            "activations": SOURCE,
            "modes": [*MODES, (["int8"], TypeError, "modes[0] must be a Mode, got str")],
            "seed": SEED,
            "settings": kind("settings", "a Settings or None", {}, 3),
            "tier": [("reference", TypeError, "tier must be a module with the functions of a tier, got str"), (None, TypeError, "tier must be a module ..., got NoneType")],
            "progress": flag("progress"),
            "only": [
                ("accounting", TypeError, "only must be a collection of names, got str"),
                (("counts",), ValueError, "only must be one of quantization_error, ..., got 'counts'"),
            ],
        },
    ),
    Call(
        "analysis.check_modes",
        measure.check_modes,
        lambda _: {"activations": ACTS, "modes": [INT8]},
        {"activations": SOURCE, "modes": MODES},
    ),
    Call(
        "analysis.thin_queries",
        measure.thin_queries,
        lambda _: {"activations": ACTS, "most": 2},
        {"activations": SOURCE, "most": count("most", 1)},
    ),
    Call(
        "analysis.run_report",
        report.run_report,
        lambda folder: {"activations": ACTS, "out": folder / "report", "modes": [INT8]},
        {
            "activations": SOURCE,
            "out": [
                (None, TypeError, "out must be a path, got NoneType"),
                (Made(lambda given, folder: written("file", b"").make(given, folder)), NotADirectoryError, "out must be the path of a folder, got the file ..."),
            ],
            "modes": [
                *MODES[:3],
                ([None], TypeError, "mode must be a name or a Mode, got NoneType"),
                (["int5"], ValueError, "mode must be one of ..., got 'int5'"),
                (["int8", INT8], ValueError, "modes must have different names, got 'int8_per_token_head' twice"),
            ],
            "seed": SEED,
            "settings": kind("settings", "a Settings or None", {}, 3),
            "tier": [("reference", TypeError, "tier must be a module ..., got str")],
            "progress": flag("progress"),
            "input_name": kind("input_name", "a str", None, 3),
            "threads": [
                *kind("threads", "an int", "1", 1.0, True),
                (0, ValueError, "threads must be at least 1, got 0"),
            ],
        },
        run=False,
    ),
    Call(
        "analysis.replay",
        report.replay,
        lambda folder: {"manifest_path": folder / "manifest.json", "out": folder / "again"},
        {
            "manifest_path": [
                (None, TypeError, "manifest_path must be a path, got NoneType"),
                ("missing", FileFormatError, "missing: cannot be read (No such file or directory)"),
                (written("list", b"[]"), FileFormatError, "...list: schema must be kvq-report/1, got None"),
                (written("half", b'{"schema": "kvq-report/1"}'), FileFormatError, "...half: not a valid manifest (...)"),
            ],
            "out": [(None, TypeError, "out must be a path, got NoneType")],
            "input_path": kind("input_path", "a path or None", 3),
            "tier": [("reference", TypeError, "tier must be a module ..., got str")],
            "progress": flag("progress"),
        },
        run=False,
    ),
    Call(
        "analysis.predict_activations",
        prediction.predict_activations,
        lambda _: {"activations": ACTS, "modes": [INT8]},
        {
            "activations": [*SOURCE, (ALONE_ACTS, ValueError, "layer must have queries to predict its scores, got none")],
            "modes": MODES,
            "max_queries": count("max_queries", 1),
            "tier": [("reference", TypeError, "tier must be a module ..., got str")],
        },
    ),
    Call(
        "analysis.recommend",
        recommend.recommend,
        lambda _: {"activations": ACTS, "modes": [INT8], "bits": 9.0},
        {
            "activations": SOURCE,
            "modes": MODES,
            "bits": [
                *number("bits"),
                (0.0, ValueError, "bits must be positive and finite, got 0.0"),
                (1.0, ValueError, "bits must be at least 9 for the modes given, got 1"),
            ],
            "tier": [("reference", TypeError, "tier must be a module ..., got str")],
        },
    ),
    Call(
        "analysis.normalized_values",
        normalized_values.normalized_values,
        lambda _: {"x": rows(), "mode": INT2},
        {
            "x": bad_rows("x", rows()),
            "mode": [
                *kind("mode", "a Mode", None, "int2"),
                (INT8, ValueError, "mode must be a codebook mode, got int8_per_token_head"),
            ],
        },
    ),
    Call(
        "analysis.activation_values",
        normalized_values.activation_values,
        lambda _: {"activations": ACTS, "mode": INT2},
        {
            "activations": SOURCE,
            "mode": kind("mode", "a Mode", None, "int2"),
            "sides": [(["query"], ValueError, "side must be one of key, value, got query")],
            "layers": [([7], ValueError, "layer must be one of 0, got 7")],
            "heads": [([9], ValueError, "head must be one of 0, 1, got 9")],
        },
    ),
    Call(
        "analysis.scores",
        score_bias.scores,
        lambda _: {"query": rows(3, 4, 32), "key": rows(), "scale": 0.1},
        {
            "query": [*no_tensors("query", rows()), (rows(3, 3, 32), ValueError, "query must have the key's channels and a multiple of its heads, got [3, 3, 32] for keys of [3, 2, 32]")],
            "key": [*no_tensors("key", rows()), (rows(3, 64), ValueError, "key must be [T, Hkv, D] of shape [any, any, any], got [3, 64]")],
            "scale": number("scale"),
        },
    ),
    Call(
        "analysis.score_bias",
        score_bias.score_bias,
        lambda _: {
            "exact": rows(4, 3, 3).double(),
            "approximate": rows(4, 3, 3).double() * 1.1,
            "visible": torch.ones(3, 3, dtype=torch.bool),
            "query_blocks": torch.arange(3),
            "key_blocks": torch.arange(3),
        },
        {
            "exact": [*no_tensors("exact", rows()), (rows(3, 3).double(), ValueError, "exact must be [H, Q, T] of shape [any, any, any], got [3, 3]")],
            "approximate": [*no_tensors("approximate", rows()), (rows(4, 3, 2).double(), ValueError, "approximate must be [H, Q, T] of shape [4, 3, 3], got [4, 3, 2]")],
            "visible": [
                *no_tensors("visible", rows()),
                (torch.ones(3, 3), TypeError, "visible must be bool, got float32"),
                (torch.ones(2, 3, dtype=torch.bool), ValueError, "visible must be [Q, T] of shape [3, 3], got [2, 3]"),
                (torch.zeros(3, 3, dtype=torch.bool), ValueError, "visible must have a key for every query, got none for query 0"),
            ],
            "query_blocks": [*no_tensors("query_blocks", rows()), (torch.arange(2), ValueError, "query_blocks must be [Q] of shape [3], got [2]")],
            "key_blocks": [*no_tensors("key_blocks", rows()), (torch.arange(4), ValueError, "key_blocks must be [T] of shape [3], got [4]")],
        },
    ),
    Call(
        "analysis.rate_distortion",
        theory.rate_distortion,
        lambda _: {"bits": 2.0},
        {"bits": [*number("bits"), (-1.0, ValueError, "bits must not be negative, got -1.0")]},
    ),
    Call(
        "analysis.predict",
        theory.predict,
        lambda _: {"mode": INT8, "head_dim": 32, "rows": 16},
        {
            "mode": kind("mode", "a Mode", None, "int8"),
            "head_dim": [
                *kind("head_dim", "an int", "32", None),
                (0, ValueError, "head_dim must be a positive multiple of 1 to fill ..., got 0"),
            ],
            "rows": count("rows", 1),
            "seed": SEED,
            "tier": [("reference", TypeError, "tier must be a module ..., got str")],
        },
    ),
    Call(
        "analysis.rank_correlations",
        ranking.rank_correlations,
        lambda _: {"table": None},
        {"table": kind("table", "a DataFrame", None, [])},
        open={"seed": "of a generator of numpy, which says what it takes"},
        run=False,
    ),
    *(
        Call(
            f"samples.{name}",
            function,
            lambda _: {"tokens": 2, "heads": 1, "head_dim": 8},
            {**{name: count(name, 0) for name in ("tokens", "heads", "head_dim")}, "seed": SEED},
        )
        for name, function in samples.SAMPLES.items()
        if name != "outlier_channel"
    ),
    Call(
        "samples.synthetic_activations",
        samples.synthetic_activations,
        lambda _: {"tokens": 16, "head_dim": 16},
        {
            **shapes("layers", "tokens", "heads", "head_dim"),
            "query_heads": [*count("query_heads", 1), (3, ValueError, "query_heads must be a multiple of the 2 heads, got 3")],
            "queries": [*count("queries", 1), (17, ValueError, "queries must be at most the 16 tokens, got 17")],
            **{
                name: [
                    *kind(name, "a number", "1", None),
                    *((value, ValueError, f"{name} must be from 0 to 1, got {value}") for value in (-0.1, 1.1, math.nan)),
                ]
                for name in ("key_mean_share", "value_mean_share")
            },
            "dtype": [
                *kind("dtype", "a dtype", "float32", None),
                (torch.int32, TypeError, "dtype must be float32, float16 or bfloat16, got int32"),
            ],
            "seed": SEED,
        },
    ),
]  # fmt: skip


#: A mode that does not suit a head size.
ALONE: list[Call] = [
    Call(
        "analysis.check_modes (head size)",
        measure.check_modes,
        lambda _: {"activations": THIN, "modes": [INT8]},
        {
            "modes": [
                (
                    [INT2],
                    ValueError,
                    "modes must suit layers.0.value, got int2_per_token_head: "
                    "head_dim must be divisible by 16 for a Hadamard rotation, got 12",
                )
            ]
        },
    ),
]
