"""A study for elsewhere: Markdown, CSV, PNG and SVG."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from polyfed.core.files import write_atomically
from polyfed.lab.studies.figures import draw_study, drawings_of
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.tables import study_tables
from polyfed.reporting.figures import png_bytes, svg_text


def markdown_text(results: Results) -> str:
    return "\n".join(table.markdown() for table in study_tables(results))


def figures_csv(results: Results) -> str:
    """A line for each row, point, column and seed."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["row", *results.study.axes, "column", "seed", "value"])
    for (row, point, column), by_seed in results.values.items():
        lines.writerows((row, *point, column, seed, value) for seed, value in sorted(by_seed.items()))
    return text.getvalue()


def export_study(results: Results, out: Path) -> list[Path]:
    """Write tables and figures into a folder; returns the files."""
    files = {"tables.md": markdown_text(results).encode(), "figures.csv": figures_csv(results).encode()}
    for number, drawing in enumerate(drawings_of(results.study) if results.values else (), 1):
        figure = draw_study(results, drawing)
        files[f"figure-{number}.png"] = png_bytes(figure)
        files[f"figure-{number}.svg"] = svg_text(figure, results.study.title).encode()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]
