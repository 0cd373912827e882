"""Every mode, dtype, head size, shape and layout, and every pair of them: the same bits.

A launch carries every sample. `make test` takes the covering array, `make test-all` the product.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from kvq import reference
from kvq.modes import MODES, Mode
from kvq.tier import Layout, PagedKV, new_paged_kv, word_dtype
from tests.cases import DTYPES, HEAD_DIMS, SHAPES, Launch, covering_launches
from tests.compare import assert_bit_exact

kernels = pytest.importorskip("kvq.kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BLOCK_SIZE = 13


def padded_pages(launch: Launch, tokens: int, heads: int) -> tuple[PagedKV, Tensor, Tensor]:
    """A cache within wider buffers of sentinels, and the buffers."""
    blocks = tokens // BLOCK_SIZE + 2
    inner = [heads, BLOCK_SIZE] if launch.layout is Layout.HND else [BLOCK_SIZE, heads]
    length = launch.mode.bytes_per_row(launch.head_dim)
    wide = (blocks, inner[0] + 1, inner[1] + 1)
    codes = torch.full((*wide, length + 5), 0xAB, dtype=torch.uint8, device=DEVICE)
    words = torch.full(wide, 123.0, dtype=word_dtype(launch.mode), device=DEVICE)
    cache = PagedKV(
        codes[:, : inner[0], : inner[1], 2 : length + 2],
        words[:, : inner[0], : inner[1]],
        launch.mode,
        launch.layout,
    )
    return cache, codes, words


def assert_parity(launch: Launch) -> None:
    """Quantized, dequantized, and written to padded pages in reverse order."""
    x = launch.x(DEVICE)
    if launch.mode.trellis is not None and DEVICE == "cpu":
        # The interpreter takes seconds for a search.
        x = x[:2, :1]
    want = reference.quantize(x, launch.mode)
    got = kernels.quantize(x, launch.mode)
    assert_bit_exact(got.codes, want.codes, "codes")
    assert_bit_exact(got.words, want.words, "words")
    assert_bit_exact(
        kernels.dequantize(*want, launch.mode, launch.head_dim),
        reference.dequantize(*want, launch.mode, launch.head_dim),
        "values",
    )
    # A write has a program for each head, and the interpreter pays for each.
    x = x.transpose(0, 1) if len(x) == 1 else x[:, :2]
    tokens, heads, _ = x.shape
    mapping = torch.arange(tokens, device=DEVICE).flip(0)
    pages = []
    for tier in (kernels, reference):
        cache, codes, words = padded_pages(launch, tokens, heads)
        # Values of a quick mode: `test_cache.py` has every mode as values.
        blocks = len(cache.codes)
        values = new_paged_kv(blocks, BLOCK_SIZE, heads, launch.head_dim, "int8", device=DEVICE)
        tier.reshape_and_cache(x, x, cache, values, mapping)
        pages.append((codes, words))
    for actual, expected in zip(*pages, strict=True):
        assert_bit_exact(actual, expected, "pages")


@pytest.mark.parametrize("launch", covering_launches(MODES), ids=str)
def test_the_covering_array(launch: Launch) -> None:
    assert_parity(launch)


@pytest.mark.product
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mode", MODES.values(), ids=str)
def test_the_product(mode: Mode, head_dim: int) -> None:
    for i, (dtype, shape) in enumerate(product(DTYPES, SHAPES)):
        assert_parity(Launch(mode, dtype, head_dim, shape, tuple(Layout)[i % 2]))
