"""What centered keys cost when they are read: attention with their known term beside without.

The known part of the logits is a bias of 4 bytes for each query, head and key, made by one matrix
product and read by the attention. Queries are divided by the pair scale. Times are as in
`kvq.analysis.decode_throughput`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvq import kernels
from kvq.analysis.decode_throughput import (
    HEAD_DIM,
    KV_HEADS,
    QUERY_HEADS,
    SHAPES,
    Shape,
    _Case,
    _case,
    _Timer,
    random_cache,
)
from kvq.modes import Mode
from kvq.reference.key_transforms import mean_logits, rotary_rows, scale_queries
from kvq.rotary import RotarySpec
from kvq.tier import AttentionFeatures, Layout

#: RoPE of all channels, as of Llama 3.
ROTARY = RotarySpec(
    tuple(float(x) for x in 500_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)), HEAD_DIM
)


class CenteredTime(NamedTuple):
    """One mode at one shape."""

    #: Of keys and values.
    mode: str
    #: Tokens of a page.
    block_size: int
    #: Sequences, keys of each, and how many of those are queries.
    batch: int
    context: int
    query_tokens: int
    #: Milliseconds of the attention alone.
    plain_ms: float
    #: Milliseconds of making the known term and scaling the queries, and of all of it.
    term_ms: float
    ms: float
    #: `ms / plain_ms`.
    ratio: float
    #: Bytes of the known term.
    term_bytes: int


class CenteredCase(NamedTuple):
    """A call of the attention, and what its keys lack."""

    plain: _Case
    #: `[B, H, D]` float32.
    mean: Tensor
    #: `[H, D]` float32.
    pair_scale: Tensor
    #: `[context, D]` float32.
    rows: Tensor

    def term(self) -> tuple[Tensor, Tensor]:
        """The scaled queries, and the known part of the logits `[T, Hq, context]`."""
        query = self.plain.query
        by_sequence = query.reshape(len(self.mean), -1, *query.shape[1:])
        term = mean_logits(by_sequence, self.mean, self.rows, ROTARY, HEAD_DIM**-0.5)
        return scale_queries(query, self.pair_scale), term.flatten(0, 1)

    def attend(self) -> Tensor:
        """The whole call."""
        query, term = self.term()
        output = kernels.paged_attention(
            *self.plain._replace(query=query),
            scale=HEAD_DIM**-0.5,
            features=AttentionFeatures(logit_bias=term),
            max_query_len=len(query) // len(self.plain.seq_lens),
            check=False,
        )
        assert isinstance(output, Tensor)
        return output


def centered_case(
    shape: Shape, mode: Mode, block_size: int, generator: torch.Generator
) -> CenteredCase:
    """Random rows whose keys lack random means, on the device of the generator."""
    blocks = shape.batch * -(-shape.context // block_size)
    keys, values = (
        random_cache(mode, blocks, block_size, Layout.HND, generator) for _ in range(2)
    )

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=generator.device, generator=generator)

    scale = random(KV_HEADS, HEAD_DIM // 2).div(4).exp()
    return CenteredCase(
        _case(shape, keys, values, block_size, generator),
        4 * random(shape.batch, KV_HEADS, HEAD_DIM),
        torch.cat((scale, scale), dim=-1),
        rotary_rows(ROTARY, 0, shape.context).to(generator.device),
    )


def bench_centered(
    modes: Sequence[Mode],
    shapes: Sequence[Shape] = SHAPES,
    *,
    block_size: int = 64,
    watch: Callable[[str], None] = lambda line: None,
) -> list[CenteredTime]:
    """Time attention over keys without their mean, with a mean for each sequence.

    Args:
        modes: Of keys and values.
        shapes: Batches; every mode is timed at each.
        block_size: Tokens of a page.
        watch: Called with a line for each row.

    Raises:
        ValueError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("device must be a CUDA device to be timed, got none")
    timer = _Timer()
    rows = []
    for mode in modes:
        for shape in shapes:
            generator = torch.Generator(device="cuda").manual_seed(1)
            case = centered_case(shape, mode, block_size, generator)
            plain, term, whole = map(timer, (case.plain.attend, case.term, case.attend))
            size = 4 * shape.batch * shape.query_tokens * QUERY_HEADS * shape.context
            row = CenteredTime(
                str(mode), block_size, *shape, plain, term, whole, whole / plain, size
            )
            watch(f"{mode} {shape}: {plain:.4f} ms, centered {whole:.4f} ms")
            rows.append(row)
    return rows
