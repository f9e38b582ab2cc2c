"""A study's tables and figures for elsewhere: Markdown, CSV, PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.files import write_atomically
from polyfed.core.removed import removed
from polyfed.lab.studies.figures import draw_study, drawings_of
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.tables import study_tables
from polyfed.reporting.figures import png_bytes, svg_text


def markdown_text(results: Results) -> str:
    return "\n".join(table.markdown() for table in study_tables(results))


def figures_csv(results: Results) -> str:
    """A line for each row, point, column and seed."""
    import pandas as pd

    axes = list(results.study.axes)
    lines = [
        {"row": row, **dict(zip(axes, point, strict=True)), "column": column, "seed": seed, "value": value}
        for (row, point, column), by_seed in results.values.items()
        for seed, value in sorted(by_seed.items())
    ]
    return pd.DataFrame(lines, columns=["row", *axes, "column", "seed", "value"]).to_csv(index=False)


_TEXTS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "md": ("tables.md", markdown_text),
    "csv": ("figures.csv", figures_csv),
}
FORMATS = (*_TEXTS, "png", "svg")


def export_study(results: Results, out: Path, store: Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write tables and figures; returns the files.

    Args:
        results: of the study.
        out: folder.
        store: folder of the cells.
        formats: of ``FORMATS``.

    Raises:
        ConfigError: there is no such format.
    """
    chosen = list(formats)
    for name in chosen:
        if name not in FORMATS:
            raise ConfigError(f"--format {removed('format', name) or f'{name}: {nearest(name, FORMATS)}'}")
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in chosen:
        if name in _TEXTS:
            file, text = _TEXTS[name]
            write_atomically(out / file, text(results).encode())
            paths.append(out / file)
        else:
            paths += _drawn(results, out, store, name)
    return paths


def _drawn(results: Results, out: Path, store: Path, kind: str) -> list[Path]:
    paths = []
    for number, drawing in enumerate(drawings_of(results.study), 1):
        figure = draw_study(results, drawing, store)
        path = out / f"figure-{number}.{kind}"
        write_atomically(path, png_bytes(figure) if kind == "png" else svg_text(figure, results.study.title).encode())
        paths.append(path)
    return paths
