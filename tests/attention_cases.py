"""Batches for attention over a paged cache, features with numbers that matter, and definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor

from kvq import reference
from kvq.modes import Mode
from kvq.modes import mode as find_mode
from kvq.reference import dequantize, quantize
from kvq.reference.exact import dequantize_exact
from kvq.tier import AttentionFeatures, AttentionOutput, Layout, PagedKV, QuantizedKV, new_paged_kv

INT8, INT4, INT2, FP8 = (find_mode(name) for name in ("int8", "int4", "int2", "fp8"))
PLAIN = AttentionFeatures()
NO_BLOCK = 10**6  # where a table is not looked at


@dataclass
class Batch:
    """Arguments of `paged_attention`, and the rows that the caches hold, sequence by sequence."""

    query: Tensor
    key_cache: PagedKV
    value_cache: PagedKV
    block_table: Tensor
    seq_lens: list[int]
    q_lens: list[int]
    keys: list[Tensor] = field(repr=False)
    values: list[Tensor] = field(repr=False)
    scale: float = 0.3

    @property
    def starts(self) -> list[int]:
        return [sum(self.q_lens[:i]) for i in range(len(self.q_lens) + 1)]

    def run(
        self,
        features: AttentionFeatures = PLAIN,
        *,
        check: bool | None = None,
        index_dtype: torch.dtype = torch.int64,
        tier: ModuleType = reference,
        max_query_len: int | None = None,
    ) -> AttentionOutput:
        result = tier.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table.to(index_dtype),
            torch.tensor(self.seq_lens, dtype=index_dtype, device=self.query.device),
            torch.tensor(self.starts, dtype=index_dtype, device=self.query.device),
            scale=self.scale,
            features=features,
            return_lse=True,
            check=check,
            max_query_len=max_query_len,
        )
        assert isinstance(result, AttentionOutput)
        return result

    def only(self, *sequences: int) -> Batch:
        """A batch of these sequences alone, in this order, over the same caches."""
        starts = self.starts
        parts = [self.query[starts[s] : starts[s + 1]] for s in sequences]
        return replace(
            self,
            query=torch.cat(parts),
            block_table=self.block_table[list(sequences)],
            seq_lens=[self.seq_lens[s] for s in sequences],
            q_lens=[self.q_lens[s] for s in sequences],
            keys=[self.keys[s] for s in sequences],
            values=[self.values[s] for s in sequences],
        )


def poisoned(cache: PagedKV) -> PagedKV:
    """Random bytes under NaN words: reading what was never written shows."""
    cache.codes.random_(0, 256)
    cache.words.fill_(math.nan)
    return cache


def write_row(cache: PagedKV, block: int, offset: int, stored: QuantizedKV) -> None:
    """One token's rows, without the code under test."""
    hnd = cache.layout is Layout.HND
    place = (block, slice(None), offset) if hnd else (block, offset)
    cache.codes[place], cache.words[place] = stored


def make_batch(
    seq_lens: list[int],
    q_lens: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (32, 16),
    modes: tuple[Mode, Mode] = (INT8, INT4),
    block_size: int = 4,
    layout: Layout = Layout.HND,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    keys: list[Tensor] | None = None,
    values: list[Tensor] | None = None,
    spare_entries: int = 2,
) -> Batch:
    """Gaussian sequences in shuffled blocks; table entries that are not needed name no block."""
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    needed = [-(-length // block_size) for length in seq_lens]
    blocks = torch.randperm(sum(needed) + 2).tolist()
    table = torch.full((len(seq_lens), max(needed, default=0) + spare_entries), NO_BLOCK)
    read = dequantize_exact if dtype is torch.float64 else dequantize
    caches, sides = [], []
    for dim, mode, given_rows in zip(dims, modes, (keys, values), strict=True):
        cache = poisoned(new_paged_kv(len(blocks), block_size, kv_heads, dim, mode, layout=layout))
        side = []
        free = iter(blocks)
        for sequence, length in enumerate(seq_lens):
            rows = (
                torch.randn(length, kv_heads, dim) if given_rows is None else given_rows[sequence]
            )
            if length == 0:
                side.append(rows.to(torch.float64))
                continue
            stored = quantize(rows, mode)
            side.append(read(*stored, mode, dim).to(torch.float64))
            for j in range(length):
                if j % block_size == 0:
                    table[sequence, j // block_size] = next(free)
                block = int(table[sequence, j // block_size])
                row = QuantizedKV(stored.codes[j], stored.words[j])
                write_row(cache, block, j % block_size, row)
        caches.append(cache)
        sides.append(side)
    query = torch.randn(sum(q_lens), query_heads, dims[0]).to(dtype)
    return Batch(query, caches[0], caches[1], table, seq_lens, q_lens, sides[0], sides[1])


def with_odd_rows(batch: Batch) -> Batch:
    """The same with a byte after each row of codes."""
    sides = {}
    for side in ("key_cache", "value_cache"):
        codes = getattr(batch, side).codes
        wider = codes.new_zeros((*codes.shape[:-1], codes.shape[-1] + 1))
        wider[..., :-1] = codes
        sides[side] = getattr(batch, side)._replace(codes=wider[..., :-1])
    return replace(batch, **sides)


def brute_force(batch: Batch, f: AttentionFeatures = PLAIN) -> AttentionOutput:
    """The definition, one query, one head and one key at a time, in float64."""
    num_tokens, query_heads, _ = batch.query.shape
    kv_heads, value_dim = batch.values[0].shape[1:]
    output = torch.zeros(num_tokens, query_heads, value_dim, dtype=torch.float64)
    lse = torch.full((num_tokens, query_heads), -math.inf, dtype=torch.float64)
    token = -1
    for s, (seq_len, q_len) in enumerate(zip(batch.seq_lens, batch.q_lens, strict=True)):
        for i in range(q_len):
            token += 1
            pos = seq_len - q_len + i
            for head in range(query_heads):
                kv_head = head * kv_heads // query_heads
                q = batch.query[token, head].to(torch.float64)
                scores = (batch.keys[s][:, kv_head] @ q).tolist()
                logits, seen = [], []
                for j in range(seq_len):
                    if j > pos:
                        continue
                    if f.window is not None and pos - j >= f.window:
                        continue
                    if f.first_key is not None and j < int(f.first_key[s]):
                        continue
                    x = batch.scale * scores[j]
                    if f.soft_cap is not None:
                        x = f.soft_cap * math.tanh(x / f.soft_cap)
                    if f.alibi_slopes is not None:
                        x += float(f.alibi_slopes[head]) * (j - pos)
                    if f.query_query_bias is not None:
                        table = f.query_query_bias
                        table = table[s] if table.ndim == 3 else table
                        new = j - (seq_len - q_len)
                        if i < len(table) and 0 <= new < len(table):
                            x += float(table[i, new])
                    if f.logit_bias is not None:
                        t, h, _ = f.logit_bias.shape
                        x += float(f.logit_bias[token if t > 1 else 0, head if h > 1 else 0, j])
                    if x != -math.inf:
                        logits.append(x)
                        seen.append(j)
                if not logits:
                    continue
                extra = [] if f.sink_logits is None else [float(f.sink_logits[head])]
                peak = max(logits + extra)
                weights = [math.exp(x - peak) for x in logits]
                total = sum(weights) + sum(math.exp(x - peak) for x in extra)
                rows = batch.values[s][seen, kv_head]
                output[token, head] = torch.tensor(weights, dtype=torch.float64) @ rows / total
                lse[token, head] = peak + math.log(total)
    return AttentionOutput(output, lse)


def same(actual: AttentionOutput, expected: AttentionOutput) -> bool:
    return all(
        torch.equal(a.nan_to_num(nan=1e9), b.nan_to_num(nan=1e9))
        for a, b in zip(actual, expected, strict=True)
    )


RAGGED = ([9, 0, 4, 12, 2, 6], [3, 1, 4, 1, 4, 0])


def make_features(names: set[str], batch: Batch, seed: int = 0) -> AttentionFeatures:
    """The named features with numbers that matter."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def holes(x: Tensor) -> Tensor:
        return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.3, -math.inf)

    tokens, heads, sequences = *batch.query.shape[:2], len(batch.seq_lens)
    longest = max(batch.seq_lens, default=0)
    every = {
        "window": {"window": 4},
        "soft_cap": {"soft_cap": 0.7},
        "alibi": {"alibi_slopes": randn(heads).abs() / 3},
        "sinks": {"sink_logits": randn(heads)},
        "tree": {"query_query_bias": holes(randn(4, 4))},
        "trees": {"query_query_bias": holes(randn(sequences, 5, 5))},
        "bias": {"logit_bias": holes(randn(tokens, heads, longest + 3))},
        "key_bias": {"logit_bias": randn(1, 1, longest)},
        "padding": {"first_key": torch.arange(sequences) % 3},
    }
    fields: dict = {}
    for name in sorted(names):
        fields |= every[name]
    return AttentionFeatures(**fields)


NAMES = ("window", "soft_cap", "alibi", "sinks", "tree", "trees", "bias", "key_bias", "padding")
