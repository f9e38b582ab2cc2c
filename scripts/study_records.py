"""Records of studies that come with polyfed: their pages, an index, what holds of each paper, and the ledger."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from polyfed.core.untrusted import markdown
from polyfed.lab.studies.cells import Cell, Places, resolve
from polyfed.lab.studies.claims import Judgement, Verdict
from polyfed.lab.studies.figures import draw_map
from polyfed.lab.studies.planning import StudyPlan
from polyfed.lab.studies.results import RESULTS, Results
from polyfed.lab.studies.study import SMALL, Study
from polyfed.lab.studies.study_files import study_content, study_files
from polyfed.lab.studies.tables import ClaimMap, claim_evidence, claim_maps, study_tables
from polyfed.reporting.figures import svg_text
from polyfed.reporting.markup import markdown_templates
from polyfed.reporting.tables import TextTable

PAPER = "paper"
TEMPLATES = Path(__file__).parent / "templates"
PAPERS = Path(__file__).parents[1] / "papers"
STUDIES = study_files(PAPERS)
"""Path below papers/ without its ending -> file."""

_DECIDED: tuple[Verdict, ...] = ("held", "contradicted")
_VERDICTS: tuple[Verdict, ...] = (*_DECIDED, "open")
_HEADS = ("verdict", "seeds", "difference", "95 % interval", "adjusted p")
_OLD = {
    f"{paper}/{item}": f"{item}-{paper}"
    for item in ("parts", "regime")
    for paper in ("creamfl", "fedafd", "fedaid", "fedcola")
}


def folder_name(name: str, scale: str) -> str:
    """Of a study's record."""
    paper, _, item = name.partition("/")
    old = item if paper == "polyfed" else _OLD.get(name, f"papers-{paper}-{item}")
    return f"{old}-{scale}"


@dataclass(frozen=True)
class StudyRecord:
    """What was run of a study at a scale.

    Attributes:
        name: of the study.
        scale: small or paper.
        results: what was run, with the study as it was then.
    """

    name: str
    scale: str
    results: Results

    @property
    def study(self) -> Study:
        return self.results.study

    @property
    def source(self) -> str:
        """The paper; empty of a study of none."""
        return self.study.source.paper if self.study.source else ""

    @property
    def item_name(self) -> str:
        """What of the paper it is the counterpart of, such as ``Table 1``."""
        return self.study.source.item if self.study.source else self.name

    @property
    def place(self) -> tuple[bool, bool, int]:
        """By which a paper's items are in order: tables, figures, all else."""
        kind, _, number = self.item_name.rpartition(" ")
        is_numbered = kind in ("Table", "Figure")
        return not is_numbered, kind != "Table", int(number) if is_numbered else 0

    @property
    def shows(self) -> str:
        """What it is about: its title without paper and item."""
        return self.study.title.partition(": ")[2] or self.study.title

    @property
    def command(self) -> str:
        return f"polyfed study run papers/{self.name}.yaml" + ("" if self.scale == SMALL else f" --scale {self.scale}")

    @property
    def page(self) -> str:
        return f"{folder_name(self.name, self.scale)}.md"

    def map_file(self, number: int) -> str:
        """Name of a map's picture beside its page."""
        return f"{folder_name(self.name, self.scale)}-map-{number}.svg"

    @cached_property
    def judgements(self) -> list[Judgement]:
        return self.results.judgements()

    @property
    def verdicts(self) -> Counter[Verdict]:
        return Counter(item.verdict for item in self.judgements)

    @cached_property
    def maps(self) -> list[ClaimMap]:
        return claim_maps(self.results)

    @property
    def tables(self) -> list[Markup]:
        return [Markup(table.markdown(2)) for table in study_tables(self.results)]

    # ---- how much of it was run

    @property
    def is_complete(self) -> bool:
        expected = sum(len(self.study.points_of(row)) for row in self.study.rows) * len(self.study.seeds)
        return len(self.results.cells) == expected and not self.results.causes

    @cached_property
    def runs(self) -> str:
        """``45 (+25)``: runs of all seeds, where what two rows share counts once, and at most so many searches."""
        plan = StudyPlan(self.study, Places(), Path())
        places = plan.row_points()
        cells = {Cell(row, point, resolve(self.study, row, point, plan.places)).digest for row, point in places}
        searches = plan.most_candidates(places)
        return f"{len(cells) * len(self.study.seeds)}" + (f" (+{searches})" if searches else "")

    @property
    def progress(self) -> str:
        """How many of its runs were made, and how many searched before them."""
        return f"{len(self.results.cells)} of {self.runs}" + ("" if self.is_complete else ": in part")

    @property
    def state(self) -> str:
        """Verdicts counted."""
        known = (*_VERDICTS, "not run")
        counts = ", ".join(f"{self.verdicts[name]} {name}" for name in known if self.verdicts[name]) or "run"
        return counts if self.is_complete else f"in part: {counts}"

    @property
    def digest(self) -> str:
        """Of the resolved configurations and data's files of all cells that were run."""
        return hashlib.sha256("".join(sorted(self.results.cells.values())).encode()).hexdigest()[:12]

    @property
    def outdated(self) -> str:
        """What was tuned in the run, where the study tunes something else by now, and what it has besides."""
        then, now = self.study, Study.load(STUDIES[self.name], self.scale)
        tuned, tunes = (study.tuning.in_words if study.tuning else "nothing" for study in (then, now))
        told = [f"tuned: {tuned}; the study tunes {tunes} by now"] if tuned != tunes else []
        more = [*(f"row {row}" for row in now.rows if row not in then.rows)]
        more += [f"column {column}" for column in now.columns if column not in then.columns]
        return "; ".join([*told, *([f"without {', '.join(more)}, which the study has by now"] if more else [])])


def records(home: Path) -> list[StudyRecord]:
    """All studies of polyfed's own of which something was run, as ``polyfed study run`` leaves them in ``home``.

    Raises:
        RunError: one is damaged.
    """
    places = [(name, scale) for name in STUDIES for scale in (SMALL, PAPER)]
    begun = [place for place in places if (home / folder_name(*place) / RESULTS).is_file()]
    found = [StudyRecord(*place, Results.load(home / folder_name(*place))) for place in begun]
    return [record for record in found if record.results.cells]


def record_text(record: StudyRecord) -> str:
    return _rendered("study.md.j2", record=record)


def record_pictures(record: StudyRecord) -> dict[str, str]:
    """Name of a file beside its page -> SVG."""
    return {
        record.map_file(number): svg_text(draw_map(claims), claims.drawing.map)
        for number, claims in enumerate(record.maps, 1)
    }


def index_text(recorded: Sequence[StudyRecord], folder: str) -> str:
    """Studies that were run, and the claims that they decided, as Markdown.

    Args:
        recorded: of ``records``.
        folder: of their pages, as links have it.
    """
    claims = [
        [claim, record.study.title, *evidence]
        for record in recorded
        for item in record.judgements
        if item.verdict in _DECIDED
        for claim, *evidence in [claim_evidence(item, record.study)]
    ]
    table = TextTable("What they decide", ("claim", "study", *_HEADS), claims)
    decided = [Markup(table.markdown(3))] if claims else []
    return _rendered("results.md.j2", records=recorded, folder=folder, decided=decided)


def ledger_text(recorded: Sequence[StudyRecord]) -> str:
    """What was run of the papers' tables and figures, as Markdown."""
    sources = [study_content(file)["source"]["paper"] for name, file in STUDIES.items() if is_item(name)]
    run = [record for record in recorded if is_item(record.name)]
    shown = {paper: papers_own(paper, run) for paper in sorted({*sources})}
    verdicts = {paper: sum((record.verdicts for record in own), Counter[Verdict]()) for paper, own in shown.items()}
    return _rendered("ledger.md.j2", items=Counter(sources), shown=shown, verdicts=verdicts)


def is_item(name: str) -> bool:
    """Whether a study is the counterpart of a table, figure or section of a paper."""
    return not name.startswith("polyfed/") and not name.endswith(("parts", "regime", "teaching", "compensation"))


def papers_own(paper: str, recorded: Sequence[StudyRecord]) -> list[StudyRecord]:
    """Records of a paper, as ``source.paper`` of a study names it, in the order of its items."""
    return sorted((record for record in recorded if record.source == paper), key=lambda record: record.place)


def gains_table(record: StudyRecord, column: str, names: Mapping[str, str]) -> str:
    """All rows of a study, the best first, each minus the reference, with the verdict where a claim is on just that.

    Args:
        record: of the study, which has no axes.
        column: what is shown of it.
        names: row -> what it is called, where that is not its name.
    """
    results, (point,) = record.results, record.study.points
    verdicts = {item.claim.text: item.verdict for item in record.judgements}
    lines = [("", column, f"minus {results.reference}, 95 % interval", "verdict"), ("---", "---:", "---:", "---")]
    for row in sorted(record.study.rows, key=lambda row: -results.spread(row, point, column).mean):
        spread, sample = results.spread(row, point, column), None
        if row != results.reference:
            sample = results.difference((row, point, column), (results.reference, point, column))
        low, high = sample.interval if sample else (math.nan, math.nan)
        minus = f"{sample.mean:+.1f} ({low:+.1f} to {high:+.1f})" if sample else ""
        verdict = verdicts.get(f"{row} > {results.reference} on {column}", "")
        lines.append((names.get(row, row), f"{spread.mean:.1f} ± {spread.std:.1f}", minus, verdict))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def evidence_table(papers: Sequence[tuple[str, str, str, Sequence[StudyRecord]]]) -> str:
    """A row a paper: its method with a link to a page, what it claims, and how many claims of its studies hold here."""
    lines = [("method", "what it claims", *_VERDICTS), ["---"] * (2 + len(_VERDICTS))]
    for paper, claim, page, own in papers:
        counts = Counter(item.verdict for record in own for item in record.judgements if item.sample is not None)
        lines.append([f"[{paper}]({page}#where-its-claims-hold)", claim, *(str(counts[name]) for name in _VERDICTS)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def evidence_section(own: Sequence[StudyRecord], folder: str) -> str:
    """Claims, maps and their sentences of a paper's page; ``folder`` is that of the records, as links have it."""
    if not own:
        return "None of its own studies was run yet.\n"
    claims = [
        [text, record.item_name, *others]
        for record in own
        for item in record.judgements
        if item.sample is not None
        for text, *others in [claim_evidence(item, record.study)]
    ]
    parts = [TextTable("Primary claims", ("claim", "item", *_HEADS), claims).markdown(3)] if claims else []
    for record in own:
        for number, shown in enumerate(record.maps, 1):
            picture = f"![{markdown(shown.drawing.map)}]({folder}/{record.map_file(number)})"
            parts.append(f"{picture}\n\n{markdown(shown.sentence)}\n")
    names = ", ".join(f"[{record.name}]({folder}/{record.page})" for record in own)
    return "\n".join([*parts, f"Tables, intervals and commands: {names}.\n"])


def _rendered(template: str, **content: Any) -> str:
    return markdown_templates(TEMPLATES).get_template(template).render(**content)
