"""A study's tables: figures with their spread, paired differences, claims, and what tuning chose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from polyfed.lab.studies.claims import Judgement
from polyfed.lab.studies.regime_maps import claim_maps
from polyfed.lab.studies.results import Results, SeedFigures
from polyfed.lab.studies.study import Point, point_label
from polyfed.reporting.compare import Spread
from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSample
from polyfed.reporting.tables import TextTable, figure

_PLUS_MINUS = "±: standard deviation over seeds; (n): fewer seeds than the study has."
_PRINTED = "[...]: what the paper prints."


def study_tables(results: Results) -> list[TextTable]:
    """All of them, in the order in which they are read."""
    tables = [*figure_tables(results), *difference_tables(results)]
    tables += shapley_tables(results) if results.study.coalitions else []
    tables += [claims_table(results.judgements())] if results.study.claims else []
    tables += [table for claims in claim_maps(results) for table in claims.tables()]
    tables += [tuning_table(results)] if results.chosen else []
    tables += [causes_table(results)] if results.causes else []
    return tables


# ---- figures


def figure_tables(results: Results) -> list[TextTable]:
    """Rows x columns at each point; where there are axes, and fewer columns than points, rows x points by column."""
    study = results.study
    notes = tuple(_figure_notes(results))
    if study.axes and len(study.columns) <= len(study.points):
        axes = ", ".join(study.axes)
        return [_by_point(results, column, f"{column}, by {axes}", notes) for column in study.columns]
    return [
        TextTable(
            f"{study.title}{_at(point)}",
            ("", *study.columns),
            [
                [row, *(cell_text(results, row, point, column) for column in study.columns)]
                for row in _rows_at(results, point)
            ],
            notes,
        )
        for point in study.points
    ]


def _by_point(results: Results, column: str, title: str, notes: Sequence[str]) -> TextTable:
    study = results.study
    heads = ("", *map(point_label, study.points))
    body = [[row, *(cell_text(results, row, point, column) for point in study.points)] for row in study.rows]
    return TextTable(f"{study.title}: {title}", heads, body, notes)


def cell_text(results: Results, row: str, point: Point, column: str) -> str:
    """``23.40 ± 0.71 [25.1]``."""
    study = results.study
    if point not in study.points_of(row):
        return ""
    text = _spread_text(results.at(row, point, column), study.columns[column].digits)
    seeds = len(results.at(row, point, column))
    if 0 < seeds < len(study.seeds):
        text += f" ({seeds})"
    printed = study.printed_at(row, column, point)
    return text if printed is None else f"{text} [{printed:g}]"


def _spread_text(by_seed: SeedFigures, digits: int) -> str:
    spread = Spread.of(list(by_seed.values()))
    return figure(spread.mean, digits) + ("" if math.isnan(spread.std) else f" ± {figure(spread.std, digits)}")


def _figure_notes(results: Results) -> Iterator[str]:
    study = results.study
    yield f"{len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''}. {_PLUS_MINUS}"
    if study.printed:
        yield _PRINTED
    if len(results.code) > 1:
        yield f"Cells of {len(results.code)} states of the code ({', '.join(results.code)}): delete cells to have one."


def _rows_at(results: Results, point: Point) -> list[str]:
    return [row for row in results.study.rows if point in results.study.points_of(row)]


def _at(point: Point) -> str:
    return f" ({point_label(point)})" if point else ""


# ---- differences and claims


def difference_tables(results: Results) -> list[TextTable]:
    """Of every column but costs: each row minus the reference, seed by seed."""
    tables = []
    for column, settings in results.study.columns.items():
        if settings.is_cost:
            continue
        body = [
            [f"{row}{_at(point)}", *difference_texts(sample, settings.digits)]
            for row in results.study.rows
            for point in results.study.points_of(row)
            if row != results.reference
            and (sample := results.difference((row, point, column), (results.reference, point, column)))
        ]
        if body:
            heads = ("", "seeds", "mean", "95 % interval", "smallest", "p")
            tables.append(TextTable(f"{column}: minus {results.reference}", heads, body, _difference_notes(results)))
    return tables


def _difference_notes(results: Results) -> tuple[str, ...]:
    note = "Paired by seed; interval and p: Student's t over these differences, p not adjusted."
    few = len(results.study.seeds) < FEWEST_SEEDS
    return (note, f"Differences over fewer than {FEWEST_SEEDS} seeds are no claim.") if few else (note,)


def difference_texts(sample: PairedSample, digits: int) -> list[str]:
    """Seeds, mean, interval, smallest and p."""
    low, high = sample.interval
    interval = "-" if math.isnan(low) else f"{low:+.{digits}f} to {high:+.{digits}f}"
    mean, smallest = f"{sample.mean:+.{digits}f}", f"{sample.smallest:+.{digits}f}"
    return [str(len(sample.values)), mean, interval, smallest, _p_text(sample.p)]


def shapley_tables(results: Results) -> list[TextTable]:
    """What each player adds to a column, by the runs of all coalitions, seed by seed."""
    study, rows = results.study, results.study.coalitions
    columns = {name: settings for name, settings in study.columns.items() if not settings.is_cost}
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


def _p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else figure(p, 3)


def claims_table(judgements: Sequence[Judgement]) -> TextTable:
    """Every claim with its verdict."""
    body = [claim_evidence(item) for item in judgements]
    heads = ("claim", "verdict", "seeds", "mean difference", "95 % interval", "adjusted p")
    notes = (
        "Verdicts: paired t-test over seeds, p adjusted for all claims of the study (Holm), run or not, level 0.05, "
        f"never on fewer than {FEWEST_SEEDS} seeds. Difference: left minus right.",
        *_undecided(judgements),
    )
    return TextTable("Claims", heads, body, notes)


def claim_evidence(item: Judgement) -> list[str]:
    return [_claim_text(item), item.verdict, *_evidence(item)]


def _claim_text(item: Judgement) -> str:
    label = item.claim.left[1]
    return item.claim.text if not label or " at " in item.claim.text else f"{item.claim.text} ({label})"


def _evidence(item: Judgement) -> list[str]:
    if item.sample is None:
        return ["0", "-", "-", "-"]
    seeds, mean, interval, *_ = difference_texts(item.sample, 2)
    return [seeds, mean, interval, _p_text(item.p)]


def _undecided(judgements: Sequence[Judgement]) -> Iterator[str]:
    for item in judgements:
        if item.verdict == "undecided":
            yield f"{_claim_text(item)}: undecided; {_enough(item)}."


def _enough(item: Judgement) -> str:
    if item.excess is not None and math.isnan(item.excess.spread):
        return "one seed has no spread, so nobody knows how many would decide"
    enough = "more than a thousand" if item.seeds_to_decide is None else f"about {item.seeds_to_decide}"
    return f"at this mean and spread {enough} seeds would decide"


# ---- tuning, and what is missing


def tuning_table(results: Results) -> TextTable:
    """What was chosen for each row, from which validation figures."""
    body, ends = [], []
    for (row, point), chosen in results.chosen.items():
        values = ", ".join(f"{name}={value}" for name, value in chosen.values.items())
        scores = "; ".join(f"{name}: {figure(score)}" for name, score in chosen.scores.items())
        body.append([f"{row}{_at(point)}", values, scores])
        ends += [f"{row}{_at(point)} {values}"] * chosen.is_at_end
    notes = ["Chosen on validation, on seeds of their own."]
    if ends:
        notes.append(f"At the end of the grid, so that better ones may lie beyond: {'; '.join(ends)}.")
    return TextTable("Tuning", ("", "chosen", "validation"), body, tuple(notes))


def causes_table(results: Results) -> TextTable:
    body = [[label, cause] for label, cause in results.causes.items()]
    notes = ("A cell that failed is tried again; a column that cannot be had, when its cell's folder is deleted.",)
    return TextTable("Without a figure", ("", "why"), body, notes)
