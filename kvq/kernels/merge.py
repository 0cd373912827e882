"""The kernel of `merge_attention`; it faces the end of `kvq.reference.attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels import launch
from kvq.kernels.scaling import round_to_bfloat16
from kvq.tier import AttentionOutput, check_merge


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _merge_kernel(
    outputs,
    log_sum_exps,
    sink_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    num_heads,
    D: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """Weigh R rows of every part; `outputs` and `log_sum_exps` are tuples of pointers."""
    FLOAT: tl.constexpr = tl.float64
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < num_rows
    channel = tl.arange(0, C)[None, :]
    mask = live[:, None] & (channel < D)
    at = row[:, None] * D + channel

    sink = tl.full([R], float("-inf"), FLOAT)
    if HAS_SINK:
        sink = tl.load(sink_ptr + row % num_heads, mask=live, other=0.0).to(FLOAT)
    # A NaN need not be the peak: its own weight is NaN.
    peak = sink
    seen = row < 0
    for i in tl.static_range(len(log_sum_exps)):
        lse = tl.load(log_sum_exps[i] + row, mask=live, other=0.0).to(FLOAT)
        seen = seen | (lse != float("-inf"))
        peak = tl.maximum(peak, lse)
    denominator = tl.exp(sink - peak)
    for i in tl.static_range(len(log_sum_exps)):
        lse = tl.load(log_sum_exps[i] + row, mask=live, other=0.0).to(FLOAT)
        denominator += tl.exp(lse - peak)
    mean = tl.zeros([R, C], FLOAT)
    for i in tl.static_range(len(outputs)):
        lse = tl.load(log_sum_exps[i] + row, mask=live, other=0.0).to(FLOAT)
        weight = tl.exp(lse - peak) / denominator
        # What sees no key is not even read.
        visible = mask & (lse != float("-inf"))[:, None]
        part = tl.load(outputs[i] + at, mask=visible, other=0.0).to(FLOAT)
        mean += part * weight[:, None]
    mean = tl.where(seen[:, None], mean, 0.0)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        mean = round_to_bfloat16(mean.to(tl.float32))
    tl.store(out_ptr + at, mean.to(out_ptr.dtype.element_ty), mask=mask)
    log_sum_exp = tl.where(seen, peak + tl.log(denominator), float("-inf"))
    tl.store(lse_ptr + row, log_sum_exp.to(lse_ptr.dtype.element_ty), mask=live)


def merge_attention(
    parts: Sequence[AttentionOutput], sink_logits: Tensor | None = None
) -> AttentionOutput:
    """Triton mirror of `kvq.reference.merge_attention`.

    It works in float64, and rounds once.
    """
    check_merge(parts, sink_logits)
    like_output, like_lse = parts[0]
    launch.check_device("parts", like_output)
    output = torch.empty_like(like_output, memory_format=torch.contiguous_format)
    log_sum_exp = torch.empty_like(like_lse, memory_format=torch.contiguous_format)
    num_rows, dim = like_lse.numel(), like_output.shape[-1]
    if num_rows == 0:
        return AttentionOutput(output, log_sum_exp)
    outputs = tuple(part.contiguous() for part, _ in parts)
    log_sum_exps = tuple(part.contiguous() for _, part in parts)
    rows = launch.attention_rows(num_rows)
    _merge_kernel[(triton.cdiv(num_rows, rows),)](
        outputs,
        log_sum_exps,
        like_lse if sink_logits is None else sink_logits.contiguous(),
        output,
        log_sum_exp,
        num_rows,
        like_lse.shape[-1] if like_lse.ndim else 1,
        D=dim,
        C=triton.next_power_of_2(dim),
        R=rows,
        HAS_SINK=sink_logits is not None,
        num_warps=4,
    )
    return AttentionOutput(output, log_sum_exp)
