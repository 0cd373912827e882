"""Triton mirror of `kvq.reference.attention`.

Three launches: queries are rotated, scaled and become operands; each program of the loop takes
some queries over a split of the keys; and the splits are put together, the output rotated back.
How a sequence is cut depends on its own length and number of queries alone, and so its bits do.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
from torch import Tensor

from kvq.checks import dtype_name
from kvq.kernels import launch
from kvq.kernels.attention_ends import combine_kernel, prepare, rotation_spec
from kvq.kernels.attention_loop import LoopSpec, attend_kernel
from kvq.kernels.attention_tile import LOG2_E
from kvq.kernels.merge import merge_attention
from kvq.kernels.operand_layout import check_operand_layout
from kvq.kernels.side_spec import SideSpec, side_spec
from kvq.kernels.trellis_operands import window_table
from kvq.tier import AttentionFeatures, AttentionOutput, PagedKV, as_hnd, check_attention

__all__ = ["merge_attention", "paged_attention"]

#: The kinds of operands that take many registers.
CROWDED = {"sevens", "halves", "labels", "states"}
#: The kinds whose levels are loaded one by one.
IN_MEMORY = {"states", "table"}
#: Half an ulp of 1.0: what a codebook's levels are measured against.
ACCURACY = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}
#: The same of keys, at most: an error of their levels counts as often as logits are large, and
#: with logits of standard deviation 30 those of `ACCURACY` exceed the error budget.
KEY_ACCURACY = 2.0**-10


def _unit_bytes(codes: Tensor) -> int:
    """Bytes of the integers that a row can be read as: 2, or 1 where rows lie on odd bytes."""
    lengths = (codes.data_ptr(), codes.shape[-1], *codes.stride()[:-1])
    return 2 if all(n % 2 == 0 for n in lengths) else 1


@lru_cache(maxsize=64)
def _level_table(side: SideSpec, device: torch.device) -> Tensor:
    """Levels by code or by window, for look-ups in memory; else a placeholder."""
    if side.trellis is not None and side.kind == "states":
        return window_table(side.trellis, device)
    levels = side.levels if side.kind == "table" else (0.0,)
    return torch.tensor(levels, dtype=torch.float32, device=device)


def paged_attention(
    query: Tensor,
    key_cache: PagedKV,
    value_cache: PagedKV,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    features: AttentionFeatures = AttentionFeatures(),  # noqa: B008 (frozen)
    return_lse: bool = False,
    max_query_len: int | None = None,
    check: bool | None = None,
) -> Tensor | AttentionOutput:
    """Triton mirror of `kvq.reference.paged_attention`.

    Not for float64 queries. A float16 or bfloat16 query is answered through integers or float16
    numbers that hold it, with float32 sums; a float32 query in float64.
    """
    check_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale,
        features,
        return_lse,
        max_query_len,
        check,
    )
    if query.dtype not in ACCURACY:
        raise TypeError(
            "query must be float32, float16 or bfloat16 for the kernel tier, "
            f'got {dtype_name(query.dtype)} (tier="reference" takes it)'
        )
    launch.check_device("query", query)
    key_codes, key_words = as_hnd(key_cache)
    value_codes, value_words = as_hnd(value_cache)
    num_blocks, kv_heads, block_size = key_words.shape
    if num_blocks == 0:
        raise ValueError("key_cache must have at least one block, got 0")
    num_tokens, num_heads, head_dim = query.shape
    num_sequences = len(seq_lens)
    value_dim = value_cache.mode.head_dim(value_codes.shape[3])
    wide = query.dtype is torch.float32
    output = query.new_empty((num_tokens, num_heads, value_dim))
    log_sum_exp = query.new_empty((num_tokens, num_heads), dtype=torch.float32)
    answer = AttentionOutput(output, log_sum_exp) if return_lse else output
    if num_tokens == 0 or num_sequences == 0:
        output.zero_()
        log_sum_exp.fill_(-math.inf)
        return answer

    accuracy, ptx = ACCURACY[query.dtype], launch.has_shuffle() and not wide
    value_side = side_spec(value_cache.mode, value_dim, _unit_bytes(value_codes), accuracy, ptx)
    float_type = torch.float64 if wide else torch.float32
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
    query = query if query.stride(2) == 1 else query.contiguous()
    unit_scale = scale * LOG2_E.value if features.soft_cap is None else scale / features.soft_cap
    early = launch.has_early_launch(query.device)

    first_key = None if features.first_key is None else features.first_key.contiguous()
    query_bias = features.query_query_bias
    logit_bias = features.logit_bias
    if query_bias is not None and query_bias.stride(-1) != 1:
        query_bias = query_bias.contiguous()
    if logit_bias is not None and logit_bias.stride(2) != 1:
        logit_bias = logit_bias.contiguous()
    unused = query_start_loc
    pdl = {"launch_pdl": True} if early else {}
    value_row = triton.next_power_of_2(value_dim)
    longest = block_table.shape[1] * block_size
    row_bytes = max(key_codes.shape[3], value_codes.shape[3])
    key_accuracy = min(accuracy, KEY_ACCURACY)
    keys = side_spec(key_cache.mode, head_dim, _unit_bytes(key_codes), key_accuracy, ptx)
    most_queries = min(num_tokens, max_query_len or num_tokens)
    for plan in launch.attention_plans(
        num_heads // kv_heads,
        most_queries,
        row_bytes,
        max(head_dim, value_dim),
        (keys.padded, value_side.padded),
        wide=wide,
        crowded=bool(CROWDED & {keys.kind, value_side.kind}) or value_side.streams > 8,
        in_memory=bool(IN_MEMORY & {keys.kind, value_side.kind}),
    ):
        # Where queries are few their digits cost nothing, and integers are had for less than
        # float16 numbers. Many queries are float16 numbers: one holds a bfloat16 that is not
        # rotated.
        key_side = side_spec(
            key_cache.mode,
            head_dim,
            _unit_bytes(key_codes),
            key_accuracy,
            ptx,
            not plan.query_rows,
        )
        whole = query.dtype is torch.bfloat16 and key_cache.mode.rotation is None
        parts = 1 if plan.query_rows and whole else 2
        parts = 1 if wide else 4 if key_side.digits else parts
        prepared, columns = prepare(
            query,
            key_side,
            parts,
            rotation_spec(key_cache.mode.rotation, head_dim, key_side.streams * key_side.padded),
            unit_scale,
            (output, log_sum_exp, query_start_loc),
            early,
        )
        spec = LoopSpec(
            key=key_side,
            value=value_side,
            block_size=block_size,
            group=num_heads // kv_heads,
            heads=plan.heads,
            tokens=plan.tokens,
            columns=plan.columns,
            parts=parts,
            tile=plan.tile,
            piece=plan.piece,
            stages=plan.stages,
            fewest=plan.fewest,
            most=plan.most,
            blocks=plan.blocks,
            least_split=plan.least_split,
            most_split=plan.most_split,
            splits=plan.splits,
            window=features.window or 0,
            soft_cap=features.soft_cap or 0.0,
            has_first_key=first_key is not None,
            has_slopes=features.alibi_slopes is not None,
            has_query_bias=query_bias is not None,
            has_logit_bias=logit_bias is not None,
            query_rows=plan.query_rows,
            wide=wide,
            ptx=ptx,
        )
        slots = plan.most_splits(longest)
        table_rows = num_tokens if plan.searches else num_sequences * plan.most
        partial = torch.empty(
            (table_rows * num_heads, slots, value_row), dtype=float_type, device=query.device
        )
        part_lse = torch.empty(
            (table_rows * num_heads, slots), dtype=float_type, device=query.device
        )
        head_blocks = triton.cdiv(spec.group, plan.heads) * kv_heads
        if plan.searches:
            blocks = num_tokens // plan.tokens + num_sequences
        else:
            blocks = num_sequences * plan.blocks
        attended = attend_kernel[(blocks * slots * head_blocks,)](
            prepared,
            columns,
            *_side_pointers(key_codes, key_words, key_side),
            *_side_pointers(value_codes, value_words, value_side),
            _level_table(key_side, query.device),
            _level_table(value_side, query.device),
            block_table,
            seq_lens,
            query_start_loc,
            unused if first_key is None else first_key,
            unused if features.alibi_slopes is None else features.alibi_slopes.contiguous(),
            unused if query_bias is None else query_bias,
            unused if logit_bias is None else logit_bias,
            partial,
            part_lse,
            num_sequences,
            slots,
            num_blocks,
            block_table.shape[1],
            block_table.stride(0),
            kv_heads,
            key_codes.stride(1) // key_side.unit_bytes,
            key_words.stride(1),
            value_codes.stride(1) // value_side.unit_bytes,
            value_words.stride(1),
            query_bias.stride(0) if query_bias is not None and query_bias.ndim == 3 else 0,
            0 if query_bias is None else query_bias.stride(-2),
            0 if query_bias is None else query_bias.shape[-1],
            0 if logit_bias is None or logit_bias.shape[0] == 1 else logit_bias.stride(0),
            0 if logit_bias is None or logit_bias.shape[1] == 1 else logit_bias.stride(1),
            0 if logit_bias is None else logit_bias.shape[2],
            KEY_BLOCK=key_codes.stride(0) // key_side.unit_bytes,
            KEY_TOKEN=key_codes.stride(2) // key_side.unit_bytes,
            KEY_WORDS_BLOCK=key_words.stride(0),
            KEY_WORDS_TOKEN=key_words.stride(2),
            VALUE_BLOCK=value_codes.stride(0) // value_side.unit_bytes,
            VALUE_TOKEN=value_codes.stride(2) // value_side.unit_bytes,
            VALUE_WORDS_BLOCK=value_words.stride(0),
            VALUE_WORDS_TOKEN=value_words.stride(2),
            SPEC=spec,
            EARLY=early,
            **plan.options(),
            **pdl,
        )
        if spec.transposes:
            check_operand_layout(attended)
        combine_kernel[(table_rows * num_heads,)](
            partial,
            part_lse,
            output,
            log_sum_exp,
            seq_lens,
            query_start_loc,
            unused if first_key is None else first_key,
            unused if features.sink_logits is None else features.sink_logits.contiguous(),
            num_sequences,
            slots,
            block_table.shape[1],
            num_tokens,
            num_heads,
            SPEC=spec,
            ROTATION=rotation_spec(value_cache.mode.rotation, value_dim, value_row),
            C=value_row,
            CHUNK=min(32, triton.next_power_of_2(slots)),
            HAS_SINK=features.sink_logits is not None,
            HAS_LSE=return_lse,
            EARLY=early,
            num_warps=4,
            **pdl,
        )
    return answer


def _side_pointers(codes: Tensor, words: Tensor, side: SideSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The integers of a side, its bytes of high bits, and its words."""
    integers = codes.view(torch.int16) if side.unit_bytes == 2 else codes
    high = codes[..., side.head_dim // 4 :] if side.bits == 3 else codes
    return integers, high, words
