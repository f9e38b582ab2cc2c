"""Pages of results are what the records in docs/results say, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import pages
from polyfed.lab.studies.records import records
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study


def test_the_pages_are_those_of_the_records() -> None:
    stale = [path.name for path, text in pages.pages().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "make pages"
    of_records = {record.page for record in records(pages.DOCS / pages.HOME)}
    assert {path.name for path in (pages.DOCS / pages.HOME).glob("*.md")} == of_records


def test_a_record_becomes_a_page_an_entry_and_a_line_of_the_ledger(tmp_path: Path) -> None:
    study = Study.load("papers/fedcola-t4")
    values = {
        (row, (), "r1_sum"): {seed: 10.0 + seed + 2 * place for seed in study.seeds}
        for place, row in enumerate(study.rows)
    }
    values["fedcola", (), "r1_sum"][0] += 0.5
    cells = {f"{row}, seed {seed}": f"{row}{seed}" for row in study.rows for seed in study.seeds}
    Results(study, values, cells=cells, code=("0.1.0 abc",)).save(tmp_path / "runs" / "papers-fedcola-t4-small")
    docs = tmp_path / "docs"
    (docs / pages.HOME).mkdir(parents=True)
    shutil.copy(pages.DOCS / "results.md", docs / "results.md")
    pages.take_over(records(tmp_path / "runs"), tmp_path / "runs", docs)
    made = {path.relative_to(docs).as_posix(): text for path, text in pages.pages(docs).items()}
    page = made["results/papers-fedcola-t4-small.md"]
    assert "    polyfed study run papers/fedcola-t4 --data-dir DATA --weights-dir WEIGHTS\n" in page
    assert "| runs | 25 of 25 |" in page
    assert "| code | 0.1.0 abc |" in page
    assert "| fedcola | 5 | +8.10 |" in page
    assert "| fedcola > fedavg on r1_sum | held | 5 | +8.10 |" in page
    assert (
        "](results/papers-fedcola-t4-small.md) | FedCola, Table 4: every type's global model | 5 | 1 held, 2 not run |"
        in made["results.md"]
    )
    assert "20.10 ± " in made["reproduction.md"]
    assert "| [FedCola](#fedcola) | 15 | 1 | 1 | 0 | 0 |" in made["reproduction.md"]
    assert {path.relative_to(docs).as_posix(): text for path, text in pages.pages(docs).items()} == made


def test_a_page_without_the_block_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.md").write_text("# Results\n")
    with pytest.raises(SystemExit, match="no block between"):
        pages.pages(tmp_path)
