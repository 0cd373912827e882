"""vLLM's per-token-head caches: their bytes as paged caches of this package, and back.

In `int8_per_token_head`, `fp8_per_token_head` and `int4_per_token_head` vLLM keeps keys and values
of a layer in one tensor `[blocks, heads, block_size, content]` of bytes, where `content` is

    [ K codes | K word, float32 | V codes | V word, float32 ]

of one slot and head; codes and words are those of this package. The memory is in the order
`[blocks, block_size, heads, content]` (NHD) unless vLLM was told otherwise, so the tensor is not
contiguous. What vLLM *writes* in `int4` is `kvq.modes.INT4_FIRST_IMPLEMENTATION`: its signs repeat
from block to block of the rotation, its rotated row is rounded to the dtype of the input, and its
zero-point can saturate.

Facts as of vLLM 0.33. `docs/conformance.md` says what differs and what cannot be converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvq import dispatch
from kvq.checks import check_dtype, check_shape, check_tensor, resolve_enum
from kvq.modes import INT4_FIRST_IMPLEMENTATION, MODES, Mode, Rotation
from kvq.tier import Layout, PagedKV, as_hnd, check_cache_pair

#: Bytes of a word, which follows the codes of its row.
WORD_BYTES: Final = 4


class CacheFormat(NamedTuple):
    """What a `kv_cache_dtype` of vLLM stands for."""

    #: How its rows are stored, and how vLLM encodes them.
    mode: Mode
    #: The dtype of vLLM's tensor; e4m3 codes are bytes there too.
    dtype: torch.dtype


#: By vLLM's `kv_cache_dtype`.
FORMATS: Final[Mapping[str, CacheFormat]] = MappingProxyType(
    {
        "int8_per_token_head": CacheFormat(MODES["int8_per_token_head"], torch.int8),
        "fp8_per_token_head": CacheFormat(MODES["fp8_per_token_head"], torch.uint8),
        "int4_per_token_head": CacheFormat(INT4_FIRST_IMPLEMENTATION, torch.uint8),
    }
)

#: Formats that cannot be converted, by a part of their names, and why.
_REFUSED: Final = {
    "int2": "it was proposed for vLLM and never merged, so no cache holds it",
    "fnuz": "e4m3fnuz is another 8-bit float, with other values for the same bytes",
    "turboquant": "TurboQuant rows hold norms and minima that no mode here has",
}
#: The dtypes of a tensor of bytes.
_BYTES: Final = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def cache_format(kv_cache_dtype: str) -> CacheFormat:
    """What a `kv_cache_dtype` stands for.

    Raises:
        ValueError: It is not one of `FORMATS`; for some the message says why it cannot be.
    """
    found = FORMATS.get(kv_cache_dtype)
    if found is not None:
        return found
    reasons = [why for part, why in _REFUSED.items() if part in str(kv_cache_dtype).lower()]
    raise ValueError(
        f"kv_cache_dtype must be one of {', '.join(FORMATS)}, got {kv_cache_dtype!r}"
        + "".join(f" ({why})" for why in reasons)
    )


def content_bytes(kv_cache_dtype: str, head_dim: int, head_dim_v: int | None = None) -> int:
    """Bytes of one slot and head: codes and words of keys and values.

    >>> content_bytes("int8_per_token_head", 128), content_bytes("int4_per_token_head", 128)
    (264, 136)
    """
    mode = cache_format(kv_cache_dtype).mode
    sides = (head_dim, head_dim if head_dim_v is None else head_dim_v)
    return sum(mode.bytes_per_row(dim) + WORD_BYTES for dim in sides)


def new_kv_cache(
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_dim: int,
    kv_cache_dtype: str,
    *,
    head_dim_v: int | None = None,
    layout: Layout | str = Layout.NHD,
    device: torch.device | str | None = None,
) -> Tensor:
    """Allocate a cache as vLLM lays it out, filled with zeros.

    Args:
        num_blocks: Pages.
        block_size: Tokens in a page.
        num_heads: KV heads.
        head_dim: Channels of a key.
        kv_cache_dtype: One of `FORMATS`.
        head_dim_v: Channels of a value; those of a key, if not given.
        layout: The order of the axes in memory. The axes of the result do not depend on it.
        device: Where.

    Returns:
        `[blocks, heads, block_size, content]` int8 or uint8.

    Raises:
        ValueError: A head size does not suit the format, or there is no such format.
    """
    content = content_bytes(kv_cache_dtype, head_dim, head_dim_v)
    dtype = cache_format(kv_cache_dtype).dtype
    if resolve_enum("layout", layout, Layout) is Layout.HND:
        return torch.zeros(
            (num_blocks, num_heads, block_size, content), dtype=dtype, device=device
        )
    shape = (num_blocks, block_size, num_heads, content)
    return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)


def from_vllm(
    kv_cache: Tensor,
    kv_cache_dtype: str,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    copy: bool = False,
) -> tuple[PagedKV, PagedKV]:
    """The keys and the values of a vLLM cache.

    By default they are views: no byte moves, and `kvq.reshape_and_cache` into them writes what
    vLLM would write. Padded pages, another order in memory and a storage offset are taken as they
    are. Every function of this package gives the same bits over views as over copies; the kernels
    load wider words from copies, whose rows are aligned.

    Args:
        kv_cache: `[blocks, heads, block_size, content]`, int8, uint8 or float8_e4m3fn, any
            strides.
        kv_cache_dtype: One of `FORMATS`.
        head_dim: Channels of a key.
        head_dim_v: Channels of a value; those of a key, if not given.
        copy: Copy codes and words into tensors of their own.

    Returns:
        Keys and values, in the layout HND (of the axes; the strides are those of `kv_cache`).

    Raises:
        TypeError: `kv_cache` has another dtype, such as float8_e4m3fnuz.
        ValueError: It does not hold `content_bytes` bytes for each slot and head; its words
            cannot be viewed as float32, because they do not lie at multiples of 4 bytes (`copy`
            reads them nevertheless); or there is no such format.

    Exactness: the same bytes.
    """
    mode = cache_format(kv_cache_dtype).mode
    check_dtype("kv_cache", check_tensor("kv_cache", kv_cache), *_BYTES)
    content = content_bytes(kv_cache_dtype, head_dim, head_dim_v)
    check_shape(
        "kv_cache", kv_cache, (None, None, None, content), "[blocks, heads, block_size, content]"
    )
    row_bytes = mode.bytes_per_row(head_dim)
    start = row_bytes + WORD_BYTES
    contents = kv_cache.view(torch.uint8)
    key = _side(contents[..., :start], mode, copy)
    return key, _side(contents[..., start:], mode, copy)


def to_vllm(
    key_cache: PagedKV, value_cache: PagedKV, *, layout: Layout | str = Layout.NHD
) -> Tensor:
    """A cache of this package in vLLM's layout: a copy.

    Both sides must read as one of `FORMATS` does. `int4` of this package does at head sizes that
    are powers of two, where its signs are those of vLLM; that its encoder chose other zero-points
    is nothing a reader has to know.

    Args:
        key_cache: Any layout and strides.
        value_cache: The same blocks, heads and block size.
        layout: The order of the axes in memory.

    Returns:
        `[blocks, heads, block_size, content]` int8 or uint8.

    Raises:
        TypeError, ValueError: The caches do not fit together, a mode reads as no format of vLLM
            at its head size, or the two read as different ones.

    Exactness: the same bytes.
    """
    blocks, heads, block_size = check_cache_pair(key_cache, value_cache)
    names, dims = [], []
    for argument, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        dims.append(cache.mode.head_dim(cache.codes.shape[3]))
        names.append(_format_name(argument, cache.mode, dims[-1]))
    if names[0] != names[1]:
        raise ValueError(f"value_cache must be stored as {names[0]} like its keys, got {names[1]}")
    made = new_kv_cache(
        blocks,
        block_size,
        heads,
        dims[0],
        names[0],
        head_dim_v=dims[1],
        layout=layout,
        device=key_cache.codes.device,
    )
    at = 0
    contents = made.view(torch.uint8)
    for cache in (key_cache, value_cache):
        codes, words = as_hnd(cache)
        word_bytes = words.contiguous().view(torch.uint8).view(*words.shape, WORD_BYTES)
        for part in (codes, word_bytes):
            contents[..., at : at + part.shape[3]] = part
            at += part.shape[3]
    return made


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    *,
    check: bool | None = None,
) -> None:
    """Write new keys and values into a vLLM cache as vLLM encodes them, in place.

    Args:
        key: `[T, H, D]` float32, float16 or bfloat16. In `int4` the rotated row is rounded to
            this dtype.
        value: `[T, H, Dv]`.
        kv_cache: As `from_vllm` takes it.
        slot_mapping: `[tokens]` int32 or int64; a negative slot is padding.
        kv_cache_dtype: One of `FORMATS`.
        check: As in `kvq.reshape_and_cache`.

    Raises:
        TypeError, ValueError: As `from_vllm` and `kvq.reshape_and_cache`.

    Exactness: bit-exact across the tiers of this package. The bytes are those of vLLM's formulas
    in IEEE float32, with its rotation as on the CPU. On a GPU vLLM rotates by other means and
    does not round every division correctly. Rows that are not finite become NaN rows here; vLLM
    gives them no meaning.
    Source: vLLM 0.33, the write paths of its per-token-head caches.
    """
    dims = (check_tensor("key", key).shape[-1], check_tensor("value", value).shape[-1])
    caches = from_vllm(kv_cache, kv_cache_dtype, dims[0], head_dim_v=dims[1])
    dispatch.reshape_and_cache(key, value, *caches, slot_mapping, check=check)


def _side(contents: Tensor, mode: Mode, copy: bool) -> PagedKV:
    """Keys or values from `[..., bytes of the codes and of the word]`."""
    if copy:
        words = contents[..., -WORD_BYTES:].contiguous().view(torch.float32)[..., 0]
        return PagedKV(contents[..., :-WORD_BYTES].contiguous(), words, mode, Layout.HND)
    places = contents[..., -WORD_BYTES:]
    *strides, last = places.stride()
    if last != 1 or any(step % WORD_BYTES for step in (*strides, places.storage_offset())):
        raise ValueError(
            "kv_cache must have its words at multiples of 4 bytes to be viewed as float32 "
            f"(copy=True reads them anyway), got strides {places.stride()} and words at byte "
            f"{places.storage_offset()}"
        )
    return PagedKV(
        contents[..., :-WORD_BYTES], places.view(torch.float32)[..., 0], mode, Layout.HND
    )


def _format_name(argument: str, mode: Mode, head_dim: int) -> str:
    """The format that reads rows of this mode as the mode does."""
    for name, known in FORMATS.items():
        if _reads(mode, head_dim) == _reads(known.mode, head_dim):
            return name
    raise ValueError(
        f"{argument} must be of a mode that vLLM can read at head size {head_dim}, got {mode.name}"
    )


def _reads(mode: Mode, head_dim: int) -> tuple[object, ...]:
    """What a reader of rows has to know; how they were encoded is not part of it."""
    signs: tuple[object, ...] = ()
    if (rotation := mode.rotation) is not None:
        one_block = Rotation.block_size(head_dim) == head_dim
        repeat = rotation.repeat_block_signs or one_block
        signs = (rotation.rounds, rotation.random_signs, rotation.seed, repeat)
    return (mode.bits, mode.grid, mode.word, mode.codebook, mode.trellis, mode.folds_gain, signs)
