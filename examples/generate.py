"""Generate with a packed cache, and say what it took.

Needs transformers: pip install 'kvq[hf]'.

python examples/generate.py FOLDER_OR_GGUF int4 int2 "The first thing a reader sees is"
"""

from __future__ import annotations

import sys

import torch

from kvq.integrations.capture import load_model
from kvq.integrations.models import cache_argument
from kvq.integrations.transformers import KVQuantCache


def main(path: str, key_mode: str, value_mode: str, prompt: str) -> None:
    """Continue a prompt by 40 greedy tokens."""
    model, tokenizer, _ = load_model(path)
    model.set_attn_implementation("kvq")
    cache = KVQuantCache(model.config, key_mode, value_mode)
    ids = torch.tensor([tokenizer.encode(prompt)])
    # `cache=cache`, or `past_key_values=cache` before transformers 5.24.
    options = {cache_argument(model): cache}
    tokens = model.generate(ids, max_new_tokens=40, do_sample=False, **options)
    print(tokenizer.decode(tokens[0]))
    memory = cache.memory()
    print(
        f"{cache.get_seq_length()} tokens: {memory.total} bytes stored, "
        f"{memory.unpacked} unpacked in {model.dtype}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
