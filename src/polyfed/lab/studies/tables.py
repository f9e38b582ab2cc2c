"""A study's tables: figures with their spread, paired differences, claims, what was tuned, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Literal

from polyfed.core.distributions import LEVEL
from polyfed.lab.studies.claims import FEWEST_TUNING_SEEDS, Claim, Judgement
from polyfed.lab.studies.columns.gauges import Gauge
from polyfed.lab.studies.results import Results, SeedFigures
from polyfed.lab.studies.study import Point, RegimeMap, Study, point_label
from polyfed.reporting.compare import Spread
from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSample, PairedSpreads, Sample
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.tuning import choice_label

_PLUS_MINUS = "±: standard deviation over seeds; (n): of another number of seeds."
_SIDES = "Difference: left minus right; of standard deviations: left over right. -: of costs that no seed changes."
_ALONE = "local"
"""The row of clients that train alone, in any study that has one."""
_PRINTED = "[...]: what the paper prints."


def study_tables(results: Results) -> list[TextTable]:
    """All of them, in the order in which they are read."""
    tables = [*figure_tables(results), *difference_tables(results)]
    tables += shapley_tables(results) if results.study.coalitions else []
    tables += claims_tables(results)
    tables += [claims.table for claims in claim_maps(results)]
    tables += [tuning_table(results)] if results.chosen else []
    if results.causes:
        notes = ("A cell that failed is tried again; a column that cannot be had, when its cell's folder is deleted.",)
        tables.append(TextTable("Without a figure", ("", "why"), list(map(list, results.causes.items())), notes))
    return tables


# ---- figures


def figure_tables(results: Results) -> list[TextTable]:
    """Rows x columns at each point; where there are axes, and fewer columns than points, rows x points by column."""
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
    yield from _below_alone(results)
    if len(results.code) > 1:
        yield f"Cells of {len(results.code)} states of the code ({', '.join(results.code)}): delete cells to have one."


def _below_alone(results: Results) -> Iterator[str]:
    """For each column of outcomes, where a row is below the row of clients that train alone."""
    study = results.study
    if _ALONE not in study.rows:
        return
    for column, settings in study.columns.items():
        is_known, below = False, []
        for row, point in product(study.rows, study.points) if settings.is_outcome else ():
            sample = results.difference((row, point, column), (_ALONE, point, column))
            if row != _ALONE and sample is not None:
                is_known, (low, high) = True, sample.interval
                # the difference, and all of its interval where it has one, is on the worse side of 0
                if (sample.mean > 0 and not low <= 0) if settings.lower else (sample.mean < 0 and not high >= 0):
                    below.append(f"{row}{_at(point)}")
        if below:
            yield f"{column}: below training alone ({_ALONE}): {', '.join(below)}."
        elif is_known:
            yield f"{column}: nothing is below training alone ({_ALONE})."


def _at(point: Point) -> str:
    return f" ({point_label(point)})" if point else ""


# ---- differences and claims


def difference_tables(results: Results) -> list[TextTable]:
    """Of every column of outcomes: each row minus the reference, seed by seed."""
    tables, notes = [], ["Paired by seed; interval: Student's t over these differences."]
    if len(results.study.seeds) < FEWEST_SEEDS:
        notes.append(f"Differences over fewer than {FEWEST_SEEDS} seeds are no claim.")
    for column, settings in results.study.columns.items():
        if not settings.is_outcome:
            continue
        body = [
            [f"{row}{_at(point)}", *difference_texts(sample, settings.digits)]
            for row in results.study.rows
            for point in results.study.points_of(row)
            if row != results.reference
            and (sample := results.difference((row, point, column), (results.reference, point, column)))
        ]
        if body:
            heads = ("", "seeds", "mean", "95 % interval", "smallest")
            tables.append(TextTable(f"{column}: minus {results.reference}", heads, body, notes))
    return tables


def difference_texts(sample: PairedSample, digits: int) -> list[str]:
    """Seeds, mean, interval and smallest."""
    mean, interval = f"{sample.mean:+.{digits}f}", _interval_text(sample.interval, f"+.{digits}f")
    return [str(len(sample.values)), mean, interval, f"{sample.smallest:+.{digits}f}"]


def _interval_text(interval: tuple[float, float], form: str) -> str:
    low, high = interval
    return "-" if math.isnan(low) else f"{low:{form}} to {high:{form}}"


def shapley_tables(results: Results) -> list[TextTable]:
    """What each player adds to a column, by the runs of all coalitions, seed by seed."""
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
    tables, heads = [], ("claim", "about", "verdict", "seeds", "difference", "95 % interval", "adjusted p")
    if judged := results.judgements():
        note = (
            "Verdicts: paired t-test over seeds, beyond what tuning may have left to the row that is worse, p adjusted "
            f"for all of these claims (Holm), run or not, level 0.05; never on fewer than {FEWEST_SEEDS} seeds, "
            f"{FEWEST_TUNING_SEEDS} of tuning, nor by less than the column's effect. {_SIDES}"
        )
        body = [claim_evidence(item, results.study) for item in judged]
        tables.append(TextTable("Claims", heads, body, (note,)))
    if read := results.readings():
        note = f"Not judged: intervals are each claim's own. {_SIDES}"
        body = [[_claim_text(claim), *_evidence(claim, sample, results.study)] for claim, sample in read]
        tables.append(TextTable("Secondary claims", ("claim", *heads[3:6]), body, (note,)))
    return tables


def claim_evidence(item: Judgement, study: Study) -> list[str]:
    """Claim, what it is about, verdict with its reason, seeds, difference, interval and p."""
    evidence = _evidence(item.claim, item.sample, study)
    p = "-" if not item.p else "< 0.001" if item.p < 0.001 else format_number(item.p, 3)
    verdict = f"{item.verdict} ({item.why})" if item.why else item.verdict
    return [_claim_text(item.claim), str(item.claim.kind), verdict, *evidence, p]


def _claim_text(claim: Claim) -> str:
    return f"{claim.text} ({claim.read_at})" if claim.read_at else claim.text


def _evidence(claim: Claim, sample: Sample | None, study: Study) -> list[str]:
    if sample is None:
        return ["0", "-", "-"]
    if isinstance(sample, PairedSpreads):
        return [str(len(sample.seeds)), f"x {format_number(sample.ratio)}", _interval_text(sample.interval, ".2f")]
    return difference_texts(sample, study.columns[claim.left[0].column].decimals)[:3]


def tuning_table(results: Results) -> TextTable:
    """Row by row how many candidates were tried, which was chosen, and the figures of all."""
    study, tuning, body = results.study, results.study.tuning, []
    by_row = {f"{row} ({point_label(at)})" if at else row: chosen for (row, at), chosen in results.chosen.items()}
    for row, chosen in by_row.items():
        settings = ", ".join(f"{path} {value:g}" for path, value in chosen.settings.items())
        choice = choice_label(chosen.factors) + (f" ({settings})" if settings else "")
        scores = "; ".join(
            f"{name}: {format_number(fmean(values))}" + f" ({len(values)})" * (len(values) < chosen.seeds)
            for name, values in chosen.scores.items()
        )
        body.append([row, str(len(chosen.scores)), choice, scores])
    notes: list[str] = []
    if tuning:
        most = tuning.candidates
        others = [f"{row} {len(chosen.scores)}" for row, chosen in by_row.items() if len(chosen.scores) != most]
        open_ends = [f"{row} ({', '.join(chosen.ends)})" for row, chosen in by_row.items() if chosen.ends]
        listed = {"A better one may lie beyond what was tried": open_ends}
        listed["Not tuned"] = [row for row in study.rows if study.resolved(row).tune is False]
        for name in tuning.settings:
            listed[f"Without {name}"] = [row for row, chosen in by_row.items() if name not in chosen.factors]
        notes = [
            f"Figures of validation, mean over seeds of their own ({', '.join(map(str, tuning.seeds))}).",
            f"Candidates: {most} a row{', but ' if others else ''}{', '.join(others)}.",
            *(f"{what}: {', '.join(rows)}." for what, rows in listed.items() if rows),
        ]
    return TextTable("Tuning", ("", "tried", "chosen", "candidates"), body, tuple(notes))


# ---- where a claim holds

Mark = Literal["held", "contradicted", "open"]

SIGNS: Mapping[Mark, str] = {"held": "✓", "contradicted": "✗", "open": "?"}
_MAP_NOTE = (
    f"Left minus right, paired by seed. ✓: the {LEVEL * 100:g} % interval lies on the claim's side, ✗: on the "
    "other, ?: it reaches both, or one seed has none. Point by point, so that one of twenty would be marked where "
    "nothing differs: no verdicts."
)


@dataclass(frozen=True)
class MapCell:
    """A claim at one point.

    Attributes:
        sample: left minus right by seed.
        excess: the same beyond the claim's margin, towards the claim.
        digits: decimals shown.
    """

    sample: PairedSample
    excess: PairedSample
    digits: int

    @property
    def mark(self) -> Mark:
        low, high = (self.excess.mean,) * 2 if self.excess.is_exact else self.excess.interval
        return "held" if low > 0 else "contradicted" if high < 0 else "open"

    @property
    def text(self) -> str:
        """``+1.3 ✓``."""
        return f"{self.sample.mean:+.{self.digits}f} {SIGNS[self.mark]}"


@dataclass(frozen=True)
class ClaimMap:
    """A claim at all points that have a figure.

    Attributes:
        results: of the study.
        drawing: which claim over which axes.
    """

    results: Results
    drawing: RegimeMap

    @property
    def points(self) -> list[Point]:
        """Those that all rows have."""
        return self.results.study.shared_points(self.drawing.claim.operands)

    @cached_property
    def cells(self) -> dict[Point, MapCell]:
        claim = self.drawing.claim
        digits = self.results.study.columns[claim.left[0].column].digits
        samples = {point: self.results.sample(claim.at(point_label(point))) for point in self.points}
        return {
            point: MapCell(sample, excess, digits)
            for point, sample in samples.items()
            if isinstance(sample, PairedSample) and isinstance(excess := claim.towards(sample), PairedSample)
        }

    def labels(self, axis: str | None) -> list[str]:
        return [""] if axis is None else list(self.results.study.axes[axis].overrides)

    def cell(self, x: str, y: str) -> MapCell | None:
        at = {self.drawing.x: x, self.drawing.y: y}
        return self.cells.get(tuple(at[axis] for axis in self.results.study.axes))

    @property
    def sentence(self) -> str:
        """``CLAIM: held at 2 of 9 points (...), contradicted at 1 (...), open at 5; 1 not run.``"""
        total, parts = len(self.points), list[str]()
        for mark in SIGNS:
            points = [point for point, cell in self.cells.items() if cell.mark == mark]
            if points:
                where = "" if mark == "open" else f" ({'; '.join(self._named(points))})"
                parts.append(f"{mark} at {len(points)}{'' if parts else f' of {total} points'}{where}")
        if total > len(self.cells):
            parts.append(f"not run at {total - len(self.cells)}{'' if parts else f' of {total} points'}")
        return f"{self.drawing.map}: {', '.join(parts)}."

    def _named(self, points: Sequence[Point]) -> Iterator[str]:
        """``local epochs 5: public pairs 250, 1000``: points that differ in x alone stand together."""
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
        body = [[y, *(cell.text if (cell := self.cell(x, y)) else "-" for x in across)] for y in self.labels(drawing.y)]
        return TextTable(f"Where it holds: {drawing.map}", (corner, *across), body, (self.sentence, _MAP_NOTE))


def claim_maps(results: Results) -> list[ClaimMap]:
    """Those that a study asks for."""
    return [ClaimMap(results, drawing) for drawing in results.study.figures if isinstance(drawing, RegimeMap)]
