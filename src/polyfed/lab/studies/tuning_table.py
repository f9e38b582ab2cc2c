"""What was chosen for each row of a study, of which candidates, and what was not tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from polyfed.lab.studies.results import Results
from polyfed.lab.studies.row_search import Chosen
from polyfed.lab.studies.study import Study, point_label
from polyfed.lab.studies.tuning import Tuning
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.pattern_search import choice_label


def tuning_table(results: Results) -> TextTable:
    """Row by row how many candidates were tried, which was chosen, and the figures of all."""
    by_row = {f"{row} ({point_label(at)})" if at else row: chosen for (row, at), chosen in results.chosen.items()}
    body = [[row, *_texts(chosen)] for row, chosen in by_row.items()]
    notes = _notes(results.study, results.study.tuning, by_row) if results.study.tuning else ()
    return TextTable("Tuning", ("", "tried", "chosen", "candidates"), body, tuple(notes))


def _texts(chosen: Chosen) -> list[str]:
    settings = ", ".join(f"{path} {value:g}" for path, value in chosen.settings.items())
    choice = choice_label(chosen.factors) + (f" ({settings})" if settings else "")
    return [
        str(len(chosen.scores)),
        choice,
        "; ".join(f"{name}: {format_number(s)}" for name, s in chosen.scores.items()),
    ]


def _notes(study: Study, tuning: Tuning, by_row: Mapping[str, Chosen]) -> Iterator[str]:
    yield f"Figures of validation, mean over seeds of their own ({', '.join(map(str, tuning.seeds))})."
    yield _numbers(tuning.candidates, {row: len(chosen.scores) for row, chosen in by_row.items()})
    for what, rows in _lists(study, tuning, by_row).items():
        if rows:
            yield f"{what}: {', '.join(rows)}."


def _lists(study: Study, tuning: Tuning, by_row: Mapping[str, Chosen]) -> dict[str, list[str]]:
    open_ends = [row for row in by_row if not by_row[row].is_surrounded]
    fixed = [row for row in study.rows if study.resolved(row).tune is False]
    lacking = {
        f"Without {kind}": [row for row in by_row if kind not in by_row[row].factors] for kind in tuning.settings
    }
    return {"Neighbours of the best were left, which may be better": open_ends, "Not tuned": fixed, **lacking}


def _numbers(most: int, numbers: Mapping[str, int]) -> str:
    others = [f"{row} {number}" for row, number in numbers.items() if number != most]
    return f"Candidates: {most} a row{', but ' if others else ''}{', '.join(others)}."
