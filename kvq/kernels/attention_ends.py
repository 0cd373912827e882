"""What comes before the loop of `kvq.kernels.attention`, and after it.

Queries become operands of keys; and the splits of a sequence are put together, and the output
rotated back.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels import launch
from kvq.kernels.attention_pages import find_sequence, key_range, load_count, plan_splits
from kvq.kernels.attention_tile import LOG2_E
from kvq.kernels.hadamard import RotationSpec, rotate, sign_words, unrotate
from kvq.kernels.rows import load_rows, not_finite, pick
from kvq.kernels.scaling import round_to_bfloat16
from kvq.kernels.side_spec import SideSpec
from kvq.modes import Rotation

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
    """Queries as operands, by stream; and for each the factor of its products, its sum, and what
    is added for codes that come less 8.

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
    if pick(SIDE, "by_register"):
        # Streams of four bytes: each half of a register, and of crumbs the even and the odd.
        x = x.reshape(R, P // G, G // 16, 4, 2, 4, STREAMS // 2).permute(0, 4, 6, 1, 3, 2, 5)
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
def combine_kernel(
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
    length = load_count(seq_lens_ptr, sequence)
    seq_len = tl.minimum(length, table_width * pick(SPEC, "block_size"))
    first_key = 0
    if pick(SPEC, "has_first_key"):
        first_key = tl.minimum(load_count(first_key_ptr, sequence), seq_len)
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
def rotation_spec(rotation: Rotation | None, head_dim: int, padded: int) -> RotationSpec | None:
    """A rotation as compile-time values, for tiles of `padded` channels."""
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


def prepare(
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
        OUT_C=triton.next_power_of_2(output.shape[2]),
        EARLY=early,
        num_warps=1,
    )
    return prepared, columns
