"""Capture the queries, keys and values that a Hugging Face model's attention layers see.

What an attention function is given is post-RoPE, and the same for every architecture. Whether the
RoPE that the model declares is the one that made the keys is measured: each captured attention
module is run a second time with the identity in place of its position embeddings, which gives the
keys before RoPE, and these must give the captured keys.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import kvq
from kvq.activations import Activations, LayerActivations, save_activations
from kvq.checks import (
    INPUT_DTYPES,
    check_bool,
    check_device_name,
    check_dtype,
    check_int,
    check_list,
    check_optional,
    check_shape,
    check_storage,
    check_strings,
    check_tensor,
    dtype_name,
)
from kvq.files import check_path
from kvq.integrations.models import check_model, check_token_ids
from kvq.integrations.observe import attention_modules, import_optional, observe
from kvq.integrations.rotary import find_rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: What an attention function is given that changes its output beyond the mask and the scale.
_FEATURES: Final = ("sliding_window", "softcap", "s_aux")


class LoadedModel(NamedTuple):
    """A model read from this machine's disk."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    #: Name and SHA-256 of the weights, and how they are stored.
    provenance: dict[str, str]


def load_model(
    path: str | os.PathLike[str],
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Load a causal model and its tokenizer from disk; nothing is downloaded, nothing unpickled.

    Args:
        path: A `.gguf` file, or a folder with a Hugging Face checkpoint in safetensors or, if it
            has no `config.json`, with one `.gguf` file.
        gguf_file: Name of the `.gguf` file in the folder, if there are more.
        dtype: What the model computes in; GGUF weights are dequantized to it.
        device: Where it runs.

    Returns:
        The model in evaluation mode, the tokenizer, and the provenance of the weights.

    Raises:
        ImportError: transformers, or for GGUF gguf or accelerate, is not installed.
        FileNotFoundError: There is no such file or folder, or no weights in it.
        ValueError: The folder has several `.gguf` files and none is chosen, or what it has cannot
            be loaded.
    """
    where_found = Path(check_path(path))
    check_optional("gguf_file", gguf_file, str)
    check_storage("dtype", dtype)
    check_device_name(device)
    transformers = import_optional("transformers")
    folder, weights = _find_weights(where_found, gguf_file)
    gguf = weights[0].suffix == ".gguf"
    where: dict[str, Any] = {"local_files_only": True}
    if gguf:
        import_optional("accelerate")
        where["gguf_file"] = weights[0].name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, **where, **({} if gguf else {"use_safetensors": True})
        )
    except ImportError:
        raise
    # Whatever libraries say of files that are not what they should be.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model must be one that transformers can load, got {path} ({reason})"
        ) from error
    provenance = {
        "model": weights[0].name if gguf else folder.resolve().name,
        "weights": _gguf_storage(weights[0]) if gguf else _checkpoint_storage(model.config),
        "weights_sha256": " ".join(f"{file.name}={_file_sha256(file)}" for file in weights),
    }
    return LoadedModel(model.to(device).eval(), tokenizer, provenance)


def capture(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    layers: Sequence[int] | None = None,
    first_position: int = 0,
    queries: int = 64,
    dtype: torch.dtype = torch.float16,
    require_rotary: bool = False,
    provenance: Mapping[str, str] | None = None,
    progress: bool = False,
) -> Activations:
    """Run a model over one sequence and keep what its attention layers saw.

    The attention itself runs as SDPA, or as the model's eager function if the model is set to
    that. Layers with a window, a soft cap or sinks are captured as they are; the provenance names
    them.

    Args:
        model: A causal model of transformers, of any architecture that sends its attention through
            `AttentionInterface`.
        input_ids: `[T]` int64, at least two; positions count from 0.
        layers: Indices of the attention layers to keep, negative ones from the last; by default
            all.
        first_position: Where the kept keys and values begin; the model sees the tokens before.
        queries: How many queries to keep, of the last positions.
        dtype: How they are stored: float32, float16 or bfloat16.
        require_rotary: Refuse a model whose RoPE cannot be verified.
        provenance: Strings to record beside those that are known here.
        progress: Show a progress bar over the layers, if standard error is a terminal.

    Returns:
        Tensors on the CPU. `rotary` is verified in every kept layer at every kept position, or
        `None`, and then `provenance["rotary"]` says why.

    Raises:
        ImportError: transformers is not installed.
        TypeError: `input_ids` is not an int64 tensor, or `dtype` is none of the three.
        ValueError: An argument is out of its range; the model does not use `AttentionInterface`;
            the kept layers differ in their softmax scale; `dtype` cannot hold a value; or RoPE is
            required and cannot be verified.
    """
    check_model(model)
    check_dtype("input_ids", check_tensor("input_ids", input_ids), torch.int64)
    check_shape("input_ids", input_ids, (None,), "[T]")
    tokens = len(input_ids)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
    if not 2 <= tokens <= limit:
        raise ValueError(f"input_ids must hold 2 to {limit} tokens, got {tokens}")
    check_token_ids("input_ids", input_ids, model)
    if not 0 <= check_int("first_position", first_position) < tokens:
        raise ValueError(f"first_position must be from 0 to {tokens - 1}, got {first_position}")
    if not 0 <= check_int("queries", queries) <= tokens:
        raise ValueError(f"queries must be from 0 to the {tokens} tokens, got {queries}")
    check_storage("dtype", dtype)
    if layers is not None:
        check_list("layers", layers, int)
    check_bool("require_rotary", require_rotary)
    check_bool("progress", progress)
    check_strings("provenance", provenance or {})

    modules = attention_modules(model, input_ids[:1])
    kept = _resolve_layers(layers, list(modules))
    with tqdm(total=len(modules), unit="layer", disable=None if progress else True) as bar:
        recorder = _Recorder(first_position, tokens - queries, bar)
        recorder.run(model, input_ids, {index: modules[index] for index in kept})
    if len(set(recorder.scales.values())) > 1:
        raise ValueError(f"layers must share one softmax scale, got {recorder.scales}")

    positions = torch.arange(first_position, tokens)
    keys = {index: layer.key for index, layer in recorder.seen.items()}
    rotary, verdict = find_rotary(model, keys, recorder.unrotated, positions)
    if require_rotary and rotary is None:
        raise ValueError(f"model must have a RoPE that can be verified, got: {verdict}")
    return Activations(
        {index: _stored(index, recorder.seen[index], dtype) for index in kept},
        positions,
        torch.arange(tokens - queries, tokens),
        recorder.scales[kept[0]],
        rotary,
        {
            "architecture": type(model).__name__,
            "attention_layers": str(len(modules)),
            "attention_features": recorder.describe_features(),
            "tokens": str(tokens),
            "compute_dtype": dtype_name(recorder.seen[kept[0]].key.dtype),
            "storage_dtype": dtype_name(dtype),
            "rotary": verdict,
            "kvq": kvq.__version__,
            "torch": torch.__version__,
            "transformers": import_optional("transformers").__version__,
            **(provenance or {}),
        },
    )


def capture_command(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    gguf_file: str | None = None,
    layers: Sequence[int] | None = None,
    tokens: int | None = None,
    first_position: int = 0,
    queries: int = 64,
    dtype: str = "float16",
    compute_dtype: str = "float32",
    device: str = "cpu",
    require_rotary: bool = False,
    text_source: str = "not stated",
    license_notes: str = "not stated",
) -> Activations:
    """Capture a model on disk over the beginning of a text file, and write an activation file.

    Args:
        model: As `path` of `load_model`.
        text: A UTF-8 text file.
        out: The activation file to write.
        gguf_file: As in `load_model`.
        layers: As in `capture`.
        tokens: How many of the text's tokens to use, from the first; by default all.
        first_position: As in `capture`.
        queries: As in `capture`.
        dtype: How they are stored: `float32`, `float16` or `bfloat16`.
        compute_dtype: What the model computes in, one of the same.
        device: Where it runs.
        require_rotary: As in `capture`.
        text_source: Where the text comes from, for the provenance.
        license_notes: Under what terms model and text are, for the provenance.

    Returns:
        What was written.

    Raises:
        ImportError: transformers is not installed.
        OSError: A file cannot be read or written.
        ValueError: An argument is out of its range; see `capture`.
    """
    storage, computation = read_dtype("dtype", dtype), read_dtype("compute_dtype", compute_dtype)
    check_device_name(device)
    if tokens is not None:
        check_int("tokens", tokens, 2)
    check_int("first_position", first_position, 0)
    check_int("queries", queries, 0)
    prose = read_text(text)
    loaded = load_model(model, gguf_file=gguf_file, dtype=computation, device=device)
    ids: list[int] = loaded.tokenizer(prose)["input_ids"]
    if tokens is not None and not 2 <= tokens <= len(ids):
        raise ValueError(f"tokens must be from 2 to the text's {len(ids)}, got {tokens}")
    ids = ids[:tokens]
    begins_with_bos = bool(ids) and ids[0] == loaded.tokenizer.bos_token_id
    activations = capture(
        loaded.model,
        torch.tensor(ids, dtype=torch.int64),
        layers=layers,
        first_position=first_position,
        queries=queries,
        dtype=storage,
        require_rotary=require_rotary,
        provenance={
            **loaded.provenance,
            "text": text_source,
            "text_sha256": hashlib.sha256(prose.encode()).hexdigest(),
            "first_token": (
                f"{loaded.tokenizer.decode(ids[:1])!r}, "
                + ("the tokenizer's BOS" if begins_with_bos else "of the text: no BOS prepended")
            ),
            "license": license_notes,
        },
        progress=True,
    )
    save_activations(out, activations)
    return activations


def _find_weights(path: Path, gguf_file: str | None) -> tuple[Path, list[Path]]:
    """The folder to load from, and the files with the weights."""
    if path.suffix == ".gguf" and path.is_file():
        if gguf_file is not None:
            raise ValueError(
                f"gguf_file must be left out with a .gguf file as model, got {gguf_file}"
            )
        return path.parent, [path]
    if not path.is_dir():
        raise FileNotFoundError(f"model must be a folder or a .gguf file on disk, got {path}")
    named = {file.name: file for file in sorted(path.glob("*.gguf"))}
    if gguf_file is not None:
        if gguf_file not in named:
            names = f"one of {', '.join(named)}" if named else "that of a .gguf file in the folder"
            raise ValueError(f"gguf_file must be {names}, got {gguf_file!r}")
        files = [named[gguf_file]]
    elif (path / "config.json").is_file():
        files = sorted(path.glob("*.safetensors"))
    else:
        files = list(named.values())
        if len(files) > 1:
            raise ValueError(f"gguf_file must be one of {', '.join(named)}, got None")
    if not files:
        raise FileNotFoundError(f"model must hold safetensors or GGUF weights, got {path}")
    return path, files


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gguf_storage(path: Path) -> str:
    """How a GGUF file stores its weights, in words."""
    weights: Counter[str] = Counter()
    for tensor in import_optional("gguf").GGUFReader(path).tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    total = weights.total()
    shares = ", ".join(f"{name} {count / total:.2%}" for name, count in weights.most_common())
    main = weights.most_common(1)[0][0]
    bits = re.fullmatch(r"I?Q(\d+)_\w+", main)
    kind = f"{bits[1]}-bit GGUF" if bits else "GGUF"
    return f"dequantized from a {kind} ({main}); share of the weights: {shares}"


def _checkpoint_storage(config: Any) -> str:
    """How a Hugging Face checkpoint stores its weights, in words."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return "safetensors, not quantized"
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else getattr(quantization, "quant_method", None)
    )
    return f"safetensors, quantized ({method})"


def read_dtype(argument: str, name: str) -> torch.dtype:
    """The dtype of a name: `float32`, `float16` or `bfloat16`.

    Raises:
        ValueError: It is none of them.
    """
    dtypes = {dtype_name(dtype): dtype for dtype in INPUT_DTYPES}
    if name not in dtypes:
        valid = ", ".join(map(repr, dtypes))
        raise ValueError(f"{argument} must be one of {valid}, got {name!r}")
    return dtypes[name]


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, as it is.

    Raises:
        ValueError: It is not UTF-8.
        OSError: It cannot be read.
    """
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise type(error)(
            f"text must be a file that can be read, got {path} ({error.strerror})"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"text must be UTF-8, got {path} ({error.reason})") from None


def _resolve_layers(layers: Sequence[int] | None, available: list[int]) -> list[int]:
    """The indices to keep, ascending, with negative ones counted from the last layer."""
    if layers is None:
        return available
    count = len(available)
    kept = {available[i] if -count <= i < 0 else i for i in layers}
    if not kept or not kept <= set(available):
        raise ValueError(f"layers must be among the attention layers {available}, got {layers}")
    return sorted(kept)


class _Recorder:
    """Runs a model once and keeps, by layer index, what its attention layers are given."""

    def __init__(self, first_position: int, first_query: int, bar: tqdm[Any]) -> None:
        #: The layers' tensors, on the CPU, in the dtype of the model.
        self.seen: dict[int, LayerActivations] = {}
        #: Keys before RoPE, of layers that are given position embeddings of a known form.
        self.unrotated: dict[int, Tensor] = {}
        #: Softmax scales.
        self.scales: dict[int, float] = {}
        #: Options that change the attention, and the layers that are given them.
        self.features: dict[str, list[int]] = {}
        self._first_position, self._first_query, self._bar = first_position, first_query, bar
        self._kept: Collection[int] = ()

    def run(
        self, model: PreTrainedModel, input_ids: Tensor, modules: Mapping[int, nn.Module]
    ) -> None:
        """Run the model over `input_ids` and keep the layers of `modules`."""
        self._kept = modules.keys()
        observe(model, input_ids, modules, self._look, unrotated=self._look_before_rotary)

    def _look_before_rotary(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> None:
        self.unrotated[index] = _heads(key, self._first_position)

    def _look(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> None:
        self._bar.update()
        if index not in self._kept:
            return
        queries = _heads(query, self._first_query)
        self.seen[index] = LayerActivations(
            queries if len(queries) else None,
            _heads(key, self._first_position),
            _heads(value, self._first_position),
        )
        self.scales[index] = float(options.get("scaling") or query.shape[-1] ** -0.5)
        for name in _FEATURES:
            given = options.get(name)
            if given is not None:
                amount = f" {given}" if isinstance(given, (int, float)) else ""
                self.features.setdefault(name + amount, []).append(index)

    def describe_features(self) -> str:
        """`features` in words."""
        return (
            "; ".join(
                f"{feature} in layers {', '.join(map(str, layers))}"
                for feature, layers in self.features.items()
            )
            or "none"
        )


def _heads(x: Tensor, start: int) -> Tensor:
    """`[1, H, T, D]` from position `start` on, as `[T, H, D]` on the CPU."""
    return x[0, :, start:].transpose(0, 1).contiguous().to("cpu", copy=True)


def _stored(index: int, layer: LayerActivations, dtype: torch.dtype) -> LayerActivations:
    """A layer's tensors in the storage dtype."""
    for side, tensor in layer._asdict().items():
        if tensor is not None and float(tensor.abs().max()) > torch.finfo(dtype).max:
            raise ValueError(
                f"dtype must hold every value, got {dtype_name(dtype)} for layers.{index}.{side} "
                f"of up to {float(tensor.abs().max()):g}"
            )
    query = None if layer.query is None else layer.query.to(dtype)
    return LayerActivations(query, layer.key.to(dtype), layer.value.to(dtype))
