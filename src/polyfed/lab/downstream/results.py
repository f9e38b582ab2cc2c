"""What probes found: values by draw, the facts that they depend on, and their JSON, CSV, tables and picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.compare import Spread
from polyfed.reporting.figures import COLOURS, figure_grid, legend_below, styled
from polyfed.reporting.tables import TextTable, count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = ("task", "probe", "on", "metric", "mean", "std", "draws", "facts")
_WIDEST = 8  # columns of a table on a terminal
_BARS = 6  # metrics in a panel of the picture; the others are in the tables


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
        if len(names) > _WIDEST:  # a terminal is taller than it is wide
            heads, *lines = map(list, zip(heads, *lines, strict=True))
        return TextTable(title, heads, lines, tuple(self.notes))


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
    picture = partial(_draw, head["subject"], probes, outcomes)
    return AnalysisResult({**head, "tasks": tasks, "left_out": left_out}, tables, picture, _csv(probes, outcomes))


def _csv(probes: Mapping[str, str], outcomes: Mapping[str, Outcome]) -> str:
    """One line a metric; a figure that does not exist (the deviation of one draw) is an empty cell."""
    import pandas as pd

    lines = []
    for task, outcome in outcomes.items():
        for row in outcome.rows:
            facts = " ".join(f"{name}={count(value)}" for name, value in row.facts.items())
            for metric, spread in row.spreads.items():
                figures = (spread.mean, spread.std, len(row.values[metric]))
                lines.append((task, probes[task], row.on, metric, *figures, facts))
    return pd.DataFrame(lines, columns=list(_COLUMNS)).to_csv(index=False, float_format="%.6g")


@styled
def _draw(subject: str, probes: Mapping[str, str], outcomes: Mapping[str, Outcome]) -> Figure:
    """A panel a task: bars by condition, a colour a metric; whiskers are standard deviations over draws."""
    columns = min(3, len(outcomes))
    drawing, panels = figure_grid(math.ceil(len(outcomes) / columns), columns, title=subject)
    for axes, (task, outcome) in zip(panels, outcomes.items(), strict=False):
        _draw_bars(axes, outcome)
        axes.set(title=f"{task} ({probes[task]})", ylabel="percent")
    for axes in panels[len(outcomes) :]:
        axes.set_axis_off()
    return drawing


def _draw_bars(axes: Axes, outcome: Outcome) -> None:
    metrics = list(outcome.rows[0].values)[:_BARS]
    width = 0.8 / len(metrics)
    for number, (metric, colour) in enumerate(zip(metrics, cycle(COLOURS), strict=False)):
        spreads = [row.spreads[metric] for row in outcome.rows]
        places = [k + (number - (len(metrics) - 1) / 2) * width for k in range(len(spreads))]
        whiskers = [0.0 if math.isnan(spread.std) else spread.std for spread in spreads]
        label = metric.replace("_", " ")
        axes.bar(places, [s.mean for s in spreads], width, yerr=whiskers, color=colour, label=label, capsize=2)
    axes.set_xticks(range(len(outcome.rows)), [row.on for row in outcome.rows])
    axes.tick_params(axis="x", rotation=30 if len(outcome.rows) > 3 else 0)
    legend_below(axes, 2)
