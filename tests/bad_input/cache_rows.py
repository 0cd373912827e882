"""What the functions on paged caches refuse, in every tier, and what attention may be asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import kvq
from kvq import reference
from kvq.tier import AttentionFeatures, as_hnd, new_paged_kv
from tests.bad_input.core_rows import MULTIPLE, NAMED, NO_VALUES, tiers
from tests.bad_input.table import Call, Made, Row, change
from tests.bad_input.tensors import (
    HEAD_DIM,
    HEADS,
    META,
    bad_caches,
    bad_rows,
    cache,
    indices,
    no_tensors,
    rows,
)

CHECK: list[Row] = [
    ("no", TypeError, "check must be a bool, got str"),
    (1, TypeError, "check must be a bool, got int"),
]
SHAPE = "must be [tokens, heads, head_dim] of shape"


def not_indices(argument: str, good: torch.Tensor) -> list[Row]:
    """Rows for what is no tensor of slots, blocks or lengths."""
    return [
        *no_tensors(argument, good),
        (good.float(), TypeError, f"{argument} must be int32 or int64, got float32"),
        (good.to(torch.int16), TypeError, f"{argument} must be int32 or int64, got int16"),
        (good > 0, TypeError, f"{argument} must be int32 or int64, got bool"),
    ]


def write(_: Path) -> dict[str, Any]:
    return {
        "key": rows(),
        "value": rows(),
        "key_cache": cache(),
        "value_cache": cache("int8"),
        "slot_mapping": indices(0, 5, -1),
    }


def attend(_: Path) -> dict[str, Any]:
    return {
        "query": rows(1, 4, HEAD_DIM),
        "key_cache": cache(),
        "value_cache": cache("int8"),
        "block_table": indices(0, 1)[None],
        "seq_lens": indices(5),
        "query_start_loc": indices(0, 1),
        "scale": 0.1,
    }


def size(argument: str, *, zero: bool = True) -> list[Row]:
    """Rows for a size, which is at least 1."""
    return [
        (0, ValueError, f"{argument} must be at least 1, got 0"),
        (-1, ValueError, f"{argument} must be at least 1, got -1"),
        (2.0, TypeError, f"{argument} must be an int, got float"),
        (True, TypeError, f"{argument} must be an int, got bool"),
        ("2", TypeError, f"{argument} must be an int, got str"),
    ]


def number(argument: str) -> list[Row]:
    """Rows for a finite number."""
    return [
        (math.nan, ValueError, f"{argument} must be ...finite, got nan"),
        (math.inf, ValueError, f"{argument} must be ...finite, got inf"),
        (-math.inf, ValueError, f"{argument} must be ...finite, got -inf"),
        ("0.1", TypeError, f"{argument} must be a number, got str"),
        (True, TypeError, f"{argument} must be a number, got bool"),
        (torch.tensor(0.1), TypeError, f"{argument} must be a number, got Tensor"),
        (1j, TypeError, f"{argument} must be a number, got complex"),
    ]


def cache_pair() -> dict[str, list[Row]]:
    """Rows for keys and values, which share blocks, heads and slots."""
    other = cache("int8")
    empty = other._replace(codes=other.codes[:, :0], words=other.words[:, :0])
    return {
        "key_cache": [
            *bad_caches("key_cache"),
            (
                cache(block_size=8),
                ValueError,
                "value_cache must be [blocks, heads, block_size] of shape [3, 2, 8], "
                "got [3, 2, 4]",
            ),
            (
                change(key_cache=empty, value_cache=empty),
                ValueError,
                "key_cache must have heads and slots in its blocks, got [3, 0, 4]",
            ),
        ],
        "value_cache": [
            *bad_caches("value_cache"),
            (
                cache(blocks=2),
                ValueError,
                "value_cache must be [blocks, heads, block_size] of shape [3, 2, 4], "
                "got [2, 2, 4]",
            ),
            (
                new_paged_kv(3, 4, HEADS, HEAD_DIM, "int8", device="meta"),
                ValueError,
                "value_cache must be on the device of key_cache (cpu), got meta",
            ),
        ],
    }


WRITE: dict[str, list[Row]] = {
    **cache_pair(),
    "key": [
        *bad_rows("key", rows()),
        (rows(3, 1, HEAD_DIM), ValueError, f"key {SHAPE} [any, 2, 32], got [3, 1, 32]"),
        (rows(3, HEADS, 16), ValueError, f"key {SHAPE} [any, 2, 32], got [3, 2, 16]"),
        (rows(3, 64), ValueError, f"key {SHAPE} [any, 2, 32], got [3, 64]"),
    ],
    "value": [
        *bad_rows("value", rows()),
        (rows(2, HEADS, HEAD_DIM), ValueError, f"value {SHAPE} [3, 2, 32], got [2, 2, 32]"),
    ],
    "slot_mapping": [
        *not_indices("slot_mapping", indices(0, 5, -1)),
        (
            indices(0, 1)[None],
            ValueError,
            "slot_mapping must be [tokens] of shape [any], got [1, 2]",
        ),
        (
            indices(0, 1, 2, 3),
            ValueError,
            "slot_mapping must have at most one entry for each of the 3 tokens, got 4",
        ),
        (
            indices(0, 12),
            ValueError,
            "slot_mapping must be below 12 (blocks x block_size), got 12 for token 1",
        ),
        (
            indices(3, 3),
            ValueError,
            "slot_mapping must not name a slot twice, got 3 for token 0 and token 1",
        ),
    ],
    "check": CHECK,
}

PAIRS: list[Row] = [
    *not_indices("pairs", indices(0, 1)[None]),
    (
        indices(0, 1),
        ValueError,
        "pairs must be [pairs, source and target] of shape [any, 2], got [2]",
    ),
    (indices(0, 3)[None], ValueError, "pairs must name blocks from 0 to 2, got 3 in pair 0"),
    (indices(-1, 0)[None], ValueError, "pairs must name blocks from 0 to 2, got -1 in pair 0"),
    (
        torch.tensor([[0, 1], [2, 1]]),
        ValueError,
        "pairs must not name a target twice, got 1 again in pair 1",
    ),
]

ATTEND: dict[str, list[Row]] = {
    **cache_pair(),
    "query": [
        *no_tensors("query", rows(1, 4, HEAD_DIM)),
        (
            rows(1, 4, HEAD_DIM).int(),
            TypeError,
            "query must be float32 or float16 or bfloat16 or float64, got int32",
        ),
        (
            rows(1, 4, HEAD_DIM).to(torch.complex64),
            TypeError,
            "query must be float32 or float16 or bfloat16 or float64, got complex64",
        ),
        (
            rows(1, 4, 16),
            ValueError,
            "query must be [tokens, query heads, head_dim] of shape [any, any, 32], "
            "got [1, 4, 16]",
        ),
        (
            rows(4, HEAD_DIM),
            ValueError,
            "query must be [tokens, query heads, head_dim] of shape [any, any, 32], got [4, 32]",
        ),
        (
            rows(1, 3, HEAD_DIM),
            ValueError,
            "query must have a multiple of the 2 KV heads, got 3 heads",
        ),
        (
            rows(1, 0, HEAD_DIM),
            ValueError,
            "query must have a multiple of the 2 KV heads, got 0 heads",
        ),
    ],
    "block_table": [
        *not_indices("block_table", indices(0, 1)[None]),
        (
            indices(0, 1),
            ValueError,
            "block_table must be [sequences, blocks] of shape [1, any], got [2]",
        ),
        (
            indices(0)[None],
            ValueError,
            "block_table must have 2 entries for the 5 tokens of sequence 0 in blocks of 4, got 1",
        ),
        (
            indices(0, 3)[None],
            ValueError,
            "block_table must name blocks from 0 to 2, got 3 for entry 1 of sequence 0",
        ),
        (
            indices(-1, 0)[None],
            ValueError,
            "block_table must name blocks from 0 to 2, got -1 for entry 0 of sequence 0",
        ),
        (
            indices(0, 1)[None].to(META),
            ValueError,
            "block_table must be on the device of query (cpu), got meta",
        ),
    ],
    "seq_lens": [
        *not_indices("seq_lens", indices(5)),
        (indices(5)[None], ValueError, "seq_lens must be [sequences] of shape [any], got [1, 1]"),
        (indices(-5), ValueError, "seq_lens must not be negative, got -5 for sequence 0"),
    ],
    "query_start_loc": [
        *not_indices("query_start_loc", indices(0, 1)),
        (
            indices(0),
            ValueError,
            "query_start_loc must be [sequences + 1] of shape [2], got [1]",
        ),
        (indices(1, 1), ValueError, "query_start_loc must start at 0, got 1"),
        (
            indices(0, 2),
            ValueError,
            "query_start_loc must end at the number of query tokens (1), got 2",
        ),
        (indices(0, -1), ValueError, "query_start_loc must not decrease, got -1 after 0"),
    ],
    "scale": [*number("scale"), (None, TypeError, "scale must be a number, got NoneType")],
    "features": [
        (None, TypeError, "features must be an AttentionFeatures, got NoneType"),
        ({"window": 3}, TypeError, "features must be an AttentionFeatures, got dict"),
    ],
    "return_lse": [
        ("no", TypeError, "return_lse must be a bool, got str"),
        (1, TypeError, "return_lse must be a bool, got int"),
    ],
    "max_query_len": size("max_query_len"),
    "check": CHECK,
}

OUTPUT, LSE = rows(2, 4, HEAD_DIM), rows(2, 4)
PARTS: list[Row] = [
    (None, TypeError, "parts must be a list or a tuple, got NoneType"),
    (OUTPUT, TypeError, "parts must be a list or a tuple, got Tensor"),
    ([], ValueError, "parts must hold at least one attention output, got none"),
    ([OUTPUT], TypeError, "parts[0] must be an output and its log-sum-exp, got Tensor"),
    (
        [(OUTPUT, LSE), (OUTPUT,)],
        TypeError,
        "parts[1] must be an output and its log-sum-exp, got tuple",
    ),
    ([(OUTPUT.int(), LSE)], TypeError, "parts[0].output must be float32 or ... got int32"),
    ([(OUTPUT, None)], TypeError, "parts[0].log_sum_exp must be a torch.Tensor, got NoneType"),
    ([(OUTPUT, LSE.half())], TypeError, "parts[0].log_sum_exp must be float32 ... got float16"),
    (
        [(OUTPUT, LSE[:1])],
        ValueError,
        "parts[0].log_sum_exp must be [tokens, heads] of shape [2, 4], got [1, 4]",
    ),
    (
        [(OUTPUT, LSE), (OUTPUT.half(), LSE)],
        TypeError,
        "parts[1].output must be float32, got float16",
    ),
]
FEATURES: dict[str, list[Row]] = {
    "window": size("window"),
    "soft_cap": [
        *number("soft_cap"),
        (0.0, ValueError, "soft_cap must be positive and finite, got 0.0"),
        (-1.0, ValueError, "soft_cap must be positive and finite, got -1.0"),
    ],
    **{
        argument: [
            *no_tensors(argument, LSE)[1:],  # None: not asked for
            (LSE.double(), TypeError, f"{argument} must be float32, got float64"),
            (LSE.half(), TypeError, f"{argument} must be float32, got float16"),
        ]
        for argument in ("alibi_slopes", "sink_logits", "query_query_bias", "logit_bias")
    },
    "first_key": not_indices("first_key", indices(0))[1:],
}


def features(argument: str, value: torch.Tensor) -> dict[str, Any]:
    return {"features": AttentionFeatures(**{argument: value})}


#: Features that do not fit the query.
UNFIT: list[Row] = [
    (
        change(**features("alibi_slopes", LSE)),
        ValueError,
        "alibi_slopes must be [query heads] of shape [4], got [2, 4]",
    ),
    (
        change(**features("sink_logits", LSE[0, :3])),
        ValueError,
        "sink_logits must be [query heads] of shape [4], got [3]",
    ),
    (
        change(**features("query_query_bias", LSE)),
        ValueError,
        "query_query_bias must be [S, S] or [sequences, S, S] with 1 sequences, got [2, 4]",
    ),
    (
        change(**features("logit_bias", LSE)),
        ValueError,
        "logit_bias must be [1 or 1, 4 or 1, keys], got [2, 4]",
    ),
    (
        change(**features("logit_bias", rows(1, 1, 4))),
        ValueError,
        "logit_bias must be at least as long as the longest sequence (5), got 4",
    ),
    (
        change(**features("first_key", indices(0, 0))),
        ValueError,
        "first_key must be [sequences] of shape [1], got [2]",
    ),
    (
        change(**features("sink_logits", LSE[0].to(META))),
        ValueError,
        "sink_logits must be on the device of query (cpu), got meta",
    ),
]

CALLS: list[Call] = [
    *tiers(
        "reshape_and_cache",
        write,
        WRITE,
        public={"key": [*WRITE["key"], (rows().to(META), ValueError, f"key {NO_VALUES}")]},
        tier={
            "key": [
                *WRITE["key"],
                (
                    rows().to(META),
                    ValueError,
                    "key must be on the device of its cache (cpu), got meta",
                ),
            ]
        },
    ),
    *tiers(
        "copy_blocks",
        lambda _: {"cache": cache(), "pairs": indices(0, 1)[None]},
        {"cache": bad_caches("cache"), "pairs": PAIRS, "check": CHECK},
    ),
    *tiers("paged_attention", attend, {**ATTEND, "features": ATTEND["features"] + UNFIT}),
    *tiers(
        "merge_attention",
        lambda _: {"parts": [(OUTPUT, LSE)]},
        {
            "parts": PARTS,
            "sink_logits": [
                *no_tensors("sink_logits", LSE[0])[1:],
                (LSE[0].half(), TypeError, "sink_logits must be float32, got float16"),
                (
                    LSE[0, :3],
                    ValueError,
                    "sink_logits must be [query heads] of shape [4], got [3]",
                ),
            ],
        },
    ),
    Call("kvq.AttentionFeatures", kvq.AttentionFeatures, lambda _: {}, FEATURES),
    Call(
        "kvq.new_paged_kv",
        kvq.new_paged_kv,
        lambda _: {
            "num_blocks": 1,
            "block_size": 4,
            "num_heads": 2,
            "head_dim": 32,
            "mode": "int8",
        },
        {
            "num_blocks": size("num_blocks"),
            "block_size": size("block_size"),
            "num_heads": size("num_heads"),
            "head_dim": [
                (0, ValueError, f"{MULTIPLE} 0"),
                (-32, ValueError, f"{MULTIPLE} -32"),
                (32.0, TypeError, "head_dim must be an int, got float"),
                (True, TypeError, "head_dim must be an int, got bool"),
            ],
            "mode": NAMED,
            "layout": [
                ("hnd", ValueError, "layout must be one of 'HND', 'NHD', got 'hnd'"),
                (None, ValueError, "layout must be one of 'HND', 'NHD', got None"),
            ],
            "device": [
                ("gpu", ValueError, "device must be one that torch knows, got 'gpu'"),
                (3.5, ValueError, "device must be one that torch knows, got 3.5"),
            ],
        },
    ),
    Call(
        "kvq.tier.as_hnd",
        as_hnd,
        lambda _: {"cache": cache()},
        {"cache": bad_caches("cache")},
        open={"argument": "a name for messages"},
    ),
]

#: In the reference, without a device that holds values.
ALONE: list[Call] = [
    Call(
        "reference.reshape_and_cache",
        reference.reshape_and_cache,
        write,
        {
            "key": [
                (
                    Made(lambda given, _: on_meta(given)),
                    ValueError,
                    f"key {NO_VALUES}",
                )
            ]
        },
    ),
    Call(
        "reference.paged_attention",
        reference.paged_attention,
        attend,
        {
            "query": [
                (Made(lambda given, _: on_meta(given)), ValueError, f"query {NO_VALUES}"),
            ],
            "check": [
                (
                    Made(lambda given, _: change(**on_meta(given).arguments, check=True)),
                    ValueError,
                    "check must be False for tensors without values, got True",
                ),
            ],
        },
    ),
    Call(
        "reference.merge_attention",
        reference.merge_attention,
        lambda _: {"parts": [(OUTPUT, LSE)]},
        {"parts": [([(OUTPUT.to(META), LSE.to(META))], ValueError, f"parts {NO_VALUES}")]},
    ),
]


def on_meta(given: dict[str, Any]) -> Any:
    """All of a call's tensors on a device without values."""

    def moved(value: Any) -> Any:
        if isinstance(value, kvq.PagedKV):
            return value._replace(codes=value.codes.to(META), words=value.words.to(META))
        return value.to(META) if isinstance(value, torch.Tensor) else value

    return change(**{name: moved(value) for name, value in given.items()})
