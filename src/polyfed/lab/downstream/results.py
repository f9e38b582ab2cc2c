"""What probes found: values by draw, the facts that they depend on, and their JSON and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from polyfed.lab.analysis.analysis import AnalysisResult
from polyfed.reporting.compare import Spread
from polyfed.reporting.tables import TextTable, count

_WIDEST = 8  # columns of a table on a terminal


@dataclass(frozen=True)
class ProbeRow:
    """Metrics under one condition (a share of the data, a client).

    Attributes:
        on: which condition.
        values: metric -> value of every draw.
        facts: what the values depend on, such as numbers of samples.
    """

    on: str
    values: Mapping[str, Sequence[float]]
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def spreads(self) -> dict[str, Spread]:
        return {name: Spread.of(list(values)) for name, values in self.values.items()}

    def to_json(self) -> dict[str, Any]:
        metrics = {
            name: {"mean": spread.mean, "std": spread.std, "values": list(self.values[name])}
            for name, spread in self.spreads.items()
        }
        return {"on": self.on, "facts": dict(self.facts), "metrics": metrics}


@dataclass(frozen=True)
class Outcome:
    """What a probe found in one task.

    Attributes:
        data: on what.
        rows: conditions.
        notes: sentences that a reader of the figures must know.
    """

    data: str
    rows: Sequence[ProbeRow]
    notes: Sequence[str] = ()

    def table(self, title: str) -> TextTable:
        """A row a condition; where there are many metrics, a column a condition."""
        cells = [
            {name: str(spread) for name, spread in row.spreads.items()}
            | {name: count(value) for name, value in row.facts.items()}
            for row in self.rows
        ]
        metrics = dict.fromkeys(chain.from_iterable(row.values for row in self.rows))
        names = list(metrics | dict.fromkeys(chain.from_iterable(row.facts for row in self.rows)))
        heads = ["", *(name.replace("_", " ") for name in names)]
        lines = [[row.on, *(by.get(name, "-") for name in names)] for row, by in zip(self.rows, cells, strict=True)]
        table = TextTable(title, heads, lines, tuple(self.notes))
        return table.turned() if len(names) > _WIDEST else table  # a terminal is taller than it is wide


def suite_result(
    head: Mapping[str, Any], probes: Mapping[str, str], outcomes: Mapping[str, Outcome], left_out: Mapping[str, str]
) -> AnalysisResult:
    """A model in all tasks of a suite.

    Args:
        head: ``subject``, ``suite`` and ``seed``, by name.
        probes: task -> kind of probe.
        outcomes: task -> what was found.
        left_out: task -> why it could not be done.
    """
    tasks = {
        task: {
            "probe": probes[task],
            "data": outcome.data,
            "rows": [row.to_json() for row in outcome.rows],
            "notes": list(outcome.notes),
        }
        for task, outcome in outcomes.items()
    }
    tables = [each.table(f"{task} ({probes[task]}, {each.data})") for task, each in outcomes.items()]
    if left_out:
        tables.append(TextTable("Left out", ("task", "why"), list(left_out.items())))
    return AnalysisResult({**head, "tasks": tasks, "left_out": left_out}, tables)
