"""Likelihood over windows of a text: a model on a packed cache beside itself without one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvq.checks import check_dtype, check_int, check_list, check_shape, check_tensor
from kvq.evaluation.recipes import Recipe
from kvq.integrations.models import attending, check_model, check_token_ids, run_model

#: Positions whose distributions are compared at once.
_CHUNK: Final = 256


class WindowSums(NamedTuple):
    """Sums over the tokens of one window that were scored in one phase."""

    #: The window's index.
    window: int
    #: The text of the recipe.
    recipe: str
    #: `prefill`: tokens of the prompt; `decode`: tokens run one at a time.
    phase: str
    #: Tokens that were predicted.
    tokens: int
    #: Negative log-likelihood of the text, in nats.
    nll: float
    #: The same of the model without a packed cache.
    full_nll: float
    #: Kullback-Leibler divergence from the distributions of the model without a packed cache.
    kld: float
    #: Tokens at which both hold the same token the likeliest.
    agree: int


def cut_windows(documents: Sequence[Sequence[int]], length: int, count: int) -> Tensor:
    """Windows of `length` tokens, evenly spread over documents; none spans two.

    Args:
        documents: Token ids of each.
        length: Tokens in a window.
        count: How many windows.

    Returns:
        `[count, length]` int64.

    Raises:
        ValueError: The documents have fewer windows.
    """
    check_int("length", length, 1)
    check_int("count", count)
    windows = [
        document[start : start + length]
        for document in documents
        for start in range(0, len(document) - length + 1, length)
    ]
    if not 1 <= count <= len(windows):
        raise ValueError(
            f"windows must be from 1 to the {len(windows)} windows of {length} tokens, got {count}"
        )
    chosen = [windows[index * len(windows) // count] for index in range(count)]
    return torch.tensor(chosen, dtype=torch.int64)


def evaluate_window(
    model: Any, index: int, ids: Tensor, recipes: Sequence[Recipe], decode: int, offset: int = 0
) -> Iterator[WindowSums]:
    """Measure recipes on one window: `evaluate_windows` of one, `ids` `[T]`."""
    check_shape("ids", check_tensor("ids", ids), (None,), "[T]")
    return evaluate_windows(model, [index], ids[None], recipes, decode, offset)


@torch.no_grad()
def evaluate_windows(
    model: Any,
    indices: Sequence[int],
    ids: Tensor,
    recipes: Sequence[Recipe],
    decode: int,
    offset: int = 0,
) -> Iterator[WindowSums]:
    """Measure recipes on windows that run at once.

    Args:
        model: A causal model of transformers.
        indices: Of the windows.
        ids: `[B, T]` int64, their tokens.
        recipes: What to measure, bound to the model.
        decode: How many of the last tokens are run one at a time; the others are run at once.
        offset: The position of the first token, for full precision and recipes alike.

    Yields:
        One or two rows for each recipe and window: `prefill`, and `decode` if there is any.

    Raises:
        ValueError: `decode` is not from 0 to T - 2, or `indices` are not as many as windows.
    """
    check_model(model)
    check_dtype("ids", check_tensor("ids", ids), torch.int64)
    check_shape("ids", ids, (None, None), "[B, T]")
    check_token_ids("ids", ids, model)
    check_list("recipes", recipes, Recipe)
    check_int("decode", decode)
    check_int("offset", offset, 0)
    if len(indices) != len(ids):
        raise ValueError(f"indices must be as many as windows, {len(ids)}, got {len(indices)}")
    tokens = ids.shape[1]
    if not 0 <= decode <= tokens - 2:
        raise ValueError(f"decode must be from 0 to {tokens - 2}, got {decode}")
    ids = ids.to(model.device)
    options = {}

    def run(chunk: slice, cache: Any) -> Tensor:
        if offset:
            positions = torch.arange(chunk.start, chunk.stop, device=model.device) + offset
            options["position_ids"] = positions[None].expand(len(ids), -1)
        return run_model(model, ids[:, chunk], cache, **options)

    with attending(model, None):
        reference = run(slice(0, tokens), None)
    prompt = tokens - decode
    for recipe in recipes:
        with attending(model, "kvq"):
            cache = recipe.new_cache(model.config, capacity=tokens)
            parts = [run(slice(0, prompt), cache)]
            parts += [run(slice(i, i + 1), cache) for i in range(prompt, tokens - 1)]
        logits = torch.cat(parts, 1)
        # The last token of the prompt is scored in its pass.
        phases = (
            ("prefill", slice(0, min(prompt, tokens - 1))),
            ("decode", slice(prompt, tokens - 1)),
        )
        for place, index in enumerate(indices):
            for phase, rows in phases:
                if rows.stop > rows.start:
                    sums = compare(
                        logits[place, rows], reference[place, rows], ids[place, 1:][rows]
                    )
                    yield WindowSums(index, str(recipe), phase, rows.stop - rows.start, *sums)


def compare(logits: Tensor, reference: Tensor, targets: Tensor) -> tuple[float, float, float, int]:
    """Sums over positions: NLL, NLL of the reference, KL divergence from it, agreement.

    Args:
        logits: `[T, V]`.
        reference: `[T, V]`.
        targets: `[T]`, the tokens that came.

    Returns:
        As the last fields of `WindowSums`, in float64.
    """
    nll = full = kld = 0.0
    agree = 0
    for start in range(0, len(targets), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        ours, theirs = (x[chunk].double().log_softmax(-1) for x in (logits, reference))
        target = targets[chunk, None]
        nll -= float(ours.gather(1, target).sum())
        full -= float(theirs.gather(1, target).sum())
        kld += float((theirs.exp() * (theirs - ours)).sum())
        agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return nll, full, kld, agree


def perplexity(nll: float, tokens: int) -> float:
    """`exp(nll / tokens)`."""
    return math.exp(nll / tokens)
