"""Triton mirror of `kvq.reference.attention`.

Three launches: queries are rotated, scaled and split into float16 numbers; each program of the
loop takes some queries over a split of the keys; and the splits are put together, the output
rotated back. How a sequence is cut depends on its own length and number of queries alone, and so
its bits do too.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.checks import dtype_name
from kvq.kernels import launch
from kvq.kernels.attention_loop import LoopSpec, attend_kernel
from kvq.kernels.attention_pages import find_sequence, key_range, plan_splits
from kvq.kernels.attention_tile import LOG2_E
from kvq.kernels.hadamard import RotationSpec, rotate, sign_words, unrotate
from kvq.kernels.merge import merge_attention
from kvq.kernels.operands import SideSpec, side_spec
from kvq.kernels.rows import load_rows, not_finite, pick
from kvq.kernels.scaling import round_to_bfloat16
from kvq.modes import Rotation
from kvq.tier import AttentionFeatures, AttentionOutput, PagedKV, as_hnd, check_attention

__all__ = ["merge_attention", "paged_attention"]

#: Half an ulp of 1.0: what a codebook's levels are measured against.
ACCURACY = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}
#: The exponent that the largest entry of a query is brought to, plus twice the bias.
QUERY_BITS = tl.constexpr(254 + 13)
#: The same for integers of four digits.
DIGIT_BITS = tl.constexpr(254 + 25)
LN_2 = tl.constexpr(math.log(2.0))


@triton.constexpr_function
def _weight(side, stream):
    return side.weights[stream]


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "num_heads"])
def _prepare_kernel(
    query_ptr,
    out_ptr,
    column_ptr,
    output_ptr,
    lse_ptr,
    query_start_ptr,
    num_sequences,
    num_rows,
    num_heads,
    query_token,
    query_head,
    scale,
    SIDE: tl.constexpr,
    ROTATION: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    OUT_D: tl.constexpr,
    OUT_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Queries as operands, by stream; and for each the factor of its products, and its sum.

    Queries before the first sequence and after the last are answered here: they see nothing.
    """
    D: tl.constexpr = pick(SIDE, "head_dim")
    STREAMS: tl.constexpr = pick(SIDE, "streams")
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < num_rows
    base = query_ptr + row // num_heads * query_token + row % num_heads * query_head
    x = load_rows(base, live, D, C)
    if WIDE:
        x = x.to(tl.float64)
    if ROTATION is not None:
        x = rotate(x, ROTATION, R)
    # Channels in the order of an operand: streams, and in each that of `_query_operand`.
    P: tl.constexpr = pick(SIDE, "padded")
    DIGITS: tl.constexpr = pick(SIDE, "digits")
    NEAR: tl.constexpr = 4 if DIGITS else 2
    G: tl.constexpr = min(P, 16 * NEAR)
    x = x.permute(1, 0)
    total = tl.sum(x, 1) * (scale * pick(SIDE, "fold"))
    if DIGITS and pick(SIDE, "kind") == "bytes":
        # A register of four bytes gives four streams: even and odd crumbs of each half.
        x = x.reshape(R, P // G, G // 16, 4, 2, 4, 2).permute(0, 4, 6, 1, 3, 2, 5)
    else:
        x = x.reshape(R, P // G, G // (4 * NEAR), 4, NEAR, STREAMS).permute(0, 5, 1, 3, 2, 4)
    x = x.reshape(R, C)
    place = tl.arange(0, C)
    weight = tl.full([C], _weight(SIDE, 0), tl.float32)
    for j in tl.static_range(1, STREAMS):
        weight = tl.where(place // P == j, _weight(SIDE, j), weight)
    at = out_ptr + row[:, None] * (PARTS * C) + place[None, :]
    mask = live[:, None]
    extra = total * 0.0
    if WIDE:
        factor = total * 0.0 + scale * (pick(SIDE, "unit") * pick(SIDE, "fold"))
        tl.store(at, x * weight[None, :], mask=mask)
    else:
        # As integers, among which a NaN is the largest.
        largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1) >> 23
        # A power of two over that of the largest entry, and its inverse.
        up = tl.minimum(tl.maximum(0 - largest + (DIGIT_BITS if DIGITS else QUERY_BITS), 1), 253)
        down = ((254 - up) << 23).to(tl.float32, bitcast=True)
        if DIGITS:
            if pick(SIDE, "bits") == 4 and pick(SIDE, "kind") == "affine":
                # Codes of the upper nibble come less 8.
                extra = tl.sum(tl.where((place >= P)[None, :], x, 0.0), 1)
                extra = extra * (8.0 * scale * pick(SIDE, "unit") * pick(SIDE, "fold"))
            x = x * (up << 23).to(tl.float32, bitcast=True)[:, None]
            x = x * (1.0 / weight)[None, :]
            n = tl.floor(x + 0.5).to(tl.int32)
            for i in tl.static_range(PARTS):
                digit = ((n + 64) & 127) - 64 if i + 1 < PARTS else n
                tl.store(at + i * C, digit.to(tl.int8), mask=mask)
                n = (n - digit) >> 7
            factor = down * (scale * (pick(SIDE, "unit") * pick(SIDE, "fold")))
        else:
            x = x * (up << 23).to(tl.float32, bitcast=True)[:, None]
            factor = down * (scale * (pick(SIDE, "unit") * pick(SIDE, "fold")))
            high = x.to(tl.float16)
            tl.store(at, (high.to(tl.float32) * weight[None, :]).to(tl.float16), mask=mask)
            if PARTS == 2:
                low = (x - high.to(tl.float32)) * weight[None, :]
                tl.store(at + C, low.to(tl.float16), mask=mask)
        # The integers of a NaN are anything.
        factor = tl.where(largest == 255, float("nan"), factor)
    tl.store(column_ptr + 3 * row, factor, mask=live)
    tl.store(column_ptr + 3 * row + 1, total, mask=live)
    tl.store(column_ptr + 3 * row + 2, extra, mask=live)
    token = row // num_heads
    start = tl.load(query_start_ptr)
    end = tl.load(query_start_ptr + num_sequences)
    alone = live & ((token < start) | (token >= end))
    nothing = tl.zeros([R, OUT_C], output_ptr.dtype.element_ty)
    out = tl.arange(0, OUT_C)[None, :]
    tl.store(output_ptr + row[:, None] * OUT_D + out, nothing, mask=alone[:, None] & (out < OUT_D))
    tl.store(lse_ptr + row, tl.full([R], float("-inf"), tl.float32), mask=alone)


@triton.jit(
    do_not_specialize=["num_sequences", "num_slots", "table_width", "num_tokens", "num_heads"]
)
def _combine_kernel(
    partial_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    seq_lens_ptr,
    query_start_ptr,
    first_key_ptr,
    sink_ptr,
    num_sequences,
    num_slots,
    table_width,
    num_tokens,
    num_heads,
    SPEC: tl.constexpr,
    ROTATION: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Put the splits of one row together, and rotate the output back."""
    VALUE: tl.constexpr = pick(SPEC, "value")
    TOKENS: tl.constexpr = pick(SPEC, "tokens")
    WIDE: tl.constexpr = pick(SPEC, "wide")
    FLOAT: tl.constexpr = tl.float64 if WIDE else tl.float32
    D: tl.constexpr = pick(VALUE, "head_dim")
    STREAMS: tl.constexpr = pick(VALUE, "streams")
    head = tl.program_id(0) % num_heads
    row = tl.program_id(0) // num_heads
    SEARCH: tl.constexpr = pick(SPEC, "blocks") == 0
    if SEARCH:
        sequence = find_sequence(query_start_ptr, num_sequences, row, 0)
    else:
        sequence = row // pick(SPEC, "most")
    query_start = tl.load(query_start_ptr + sequence).to(tl.int32)
    q_len = tl.load(query_start_ptr + sequence + 1).to(tl.int32) - query_start
    token = row - query_start if SEARCH else row % pick(SPEC, "most")
    if (q_len < pick(SPEC, "fewest")) | (q_len > pick(SPEC, "most")):
        return
    if (token < 0) | (token >= q_len) | (query_start + token >= num_tokens):
        return
    length = tl.load(seq_lens_ptr + sequence).to(tl.int32)
    seq_len = tl.minimum(length, table_width * pick(SPEC, "block_size"))
    first_key = 0
    if pick(SPEC, "has_first_key"):
        first_key = tl.load(first_key_ptr + sequence).to(tl.int32)
    first_token = token // TOKENS * TOKENS
    start, end = key_range(seq_len, length - q_len, first_token, q_len, first_key, SPEC)
    _keys, splits = plan_splits(end - start, SPEC)
    splits = tl.where(length > 0, splits, 0)

    if EARLY:
        tl.extra.cuda.gdc_wait()
    slot = (row.to(tl.int64) * num_heads + head) * num_slots
    peak = tl.full([], float("-inf"), FLOAT)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        lse = tl.load(part_lse_ptr + slot + split, mask=split < splits, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(lse, 0))
    sink = tl.full([], float("-inf"), FLOAT)
    if HAS_SINK:
        sink = (tl.load(sink_ptr + head) * LOG2_E).to(FLOAT)
    seen = peak > float("-inf")
    peak = tl.maximum(peak, sink)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    place = tl.arange(0, C)
    mean = tl.zeros([C], FLOAT)
    weight = tl.zeros([], FLOAT)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        lse = tl.load(part_lse_ptr + slot + split, mask=split < splits, other=float("-inf"))
        w = tl.exp2(lse - peak)
        at = partial_ptr + (slot + split)[:, None] * C + place[None, :]
        part = tl.load(at, mask=(w > 0)[:, None], other=0.0)
        mean += tl.sum(part * w[:, None], 0)
        weight += tl.sum(w, 0)
    # A sum that is NaN is of something seen.
    seen = seen | not_finite(weight.to(tl.float32))
    denominator = weight + tl.exp2(sink - peak)
    mean = mean * (pick(VALUE, "fold") / tl.where(seen, denominator, 1.0))
    # From the order of streams to that of channels.
    mean = mean.reshape(STREAMS, C // STREAMS).permute(1, 0).reshape(C)
    channel = tl.arange(0, C)
    mean = tl.where(channel < D, mean, 0.0)
    if ROTATION is not None:
        mean = unrotate(mean.reshape(C, 1), ROTATION, 1).reshape(C)
    mean = tl.where(seen, mean, 0.0)
    target = (query_start + token).to(tl.int64) * num_heads + head
    if out_ptr.dtype.element_ty == tl.bfloat16:
        mean = round_to_bfloat16(mean)
    tl.store(out_ptr + target * D + channel, mean.to(out_ptr.dtype.element_ty), mask=channel < D)
    if HAS_LSE:
        natural = (peak + tl.log2(tl.where(seen, denominator, 1.0))) * LN_2
        tl.store(lse_ptr + target, tl.where(seen, natural, float("-inf")))


@lru_cache(maxsize=256)
def _rotation_spec(rotation: Rotation | None, head_dim: int, padded: int) -> RotationSpec | None:
    if rotation is None:
        return None
    return RotationSpec(
        head_dim,
        padded,
        rotation.rounds,
        Rotation.block_size(head_dim),
        sign_words(head_dim, rotation, padded),
        1.0 / rotation.gain(head_dim),
    )


def _padded(head_dim: int) -> int:
    return max(32, triton.next_power_of_2(head_dim))


def _unit_bytes(codes: Tensor) -> int:
    """Bytes of the integers that a row can be read as: 2, or 1 where rows lie on odd bytes."""
    lengths = (codes.data_ptr(), codes.shape[-1], *codes.stride()[:-1])
    return 2 if all(n % 2 == 0 for n in lengths) else 1


@lru_cache(maxsize=64)
def _level_table(side: SideSpec, device: torch.device) -> Tensor:
    """Levels by code, for look-ups in memory; else a placeholder."""
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

    Not for float64 queries. A float16 or bfloat16 query is answered through float16 operands with
    float32 sums, a float32 query in float64.
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
    key_kind = side_spec(key_cache.mode, head_dim, 2, accuracy, ptx).kind
    most_queries = min(num_tokens, max_query_len or num_tokens)
    for plan in launch.attention_plans(
        num_heads // kv_heads,
        most_queries,
        row_bytes,
        max(head_dim, value_dim),
        wide=wide,
        looks_up="halves" in (key_kind, value_side.kind),
    ):
        # Where queries are few their digits cost nothing, and integers are had for less than
        # float16 numbers. Many queries are float16 numbers; one will do for a bfloat16 query.
        key_side = side_spec(
            key_cache.mode,
            head_dim,
            _unit_bytes(key_codes),
            accuracy,
            ptx,
            not plan.query_rows,
        )
        parts = 2 if not plan.query_rows or query.dtype is torch.float16 else 1
        parts = 1 if wide else 4 if key_side.digits else parts
        prepared, columns = _prepare(
            query,
            key_side,
            parts,
            _rotation_spec(key_cache.mode.rotation, head_dim, key_side.streams * key_side.padded),
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
        attend_kernel[(blocks * slots * head_blocks,)](
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
        _combine_kernel[(table_rows * num_heads,)](
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
            ROTATION=_rotation_spec(value_cache.mode.rotation, value_dim, value_row),
            C=value_row,
            CHUNK=min(32, triton.next_power_of_2(slots)),
            HAS_SINK=features.sink_logits is not None,
            HAS_LSE=return_lse,
            EARLY=early,
            num_warps=4,
            **pdl,
        )
    return answer


def _prepare(
    query: Tensor,
    side: SideSpec,
    parts: int,
    rotation: RotationSpec | None,
    scale: float,
    answered: tuple[Tensor, Tensor, Tensor],
    early: bool,
) -> tuple[Tensor, Tensor]:
    """Queries as operands of keys, and what their products are to be multiplied by and moved.

    A query is one float64, one float16 number or a sum of two, or an integer of four digits.
    """
    num_tokens, num_heads = query.shape[:2]
    wide = query.dtype is torch.float32
    operand_type = torch.float64 if wide else torch.int8 if side.digits else torch.float16
    width = side.streams * side.padded
    num_rows = num_tokens * num_heads
    prepared = torch.empty((num_rows, parts, width), dtype=operand_type, device=query.device)
    columns = torch.empty(
        (num_rows, 3), dtype=torch.float64 if wide else torch.float32, device=query.device
    )
    output, log_sum_exp, query_start_loc = answered
    rows = launch.attention_rows(num_rows)
    _prepare_kernel[(triton.cdiv(num_rows, rows),)](
        query,
        prepared,
        columns,
        output,
        log_sum_exp,
        query_start_loc,
        len(query_start_loc) - 1,
        num_rows,
        num_heads,
        query.stride(0),
        query.stride(1),
        scale,
        SIDE=side,
        ROTATION=rotation,
        C=width,
        R=rows,
        PARTS=parts,
        WIDE=wide,
        OUT_D=output.shape[2],
        OUT_C=_padded(output.shape[2]),
        EARLY=early,
        num_warps=1,
    )
    return prepared, columns


def _side_pointers(codes: Tensor, words: Tensor, side: SideSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The integers of a side, its bytes of high bits, and its words."""
    integers = codes.view(torch.int16) if side.unit_bytes == 2 else codes
    high = codes[..., side.head_dim // 4 :] if side.bits == 3 else codes
    return integers, high, words
