"""What the integrations and the evaluation refuse, on a tiny model."""

# A line of a table is a line here.
# ruff: noqa: E501

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

import kvq
from kvq.evaluation import recipes, windows
from kvq.evaluation.run import Settings
from kvq.evaluation.serving import Workload, measure_serving
from kvq.integrations import capture, key_transforms
from kvq.integrations.models import random_model
from kvq.integrations.transformers import KVQuantCache, LayerOptions
from kvq.integrations.transformers.options import layer_mode
from kvq.integrations.transformers.transforms import layer_transform
from tests.bad_input.cache_rows import size
from tests.bad_input.file_rows import CALIBRATION
from tests.bad_input.mode_rows import flag, kind
from tests.bad_input.table import Call, Row
from tests.bad_input.tensors import no_tensors
from tests.integrations.models import tiny_config, tiny_model

INT4, INT8 = kvq.mode("int4"), kvq.mode("int8")
TOKENS = torch.arange(1, 9)


@cache
def model() -> Any:
    return tiny_model("llama")


def config(_: Path | None = None) -> Any:
    return tiny_config("llama")


def count(argument: str, least: int) -> list[Row]:
    """Rows for a number of at least so many."""
    return [
        *kind(argument, "an int", "3", 3.0, True, None),
        *(
            (value, ValueError, f"{argument} must be at least {least}, got {value}")
            for value in (least - 1, least - 5)
        ),
    ]


def not_negative(argument: str) -> list[Row]:
    return [
        *kind(argument, "an int", "3", 3.0, True, None),
        (-1, ValueError, f"{argument} must not be negative, got -1"),
    ]


def side(argument: str) -> list[Row]:
    """Rows for the modes of all layers."""
    return [
        (
            None,
            TypeError,
            f"{argument} must be a mode, its name, a mapping or a function, got NoneType",
        ),
        (4, TypeError, f"{argument} must be a mode, its name, a mapping or a function, got int"),
        ("int5", ValueError, f"{argument}: mode must be one of ..., got 'int5'"),
        (
            {0: "int4"},
            ValueError,
            f"{argument} must have a mode for every layer, got none for layer 1",
        ),
        (
            {0: 4, 1: "int4"},
            TypeError,
            f"{argument} must be a mode or its name in layer 0, got int",
        ),
        (
            lambda layer: None,
            TypeError,
            f"{argument} must be a mode or its name in layer 0, got NoneType",
        ),
    ]


MODEL: list[Row] = [
    (None, TypeError, "model must be a model of transformers, got NoneType"),
    ("gpt2", TypeError, "model must be a model of transformers, got str"),
    (torch.nn.Linear(2, 2), TypeError, "model must be a model of transformers, got Linear"),
]
DTYPE: list[Row] = [
    *kind("dtype", "a dtype", "float16", None),
    (torch.float64, TypeError, "dtype must be float32, float16 or bfloat16, got float64"),
    (torch.int32, TypeError, "dtype must be float32, float16 or bfloat16, got int32"),
]
DEVICE: list[Row] = [
    ("gpu", ValueError, "device must be one that torch knows, got 'gpu'"),
    ("cuda:99", ValueError, "device must be one that torch finds, got 'cuda:99'"),
    ("meta", ValueError, "device must be one that torch finds, got 'meta'"),
    (None, ValueError, "device must be one that torch knows, got None"),
]
PROVENANCE: list[Row] = [
    ("words", TypeError, "provenance must be a Mapping, got str"),
    ({"a": 1}, TypeError, "provenance must hold strings by name, got 1 for 'a'"),
]
RECIPE: list[Row] = [
    *kind("recipe", "a str", None, INT4),
    ("", ValueError, "mode must be one of ..., got ''"),
    ("k=int4", ValueError, "recipe must have k= and v=, got 'k=int4'"),
    (
        "k=int4,v=int4,last=3",
        ValueError,
        "recipe must be a mode, or parts among ..., got 'last=3' in ...",
    ),
    (
        "k=int4,v=int4,first=1.5",
        ValueError,
        "recipe must be a mode, or parts among ..., got 'first=1.5' in ...",
    ),
    ("k=int4,v=int4,", ValueError, "recipe must be a mode, or parts among ..., got '' in ..."),
    ("k=int4,v=int4,v=int8", ValueError, "recipe must name a part once, got 'v=int8' in ..."),
    (
        "k=int4,v=int4,k0=int4,k00=int8",
        ValueError,
        "recipe must name a part once, got 'k00=int8' in ...",
    ),
]


def settings(found: type[Any], **least: int) -> Call:
    """A class of sizes, each of which is at least so many."""
    name = f"{found.__module__}.{found.__name__}"
    return Call(
        name, found, lambda _: {}, {argument: count(argument, n) for argument, n in least.items()}
    )


CALLS: list[Call] = [
    Call(
        "KVQuantCache",
        KVQuantCache,
        lambda _: {"config": config()},
        {
            "config": [
                (None, TypeError, "config must be a configuration of transformers, got NoneType"),
                ({}, TypeError, "config must be a configuration of transformers, got dict"),
            ],
            "key_mode": side("key_mode"),
            "value_mode": side("value_mode"),
            "first_tokens": not_negative("first_tokens"),
            "recent_tokens": not_negative("recent_tokens"),
            "slack": not_negative("slack"),
            "full_precision_prompt": flag("full_precision_prompt"),
            "max_cache_len": size("max_cache_len"),
            "key_transforms": [
                (3, TypeError, "key_transforms must be a KeyTransform, a mapping or a function, got int"),
                ({0: None}, ValueError, "key_transforms must have one for every layer, got none for layer 1"),
                ({0: 3, 1: None}, TypeError, "key_transforms must be a KeyTransform in layer 0, got int"),
            ],
            "capacity": count("capacity", 0),
            "block_size": size("block_size"),
            "offloading": flag("offloading"),
        },
    ),
    Call(
        "LayerOptions",
        LayerOptions,
        lambda _: {"key_mode": INT4, "value_mode": INT4},
        {
            "key_mode": kind("key_mode", "a Mode", None, "int4"),
            "value_mode": kind("value_mode", "a Mode", None, "int4"),
            "first_tokens": not_negative("first_tokens"),
            "recent_tokens": not_negative("recent_tokens"),
            "slack": not_negative("slack"),
            "full_precision_prompt": flag("full_precision_prompt"),
            "key_transform": kind("key_transform", "a KeyTransform or None", 3),
        },
    ),
    Call(
        "layer_mode",
        layer_mode,
        lambda _: {"argument": "modes", "modes": {0: "int4"}, "layer": 0},
        {
            "modes": [
                (None, TypeError, "modes must be a mode, its name, a mapping or a function, got NoneType"),
                ("int5", ValueError, "modes: mode must be one of ..., got 'int5'"),
            ],
            "layer": [(1, ValueError, "modes must have a mode for every layer, got none for layer 1")],
        },
        open={"argument": "a name for messages"},
    ),
    Call(
        "layer_transform",
        layer_transform,
        lambda _: {"transforms": None, "layer": 0},
        {"transforms": [("x", TypeError, "key_transforms must be a KeyTransform, a mapping or a function, got str")]},
        open={"layer": "an index of the model's own"},
    ),
    Call(
        "capture",
        capture.capture,
        lambda _: {"model": model(), "input_ids": TOKENS, "queries": 2},
        {
            "model": MODEL,
            "input_ids": [
                *no_tensors("input_ids", TOKENS),
                (TOKENS.float(), TypeError, "input_ids must be int64, got float32"),
                (TOKENS[None], ValueError, "input_ids must be [T] of shape [any], got [1, 8]"),
                (TOKENS[:1], ValueError, "input_ids must hold 2 to 512 tokens, got 1"),
                (TOKENS - 5, ValueError, "input_ids must be from 0 to 96, got -4"),
                (TOKENS + 96, ValueError, "input_ids must be from 0 to 96, got 97"),
            ],
            "layers": [
                ([2], ValueError, "layers must be among the attention layers [0, 1], got [2]"),
                ([-3], ValueError, "layers must be among the attention layers [0, 1], got [-3]"),
                ([], ValueError, "layers must be among the attention layers [0, 1], got []"),
                (1, TypeError, "layers must be a list or a tuple, got int"),
                ([0.5], TypeError, "layers[0] must be an int, got float"),
            ],
            "first_position": [
                *kind("first_position", "an int", "1", 1.0, True),
                (8, ValueError, "first_position must be from 0 to 7, got 8"),
                (-1, ValueError, "first_position must be from 0 to 7, got -1"),
            ],
            "queries": [
                *kind("queries", "an int", "1", 1.0, None),
                (9, ValueError, "queries must be from 0 to the 8 tokens, got 9"),
                (-1, ValueError, "queries must be from 0 to the 8 tokens, got -1"),
            ],
            "dtype": DTYPE,
            "require_rotary": flag("require_rotary"),
            "provenance": PROVENANCE,
            "progress": flag("progress"),
        },
    ),
    Call(
        "load_model",
        capture.load_model,
        lambda folder: {"path": folder / "model"},
        {
            "path": [
                *((value, TypeError, f"path must be a path, got {type(value).__name__}") for value in (None, 3)),
                ("missing", FileNotFoundError, "model must be a folder or a .gguf file on disk, got missing"),
            ],
            "gguf_file": kind("gguf_file", "a str or None", 3),
            "dtype": DTYPE,
            "device": DEVICE,
        },
        run=False,
    ),
    Call(
        "read_dtype",
        capture.read_dtype,
        lambda _: {"argument": "dtype", "name": "float32"},
        {
            "name": [
                (value, ValueError, f"dtype must be one of 'float32', 'float16', 'bfloat16', got {value!r}")
                for value in ("float64", "", None, torch.float32)
            ]
        },
        open={"argument": "a name for messages"},
    ),
    Call(
        "read_text",
        capture.read_text,
        lambda folder: {"path": Path(__file__)},
        {"path": [("missing", FileNotFoundError, "text must be a file that can be read, got missing (No such file or directory)")]},
    ),
    Call(
        "key_transforms",
        key_transforms.key_transforms,
        lambda _: {"model": model(), "center": "first"},
        {
            "model": MODEL,
            "center": [
                (None, ValueError, "center or scale_pairs must be given, got neither"),
                ("mean", ValueError, "center must be one of 'bias', 'first', 'calibrated', got 'mean'"),
            ],
            "scale_pairs": flag("scale_pairs"),
            "calibration": kind("calibration", "a Calibration or None", "file"),
            "first_tokens": count("first_tokens", 1),
        },
    ),
    Call("verify_rotary", key_transforms.verify_rotary, lambda _: {"model": model()}, {"model": MODEL}),
    Call(
        "calibrate",
        key_transforms.calibrate,
        lambda _: {"model": model(), "windows": TOKENS[None]},
        {
            "model": MODEL,
            "windows": [
                *no_tensors("windows", TOKENS[None]),
                (TOKENS[None].float(), TypeError, "windows must be int64, got float32"),
                (TOKENS, ValueError, "windows must be [windows, tokens] of shape [any, any], got [8]"),
                (TOKENS[None, :0], ValueError, "windows must hold tokens, got [1, 0]"),
                (TOKENS[None] - 5, ValueError, "windows must be from 0 to 96, got -4"),
            ],
            "provenance": PROVENANCE,
            "progress": flag("progress"),
        },
        {"processes": "made by kvq.distributed.processes"},
    ),
    Call(
        "random_model",
        random_model,
        lambda _: {"shape": "tiny", "device": "cpu", "dtype": torch.float32},
        {
            "shape": [("huge", ValueError, "shape must be one of llama3-8b, tiny, got 'huge'"), (None, ValueError, "shape must be one of llama3-8b, tiny, got None")],
            "device": DEVICE,
            "dtype": DTYPE,
        },
    ),
    Call("parse_recipe", recipes.parse_recipe, lambda _: {"text": "int4"}, {"text": RECIPE}),
    Call(
        "parse_mode",
        recipes.parse_mode,
        lambda _: {"text": "int4"},
        {
            "text": [
                *kind("mode", "a str", None, INT4),
                ("int4@", ValueError, "rounding must be one of ..., got ''"),
                ("@half_even", ValueError, "mode must be one of ..., got ''"),
            ]
        },
    ),
    Call(
        "Recipe.bits_per_value",
        recipes.parse_recipe("int4").bits_per_value,
        lambda _: {"layers": 2, "head_dim": 32, "context": 64},
        {
            "layers": count("layers", 1),
            "head_dim": kind("head_dim", "an int", "32", None),
            "context": count("context", 1),
        },
    ),
    Call(
        "Recipe.new_cache",
        recipes.parse_recipe("k=int4,v=int4").new_cache,
        lambda _: {"config": config()},
        {"config": [(None, TypeError, "config must be a configuration of transformers, got NoneType")]},
    ),
    Call(
        "Recipe.bind",
        recipes.parse_recipe("kvq4").bind,
        lambda _: {"model": model(), "calibration": CALIBRATION},
        {
            "model": MODEL,
            "calibration": [
                (None, ValueError, "recipe ... cannot be had: calibration must be given for a calibrated mean or scale, got none"),
                (CALIBRATION, ValueError, "recipe ... cannot be had: calibration must be of the model's RoPE, got one of another"),
            ],
        },
        run=False,
    ),
    settings(Settings, tokens=2, windows=1, decode=0, generate=0, prompts=1, prompt_tokens=1, context=1, position_offset=0)._replace(
        open={"passkey": "has rows of its own below"}
    ),
    settings(Workload, sequences=1, inputs=1, outputs=2, chunk=0),
    Call(
        "measure_serving",
        measure_serving,
        lambda _: {"model": model(), "recipes": [], "workload": Workload(1, 1, 2)},
        {
            "model": MODEL,
            "recipes": [
                ("int4", TypeError, "recipes must be a list or a tuple, got str"),
                (["int4"], TypeError, "recipes[0] must be a Recipe, got str"),
            ],
            "workload": kind("workload", "a Workload", None, (1, 1, 2, 0)),
            "dynamic": flag("dynamic"),
        },
        run=False,
    ),
    Call(
        "cut_windows",
        windows.cut_windows,
        lambda _: {"documents": [list(range(9))], "length": 4, "count": 2},
        {
            "documents": [([], ValueError, "windows must be from 1 to the 0 windows of 4 tokens, got 2")],
            "length": count("length", 1),
            "count": [
                *kind("count", "an int", "3", None, 1.0),
                (3, ValueError, "windows must be from 1 to the 2 windows of 4 tokens, got 3"),
                (0, ValueError, "windows must be from 1 to the 2 windows of 4 tokens, got 0"),
            ],
        },
    ),
    Call(
        "evaluate_window",
        windows.evaluate_window,
        lambda _: {"model": model(), "index": 0, "ids": TOKENS, "recipes": [], "decode": 2},
        {
            "model": MODEL,
            "ids": [
                *no_tensors("ids", TOKENS),
                (TOKENS.float(), TypeError, "ids must be int64, got float32"),
                (TOKENS[None], ValueError, "ids must be [T] of shape [any], got [1, 8]"),
                (TOKENS + 96, ValueError, "ids must be from 0 to 96, got 97"),
            ],
            "recipes": [(["int4"], TypeError, "recipes[0] must be a Recipe, got str")],
            "decode": [
                *kind("decode", "an int", "1", None),
                (7, ValueError, "decode must be from 0 to 6, got 7"),
                (-1, ValueError, "decode must be from 0 to 6, got -1"),
            ],
            "offset": count("offset", 0),
        },
        open={"index": "recorded as it is"},
    ),
    Call(
        "evaluate_windows",
        windows.evaluate_windows,
        lambda _: {"model": model(), "indices": [0], "ids": TOKENS[None], "recipes": [], "decode": 2},
        {
            "model": MODEL,
            "indices": [([0, 1], ValueError, "indices must be as many as windows, 1, got 2")],
            "ids": [
                *no_tensors("ids", TOKENS[None]),
                (TOKENS[None].float(), TypeError, "ids must be int64, got float32"),
                (TOKENS, ValueError, "ids must be [B, T] of shape [any, any], got [8]"),
                (TOKENS[None] + 96, ValueError, "ids must be from 0 to 96, got 97"),
            ],
            "recipes": [(["int4"], TypeError, "recipes[0] must be a Recipe, got str")],
            "decode": [
                *kind("decode", "an int", "1", None),
                (7, ValueError, "decode must be from 0 to 6, got 7"),
            ],
            "offset": count("offset", 0),
        },
    ),
]  # fmt: skip

ALONE: list[Call] = [
    Call(
        "Settings (passkey)",
        Settings,
        lambda _: {},
        {
            "passkey": [
                *kind("passkey", "a tuple", [64], 64, None),
                ((0,), ValueError, "passkey must be at least 1, got 0"),
                ((1.5,), TypeError, "passkey[0] must be an int, got float"),
            ],
        },
    ),
]  # fmt: skip
