"""What the functions on rows and codes refuse, in every tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kvq
from kvq import kernels, reference
from kvq.reference.exact import dequantize_exact
from tests.bad_input.table import Call, Row
from tests.bad_input.tensors import HEAD_DIM, HEADS, META, bad_rows, no_tensors, rows

MODES = "int8, fp8, int4, ..., trellis3_unbiased_w16"
STOCHASTIC = dataclasses.replace(kvq.mode("int8"), name="s", rounding=kvq.Rounding.STOCHASTIC)

#: Of the public functions, which find their tier.
TIER: list[Row] = [
    ("gpu", ValueError, "tier must be 'reference' or 'kernels', got 'gpu'"),
    ("", ValueError, "tier must be 'reference' or 'kernels', got ''"),
    ("Reference", ValueError, "tier must be 'reference' or 'kernels', got 'Reference'"),
    (reference, ValueError, "tier must be 'reference' or 'kernels', got <module ..."),
]
#: Of a mode that may be named.
NAMED: list[Row] = [
    (None, TypeError, "mode must be a name or a Mode, got NoneType"),
    (4, TypeError, "mode must be a name or a Mode, got int"),
    ("int5", ValueError, f"mode must be one of {MODES}, got 'int5'"),
    ("INT4", ValueError, f"mode must be one of {MODES}, got 'INT4'; names are in lower case"),
    ("", ValueError, f"mode must be one of {MODES}, got ''"),
]
#: Of a mode in a tier, which takes no name.
A_MODE: list[Row] = [
    (None, TypeError, "mode must be a Mode, got NoneType"),
    ("int8", TypeError, "mode must be a Mode, got str"),
]
BITS: list[Row] = [
    ("4", TypeError, "bits must be an int, got str"),
    (4.0, TypeError, "bits must be an int, got float"),
    (True, TypeError, "bits must be an int, got bool"),
    (None, TypeError, "bits must be an int, got NoneType"),
    (5, ValueError, "bits must be one of (1, 2, 3, 4, 8), got 5"),
    (0, ValueError, "bits must be one of (1, 2, 3, 4, 8), got 0"),
    (-4, ValueError, "bits must be one of (1, 2, 3, 4, 8), got -4"),
]
INT: list[Row] = [
    ("32", TypeError, "head_dim must be an int, got str"),
    (32.0, TypeError, "head_dim must be an int, got float"),
    (True, TypeError, "head_dim must be an int, got bool"),
    (None, TypeError, "head_dim must be an int, got NoneType"),
    (torch.tensor(32), TypeError, "head_dim must be an int, got Tensor"),
]
MULTIPLE = "head_dim must be a positive multiple of 1 to fill whole bytes with 8-bit codes, got"
SIXTEEN = "head_dim must be divisible by 16 for a Hadamard rotation, got"
NO_VALUES = "must be on a device that holds values, got meta"
BYTES = (rows(3, HEADS, HEAD_DIM) * 7 + 8).to(torch.uint8)


def tiers(
    name: str,
    good: Callable[[Path], dict[str, Any]],
    shared: dict[str, list[Row]],
    *,
    public: dict[str, list[Row]] | None = None,
    tier: dict[str, list[Row]] | None = None,
    **options: Any,
) -> list[Call]:
    """The same rows for a public function and for the function of both tiers."""

    def resolved(folder: Path) -> dict[str, Any]:
        given = good(folder)
        return {**given, "mode": kvq.mode(given["mode"])} if "mode" in given else given

    every = {**shared, **(public or {}), "tier": TIER}
    calls = [Call(f"kvq.{name}", getattr(kvq, name), good, every, **options)]
    for module in (reference, kernels):
        found = {**shared, **(tier or {})}
        # The parity tests run the kernels.
        run = module is reference
        function = getattr(module, name)
        short = module.__name__.removeprefix("kvq.")
        calls.append(Call(f"{short}.{name}", function, resolved, found, run=run, **options))
    return calls


def uint8(argument: str) -> list[Row]:
    """Rows for what is no uint8 tensor."""
    return [
        *no_tensors(argument, BYTES),
        (BYTES.to(torch.int8), TypeError, f"{argument} must be uint8, got int8"),
        (rows(), TypeError, f"{argument} must be uint8, got float32"),
        (BYTES > 0, TypeError, f"{argument} must be uint8, got bool"),
    ]


CODES: list[Row] = [
    *uint8("codes"),
    (
        torch.tensor(0, dtype=torch.uint8),
        ValueError,
        "codes must fill whole bytes with 4-bit codes along the last axis, got shape []",
    ),
    (
        BYTES[..., :7],
        ValueError,
        "codes must fill whole bytes with 4-bit codes along the last axis, got shape [3, 2, 7]",
    ),
]
TOO_LARGE: list[Row] = [
    (BYTES + 16, ValueError, "codes must be below 16 for 4 bits, got 31"),
]
STORED = kvq.quantize(rows(), "int8")
WORDS: list[Row] = [
    *no_tensors("words", STORED.words),
    (STORED.words.half(), TypeError, "words must be float32, got float16"),
    (STORED.words.int(), TypeError, "words must be float32, got int32"),
]
SHAPES: dict[str, list[Row]] = {
    "codes": [
        *uint8("codes"),
        (
            STORED.codes[..., :16],
            ValueError,
            "codes must be [3, 2, 32] to go with words [3, 2] and head_dim 32, got [3, 2, 16]",
        ),
    ],
    "words": [
        *WORDS,
        (
            STORED.words.to(META),
            ValueError,
            "words must be on the device of codes (cpu), got meta",
        ),
        (
            STORED.words[:1],
            ValueError,
            "codes must be [1, 2, 32] to go with words [1, 2] and head_dim 32, got [3, 2, 32]",
        ),
    ],
}


def stored(_: Path) -> dict[str, Any]:
    return {"codes": STORED.codes, "words": STORED.words, "mode": "int8", "head_dim": HEAD_DIM}


CALLS: list[Call] = [
    *tiers(
        "quantize",
        lambda _: {"x": rows(), "mode": "int8"},
        {"x": [*bad_rows("x", rows()), (rows(3, 0), ValueError, f"{MULTIPLE} 0")]},
        public={
            "mode": [
                *NAMED,
                (STOCHASTIC, ValueError, "rounding must be deterministic here, got stochastic..."),
            ]
        },
        tier={"mode": A_MODE},
    ),
    *tiers(
        "dequantize",
        stored,
        {
            **SHAPES,
            "head_dim": [
                *INT,
                (-32, ValueError, f"{MULTIPLE} -32"),
                (0, ValueError, f"{MULTIPLE} 0"),
                (
                    2**40,
                    ValueError,
                    f"codes must be [3, 2, {2**40}] to go with words [3, 2] and head_dim {2**40}, "
                    "got [3, 2, 32]",
                ),
            ],
        },
        public={"mode": NAMED},
        tier={"mode": A_MODE},
    ),
    *tiers(
        "hadamard_transform",
        lambda _: {"x": rows(), "rotation": kvq.HADAMARD},
        {
            "x": [
                *bad_rows("x", rows()),
                (rows(3, 24), ValueError, f"{SIXTEEN} 24"),
                (rows(3, 0), ValueError, f"{SIXTEEN} 0"),
            ],
            "rotation": [
                (None, TypeError, "rotation must be a Rotation, got NoneType"),
                ("hadamard", TypeError, "rotation must be a Rotation, got str"),
            ],
            "inverse": [
                ("no", TypeError, "inverse must be a bool, got str"),
                (None, TypeError, "inverse must be a bool, got NoneType"),
                (1, TypeError, "inverse must be a bool, got int"),
            ],
        },
    ),
    *tiers(
        "pack_codes",
        lambda _: {"codes": BYTES, "bits": 4},
        {"codes": CODES, "bits": BITS},
    ),
    *tiers(
        "unpack_codes",
        lambda _: {"packed": BYTES[..., :16], "bits": 4, "head_dim": HEAD_DIM},
        {
            "packed": [
                *uint8("packed"),
                (
                    BYTES,
                    ValueError,
                    "packed must hold 32 codes of 4 bits along the last axis, "
                    "got shape [3, 2, 32]",
                ),
            ],
            "bits": BITS,
            "head_dim": [
                *INT,
                *(
                    (
                        size,
                        ValueError,
                        f"packed must hold {size} codes of 4 bits along the last axis, "
                        "got shape [3, 2, 16]",
                    )
                    for size in (-32, 0, 16, 2**40)
                ),
            ],
        },
    ),
    Call(
        "reference.signs",
        reference.signs,
        lambda _: {"head_dim": 32, "rotation": kvq.RANDOM_HADAMARD},
        {
            "head_dim": [
                *INT,
                (24, ValueError, f"{SIXTEEN} 24"),
                (-16, ValueError, f"{SIXTEEN} -16"),
            ],
            "rotation": [("random", TypeError, "rotation must be a Rotation, got str")],
            "round_index": [
                (1, ValueError, "round_index must be below 1, got 1"),
                (-1, ValueError, "round_index must be below 1, got -1"),
                (0.0, TypeError, "round_index must be an int, got float"),
            ],
            "dtype": [("float32", TypeError, "dtype must be a dtype, got str")],
            "device": [
                ("gpu", ValueError, "device must be one that torch knows, got 'gpu'"),
                (None, ValueError, "device must be one that torch knows, got None"),
            ],
        },
    ),
    Call(
        "reference.quantize_stochastic",
        reference.quantize_stochastic,
        lambda _: {"x": rows(), "mode": kvq.mode("int8"), "generator": torch.Generator()},
        {
            "x": bad_rows("x", rows()),
            "mode": [
                *A_MODE,
                (
                    kvq.mode("int2"),
                    ValueError,
                    "mode must round to do so stochastically, got int2_per_token_head",
                ),
            ],
            "generator": [
                (None, TypeError, "generator must be a Generator, got NoneType"),
                (0, TypeError, "generator must be a Generator, got int"),
            ],
        },
    ),
    Call(
        "reference.dequantize_exact",
        dequantize_exact,
        lambda folder: {**stored(folder), "mode": kvq.mode("int8")},
        {
            "codes": [
                *uint8("codes"),
                (
                    STORED.codes[..., :16],
                    ValueError,
                    "codes must hold 32 codes of 8 bits along the last axis, got shape [3, 2, 16]",
                ),
            ],
            "words": [
                *WORDS,
                (
                    STORED.words[:1],
                    ValueError,
                    "words must be one for each row of codes, of shape [3, 2], got [1, 2]",
                ),
            ],
            "mode": A_MODE,
            "head_dim": [*INT, (0, ValueError, f"{MULTIPLE} 0")],
        },
    ),
]

#: What the reference refuses beyond the kernels, which cannot look without waiting for a device,
#: or have another message for a device.
ALONE: list[Call] = [
    Call(
        f"reference.{name}",
        getattr(reference, name),
        good,
        {argument: [(value.to(META), ValueError, f"{argument} {NO_VALUES}"), *more]},
    )
    for name, argument, value, good, more in (
        ("quantize", "x", rows(), lambda _: {"x": rows(), "mode": kvq.mode("int8")}, []),
        ("hadamard_transform", "x", rows(), lambda _: {"x": rows(), "rotation": kvq.HADAMARD}, []),
        ("pack_codes", "codes", BYTES, lambda _: {"codes": BYTES, "bits": 4}, TOO_LARGE),
        (
            "unpack_codes",
            "packed",
            BYTES,
            lambda _: {"packed": BYTES, "bits": 8, "head_dim": HEAD_DIM},
            [],
        ),
    )
]
