"""Key transforms of a Hugging Face model: the mean of its keys, and a scale of each RoPE pair.

    transforms = key_transforms(model, center="first")
    cache = KVQuantCache(model.config, "int4", "int4", key_transforms=transforms)

The mean is the bias of the key projection, the calibrated mean, or that of each sequence's own
first tokens. All of them stand before RoPE, so the model's RoPE must be known: it is what its
modules declare, and a model whose keys that does not make is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from tqdm.auto import tqdm

import kvq
from kvq.calibration_files import Calibration, LayerCalibration
from kvq.checks import (
    check_bool,
    check_dtype,
    check_int,
    check_optional,
    check_shape,
    check_strings,
    check_tensor,
    resolve_enum,
)
from kvq.distributed import Processes
from kvq.integrations.models import check_model, check_token_ids
from kvq.integrations.observe import attention_modules, import_optional, observe
from kvq.integrations.rotary import find_rotary
from kvq.key_transforms import KeyTransform
from kvq.reference.key_transforms import find_pair_scale
from kvq.rotary import RotarySpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Keys of a sequence that its own mean is of.
FIRST_TOKENS: Final = 64
#: Where RoPE is looked at a second time, at least: one that changes with the length shows there.
_FAR: Final = 32_768
_TOKENS: Final = 8


class Center(Enum):
    """Where the mean of the keys comes from."""

    #: The bias of the key projection.
    BIAS = "bias"
    #: The first tokens of each sequence.
    FIRST = "first"
    #: A calibration file.
    CALIBRATED = "calibrated"

    def __str__(self) -> str:
        return self.value


class Positions:
    """Where the tokens of a model's latest pass stand, as its RoPE is told.

    There is one for each model, and copies of caches share it.
    """

    _of: Final[WeakKeyDictionary[nn.Module, Positions]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._latest: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Positions:
        """Those of a model; its modules with inverse frequencies are watched from now on."""
        found = cls._of.get(model)
        if found is None:
            found = cls._of[model] = cls()
            for module in model.modules():
                names = [name for name, _ in module.named_buffers(recurse=False)]
                if any(name.endswith("inv_freq") for name in names):
                    module.register_forward_pre_hook(found._watch, with_kwargs=True)
        return found

    def latest(self) -> Tensor | None:
        """`[B or 1, Q]` int64, or `None` if there was no pass."""
        return self._latest

    def _watch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # What a compiled pass holds cannot be kept; sequences do not begin there.
        if not is_compiling():
            ids = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
            self._latest = ids if isinstance(ids, Tensor) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Positions:
        return self


def key_transforms(
    model: PreTrainedModel,
    *,
    center: Center | str | None = None,
    scale_pairs: bool = False,
    calibration: Calibration | None = None,
    first_tokens: int = FIRST_TOKENS,
) -> dict[int, KeyTransform]:
    """What the keys of a model's layers are to lose before they are packed.

    Args:
        model: A causal model of transformers. It is run on a few tokens, and from then on its
            modules of RoPE tell where tokens stand.
        center: Where the mean comes from, or its name; `None`: none is subtracted.
        scale_pairs: Scale RoPE pairs as the calibration says.
        calibration: Of this model, for a calibrated mean or scale.
        first_tokens: Keys of a sequence that its own mean is of, with `first`: those of them that
            come with its first chunk.

    Returns:
        By layer, as `KVQuantCache` takes them.

    Raises:
        ValueError: The model's RoPE cannot be verified, or is not that of the calibration; it has
            no bias on its keys; or there is no calibration, or one of other layers or shapes.
    """
    check_model(model)
    check_bool("scale_pairs", scale_pairs)
    check_optional("calibration", calibration, Calibration)
    check_int("first_tokens", first_tokens, 1)
    source = None if center is None else resolve_enum("center", center, Center)
    if source is None and not scale_pairs:
        raise ValueError("center or scale_pairs must be given, got neither")
    calibrated = source is Center.CALIBRATED or scale_pairs
    if calibrated and calibration is None:
        raise ValueError("calibration must be given for a calibrated mean or scale, got none")
    rotary, keys = verify_rotary(model)
    positions = Positions.of(model)
    part, parts = _tensor_parallel(model)
    layers = {}
    for index, key in keys.items():
        mean = scale = None
        if source is Center.BIAS:
            if not any(bool(other.any()) for other in keys.values()):
                raise ValueError(
                    "model must have a bias on its keys to center by it, "
                    f"got {type(model).__name__}"
                )
            mean = key
        if calibrated:
            assert calibration is not None
            layer = _calibrated(calibration, rotary, index, key, part, parts)
            mean = layer.mean if source is Center.CALIBRATED else mean
            scale = layer.pair_scale if scale_pairs else None
        tokens = first_tokens if source is Center.FIRST else 0
        layers[index] = KeyTransform(rotary, mean, tokens, scale, positions.latest)
    return layers


def _calibrated(
    calibration: Calibration, rotary: RotarySpec, index: int, key: Tensor, part: int, parts: int
) -> LayerCalibration:
    """What was found of one layer, whose keys are like `key` `[H, D]`.

    With the heads shared out among `parts` processes, a calibration of all heads serves each.
    """
    if calibration.rotary != rotary:
        raise ValueError("calibration must be of the model's RoPE, got one of another")
    if index not in calibration.layers:
        raise ValueError(f"calibration must have every layer, got none for layer {index}")
    layer = calibration.layers[index]
    heads = len(key)
    if parts > 1 and len(layer.mean) == parts * heads:
        layer = LayerCalibration(*(x[part * heads : (part + 1) * heads] for x in layer))
    check_shape(f"calibration.layers.{index}.mean", layer.mean, tuple(key.shape), "[heads, D]")
    return layer


def _tensor_parallel(model: PreTrainedModel) -> tuple[int, int]:
    """Which part of the heads this process has, and how many parts there are."""
    parts = getattr(model, "tp_size", None) or 1
    if parts == 1:
        return 0, 1
    mesh: Any = model._device_mesh
    return (mesh if mesh.ndim == 1 else mesh["tp"]).get_local_rank(), parts


@torch.no_grad()
def verify_rotary(model: PreTrainedModel) -> tuple[RotarySpec, dict[int, Tensor]]:
    """The RoPE of a model, verified; and what its layers' biases alone make of a key.

    The keys of a few tokens, at the first positions and beyond the last that the model was trained
    for, must be what RoPE as its modules declare it makes of the keys before it, and the reverse,
    within a relative error of 1e-5 (two steps of the model's dtype, if it has 16 bits).

    Args:
        model: A causal model of transformers.

    Returns:
        How it applies RoPE, and by layer `[H, D]` float32 on the CPU: the key before RoPE of an
        input of zeros.

    Raises:
        ValueError: No RoPE that its modules declare does so; or it changes with the length.
    """
    decoder = check_model(model).config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(decoder.vocab_size, (_TOKENS,), generator=generator)
    modules = attention_modules(model, ids[:1])
    far = max(_FAR, 2 * (getattr(decoder, "max_position_embeddings", None) or 0))
    biases: dict[int, Tensor] = {}

    def look_at_bias(index: int, _query: Tensor, key: Tensor, *_: object) -> None:
        biases[index] = key[0, :, 0].float().cpu()

    def verdict(first_position: int) -> tuple[RotarySpec | None, str]:
        keys: dict[int, Tensor] = {}
        unrotated: dict[int, Tensor] = {}

        def keep(kept: dict[int, Tensor]) -> Any:
            def look(index: int, _query: Tensor, key: Tensor, *_: object) -> None:
                kept[index] = key[0].transpose(0, 1).cpu()

            return look

        observe(
            model,
            ids,
            modules,
            keep(keys),
            unrotated=keep(unrotated),
            empty=look_at_bias,
            first_position=first_position,
        )
        positions = torch.arange(first_position, first_position + _TOKENS)
        return find_rotary(model, keys, unrotated, positions)

    rotary, why = verdict(0)
    if rotary is not None:
        # RoPE that changes with the length takes its first form again where the last run is short.
        (other, _), (again, _) = verdict(far), verdict(0)
        if other != rotary or again != rotary:
            rotary = None
            why = f"unknown: at position {far} it is not what it is at 0"
    if rotary is None:
        raise ValueError(
            f"model must have a RoPE that can be verified, got {type(model).__name__}: {why}"
        )
    return rotary, biases


class _Moments:
    """Sums over the tokens of one layer, in float64 on the CPU."""

    def __init__(self) -> None:
        self.tokens = 0
        self.key: Any = 0.0
        self.key_square: Any = 0.0
        self.query_square: Any = 0.0

    def add(self, query: Tensor, key: Tensor) -> None:
        """Add queries `[B, Hq, T, D]` and keys `[B, H, T, D]`, both before RoPE."""
        grouped = query.unflatten(1, (key.shape[1], -1)).double().square()
        self.tokens += key.shape[0] * key.shape[2]
        self.key = self.key + key.double().sum((0, 2)).cpu()
        self.key_square = self.key_square + key.double().square().sum((0, 2)).cpu()
        self.query_square = self.query_square + grouped.mean(2).sum((0, 2)).cpu()

    def merge(self, other: _Moments) -> None:
        """Add what another has added."""
        self.tokens += other.tokens
        self.key = self.key + other.key
        self.key_square = self.key_square + other.key_square
        self.query_square = self.query_square + other.query_square

    def found(self, rotary: RotarySpec) -> LayerCalibration:
        mean = self.key / self.tokens
        variance = (self.key_square / self.tokens - mean.square()).clamp(min=0)
        scale = find_pair_scale(variance, self.query_square / self.tokens, rotary)
        return LayerCalibration(mean.float(), scale)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    provenance: Mapping[str, str] | None = None,
    processes: Processes | None = None,
    progress: bool = False,
) -> Calibration:
    """Find what the keys of a model's layers have in common, over some windows of a text.

    Args:
        model: A causal model of transformers whose RoPE can be verified.
        windows: `[windows, T]` int64: token ids.
        provenance: Strings to record beside those that are known here.
        processes: That share the windows, each with the whole model; by default this one has them
            all.
        progress: Show a bar over the windows, if standard error is a terminal.

    Returns:
        Means of keys, and pair scales from the variance of keys and the mean square of queries,
        of all tokens alike and before RoPE, so that positions do not matter. The same in every
        process.

    Raises:
        TypeError: `windows` is not an int64 tensor.
        ValueError: It has no token; or the model is refused, see `verify_rotary`.

    Exactness: sums are of windows, added in their order: the same bits for any number of
        processes, if the model gives the same bits in each.
    """
    check_dtype("windows", check_tensor("windows", windows), torch.int64)
    check_shape("windows", windows, (None, None), "[windows, tokens]")
    if windows.numel() == 0:
        raise ValueError(f"windows must hold tokens, got {list(windows.shape)}")
    check_token_ids("windows", windows, check_model(model))
    check_strings("provenance", provenance or {})
    check_bool("progress", progress)
    rotary, biases = verify_rotary(model)
    modules = attention_modules(model, windows[0, :1])
    together = Processes() if processes is None else processes
    moments = {index: _Moments() for index in biases}
    rounds = windows.split(together.size)
    for chunk in tqdm(
        rounds, unit="window", disable=None if progress and together.leads else True
    ):
        mine = {index: _Moments() for index in biases}

        def look(
            index: int,
            query: Tensor,
            key: Tensor,
            *_: object,
            mine: dict[int, _Moments] = mine,
        ) -> None:
            mine[index].add(query, key)

        for ids in together.share(chunk):
            observe(model, ids, modules, lambda *_: None, unrotated=look)
        for window in together.gather(mine)[: len(chunk)]:
            for index, found in window.items():
                moments[index].merge(found)
    return Calibration(
        rotary,
        {index: moments[index].found(rotary) for index in sorted(moments)},
        {
            "architecture": type(model).__name__,
            "windows": str(len(windows)),
            "tokens": str(windows.shape[1]),
            "token_ids_sha256": hashlib.sha256(windows.numpy().tobytes()).hexdigest(),
            "kvq": kvq.__version__,
            "torch": torch.__version__,
            "transformers": import_optional("transformers").__version__,
            **(provenance or {}),
        },
    )
