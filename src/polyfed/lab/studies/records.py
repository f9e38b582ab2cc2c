"""What was run of the studies that come with polyfed: one by one, and as an index of all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from polyfed.lab.studies.effort import Effort
from polyfed.lab.studies.judgement import Judgement, Verdict
from polyfed.lab.studies.regime_maps import ClaimMap, claim_maps, draw_map
from polyfed.lab.studies.results import RESULTS, Results
from polyfed.lab.studies.study import SMALL, Study
from polyfed.lab.studies.study_files import folder_name, study_files
from polyfed.lab.studies.tables import claim_evidence, claims_tables, figure_tables, study_tables
from polyfed.reporting.figures import svg_text
from polyfed.reporting.markup import markdown_templates
from polyfed.reporting.tables import TextTable

PAPER = "paper"
_VERDICTS: tuple[Verdict, ...] = ("held", "contradicted", "open", "not run")
_DECIDED = ("held", "contradicted")


@dataclass(frozen=True)
class StudyRecord:
    """A study at a scale, and what was run of it.

    Attributes:
        name: of the study.
        scale: small or paper.
        study: at the scale; of one that was run, as it was then.
        results: what was run; None: nothing.
    """

    name: str
    scale: str
    study: Study
    results: Results | None

    @classmethod
    def of(cls, name: str, scale: str, home: Path) -> StudyRecord:
        """With the results that lie in ``home`` as ``polyfed study run`` leaves them.

        Raises:
            RunError: they are damaged.
        """
        folder = home / folder_name(name, scale)
        results = Results.load(folder) if (folder / RESULTS).is_file() else None
        results = results if results and results.cells else None
        return cls(name, scale, results.study if results else Study.load(name, scale), results)

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
    def command(self) -> str:
        scale = "" if self.scale == SMALL else f" --scale {self.scale}"
        return f"polyfed study run {self.name}{scale}"

    @property
    def full_command(self) -> str:
        folders = " --data-dir DATA" * bool(self.effort.data) + " --weights-dir WEIGHTS" * bool(self.effort.weights)
        return self.command + folders

    @cached_property
    def effort(self) -> Effort:
        return Effort.of(self.study) if self.results else _effort(self.name, self.scale)

    @property
    def seeds(self) -> str:
        first, further = (", ".join(map(str, seeds)) for seeds in (self.study.seeds, sorted({*self._further})))
        return f"{first}; where a claim was open {further}" if further else first

    @cached_property
    def judgements(self) -> list[Judgement]:
        """Its primary claims, judged; of a study that was not run none."""
        return self.results.judgements() if self.results else []

    @property
    def verdicts(self) -> Counter[Verdict]:
        return Counter(item.verdict for item in self.judgements)

    @cached_property
    def _further(self) -> list[int]:
        """Seeds of runs that were made beyond those of the study."""
        made = [int(label.rpartition(" ")[2]) for label in self.results.cells] if self.results else []
        return [seed for seed in made if seed not in self.study.seeds]

    @property
    def is_complete(self) -> bool:
        if self.results is None:
            return False
        expected = sum(len(self.study.points_of(row)) for row in self.study.rows) * len(self.study.seeds)
        return len(self.results.cells) == expected + len(self._further) and not self.results.causes

    @property
    def progress(self) -> str:
        """How many of its runs were made, and how many searched before them."""
        done = 0 if self.results is None else len(self.results.cells)
        part = ": in part" if self.results and not self.is_complete else ""
        effort = replace(self.effort, runs=self.effort.runs + len(self._further))
        return f"{done} of {effort.in_words}{part}"

    @property
    def state(self) -> str:
        """Verdicts counted, or that it was not run."""
        if self.results is None:
            return "not run"
        counts = ", ".join(f"{self.verdicts[name]} {name}" for name in _VERDICTS if self.verdicts[name]) or "run"
        return counts if self.is_complete else f"in part: {counts}"

    @property
    def digest(self) -> str:
        """Of the resolved configurations and data's files of all cells that were run; empty if none was."""
        if self.results is None:
            return ""
        return hashlib.sha256("".join(sorted(self.results.cells.values())).encode()).hexdigest()[:12]

    @property
    def outdated(self) -> str:
        """What was tuned in the run, where the study tunes something else by now; empty where it does not."""
        if self.results is None:
            return ""
        then, now = (
            study.tuning.in_words if study.tuning else "nothing"
            for study in (self.study, Study.load(self.name, self.scale))
        )
        return f"tuned: {then}; the study tunes {now} by now" if then != now else ""

    @property
    def code(self) -> str:
        return ", ".join(self.results.code) if self.results else ""

    @property
    def tables(self) -> list[Any]:
        return _markdown(study_tables(self.results), 2) if self.results else []

    @cached_property
    def maps(self) -> list[ClaimMap]:
        """Where its claims hold; of a study that was not run none."""
        return claim_maps(self.results) if self.results else []

    def map_file(self, number: int) -> str:
        """Name of a map's picture beside its page."""
        return f"{folder_name(self.name, self.scale)}-map-{number}.svg"

    @property
    def findings(self) -> list[Any]:
        """Figures beside the paper's, and claims, as Markdown of a section."""
        if self.results is None:
            return []
        return _markdown([*figure_tables(self.results), *claims_tables(self.results)], 4)

    @property
    def evidence(self) -> list[list[str]]:
        """Of each primary claim its text, verdict, seeds, difference, interval and p."""
        return list(map(claim_evidence, self.judgements))

    @property
    def page(self) -> str:
        return f"{folder_name(self.name, self.scale)}.md"


@lru_cache
def _effort(name: str, scale: str) -> Effort:
    return Effort.of(Study.load(name, scale))  # of a paper's study a tenth of a second


def records(home: Path, scales: Sequence[str] = (SMALL, PAPER)) -> list[StudyRecord]:
    """All studies of polyfed's own of which something was run."""
    places = [(name, scale) for name in study_files() for scale in scales if _is_at(name, scale)]
    begun = [place for place in places if (home / folder_name(*place) / RESULTS).is_file()]  # to load all takes seconds
    return [record for place in begun if (record := StudyRecord.of(*place, home)).results]


def _is_at(name: str, scale: str) -> bool:
    return scale == SMALL or name.startswith("papers/")


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
    claims = [row for record in recorded for row in _decided(record)]
    heads = ("claim", "study", "verdict", "seeds", "difference", "95 % interval", "adjusted p")
    decided = _markdown([TextTable("What they decide", heads, claims)], 3)
    return _rendered("results.md.j2", records=recorded, folder=folder, decided=decided if claims else [])


def _decided(record: StudyRecord) -> Iterator[list[str]]:
    for item in record.judgements:
        if item.verdict in _DECIDED:
            claim, verdict, *evidence = claim_evidence(item)
            yield [claim, record.study.title, verdict, *evidence]


def _markdown(tables: Sequence[TextTable], level: int) -> list[Any]:
    from markupsafe import Markup

    return [Markup(table.markdown(level)) for table in tables]


def _rendered(template: str, **content: Any) -> str:
    return markdown_templates().get_template(template).render(**content)
