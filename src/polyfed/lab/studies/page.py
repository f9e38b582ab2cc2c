"""A study as one HTML page, which loads nothing and may be mailed."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml

from polyfed.core.files import write_atomically
from polyfed.lab.studies.figures import draw_study, drawings_of
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.tables import study_tables
from polyfed.reporting.figures import png_bytes
from polyfed.reporting.html.page import rendered_page
from polyfed.reporting.html.page_tables import page_tables


def write_study_page(results: Results, out: Path, store: Path) -> Path:
    """Write the page; returns ``out``.

    Args:
        results: of the study.
        out: the file.
        store: folder of the cells, whose records curves are read from.
    """
    study = results.study
    drawn = [png_bytes(draw_study(results, drawing, store)) for drawing in drawings_of(study)] if results.values else []
    source = f"{study.source.paper}, {study.source.item}" if study.source else ""
    facts = {"of": source, "base": study.base_name, "rows": len(study.rows), "seeds": ", ".join(map(str, study.seeds))}
    page = rendered_page(
        "study.html.j2",
        title=study.title,
        description=study.description,
        facts={name: value for name, value in facts.items() if value},
        figures=[f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in drawn],
        tables=page_tables(study_tables(results)),
        text=yaml.safe_dump(study.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True),
    )
    write_atomically(out, page.encode())
    return out
