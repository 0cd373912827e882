"""No public function is forgotten: each has a `Call` in the tables, or a reason to have none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any, Final

import pytest

import kvq
from kvq import (
    activations,
    calibration_files,
    codebook_files,
    codebooks,
    encoded_files,
    files,
    kernels,
    key_transforms,
    modes,
    records,
    reference,
    rotary,
    trellis,
)
from kvq.analysis import measure, recommend, report, samples
from kvq.evaluation import recipes
from kvq.integrations import capture
from kvq.integrations import key_transforms as model_transforms
from kvq.integrations import transformers as packed
from kvq.reference import lloyd_max
from tests.bad_input.test_functions import CALLS

#: What hands on its names in `__all__`, and what defines public functions and classes.
FACES: Final = (kvq, reference, kernels, lloyd_max, packed)
FILES: Final = (
    activations,
    calibration_files,
    capture,
    codebook_files,
    codebooks,
    encoded_files,
    files,
    key_transforms,
    measure,
    model_transforms,
    modes,
    recipes,
    recommend,
    records,
    report,
    rotary,
    samples,
    trellis,
)

CHECKED_IN_USE = "a plain tuple, checked by what takes it"
INSIDE = "takes what was checked already"
#: What has no `Call`, and why.
REASONS: Final[dict[str, str]] = {
    "PagedKV": CHECKED_IN_USE,
    "QuantizedKV": CHECKED_IN_USE,
    "AttentionOutput": CHECKED_IN_USE,
    "LayerActivations": CHECKED_IN_USE,
    "LayerCalibration": CHECKED_IN_USE,
    "EncodedLayer": CHECKED_IN_USE,
    "EncodedRows": CHECKED_IN_USE,
    "LoadedModel": CHECKED_IN_USE,
    "Certificate": "a result",
    "Choice": "a result",
    "TensorFile": "what reads slices of files; tests/distributed has its errors",
    "assemble_activations": "what the file formats hand their tensors to",
    "file_sha256": "takes what was read already",
    "Comparison": "a result",
    "Law": "made by the functions that are checked",
    "LloydMaxFit": "a result",
    "Memory": "a result",
    "Positions": "made by a model's hooks",
    "Recipe": "made by parse_recipe",
    "Recommendation": "a result",
    "ReportResult": "a result",
    "FileFormatError": "an error",
    "LayerModes": "a name for types",
    "capture_command": "the command line's, which has lines of its own",
    "check_layers": "a rule",
    "check_named_once": "a rule",
    "check_name": "a rule, of Codebook and fit",
    "check_path": "a rule, of what reads and writes",
    "counts": INSIDE,
    "default_recipes": "takes nothing",
    "join_pairs": INSIDE,
    "outlier_channel": "gaussian, with a constant added",
    "split_pairs": INSIDE,
    "state_levels": INSIDE,
    "state_steps": INSIDE,
    "to_float32": INSIDE,
    "to_json": "takes whatever JSON can hold",
    "with_mean": INSIDE,
}


def handed_on(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and classes of `__all__`."""
    for name in module.__all__:
        found = getattr(module, name)
        if callable(found) and not (inspect.isclass(found) and issubclass(found, Enum)):
            yield name, found


def defined(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public functions and classes that a file defines."""
    for name, found in vars(module).items():
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__:
            continue
        if callable(found) and not (inspect.isclass(found) and issubclass(found, Enum)):
            yield name, found


def plain(function: Callable[..., Any]) -> Any:
    """A function without what remembers its results."""
    return inspect.unwrap(function)


@pytest.mark.parametrize(
    ("module", "names"),
    [*((module, handed_on) for module in FACES), *((module, defined) for module in FILES)],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_every_public_function_has_a_call(module: ModuleType, names: Any) -> None:
    known = [plain(call.function) for call in CALLS]
    missing = [
        name
        for name, found in names(module)
        if name not in REASONS and not any(plain(found) is function for function in known)
    ]
    assert not missing, f"{module.__name__}: no Call in tests/bad_input for {missing}"


def test_the_reasons_are_needed() -> None:
    known = {call.function.__name__ for call in CALLS}
    # `Recipe` of the codebooks has a call, and that of the evaluation a reason.
    assert not (set(REASONS) & known) - {"Recipe"}
