"""What modes refuse, and the parts that they are made of."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvq
from kvq.codebooks import Provenance, Recipe
from kvq.modes import Grid, Mode, Rotation, short_name
from kvq.trellis import TRELLISES, Trellis
from tests.bad_input.core_rows import INT, MULTIPLE, NAMED, SIXTEEN
from tests.bad_input.table import Call, Made, Row, change

INT8, INT4, INT2 = kvq.mode("int8"), kvq.mode("int4"), kvq.mode("int2")
BOOK, CODE = kvq.CODEBOOKS["gaussian_4"], TRELLISES["linear_2_10"]


def flag(argument: str) -> list[Row]:
    """Rows for what is True or False."""
    return [
        ("no", TypeError, f"{argument} must be a bool, got str"),
        (1, TypeError, f"{argument} must be a bool, got int"),
        (None, TypeError, f"{argument} must be a bool, got NoneType"),
    ]


def kind(argument: str, wanted: str, *values: Any) -> list[Row]:
    """Rows for what must be of a kind."""
    return [
        (value, TypeError, f"{argument} must be {wanted}, got {type(value).__name__}")
        for value in values
    ]


def parts(value: Any) -> Any:
    """The fields that a frozen dataclass is made with."""
    return lambda _: {
        item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init
    }


MODE: dict[str, list[Row]] = {
    "name": [
        ("", ValueError, "name must not be empty, got ''"),
        *kind("name", "a str", None, 3),
    ],
    "bits": [
        *kind("bits", "an int", "4", 4.0, True, None),
        (5, ValueError, "bits must be one of (1, 2, 3, 4, 8), got 5"),
        (4, ValueError, "bits must be 8 for the grid signed, got 4"),
    ],
    "grid": [
        *kind("grid", "a Grid", "signed", None),
        (Grid.UNSIGNED, ValueError, "grid must be signed or e4m3 for absmax, got unsigned"),
    ],
    "normalization": kind("normalization", "a Normalization", "absmax", None),
    "word": [
        *kind("word", "a StoredWord", "float32", None),
        (INT4.word, ValueError, "word must be float32 for absmax, got float32_zero_point"),
    ],
    "rotation": kind("rotation", "a Rotation or None", "hadamard", True),
    "rounding": [
        *kind("rounding", "a Rounding or None", "half_even"),
        (
            None,
            ValueError,
            "rounding must be given for every grid but codebook and trellis, "
            "got None with the grid signed",
        ),
    ],
    "codebook": [
        *kind("codebook", "a Codebook or None", "gaussian_4"),
        (
            BOOK,
            ValueError,
            "codebook must be given for the grid codebook and for no other, "
            "got gaussian_4 with the grid signed",
        ),
    ],
    "scale_fit": [
        *kind("scale_fit", "a ScaleFit or None", "unit"),
        (
            kvq.ScaleFit.UNIT,
            ValueError,
            "scale_fit must be given for the grids codebook and trellis and for no other, "
            "got unit with the grid signed",
        ),
    ],
    "gains": [
        *kind("gains", "a tuple", [1.0], None, 1.0),
        (("1",), TypeError, "gains[0] must be a number, got str"),
        (
            (1.0,),
            ValueError,
            "gains must be empty unless the word is fitted to the codes, "
            "got (1.0,) with the scale fit None",
        ),
    ],
    "trellis": [
        *kind("trellis", "a Trellis or None", "linear_2_10"),
        (
            CODE,
            ValueError,
            "trellis must be given for the grid trellis and for no other, "
            "got linear_2_10 with the grid signed",
        ),
    ],
}

CALLS: list[Call] = [
    Call(
        "kvq.mode",
        kvq.mode,
        lambda _: {"name": "int4"},
        {"name": NAMED},
    ),
    Call("kvq.Mode", Mode, parts(INT8), MODE),
    Call(
        "Mode.check_head_dim",
        INT4.check_head_dim,
        lambda _: {"head_dim": 32},
        {"head_dim": [*INT, (24, ValueError, f"{SIXTEEN} 24")]},
        open={"argument": "a name for messages"},
    ),
    *(
        Call(
            f"Mode.{name}",
            getattr(INT8, name),
            lambda _: {"head_dim": 32},
            {
                "head_dim": [
                    *INT,
                    (0, ValueError, f"{MULTIPLE} 0"),
                    (-8, ValueError, f"{MULTIPLE} -8"),
                ]
            },
        )
        for name in ("bytes_per_row", "bytes_per_token_head", "bits_per_value")
    ),
    *(
        Call(
            name,
            function,
            lambda _: {"head_dim": 32},
            {
                "head_dim": [
                    *INT,
                    (0, ValueError, "head_dim must be at least 1, got 0"),
                    (-16, ValueError, "head_dim must be at least 1, got -16"),
                ]
            },
        )
        for name, function in (
            ("Mode.gain", INT4.gain),
            ("Rotation.gain", kvq.HADAMARD.gain),
            ("Rotation.block_size", Rotation.block_size),
        )
    ),
    Call(
        "Rotation.check",
        kvq.HADAMARD.check,
        lambda _: {"head_dim": 32},
        {"head_dim": [*INT, (24, ValueError, f"{SIXTEEN} 24"), (0, ValueError, f"{SIXTEEN} 0")]},
    ),
    Call(
        "Mode.head_dim",
        INT4.head_dim,
        lambda _: {"bytes_per_row": 16},
        {
            "bytes_per_row": [
                *kind("bytes_per_row", "an int", "16", 16.0, True, None),
                (0, ValueError, "bytes_per_row must hold whole 4-bit codes, got 0"),
                (-16, ValueError, "bytes_per_row must hold whole 4-bit codes, got -16"),
            ]
        },
    ),
    Call(
        "Mode.with_codebook",
        INT2.with_codebook,
        lambda _: {"codebook": BOOK},
        {
            "codebook": kind("codebook", "a Codebook", None, "gaussian_4", BOOK.levels),
            "name": [
                ("", ValueError, "name must not be empty, got ''"),
                *kind("name", "a str", 3),
                (
                    "int2_per_token_head",
                    ValueError,
                    "name must not be that of a shipped mode, got 'int2_per_token_head'",
                ),
            ],
        },
    ),
    Call(
        "Mode.with_rounding",
        INT8.with_rounding,
        lambda _: {"rounding": kvq.Rounding.HALF_EVEN},
        {"rounding": kind("rounding", "a Rounding", None, "half_even", 0)},
    ),
    Call("Mode.without_rotation", INT8.without_rotation, lambda _: {}, {}),
    Call(
        "kvq.modes.short_name",
        short_name,
        lambda _: {"name": "int8_per_token_head"},
        {"name": kind("name", "a str", None, INT8)},
    ),
    Call(
        "kvq.Rotation",
        Rotation,
        parts(kvq.HADAMARD),
        {
            "rounds": [
                *kind("rounds", "an int", "1", 1.0, True, None),
                (0, ValueError, "rounds must be 1 or 2, got 0"),
                (3, ValueError, "rounds must be 1 or 2, got 3"),
            ],
            "random_signs": flag("random_signs"),
            "seed": [
                *kind("seed", "an int", "0", 0.5, None, True),
                (-1, ValueError, "seed must be between 0 and 2^64 - 1, got -1"),
                (2**64, ValueError, f"seed must be between 0 and 2^64 - 1, got {2**64}"),
            ],
            "repeat_block_signs": flag("repeat_block_signs"),
            "round_to_input": flag("round_to_input"),
        },
    ),
    Call(
        "kvq.Codebook",
        kvq.Codebook,
        parts(BOOK),
        {
            "name": [
                *kind("name", "a str", None, 4),
                ("", ValueError, "name must be made of letters, digits, ..., got ''"),
                ("a/b", ValueError, "name must be made of letters, digits, ..., got 'a/b'"),
            ],
            "levels": [
                *kind("levels", "a tuple", list(BOOK.levels), None, torch.tensor(BOOK.levels)),
                ((0.0,), ValueError, "levels must hold 2 to 256 numbers, got 1"),
                (
                    (math.nan, *BOOK.levels[1:]),
                    ValueError,
                    "levels must hold finite float32 numbers, got nan",
                ),
                (
                    (0.1, *BOOK.levels[1:]),
                    ValueError,
                    "levels must hold finite float32 numbers, got 0.1",
                ),
                (
                    BOOK.levels[::-1],
                    ValueError,
                    "levels must be strictly increasing, got ... before ...",
                ),
                (
                    tuple(map(np.float32, BOOK.levels)),
                    TypeError,
                    "levels[0] must be a number, got float32",
                ),
                (("0", *BOOK.levels[1:]), TypeError, "levels[0] must be a number, got str"),
                ((True, *BOOK.levels[1:]), TypeError, "levels[0] must be a number, got bool"),
            ],
            "thresholds": [
                *kind("thresholds", "a tuple", list(BOOK.thresholds), None),
                ((), ValueError, "thresholds must hold one number fewer than levels (3), got 0"),
                (
                    (-8.0, 0.0, 8.0),
                    ValueError,
                    "thresholds must lie between their two levels, got -8.0 between ...",
                ),
            ],
            "recipe": [
                *kind("recipe", "a Recipe", None, "norm"),
                (Recipe("norm", 5, True), ValueError, "recipe.num_levels must be 4, got 5"),
            ],
            "provenance": kind("provenance", "a Provenance", None, "made up"),
        },
    ),
    Call(
        "Codebook.from_exact",
        kvq.Codebook.from_exact,
        lambda _: {
            "name": "mine",
            "levels": (-1.0, 1.0),
            "recipe": Recipe("norm", 2, True),
            "provenance": Provenance("made up"),
        },
        {
            "name": [("", ValueError, "name must be made of letters, digits, ..., got ''")],
            "levels": [
                *kind("levels", "a tuple", [-1.0, 1.0], None),
                ((1e300, 2e300), ValueError, "levels must hold finite float32 numbers, got inf"),
                (
                    (1.0, -1.0),
                    ValueError,
                    "levels must be strictly increasing, got 1.0 before -1.0",
                ),
            ],
            "recipe": kind("recipe", "a Recipe", None),
            "provenance": kind("provenance", "a Provenance", None),
        },
    ),
    Call(
        "kvq.codebooks.Recipe",
        Recipe,
        parts(BOOK.recipe),
        {
            "distribution": [
                *kind("distribution", "a str", None),
                ("", ValueError, "distribution must not be empty, got ''"),
            ],
            "num_levels": [
                *kind("num_levels", "an int", 4.0, "4", True),
                (0, ValueError, "num_levels must be at least 1, got 0"),
            ],
            "symmetric": flag("symmetric"),
            "weighted": flag("weighted"),
        },
    ),
    Call(
        "kvq.codebooks.Provenance",
        Provenance,
        parts(BOOK.provenance),
        {
            "source": kind("source", "a str", None, Path("x")),
            "data_sha256": kind("data_sha256", "a str", None, b""),
            "versions": kind("versions", "a tuple", {"kvq": "1"}, None),
        },
    ),
    Call(
        "kvq.trellis.Trellis",
        Trellis,
        parts(CODE),
        {
            "name": [
                *kind("name", "a str", None),
                ("", ValueError, "name must not be empty, got ''"),
            ],
            "bits": [
                *kind("bits", "an int", 2.0, True, "2"),
                (4, ValueError, "bits must be 2 or 3, got 4"),
            ],
            "window_bits": [
                *kind("window_bits", "an int", 10.0, None),
                (
                    9,
                    ValueError,
                    "window_bits must be a multiple of 2 above it and at most 12, got 9",
                ),
                (
                    0,
                    ValueError,
                    "window_bits must be a multiple of 2 above it and at most 12, got 0",
                ),
            ],
            "masks": [
                *kind("masks", "a tuple", list(CODE.masks), None),
                ((1.0,), TypeError, "masks[0] must be an int, got float"),
                ((0, 1, 2, 4), ValueError, "masks must hold numbers of 1 to 10 bits, got 0"),
                ((1, 1, 2, 4), ValueError, "masks must be linearly independent, got (1, 1, 2, 4)"),
            ],
            "steps": [
                *kind("steps", "a tuple", list(CODE.steps), None),
                ((1, 2), ValueError, "steps must hold a number for each of 16 labels, got 2"),
                (
                    (4096, *CODE.steps[1:]),
                    ValueError,
                    "steps must be below 2^11, got 4096",
                ),
                (("1", *CODE.steps[1:]), TypeError, "steps[0] must be an int, got str"),
            ],
            "unit": [
                *kind("unit", "a number", "1", None, True),
                *(
                    (
                        value,
                        ValueError,
                        "unit must be a positive number of at most 13 significant bits, "
                        f"got {value}",
                    )
                    for value in (math.nan, math.inf, 0.0, -1.0, 0.1)
                ),
            ],
        },
    ),
    Call(
        "Trellis.check_head_dim",
        CODE.check_head_dim,
        lambda _: {"head_dim": 32},
        {
            "head_dim": [
                *INT,
                (
                    4,
                    ValueError,
                    "head_dim must be at least 5 for a trellis with a window of as many channels, "
                    "got 4",
                ),
            ]
        },
        open={"argument": "a name for messages"},
    ),
]

#: Parts that do not go together, in other modes than `int8`.
ALONE: list[Call] = [
    Call(
        "kvq.Mode (codebook)",
        Mode,
        parts(INT2),
        {
            "codebook": [
                (
                    None,
                    ValueError,
                    "codebook must be given for the grid codebook and for no other, "
                    "got None with the grid codebook",
                ),
                (
                    kvq.CODEBOOKS["gaussian_8"],
                    ValueError,
                    "codebook must have at most 4 levels for 2 bits, got 8",
                ),
            ],
            "gains": [
                (
                    Made(
                        lambda given, _: change(gains=(math.nan,), scale_fit=kvq.ScaleFit.UNBIASED)
                    ),
                    ValueError,
                    "gains must hold positive float32 numbers, got nan",
                ),
                (
                    Made(lambda given, _: change(gains=(-1.0,), scale_fit=kvq.ScaleFit.UNBIASED)),
                    ValueError,
                    "gains must hold positive float32 numbers, got -1.0",
                ),
            ],
        },
    ),
    Call(
        "kvq.Mode (trellis)",
        Mode,
        parts(kvq.mode("trellis3")),
        {
            "bits": [(2, ValueError, "bits must be 3 for the trellis linear_3_12, got 2")],
        },
    ),
    Call(
        "Mode.with_codebook (int4)",
        INT4.with_codebook,
        lambda _: {"codebook": BOOK},
        {
            "codebook": [
                (
                    BOOK,
                    ValueError,
                    "mode must be a codebook mode to take another codebook, "
                    "got int4_per_token_head",
                )
            ]
        },
    ),
    Call(
        "Mode.with_rounding (int2)",
        INT2.with_rounding,
        lambda _: {"rounding": kvq.Rounding.HALF_EVEN},
        {
            "rounding": [
                (
                    kvq.Rounding.HALF_EVEN,
                    ValueError,
                    "mode must round to take another rounding, got int2_per_token_head, "
                    "which has a codebook",
                )
            ]
        },
    ),
]
