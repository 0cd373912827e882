"""Checking an outside implementation against conformance vectors.

Its answers come from functions that are called, or from a file of what was computed elsewhere. An
answer of another dtype or shape is an error; one with other bits is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvq.checks import INPUT_DTYPES, check_dtype, check_shape, check_tensor
from kvq.conformance.difference import Difference, compare_attention, compare_rows
from kvq.conformance.manifest import (
    INDEX,
    INPUTS,
    MANIFEST,
    Case,
    Manifest,
    pick,
    read_file,
    read_manifest,
)
from kvq.conformance.outside import call, mode_argument
from kvq.files import FileFormatError
from kvq.modes import Mode
from kvq.tier import Layout, PagedKV

#: What an implementation may answer; a file of answers has no other parts.
ANSWERS: Final = ("codes", "words", "values", "output")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which cases and rows to check; what is empty selects all."""

    #: Full names.
    modes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    #: Kinds of planted rows that are not compared.
    skip_kinds: tuple[str, ...] = ()

    def cases(self, manifest: Manifest) -> list[Case]:
        """The cases that are selected.

        Raises:
            ValueError: Something that is named is not in the manifest, or nothing is left.
        """
        for argument, wanted, known in (
            ("mode", self.modes, [case.mode for case in manifest.cases]),
            ("head_dim", self.head_dims, [case.head_dim for case in manifest.cases]),
            ("dtype", self.dtypes, [case.dtype for case in manifest.cases]),
            ("skip_kind", self.skip_kinds, [kind.name for kind in manifest.kinds]),
        ):
            for name in wanted:
                if name not in known:
                    valid = ", ".join(map(str, dict.fromkeys(known)))
                    raise ValueError(f"{argument} must be one of {valid}, got {name!r}")
        chosen = [
            case
            for case in manifest.cases
            if (not self.modes or case.mode in self.modes)
            and (not self.head_dims or case.head_dim in self.head_dims)
            and (not self.dtypes or case.dtype in self.dtypes)
        ]
        if not chosen or set(manifest.row_kinds) <= set(self.skip_kinds):
            raise ValueError("the selection must leave something to check, got nothing")
        return chosen


class Source(Protocol):
    """Where answers come from."""

    def answers(
        self, case: Case, mode: Mode, vectors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Mapping[str, object]:
        """Answers of one case by part.

        Args:
            case: Which.
            mode: Its mode.
            vectors: What is right, by part.
            inputs: `x`, `query` and the index tensors.
        """


@dataclass(frozen=True, slots=True)
class Functions:
    """Answers of functions that are called with copies of the vectors."""

    #: `function(x, mode_name) -> (codes, words)`
    quantize: Callable[..., Any] | None = None
    #: `function(codes, words, mode_name, head_dim) -> values`
    dequantize: Callable[..., Any] | None = None
    #: `function(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale=...)
    #: -> output`, with two `kvq.PagedKV`.
    attention: Callable[..., Any] | None = None
    #: Where the arguments are.
    device: str = "cpu"

    def answers(
        self, case: Case, mode: Mode, vectors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Mapping[str, object]:
        """See `Source`."""

        def give(tensors: Mapping[str, Tensor], *names: str) -> list[Tensor]:
            return [tensors[name].clone().to(self.device) for name in names]

        found: dict[str, object] = {}
        if self.quantize is not None:
            (x,) = give(inputs, "x")
            answer = call("impl", self.quantize, case.key, x, mode_argument(self.quantize, mode))
            if not isinstance(answer, tuple | list) or len(answer) != 2:
                raise TypeError(
                    f"impl must return (codes, words), got {type(answer).__name__} for {case.key}"
                )
            found["codes"], found["words"] = answer
        if self.dequantize is not None:
            found["values"] = call(
                "dequantize",
                self.dequantize,
                case.key,
                *give(vectors, "codes", "words"),
                mode_argument(self.dequantize, mode),
                case.head_dim,
            )
        if self.attention is not None:
            key_codes, key_words = give(vectors, "key_codes", "key_words")
            value_codes, value_words = give(vectors, "value_codes", "value_words")
            index = give(inputs, *INDEX)
            found["output"] = call(
                "attention",
                self.attention,
                case.key,
                *give(inputs, "query"),
                PagedKV(key_codes, key_words, mode, Layout.HND),
                PagedKV(value_codes, value_words, mode, Layout.HND),
                *index,
                scale=case.scale,
            )
        return found


@dataclass(frozen=True, slots=True)
class Dump:
    """Answers in a safetensors file, named `{mode}.{dtype}.{head_dim}.{part}`."""

    path: Path
    tensors: Mapping[str, Tensor]
    #: The parts that the file has of any case, and so must have of every case.
    parts: tuple[str, ...] = field(default=())

    def answers(
        self, case: Case, mode: Mode, vectors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Mapping[str, object]:
        """See `Source`."""
        names = {part: f"{case.key}.{part}" for part in self.parts}
        for name in names.values():
            if name not in self.tensors:
                raise FileFormatError(
                    self.path,
                    f"must hold {name}, got no such tensor (mode, head_dim and dtype select)",
                )
        return {part: self.tensors[name] for part, name in names.items()}


def load_dump(path: Path, manifest: Manifest) -> Dump:
    """Read a file of answers.

    Codes go with words; values and outputs may be there or not.

    Raises:
        FileFormatError: It cannot be read, or holds a tensor that is no answer to these vectors.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise FileFormatError(path, f"cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise FileFormatError(path, f"not a valid safetensors file ({error})") from None
    known = {f"{case.key}.{part}" for case in manifest.cases for part in ANSWERS}
    inputs = {record.name for case in manifest.cases for record in case.tensors} - known
    for name in sorted(tensors):
        if name not in known | inputs:
            raise FileFormatError(
                path,
                "must hold tensors named {mode}.{dtype}.{head_dim}.{part} as the manifest has "
                f"them, with the parts {', '.join(ANSWERS)}, got {name!r}",
            )
    parts = {name.rpartition(".")[2] for name in tensors}
    if parts & {"codes", "words"}:
        parts |= {"codes", "words"}
    answered = tuple(part for part in ANSWERS if part in parts)
    if not answered:
        raise FileFormatError(path, f"must hold {' or '.join(ANSWERS)} of a case, got none")
    return Dump(path, tensors, answered)


def check_vectors(
    folder: Path, source: Source, selection: Selection, *, watch: Callable[[Case], None]
) -> Iterator[Difference]:
    """Compare an implementation with the vectors in a folder, case by case.

    Args:
        folder: With a manifest.
        source: The answers.
        selection: What to check.
        watch: Called with each case before it is checked.

    Yields:
        For each case and each part that is answered, how it compares.

    Raises:
        FileFormatError: A file of the folder is not what its manifest says.
        TypeError, ValueError: An answer is missing, or of another type, dtype or shape.
    """
    manifest = read_manifest(folder / MANIFEST)
    cases = selection.cases(manifest)
    path = folder / INPUTS
    inputs = pick(path, read_file(path), manifest.inputs)
    for case, vectors in _loaded(folder, cases):
        watch(case)
        mode = manifest.mode(case)
        own = f"{case.dtype}.{case.head_dim}."
        given = {name.removeprefix(own): tensor for name, tensor in inputs.items()}
        answers = source.answers(case, mode, vectors, given)
        for part, answer in answers.items():
            name, right = f"{case.key}.{part}", vectors[part]
            found = check_tensor(name, answer).detach().cpu()
            # A better precision than the query's is no fault of attention.
            allowed = (*INPUT_DTYPES, torch.float64) if part == "output" else (right.dtype,)
            check_dtype(name, found, *allowed)
            check_shape(name, found, tuple(right.shape), "as in the vectors,")
            if part == "output":
                yield compare_attention(name, found, right, vectors["allowed"])
            else:
                yield compare_rows(
                    name, found, right, mode, manifest.row_kinds, selection.skip_kinds
                )


def _loaded(folder: Path, cases: Iterable[Case]) -> Iterator[tuple[Case, dict[str, Tensor]]]:
    """Each case with its tensors by part; a file is read once for the cases that follow."""
    file, tensors = "", dict[str, Tensor]()
    for case in cases:
        path = folder / case.file
        if case.file != file:
            file, tensors = case.file, read_file(path)
        yield case, pick(path, tensors, case.tensors, f"{case.key}.")
