"""What the records say of each paper: which of its claims hold here, which do not, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from polyfed.core.untrusted import markdown
from polyfed.lab.studies.judgement import Judgement, Verdict
from polyfed.lab.studies.records import StudyRecord
from polyfed.lab.studies.regime_maps import ClaimMap
from polyfed.lab.studies.tables import claim_evidence
from polyfed.reporting.tables import TextTable

_VERDICTS: tuple[Verdict, ...] = ("held", "contradicted", "open")
_HEADS = ("claim", "item", "verdict", "seeds", "difference", "95 % interval", "adjusted p")


@dataclass(frozen=True)
class PaperEvidence:
    """A paper's studies that were run.

    Attributes:
        paper: its method, as ``source.paper`` of a study names it.
        statement: what it claims, in a sentence.
        page: its page, as links below ``docs`` have it.
        records: in the order of its items.
    """

    paper: str
    statement: str
    page: str
    records: Sequence[StudyRecord]

    @classmethod
    def of(cls, paper: str, statement: str, page: str, recorded: Sequence[StudyRecord]) -> PaperEvidence:
        """Of all records those of the paper."""
        own = [record for record in recorded if record.study.source and record.study.source.paper == paper]
        return cls(paper, statement, page, sorted(own, key=lambda record: record.place))

    @property
    def claims(self) -> list[tuple[StudyRecord, Judgement]]:
        return [(record, item) for record in self.records for item in record.judgements if item.sample is not None]

    @property
    def maps(self) -> list[tuple[StudyRecord, int, ClaimMap]]:
        """With the number of each in its record."""
        return [(record, *each) for record in self.records for each in enumerate(record.maps, 1)]

    def row(self, folder: str) -> list[str]:
        """Of the short table, as Markdown; ``folder`` is that of ``docs``, as links have it."""
        counts = Counter(item.verdict for _, item in self.claims)
        shown = [str(counts[verdict]) if self.claims else "not run" for verdict in _VERDICTS]
        return [f"[{self.paper}]({folder}{self.page}#where-its-claims-hold)", self.statement, *shown]

    # ---- a section of the paper's page

    def section(self, folder: str) -> str:
        """Claims, maps and their sentences as Markdown; ``folder`` is that of the records, as links have it."""
        if not self.records:
            return "None of its own studies was run yet.\n"
        parts = [_claims_table(self.claims)] if self.claims else []
        parts += [f"{_map_text(folder, *each)}\n" for each in self.maps]
        names = ", ".join(f"[{record.name}]({folder}/{record.page})" for record in self.records)
        return "\n".join([*parts, f"Tables, intervals and commands: {names}.\n"])


def _claims_table(claims: Sequence[tuple[StudyRecord, Judgement]]) -> str:
    rows = [[text, record.item_name, *others] for record, item in claims for text, *others in [claim_evidence(item)]]
    return TextTable("Primary claims", _HEADS, rows).markdown(3)


def _map_text(folder: str, record: StudyRecord, number: int, claims: ClaimMap) -> str:
    picture = f"![{markdown(claims.drawing.map)}]({folder}/{record.map_file(number)})"
    return f"{picture}\n\n{markdown(claims.sentence)}"


def evidence_table(papers: Sequence[PaperEvidence], folder: str) -> str:
    """A row a paper: what it claims, and how many claims of its studies hold here."""
    heads = ("method", "what it claims", *_VERDICTS)
    lines = [heads, ["---"] * len(heads), *(paper.row(folder) for paper in papers)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
