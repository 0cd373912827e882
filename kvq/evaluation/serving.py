"""How fast a model generates on a packed cache, beside the caches of transformers.

Every decoding step is one CUDA graph on both sides, captured once and replayed; on a CPU, and for
the dynamic cache, whose tensors move, the steps run as they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvq.checks import check_bool, check_int, check_kind, check_list
from kvq.evaluation.recipes import Recipe
from kvq.integrations.models import attending, check_model, run_model, transformers_cache

#: Steps before a capture, in which kernels are compiled.
_WARM_UP: Final = 3
#: Tokens of the prompt of an all but empty cache: cuDNN takes no single key.
_SHORT: Final = 8
#: The implementations of SDPA that a cache of transformers is tried with.
_BACKENDS: Final = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of a model: so many sequences at once."""

    #: Sequences.
    sequences: int = 100
    #: Tokens of each prompt.
    inputs: int = 512
    #: New tokens of each.
    outputs: int = 128
    #: Prompts are run in chunks of so many tokens; 0: at once.
    chunk: int = 0

    def __post_init__(self) -> None:
        for name, least in (("sequences", 1), ("inputs", 1), ("outputs", 2), ("chunk", 0)):
            check_int(name, getattr(self, name), least)

    @property
    def longest(self) -> int:
        """Tokens that a cache must have room for, with those of the warm-up."""
        return self.inputs + self.outputs + _WARM_UP + 1


class ServingRow(NamedTuple):
    """One cache under one workload."""

    #: The recipe, or the cache of transformers with its SDPA backend.
    mode: str
    #: Output tokens of all sequences over the whole time.
    tokens_per_s: float
    #: Time to the first token: the prompts of all sequences.
    ttft_ms: float
    #: Time of a decoding step: each sequence's next token.
    tpot_ms: float
    #: Share of the step that is not spent with an all but empty cache: attention's.
    attention_share: float
    #: The largest allocation beyond the weights, in bytes; 0 on a CPU.
    peak_bytes: int
    #: Tokens per second over those of the fastest cache of transformers.
    ratio: float = 1.0


def measure_serving(
    model: Any, recipes: list[Recipe], workload: Workload, *, dynamic: bool = True
) -> list[ServingRow]:
    """Time the caches of transformers, and the recipes.

    Args:
        model: A causal model of transformers, on the device where it is to run.
        recipes: What is compared with full precision.
        workload: What is asked.
        dynamic: Try the dynamic cache too, and not the static one alone.

    Returns:
        The fastest of the dynamic and of the static cache, each over the backends of SDPA that
        run it, and one row for each recipe.
    """
    gpu = check_model(model).device.type == "cuda"
    check_list("recipes", recipes, Recipe)
    check_kind("workload", workload, Workload)
    check_bool("dynamic", dynamic)
    rows = []
    for kind in ("dynamic", "static") if dynamic else ("static",):
        found = []
        for backend in _BACKENDS if gpu else (None,):
            # A backend that cannot run these shapes says so.
            with contextlib.suppress(RuntimeError), _backend(backend):

                def new(longest: int, kind: str = kind) -> Any:
                    return transformers_cache(model, longest if kind == "static" else None)

                name = kind if backend is None else f"{kind}, {backend.name.lower()}"
                found.append(_measure(model, "sdpa", new, workload, name, kind == "static"))
        if not found:
            raise RuntimeError(f"no backend of SDPA runs the {kind} cache")
        rows.append(max(found, key=lambda row: row.tokens_per_s))
    peer = max(row.tokens_per_s for row in rows)
    for recipe in [recipe.bind(model) for recipe in recipes]:

        def packed(longest: int, recipe: Recipe = recipe) -> Any:
            return recipe.new_cache(model.config, max_cache_len=longest)

        rows.append(_measure(model, "kvq", packed, workload, str(recipe), True))
    return [row._replace(ratio=row.tokens_per_s / peer) for row in rows]


@contextlib.contextmanager
def _backend(backend: SDPBackend | None) -> Iterator[None]:
    if backend is None:
        yield
    else:
        with sdpa_kernel(backend):
            yield


@torch.no_grad()
def _measure(
    model: Any,
    implementation: str,
    new_cache: Callable[[int], Any],
    workload: Workload,
    name: str,
    fixed: bool,
) -> ServingRow:
    """Prompts twice (the first compiles), then all steps; then a few steps on a short cache."""
    device = model.device
    generator = torch.Generator(device).manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    shape = (workload.sequences, workload.inputs)
    ids = torch.randint(1, vocabulary, shape, generator=generator, device=device)
    weights = _start_peak(device)
    with attending(model, implementation):
        cache = new_cache(workload.longest)
        _prefill(model, ids, cache, workload.chunk)
        if not fixed:
            del cache
            cache = new_cache(workload.longest)
        else:
            cache.reset()
        begin = _now(device)
        token = _prefill(model, ids, cache, workload.chunk)
        first = _now(device) - begin
        steps = workload.outputs - 1
        whole = _decode(model, token, cache, steps, graph=fixed and device.type == "cuda")
        peak = _peak(device) - weights
        del cache
        short = new_cache(_SHORT + 16)
        token = _prefill(model, ids[:, :_SHORT], short, 0)
        rest = _decode(model, token, short, 8, graph=fixed and device.type == "cuda") / 8
    step = whole / steps
    return ServingRow(
        name,
        workload.sequences * workload.outputs / (first + whole),
        1e3 * first,
        1e3 * step,
        max(0.0, 1 - rest / step),
        peak,
    )


def _prefill(model: Any, ids: Tensor, cache: Any, chunk: int) -> Tensor:
    """Run prompts, and hand back the first new token of each, `[B, 1]`."""
    logits = None
    for part in torch.split(ids, chunk or ids.shape[1], dim=1):
        logits = run_model(model, part, cache, logits_to_keep=1)
    assert logits is not None
    token: Tensor = logits[:, -1:].argmax(-1)
    return token


def _decode(model: Any, token: Tensor, cache: Any, steps: int, *, graph: bool) -> float:
    """Seconds of so many steps. Those of the warm-up stay in the cache, of either kind."""
    token = token.clone()

    def step() -> None:
        token.copy_(run_model(model, token, cache)[:, -1:].argmax(-1))

    replay: Callable[[], None] = step
    if graph:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        replay = captured.replay
    begin = _now(token.device)
    for _ in range(steps):
        replay()
    return _now(token.device) - begin


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _start_peak(device: torch.device) -> int:
    """Forget the peak so far; bytes that are allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _peak(device: torch.device) -> int:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0
