"""What fitting refuses: laws, samples, numbers of levels."""

# A row of a table is a line here.

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from kvq.reference import laws, lloyd_max
from tests.bad_input.mode_rows import flag, kind
from tests.bad_input.table import Call, Row

LEVELS: list[Row] = [
    *kind("num_levels", "an int", "4", 4.0, True, None),
    *(
        (value, ValueError, f"num_levels must be 2 to 256, got {value}")
        for value in (0, 1, 257, -2)
    ),
]
TEXT: list[Row] = [
    ("", ValueError, "law must be a name with numbers, such as 'norm' or 't(df=5)', got ''"),
    ("1 +", ValueError, "law must be a name with numbers, ..., got '1 +'"),
    ("norm(x)", ValueError, "law must be a name with numbers, ..., got 'norm(x)'"),
    ("__import__('os')", ValueError, "law must be a name with numbers, ..."),
    ("normal", ValueError, "law must be sphere, signed_max or a continuous ..., got 'normal'"),
    ("poisson(3)", ValueError, "law must be sphere, signed_max or ..., got 'poisson(3)'"),
    ("t", ValueError, "law must have the parameters of t, got 't' (...)"),
    ("t(df=2)", ValueError, "law must have a finite variance above zero, got t(df=2)"),
    ("t(df=-1)", ValueError, "law must have a finite variance above zero, got t(df=-1)"),
    ("norm(0, 0)", ValueError, "law must have a finite variance above zero, got norm(0, 0)"),
    ("norm(1e400)", ValueError, "law must have a finite variance above zero, got norm(inf)"),
    (
        "sphere(1)",
        ValueError,
        "head_dim must be a whole number from 2 to 65536, got 1",
    ),
    ("sphere(2.5)", ValueError, "head_dim must be a whole number ..., got 2.5"),
    ("sphere", ValueError, "law must have the parameters of sphere, got 'sphere' (...)"),
]
LAW: list[Row] = [
    *TEXT,
    (None, ValueError, "law must be a Law, its text or a frozen ..., got None"),
    (3, ValueError, "law must be a Law, its text or a frozen ..., got 3"),
    (stats.norm, ValueError, "law must be a Law, its text or a frozen ..., got <..."),
    (stats.poisson(3), ValueError, "law must be a Law, its text or a frozen ..., got <..."),
    (stats.t([5, 6]), ValueError, "law must have scalar parameters, got ([5, 6],)"),
]
HEAD: list[Row] = [
    *(
        (value, ValueError, f"head_dim must be a whole number from 2 to 65536, got {value}")
        for value in (1, 0, -3, 2.5, math.nan, math.inf, 65537)
    ),
    *kind("head_dim", "a number", "64", None, True),
]
NAME: list[Row] = [
    *kind("name", "a str", 3),
    ("", ValueError, "name must be made of letters, digits, ..., got ''"),
    ("a b", ValueError, "name must be made of letters, digits, ..., got 'a b'"),
]


def samples(_: Any = None) -> dict[str, Any]:
    return {"samples": np.linspace(-1, 1, 64), "num_levels": 4}


def array(argument: str) -> list[Row]:
    """Rows for what is no row of finite numbers."""
    good = np.linspace(-1, 1, 64)
    return [
        ([], ValueError, f"{argument} must not be empty, got none"),
        (np.zeros((2, 2)), ValueError, f"{argument} must have one dimension, got 2"),
        (np.array(["a"]), TypeError, f"{argument} must be real numbers, got <U1"),
        (good + 1j, TypeError, f"{argument} must be real numbers, got complex128"),
        (good > 0, TypeError, f"{argument} must be real numbers, got bool"),
        (
            np.append(good, math.nan),
            ValueError,
            f"{argument} must be finite as float32, got nan at 64",
        ),
        (
            np.append(good, 1e300),
            ValueError,
            f"{argument} must be finite as float32, got 1e+300 at 64",
        ),
        ([[1.0], [1.0, 2.0]], TypeError, f"{argument} must be real numbers, got a list"),
        ("numbers", TypeError, f"{argument} must be real numbers, got <U7"),
    ]


CALLS: list[Call] = [
    Call(
        "lloyd_max.fit",
        lloyd_max.fit,
        lambda _: {"law": "norm", "num_levels": 4},
        {
            "law": LAW,
            "num_levels": LEVELS,
            "symmetric": [
                *kind("symmetric", "a bool or None", "no", 1),
            ],
            "name": NAME,
        },
    ),
    Call(
        "lloyd_max.fit_samples",
        lloyd_max.fit_samples,
        samples,
        {
            "samples": [
                *array("samples"),
                (None, TypeError, "samples must be real numbers, got object"),
                (np.ones(9), ValueError, "samples must not all be equal, got only 1.0"),
            ],
            "num_levels": [
                *LEVELS,
                (
                    65,
                    ValueError,
                    "num_levels must be at most what the distinct samples can fill, "
                    "got 65 for 64 distinct samples",
                ),
            ],
            "weights": [
                *array("weights")[:-1],
                (np.ones(3), ValueError, "weights must be as many as samples, 64, got 3"),
                (-np.ones(64), ValueError, "weights must not be negative, got -1.0"),
                (np.zeros(64), ValueError, "weights must not all be zero, got only zeros"),
            ],
            "symmetric": flag("symmetric"),
            "name": NAME,
            "source": kind("source", "a str", None, 3),
        },
    ),
    Call(
        "lloyd_max.fit_masses",
        lloyd_max.fit_masses,
        lambda _: {"points": np.arange(64.0), "masses": np.ones(64), "num_levels": 4},
        {
            "points": [
                (np.zeros(64), ValueError, "samples must not all be equal, got only 0.0"),
                (np.full(64, math.nan), ValueError, "points must be finite, got nan"),
                (
                    np.zeros((8, 8)),
                    ValueError,
                    "masses must be as many as the points of one axis, got [64] for [8, 8]",
                ),
            ],
            "masses": [
                (
                    np.ones(3),
                    ValueError,
                    "masses must be as many as the points of one axis, got [3] for [64]",
                ),
                (np.zeros(64), ValueError, "masses must be positive, got 0.0"),
                (np.full(64, math.inf), ValueError, "masses must be finite, got inf"),
            ],
            "num_levels": LEVELS,
            "symmetric": flag("symmetric"),
            "name": NAME,
        },
        {
            "weighted": "words for the recipe",
            "source": "words for the provenance",
            "data_sha256": "words for the provenance",
        },
    ),
    Call(
        "lloyd_max.panter_dite",
        lloyd_max.panter_dite,
        lambda _: {"num_levels": 4, "law": "norm"},
        {"num_levels": LEVELS, "law": LAW},
    ),
    Call(
        "lloyd_max.distortion_rate",
        lloyd_max.distortion_rate,
        lambda _: {"num_levels": 4},
        {
            "num_levels": LEVELS,
            "variance": [
                *kind("variance", "a number", "1", None, True),
                *(
                    (value, ValueError, f"variance must be positive and finite, got {value}")
                    for value in (0.0, -1.0, math.nan, math.inf)
                ),
            ],
        },
    ),
    Call(
        "lloyd_max.gaussian_distortion",
        lloyd_max.gaussian_distortion,
        lambda _: {"num_levels": 4},
        {"num_levels": LEVELS},
    ),
    Call(
        "laws.law",
        laws.law,
        lambda _: {"text": "norm"},
        {"text": [*kind("law", "a str", None, 3), *TEXT]},
    ),
    Call("laws.sphere", laws.sphere, lambda _: {"head_dim": 64}, {"head_dim": HEAD}),
    Call("laws.signed_max", laws.signed_max, lambda _: {"head_dim": 64}, {"head_dim": HEAD}),
    Call("laws.as_law", laws.as_law, lambda _: {"given": "norm"}, {"given": LAW}),
]

ALONE: list[Call] = [
    Call(
        "lloyd_max.fit (signed_max)",
        lloyd_max.fit,
        lambda _: {"law": "signed_max(64)", "num_levels": 4},
        {
            "symmetric": [
                (
                    True,
                    ValueError,
                    "symmetric must be False for a law that is not symmetric, got signed_max(64)",
                )
            ]
        },
    ),
]
