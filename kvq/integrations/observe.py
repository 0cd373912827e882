"""Looking at what the attention layers of a Hugging Face model are given, while the model runs.

The model runs as it is: its attention function is replaced, through transformers' own registry, by
one that looks at its arguments and hands them on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What looks at the arguments of an attention function: module, query, key, value, options.
_Tap = Callable[[nn.Module, Tensor, Tensor, Tensor, Mapping[str, Any]], None]
_TAP: ContextVar[_Tap] = ContextVar("tap")

#: What is shown a layer: its index, query `[B, Hq, T, D]`, key, value, options.
Look = Callable[[int, Tensor, Tensor, Tensor, Mapping[str, Any]], None]


def import_optional(name: str) -> Any:
    """An optional package, or an error that says how to get it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"Hugging Face models need {name}: pip install 'kvq[hf]'") from error


def observe(
    model: PreTrainedModel,
    input_ids: Tensor,
    modules: Mapping[int, nn.Module],
    look: Look,
    *,
    unrotated: Look | None = None,
    empty: Look | None = None,
    first_position: int = 0,
) -> None:
    """Run a model once and show what its attention layers are given.

    Args:
        model: A causal model of transformers that sends its attention through
            `AttentionInterface`.
        input_ids: `[T]` or `[B, T]` int64.
        modules: The attention layers that are run another time, by index, as `attention_modules`
            finds them.
        look: Shown every layer.
        unrotated: Shown the layers of `modules`, as they are with the identity in place of RoPE;
            those that are given no position embeddings of a known form are left out.
        empty: Shown the same for a layer whose input is zero: what biases make.
        first_position: Where the first token stands.
    """
    state: dict[str, Look] = {}

    def run_again(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        neutral = _neutral(kwargs.get("position_embeddings"))
        if neutral is None:
            return
        for other, zero in ((unrotated, False), (empty, True)):
            if other is None:
                continue
            given = {**kwargs, "position_embeddings": neutral}
            inputs = args
            if zero and args:
                inputs = (torch.zeros_like(args[0]), *args[1:])
            elif zero:
                given["hidden_states"] = torch.zeros_like(kwargs["hidden_states"])
            state["look"] = other
            try:
                module.forward(*inputs, **given)
            finally:
                state.clear()

    def tap(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: Mapping[str, Any],
    ) -> None:
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            state.get("look", look)(index, query, key, value, options)

    with ExitStack() as stack:
        # Before the layer and not after: layers may leave their keys to later ones.
        for module in modules.values():
            hook = module.register_forward_pre_hook(run_again, with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(tapped(model, tap))
        _forward(model, input_ids, first_position)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    implementation: str,
    **options: Any,
) -> Any:
    """An attention function: show the arguments to the tap, then do as `implementation` does."""
    _TAP.get()(module, query, key, value, options)
    if implementation == "eager":
        # transformers does not register it: each modeling file has its own.
        attention = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attention = import_optional("transformers").AttentionInterface()[implementation]
    return attention(module, query, key, value, attention_mask, **options)


@contextmanager
def tapped(model: PreTrainedModel, tap: _Tap) -> Iterator[None]:
    """Let `tap` see what the model's attention functions are given."""
    transformers = import_optional("transformers")
    masks = import_optional("transformers.masking_utils").AttentionMaskInterface

    config = model.config
    original = {"": config._attn_implementation} | {
        name: getattr(config, name)._attn_implementation
        for name in config.sub_configs
        if getattr(config, name) is not None
    }
    eager = config.get_text_config()._attn_implementation == "eager"
    implementation = "eager" if eager else "sdpa"
    name = f"kvq_capture_{implementation}"
    transformers.AttentionInterface.register(name, partial(_attend, implementation=implementation))
    # Without a mask function of the same name the model would pass no mask at all.
    masks.register(name, masks()[implementation])
    training = model.training
    token = _TAP.set(tap)
    try:
        model.train(False)
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(original)
        model.train(training)
        _TAP.reset(token)


@torch.no_grad()
def _forward(model: PreTrainedModel, input_ids: Tensor, first_position: int = 0) -> None:
    ids = torch.atleast_2d(input_ids).to(model.device)
    options = {}
    if first_position:
        end = first_position + ids.shape[1]
        options["position_ids"] = torch.arange(first_position, end, device=ids.device)[None]
    # The base model: no one needs the logits.
    model.base_model(input_ids=ids, use_cache=False, **options)


def attention_modules(model: PreTrainedModel, input_ids: Tensor) -> dict[int, nn.Module]:
    """The model's attention modules by layer index, ascending: those that a short run passes."""
    modules: dict[int, nn.Module] = {}

    def tap(module: nn.Module, *_: object) -> None:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):  # not a layer of the decoder
            return
        if index in modules:
            raise ValueError(f"model must pass each attention layer once, got {index} twice")
        modules[index] = module

    with tapped(model, tap):
        _forward(model, input_ids)
    if not modules:
        raise ValueError(
            "model must send its attention through transformers' AttentionInterface, "
            f"got {type(model).__name__}"
        )
    return dict(sorted(modules.items()))


def _neutral(position_embeddings: object) -> object | None:
    """Position embeddings of the same form that turn nothing; `None` if the form is not known."""
    match position_embeddings:
        case (Tensor() as cosine, Tensor() as sine) if cosine.shape == sine.shape:
            return torch.ones_like(cosine), torch.zeros_like(sine)
        case Tensor() as turns if turns.is_complex():
            return torch.ones_like(turns)
    return None
