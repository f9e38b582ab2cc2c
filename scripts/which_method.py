"""Tables of docs/how-to/which-method.md, with figures of records; ``which_method.yaml`` has their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from polyfed.federation.sampling import SamplingSettings
from polyfed.lab.studies.cells import Places, resolve
from polyfed.lab.studies.columns.costs import ClientTraffic, TrafficColumn
from polyfed.lab.studies.study import SMALL, Point
from study_records import StudyRecord, comparison_text

PAGE = "docs/how-to/which-method.md"


class Answer(NamedTuple):
    """A case of the page, the method to take, and the two rows of a study whose difference is the gain.

    ``study`` is empty if no study has the question. ``of`` is another study and its column with the bytes.
    """

    case: str
    take: str
    study: str = ""
    row: str = ""
    against: str = ""
    column: str = "R@1"
    point: Point = ()
    of: Sequence[str] = ()


_CONTENT = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SECTIONS: Mapping[str, Sequence[Answer]] = {
    heading: [Answer(**entry | {"point": (*entry.get("point", ()),)}) for entry in entries]
    for heading, entries in _CONTENT["sections"].items()
}
COLUMNS, ROWS = _CONTENT["columns"], _CONTENT["rows"]


def which_method_text(shown: Sequence[StudyRecord]) -> str:
    """All tables; an answer without recorded runs is not measured."""
    known = {record.name: record for record in shown if record.scale == SMALL}
    tables = []
    for heading, answers in SECTIONS.items():
        lines = [f"\n## {heading}\n", "|you have|take|gain, interval|in|MiB|record|", "|-|-|-:|-|-:|-|"]
        tables.append("\n".join([*lines, *(_line(answer, known) for answer in answers)]))
    return "\n".join(tables) + "\n"


def _line(answer: Answer, known: Mapping[str, StudyRecord]) -> str:
    record = known.get(answer.study)
    cells = [answer.case, answer.take, _gain(answer, record), "", "", ""]
    if answer.row:
        cells[3] = f"{COLUMNS.get(answer.column, answer.column)}, against {ROWS.get(answer.against, answer.against)}"
        cells[4] = _bytes(answer, known)
    if answer.study:
        paper = answer.study.partition("/")[0]
        cells[5] = f"[{answer.study}](../../papers/{paper}/README.md{f'#{record.anchor}' if record else ''})"
    return f"|{'|'.join(cells)}|"


def _gain(answer: Answer, record: StudyRecord | None) -> str:
    """``+39.2 (+37.4 to +41.0)``, and the verdict if a claim compares the same rows."""
    if record is None or not answer.row:
        return "not measured"
    comparison, verdict = record.results.against(answer.row, answer.against, answer.point, answer.column)
    if comparison is None:
        return "not measured"
    marks = "".join(dict.fromkeys(record.mark(row) for row in (answer.row, answer.against)))
    return f"{comparison_text(comparison)}{marks}" + (f", {verdict}" if verdict else "")


def _bytes(answer: Answer, known: Mapping[str, StudyRecord]) -> str:
    """MiB that a client sends and receives in a round."""
    study, column = answer.of or (answer.study, "")
    record = known.get(study)
    if record is None:
        return "not measured"
    point = () if answer.of else answer.point
    for name, settings in record.study.columns_of(answer.row).items():
        if name == (column or name) and isinstance(settings, ClientTraffic | TrafficColumn):
            if not record.results.at(answer.row, point, name):
                return "not measured"
            figure = record.results.spread(answer.row, point, name).mean
            return f"{figure / _shared(record, answer.row, point, settings):.2f}"
    return "not measured"


def _shared(record: StudyRecord, row: str, point: Point, settings: ClientTraffic | TrafficColumn) -> int:
    """Number of clients and rounds that a figure of bytes sums over."""
    if isinstance(settings, ClientTraffic):
        return len(settings.groups)
    experiment = resolve(record.study, row, point, Places())
    assert experiment.run.sampling == SamplingSettings(), "all clients are asked in each round"
    clients = sum(group.count for group in experiment.clients.values())
    return clients * (1 if settings.per == "round" else experiment.run.rounds)
