"""Say what recipes do to a model: the divergence of its predictions from full precision.

Without a model there is a tiny one with random weights, and the text is random tokens: that shows
how, and says nothing about models. `kvq eval` does the same for a real text, with standard errors
over windows, and goes on where it was stopped.

Needs transformers: pip install 'kvq[hf]'.

python examples/compare_recipes.py [FOLDER_OR_GGUF TEXT]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kvq.evaluation.recipes import parse_recipe
from kvq.evaluation.windows import evaluate_window
from kvq.integrations.capture import load_model
from kvq.integrations.models import random_model

RECIPES = ("int8", "int4", "k=int4,v=int4,center=first", "k=int8,v=lloyd2_unbiased,first=4")
TOKENS = 128


def main(*arguments: str) -> None:
    """Measure the recipes on the first tokens of the text."""
    if arguments:
        loaded = load_model(arguments[0])
        model = loaded.model
        ids = loaded.tokenizer(Path(arguments[1]).read_text(encoding="utf-8"))["input_ids"]
        ids = torch.tensor(ids[:TOKENS])
    else:
        torch.manual_seed(0)
        model = random_model("tiny", "cpu", torch.float32)
        ids = torch.randint(model.config.vocab_size, (TOKENS,))
    recipes = [parse_recipe(text).bind(model) for text in RECIPES]
    for row in evaluate_window(model, 0, ids, recipes, decode=0):
        print(f"{row.recipe}: KL divergence {row.kld / row.tokens:.2e} nats per token")


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
