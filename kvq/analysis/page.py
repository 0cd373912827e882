"""The page of a report: one HTML file that holds its style and pictures and asks for nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

import pandas as pd

from kvq.analysis.summary import HEADINGS, select, with_error
from kvq.modes import short_name

_STYLE: Final = """
:root { color-scheme: light; --ink: #1c2430; --soft: #5b6675; --line: #dfe3e8; --tint: #f6f8fa;
  --blue: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
header { background: #10243a; color: #fff; }
header div, main { max-width: 1240px; margin: 0 auto; padding: 0 1.5rem; }
header div { padding-top: 2.1rem; padding-bottom: 1.7rem; }
header h1 { margin: 0 0 .3rem; font-size: 1.75rem; letter-spacing: -.01em; }
header p { margin: 0; color: #c6d3e1; max-width: 75ch; }
nav { margin-top: 1.1rem; font-size: .9rem; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; }
nav a { color: #9fd0f3; text-decoration: none; }
nav a:hover { text-decoration: underline; }
main { padding-bottom: 4rem; }
h2 { margin: 2.6rem 0 .6rem; font-size: 1.28rem; padding-top: .6rem;
  border-top: 2px solid var(--ink); }
h3 { margin: 1.6rem 0 .4rem; font-size: 1.02rem; }
p, li, dd { max-width: 82ch; }
.note { color: var(--soft); font-size: .9rem; }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  background: var(--tint); padding: .08em .3em; border-radius: 3px; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .28rem 1.4rem;
  margin: .8rem 0; align-content: start; }
dl.small { font-size: .85rem; gap: .12rem 1.2rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr));
  gap: 0 2.5rem; }
dl.facts dt { color: var(--soft); }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
dl.terms dt { font-weight: 600; margin-top: .7rem; }
dl.terms dd { margin: 0; }
.scroll { overflow-x: auto; margin: .9rem 0; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .82rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .5rem; text-align: right; white-space: nowrap; }
th { background: var(--tint); font-weight: 600; border-bottom: 1px solid var(--line);
  vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; }
td:first-child { background: #fff; font-weight: 600; }
th.text, td.text { text-align: left; }
td.text { white-space: normal; }
tbody tr + tr td { border-top: 1px solid #eef0f3; }
tbody tr:hover td { background: #f1f7fc; }
td small { color: var(--soft); font-size: .86em; }
table.stacked td small { display: block; line-height: 1.15; }
table.stacked td { vertical-align: top; line-height: 1.3; }
figure { margin: 1.2rem 0 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .9rem; max-width: 95ch; margin-top: .3rem; }
@media print { nav { display: none; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""

#: What each picture shows, by file name: its section, its title, and how to read it.
_SECTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "quality": ("Quality against size", ""),
    "rows": (
        "Error of the rows",
        "Theory is for rows that point in uniformly random directions, at this head size. A "
        "rotation brings real keys and values near it; a mode without one has no such help.",
    ),
    "scores": (
        "Bias of the scores",
        "A slope below 1 shrinks every difference between scores, as a higher temperature does. "
        "The mean signed error is added to all keys of a query alike on average, and softmax does "
        "not see that part; the centered error is what it does see.",
    ),
    "attention": (
        "Attention",
        "The weights depend on the keys alone. The output is compared three ways: with quantized "
        "keys, with quantized values, and with both.",
    ),
    "rounding": (
        "Round against truncate",
        "The same modes under four roundings, while every query sees more of its most recent "
        "keys. Errors of rounding average away; truncation pushes all rows the same way, so the "
        "output keeps an error that no length of context removes. Signed codes shrink (the slope "
        "of the scores falls), unsigned codes move down by half a step (the scores of a query "
        "shift).",
    ),
    "activations": (
        "What there is to quantize",
        "Keys are taken after RoPE. A constant offset per channel is energy that carries no "
        "difference between tokens.",
    ),
    "storage": (
        "Storage",
        "Counted in the bytes of the tensors themselves: packed codes, the stored word of every "
        "row, and the tables that all rows share (signs of the rotation, levels, thresholds).",
    ),
}
_FIGURES: Final[Mapping[str, tuple[str, str]]] = {
    "quality_against_size": (
        "quality",
        "Relative squared error of the attention output, keys and values in the same mode, "
        "against everything that is stored. Lower and further left is better.",
    ),
    "error_against_theory": (
        "rows",
        "Relative squared error of keys and values for each mode, with the prediction for "
        "isotropic rows and the rate-distortion bound <code>4^-bits</code>, which no code of that "
        "many bits can pass on Gaussian values.",
    ),
    "scores": (
        "scores",
        "Scores <code>scale * q.k</code> of quantized against exact keys: regression slope with "
        "an intercept for each query, mean signed error, and root mean square error after the "
        "mean of each query is removed.",
    ),
    "attention": (
        "attention",
        "Kullback-Leibler divergence and total variation of the attention weights, and relative "
        "squared error of the output.",
    ),
    "divergence_by_layer": (
        "attention",
        "Divergence of the weights by layer: mean over heads. The bars use the mean of the heads' "
        "standard errors, which no correlation between heads can exceed.",
    ),
    "drift_sample": (
        "rounding",
        "On the activations: the last queries, each with its most recent keys.",
    ),
    "drift_gaussian": (
        "rounding",
        "On Gaussian rows, to longer contexts: scores of standard deviation 1, values with a "
        "fifth of their energy in an offset per channel. Dashed: theory from the steps that are "
        "stored; it does not model the two end codes, where truncation of unsigned codes also "
        "shrinks, and where a zero-point that is rounded at random clamps.",
    ),
    "activation_statistics": (
        "activations",
        "Share of the energy in the means per channel, and kurtosis before and after the rotation "
        "(3 for a Gaussian), by layer.",
    ),
    "storage": (
        "storage",
        "Stored bits for each key or value, and compression against 16 bits.",
    ),
}

_TERMS: Final[Mapping[str, str]] = {
    "bits/value, compression": "Every stored tensor counted, keys and values together; "
    "compression is against 16 bits a value.",
    "K error, V error": "<code>sum |x_hat - x|^2 / sum |x|^2</code> over the tokens of a head. "
    "The signal-to-noise ratio in decibels is <code>-10 log10</code> of it; both are in the "
    "tables, which also hold the first token and the rest apart.",
    "theory": "The same for isotropic rows: <em>exact</em> where the law of a coordinate on the "
    "sphere gives it in closed form, else a seeded <em>Monte Carlo</em> mean with its standard "
    "error. Limits for large heads are in the table <code>theory</code>.",
    "slope": "Regression slope of the new scores on the old, with an intercept for each query. "
    "Its theory is <code>g = E&lt;x, x_hat&gt; / |x|^2</code>.",
    "score bias": "Mean signed error of the scores, in logits.",
    "score RMSE": "Root mean square error of the scores after the mean over the keys of each "
    "query is removed, which softmax does not see; in logits.",
    "KL, TV": "Divergence, in nats, and total variation, from 0 to 1, of the attention weights "
    "of each query, with quantized keys; means over queries.",
    "output error": "<code>sum |o_hat - o|^2 / sum |o|^2</code> over the queries of a head, keys "
    "and values in the same mode.",
    "kurtosis": "Fourth central moment over the squared variance: of all entries together, or the "
    "mean over rows of what a single row has.",
}


class Image(NamedTuple):
    """A picture to put inside the page."""

    #: Its file name, without the ending.
    name: str
    #: The contents of an SVG file.
    svg: bytes


def page(
    title: str,
    facts: Sequence[Mapping[str, str]],
    tables: Mapping[str, pd.DataFrame],
    images: Iterable[Image],
    units: str,
) -> str:
    """The HTML of a report.

    Args:
        title: What was measured.
        facts: What was measured, name by name: the input first, then smaller print.
        tables: Those of the report, with the summary.
        images: In any order; each goes to its section.
        units: What the standard errors are taken over, in a sentence.
    """
    by_section: dict[str, list[str]] = {}
    drawn = {image.name: image for image in images}
    for name, (section, caption) in _FIGURES.items():
        if name in drawn:
            by_section.setdefault(section, []).append(_figure(drawn[name], caption))
    if "rounding" in by_section:
        by_section["rounding"].append(_drift_table(tables["rounding_drift"]))
    sections = [
        ("measured", "What was measured", _all_facts(facts)),
        ("summary", "Summary", _summary(tables["summary"], units)),
        *(
            (key, heading, (f"<p>{text}</p>" if text else "") + "".join(by_section[key]))
            for key, (heading, text) in _SECTIONS.items()
            if key in by_section
        ),
        ("terms", "How to read it", _terms(units)),
        ("files", "The full tables", _files(tables)),
    ]
    links = "".join(f'<a href="#{key}">{heading}</a>' for key, heading, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{heading}</h2>{text}</section>\n'
        for key, heading, text in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>kvq report: {escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<header><div><h1>kvq report</h1>"
        "<p>What each storage mode of a KV cache does to the rows, the scores, the attention and "
        f"the memory, beside what theory says. Measured on: {escape(title)}.</p>"
        f"<nav>{links}</nav></div></header>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _figure(image: Image, caption: str) -> str:
    data = base64.b64encode(image.svg).decode()
    alternative = escape(image.name.replace("_", " "))
    return (
        f'<figure><img alt="{alternative}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _all_facts(facts: Sequence[Mapping[str, str]]) -> str:
    """The first facts in one column, the small print beside them."""
    first, *rest = facts
    small = "".join(_facts(part, "facts small") for part in rest)
    return f'<div class="columns">{_facts(first, "facts")}<div>{small}</div></div>'


def _facts(facts: Mapping[str, str], style: str) -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return f'<dl class="{style}">{items}</dl>'


def _terms(units: str) -> str:
    items = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in _TERMS.items())
    return (
        f'<dl class="terms">{items}<dt>±</dt><dd>One standard error. {escape(units)} Bars in the '
        "pictures are 95% confidence intervals.</dd></dl>"
    )


def _summary(summary: pd.DataFrame, units: str) -> str:
    headings = {name: heading for name, heading in HEADINGS.items() if summary[name].notna().any()}
    rows = []
    for _, row in summary.iterrows():
        cells = [escape(short_name(str(row["mode"])))]
        for name in headings:
            if f"{name}_se" not in row:
                cells.append(f"{row[name]:.3f}")
            elif name.startswith("theory") and row["theory_kind"] == "exact":
                cells.append(f"{row[name]:.5g} <small>exact</small>")
            else:
                cells.append(_with_error(row[name], row[f"{name}_se"]))
        rows.append(cells)
    return (
        "<p>Means over layers and KV heads. Names end in <code>_per_token_head</code>.</p>"
        + _table(["mode", *headings.values()], rows, style="stacked")
        + f'<p class="note">± one standard error. {escape(units)} Theory with one is a Monte '
        "Carlo mean.</p>"
    )


def _drift_table(drift: pd.DataFrame) -> str:
    metrics = {
        "slope": "slope",
        "shift": "mean error per query, RMS",
        "output_error_value": "output error, values quantized",
    }
    parts = []
    for source, found in drift.groupby("input", sort=False):
        longest = select(found, context=found["context"].max())
        rows = []
        for (mode, rounding), part in longest.groupby(["mode", "rounding"], sort=False):
            cells = [escape(short_name(str(mode))), escape(str(rounding).replace("_", " "))]
            for metric in metrics:
                row = select(part, metric=metric).iloc[0]
                cells += [
                    _with_error(row["value"], row["standard_error"]),
                    f"{row['theory']:.4g}",
                ]
            rows.append(cells)
        headings = [name for text in metrics.values() for name in (text, "theory")]
        parts.append(
            f"<h3>At {found['context'].max()} keys, {escape(str(source))}</h3>"
            + _table(["mode", "rounding", *headings], rows, text_columns=(1,))
        )
    return "".join(parts)


def _with_error(value: float, standard_error: float) -> str:
    text, error = with_error(value, standard_error)
    return f"{text} <small>± {error}</small>" if error else text


def _table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Sequence[int] = (),
    style: str = "",
) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="text"' if index in text_columns else ""
        return f"<{tag}{kind}>{text}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{style}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _files(tables: Mapping[str, pd.DataFrame]) -> str:
    rows = [
        [
            f"<code>tables/{name}.parquet</code>, <code>.csv</code>",
            f"{len(table):,}",
            escape(", ".join(map(str, table.columns))),
        ]
        for name, table in tables.items()
    ]
    return (
        "<p>Beside this page, one row for each number. The pictures are in <code>figures</code>, "
        "and <code>manifest.json</code> holds versions, seeds, hashes and options: "
        "<code>kvq report --replay manifest.json</code> makes the same tables again.</p>"
        + _table(["table", "rows", "columns"], rows, text_columns=(2,))
    )
