"""The ledger of reproduction: what was run, what was not, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polyfed.studies import ledger as module
from polyfed.studies.ledger import ledger, ledger_text
from polyfed.studies.results import Results
from polyfed.studies.study import Study


@pytest.fixture
def two_papers(study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two studies of papers, of which the first was run on three seeds; the folder of runs."""
    from studies.conftest import tiny_study

    path = study_file(tiny_study(seeds=3, claims=["prox > tiny on r1"], source={"paper": "Tiny", "item": "Table 1"}))
    study = Study.load(path)
    monkeypatch.setattr(module, "study_files", lambda: dict.fromkeys(["demo", "papers/one", "papers/two"]))
    monkeypatch.setattr(Study, "load", classmethod(lambda cls, name, scale="small": study))
    values = {("tiny", (), "r1"): {0: 1.0, 1: 2.0, 2: 3.0}, ("prox", (), "r1"): {0: 11.0, 1: 12.5, 2: 13.0}}
    cells = {f"{row}, seed {seed}": f"{row}{seed}" for row in ("tiny", "prox") for seed in range(3)}
    folder = tmp_path / "runs" / "papers-one-small"
    folder.mkdir(parents=True)
    Results(study, values, cells=cells).save(folder)
    return tmp_path / "runs"


def test_items_that_were_run_and_not(two_papers: Path) -> None:
    one, two = ledger(two_papers)
    assert (one.of, one.state, one.is_complete) == ("Tiny, Table 1", "1 held", True)
    assert (two.state, two.digest) == ("not run", "")
    assert one.digest != ""


def test_text_has_commands_figures_and_verdicts(two_papers: Path) -> None:
    text = ledger_text(ledger(two_papers))
    assert "2 items, 1 of them run" in text
    assert "| Tiny, Table 1 | polyfed study run papers/two | 3 | - | not run |" in text
    assert "12.17 ± 1.04" in text
    assert "| prox &gt; tiny on r1 | held | 3 |" in text or "| prox > tiny on r1 | held | 3 |" in text
    assert text == ledger_text(ledger(two_papers))


def test_a_part_is_said_to_be_one(two_papers: Path) -> None:
    folder = two_papers / "papers-one-small"
    whole = Results.load(folder)
    Results(whole.study, whole.values, cells=dict(list(whole.cells.items())[:4])).save(folder)
    assert ledger(two_papers)[0].state == "in part: 1 held"
