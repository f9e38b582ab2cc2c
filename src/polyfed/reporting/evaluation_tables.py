"""A measurement of a model on any data, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from polyfed.reporting.recalls import Recall, find_recalls, is_context
from polyfed.reporting.tables import TextTable, count, figure

if TYPE_CHECKING:
    from polyfed.runs.evaluation import Evaluation


def evaluation_tables(evaluation: Evaluation) -> list[TextTable]:
    """Recalls with what they depend on, and the other metrics."""
    recalls = find_recalls(evaluation.metrics)
    named = {recall.name for recall in recalls}
    others = {name: value for name, value in evaluation.metrics.items() if name not in named}
    title = _title(evaluation)
    tables = [_recall_table(title, recalls), _metric_table("" if recalls else title, others)]
    return [table for table in tables if table.rows]


def _title(evaluation: Evaluation) -> str:
    size = f"{evaluation.items:,} items, {evaluation.samples:,} samples"
    model = f"{evaluation.model} model of round {evaluation.round}"
    return f"{evaluation.data}, {evaluation.split}: {size}; {model}"


def _recall_table(title: str, recalls: Sequence[Recall]) -> TextTable:
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
    return TextTable(title, ("recall", "value", "chance", "gallery", "positives"), rows, notes)


def _metric_table(title: str, metrics: Mapping[str, float]) -> TextTable:
    """Metrics, with what they depend on below."""
    context = ", ".join(f"{name} {count(value)}" for name, value in metrics.items() if is_context(name))
    rows = [(name, figure(value)) for name, value in metrics.items() if not is_context(name)]
    return TextTable(title, ("metric", "value"), rows, [f"Measured with {context}."] if context else ())
