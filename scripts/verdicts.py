"""Outcomes of the papers' claims: verdicts with power and costs, from records; ``papers.yaml`` has the words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from polyfed.core.distributions import LEVEL, student_reach
from polyfed.core.untrusted import markdown
from polyfed.lab.studies.claims import ALL, Claim, Judgement, Operand
from polyfed.lab.studies.columns.costs import CpuSeconds, RoundCost, TrafficColumn
from polyfed.lab.studies.columns.metrics import Gauge
from polyfed.lab.studies.figures import role_of
from polyfed.lab.studies.study import SMALL, Study, point_label
from polyfed.reporting.tables import format_number
from study_records import STUDIES, StudyRecord, comparison_text, is_complete, place

_CONTENT = yaml.safe_load(Path(__file__).with_name("papers.yaml").read_text(encoding="utf-8"))
WORDS: Mapping[str, Mapping[str, Any]] = _CONTENT["papers"]
BEFORE: Mapping[str, Any] = _CONTENT["before"]
MAIN_TABLES = {paper: f"{paper}/t1" for paper in WORDS}
"""Folder below papers/ -> study whose costs stand for those that its other studies do not record."""

Queue = Mapping[str, tuple[int, float]]
"""Study -> cells that its record lacks, and CPU hours."""
Known = Mapping[str, StudyRecord]
"""Study -> its record at scale small."""


def by_name(recorded: Sequence[StudyRecord]) -> Known:
    """Records at scale small by study."""
    return {record.name: record for record in recorded if record.scale == SMALL}


# ---- one claim


def costs_text(record: StudyRecord, claim: Claim, known: Known) -> str:
    """``MiB 49.8 against 49.8, CPU s 15.5 against 10.7``, of the study or else of the paper's main table."""
    main, rows = known.get(MAIN_TABLES.get(record.name.partition("/")[0], "")), {one.row for one in claim.operands}
    stands_for = main if main and len(rows) > 1 and rows <= main.study.rows.keys() else None
    for own in filter(None, (record, stands_for)):
        parts = []
        for name, column in own.study.columns.items():
            is_flops = isinstance(column, RoundCost) and column.figure == "flops"
            if isinstance(column, TrafficColumn | CpuSeconds) or is_flops:
                sides = [_mean(own, one, claim, name) for one in dict.fromkeys(claim.operands)]
                if all(side is not None for side in sides):
                    parts.append(f"{name} {' against '.join(_short(side) for side in sides if side is not None)}")
        if parts:
            return ", ".join(parts)
    return ""


def _mean(record: StudyRecord, operand: Operand, claim: Claim, column: str) -> float | None:
    """Mean of a cost over seeds, and over the points of a side; of the first point where a study lacks the claim's."""
    results, study = record.results, record.study
    named = [point for point in study.points if point_label(point) == operand.label]
    points = named or (study.shared_points(claim.operands) if operand.label == ALL else []) or study.points[:1]
    figures = [results.spread(operand.row, at, column).mean for at in points if results.at(operand.row, at, column)]
    return fmean(figures) if figures else None


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def power_text(item: Judgement, study: Study) -> str:
    """Difference that this test would find in eight of ten tables of as many seeds, at the measured spread."""
    if item.sample is None or item.sample.is_exact or len(item.sample.values) < 2:
        return ""
    tests, degrees = len(study.claims.to_judge) * len(study.looks), len(item.sample.values) - 1
    reach = student_reach(degrees, 1 - (1 - LEVEL) / tests) + student_reach(degrees, 0.6)  # of 80 % on one side
    return f"{reach * item.sample.spread / math.sqrt(degrees + 1):.1f}"


def verdict_text(item: Judgement, record: StudyRecord, known: Known) -> str:
    """A claim's outcome as a phrase: rows, column, verdict, estimate with interval, seeds, costs."""
    claim, sample = item.claim, item.sample
    left, right = (" - ".join(dict.fromkeys(one.row for one in side)) for side in claim.sides)
    subject = f"{markdown(left)} against {markdown(right)} on {markdown(claim.left[0].column)}"
    if sample is None or item.comparison is None:
        return f"{subject}: **not measured yet**"
    printed = [record.study.printed_at(side[0].row, side[0].column, ()) for side in claim.sides]
    paper = f"; the paper prints {printed[0] - printed[1]:+.2f}" if printed[0] and printed[1] else ""
    costs = costs_text(record, claim, known)
    return (
        f"{subject}: **{item.in_words}**, {comparison_text(item.comparison)}, {len(sample.values)} seeds"
        f"{costs and f' ({costs})'}{paper}"
    )


def claim_lines(record: StudyRecord, known: Known) -> list[str]:
    """The record's judged claims, each with the costs of its sides."""
    lines = zip(record.claims, record.judgements, strict=True)
    costs = ((line, costs_text(record, item.claim, known)) for line, item in lines)
    return [line + (f"; {markdown(text)}" if text else "") for line, text in costs]


# ---- one paper


def sentences(paper: str, known: Known, left: Queue) -> dict[str, str]:
    """Lead -> sentence: what the paper claims, where it was tried, what came out, and why."""
    words = WORDS[paper]
    return {
        "The claim": markdown(words["claim"].strip()),
        "Tried here": markdown(words["regime"].strip()),
        "What came out": outcome_text(paper, known, left),
        "Why": why_text(paper, known, left),
    }


def outcome_text(paper: str, known: Known, left: Queue) -> str:
    """Verdicts of the main claim, or what is queued."""
    name = WORDS[paper]["main"]
    if name not in known:
        return f"Not measured yet{_queued(name, left)}."
    record = known[name]
    texts = [verdict_text(item, record, known) for item in record.judgements]
    return f"{'. '.join(texts)}{_queued(name, left)}."


def best_text(paper: str, known: Known) -> str:
    """The best complete row of the main claim's table in each column that its claims are on, ceilings apart."""
    record = known.get(WORDS[paper]["main"])
    if record is None:
        return ""
    results, study, point, texts = record.results, record.study, record.study.points[0], []
    rows = [row for row in study.rows if is_complete(results, row) and role_of(study, row) != "ceiling"]
    for column in record.main_columns if len(rows) > 1 else ():
        means = {row: results.spread(row, point, column).mean for row in rows if results.at(row, point, column)}
        if study.columns[column].is_outcome and means:
            best = (min if study.columns[column].lower else max)(means, key=means.__getitem__)
            figure = format_number(means[best], study.columns[column].decimals)
            texts.append(f"{markdown(column)} {markdown(best)}{record.mark(best)} ({figure})")
    where = study.source.item if study.source else record.file
    return f"Best in {where} by column, of {len(rows)} rows: {', '.join(texts)}." if texts else ""


def why_text(paper: str, known: Known, left: Queue) -> str:
    """Gauges and ablations, each measured or queued."""
    texts: dict[str, list[str]] = {}
    for each in WORDS[paper]["why"]:
        record = known.get(each["study"])
        text = "" if record is None else _gauge(record, **each) if "gauge" in each else _ablation(record, **each)
        name = each.get("gauge") or f"without {each['part']}"
        texts.setdefault(text and "measured", []).append(text or f"{name}{_queued(each['study'], left)}")
    missing = f"Not measured yet: {'; '.join(texts[''])}." if "" in texts else ""
    return " ".join(filter(None, (*(f"{text}." for text in texts.get("measured", ())), missing)))


def _gauge(record: StudyRecord, row: str, gauge: str, **_: Any) -> str:
    """A gauge's figure at the first point, and what follows."""
    words, point = record.study.columns.get(gauge), record.study.points[0]
    if not isinstance(words, Gauge) or not record.results.at(row, point, gauge):
        return ""
    mean = record.results.spread(row, point, gauge).mean
    after = words.then if words.is_beyond(mean) else "it could act"
    figure = f"{format_number(mean, words.digits)}{record.mark(row)}"
    return f"*{markdown(gauge)}* of {markdown(row)} is {figure} ({markdown(words.reads)}): {markdown(after)}"


def _ablation(record: StudyRecord, part: str, row: str, minus: str, column: str, **_: Any) -> str:
    """Effect of a part: a row minus the row without it."""
    comparison, verdict = record.results.against(row, minus, record.study.points[0], column)
    if comparison is None:
        return ""
    marks = "".join(dict.fromkeys(record.mark(one) for one in (row, minus)))
    where = record.study.source.item if record.study.source else record.file
    rows = f"{markdown(row)} minus {markdown(minus)} on {markdown(column)}, {where}"
    outcome = f"{comparison_text(comparison)}{marks}{verdict and f', {verdict}'}"
    return f"The ablation of {part} ({rows}) gives {outcome}"


def _queued(name: str, left: Queue) -> str:
    count, hours = left.get(name, (0, 0.0))
    item = Study.load(STUDIES[name]).source
    where = f"{item.item}, " if item else f"{name.partition('/')[2]}, "
    return f" (queued: {where}{count} cells, {hours:.1f} h)" if count else ""


# ---- all papers

MAIN_HEADS = ("paper", "main claim", "verdict", "difference", "seeds", "found in 8 of 10 tables", "left against right")
"""Heads of ``main_lines``."""


def main_lines(known: Known, left: Queue, names: Mapping[str, str]) -> list[list[str]]:
    """A line for each main claim: paper, claim, verdict, difference, seeds, what would be found, costs."""
    lines = []
    for paper, words in WORDS.items():
        name = words["main"]
        record, nothing = known.get(name), f"not measured yet{_queued(name, left)}"
        if record is None:
            lines.append([names[paper], f"({name})", nothing, "", "", "", ""])
            continue
        for item in record.judgements:
            seeds, comparison = len(item.sample.values) if item.sample else 0, item.comparison
            line = [names[paper], item.claim.text, item.in_words if item.sample else nothing]
            line += ["" if comparison is None else comparison_text(comparison), str(seeds or "")]
            lines.append([*line, power_text(item, record.study), costs_text(record, item.claim, known)])
    return lines


def items(recorded: Sequence[StudyRecord], left: Queue, names: Mapping[str, str]) -> dict[str, Any]:
    """How many tables and figures of papers are shown, and by name those that are not, with the reason."""
    known, studies = by_name(recorded), {name: Study.load(file) for name, file in STUDIES.items()}
    order = sorted(studies, key=lambda name: ([*names].index(name.partition("/")[0]), place(studies[name])))
    titles = {name: source.item for name in order if (source := studies[name].source)}
    complete = {
        name: sum(is_complete(record.results, row) for row in record.study.rows)
        for name, record in known.items()
        if name in titles
    }
    part = [name for name, count in complete.items() if count < len(known[name].study.rows)]
    lists: dict[str, dict[str, list[str]]] = {"missing": {}, "part": {}, "once": {}, "stale": {}}
    for name, title in titles.items():
        paper, (cells, hours) = names[name.partition("/")[0]], left.get(name, (0, 0.0))
        queued = f"{cells} cells, {hours:.1f} h"
        if name not in known:
            lists["missing"].setdefault(paper, []).append(f"{title} ({queued})")
            continue
        rows = len(known[name].study.rows)
        if name in part:
            lists["part"].setdefault(paper, []).append(f"{title} ({complete[name]} of {rows} rows; {queued})")
        reasons = {*known[name].results.withheld.values()}
        if reasons:
            where = "stale" if reasons == {"not run again"} else "once"
            lists[where].setdefault(paper, []).append(title)
    texts = {key: "; ".join(f"{paper} {', '.join(own)}" for paper, own in by.items()) for key, by in lists.items()}
    return {"all": len(titles), "shown": len(complete), "in_part": len(part), **texts}
