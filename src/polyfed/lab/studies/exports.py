"""Exports of a study: frames of plain values, and files of tables and figures in several formats."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from polyfed.core.distributions import student_reach
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.files import write_atomically
from polyfed.lab.studies.cells import cell_label
from polyfed.lab.studies.claims import Judgement
from polyfed.lab.studies.figures import draw_study, drawings_of, role_of
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.search import choice_label
from polyfed.lab.studies.study import Point
from polyfed.lab.studies.tables import cell_text, difference_notes, difference_texts, reference_contest, study_tables
from polyfed.reporting.figures import png_bytes, svg_text

Frame = tuple[Sequence[str], Sequence[tuple[Any, ...]]]
"""Headings, and rows of plain values; NaN where there is none."""

# ---- frames

_MINUS = ("difference", "difference low", "difference high", "p", "verdict")


def _minus(item: Judgement | None) -> tuple[Any, ...]:
    """Estimate, interval, p and verdict."""
    if item is None or item.comparison is None:
        return *[math.nan] * 4, item.in_words if item else ""
    return item.comparison.estimate, *item.tested, item.in_words


def _summary(results: Results) -> Frame:
    study, rows = results.study, list[tuple[Any, ...]]()
    for row in study.rows:
        for point, column in product(study.points_of(row), study.columns):
            spread, seeds = results.spread(row, point, column), len(results.at(row, point, column))
            reach = student_reach(seeds - 1) * spread.std / math.sqrt(seeds) if seeds > 1 else math.nan
            mean = seeds, spread.mean, spread.std, spread.mean - reach, spread.mean + reach
            minus = _minus(reference_contest(results, row, point, column))
            rows += [(row, *point, column, *mean, *minus)] if seeds else []
    return ("row", *study.axes, "column", "seeds", "mean", "std", "low", "high", *_MINUS), rows


def _cells(results: Results) -> Frame:
    study = results.study
    rows = [
        (row, *point, seed, *(results.at(row, point, column).get(seed, math.nan) for column in study.columns), label)
        for row in study.rows
        for point, seed in product(study.points_of(row), study.all_seeds)
        if (label := cell_label(row, point, seed)) in results.cells
    ]
    return ("row", *study.axes, "seed", *study.columns, "cell"), rows


def _tuning(results: Results) -> Frame:
    names, rows = dict.fromkeys(name for item in results.chosen.values() for name in item.factors), []
    for (row, point, seed), item in results.chosen.items():
        settings = "; ".join(f"{path}={value:g}" for path, value in item.settings.items())
        score = item.scores.get(choice_label(item.factors), math.nan)
        factors = (item.factors.get(name, math.nan) for name in names)
        rows.append((row, *point, seed, *factors, settings, score, len(item.scores), "; ".join(item.ends)))
    return ("row", *results.study.axes, "seed", *names, "settings", "validation", "tried", "at an end"), rows


def _claims(results: Results) -> Frame:
    rows = [
        (one.claim.title, one.claim.kind or "secondary", len(one.sample.seeds) if one.sample else 0, *_minus(one))
        for one in results.evidence()
    ]
    return ("claim", "about", "seeds", *_MINUS), rows


FRAMES = {"summary": _summary, "cells": _cells, "tuning": _tuning, "claims": _claims}
"""Name -> what makes the frame."""

# ---- files


def markdown_text(results: Results) -> str:
    return "\n".join(table.markdown() for table in study_tables(results))


def figures_csv(results: Results) -> str:
    """A line for each row, point, column and seed."""
    values = results.values.items()
    rows = [(row, *point, name, *one) for (row, point, name), by_seed in values for one in sorted(by_seed.items())]
    return _csv(("row", *results.study.axes, "column", "seed", "value"), rows)


def summary_csv(results: Results) -> str:
    """The frame ``summary``: a line for each row, point and column."""
    return _csv(*_summary(results))


def _csv(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    blank = ([None if isinstance(cell, float) and math.isnan(cell) else cell for cell in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows([heads, *blank])
    return text.getvalue()


_LATEX: dict[str, str | int | None] = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"${sign}$" for sign in "<>|"},
    **{sign: f"{{{sign}}}" for sign in "[]*"},  # which are arguments of the end of a line
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"},
}


def _latex(text: str) -> str:
    """Text with its signs escaped, and real minus signs."""
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", text.translate(str.maketrans(_LATEX)))


def latex_text(results: Results) -> str:
    """A table of booktabs: rows x columns at each point, with the difference to the reference behind each outcome."""
    study = results.study
    minus = {name: f"minus {results.reference}" for name, column in study.columns.items() if column.is_outcome}
    heads = [*study.axes, *(head for name in study.columns for head in (name, minus.get(name)) if head)]
    caption = (
        f"{study.title}: mean ± standard deviation (seeds: {len(study.seeds)}), in bold the best at each point, "
        f"ceilings aside; minus {results.reference}: mean difference (interval), and the verdict of judged claims."
    )
    lines = ["% needs \\usepackage{booktabs}", *(f"% {note}" for note in difference_notes(study))]
    lines += ["\\begin{table}", "\\centering", f"\\caption{{{_latex(caption)}}}"]
    lines += [f"\\begin{{tabular}}{{l{'l' * len(study.axes)}{'r' * (len(heads) - len(study.axes))}}}", "\\toprule"]
    lines += [" & ".join(["", *map(_latex, heads)]) + r" \\"]
    for point in study.points:
        lines += ["\\midrule"]
        best = {name: _best(results, point, name) for name in minus}
        for row in (row for row in study.rows if point in study.points_of(row)):
            cells = [_latex(text) for text in (row, *point)]
            for name in study.columns:
                text = _latex(cell_text(results, row, point, name))
                cells += [f"\\textbf{{{text}}}" if row in best.get(name, ()) else text]
                cells += [_latex(_difference_text(results, row, point, name))] if name in minus else []
            lines += [" & ".join(cells) + r" \\"]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def _best(results: Results, point: Point, column: str) -> list[str]:
    """Rows with the best mean as it is shown; ceilings such as pooled data do not count."""
    study, settings = results.study, results.study.columns[column]
    means = {row: round(results.spread(row, point, column).mean, settings.digits) for row in study.rows}
    finite = {row: mean for row, mean in means.items() if math.isfinite(mean) and role_of(study, row) != "ceiling"}
    best = (min if settings.lower else max)(finite.values(), default=math.nan)
    return [row for row, mean in finite.items() if mean == best]


def _difference_text(results: Results, row: str, point: Point, column: str) -> str:
    """``+4.1 (+3.3 to +4.9), above``; empty for the reference."""
    if (item := reference_contest(results, row, point, column)) is None:
        return ""
    estimate, interval = difference_texts(item, results.study.columns[column].digits)
    within = f" ({interval})" if interval != "-" else ""
    return f"{estimate}{within}{f', {item.verdict}' if item.in_words else ''}"


FORMATS: Mapping[str, Mapping[str, Callable[[Results], str]]] = {
    "markdown": {"tables.md": markdown_text},
    "csv": {"summary.csv": summary_csv, "figures.csv": figures_csv},
    "latex": {"tables.tex": latex_text},
    "png": {},
    "svg": {},
}
"""Format -> its files of text; figures are images of the last two."""


def export_study(results: Results, out: Path, formats: Collection[str] = FORMATS.keys()) -> list[Path]:
    """Write tables and figures into a folder; returns the files.

    Raises:
        ConfigError: A format is unknown.
    """
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"--format {name}: {nearest(name, FORMATS)}")
    files = {file: make(results).encode() for name in formats for file, make in FORMATS[name].items()}
    is_drawn = results.values and {"png", "svg"} & {*formats}
    for number, drawing in enumerate(drawings_of(results.study) if is_drawn else (), 1):
        figure = draw_study(results, drawing)
        images = {"png": png_bytes(figure), "svg": svg_text(figure, results.study.title).encode()}
        files |= {f"figure-{number}.{name}": content for name, content in images.items() if name in formats}
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]
