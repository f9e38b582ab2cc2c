"""Pages of results are what the records in docs/results say, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import pages
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from study_records import STUDIES, folder_name, records


def test_the_pages_are_those_of_the_records() -> None:
    stale = [path.name for path, text in pages.pages().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "make pages"
    home = pages.ROOT / pages.HOME
    assert {path.name for path in home.glob("*.md")} == {record.page for record in records(home)}
    assert {*home.glob("*.svg"), pages.ROOT / pages.GAINS} == {*pages.pictures()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the files that have blocks, and without records."""
    root = tmp_path / "repository"
    (root / pages.HOME).mkdir(parents=True)
    for name in (*pages.blocks([]), pages.SPEED, pages.BENCHMARKS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pages.ROOT / name, root / name)
    return root


def run_study(home: Path, name: str, study: Study) -> None:
    """What a complete run leaves: each row is above the one before by 2, at the first seed by half a point more."""
    values = {
        (row, point, column): {
            seed: 10.0 + seed + 2 * place + (0.5 if place and not seed else 0) for seed in study.seeds
        }
        for place, row in enumerate(study.rows)
        for point in study.points_of(row)
        for column in study.columns
    }
    cells = {
        ", ".join((row, *point, f"seed {seed}")): f"{row}{point}{seed}"
        for row in study.rows
        for point in study.points_of(row)
        for seed in study.seeds
    }
    Results(study, values, cells=cells, code=("0.1.0 abc",)).save(home / folder_name(name, "small"))


def made(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): text for path, text in pages.pages(root).items()}


def test_a_record_becomes_a_page_entries_and_a_line_of_the_ledger(tmp_path: Path, root: Path) -> None:
    run_study(tmp_path / "runs", "fedcola/t4", Study.load(STUDIES["fedcola/t4"]))
    pages.take_over(records(tmp_path / "runs"), tmp_path / "runs", root)
    texts = made(root)
    page = texts["docs/results/papers-fedcola-t4-small.md"]
    assert "    polyfed study run papers/fedcola/t4.yaml\n" in page
    assert (
        "](results/papers-fedcola-t4-small.md) | FedCola, Table 4: every type's global model | 5 |"
        in texts["docs/results.md"]
    )
    assert "      - results/papers-fedcola-t4-small.md\n" in texts["mkdocs.yml"]
    assert "| [FedCola](#fedcola) | 15 | 1 |" in texts["docs/reproduction.md"]
    assert "fedcola > fedavg on r1_sum | Table 4 | held | 5 |" in texts["docs/explanation/fedcola.md"]
    assert "None of its own studies was run yet." in texts["docs/explanation/creamfl.md"]
    assert "| [FedCola](docs/explanation/fedcola.md#where-its-claims-hold) |" in texts["README.md"]
    for name, text in texts.items():
        (root / name).write_text(text)
    assert made(root) == texts


def test_a_page_without_the_block_is_refused(root: Path) -> None:
    (root / "docs/results.md").write_text("# Results\n")
    with pytest.raises(SystemExit, match=r"results.md: no block between"):
        pages.pages(root)
