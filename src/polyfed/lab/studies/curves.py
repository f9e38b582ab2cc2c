"""Validation by round: whether it has stopped rising where a table ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.core.errors import ConfigError, PolyfedError
from polyfed.lab.studies.cells import FIGURES, StudyPlan
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.columns.metrics import Metric
from polyfed.lab.studies.study import Point
from polyfed.reporting.compare import Spread
from polyfed.reporting.metrics import EVALUATIONS
from polyfed.runs.opened import open_run
from polyfed.runs.records import SERVER

Curve = Mapping[int, Spread]
"""Round -> validation, over seeds."""


def validation_curve(plan: StudyPlan, row: str, point: Point, seeds: Sequence[int]) -> Curve:
    """Validation by round: the column that tuning compares, else the server's metric; empty without validation.

    It is of the row's own cells where they validate as tuning does, and of the chosen candidates' where they do not.
    Raises as ``StudyPlan.cell``.
    """
    final, server = [plan.cell(row, point, seed) for seed in seeds], plan.experiment(row, point).server
    if plan.tuning is not None and plan.tuning.column is not None:
        column = plan.tuning.column
    elif server is not None:
        column = Metric(metric=server.task.primary, kind="validation")
    else:
        return {}
    if isinstance(column, Metric) and column.of == SERVER:
        column = column.changed({"round": "final"}, "round")  # of each round, not the best so far
    searches = [search for seed in seeds if not plan.main and (search := plan.row_search(row, point, seed))]
    for cells in (final, [search.cell(search.chosen.factors) for search in searches]):
        with suppress(ConfigError, IndexError):  # nobody validates there, or not as tuning does
            column.require(cells[0].experiment)
            folders = [cell.folder(plan.store) for cell in cells]
            curves = [_by_round(column, folder) for folder in folders if (folder / FIGURES).is_file()]
            rounds = sorted(set.intersection(*map(set, curves))) if curves else []
            return {number: Spread.of([curve[number] for curve in curves]) for number in rounds}
    return {}


_KNOWN: dict[tuple[str, Path], Mapping[int, float]] = {}
"""Digest of a column and folder of a complete cell -> what is read only once, as results are gathered cell by cell."""


def _by_round(column: ColumnSettings, folder: Path) -> Mapping[int, float]:
    """A column as if the run had ended after each evaluated round."""
    if (known := _KNOWN.get((column.digest, folder))) is not None:
        return known
    curve, run = dict[int, float](), open_run(folder)
    measured = () if column.needs_models else run.records.measurements
    for number in sorted({one.round for one in measured if one.kind in EVALUATIONS}):
        ended = replace(run)
        until = tuple(one for one in measured if one.round <= number)
        vars(ended)["records"] = replace(run.records, measurements=until)
        with suppress(PolyfedError):  # clients are measured after the first round
            curve[number] = column.measure(ended)
    finite = {number: value for number, value in curve.items() if math.isfinite(value)}
    return _KNOWN.setdefault((column.digest, folder), finite)


def curve_json(curve: Curve) -> dict[str, Any]:
    """Rounds, means and standard deviations, four digits of each."""
    means = [float(f"{spread.mean:.4g}") for spread in curve.values()]
    stds = [None if math.isnan(spread.std) else float(f"{spread.std:.4g}") for spread in curve.values()]
    return {"rounds": list(curve), "mean": means, "std": stds}


def curve_of(content: Mapping[str, Any]) -> Curve:
    """The curve that ``curve_json`` wrote."""
    stds = (math.nan if std is None else std for std in content["std"])
    return dict(zip(content["rounds"], map(Spread, content["mean"], stds), strict=True))
