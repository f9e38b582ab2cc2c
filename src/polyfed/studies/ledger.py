"""The ledger of reproduction: every table and figure of the papers, with what was run of it and what that says."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polyfed.reporting.tables import TextTable
from polyfed.studies.claims import Verdict
from polyfed.studies.results import RESULTS, Results
from polyfed.studies.study import SMALL, Study
from polyfed.studies.study_files import study_files
from polyfed.studies.tables import claims_table, figure_tables

_PAPERS = "papers/"
_VERDICTS: tuple[Verdict, ...] = ("held", "contradicted", "undecided", "not run")
_HEAD = (
    "<!-- made by: polyfed study ledger -->\n\n# Reproduction\n\n"
    "Every table and figure of the four papers as a study, with the command that makes it, and what was run of it so "
    "far. Scale small is that of public data sets and small networks, not the paper's: what can be compared is the "
    "order of methods, which the claims state, not the figures. How verdicts are reached: [studies](studies.md).\n"
)


@dataclass(frozen=True)
class LedgerItem:
    """A table or figure of a paper.

    Attributes:
        name: of the study.
        study: at the scale.
        scale: small, paper, ...
        results: what was run; None: nothing.
    """

    name: str
    study: Study
    scale: str
    results: Results | None

    @property
    def command(self) -> str:
        """What runs it."""
        scale = "" if self.scale == SMALL else f" --scale {self.scale}"
        return f"polyfed study run {self.name}{scale}"

    @property
    def of(self) -> str:
        """Paper and item."""
        return f"{self.study.source.paper}, {self.study.source.item}" if self.study.source else self.study.title

    @property
    def is_complete(self) -> bool:
        """Whether every row has every seed."""
        if self.results is None:
            return False
        expected = sum(len(self.study.points_of(row)) for row in self.study.rows) * len(self.study.seeds)
        return len(self.results.cells) == expected and not self.results.causes

    @property
    def state(self) -> str:
        """Verdicts counted, or that it was not run."""
        if self.results is None:
            return "not run"
        verdicts = Counter(item.verdict for item in self.results.judgements())
        counts = ", ".join(f"{verdicts[name]} {name}" for name in _VERDICTS if verdicts[name]) or "run"
        return counts if self.is_complete else f"in part: {counts}"

    @property
    def digest(self) -> str:
        """Of the resolved configurations of all cells that were run; empty if none was."""
        if self.results is None:
            return ""
        return hashlib.sha256("".join(sorted(self.results.cells.values())).encode()).hexdigest()[:12]


def ledger(home: Path, scale: str = SMALL) -> list[LedgerItem]:
    """All items of the papers, with the results that lie in ``home`` as ``polyfed study run`` leaves them."""
    items = []
    for name in study_files():
        if name.startswith(_PAPERS):
            folder = home / f"{name.replace('/', '-')}-{scale}"
            results = Results.load(folder) if (folder / RESULTS).is_file() else None
            study = results.study if results else Study.load(name, scale)
            items.append(LedgerItem(name, study, scale, results))
    return items


def ledger_text(items: list[LedgerItem]) -> str:
    """The ledger as Markdown; equal results give equal bytes."""
    run = [item for item in items if item.results is not None]
    summary = TextTable(
        f"{len(items)} items, {len(run)} of them run",
        ("item", "command", "seeds", "cells", "claims"),
        [[item.of, item.command, str(len(item.study.seeds)), item.digest or "-", item.state] for item in items],
        ("Cells: hash of the resolved settings and of the data's files of all cells that were run.",),
    )
    return "\n".join([_HEAD, summary.markdown(), *(part for item in run for part in _details(item))])


def _details(item: LedgerItem) -> Iterator[str]:
    assert item.results is not None
    yield f"## {item.of}\n\n{item.study.description}\n\n    {item.command}\n"
    tables = figure_tables(item.results)
    tables += [claims_table(item.results.judgements())] if item.study.claims else []
    for table in tables:
        yield table.markdown().replace("## ", "### ", 1)
