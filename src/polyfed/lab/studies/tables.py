"""Tables of a study: figures with their spread, paired differences, claims, tuning, and missing figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from polyfed.lab.studies.cells import Chosen
from polyfed.lab.studies.claims import Judgement
from polyfed.lab.studies.columns.metrics import Gauge
from polyfed.lab.studies.results import Results, SeedFigures
from polyfed.lab.studies.search import choice_label
from polyfed.lab.studies.study import Point, RegimeMap, Study, point_label
from polyfed.reporting.compare import Spread
from polyfed.reporting.statistics import FEWEST_SEEDS
from polyfed.reporting.tables import TextTable, format_number

_PLUS_MINUS = "±: standard deviation over seeds; (n): of another number of seeds."
_SIDES = "Difference: left minus right. -: of costs that no seed changes."
_PRINTED = "[...]: what the paper prints."


def study_tables(results: Results) -> list[TextTable]:
    """All tables of a study, in order of reading."""
    tables = [*figure_tables(results), *difference_tables(results)]
    tables += shapley_tables(results) if results.study.coalitions else []
    tables += claims_tables(results)
    tables += [claims.table for claims in claim_maps(results)]
    tables += [tuning_table(results)] if results.chosen else []
    if results.causes:
        notes = ("Failed cells are tried again; columns that cannot be measured when the cell's folder is deleted.",)
        tables.append(TextTable("Without a figure", ("", "why"), list(map(list, results.causes.items())), notes))
    return tables


# ---- figures


def figure_tables(results: Results) -> list[TextTable]:
    """Rows x columns at each point; with axes and fewer columns than points, rows x points for each column."""
    study = results.study
    notes = tuple(_figure_notes(results))
    if study.axes and len(study.columns) <= len(study.points):
        axes = ", ".join(study.axes)
        return [
            TextTable(
                f"{study.title}: {column}, by {axes}",
                ("", *map(point_label, study.points)),
                [[row, *(cell_text(results, row, point, column) for point in study.points)] for row in study.rows],
                notes,
            )
            for column in study.columns
        ]
    return [
        TextTable(
            f"{study.title}{_at(point)}",
            ("", *study.columns),
            [
                [row, *(cell_text(results, row, point, column) for column in study.columns)]
                for row in study.rows
                if point in study.points_of(row)
            ],
            notes,
        )
        for point in study.points
    ]


def cell_text(results: Results, row: str, point: Point, column: str) -> str:
    """``23.40 ± 0.71 [25.1]``."""
    study = results.study
    if point not in study.points_of(row):
        return ""
    text = _spread_text(results.at(row, point, column), study.columns[column].digits)
    seeds = len(results.at(row, point, column))
    if seeds not in (0, len(study.seeds)) and not study.columns[column].once:
        text += f" ({seeds})"
    printed = study.printed_at(row, column, point)
    return text if printed is None else f"{text} [{printed:g}]"


def _spread_text(by_seed: SeedFigures, digits: int) -> str:
    spread = Spread.of(list(by_seed.values()))
    std = "" if math.isnan(spread.std) else f" ± {format_number(spread.std, digits)}"
    return format_number(spread.mean, digits) + std


def _figure_notes(results: Results) -> Iterator[str]:
    study = results.study
    yield f"{len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''}. {_PLUS_MINUS}"
    if study.printed:
        yield _PRINTED
    for name, column in study.columns.items():
        if isinstance(column, Gauge):
            yield f"{name}: {column.in_words}."
    if results.replies:
        by_row = "; ".join(f"{row} {short} / {out}" for row, (short, out) in results.replies.items())
        yield f"Replies clipped / excluded, over all seeds: {by_row}."
    if len(code := {state for states in results.code.values() for state in states}) > 1:
        yield f"Cells of {len(code)} states of the code ({', '.join(sorted(code))}): delete cells to have one."


def _at(point: Point) -> str:
    return f" ({point_label(point)})" if point else ""


# ---- differences and claims


def difference_tables(results: Results) -> list[TextTable]:
    """A table for every column of outcomes: each row minus the reference, seed by seed."""
    study, tables = results.study, []
    notes, heads = difference_notes(study), ("", "mean", "interval", "verdict")
    for column, settings in study.columns.items():
        rows = {
            f"{row}{_at(point)}": item
            for row, point in product(study.rows, study.points)
            if (item := reference_contest(results, row, point, column)) and item.comparison
        }
        body = [[label, *difference_texts(item, settings.digits), item.in_words] for label, item in rows.items()]
        tables += [TextTable(f"{column}: minus {results.reference}", heads, body, notes)] if body else []
    return tables


def difference_notes(study: Study) -> list[str]:
    notes = ["Paired by seed; interval: 95 %, or that of the verdict where a claim is judged on just that."]
    few = [f"Differences over fewer than {FEWEST_SEEDS} seeds prove nothing."]
    return notes + few if len(study.seeds) < FEWEST_SEEDS else notes


def reference_contest(results: Results, row: str, point: Point, column: str) -> Judgement | None:
    """A row against the reference; None for the reference itself, and for columns that are not compared."""
    is_compared = results.study.columns[column].is_outcome and row != results.reference
    return results.contest(row, results.reference, point, column) if is_compared else None


def difference_texts(item: Judgement, digits: int) -> list[str]:
    """Estimate and interval of a difference, dashes without one."""
    if item.comparison is None:
        return ["-", "-"]
    (low, high, _), form = item.tested, f"+.{digits}f"
    return [f"{item.comparison.estimate:{form}}", "-" if math.isnan(low) else f"{low:{form}} to {high:{form}}"]


def shapley_tables(results: Results) -> list[TextTable]:
    """Shapley values: each player's contribution to a column, computed per seed from the runs of all coalitions."""
    study, rows = results.study, results.study.coalitions
    columns = {name: settings for name, settings in study.columns.items() if settings.is_outcome}
    return [
        TextTable(
            f"{name}: Shapley values{_at(point)}",
            ("", name),
            [[player, _spread_text(values, columns[name].digits)] for player, values in by_player.items()],
            (f"They sum to {rows[max(rows, key=len)]} - {rows[frozenset()]}.",),
        )
        for name, point in product(columns, study.points)
        if (by_player := results.shapley(point, name))
    ]


def claims_tables(results: Results) -> list[TextTable]:
    """Judged claims with their verdicts, then secondary ones as differences."""
    tables, heads = [], ("claim", "about", "verdict", "seeds", "difference", "interval", "p")
    if judged := results.judgements():
        tests = len(judged) * len(results.study.looks)
        shared = f", shared by {tests} tests: intervals are of {100 - 5 / tests:.4g} %" if tests > 1 else ""
        note = (
            f"Verdicts: paired t-test over seeds at level 0.05{shared}. above, below: the interval is on that side of "
            "0; no difference: it is within the smallest effect; undecided: neither, with the seeds that would do. "
            f"{_SIDES}"
        )
        body = [claim_evidence(item, results.study) for item in judged]
        tables.append(TextTable("Claims", heads, body, (note,)))
    if read := results.evidence()[len(judged) :]:
        note = f"Not judged: 95 % intervals. {_SIDES}"
        body = [[item.claim.title, *_evidence(item, results.study)] for item in read]
        tables.append(TextTable("Secondary claims", ("claim", *heads[3:6]), body, (note,)))
    return tables


def claim_evidence(item: Judgement, study: Study) -> list[str]:
    """Claim, subject, verdict, seeds, difference, interval and p, all of one test."""
    p = item.tested[2]
    p_text = "< 0.001" if p < 0.001 else format_number(p, 3)
    return [item.claim.title, str(item.claim.kind), item.in_words, *_evidence(item, study), p_text]


def _evidence(item: Judgement, study: Study) -> list[str]:
    """Seeds, estimate and interval."""
    seeds = item.sample.seeds if item.sample else []
    return [str(len(seeds)), *difference_texts(item, study.columns[item.claim.left[0].column].decimals)]


def tuning_table(results: Results) -> TextTable:
    """Choices of each row with numbers of seeds, and searches that ended at an end of their range."""
    study, tuning, body = results.study, results.study.tuning, []
    by_row: dict[str, list[Chosen]] = {}
    for (row, point, _), chosen in results.chosen.items():
        by_row.setdefault(f"{row}{_at(point)}", []).append(chosen)
    for row, own in by_row.items():
        choices = Counter(choice_label(chosen.factors) for chosen in own)
        ends = Counter(name for chosen in own for name in chosen.ends)
        tried = sorted({len(chosen.scores) for chosen in own})
        chosen_in = "; ".join(f"{choice} ({count})" for choice, count in choices.most_common())
        body.append([row, "-".join(map(str, tried[:: max(1, len(tried) - 1)])), chosen_in, _counts_text(ends)])
    notes: list[str] = []
    if tuning:
        untuned = [row for row in study.rows if study.resolved(row).tune is False]
        notes = [f"{tuning.in_words}: each seed chooses on its own validation. (n): in so many seeds."]
        notes += [f"Not tuned: {', '.join(untuned)}."] if untuned else []
    return TextTable("Tuning", ("", "tried", "chosen", "best at an end"), body, tuple(notes))


def _counts_text(counts: Counter[str]) -> str:
    return "; ".join(f"{name} ({count})" for name, count in counts.most_common())


# ---- maps of claims

SIGNS: Mapping[str, str] = {"above": "▲", "below": "▼", "no difference": "=", "undecided": "?"}
_MAP_NOTE = (
    "Left minus right, paired by seed; all points are one family, which shares the level of 0.05. ▲, ▼: above, below; "
    "=: no difference; ?: undecided, or one seed has none."
)


@dataclass(frozen=True)
class ClaimMap:
    """A claim at all points that have a figure.

    Attributes:
        results: Results of the study.
        drawing: The claim and its axes.
    """

    results: Results
    drawing: RegimeMap

    @property
    def points(self) -> list[Point]:
        """Points that all rows share."""
        return self.results.study.shared_points(self.drawing.claim.operands)

    @cached_property
    def cells(self) -> dict[Point, Judgement]:
        """The claim at each point that has figures, all points judged as one family."""
        claims = {point: self.drawing.claim.at(point_label(point)) for point in self.points}
        judged = self.results.judged(list(claims.values()), [self.results.study.seeds])
        return {point: item for point, item in zip(claims, judged, strict=True) if item.comparison}

    def text(self, cell: Judgement) -> str:
        """``+1.3 ▲``."""
        digits = self.results.study.columns[cell.claim.left[0].column].digits
        assert cell.comparison is not None
        return f"{cell.comparison.estimate:+.{digits}f} {SIGNS[cell.verdict]}"

    def labels(self, axis: str | None) -> list[str]:
        return [""] if axis is None else list(self.results.study.axes[axis].overrides)

    def cell(self, x: str, y: str) -> Judgement | None:
        at = {self.drawing.x: x, self.drawing.y: y}
        return self.cells.get(tuple(at[axis] for axis in self.results.study.axes))

    @property
    def sentence(self) -> str:
        """``CLAIM: above at 2 of 9 points (...), below at 1 (...), undecided at 5; 1 not run.``"""
        total, parts = len(self.points), list[str]()
        for mark in SIGNS:
            if points := [point for point, cell in self.cells.items() if cell.verdict == mark]:
                where = "" if mark == "undecided" else f" ({'; '.join(self._named(points))})"
                parts.append(f"{mark} at {len(points)}{'' if parts else f' of {total} points'}{where}")
        if total > len(self.cells):
            parts.append(f"not run at {total - len(self.cells)}{'' if parts else f' of {total} points'}")
        return f"{self.drawing.map}: {', '.join(parts)}."

    def _named(self, points: Sequence[Point]) -> Iterator[str]:
        """``local epochs 5: public pairs 250, 1000``: points that differ in x alone are grouped."""
        axes = list(self.results.study.axes)
        by_rest: dict[str, list[str]] = {}
        for point in points:
            at = dict(zip(axes, point, strict=True))
            own = at.pop(self.drawing.x)
            by_rest.setdefault(", ".join(f"{name} {label}" for name, label in at.items()), []).append(own)
        for where, labels in by_rest.items():
            yield f"{where}: " * bool(where) + f"{self.drawing.x} {', '.join(labels)}"

    @property
    def table(self) -> TextTable:
        """Rows are y, columns are x."""
        drawing = self.drawing
        corner = drawing.x if drawing.y is None else f"{drawing.y} / {drawing.x}"
        across = self.labels(drawing.x)
        body = [
            [y, *(self.text(cell) if (cell := self.cell(x, y)) else "-" for x in across)]
            for y in self.labels(drawing.y)
        ]
        return TextTable(f"Where it holds: {drawing.map}", (corner, *across), body, (self.sentence, _MAP_NOTE))


def claim_maps(results: Results) -> list[ClaimMap]:
    """Maps of a study."""
    return [ClaimMap(results, drawing) for drawing in results.study.figures if isinstance(drawing, RegimeMap)]
