"""One attention layer with its exact scores, weights and outputs, to compare every mode with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from kvq.activations import LayerActivations
from kvq.analysis.attention_error import (
    attention_output,
    log_weights,
    output_error,
    weight_error,
)
from kvq.analysis.estimates import Estimate
from kvq.analysis.quantization_error import quantization_error
from kvq.analysis.score_bias import score_bias, scores
from kvq.modes import Mode
from kvq.tier import QuantizedKV, Tier

#: One number of a table: its labels, its value and its standard error.
Row = dict[str, object]


class Context(NamedTuple):
    """What the queries of all layers see, and the blocks that the standard errors need."""

    #: `[Q, T]` bool: whether a query sees a key.
    visible: Tensor
    #: `[Q]`: the block of each query.
    query_blocks: Tensor
    #: `[T]`: the block of each key.
    key_blocks: Tensor
    #: The softmax scale.
    scale: float


class MeasuredLayer:
    """A layer; what its heads have in full precision is computed once."""

    def __init__(self, index: int, layer: LayerActivations, context: Context, tier: Tier) -> None:
        self._index = index
        self._layer = layer
        self._context = context
        self._tier = tier
        # One KV head at a time: the errors of all pairs of a large layer would fill the memory.
        self._heads = [] if layer.query is None else list(_heads(layer.query, layer, context))

    def add_mode(
        self, mode: Mode, rows: Mapping[str, list[Row]], only: Collection[str]
    ) -> tuple[QuantizedKV, QuantizedKV]:
        """Measure one mode, add its rows to the tables in `only`, and return what it stores."""
        key = self._tier.quantize(self._layer.key, mode)
        value = self._tier.quantize(self._layer.value, mode)
        key_hat = self._tier.dequantize(*key, mode, self._layer.key.shape[-1])
        value_hat = self._tier.dequantize(*value, mode, self._layer.value.shape[-1])
        if "quantization_error" in only:
            for side, x, x_hat in (
                ("key", self._layer.key, key_hat),
                ("value", self._layer.value, value_hat),
            ):
                rows["quantization_error"] += self._errors(x, x_hat, side=side, mode=mode.name)
        for index, head in enumerate(self._heads):
            labels = {"layer": self._index, "head": index, "mode": mode.name}
            one = slice(index, index + 1)
            approximate = scores(head.query, key_hat[:, one], self._context.scale)
            if "score_bias" in only:
                rows["score_bias"] += head.score_rows(approximate, labels)
            if "attention_error" in only:
                rows["attention_error"] += head.attention_rows(
                    approximate, value_hat[:, one], labels
                )
        return key, value

    def _errors(self, x: Tensor, x_hat: Tensor, **labels: object) -> Iterator[Row]:
        blocks = self._context.key_blocks
        parts = {"all": slice(None), "first": slice(0, 1), "rest": slice(1, None)}
        for tokens, part in parts.items():
            if len(blocks[part]):
                units = blocks[part] - blocks[part][0]
                estimates = quantization_error(x[part], x_hat[part], units)
                yield from estimate_rows(
                    estimates, "head", {**labels, "layer": self._index, "tokens": tokens}
                )


def _heads(query: Tensor, layer: LayerActivations, context: Context) -> Iterator[_MeasuredHead]:
    heads = layer.key.shape[1]
    group = query.shape[1] // heads
    for head in range(heads):
        first = head * group
        yield _MeasuredHead(
            query[:, first : first + group],
            layer.key[:, head : head + 1],
            layer.value[:, head : head + 1],
            first,
            context,
        )


class _MeasuredHead:
    """A KV head with the query heads that read it."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, first: int, context: Context
    ) -> None:
        self.query = query
        self._value = value
        #: The first of its query heads.
        self._first = first
        self._context = context
        self._scores = scores(query, key, context.scale)
        self._log_p = log_weights(self._scores, context.visible)
        self._output = attention_output(self._log_p, value)

    def score_rows(self, approximate: Tensor, labels: Mapping[str, object]) -> Iterator[Row]:
        context = self._context
        estimates = score_bias(
            self._scores, approximate, context.visible, context.query_blocks, context.key_blocks
        )
        return estimate_rows(estimates, "query_head", labels, self._first)

    def attention_rows(
        self, approximate: Tensor, value_hat: Tensor, labels: Mapping[str, object]
    ) -> Iterator[Row]:
        blocks = self._context.query_blocks
        log_p_hat = log_weights(approximate, self._context.visible)
        outputs = {
            "key": attention_output(log_p_hat, self._value),
            "value": attention_output(self._log_p, value_hat),
            "both": attention_output(log_p_hat, value_hat),
        }
        weights = weight_error(self._log_p, log_p_hat, blocks)
        yield from estimate_rows(
            weights, "query_head", {**labels, "quantized": "key"}, self._first
        )
        for quantized, output in outputs.items():
            error = {"output_error": output_error(self._output, output, blocks)}
            yield from estimate_rows(
                error, "query_head", {**labels, "quantized": quantized}, self._first
            )


def estimate_rows(
    estimates: NamedTuple | Mapping[str, Estimate],
    head_column: str,
    labels: Mapping[str, object],
    first: int = 0,
) -> Iterator[Row]:
    """A row for each head of each estimate.

    Args:
        estimates: By metric, over the heads.
        head_column: What the table calls such a head.
        labels: The other columns.
        first: The number of the first head.
    """
    named = estimates if isinstance(estimates, Mapping) else estimates._asdict()
    for metric, estimate in named.items():
        pairs = zip(estimate.value.tolist(), estimate.standard_error.tolist(), strict=True)
        for head, (value, standard_error) in enumerate(pairs, start=first):
            yield {
                **labels,
                head_column: head,
                "metric": metric,
                "value": value,
                "standard_error": standard_error,
            }
