"""`kvq fit`: fit a codebook to a law or to the values of an activation file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from kvq.commands.options import check_alone, check_output, load_mode
from kvq.commands.output import Json, print_json, print_table, say, waiting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvq.codebooks import Codebook
    from kvq.reference.laws import Law
    from kvq.reference.lloyd_max import LloydMaxFit

EXAMPLES: Final = (
    "kvq fit --law norm --levels 8",
    "kvq fit --law 'sphere(128)' --levels 16 --name sphere_16 --out sphere_16.safetensors",
    "kvq fit --from acts.safetensors --side key --calibration c.safetensors --levels 8 --name k",
    "kvq fit --from acts.safetensors --side key --layer 0 --base lloyd3 --levels 8 --name keys",
)


def command(
    *,
    levels: Annotated[int, typer.Option(help="How many levels, 2 to 256.")],
    law: Annotated[
        str | None,
        typer.Option(
            help="norm, sphere(128), signed_max(128), or a continuous distribution of scipy.stats "
            "with its parameters, such as t(df=5)."
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="An activation file: fit to its values, as --base sees them."),
    ] = None,
    base: Annotated[
        str, typer.Option(help="The codebook mode that rotates and normalizes the values.")
    ] = "lloyd4",
    side: Annotated[
        list[str] | None, typer.Option(help="key or value; repeatable, default both.")
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="A layer; repeatable, default all.")
    ] = None,
    head: Annotated[
        list[int] | None, typer.Option(help="A KV head; repeatable, default all.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="With --from: fit to keys as this calibration leaves them."),
    ] = None,
    weigh: Annotated[
        bool | None,
        typer.Option(
            "--weigh/--no-weigh",
            help="Weigh each row by what it was divided by, squared, so that the error is that of "
            "the row; default as the base's own codebook.",
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--no-symmetric",
            help="Hold the levels symmetric about zero; default where the law is.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the codebook.")] = None,
    out: Annotated[Path | None, typer.Option(help="The codebook file; default its name.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="The picture of its levels; default beside the file.")
    ] = None,
    json: Json = False,
) -> None:
    """Fit the levels of least squared error, print how good they are, and save them.

    A codebook file becomes a mode with --codebook of the other commands, or in Python with
    Mode.with_codebook.
    """
    from kvq.analysis.codebook_plot import codebook_figure
    from kvq.codebook_files import save_codebook
    from kvq.reference import lloyd_max

    if (law is None) == (source is None):
        raise ValueError("either --law or --from must be given, got both or neither")
    if source is None:
        check_alone(
            "--law", "with", side=side, layer=layer, head=head, calibration=calibration,
            weigh=weigh,
        )  # fmt: skip
    load_mode(base)
    check_output("out", out)
    check_output("picture", picture)
    if picture is not None or out is not None:
        _check_picture(out, picture)
    samples: _Samples | None = None
    known: Law | None = None
    if source is not None:
        samples = _read_samples(
            source, base, calibration, sides=side, layers=layer, heads=head, weigh=weigh
        )
        with waiting(f"fitting {levels} levels to {samples.values.size:,} values"):
            fitted = lloyd_max.fit_samples(
                samples.values,
                levels,
                weights=samples.weights,
                symmetric=bool(symmetric),
                name=name,
                source=samples.source,
            )
    else:
        assert law is not None
        known = lloyd_max.law(law)
        with waiting(f"fitting {levels} levels to {known}"):
            fitted = lloyd_max.fit(known, levels, symmetric=symmetric, name=name)

    out = Path(f"{fitted.codebook.name}.safetensors") if out is None else out
    picture = out.with_suffix(".png") if picture is None else picture
    save_codebook(out, fitted.codebook)
    picture.parent.mkdir(parents=True, exist_ok=True)
    if samples is None:
        figure = codebook_figure(fitted.codebook, law=known)
    else:
        figure = codebook_figure(fitted.codebook, samples=samples.values, weights=samples.weights)
    figure.savefig(picture, dpi=150)
    _print(fitted, _comparison(fitted, known, samples), out, picture, json=json)
    if not fitted.certificate.converged:
        say("check failed: the levels are not a fixed point (stationarity above 1e-10)")
        raise typer.Exit(1)


def _check_picture(out: Path | None, picture: Path | None) -> None:
    """The picture must be of a kind that can be drawn, and another file than the codebook."""
    from kvq.analysis.codebook_plot import check_picture

    if picture is not None:
        check_picture("picture", picture)
    if out is not None and out == (out.with_suffix(".png") if picture is None else picture):
        raise ValueError(f"out must be another file than the picture, got {out} for both")


class _Samples(NamedTuple):
    """What a codebook is fitted to."""

    #: `[n]` float32.
    values: npt.NDArray[np.float32]
    #: `[n]` float32, or `None` if all weigh the same.
    weights: npt.NDArray[np.float32] | None
    #: Where they come from, in words.
    source: str
    #: The base mode's own codebook.
    base: Codebook


def _read_samples(
    path: Path,
    base: str,
    calibration: Path | None,
    *,
    sides: list[str] | None,
    layers: list[int] | None,
    heads: list[int] | None,
    weigh: bool | None,
) -> _Samples:
    """The values of the chosen rows of an activation file, as the base mode sees them."""
    from kvq.activations import activations_sha256, load_activations
    from kvq.analysis.centered_activations import centered_activations
    from kvq.analysis.normalized_values import activation_values
    from kvq.calibration_files import load_calibration
    from kvq.modes import mode

    how = mode(base)
    if how.codebook is None:
        raise ValueError(f"base must be a codebook mode, got {how}")
    activations = load_activations(path)
    sha256 = activations_sha256(activations)
    centered = None if calibration is None else load_calibration(calibration)
    if centered is not None:
        activations = centered_activations(activations, centered)
    found = activation_values(activations, how, sides=sides, layers=layers, heads=heads)
    weighted = how.codebook.recipe.weighted if weigh is None else weigh
    parts = [
        f"{path.name} (sha256 {sha256})",
        *([] if centered is None else [f"centered by a calibration (sha256 {centered.sha256})"]),
        *(
            f"{what} {', '.join(map(str, asked))}"
            for what, asked in (("side", sides), ("layer", layers), ("head", heads))
            if asked
        ),
        f"as {how} sees them",
    ]
    return _Samples(
        found.values.numpy(),
        found.weights.numpy() if weighted else None,
        ", ".join(parts),
        how.codebook,
    )


def _comparison(
    fitted: LloydMaxFit, law: Law | None, samples: _Samples | None
) -> dict[str, float]:
    """Squared errors over `E[x^2]`, of the fit and of what to compare it with."""
    from kvq.reference import lloyd_max

    n = fitted.codebook.num_levels
    values = {"this fit": fitted.relative_distortion}
    if samples is not None and samples.base.num_levels == n:
        values[f"{samples.base} on these values"] = _relative_error(samples)
    values |= {
        "Lloyd-Max of N(0,1)": lloyd_max.gaussian_distortion(n),
        "Panter-Dite of N(0,1)": lloyd_max.panter_dite(n, "norm"),
        "D(R) of N(0,1)": lloyd_max.distortion_rate(n),
    }
    if law is not None and law.name != "norm":
        values[f"Panter-Dite of {law}"] = lloyd_max.panter_dite(n, law) / law.second_moment
    return values


def _relative_error(samples: _Samples) -> float:
    """Squared error of the base's own codebook on the samples, over that of zeros."""
    import numpy as np

    values = samples.values.astype(np.float64)
    codes = np.searchsorted(samples.base.thresholds, values, side="right")
    errors = values - np.asarray(samples.base.levels)[codes]
    return float(
        np.average(errors**2, weights=samples.weights)
        / np.average(values**2, weights=samples.weights)
    )


def _print(
    fitted: LloydMaxFit, comparison: dict[str, float], out: Path, picture: Path, *, json: bool
) -> None:
    from kvq.records import to_json

    codebook, certificate = fitted.codebook, to_json(fitted.certificate)
    if json:
        print_json(
            {
                "codebook": to_json(codebook),
                "distortion": fitted.distortion,
                "relative_distortion": comparison,
                "certificate": certificate,
                "files": {"codebook": str(out), "picture": str(picture)},
            }
        )
        return
    rows = zip(codebook.levels, (*codebook.thresholds, None), strict=True)
    print_table(
        f"{codebook}: fitted to {codebook.provenance.source}",
        ("code", "level", "threshold above"),
        [(code, *row) for code, row in enumerate(rows)],
    )
    print_table(
        f"Distortion at {codebook.num_levels} levels",
        ("", "error / E[x^2]", "SNR in dB"),
        [(name, value, -10 * math.log10(value)) for name, value in comparison.items()],
    )
    print_table("Certificate", ("", ""), list(certificate.items()))
    say(f"wrote {out} and {picture}")
