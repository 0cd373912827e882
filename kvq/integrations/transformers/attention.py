"""The attention function `"kvq"`, which reads packed pages where a packed cache is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvq
from kvq.integrations.transformers import full_precision
from kvq.integrations.transformers.full_precision import Columns, Query
from kvq.integrations.transformers.layers import PackedStates
from kvq.integrations.transformers.mask import expand_bounds, first_column, is_bounds, to_bias
from kvq.tier import AttentionFeatures, AttentionOutput


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PackedStates,
    value: Tensor | PackedStates,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' attention functions do it, over packed keys and values.

    Tensors, which a model passes without a packed cache, go to SDPA, or with a soft cap or sinks
    to the definition.

    Args:
        module: The attention layer.
        query: `[B, Hq, Q, D]`.
        key: What the cache handed back, or `[B, H, T, D]`.
        value: What the cache handed back, or `[B, H, T, Dv]`.
        attention_mask: As `packed_mask` makes it, or boolean or additive `[B, 1 or Hq, Q, K]`.
        scaling: Of the logits; `1 / sqrt(D)` if not given.
        dropout: 0 over a packed cache.
        options: `softcap`, `s_aux` (sink logits `[Hq]`), `sliding_window`, `is_causal`,
            `position_bias` and whatever else models pass.

    Returns:
        `[B, Q, Hq, Dv]` in the dtype of the query, and `None`.

    Raises:
        ValueError: A packed cache cannot do what the model asks for; the message names it.

    Exactness: within an error budget.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if not isinstance(key, PackedStates):
        return _attend_tensors(
            module, query, key, cast("Tensor", value), attention_mask, scale, dropout, options
        )
    states = key
    if states.unquantized:
        states.write_first(_first_key(states, attention_mask, query))
        return _attend_tensors(
            module,
            query,
            states.keys,
            states.values,
            attention_mask,
            scale,
            dropout,
            {**options, "sliding_window": states.window},
        )
    _check_causal(module, attention_mask, dropout, options)
    return _attend_packed(query, states, attention_mask, scale, options), None


def _check_causal(
    module: nn.Module, mask: Tensor | None, dropout: float, options: dict[str, Any]
) -> None:
    """Refuse what is not causal attention."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal:
        raise ValueError("is_causal must be True over a packed cache, got False")
    if dropout:
        raise ValueError(f"dropout must be 0 over a packed cache, got {dropout}")
    if options.get("position_bias") is not None:
        raise ValueError("position_bias must be None over a packed cache, got a tensor")
    if mask is not None and mask.dtype is torch.bool and mask.shape[2] > 1:
        after = torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device)
        after = after.triu(mask.shape[3] - mask.shape[2] + 1)
        if mask.shape[3] >= mask.shape[2] and not torch.compiler.is_compiling():
            seen = (mask & after).any()
            if bool(seen):
                raise ValueError(
                    "attention_mask must hide what comes after a query over a packed cache, "
                    "got one that shows it"
                )


def _attend_packed(
    query: Tensor,
    states: PackedStates,
    mask: Tensor | None,
    scale: float,
    options: dict[str, Any],
) -> Tensor:
    """`[B, Q, Hq, Dv]` over the pages and the tokens in full precision."""
    batch, _, count, _ = query.shape
    step, full = states.step, states.full_precision
    sinks = options.get("s_aux")
    sinks = None if sinks is None else sinks.detach().float()
    rows = query.transpose(1, 2).flatten(0, 1)
    bias = None
    if mask is not None and not is_bounds(mask):
        bias = to_bias(mask)
    # Columns of the mask whose pages were forgotten since it was made.
    gone = step.offset - states.mask_offset
    logit_bias = None
    if bias is not None:
        logit_bias = bias[..., gone:].expand(batch, -1, count, -1).transpose(1, 2).flatten(0, 1)
    first_key = first_column(mask)
    if first_key is not None and step.offset:
        first_key = (first_key - gone).clamp(min=0)
    features = AttentionFeatures(
        window=states.window,
        soft_cap=options.get("softcap"),
        sink_logits=sinks,
        logit_bias=logit_bias,
        first_key=first_key,
    )
    if full is None:
        output = _paged(rows, states, step.seq_lens, scale, features)
    else:
        beginning = _first_key(states, mask, query)
        states.write_first(beginning)
        whole = Query(
            query,
            step.start,
            beginning,
            None if bias is None else bias.expand(batch, -1, count, -1),
            states.mask_offset,
            states.window,
            scale,
            features.soft_cap,
        )
        before = cast("Columns", states.before)
        own = torch.arange(count, device=query.device) + step.start
        recent = Columns(
            torch.cat((before.keys, states.keys), 2),
            torch.cat((before.values, states.values), 2),
            torch.cat((before.positions, own[None]), 1),
        )
        parts = [full_precision.attend(whole, full.recent, recent, full.first_columns(beginning))]
        window = None if states.window is None else states.window - full.recent
        if window is None or window > 0:
            # Query p sees the packed keys up to p - recent: those of a sequence that much shorter.
            features = replace(
                features,
                window=window,
                sink_logits=None,
                first_key=(beginning + full.first - step.offset).clamp(min=0).expand(batch),
            )
            lengths = (step.seq_lens - full.recent).clamp(min=0)
            parts.append(_paged(rows, states, lengths, scale, features, with_lse=True))
        output = kvq.merge_attention(parts, sinks).output
    attended: Tensor = output.unflatten(0, (batch, count))
    return attended


def _paged(
    rows: Tensor,
    states: PackedStates,
    seq_lens: Tensor,
    scale: float,
    features: AttentionFeatures,
    with_lse: bool = False,
) -> Any:
    """Attention over the pages; `AttentionOutput` with the log-sum-exp, or the output alone."""
    batch = len(seq_lens)
    transform, step = states.transform, states.step
    if transform is None:
        return _read_pages(rows, states, seq_lens, step.query_start_loc, scale, features, with_lse)
    if transform.mean is not None and features.soft_cap is not None:
        raise ValueError(
            f"softcap must be None with centered keys, got {features.soft_cap}: what they add to "
            "the logits is added after it"
        )
    # Keys that anything is asked of: those of the mask, those there are, or all there can be.
    given = features.logit_bias
    if given is not None:
        columns = given.shape[2]
    elif isinstance(step.start, int):
        columns = step.start + step.q_len - step.offset
    else:
        columns = step.block_table.shape[1] * states.key_cache.words.shape[2]
    query = rows.unflatten(0, (batch, -1))  # [B, Q, Hq, D]
    count = query.shape[1]
    size = transform.queries_at_once(batch, query.shape[2], columns)
    parts = []
    for begin in range(0, count, size):
        part = query[:, begin : begin + size]
        chosen = part.shape[1]
        bias = transform.logits(part, step.offset, columns, scale)
        if bias is not None:
            if given is not None:
                masked = given.unflatten(0, (batch, count))[:, begin : begin + size]
                bias = bias + masked.flatten(0, 1)
            features = replace(features, logit_bias=bias)
        found = _read_pages(
            transform.scale_queries(part).flatten(0, 1),
            states,
            (seq_lens - (count - begin - chosen)).clamp(min=0),
            step.query_start_loc // count * chosen,
            scale,
            features,
            with_lse,
        )
        parts.append(found if with_lse else (found,))
    if len(parts) == 1:
        return AttentionOutput(*parts[0]) if with_lse else parts[0][0]
    whole = [
        torch.cat([x.unflatten(0, (batch, -1)) for x in pieces], 1).flatten(0, 1)
        for pieces in zip(*parts, strict=True)
    ]
    return AttentionOutput(*whole) if with_lse else whole[0]


def _read_pages(
    rows: Tensor,
    states: PackedStates,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    features: AttentionFeatures,
    with_lse: bool,
) -> Any:
    """One call of the packed attention."""
    found = kvq.paged_attention(
        rows,
        states.key_cache,
        states.value_cache,
        states.step.block_table,
        seq_lens,
        query_start_loc,
        scale=scale,
        features=features,
        return_lse=with_lse,
        max_query_len=len(rows) // len(seq_lens),
        check=False,
    )
    return AttentionOutput(*found) if with_lse else found


def _first_key(states: PackedStates, mask: Tensor | None, query: Tensor) -> Tensor:
    """Where each sequence begins, `[B or 1]`."""
    if mask is not None and not is_bounds(mask):
        full = states.full_precision
        if full is not None and full.first:
            raise ValueError(
                "first_tokens must be 0 with an attention mask other than causal with left "
                f"padding, got {full.first}"
            )
    first = first_column(mask)
    if first is None:
        return torch.zeros(1, dtype=torch.int64, device=query.device)
    return first + states.mask_offset


def _attend_tensors(
    module: nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attention over keys `[B, H, T, D]` and values `[B, H, T, Dv]` as they are."""
    window = options.get("sliding_window")
    count, length = query.shape[2], keys.shape[2]
    if is_bounds(mask) or (mask is None and window is not None and length >= window):
        mask = expand_bounds(mask, count, length, window).to(query.device)
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if softcap is None and sinks is None:
        output, _ = sdpa_attention_forward(
            module, query, keys, values, mask, dropout=dropout, scaling=scale, **options
        )
        return output, None
    if dropout:
        raise ValueError(f"dropout must be 0 with a soft cap or sinks, got {dropout}")
    if mask is None:
        mask = expand_bounds(None, count, length, None).to(query.device)
    kv_heads = keys.shape[1]
    grouped = query.unflatten(1, (kv_heads, -1)).float()  # [B, H, G, Q, D]
    logits = scale * (grouped @ keys.float()[:, :, None].mT).flatten(1, 2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + to_bias(mask)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink), -1)
    weights = logits.softmax(-1)[..., :length].nan_to_num(0.0)
    mean = weights.unflatten(1, (kv_heads, -1)) @ values.float()[:, :, None]
    return mean.flatten(1, 2).to(query.dtype).transpose(1, 2).contiguous(), None
