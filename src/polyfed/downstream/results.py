"""What probes found: values by draw, the facts that they depend on, and their JSON, CSV and tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.reporting.compare import Spread
from polyfed.reporting.tables import TextTable, count

_WIDEST = 8  # columns of a table on a terminal

COLUMNS = ("task", "probe", "on", "metric", "mean", "std", "draws", "facts")


@dataclass(frozen=True)
class Row:
    """Metrics of one condition (a share of the data, a client).

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
        """Mean and standard deviation over draws."""
        return {name: Spread.of(list(values)) for name, values in self.values.items()}


@dataclass(frozen=True)
class Outcome:
    """What a probe found in one task.

    Attributes:
        data: on what.
        rows: conditions.
        notes: sentences that a reader of the figures must know.
    """

    data: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Findings:
    """A subject in all tasks of a suite.

    Attributes:
        subject: name of the model.
        suite: name of the suite.
        seed: of all draws.
        probes: task -> kind of probe.
        outcomes: task -> what was found.
        left_out: task -> why it could not be done.
    """

    subject: str
    suite: str
    seed: int
    probes: Mapping[str, str]
    outcomes: Mapping[str, Outcome]
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """All values."""
        tasks = {
            task: {
                "probe": self.probes[task],
                "data": outcome.data,
                "rows": [_row_json(row) for row in outcome.rows],
                "notes": list(outcome.notes),
            }
            for task, outcome in self.outcomes.items()
        }
        head = {"subject": self.subject, "suite": self.suite, "seed": self.seed}
        return head | {"tasks": tasks, "left_out": dict(self.left_out)}

    def to_csv(self) -> str:
        """One line a metric; a figure that does not exist (the deviation of one draw) is an empty cell."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for task, outcome in self.outcomes.items():
            for row in outcome.rows:
                facts = " ".join(f"{name}={count(value)}" for name, value in row.facts.items())
                for metric, spread in row.spreads.items():
                    figures = (_cell(spread.mean), _cell(spread.std), len(row.values[metric]))
                    writer.writerow([task, self.probes[task], row.on, metric, *figures, facts])
        return stream.getvalue()

    def tables(self) -> list[TextTable]:
        """A table a task, and one of what was left out."""
        found = [_table(f"{task} ({self.probes[task]}, {each.data})", each) for task, each in self.outcomes.items()]
        if self.left_out:
            found.append(TextTable("Left out", ("task", "why"), list(self.left_out.items())))
        return found


def _row_json(row: Row) -> dict[str, Any]:
    metrics = {
        name: {"mean": spread.mean, "std": spread.std, "values": list(row.values[name])}
        for name, spread in row.spreads.items()
    }
    return {"on": row.on, "facts": dict(row.facts), "metrics": metrics}


def _cell(value: float) -> str:
    return "" if value != value else f"{value:.6g}"


def _table(title: str, outcome: Outcome) -> TextTable:
    """A row a condition; where there are many metrics, a column a condition."""
    metrics = list(dict.fromkeys(name for row in outcome.rows for name in row.values))
    facts = list(dict.fromkeys(name for row in outcome.rows for name in row.facts))
    names = [name.replace("_", " ") for name in (*metrics, *facts)]
    cells = [
        [
            *(str(row.spreads[name]) if name in row.values else "-" for name in metrics),
            *(count(row.facts[name]) if name in row.facts else "-" for name in facts),
        ]
        for row in outcome.rows
    ]
    heads = [row.on for row in outcome.rows]
    if len(names) > _WIDEST:
        names, heads, cells = heads, names, [list(column) for column in zip(*cells, strict=True)]
    body = [(head, *row) for head, row in zip(heads, cells, strict=True)]
    return TextTable(title, ("", *names), body, tuple(outcome.notes))
