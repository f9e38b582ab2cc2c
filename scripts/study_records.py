"""Records of studies below papers/: their text on a page, and their files."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from polyfed.core.settings import parse_settings
from polyfed.core.untrusted import file_json, markdown
from polyfed.lab.studies.cells import cell_label
from polyfed.lab.studies.claims import ALL, Claim, Judgement, Operand
from polyfed.lab.studies.columns.metrics import Gauge
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.search import choice_label
from polyfed.lab.studies.study import SMALL, Point, Study, point_label
from polyfed.lab.studies.study_files import study_files
from polyfed.lab.studies.tables import cell_text, claim_evidence, shapley_tables
from polyfed.reporting.statistics import Comparison
from polyfed.reporting.tables import format_number
from study_pictures import Picture, pictures_of

PAPERS = Path(__file__).resolve().parents[1] / "papers"
sys.path.append(str(PAPERS.parent))  # studies name components of theirs by import path, papers.fedaid...
STUDIES = study_files(PAPERS)
"""Path below papers/ without its ending -> file."""
RECORDS = "records"
SCALES = (SMALL, "paper")
OUTCOMES = ("seen", "not seen here", "undecided")
"""Outcomes of a claim: its left side is where it should be, is not, or neither is known."""
_LEVELS = {"study": 2, "figures": 1, "chosen": 1, "cells": 0, "code": 1, "curves": 1, "again": 1}
"""Key of a record -> levels below it of which each entry has a line."""
_MOST = 12  # columns of a table
_OF_CLONE = re.compile(r'"/[^"]*/(papers/\w+/[\w-]+\.(?:py:\w+|yaml))(?=")')


CLOSE = 0.3
"""Standard deviations over seeds within which a figure counts as the recorded one."""


@dataclass(frozen=True)
class Again:
    """A drawn cell that was run again.

    Attributes:
        cell: Its label.
        code: Version and state of the code.
        distance: Largest distance of a figure from the record, in standard deviations over the row's seeds; 0: equal.
        figures: Column -> recorded figure, and the one of the rerun, where they differ.
    """

    cell: str
    code: str
    distance: float = 0.0
    figures: Mapping[str, Sequence[float | str | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyRecord:
    """The results of a study at a scale.

    Attributes:
        name: Name of the study, such as ``creamfl/t1``.
        scale: small or paper.
        results: Results of the runs, with the study at that time.
        again: Row -> its cell that was run again, at which state of the code, and the figures that were others then.
    """

    name: str
    scale: str
    results: Results
    again: Mapping[str, Again] = field(default_factory=dict)

    @property
    def hidden(self) -> list[str]:
        """Rows whose cell has other figures by now."""
        return [row for row, again in self.again.items() if again.distance > CLOSE]

    def mark(self, row: str) -> str:
        """Mark of a row's rerun, after its name."""
        if row not in self.again:
            return "°"
        return "≈" if self.again[row].distance else ""

    @property
    def label(self) -> str:
        """Its name, and a scale that is not small."""
        return self.name if self.scale == SMALL else f"{self.name}, scale {self.scale}"

    @property
    def study(self) -> Study:
        return self.results.study

    @property
    def file(self) -> str:
        """File of the study, in the folder of its page."""
        return f"{self.name.partition('/')[2]}.yaml"

    @property
    def path(self) -> str:
        """Path of the record, from its page."""
        return record_path(self.name, self.scale).partition("/")[2]

    @property
    def heading(self) -> str:
        return heading(self.study) + ("" if self.scale == SMALL else f" (scale {self.scale})")

    @property
    def anchor(self) -> str:
        """Anchor of its heading on its page."""
        return re.sub(r"[^\w -]", "", self.heading.lower()).replace(" ", "-")

    @cached_property
    def judgements(self) -> list[Judgement]:
        return self.results.judgements()

    def compared(self, claim: Claim) -> Hashable:
        """Runs and columns of either side, the upper one first: equal for equivalent claims, in any study."""

        def runs(operand: Operand) -> tuple[frozenset[str], str]:
            points = self.study.shared_points(claim.operands)
            if operand.label != ALL:
                points = [point for point in self.study.points if point_label(point) == operand.label]
            labels = [", ".join([operand.row, *at, f"seed {k}"]) for at, k in product(points, self.study.seeds)]
            column = self.study.columns_of(operand.row)[operand.column]
            return frozenset(
                self.results.cells[label] for label in labels if label in self.results.cells
            ), column.digest

        sides = [tuple(map(runs, side)) for side in claim.sides]
        return (*(sides if claim.sign.startswith(">") else sides[::-1]),)

    @cached_property
    def pictures(self) -> list[Picture]:
        """Figures of its page; lines and bars would repeat its table."""
        return [one for one in pictures_of(self.results) if not one.name.startswith("figure")]

    def picture_file(self, picture: Picture) -> str:
        """Path of a figure, from its page."""
        return f"pictures/{Path(self.path).stem}-{picture.name}.svg"

    # ---- how much of it was run

    @property
    def runs(self) -> int:
        """Number of runs; rows that are one run count once."""
        return len({*self.results.cells.values()})

    @property
    def codes(self) -> list[str]:
        """Versions and states of the code that ran it."""
        return sorted({state for states in self.results.code.values() for state in states})

    @property
    def state(self) -> str:
        """Verdicts counted, those on settings apart."""
        own, of_settings = (
            _counted(outcome(item) for item in self.judgements if (item.claim.kind == "setting") == is_setting)
            for is_setting in (False, True)
        )
        counts = "; ".join(filter(None, (own, of_settings and f"on settings {of_settings}"))) or "run"
        complete = all(is_complete(self.results, row) for row in self.study.rows) and not self.results.causes
        return counts if complete else f"in part: {counts}"

    # ---- its lines on a page

    @property
    def claims(self) -> list[str]:
        """``method, above: A > B on r1_sum: +4.11 (+3.35 to +4.86), p 0.004``."""
        lines = []
        for item in self.judgements:
            claim, about, verdict, seeds, mean, interval, p = claim_evidence(item, self.study)
            evidence = "" if item.sample is None else f": {mean}{_within(interval)}" + ("" if p == "-" else f", p {p}")
            lines.append(f"{about}, {verdict}: {markdown(claim)}{markdown(evidence)}, {seeds} seeds")
        return lines

    @property
    def main_columns(self) -> list[str]:
        """Columns of the claims; all columns of a study without claims."""
        judged, secondary = (
            {operand.column for claim in claims for operand in claim.operands}
            for claims in (self.study.claims.to_judge, self.study.claims.to_show)
        )
        chosen = judged | (secondary if len(judged | secondary) <= 4 else set())
        others = [name for name in self.study.columns if name not in self._gauges]
        return [name for name in others if name in chosen] or others

    @property
    def table(self) -> str:
        """Rows x main columns, or points of the first; the last column is a difference to the row of reference."""
        results, study = self.results, self.study
        by_point = bool(study.axes) and len(study.points) * len(self.main_columns) > _MOST
        columns = self.main_columns[:1] if by_point else self.main_columns
        is_named = len(columns) > 1 or not study.axes
        cells_of = list(product(study.points, columns))
        heads = [", ".join(filter(None, (column * is_named, point_label(point)))) for point, column in cells_of]
        lines = [
            [f"{row}{self.mark(row)}", *(_figure(results, row, *place) for place in cells_of)] for row in study.rows
        ]
        judged = next((claim.left[0].column for claim in study.claims.to_judge), columns[0])
        if not study.axes and study.columns[judged].is_outcome and len(study.rows) > 1:
            heads.append(f"{judged} minus {results.reference}")
            lines = [[*line, self._minus(row, judged)] for row, line in zip(study.rows, lines, strict=True)]
        lines = [("" if is_named else columns[0], *heads), *(line for line in lines if any(line[1:]))]
        return table(*(list(zip(*lines, strict=True)) if len(lines) <= _MOST < len(heads) else lines))

    def _minus(self, row: str, column: str) -> str:
        (point,), results = self.study.points, self.results
        comparison, _ = results.against(row, results.reference, point, column)
        return "" if row == results.reference or comparison is None else comparison_text(comparison)

    @property
    def costs(self) -> str:
        """Rows x costs at the first point, of a study that has a figure of them."""
        if not any(one.name.startswith("costs") for one in self.pictures):
            return ""
        point, study = self.study.points[0], self.study
        columns = [name for name, one in study.columns.items() if not one.is_outcome and name not in self._gauges]
        lines = [[row, *(_figure(self.results, row, point, name) for name in columns)] for row in study.rows]
        return table((point_label(point), *columns), *lines)

    @property
    def gauges(self) -> list[str]:
        """Lines on mechanisms that could act, and on replies that were shortened or left out."""
        results, lines = self.results, []
        for name, gauge in self._gauges.items():
            by_row = [f"{markdown(row)} {text}" for row in self.study.rows if (text := self._gauge(row, name, gauge))]
            lines.append(f"{markdown(f'{name} ({gauge.in_words})')}: {', '.join(by_row) or 'not measured'}")
        by_row = [f"{row} {short} / {out}" for row, (short, out) in results.replies.items() if short or out]
        others = "no other" if by_row else "none"
        replies = f"replies shortened / left out, over all seeds: {', '.join([*by_row, others])}"
        return [*lines, markdown(replies)] if results.replies else lines

    def _gauge(self, row: str, name: str, gauge: Gauge) -> str:
        """Its figure, or the range of its means over points; bold beyond a limit."""
        results = self.results
        means = [results.spread(row, at, name).mean for at in self.study.points if results.at(row, at, name)]
        if not means:
            return ""
        ends = [format_number(end, gauge.digits) for end in (min(means), max(means))]
        text = _figure(results, row, (), name) if not self.study.axes else "…".join(dict.fromkeys(ends))
        return f"**{text}**" if all(map(gauge.is_beyond, means)) else text

    @property
    def _gauges(self) -> dict[str, Gauge]:
        return {name: column for name, column in self.study.columns.items() if isinstance(column, Gauge)}

    @property
    def contributions(self) -> list[str]:
        """Shapley values, where rows are coalitions."""
        shown = self.main_columns
        tables = shapley_tables(self.results) if self.study.coalitions else []
        return [
            f"{markdown(one.title)}: {', '.join(f'{player} {value}' for player, value in one.rows)}."
            for one in tables
            if one.title.partition(":")[0] in shown
        ]

    @property
    def tuned(self) -> str:
        """``clients' rate, server's rate, 9 candidates. clients' rate x 2: creamfl; as given: fedavg.``"""
        if self.study.tuning is None or not self.results.chosen:
            return ""
        by_row: dict[str, Counter[str]] = {}
        ends: dict[str, set[int | None]] = {}
        for (row, _, seed), item in self.results.chosen.items():
            by_row.setdefault(row, Counter())[choice_label(item.factors)] += 1
            ends.setdefault(row, set()).update([seed] * bool(item.ends))
        choices = "; ".join(
            f"{row}: {', '.join(f'{choice} ({n})' for choice, n in own.most_common())}" for row, own in by_row.items()
        )
        spent = [f"{row} ({len(seeds)})" for row, seeds in ends.items() if seeds]
        more = f" A better one may lie beyond what was tried: {', '.join(spent)}." if spent else ""
        is_once = any(seed is None for *_, seed in self.results.chosen)
        how = (
            "once, on seeds of their own, for all seeds"
            if is_once
            else f"{self.study.tuning.in_words}; (n): so many seeds"
        )
        return markdown(f"{how}. {choices}.{more}")


def outcome(item: Judgement) -> str:
    """Seen, not seen here, undecided or not run."""
    if item.verdict in ("undecided", "not run"):
        return item.verdict
    return "seen" if item.is_seen else "not seen here"


def comparison_text(comparison: Comparison, digits: int = 1) -> str:
    """``+4.1 (+3.3 to +4.9)``."""
    low, high = comparison.interval
    within = "" if math.isnan(low) or low == high else f" ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"{comparison.estimate:+.{digits}f}{within}"


def _counted(outcomes: Iterable[str]) -> str:
    known = Counter(outcomes)
    return ", ".join(f"{known[name]} {name}" for name in (*OUTCOMES, "not run") if known[name])


def _within(interval: str) -> str:
    return "" if interval == "-" else f" ({interval.replace(' to ', '…')})"


def _figure(results: Results, row: str, point: Point, column: str) -> str:
    return cell_text(results, row, point, column).replace(" ± ", "±").replace(" [", "[")


def labels(study: Study, rows: Iterable[str], seeds: Sequence[int]) -> set[str]:
    """Labels of the cells of some rows."""
    return {cell_label(row, point, seed) for row in rows for point in study.points_of(row) for seed in seeds}


def is_complete(results: Results, row: str) -> bool:
    """True if a row has all seeds of the first look at all of its points."""
    return labels(results.study, [row], results.study.seeds) <= results.cells.keys()


def heading(study: Study) -> str:
    """``Table 1: retrieval by the server``; the title of a study of no item."""
    return f"{study.source.item}: {study.title.partition(': ')[2] or study.title}" if study.source else study.title


def place(study: Study) -> tuple[bool, bool, int]:
    """Sort key of items: tables, figures, all others."""
    item, _, number = (study.source.item if study.source else "").rpartition(" ")
    is_numbered = item in ("Table", "Figure")
    return not is_numbered, item != "Table", int(number) if is_numbered else 0


def cells(study: Study) -> int:
    """Runs that it takes at most, without tuning."""
    return sum(len(study.points_of(row)) for row in study.rows) * len(study.seeds)


def table(*lines: Sequence[str], ruler: str = "-:") -> str:
    """A Markdown table without spaces; the first line is the head."""
    head, *body = ([markdown(cell) for cell in line] for line in lines)
    return "\n".join(f"|{'|'.join(line)}|" for line in (head, ["-", *[ruler] * (len(head) - 1)], *body))


# ---- files


def record_path(name: str, scale: str) -> str:
    """Path of a study's record, below papers/."""
    paper, _, item = name.partition("/")
    return f"{paper}/{RECORDS}/{item}{'' if scale == SMALL else f'-{scale}'}.json"


def records(home: Path = PAPERS) -> list[StudyRecord]:
    """All that were run, paper by paper in the order of its items."""
    recorded = []
    for name, scale in product(STUDIES, SCALES):
        if (path := home / record_path(name, scale)).is_file():
            recorded.append(read_record(name, scale, path))
    return sorted(recorded, key=lambda record: (record.name.partition("/")[0], place(record.study)))


def read_record(name: str, scale: str, path: Path) -> StudyRecord:
    """A record as ``record_text`` wrote it."""
    content = file_json(path.read_bytes())
    study, again = content.pop("study"), content.pop("again", {})
    if tuning := study.get("tuning"):
        tuning["table"] = tuning.get("table") and str(PAPERS.parent / tuning["table"])
    results = Results.from_json(parse_settings(Study, study), content)
    withheld = {row: "not run again" for row in results.code if row not in again} | results.withheld
    results = replace(results, withheld=withheld)
    return StudyRecord(name, scale, results, {row: Again(**one) for row, one in again.items()})


def record_text(results: Results, again: Mapping[str, Again] | None = None) -> str:
    """Study and results as JSON, a figure a line; files of papers/ stand there without the folder of the clone."""
    content = {"study": results.study.content(), **results.to_json()}
    content |= {"again": {row: asdict(one) for row, one in again.items()}} if again else {}
    entries = (f"{json.dumps(key)}: {_lines(value, _LEVELS.get(key, 0))}" for key, value in content.items())
    return "{\n" + _OF_CLONE.sub(r'"\1', ",\n".join(entries)) + "\n}\n"


def _lines(value: Any, levels: int) -> str:
    below = list(value.values()) if isinstance(value, dict) else value
    if not levels or not isinstance(below, list) or not any(isinstance(entry, dict | list) for entry in below):
        return json.dumps(value, ensure_ascii=False)
    shown = [_lines(entry, levels - 1) for entry in below]
    if isinstance(value, list):
        return "[\n" + ",\n".join(shown) + "\n]"
    names = (json.dumps(name, ensure_ascii=False) for name in value)
    return "{\n" + ",\n".join(f"{name}: {entry}" for name, entry in zip(names, shown, strict=True)) + "\n}"
