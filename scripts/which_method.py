"""The tree of docs/how-to/which-method.md and the tables behind it, from records; ``which_method.yaml`` has questions.

A leaf is the best complete row of a board among the methods that its answers allow. Rows that the paired interval does
not separate from the best one stand with it, the cheaper first. Leaves and answers without records are not shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from boards import ALONE, COLUMN, POOLED, SAME, boards, gap_closed, has_row
from polyfed.federation.sampling import SamplingSettings
from polyfed.lab.studies.cells import Places, resolve
from polyfed.lab.studies.columns.costs import ClientTraffic, TrafficColumn
from polyfed.lab.studies.study import SMALL, Point, Study
from polyfed.runs.config_files import read_config
from protections import leaving, methods
from study_records import STUDIES, StudyRecord, comparison_text

PAGE, TABLES = "docs/how-to/which-method.md", "docs/reference/which-method-tables.md"
_CONTENT = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
COLUMNS, ROWS = _CONTENT["columns"], _CONTENT["rows"]
UNPAIRED = ", unpaired"
_COSTS = ("MiB", "CPU s")


# ---- the tree


class Leaf(NamedTuple):
    """A place where the questions end.

    Attributes:
        title: Its heading.
        study: The board that measures it.
        preset: Preset on generated data, on which the command runs.
        weights: Whether weights may leave.
        public: Whether there is a public set.
        unpaired: Whether there are public items without a partner.
    """

    title: str
    study: str
    preset: str
    weights: bool = True
    public: bool = True
    unpaired: bool = True

    def rows(self) -> list[str]:
        """Rows of methods that the answers allow, and the server alone."""
        study = study_of(self.study)
        return [row for row in competing(study) if row == ALONE or self._allows(study, row)]

    def _allows(self, study: Study, row: str) -> bool:
        given = study.resolved(row).set
        return (
            (self.weights or not sends_weights(study, row))
            and (self.public or not uses_public(study, row))
            and (self.unpaired or "public.unpaired" not in given)
        )

    def command(self, row: str) -> str:
        """``polyfed run PRESET --set ...`` with the method of a row, on generated data."""
        study = study_of(self.study)
        content, given = study.resolved(row), settings_of(study, row)
        preset = _CONTENT["presets"].get(row, self.preset if self.weights <= sends_weights(study, row) else "demo")
        needs = _CONTENT["needs"].get(preset, {})
        words = [word for key in given for word in needs.get(key, [])]
        words += needs.get("public", []) if uses_public(study, row) else []
        of_preset = read_config(preset)["algorithm"]
        is_same = given["algorithm"]["name"] == (of_preset["name"] if isinstance(of_preset, dict) else of_preset)
        pairs = f"clients.{_CONTENT['pairs'].get(preset, 'paired')}."
        chosen = {key.replace("clients.paired.", pairs): value for key, value in given.items()}
        sets = [f"{key}={flow(value)}" for key, value in chosen.items() if key != "algorithm" or not is_same]
        twin = ["--twin", "server-only"] if content.twin else []
        options = [] if twin else [word for text in sets + words for word in ("--set", text)]
        return " ".join(["polyfed run", preset, *twin, *(_quoted(word) for word in options)])


@cache
def study_of(name: str) -> Study:
    """The study of a name below papers/."""
    return Study.load(STUDIES[name])


def settings_of(study: Study, row: str) -> dict[str, Any]:
    """Settings of a row that are its method's, by path."""
    return {key: value for key, value in study.resolved(row).set.items() if key != "public.reserve"}


def _quoted(word: str) -> str:
    return f'"{word}"' if shlex.quote(word) != word else word


def flow(value: Any) -> str:
    """A value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def algorithm(study: Study, row: str) -> str:
    """Name of a row's method."""
    name: str = study.resolved(row).set["algorithm"]["name"]  # type: ignore[index, call-overload, assignment]
    return name


@cache
def _replies(name: str) -> str:
    return leaving(methods()[name])


def sends_weights(study: Study, row: str) -> bool:
    """True if clients of a row's method send weights."""
    return "weights" in _replies(algorithm(study, row))


def uses_public(study: Study, row: str) -> bool:
    """True if a row needs a public set in addition to the server's data."""
    return methods()[algorithm(study, row)].needs_public or "clients.paired.also" in study.resolved(row).set


def competing(study: Study) -> list[str]:
    """Rows of a board that a user may choose: methods and the server alone, neither pooled data nor controls."""
    rows = {row: study.resolved(row) for row in study.rows}
    return [row for row, one in rows.items() if row == ALONE or (row != POOLED and one.main and not one.twin)]


def named(study: Study, row: str) -> str:
    """Name of a row on the page."""
    base = row.removesuffix(UNPAIRED)
    name = _CONTENT["names"].get(base, f"`{algorithm(study, row)}`")
    return f"{name}, unpaired items too" if row != base else str(name)


def leaves(node: Mapping[str, Any] = _CONTENT["tree"]) -> Iterator[Leaf]:
    """All leaves at or below a node of the tree."""
    if "ask" not in node:
        yield Leaf(**node)
    for below in node.get("answers", {}).values():
        yield from leaves(below)


def ranked(record: StudyRecord, rows: Sequence[str]) -> list[str]:
    """Complete rows among some, the best first."""
    known = [row for row in rows if has_row(record, row)]
    return sorted(known, key=lambda row: -record.results.spread(row, (), COLUMN).mean)


def advised(record: StudyRecord, rows: Sequence[str]) -> list[str]:
    """The best of some rows and those that no paired interval separates from it, the cheaper first."""
    best, *others = ranked(record, rows)
    equal = [best, *(row for row in others if not _is_apart(record, best, row))]
    return sorted(equal, key=lambda row: [record.results.spread(row, (), name).mean for name in _COSTS])


def _is_apart(record: StudyRecord, best: str, row: str) -> bool:
    comparison, _ = record.results.against(best, row, (), COLUMN)
    return comparison is None or comparison.interval[0] > 0


def tree_text(shown: Sequence[StudyRecord]) -> str:
    """The questions as a list, a section a leaf, and what unpaired public items bring."""
    known = {name: one for name, one in boards(shown).items() if has_row(one, ALONE) and has_row(one, POOLED)}
    grown = [leaf for leaf in leaves() if leaf.study in known and len(ranked(known[leaf.study], leaf.rows())) > 1]
    if not grown:
        return "No board was run yet.\n"
    first, *others = _lines(_CONTENT["tree"], known, grown, [])
    parts = [first, "\n".join(others), "## The methods, and commands to copy"]
    return "\n\n".join([*parts, *(_section(leaf, known) for leaf in grown), _unpaired(known, shown)]).rstrip() + "\n"


def _lines(
    node: Mapping[str, Any], known: Mapping[str, StudyRecord], grown: Sequence[Leaf], asked: list[str], indent: str = ""
) -> list[str]:
    """A question after its number, or the methods of a leaf; below it a list of the answers."""
    if "ask" not in node:
        leaf = Leaf(**node)
        return [_summary(leaf, known[leaf.study])]
    if node["ask"] not in asked:
        asked.append(node["ask"])
    lines = [f"**{asked.index(node['ask']) + 1}. {node['ask']}**"]
    for answer, below in node["answers"].items():
        if any(leaf in grown for leaf in leaves(below)):
            first, *others = _lines(below, known, grown, asked, f"{indent}    ")
            lines += [f"{indent}* {answer}: {first}", *others]
    return lines


def _summary(leaf: Leaf, record: StudyRecord) -> str:
    """Share of the gap and costs of the advised methods, with a link to the section."""
    texts = []
    for row in advised(record, leaf.rows()):
        costs = ", ".join(f"{record.results.spread(row, (), cost).mean:.0f} {cost}" for cost in _COSTS)
        texts.append(f"{named(record.study, row)}{record.mark(row)}: **{_share(record, row)}**, {costs}")
    left = len(leaf.rows()) - len(ranked(record, leaf.rows()))
    waiting = f"; rivals not run yet: {left}" if left else ""
    return f"{' or '.join(texts)} ([command](#{_anchor(leaf.title)}){waiting})"


def _anchor(title: str) -> str:
    return "".join(one for one in title.lower().replace(" ", "-") if one.isalnum() or one == "-")


def _share(record: StudyRecord, row: str) -> str:
    """``90 % (84 to 95)``: share of the gap with its interval."""
    closed = gap_closed(record, row)
    if closed is None or row == ALONE:
        return "0 %"
    share, half = (100 * part for part in closed)
    return f"{share:.0f} % ({share - half:.0f} to {share + half:.0f})"


def _section(leaf: Leaf, known: Mapping[str, StudyRecord]) -> str:
    """Methods of a leaf with costs, its next best, what weights would reach, and commands."""
    record = known[leaf.study]
    study, rows = record.study, leaf.rows()
    chosen = advised(record, rows)
    lines = ["|method|share of the gap|mean R@1, %|MiB|CPU s|", "|-|-:|-:|-:|-:|"]
    lines += [_row(record, row, f"**{named(study, row)}**") for row in chosen]
    lines += [
        _row(record, row, f"next best: {named(study, row)}") for row in ranked(record, rows) if row not in chosen
    ][:1]
    if not leaf.weights:
        averaged = [row for row in competing(study) if row != ALONE and sends_weights(study, row)]
        best = ranked(record, averaged)[:1]
        lines += [_row(record, row, f"if weights could leave: {named(study, row)}") for row in best]
        if SAME in known and not any(algorithm(study, row) == "fedavg" for row in study.rows):
            same, row = known[SAME], "fedavg"
            of = f"if all had the server's networks and weights could leave: {named(same.study, row)}"
            lines += [_row(same, row, of)] if has_row(same, row) else []
    paper = leaf.study.partition("/")[0]
    notes = [
        f"Measured on the [{study.title.partition(':')[0].lower()}](../../papers/{paper}/README.md#{record.anchor})."
    ]
    if len(chosen) > 1:
        notes.append("No difference between the first rows is shown; the cheaper stands first.")
    left = [row for row in rows if not has_row(record, row)]
    paired, more = ([one for one in left if one.endswith(UNPAIRED) == is_more] for is_more in (False, True))
    names = ["; ".join(named(study, one.removesuffix(UNPAIRED)) for one in own) for own in (paired, more)]
    names[1] = names[1] and f"with unpaired items too: {names[1]}"
    notes += [f"Not run yet: {'; '.join(filter(None, names))}."] * bool(left)
    commands = "\n".join(leaf.command(row) for row in chosen)
    settings = dict.fromkeys(
        f"`{key}: {flow(value)}`" for row in chosen for key, value in settings_of(study, row).items() if row != ALONE
    )
    own = f"Settings that were measured, for a file of your own: {', '.join(settings)}." if settings else ""
    parts = [f"### {leaf.title}", "\n".join(lines), " ".join(notes), f"```bash\n{commands}\n```", own]
    return "\n\n".join(filter(None, parts))


def _row(record: StudyRecord, row: str, name: str) -> str:
    costs = [f"{record.results.spread(row, (), cost).mean:.0f}" for cost in _COSTS]
    mean = record.results.spread(row, (), COLUMN).mean
    return f"|{name}{record.mark(row)}|{_share(record, row)}|{mean:.1f}|{'|'.join(costs)}|"


def _unpaired(known: Mapping[str, StudyRecord], shown: Sequence[StudyRecord]) -> str:
    """Each method with and without unpaired public items, and studies of their number."""
    lines = []
    for record in known.values():
        for row in competing(record.study):
            more = f"{row}{UNPAIRED}"
            if more in record.study.rows and has_row(record, row) and has_row(record, more):
                comparison, verdict = record.results.against(more, row, (), COLUMN)
                gain = "" if comparison is None else comparison_text(comparison) + (f", {verdict}" if verdict else "")
                board = record.study.title.partition(":")[0].removeprefix("Board of ")
                name = f"{named(record.study, row)}{record.mark(row) or record.mark(more)}"
                lines.append(f"|{board}|{name}|{_share(record, row)}|{_share(record, more)}|{gain}|")
    if not lines:
        return ""
    heads = ["|board|method|public pairs|with unpaired items|mean R@1 gained, points|", "|-|-|-:|-:|-:|"]
    maps = [one for one in shown if one.name.startswith("polyfed/unpaired-")]
    links = [f"[{one.heading}](../../papers/polyfed/README.md#{one.anchor})" for one in maps]
    more = ["", f"By their number and modality: {', '.join(links)}."] * bool(links)
    return "\n".join(["## What unpaired public items bring\n", _CONTENT["unpaired"], "", *heads, *lines, *more])


# ---- the tables


class Answer(NamedTuple):
    """A case, the method to take, and the two rows of a study whose difference is the gain.

    Attributes:
        case: The user's case; empty if it is that of the answer before.
        take: The method.
        of: Another study and its column with the bytes.
    """

    study: str
    case: str = ""
    take: str = ""
    row: str = ""
    against: str = ""
    column: str = COLUMN
    point: Point = ()
    of: Sequence[str] = ()


@cache
def sections() -> Mapping[str, Sequence[Answer]]:
    """Heading -> answers, each with its case; a board stands for all of its rows."""
    made = {}
    for heading, entries in _CONTENT["sections"].items():
        answers, case = list[Answer](), ""
        for entry in entries:
            answer = Answer(**entry | {"point": (*entry.get("point", ()),)})
            case = answer.case or case
            answers += [one._replace(case=case) for one in ([answer] if answer.row else _all_of(answer.study))]
        made[heading] = answers
    return made


def _all_of(name: str) -> Iterator[Answer]:
    study = study_of(name)
    for row in competing(study):
        if row != ALONE:
            yield Answer(name, take=named(study, row), row=row, against=ALONE)


def tables_text(shown: Sequence[StudyRecord]) -> str:
    """All tables, of answers with recorded runs."""
    known = {record.name: record for record in shown if record.scale == SMALL}
    tables = []
    for heading, answers in sections().items():
        lines, case = list[str](), ""
        for answer in answers:
            if line := _line(answer, known, "" if answer.case == case else answer.case):
                lines.append(line)
                case = answer.case
        heads = [f"## {heading}\n", "|you have|take|gain, interval|in|MiB|record|", "|-|-|-:|-|-:|-|"]
        tables += ["\n".join([*heads, *lines])] * bool(lines)
    return "\n\n".join(tables or ["No study was run yet."]) + "\n"


def _line(answer: Answer, known: Mapping[str, StudyRecord], case: str) -> str:
    """A line with the gain, and the verdict if a claim compares the same rows; empty without a record."""
    record = known.get(answer.study)
    if record is None:
        return ""
    comparison, verdict = record.results.against(answer.row, answer.against, answer.point, answer.column)
    if comparison is None:
        return ""
    marks = "".join(dict.fromkeys(record.mark(row) for row in (answer.row, answer.against)))
    gain = f"{comparison_text(comparison)}{marks}" + (f", {verdict}" if verdict else "")
    of = f"{COLUMNS.get(answer.column, answer.column)}, against {ROWS.get(answer.against, answer.against)}"
    link = f"[{answer.study}](../../papers/{answer.study.partition('/')[0]}/README.md#{record.anchor})"
    return f"|{case}|{answer.take}|{gain}|{of}|{_bytes(answer, known)}|{link}|"


def _bytes(answer: Answer, known: Mapping[str, StudyRecord]) -> str:
    """MiB that a client sends and receives in a round; empty where no column has it."""
    study, column = answer.of or (answer.study, "")
    record = known.get(study)
    if record is None:
        return ""
    point = () if answer.of else answer.point
    for name, settings in record.study.columns_of(answer.row).items():
        if name == (column or name) and isinstance(settings, ClientTraffic | TrafficColumn):
            if not record.results.at(answer.row, point, name):
                return ""
            figure = record.results.spread(answer.row, point, name).mean
            return f"{figure / _shared(record, answer.row, point, settings):.2f}"
    return ""


def _shared(record: StudyRecord, row: str, point: Point, settings: ClientTraffic | TrafficColumn) -> int:
    """Number of clients and rounds that a figure of bytes sums over."""
    if isinstance(settings, ClientTraffic):
        return len(settings.groups)
    experiment = resolve(record.study, row, point, Places())
    assert experiment.run.sampling == SamplingSettings(), "all clients are asked in each round"
    clients = sum(group.count for group in experiment.clients.values())
    return clients * (1 if settings.per == "round" else experiment.run.rounds)
