"""`kvq predict`: what modes should do, from statistics of the activations, beside what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvq.commands.options import check_output, load_input, load_mode
from kvq.commands.output import Json, print_json, print_table, say

EXAMPLES: Final = (
    "kvq predict --mode int4 --mode lloyd3",
    "kvq predict --input acts.safetensors --csv predicted.csv",
)


def command(
    *,
    source: Annotated[
        Path | None,
        typer.Option("--input", help="An activation file; default the embedded sample."),
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="A mode; repeatable, default all shipped modes.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the numbers of every head to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Predict score bias, score error and output error of each mode, and compare with measured.

    A prediction quantizes nothing: it is made of the mode's own error and of norms, scores and
    values. A second table shows how far it holds as the noise of the scores grows.
    """
    check_output("csv", csv)
    from kvq.analysis.agreement import COMPARED, by_mode, by_noise, predicted_and_measured
    from kvq.analysis.prediction import LARGEST_NOISE
    from kvq.analysis.report import REPORTED
    from kvq.modes import short_name

    activations, name = load_input(source)
    modes = [load_mode(one) for one in mode] if mode else list(REPORTED)
    table = predicted_and_measured(activations, modes)
    means, noise = by_mode(table), by_noise(table)
    if csv is not None:
        csv.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(csv, index=False, lineterminator="\n")
        say(f"wrote {csv}")
    if json:
        print_json({"modes": means.to_dict("records"), "range": noise.to_dict("records")})
        return
    columns = [
        f"{compared}{ending}" for compared, _, _ in COMPARED for ending in ("_predicted", "_ratio")
    ]
    headings = {"_predicted": "\npredicted", "_ratio": "\n/ measured"}
    print_table(
        f"{name}: predicted, and predicted over measured; means over layers and heads",
        [
            "mode",
            *(
                compared.replace("_", " ") + headings[ending]
                for compared, _, _ in COMPARED
                for ending in headings
            ),
            "score\nnoise",
            "in\nrange",
        ],
        [
            (
                short_name(str(row["mode"])),
                *(f"{row[column]:.3g}" for column in columns),
                f"{row['score_noise']:.2g}",
                "yes" if row["in_range"] else "no",
            )
            for row in means.to_dict("records")
        ],
    )
    print_table(
        "Output error of the keys, predicted over measured, by the noise of the scores (logits); "
        f"out of range above {LARGEST_NOISE:g}",
        ("noise above", "up to", "heads", "ratio", "10th percentile", "90th percentile"),
        [
            (f"{above:g}", f"{up_to:g}", heads, f"{ratio:.2f}", f"{low:.2f}", f"{high:.2f}")
            for above, up_to, heads, ratio, low, high in noise.itertuples(index=False)
        ],
    )
