"""The ledger of reproduction: what was run, what was not, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polyfed.lab.studies import ledger as module
from polyfed.lab.studies.effort import Effort
from polyfed.lab.studies.ledger import ledger, ledger_text
from polyfed.lab.studies.records import StudyRecord
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study

TOKENS = ("deit-tiny-patch16-224", "sentence-transformers/all-MiniLM-L6-v2")
MIMIC = ("facebook/deit-base-patch16-224", "google-bert/bert-base-cased")
FASHION = ("mobilenet-v2-1.0-224", "sentence-transformers/all-MiniLM-L6-v2")


@pytest.fixture
def two_papers(study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two studies of papers, of which the first was run on five seeds; the folder of runs."""
    from lab.studies.conftest import tiny_study

    path = study_file(
        tiny_study(
            seeds=5,
            claims={"primary": ["prox > tiny on r1"]},
            source={"paper": "Tiny", "item": "Table 1"},
        )
    )
    study = Study.load(path)
    monkeypatch.setattr(module, "study_files", lambda: dict.fromkeys(["demo", "papers/one", "papers/two"]))
    monkeypatch.setattr(Study, "load", classmethod(lambda cls, name, scale="small": study))
    values = {
        ("tiny", (), "r1"): {0: 1.0, 1: 2.0, 2: 3.0, 3: 2.0, 4: 2.0},
        ("prox", (), "r1"): {0: 11.0, 1: 12.5, 2: 13.0, 3: 12.0, 4: 12.5},
    }
    cells = {f"{row}, seed {seed}": f"{row}{seed}" for row in ("tiny", "prox") for seed in range(5)}
    folder = tmp_path / "runs" / "papers-one-small"
    folder.mkdir(parents=True)
    Results(study, values, cells=cells, code=("0.1.0 abc",)).save(folder)
    return tmp_path / "runs"


def test_items_that_were_run_and_not(two_papers: Path) -> None:
    one, two = ledger(two_papers)
    assert (one.source, one.item, one.shows, one.anchor) == ("Tiny", "Table 1", "tiny", "tiny-table-1")
    assert (one.state, one.small.is_complete, one.small.code) == ("small: 1 held", True, "0.1.0 abc")
    assert (two.state, two.small.digest, two.attempts) == ("not run", "", [])
    assert len(one.small.digest) == 12
    assert one.small.effort.runs == 10


def test_text_has_what_it_takes_figures_and_verdicts(two_papers: Path) -> None:
    text = ledger_text(ledger(two_papers))
    assert "| [Tiny](#tiny) | 2 | 1 | 1 | 0 | 0 |" in text
    assert "| [Table 1](#tiny-table-1) | tiny | `papers/one` | 10 | 10 | small: 1 held |" in text
    assert "| Table 1 | tiny | `papers/two` | 10 | 10 |  |" in text
    assert "| command | `polyfed study run papers/one` | `polyfed study run papers/one --scale paper` |" in text
    assert "| seeds | 0, 1, 2, 3, 4 | 0, 1, 2, 3, 4 |" in text
    assert "| code | 0.1.0 abc | - |" in text
    assert "12.20 ± 0.76" in text
    assert "| prox > tiny on r1 | held | 5 |" in text
    assert text == ledger_text(ledger(two_papers))
    brief = ledger_text(ledger(two_papers), is_brief=True)
    assert "| [Tiny](#tiny) | 2 | 1 | 1 | 0 | 0 |" in brief
    assert "| `papers/one` | 10 | 10 | [small](results/papers-one-small.md): 1 held |" in brief
    assert "12.17 ± 1.04" not in brief
    assert "`papers/two`" not in brief


def test_a_part_is_said_to_be_one(two_papers: Path) -> None:
    folder = two_papers / "papers-one-small"
    whole = Results.load(folder)
    Results(whole.study, whole.values, cells=dict(list(whole.cells.items())[:4])).save(folder)
    assert ledger(two_papers)[0].state == "small: in part: 1 held"


def test_a_study_whose_search_alone_was_run_counts_as_not_run(two_papers: Path) -> None:
    folder = two_papers / "papers-one-small"
    Results(Results.load(folder).study, {}).save(folder)
    assert ledger(two_papers)[0].state == "not run"


@pytest.mark.parametrize(
    ("name", "scale", "effort"),
    [
        # two rows on five seeds, each of which tries five candidates at most
        ("demo", "small", Effort(10, 10, (), ())),
        # rows that are one run count once: 15 rows are three runs
        ("papers/fedaid-t16", "small", Effort(15, 18, ("fashion_products",), FASHION)),
        ("papers/fedcola-t3", "small", Effort(25, 45, ("ag_news", "cifar100", "flickr8k"), TOKENS)),
        # pictures of the probes too; a source of questions reads what it is made of
        ("papers/fedaid-t3", "paper", Effort(9, 0, ("covidx", "mimic-cxr-jpg", "rsna"), MIMIC)),
        ("vqa-easy", "small", Effort(15, 0, ("ag_news", "cifar100", "easy_vqa", "flickr8k"), ())),
    ],
)
def test_what_a_study_takes(name: str, scale: str, effort: Effort) -> None:
    assert Effort.of(Study.load(name, scale)) == effort


def test_tables_come_before_figures_by_number() -> None:
    items = [item.item for item in ledger(Path("nowhere")) if item.source == "CreamFL"]
    assert items == [*(f"Table {k}" for k in range(1, 5)), *(f"Figure {k}" for k in range(3, 7))]


def test_a_record_of_further_seeds_says_so(loaded: Callable[..., Study]) -> None:
    study = loaded(seeds=5, claims={"primary": ["prox > tiny on r1"]})
    values = {("tiny", (), "r1"): dict.fromkeys(range(5), 1.0), ("prox", (), "r1"): {k: k % 2 for k in range(5)}}
    cells = {f"{row}, seed {seed}": f"{row}{seed}" for row in study.rows for seed in range(10)}
    part = StudyRecord("papers/x", "small", study, Results(study, values, cells=dict(list(cells.items())[:9])))
    assert (part.progress, part.state) == ("9 of 14: in part", "in part: 1 open")
    whole = StudyRecord("papers/x", "small", study, Results(study, values, cells=cells))
    assert (whole.progress, whole.state) == ("20 of 20", "1 open")
    assert whole.seeds == "0, 1, 2, 3, 4; where a claim was open 5, 6, 7, 8, 9"
