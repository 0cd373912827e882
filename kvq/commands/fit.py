"""`kvq fit`: fit a codebook to a law or to the values of activation files."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from kvq.commands.options import check_alone, check_output, check_output_folder, load_mode
from kvq.commands.output import Json, print_json, print_table, say, waiting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvq.codebooks import Codebook
    from kvq.distributed import Processes
    from kvq.reference.laws import Law
    from kvq.reference.lloyd_max import LloydMaxFit

EXAMPLES: Final = (
    "kvq fit --law norm --levels 8",
    "kvq fit --law 'sphere(128)' --levels 16 --name sphere_16 --out sphere_16.safetensors",
    "kvq fit --from acts.safetensors --side key --calibration c.safetensors --levels 8 --name k",
    "kvq fit --from acts.safetensors --side key --layer 0 --base lloyd3 --levels 8 --name keys",
    "kvq fit --from shards --base smax4 --levels 16 --name smax --resume counted",
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
        list[Path] | None,
        typer.Option(
            "--from",
            help="An activation file, a folder of them or a pattern; repeatable: fit to their "
            "values, as --base sees them.",
        ),
    ] = None,
    more: Annotated[
        list[Path] | None,
        typer.Argument(help="More for --from, as a shell makes it of a pattern."),
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
    resume: Annotated[
        Path | None,
        typer.Option(
            help="With --from: a folder for what is done, so that a run that was interrupted can "
            "be given again and goes on."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where values are counted.")] = "cpu",
    name: Annotated[str | None, typer.Option(help="Name of the codebook.")] = None,
    out: Annotated[Path | None, typer.Option(help="The codebook file; default its name.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="The picture of its levels; default beside the file.")
    ] = None,
    json: Json = False,
) -> None:
    """Fit the levels of least squared error, print how good they are, and save them.

    Files are read in slices. Under torchrun they are shared out among the processes; the codebook
    is the same for any number of them.

    A codebook file becomes a mode with --codebook of the other commands, or in Python with
    Mode.with_codebook.
    """
    from kvq.analysis.codebook_plot import codebook_figure
    from kvq.codebook_files import save_codebook
    from kvq.distributed import processes
    from kvq.reference import lloyd_max

    paths = [*(source or ()), *(more or ())]
    if (law is None) == (not paths):
        raise ValueError("either --law or --from must be given, got both or neither")
    if not paths:
        check_alone(
            "--law", "with", side=side, layer=layer, head=head, calibration=calibration,
            weigh=weigh, resume=resume,
        )  # fmt: skip
    load_mode(base)
    check_output("out", out)
    check_output("picture", picture)
    if resume is not None:
        check_output_folder("resume", resume)
    if picture is not None or out is not None:
        _check_picture(out, picture)
    samples: _Samples | None = None
    known: Law | None = None
    with processes(device) as together:
        if paths:
            samples = _count(
                paths,
                base,
                calibration,
                together,
                resume,
                sides=side,
                layers=layer,
                heads=head,
                weigh=weigh,
            )
    if not together.leads:
        return
    if samples is not None:
        with waiting(f"fitting {levels} levels to {samples.number:,} values"):
            fitted = lloyd_max.fit_masses(
                samples.points,
                samples.masses,
                levels,
                symmetric=bool(symmetric),
                weighted=samples.weighted,
                name=name,
                source=samples.source,
                data_sha256=samples.sha256,
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
        figure = codebook_figure(fitted.codebook, samples=samples.points, weights=samples.masses)
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
    """What a codebook is fitted to: a histogram."""

    #: `[n]` float64, increasing.
    points: npt.NDArray[np.float64]
    #: `[n]` float64.
    masses: npt.NDArray[np.float64]
    #: How many values.
    number: int
    #: Whether rows were weighed.
    weighted: bool
    #: Where they come from, in words.
    source: str
    #: Of what was counted.
    sha256: str
    #: The base mode's own codebook.
    base: Codebook


def _count(
    given: list[Path],
    base: str,
    calibration: Path | None,
    together: Processes,
    resume: Path | None,
    *,
    sides: list[str] | None,
    layers: list[int] | None,
    heads: list[int] | None,
    weigh: bool | None,
) -> _Samples:
    """The values of the chosen rows of activation files, as the base mode sees them."""
    import hashlib

    from kvq.analysis.file_values import Counted, count_files, find_files
    from kvq.calibration_files import load_calibration
    from kvq.modes import mode

    how = mode(base)
    if how.codebook is None:
        raise ValueError(f"base must be a codebook mode, got {how}")
    centered = None if calibration is None else load_calibration(calibration)
    weighted = how.codebook.recipe.weighted if weigh is None else weigh
    paths = find_files(given)
    message = f"counting the values of {len(paths)} file{'s' * (len(paths) > 1)}"
    with waiting(message) if together.leads else nullcontext():
        histogram, sha256 = count_files(
            paths,
            Counted(how, weighted, sides, layers, heads, centered),
            together,
            resume=resume,
        )
    if len(paths) == 1:
        origin = f"{paths[0].name} (sha256 {sha256[paths[0]]})"
    else:
        whole = hashlib.sha256("".join(sorted(sha256.values())).encode()).hexdigest()
        origin = f"{len(paths)} files (sha256 of their sorted sha256 {whole})"
    parts = [
        origin,
        *([] if centered is None else [f"centered by a calibration (sha256 {centered.sha256})"]),
        *(
            f"{what} {', '.join(map(str, asked))}"
            for what, asked in (("side", sides), ("layer", layers), ("head", heads))
            if asked
        ),
        f"as {how} sees them",
    ]
    points, masses = histogram.law()
    return _Samples(
        points,
        masses,
        histogram.count,
        weighted,
        ", ".join(parts),
        histogram.sha256,
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

    codes = np.searchsorted(samples.base.thresholds, samples.points, side="right")
    errors = samples.points - np.asarray(samples.base.levels)[codes]
    # Not `@`, whose order of adding depends on the number of threads.
    return float(np.sum(samples.masses * errors**2) / np.sum(samples.masses * samples.points**2))


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
