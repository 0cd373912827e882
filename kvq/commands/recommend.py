"""`kvq recommend`: modes by side and layer within a budget of bits."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvq.commands.options import check_alone, check_output, load_input, load_mode
from kvq.commands.output import Json, print_json, print_table, say

if TYPE_CHECKING:
    from kvq.activations import Activations
    from kvq.analysis.ranking import Judged
    from kvq.modes import Mode

EXAMPLES: Final = (
    "kvq recommend --bits 3.5",
    "kvq recommend --input acts.safetensors --bits 4 --mode int8 --mode int4 --mode lloyd3",
    "kvq recommend --check results/eval-smollm2-cpu-sample.json",
)

#: What `kvq eval` writes.
_EVAL_SCHEMA: Final = "kvq-eval/1"


def command(
    *,
    source: Annotated[
        Path | None,
        typer.Option("--input", help="An activation file; default the embedded sample."),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(help="The budget: average stored bits per value, words counted."),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="A candidate; repeatable, default all shipped modes."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="A result of kvq eval on the same model: print instead how well cheap metrics, "
            "the predicted error among them, rank its recipes."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --check: keep the correlations in this JSON file.")
    ] = None,
    json: Json = False,
) -> None:
    """Choose the mode of each side and layer with the least predicted output error.

    The recipe is what kvq eval takes. Layers that the file does not have get the best pair of
    modes that all could share.
    """
    if (bits is None) == (check is None):
        raise ValueError("one of --bits and --check must be given, and not both")
    if check is not None:
        check_alone("--check", "with", mode=mode)
    else:
        check_alone("--bits", "with", out=out)
    check_output("out", out)
    activations, name = load_input(source)
    if check is not None:
        _check(activations, name, check, out, json=json)
        return
    from kvq.modes import MODES

    assert bits is not None
    modes = [load_mode(one) for one in mode] if mode else list(MODES.values())
    _recommend(activations, name, modes, bits, json=json)


def _recommend(
    activations: Activations, name: str, modes: list[Mode], bits: float, *, json: bool
) -> None:
    from kvq.analysis.prediction import LARGEST_NOISE
    from kvq.analysis.recommend import recommend
    from kvq.modes import short_name

    found = recommend(activations, modes, bits)
    pair = ",".join(
        f"{side}={short_name(one.name)}" for side, one in zip("kv", found.pair, strict=True)
    )
    if json:
        choices = [{**one._asdict(), "mode": one.mode.name} for one in found.choices]
        print_json({**found._asdict(), "choices": choices, "pair": pair})
        return
    print_table(
        f"{name}: the least predicted output error within {bits:g} bits per value",
        ("layer", "side", "mode", "predicted output error", "score noise"),
        [
            (
                one.layer,
                one.side,
                short_name(one.mode.name),
                f"{one.output_error:.3g}",
                f"{one.score_noise:.2g}" if one.side == "key" else "",
            )
            for one in found.choices
        ],
    )
    print_table(
        "Expected: relative squared error of the attention output, keys and values together",
        ("", "bits per value", "output error"),
        [
            ("by layer", found.bits_per_value, found.output_error),
            (f"all layers {pair}", found.pair_bits_per_value, found.pair_output_error),
        ],
    )
    typer.echo(found.recipe)
    if not found.in_range:
        say(
            f"note: score noise above {LARGEST_NOISE:g}, where predictions were found to be too "
            "large; the order may still hold"
        )


def _check(
    activations: Activations, name: str, path: Path, out: Path | None, *, json: bool
) -> None:
    from kvq.analysis.ranking import cheap_metrics, rank_correlations
    from kvq.analysis.results import write_result

    judged = read_judged(path)
    table = cheap_metrics(activations, judged)
    found = rank_correlations(table)
    if out is not None:
        inputs = {"activations": name, "evaluation": path.name, "recipes": list(table["recipe"])}
        command = " ".join(["kvq", *sys.argv[1:]])
        records = [
            {str(key): cell for key, cell in row.items()} for row in found.to_dict("records")
        ]
        write_result(out, "kvq-ranking/1", command, records, inputs=inputs)
    if json:
        print_json({"recipes": table.to_dict("records"), "ranking": found.to_dict("records")})
        return
    print_table(
        f"Rank correlation with the KL divergence of the model over {len(table)} recipes of "
        f"{path.name} (Spearman, 95% bootstrap over recipes)",
        ("metric", "spearman", "from", "to"),
        [
            (row["name"], f"{row['spearman']:.2f}", f"{row['low']:.2f}", f"{row['high']:.2f}")
            for row in found.to_dict("records")
        ],
    )


def read_judged(path: Path) -> list[Judged]:
    """The recipes of a result of `kvq eval` that have one mode for each side and nothing else.

    Raises:
        FileFormatError: The file is no such result.
        ValueError: A recipe cannot be read.
    """
    from kvq.analysis.ranking import Judged
    from kvq.evaluation.recipes import Recipe, parse_recipe
    from kvq.files import FileFormatError

    try:
        document: Any = jsonlib.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != _EVAL_SCHEMA:
            raise FileFormatError(
                path, f"schema must be {_EVAL_SCHEMA}, got {document['schema']!r}"
            )
        rows = [(str(row["recipe"]), float(row["kld"])) for row in document["rows"]]
    except OSError as error:
        raise FileFormatError(path, f"cannot be read ({error.strerror})") from None
    except FileFormatError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileFormatError(path, f"not a result of kvq eval ({error!r})") from None
    recipes = [(parse_recipe(text), kld) for text, kld in rows]
    return [
        Judged(recipe.text, recipe.key_mode, recipe.value_mode, kld)
        for recipe, kld in recipes
        if recipe == Recipe(recipe.text, recipe.key_mode, recipe.value_mode)
    ]
