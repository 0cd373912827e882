"""The attention mask of a packed cache: two numbers for each sequence, where that says it all.

A mask of queries by keys would be larger than the packed keys themselves. Causal attention, with
or without a window (which the layer knows) and with left padding, needs the first and the last
column that the last query may see: `[B, 1, 1, 2]` int64. It has four axes because transformers
hands on a mask of four axes as it is. Whatever else a model asks for is `sdpa_mask`'s boolean
`[B, 1, Q, K]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.masking_utils import causal_mask_function, sdpa_mask


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of the attention implementation `"kvq"`; see transformers' `sdpa_mask`.

    Args:
        batch_size: Sequences, B.
        q_length: New tokens of each, Q.
        kv_length: Columns, K.
        q_offset: Position of the first new token; a tensor `[]` for a static cache.
        kv_offset: Position of the first column.
        mask_function: The pattern.
        attention_mask: `[B, tokens]` bool, False for padding.
        local_size: The window or the chunk of a layer that has one.
        allow_is_causal_skip: False if the model has changed the pattern.
        use_vmap: True if the model has changed the pattern.
        device: Where the mask is to be.
        config: The model's.
        kwargs: What other mask functions take.

    Returns:
        `None` if all keys up to the query are visible and the columns end with the last query;
        `[B, 1, 1, 2]` int64, the first and the last column that the last query may see, or
        `[B, 1, 1, 1]`, the last, if it may see all before it; or `[B, 1, Q, K]` bool.
    """
    window = local_size is not None and getattr(config, "attention_chunk_size", None) is None
    # A lone query sees what is before it, however a model groups the tokens of its prompt.
    window = window and (allow_is_causal_skip or q_length == 1)
    causal = mask_function is causal_mask_function and (allow_is_causal_skip or q_length == 1)
    if not use_vmap and (causal or window):
        padding = None if attention_mask is None else attention_mask[:, : _end(q_offset, q_length)]
        if padding is None or _is_left_padding(padding, q_offset, q_length):
            ends_with_query = isinstance(q_offset, int) and (
                kv_offset + kv_length == q_offset + q_length
            )
            hides = padding is not None and not bool(padding.all())
            if ends_with_query and not hides:
                return None
            last = torch.as_tensor(q_offset, device=device) + (q_length - 1 - kv_offset)
            bounds = last.expand(batch_size)[:, None]
            if padding is not None and hides:
                first = (~padding).sum(-1).to(device) - kv_offset
                bounds = torch.cat((first[:, None], bounds), dim=-1)
            return bounds[:, None, None]
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]  # a tensor too
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )
    return mask


def _end(q_offset: int | Tensor, q_length: int) -> int | None:
    """Where the sequence ends, if the host knows it."""
    return q_offset + q_length if isinstance(q_offset, int) else None


def _is_left_padding(padding: Tensor, q_offset: int | Tensor, q_length: int) -> bool:
    """Whether padding `[B, tokens]` comes before all tokens. Not asked of a graph in the making.

    A padding mask that is too short hides the tokens that it does not name.
    """
    end = _end(q_offset, q_length)
    if is_compiling() or (end is not None and padding.shape[1] < end):
        return False
    return bool((padding[:, 1:] >= padding[:, :-1]).all())


def is_bounds(mask: Tensor | None) -> bool:
    """Whether a mask is one or two numbers of each sequence."""
    return mask is not None and mask.dtype is torch.int64


def first_column(mask: Tensor | None) -> Tensor | None:
    """The first column `[B]` that a sequence may see, if bounds hide any; `None` if not."""
    if mask is None or not is_bounds(mask) or mask.shape[3] == 1:
        return None
    return mask[:, 0, 0, 0].contiguous()


def expand_bounds(
    bounds: Tensor | None, q_length: int, kv_length: int, window: int | None
) -> Tensor:
    """The boolean mask `[B, 1, Q, K]` that bounds `[B, 1, 1, 1 or 2]` and a window stand for."""
    if bounds is None:
        bounds = torch.tensor([[[[kv_length - 1]]]])
    column = torch.arange(kv_length, device=bounds.device)
    back = torch.arange(q_length - 1, -1, -1, device=bounds.device)
    own = bounds[..., -1:] - back[:, None]  # [B, 1, Q, 1]
    visible = column <= own
    if bounds.shape[3] == 2:
        visible = visible & (column >= bounds[..., :1])
    return visible if window is None else visible & (column > own - window)


def to_bias(mask: Tensor) -> Tensor:
    """A boolean or additive mask as float32 to add to the logits, -inf where a key is hidden."""
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    bias = mask.to(torch.float32)
    # Models hide with the lowest number there is, since -inf alone in a row gives NaN.
    return bias.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
