"""A study as one HTML page, which loads nothing and may be mailed."""

from __future__ import annotations

from pathlib import Path

import yaml
from markupsafe import Markup

from polyfed.core.files import write_atomically
from polyfed.lab.studies.drawings import AnyDrawing, RegimeMap
from polyfed.lab.studies.figures import draw_study, drawings_of
from polyfed.lab.studies.regime_maps import ClaimMap
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.tables import study_tables
from polyfed.reporting.figures import svg_text
from polyfed.reporting.page import rendered_page


def write_study_page(results: Results, out: Path, store: Path) -> Path:
    """Write the page; returns ``out``.

    Args:
        results: of the study.
        out: the file.
        store: folder of the cells, whose records curves are read from.
    """
    study = results.study
    drawings = drawings_of(study) if results.values else []
    source = f"{study.source.paper}, {study.source.item}" if study.source else ""
    facts = {"of": source, "base": study.base_name, "rows": len(study.rows), "seeds": ", ".join(map(str, study.seeds))}
    page = rendered_page(
        "study.html.j2",
        title=study.title,
        description=study.description,
        facts={name: value for name, value in facts.items() if value},
        figures=[
            (Markup(svg_text(draw_study(results, each, store), study.title)), _caption(results, each))
            for each in drawings
        ],
        tables=study_tables(results),
        text=yaml.safe_dump(study.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True),
    )
    write_atomically(out, page.encode())
    return out


def _caption(results: Results, drawing: AnyDrawing) -> str:
    return ClaimMap(results, drawing).sentence if isinstance(drawing, RegimeMap) else ""
