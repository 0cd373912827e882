"""What greedy decoding does on a packed cache: where it leaves full precision, and retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvq.evaluation.recipes import Recipe
from kvq.integrations.models import attending, run_model, transformers_cache

#: The length of the pieces whose repetition is counted.
GRAM: Final = 4

_NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
_QUESTION = "\nWhat is the pass key? The pass key is"


class Divergence(NamedTuple):
    """Greedy decoding of one prompt."""

    prompt: int
    #: The text of the recipe, or `full precision`.
    recipe: str
    #: New tokens.
    tokens: int
    #: The first new token that is not full precision's; `tokens` if none.
    first_difference: int
    #: Share of the new text's 4-grams that are distinct.
    distinct: float


class Passkey(NamedTuple):
    """Retrieval of one key from a long text."""

    #: Tokens of the prompt.
    length: int
    #: Where the key stood, as a share of the text.
    depth: float
    recipe: str
    found: bool


def distinct_grams(tokens: Sequence[int], size: int = GRAM) -> float:
    """Share of the runs of `size` tokens that are distinct; 1 for fewer tokens than that."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Index of the first token that differs; the number of tokens if none does."""
    for index, (ours, theirs) in enumerate(zip(tokens, reference, strict=True)):
        if ours != theirs:
            return index
    return len(tokens)


@torch.no_grad()
def greedy(model: Any, prompts: Tensor, cache: Any, count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt `[B, T]`, whatever they are; no token ends them."""
    logits = run_model(model, prompts.to(model.device), cache)
    found = [logits[:, -1:].argmax(-1)]
    while len(found) < count:
        logits = run_model(model, found[-1], cache)
        found.append(logits[:, -1:].argmax(-1))
    tokens: list[list[int]] = torch.cat(found, 1)[:, :count].tolist()
    return tokens


def continue_prompts(
    model: Any, prompts: Tensor, recipe: Recipe | None, count: int, capacity: int = 0
) -> list[list[int]]:
    """Greedy tokens on the cache of a recipe, or in full precision (`None`), of prompts `[B, T]`
    that run at once."""
    if recipe is None:
        with attending(model, None):
            return greedy(model, prompts, transformers_cache(model), count)
    with attending(model, "kvq"):
        return greedy(model, prompts, recipe.new_cache(model.config, capacity=capacity), count)


def measure_divergence(
    model: Any,
    indices: Sequence[int],
    prompts: Tensor,
    recipe: Recipe,
    references: Sequence[Sequence[int]],
) -> list[Divergence]:
    """Greedy decoding of prompts `[B, T]` beside the tokens of full precision of each."""
    count = len(references[0])
    found = continue_prompts(model, prompts, recipe, count, capacity=prompts.shape[1] + count)
    return [
        Divergence(
            index,
            str(recipe),
            count,
            first_difference(tokens, reference),
            distinct_grams(tokens),
        )
        for index, tokens, reference in zip(indices, found, references, strict=True)
    ]


def passkey_prompt(
    tokenizer: Any, filler: Sequence[int], length: int, depth: float, key: int
) -> Tensor:
    """A prompt `[length]` that hides a key in a text and asks for it.

    Raises:
        ValueError: The text is too short.
    """
    ends = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in (_NEEDLE.format(key=key), _QUESTION)
    ]
    room = length - len(ends[0]) - len(ends[1])
    if not 0 < room <= len(filler):
        raise ValueError(
            f"passkey must be a length with room for the key and within the text's {len(filler)} "
            f"tokens, got {length}"
        )
    before = int(depth * room)
    ids = [*filler[:before], *ends[0], *filler[before:room], *ends[1]]
    return torch.tensor(ids, dtype=torch.int64)


def measure_passkey(
    model: Any,
    tokenizer: Any,
    filler: Sequence[int],
    length: int,
    depth: float,
    recipe: Recipe | None,
) -> Passkey:
    """Ask for a key of five digits, which depends on length and depth alone."""
    key = 10_000 + (length * 7919 + int(depth * 1000) * 104_729) % 90_000
    prompt = passkey_prompt(tokenizer, filler, length, depth, key)
    (tokens,) = continue_prompts(model, prompt[None], recipe, 10, capacity=length + 10)
    name = "full precision" if recipe is None else str(recipe)
    return Passkey(length, depth, name, str(key) in tokenizer.decode(tokens))
