"""How fast attention over a packed cache is, beside attention in bf16 and a pass that only reads.

Times are medians of CUDA-graph replays with the cache of the GPU emptied before each. The call is
the whole of `paged_attention`: rotation of the queries and of the output included. A mode is timed
once the same launch has passed the error budget on flat, peaked and outlying inputs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvq import kernels
from kvq.analysis.attention_budget import Budget, attention_budget
from kvq.kernels.read_pass import read_pass
from kvq.modes import Grid, Mode, Normalization
from kvq.scale_word import StoredWord
from kvq.tier import Layout, PagedKV, word_dtype

QUERY_HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
_REPLAYS = 13
#: Query tokens of a sequence whose errors are looked at.
_MOST_CHECKED = 64
#: More than the cache of any GPU.
_FLUSH_BYTES = 2**28
_PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Shape(NamedTuple):
    """A batch of sequences of one length."""

    batch: int
    context: int
    query_tokens: int = 1


#: The shapes of the table, and those about it.
SHAPES = (
    Shape(64, 32_768),
    Shape(16, 32_768),
    Shape(64, 4_096),
    Shape(1, 32_768),
    Shape(1, 4_096),
)
VERIFY_SHAPES = tuple(Shape(16, 32_768, tokens) for tokens in (2, 4, 8))
PREFILL_SHAPE = Shape(1, 32_768, 2_048)
BATCHES = tuple(Shape(2**i, 4_096) for i in range(9))


class DecodeTime(NamedTuple):
    """One row of `results/decode-h200.json`."""

    key_mode: str
    value_mode: str
    layout: str
    #: Tokens of a page.
    block_size: int
    #: Sequences, keys of each, and how many of those are queries.
    batch: int
    context: int
    query_tokens: int
    #: Milliseconds of a call.
    ms: float
    #: Milliseconds of the fastest attention over bf16 keys and values, and which it is.
    best_bf16_ms: float
    best_bf16_peer: str
    #: `ms / best_bf16_ms`.
    ratio: float
    #: Packed bytes over the time, as a share of the rate of a pass that only reads as many.
    share_of_read: float
    #: The largest of its errors over the budget, of the launch that was timed.
    worst_error: float
    #: Whether this is the fastest row of its modes, batch and context, of one query.
    best: bool


class _Timer:
    """Times calls with an empty cache before each."""

    def __init__(self) -> None:
        self.flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        times = []
        for _ in range(_REPLAYS + 2):
            self.flush.zero_()
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return float(statistics.median(times[2:]))


def random_cache(
    mode: Mode, blocks: int, block_size: int, layout: Layout, generator: torch.Generator
) -> PagedKV:
    """Random codes with words that make rows of about unit variance; no NaN in any row."""
    inner = (KV_HEADS, block_size) if layout is Layout.HND else (block_size, KV_HEADS)
    shape = (blocks, *inner, mode.bytes_per_row(HEAD_DIM))
    codes = torch.randint(
        0, 256, shape, dtype=torch.uint8, device=generator.device, generator=generator
    )
    if mode.grid is Grid.E4M3:
        # Below 2 in magnitude: no exponent of all ones.
        codes &= 0xBF
    spread = torch.rand(shape[:-1], device=generator.device, generator=generator) + 0.5
    # Levels of codebooks and of trellises have about unit variance.
    words = spread / {Grid.SIGNED: 74.0, Grid.E4M3: 0.6, Grid.UNSIGNED: 4.6}.get(mode.grid, 1.0)
    if mode.rotation is not None:
        words /= HEAD_DIM**0.5 if mode.folds_gain else HEAD_DIM**-0.5
    if mode.normalization is Normalization.SIGNED_MAX:
        words *= 2.7
    if mode.word is StoredWord.FLOAT32_ZERO_POINT:
        zero_points = torch.randint(
            5, 11, words.shape, dtype=torch.int32, device=words.device, generator=generator
        )
        words = ((words.view(torch.int32) & -16) | zero_points).view(torch.float32)
    elif mode.word is StoredWord.FLOAT16_PAIR:
        halves = torch.stack((words, -7.5 * words), dim=-1).half()
        words = halves.view(torch.float32)[..., 0]
    return PagedKV(codes, words.to(word_dtype(mode)).contiguous(), mode, layout)


class _Case(NamedTuple):
    """Arguments of a call, in its order."""

    query: Tensor
    key_cache: PagedKV
    value_cache: PagedKV
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    def attend(self) -> Tensor:
        """The call that is timed."""
        most = len(self.query) // len(self.seq_lens)
        output = kernels.paged_attention(
            *self, scale=HEAD_DIM**-0.5, max_query_len=most, check=False
        )
        assert isinstance(output, Tensor)
        return output


def _case(
    shape: Shape, keys: PagedKV, values: PagedKV, block_size: int, generator: torch.Generator
) -> _Case:
    """Queries, and a table of the first blocks of the caches in random order."""
    width = -(-shape.context // block_size)
    device = generator.device
    blocks = torch.randperm(shape.batch * width, device=device, generator=generator)
    query = torch.randn(
        (shape.batch * shape.query_tokens, QUERY_HEADS, HEAD_DIM),
        device=device,
        generator=generator,
    )
    integers = {"dtype": torch.int32, "device": device}
    starts = torch.arange(shape.batch + 1, **integers) * shape.query_tokens  # type: ignore[call-overload]
    lengths = torch.full((shape.batch,), shape.context, **integers)  # type: ignore[call-overload]
    table = blocks.to(torch.int32).view(shape.batch, width)
    return _Case(query.bfloat16(), keys, values, table, lengths, starts)


def worst_error(
    key_mode: Mode, value_mode: Mode, layout: Layout, block_size: int, query_tokens: int = 1
) -> float:
    """The largest error of attention over its budget, on inputs that are hard in different ways.

    Two sequences of 4,096 keys, the last `query_tokens` of which ask; logits of standard deviation
    0, 1, 8 and 30, queries with outliers, and scales of rows that differ by 10^4. At most 1 is
    within the budget.
    """
    generator = torch.Generator(device="cuda").manual_seed(3)
    shape = Shape(2, 4_096, query_tokens)
    blocks = shape.batch * shape.context // block_size
    keys = random_cache(key_mode, blocks, block_size, layout, generator)
    values = random_cache(value_mode, blocks, block_size, layout, generator)
    worst = 0.0
    for deviation, outliers, wild in (
        (0.0, False, False),
        (1.0, False, False),
        (8.0, False, False),
        (30.0, False, False),
        (8.0, True, False),
        (8.0, False, True),
    ):
        case = _case(shape, keys, values, block_size, generator)
        query = case.query.float() * deviation
        if outliers:
            query[..., 5] *= 30.0
        case = case._replace(query=query.bfloat16())
        if wild:
            case = case._replace(value_cache=_spread(values, generator))
        budget = attention_budget(*case, scale=HEAD_DIM**-0.5)
        worst = max(worst, _over(case.attend(), budget))
    return worst


def _checked(shape: Shape) -> int:
    """The query tokens that a shape's error is looked at with: its own, or enough of many."""
    return min(shape.query_tokens, _MOST_CHECKED)


def _spread(cache: PagedKV, generator: torch.Generator) -> PagedKV:
    """The same rows, times factors from 1 to 10^4."""
    factor = 10 ** (4 * torch.rand(cache.words.shape, device="cuda", generator=generator))
    if cache.mode.word is StoredWord.FLOAT16_PAIR:
        halves = cache.words[..., None].view(torch.float16) * factor[..., None].half()
        words = halves.view(torch.float32)[..., 0]
    else:
        words = cache.words * factor
        if cache.mode.word is StoredWord.FLOAT32_ZERO_POINT:
            zero_points = cache.words.view(torch.int32) & 15
            words = ((words.view(torch.int32) & -16) | zero_points).view(torch.float32)
    return cache._replace(words=words.to(cache.words.dtype).contiguous())


def _over(output: Tensor, budget: Budget) -> float:
    error = (output.double() - budget.exact).abs().amax(-1)
    return float((error / budget.allowed).nan_to_num(float("inf")).max())


def _peer_times(shape: Shape, timer: _Timer) -> dict[str, float]:
    """Milliseconds of attention over bf16 keys and values, by the peers that can."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(heads: int, tokens: int) -> Tensor:
        size = (shape.batch, heads, tokens, HEAD_DIM)
        return torch.randn(size, device="cuda", generator=generator, dtype=torch.bfloat16)

    # A chunk of a prompt sees half of itself: as many keys, none of them masked.
    seen = shape.context - (shape.query_tokens // 2 if shape.query_tokens > 8 else 0)
    query = random(QUERY_HEADS, shape.query_tokens)
    key, value = random(KV_HEADS, seen), random(KV_HEADS, seen)
    times = {}
    for name, backend in _PEERS.items():

        def attend(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

        try:
            times[name] = timer(attend)
        except RuntimeError:
            continue
    return times


def _bytes_read(modes: tuple[Mode, Mode], shape: Shape) -> int:
    """Bytes of the codes and words of a batch, keys and values."""
    rows = shape.batch * shape.context * KV_HEADS
    return rows * sum(mode.bytes_per_token_head(HEAD_DIM) for mode in modes)


def _read_rate(bytes_read: int, timer: _Timer) -> float:
    """Bytes a millisecond of a pass that only reads as many."""
    data = torch.randint(0, 2**31 - 1, (-(-bytes_read // 4),), dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    read = read_pass(data, out)
    return read / timer(lambda: read_pass(data, out)) if read else float("nan")


def bench_decode(
    modes: Sequence[tuple[Mode, Mode]],
    shapes: Sequence[Shape] = SHAPES,
    layouts: Sequence[tuple[Layout, int]] = ((Layout.HND, 16), (Layout.HND, 64)),
    *,
    watch: Callable[[str], None] = lambda line: None,
) -> list[DecodeTime]:
    """Time attention over packed caches of 8 KV heads of 128 channels, for 32 query heads.

    Args:
        modes: Key and value modes.
        shapes: Batches; every mode is timed at each.
        layouts: Layouts and block sizes.
        watch: Called with a line for each row.

    Returns:
        Rows, those outside the error budget left out.

    Raises:
        ValueError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("device must be a CUDA device to be timed, got none")
    timer = _Timer()
    peers = {shape: _peer_times(shape, timer) for shape in shapes}
    for shape, times in peers.items():
        watch(f"bf16 {shape}: {times}")
    rates = {
        size: _read_rate(size, timer)
        for size in {_bytes_read(pair, shape) for pair in modes for shape in shapes}
    }
    rows = [
        row
        for (keys, values), (layout, block_size) in itertools.product(modes, layouts)
        for row in _time_mode(keys, values, layout, block_size, shapes, peers, rates, timer, watch)
    ]
    return mark_best(rows)


def _time_mode(
    key_mode: Mode,
    value_mode: Mode,
    layout: Layout,
    block_size: int,
    shapes: Sequence[Shape],
    peers: dict[Shape, dict[str, float]],
    rates: dict[int, float],
    timer: _Timer,
    watch: Callable[[str], None],
) -> Iterator[DecodeTime]:
    errors = {
        count: worst_error(key_mode, value_mode, layout, block_size, count)
        for count in sorted({_checked(shape) for shape in shapes})
    }
    for count, error in errors.items():
        if error > 1.0:
            watch(
                f"{key_mode} {value_mode} {layout} {block_size}, {count} query tokens: "
                f"error {error:.2f} x the budget"
            )
    shapes = [shape for shape in shapes if errors[_checked(shape)] <= 1.0]
    if not shapes:
        return
    generator = torch.Generator(device="cuda").manual_seed(1)
    blocks = max(shape.batch * -(-shape.context // block_size) for shape in shapes)
    keys = random_cache(key_mode, blocks, block_size, layout, generator)
    values = random_cache(value_mode, blocks, block_size, layout, generator)
    for shape in shapes:
        case = _case(shape, keys, values, block_size, generator)
        ms = timer(case.attend)
        peer = min(peers[shape], key=peers[shape].__getitem__)
        best = peers[shape][peer]
        size = _bytes_read((key_mode, value_mode), shape)
        share = size / ms / rates[size]
        row = DecodeTime(
            str(key_mode), str(value_mode), str(layout), block_size, *shape, ms, best, peer,
            ms / best, share, errors[_checked(shape)], False,
        )  # fmt: skip
        watch(f"{key_mode} {layout} {block_size} {shape}: {ms:.4f} ms, {ms / best:.3f} x {peer}")
        yield row


def mark_best(rows: Sequence[DecodeTime]) -> list[DecodeTime]:
    """The rows, the fastest of each pair of modes, batch and context marked as such."""
    fastest: dict[tuple[object, ...], float] = {}
    for row in rows:
        if row.query_tokens == 1:
            key = (row.key_mode, row.value_mode, row.batch, row.context)
            fastest[key] = min(row.ms, fastest.get(key, row.ms))
    return [
        row._replace(
            best=row.query_tokens == 1
            and row.ms == fastest[row.key_mode, row.value_mode, row.batch, row.context]
        )
        for row in rows
    ]
