"""`kvq calibrate`: find what the keys of a model have in common, for centered keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.model_options import (
    ComputeDtype,
    Device,
    GgufFile,
    LicenseNotes,
    ModelPath,
    TextSource,
)
from kvq.commands.options import check_output
from kvq.commands.output import Json

EXAMPLES: Final = (
    "kvq calibrate --model ./SmolLM2-135M --text prose.txt --out calibration.safetensors",
    "kvq calibrate --model m.gguf --text prose.txt --windows 6 --tokens 384 --out c.safetensors",
)


def command(
    *,
    model: ModelPath,
    text: Annotated[
        Path,
        typer.Option(
            help="A UTF-8 text file, not the one to evaluate on; form feeds separate documents."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The calibration file to write.")],
    windows: Annotated[int, typer.Option(help="Windows, evenly spread over the text.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    dtype: ComputeDtype = "float32",
    device: Device = "cpu",
    gguf_file: GgufFile = None,
    text_source: TextSource = "not stated",
    license_notes: LicenseNotes = "not stated",
    json: Json = False,
) -> None:
    """Run a model over a text and write the means of its keys and the scales of its RoPE pairs.

    Both are taken before RoPE, so they fit every position. The model is read from this disk;
    nothing is downloaded. A model whose RoPE cannot be verified is refused. Under torchrun the
    windows are shared out among the processes.
    """
    import hashlib

    from kvq.calibration_files import save_calibration
    from kvq.checks import check_device_name
    from kvq.commands.descriptions import describe_calibration
    from kvq.commands.inspect import print_description
    from kvq.distributed import processes
    from kvq.evaluation.prose import SEPARATOR
    from kvq.evaluation.windows import cut_windows
    from kvq.integrations.capture import load_model, read_dtype, read_text
    from kvq.integrations.key_transforms import calibrate

    check_device_name(device)
    check_output("out", out)
    for argument, value in (("windows", windows), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    with processes(device) as together:
        compute = read_dtype("dtype", dtype)
        prose = read_text(text)
        loaded = load_model(model, gguf_file=gguf_file, dtype=compute, device=str(together.device))
        documents = [
            loaded.tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in prose.split(SEPARATOR)
        ]
        calibration = calibrate(
            loaded.model,
            cut_windows(documents, tokens, windows),
            provenance={
                **loaded.provenance,
                "dtype": dtype,
                "text": text_source,
                "text_sha256": hashlib.sha256(prose.encode()).hexdigest(),
                "license": license_notes,
            },
            processes=together,
            progress=True,
        )
    if together.leads:
        save_calibration(out, calibration)
        print_description(out, describe_calibration(calibration), json=json)
