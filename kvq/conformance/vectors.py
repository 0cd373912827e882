"""Making conformance vectors: planted rows, what each mode stores of them, and what is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kvq.analysis.planted_rows import KINDS, planted_rows
from kvq.analysis.results import versions
from kvq.checks import INPUT_DTYPES, dtype_name
from kvq.conformance.attention import PAGED, attention_case, index_tensors, make_query
from kvq.conformance.manifest import (
    INPUTS,
    Case,
    Kind,
    Manifest,
    case_key,
    write_file,
    write_manifest,
)
from kvq.modes import INT4_FIRST_IMPLEMENTATION, SMALLEST_BLOCK, Mode
from kvq.modes import mode as resolve_mode
from kvq.reference import dequantize, quantize, signs

#: Head sizes by default: one block of the rotation, three blocks, one block.
HEAD_DIMS: Final = (64, 96, 128)
#: Input dtypes by name.
DTYPES: Final = {dtype_name(dtype): dtype for dtype in INPUT_DTYPES}
#: Rows of a case by default: each kind ten times.
ROWS: Final = 10 * len(KINDS)
#: What each kind of planted row is. A row is made in float32 and then rounded to its dtype.
KIND_TEXTS: Final = {
    "gaussian": "near-Gaussian numbers of unit variance",
    "gaussian_scaled": "the same times a power of two from 2^-60 to 2^50",
    "zeros": "+0.0 and -0.0",
    "one_sided": "all channels between 10 and 12, or all between -12 and -10",
    "spike_in_channel_0": "near-Gaussian, and +-100 in channel 0: the rotated row is one-sided",
    "spike": "near-Gaussian, and +-100 in one channel",
    "int8_ties": "multiples of half an int8 scale that is exact: every rounding may be a tie",
    "beside_ties": "the float32 neighbors of such ties, on either side",
    "e4m3_ties": "midpoints of neighboring e4m3 numbers under an exact fp8 scale",
    "rotated_ties": "the rotated row is a lattice of half 4-bit codes, its zero-point a tie too",
    "rotated_sparse": "the rotated row holds small integers, mostly zero: equal extremes",
    "rotated_one_sided": "the rotated row lies between 10 and 12, or between -12 and -10",
    "subnormal": "float32 subnormals",
    "float16_extremes": "near-Gaussian numbers and +-65504",
    "not_finite": "one lane of NaN, infinity or minus infinity: a NaN row",
    "constant": "all channels 3, or all -3",
    "heavy_tail": "fifth powers of near-Gaussian numbers",
    "one_hot": "one power of two, zeros beside it",
    "near_floors": "about the floor of the scales, or about the smallest sum of squares",
    "huge": "near-Gaussian times a power of two from 2^50 to 2^127: some overflow to NaN rows",
}
#: Modes that `kvq.mode` does not know.
_OTHER_MODES: Final = {INT4_FIRST_IMPLEMENTATION.name: INT4_FIRST_IMPLEMENTATION}


def vector_mode(name: str) -> Mode:
    """A mode that vectors can be made of: a shipped one, or `int4@first_implementation`.

    Raises:
        ValueError: There is no such mode.
    """
    return _OTHER_MODES.get(name) or resolve_mode(name)


def export_vectors(
    folder: Path,
    modes: Sequence[Mode],
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    dtypes: Sequence[str] = tuple(DTYPES),
    rows: int = ROWS,
    seed: int = 0,
    watch: Callable[[Mode], None] = lambda mode: None,
) -> Manifest:
    """Write the conformance vectors of modes into a folder.

    The reference computes all of them.

    Args:
        folder: Where; it is made if need be. Files of the same names are replaced.
        modes: Which; their names must differ.
        head_dims: Head sizes, divisible by 16.
        dtypes: Names of input dtypes.
        rows: Rows of a case; the kinds of planted rows take turns.
        seed: A 32-bit integer that all rows depend on.
        watch: Called with each mode before it is computed.

    Returns:
        What was written, which is what `manifest.json` holds.

    Raises:
        ValueError: A number is out of range, a head size does not suit a mode, or something is
            named twice.

    Exactness: the same arguments give the same codes, words and values on every machine, and the
    same bytes on one machine. The exact outputs of attention are float64 sums, and what error is
    allowed comes from torch's attention: their last bits may differ from machine to machine.
    """
    _check(modes, head_dims, dtypes, rows, seed)
    forms = [(dtype, head_dim) for head_dim in head_dims for dtype in dtypes]
    inputs: dict[str, Tensor] = dict(index_tensors())
    for dtype, head_dim in forms:
        x = planted_rows(0, rows, head_dim, seed=seed)
        inputs[f"{dtype}.{head_dim}.x"] = x.to(DTYPES[dtype])
        inputs[f"{dtype}.{head_dim}.query"] = make_query(head_dim, DTYPES[dtype], seed)
    folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for mode in modes:
        watch(mode)
        file = f"{mode.name}.safetensors"
        parts = {
            case_key(mode.name, dtype, head_dim): _parts(mode, dtype, head_dim, inputs, seed)
            for dtype, head_dim in forms
        }
        written = write_file(
            folder / file,
            {f"{key}.{part}": tensor for key, case in parts.items() for part, tensor in case},
        )
        for dtype, head_dim in forms:
            own = case_key(mode.name, dtype, head_dim) + "."
            records = tuple(record for record in written if record.name.startswith(own))
            cases.append(Case(mode.name, dtype, head_dim, file, head_dim**-0.5, records))
    manifest = Manifest(
        tuple(versions().items()),
        seed,
        rows,
        tuple(modes),
        tuple(Kind(name, KIND_TEXTS[name]) for name in KINDS),
        tuple(KINDS[row % len(KINDS)] for row in range(rows)),
        PAGED,
        write_file(folder / INPUTS, inputs),
        tuple(cases),
    )
    write_manifest(folder, manifest)
    return manifest


def _parts(
    mode: Mode, dtype: str, head_dim: int, inputs: dict[str, Tensor], seed: int
) -> list[tuple[str, Tensor]]:
    """The tensors of a case by part."""
    x, query = (inputs[f"{dtype}.{head_dim}.{name}"] for name in ("x", "query"))
    codes, words = quantize(x, mode)
    values = dequantize(codes, words, mode, head_dim)
    made = {"codes": codes, "words": words, "values": values}
    if (rotation := mode.rotation) is not None:
        rounds = [signs(head_dim, rotation, index) for index in range(rotation.rounds)]
        made["signs"] = torch.stack(rounds)
    return [*made.items(), *attention_case(mode, query, seed).items()]


def _check(
    modes: Sequence[Mode], head_dims: Sequence[int], dtypes: Sequence[str], rows: int, seed: int
) -> None:
    for argument, items in (
        ("modes", [mode.name for mode in modes]),
        ("head_dims", head_dims),
        ("dtypes", dtypes),
    ):
        if not items or len({*items}) != len(items):
            raise ValueError(f"{argument} must differ, at least one, got {[*items]}")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    for head_dim in head_dims:
        if head_dim <= 0 or head_dim % SMALLEST_BLOCK:
            raise ValueError(
                f"head_dim must be divisible by {SMALLEST_BLOCK}, for rows that are planted in "
                f"the rotated domain, got {head_dim}"
            )
        for mode in modes:
            mode.check_head_dim(head_dim)
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2^32 - 1, got {seed}")
