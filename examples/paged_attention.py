"""Write two sequences into a paged cache, attend over it, and compare with exact attention.

Keys and values have modes of their own. Tokens go to the slots that a block table gives them;
sequences of different lengths share the blocks. On CUDA tensors the same calls run the kernels.

python examples/paged_attention.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import kvq

LENGTHS = (100, 37)
QUERY_HEADS, HEADS, HEAD_DIM, BLOCK = 8, 2, 64, 16


def main() -> None:
    """Decode one token of each sequence."""
    torch.manual_seed(0)
    # Blocks 0 to 6 hold the first sequence, in any order; 7 to 9 the second.
    table = torch.tensor([[3, 1, 4, 0, 6, 5, 2], [8, 9, 7, 0, 0, 0, 0]])
    keys, values = (torch.randn(sum(LENGTHS), HEADS, HEAD_DIM) for _ in "kv")
    query = torch.randn(len(LENGTHS), QUERY_HEADS, HEAD_DIM)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    slots = table[sequence, positions // BLOCK] * BLOCK + positions % BLOCK

    exact = []
    for q, *rows in zip(query, keys.split(LENGTHS), values.split(LENGTHS), strict=True):
        k, v = (x.movedim(0, 1).repeat_interleave(QUERY_HEADS // HEADS, 0) for x in rows)
        exact.append(F.scaled_dot_product_attention(q[:, None], k, v)[:, 0])
    for key_mode, value_mode in (("int8", "int8"), ("int4", "int4"), ("lloyd3", "trellis2")):
        caches = [
            kvq.new_paged_kv(
                num_blocks=10, block_size=BLOCK, num_heads=HEADS, head_dim=HEAD_DIM, mode=mode
            )
            for mode in (key_mode, value_mode)
        ]
        kvq.reshape_and_cache(keys, values, *caches, slots)
        output = kvq.paged_attention(
            query,
            *caches,
            block_table=table,
            seq_lens=torch.tensor(LENGTHS),
            query_start_loc=torch.arange(len(LENGTHS) + 1),
            scale=HEAD_DIM**-0.5,
        )
        error = (output - torch.stack(exact)).norm() / torch.stack(exact).norm()
        print(f"keys {key_mode}, values {value_mode}: relative error {error:.4f}")


if __name__ == "__main__":
    main()
