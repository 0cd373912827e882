"""What a cache takes: every stored byte, by what it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from kvq.integrations.transformers.layers import PackedLayer


class Memory(NamedTuple):
    """Bytes that a cache stores, and for how many values.

    Room that is reserved and not yet used is counted, as an allocator counts it.
    """

    #: Packed codes.
    codes: int
    #: Stored words.
    words: int
    #: First and recent tokens in the dtype of the model.
    full_precision: int
    #: Means of keys, pair scales, and the turns of positions.
    key_transforms: int
    #: Slots, block tables and lengths.
    lookup: int
    #: What layers that are not packed store (states of linear attention).
    other: int
    #: Keys' and values' entries of the tokens so far, padding included.
    values: int
    #: Bytes of the same tokens in the dtype of the model, without room to spare.
    unpacked: int

    @property
    def total(self) -> int:
        """All bytes."""
        return (
            self.codes
            + self.words
            + self.full_precision
            + self.key_transforms
            + self.lookup
            + self.other
        )

    @property
    def bits_per_value(self) -> float:
        """All bits of the packed layers, for each value of the tokens so far."""
        return 8 * (self.total - self.other) / self.values if self.values else float("nan")


def measure_memory(layers: Iterable[object], index: Iterable[Tensor]) -> Memory:
    """The bytes of some layers, and of what they share."""
    codes = words = full = counts = other = values = unpacked = 0
    transforms: dict[int, Tensor] = {}
    for layer in layers:
        if not isinstance(layer, PackedLayer):
            other += sum(map(_bytes, _tensors(vars(layer))))
            continue
        if not layer.is_initialized:
            continue
        pools = (layer.key_cache, layer.value_cache)
        codes += sum(_bytes(pool.codes) for pool in pools)
        words += sum(_bytes(pool.words) for pool in pools)
        kept = [] if layer.full_precision is None else layer.full_precision.tensors
        full += sum(map(_bytes, kept))
        own = [] if layer.transform is None else layer.transform.tensors
        constants = [] if layer.transform is None else layer.transform.constants
        # Layers share the turns of positions, and may share a mean.
        transforms |= {x.untyped_storage().data_ptr(): x for x in (*own, *constants)}
        counts += sum(map(_bytes, layer.tensors()[4 + len(kept) + len(own) :]))
        entries = (
            layer.batch_size * layer.num_heads * sum(layer.head_dims) * layer.tokens_in_pages()
        )
        values += entries
        unpacked += entries * layer.dtype.itemsize
    return Memory(
        codes,
        words,
        full,
        sum(map(_bytes, transforms.values())),
        counts + sum(map(_bytes, index)),
        other,
        values,
        unpacked,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, in its lists and in its dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
