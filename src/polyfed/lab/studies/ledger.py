"""The ledger of reproduction: every table and figure of the papers, with what was run of it and what that says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.lab.studies.records import PAPER, StudyRecord
from polyfed.lab.studies.study import SMALL
from polyfed.lab.studies.study_files import study_files
from polyfed.reporting.markup import markdown_templates

_PAPERS = "papers/"


@dataclass(frozen=True)
class LedgerItem:
    """A table or figure of a paper.

    Attributes:
        small, paper: its study at both scales.
    """

    small: StudyRecord
    paper: StudyRecord

    @property
    def source(self) -> str:
        """The paper."""
        return self.small.study.source.paper if self.small.study.source else ""

    @property
    def item(self) -> str:
        """Such as ``Table 1``."""
        return self.small.item_name

    @property
    def shows(self) -> str:
        """What it is about: its title without paper and item."""
        return self.small.study.title.partition(": ")[2] or self.small.study.title

    @property
    def anchor(self) -> str:
        kept = (letter for letter in f"{self.source} {self.item}".lower() if letter.isalnum() or letter in " -")
        return "".join(kept).replace(" ", "-")

    @property
    def attempts(self) -> list[StudyRecord]:
        """Scales at which something was run."""
        return [record for record in (self.small, self.paper) if record.results]

    @property
    def state(self) -> str:
        states = [f"{record.scale}: {record.state}" for record in self.attempts]
        return "; ".join(states) or "not run"


def ledger(home: Path, known: Sequence[StudyRecord] = ()) -> list[LedgerItem]:
    """All items of the papers, with the results that lie in ``home`` as ``polyfed study run`` leaves them.

    Args:
        home: where results lie.
        known: records of it that were read already.
    """
    read = {(record.name, record.scale): record for record in known}

    def record(name: str, scale: str) -> StudyRecord:
        return read.get((name, scale)) or StudyRecord.of(name, scale, home)

    items = [LedgerItem(record(name, SMALL), record(name, PAPER)) for name in study_files() if name.startswith(_PAPERS)]
    return sorted(items, key=lambda item: (item.source, *item.small.place))


def ledger_text(items: Sequence[LedgerItem], *, is_brief: bool = False) -> str:
    """The ledger as Markdown; equal results give equal bytes.

    Args:
        items: tables and figures of all papers.
        is_brief: whether only items that were run are listed, a line each, with links to their pages.
    """
    by_paper: dict[str, list[LedgerItem]] = {}
    for item in items:
        by_paper.setdefault(item.source, []).append(item)
    template = markdown_templates().get_template("ledger.md.j2")
    return template.render(
        papers=by_paper,
        shown={name: [item for item in of if item.attempts or not is_brief] for name, of in by_paper.items()},
        is_brief=is_brief,
        verdicts={name: _verdicts(of) for name, of in by_paper.items()},
        needs={} if is_brief else _needs(items),
    )


def _needs(items: Sequence[LedgerItem]) -> dict[str, str]:
    """Scale -> folders of data and weights of all studies."""
    efforts = {SMALL: [item.small.effort for item in items], PAPER: [item.paper.effort for item in items]}
    return {
        scale: ", ".join(sorted({name for effort in of for name in (*effort.data, *effort.weights)}))
        for scale, of in efforts.items()
    }


def _verdicts(items: Sequence[LedgerItem]) -> Counter[str]:
    return sum((Counter(record.verdicts) for item in items for record in item.attempts), Counter())
