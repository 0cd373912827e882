"""`kvq serving`: how fast a model generates on the packed cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.options import check_output
from kvq.commands.output import Json, print_json, print_table

EXAMPLES: Final = (
    "kvq serving --recipe int8 --recipe int4 --out serving.json",
    "kvq serving --sequences 1 --inputs 32768 --chunk 8192 --recipe int4",
    "kvq serving --shape tiny --device cpu --dtype float32 --sequences 2 --inputs 16 --outputs 4",
)


def command(
    *,
    shape: Annotated[
        str, typer.Option(help="Of a Llama with random weights: llama3-8b or tiny.")
    ] = "llama3-8b",
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="As for kvq eval; repeatable, default the modes of the table's head."),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences at once.")] = 100,
    inputs: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    outputs: Annotated[int, typer.Option(help="New tokens of each.")] = 128,
    chunk: Annotated[
        int, typer.Option(help="Run prompts in chunks of so many tokens; 0: at once.")
    ] = 0,
    dynamic: Annotated[bool, typer.Option(help="Try the dynamic cache too.")] = True,
    dtype: Annotated[str, typer.Option(help="What the model computes in.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Keep the rows in this JSON file.")] = None,
    json: Json = False,
) -> None:
    """Time prompts and decoding on the packed cache, beside the caches of transformers.

    Decoding steps are CUDA graphs on both sides. A ratio above 1 has more tokens per second than
    the fastest cache of transformers with its fastest SDPA backend.
    """
    from kvq.checks import check_device_name
    from kvq.evaluation.recipes import parse_recipe
    from kvq.evaluation.serving import Workload, measure_serving
    from kvq.integrations.capture import read_dtype
    from kvq.integrations.models import random_model

    check_device_name(device)
    check_output("out", out)
    workload = Workload(sequences, inputs, outputs, chunk)
    names = recipe or ["int8", "fp8", "int4", "affine4", "int2", "lloyd3", "smax4"]
    recipes = [parse_recipe(name) for name in names]
    for one in recipes:
        if one.needs_calibration:
            raise ValueError(f"recipe must need no calibration here, got {one}")
    model = random_model(shape, device, read_dtype("dtype", dtype))
    rows = measure_serving(model, recipes, workload, dynamic=dynamic)
    records = [row._asdict() for row in rows]
    if out is not None:
        from kvq.analysis.results import write_result

        command_line = " ".join(["kvq", *sys.argv[1:]])
        write_result(out, "kvq-serving/1", command_line, records)
    if json:
        print_json(records)
        return
    print_table(
        f"{shape}: {sequences} sequences of {inputs} tokens, {outputs} new tokens each",
        ("tokens/s", "ratio", "TTFT ms", "TPOT ms", "attention", "peak GB", "mode"),
        [
            (
                row.tokens_per_s,
                row.ratio,
                row.ttft_ms,
                row.tpot_ms,
                row.attention_share,
                row.peak_bytes / 1e9,
                row.mode,
            )
            for row in rows
        ],
    )
