"""A measurement of a model on any data, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyfed.reporting.recalls import find_recalls, is_context
from polyfed.reporting.tables import TextTable, count, figure

if TYPE_CHECKING:
    from polyfed.runs.evaluation import Evaluation


def evaluation_tables(found: Evaluation) -> list[TextTable]:
    """Recalls with what they depend on, and the other metrics."""
    where = f"{found.data}, {found.split}: {found.items:,} items, {found.samples:,} samples; {found.model} model"
    recalls = find_recalls(found.metrics)
    rows = [
        (
            f"{recall.direction} R@{recall.cutoff}{f' ({recall.protocol})' if recall.protocol else ''}",
            figure(recall.value),
            figure(recall.chance, 3),
            count(recall.gallery),
            count(recall.positives),
        )
        for recall in recalls
    ]
    notes = ("Percent. Gallery: entries that a query is compared with. Ties count against the model.",)
    named = {recall.name for recall in recalls}
    others = {name: value for name, value in found.metrics.items() if name not in named}
    context = ", ".join(f"{name} {count(value)}" for name, value in others.items() if is_context(name))
    figures = [(name, figure(value)) for name, value in others.items() if not is_context(name)]
    title = f"{where} of round {found.round}"
    tables = [
        TextTable(title, ("recall", "value", "chance", "gallery", "positives"), rows, notes),
        TextTable(
            "" if rows else title,
            ("metric", "value"),
            figures,
            [f"Measured with {context}."] if context else (),
        ),
    ]
    return [table for table in tables if table.rows]
