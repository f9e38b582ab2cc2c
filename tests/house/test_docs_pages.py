"""Pages of papers/ and blocks of others are what the records say, and nothing else."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

import pages
import prose_numbers
import record_checks
import which_method
from polyfed.core.version import GENERATION
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from study_records import PAPERS, RECORDS, STUDIES, records


def test_the_pages_are_those_of_the_records() -> None:
    stale = [path.name for path, text in pages.pages().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "make pages"
    assert {*PAPERS.rglob("*.svg"), *(pages.ROOT / name for name in (pages.GAINS, pages.COST))} == {*pages.pictures()}
    assert len(records()) == len([*PAPERS.glob(f"*/{RECORDS}/*")])


def test_records_are_of_todays_studies_and_code_and_agree() -> None:
    assert record_checks.faults() == []


def test_prose_has_the_numbers_of_records() -> None:
    assert prose_numbers.faults() == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the files that have blocks, and without records."""
    root = tmp_path / "repository"
    for name in pages.blocks([]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pages.ROOT / name, root / name)
    return root


def run_study(folder: Path, study: Study) -> None:
    """What a complete run leaves: each row is above the one before by 2, at the first seed by half a point more."""
    places = [(row, point) for row in study.rows for point in study.points_of(row)]
    steps = {row: 2 * place for place, row in enumerate(study.rows)}
    values = {
        (row, point, column): {seed: 10.0 + seed + steps[row] + (steps[row] and not seed) / 2 for seed in study.seeds}
        for row, point in places
        for column in study.columns
    }
    cells = {", ".join((row, *point, f"seed {k}")): f"{row}{point}{k}" for row, point in places for k in study.seeds}
    Results(study, values, cells=cells, code=("0.1.0 abc",), generations=[GENERATION]).save(folder)


def made(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): text for path, text in pages.pages(root).items()}


def test_what_was_run_becomes_a_record_a_section_and_a_line_of_the_ledger(tmp_path: Path, root: Path) -> None:
    run_study(tmp_path / "fedcola-t4-small", Study.load(STUDIES["fedcola/t4"]))
    run_study(tmp_path / "mine-small", Study.load(STUDIES["fedcola/t4"]))
    assert pages.take_over(tmp_path, root / "papers") == 1
    taken, before = records(root / "papers"), Results.load(tmp_path / "fedcola-t4-small")
    assert [(one.name, one.scale) for one in taken] == [("fedcola/t4", "small")]
    assert taken[0].results == before
    texts = made(root)
    page, ledger = texts["papers/fedcola/README.md"], texts["papers/README.md"]
    assert "## Table 4: every type's global model\n" in page
    assert "* method, held: fedcola > fedavg on r1\\_sum: +8.10 (+7.82…+8.38), p &lt; 0.001\n".replace("\\", "") in page
    assert "|t4|Table 4: every type's global model|25|3 held|" in ledger
    assert "|t1|Table 1: settings of the federation, by method|(≤ 150)|not run|" in ledger
    assert "](../../papers/fedcola/README.md): 3 held." in texts["docs/explanation/fedcola.md"]
    assert ": none was run." in texts["docs/explanation/creamfl.md"]
    assert "|[FedCola](papers/fedcola/README.md)|" in texts["README.md"]


def test_a_leaderboard_is_a_table_of_the_readme_and_json(tmp_path: Path, root: Path) -> None:
    study = Study.load(STUDIES[pages.GAIN])
    run_study(tmp_path / "polyfed-leaderboard-scarce-small", study)
    pages.take_over(tmp_path, root / "papers")
    texts = made(root)
    (board,) = json.loads(texts["papers/polyfed/leaderboard.json"])["boards"]
    assert [entry["row"] for entry in board["entries"]] == [*study.rows][::-1]
    best = board["entries"][0]
    assert best["mean"] == pytest.approx(12.1 + 2 * (len(study.rows) - 1))
    assert best["by_seed"]["1"] == 11 + 2 * (len(study.rows) - 1)
    assert best["difference"]["interval"][0] < best["difference"]["mean"] < best["difference"]["interval"][1]
    assert "difference" not in next(entry for entry in board["entries"] if entry["row"] == board["against"])
    rows = [line for line in texts["README.md"].splitlines() if line.startswith("|") and "±" in line]
    assert len(rows) == len(study.rows)
    assert rows == sorted(rows, key=lambda line: line.split("|")[2], reverse=True)


def test_which_method_asks_what_studies_have_and_says_what_was_not_measured(tmp_path: Path, root: Path) -> None:
    for answer in itertools.chain.from_iterable(which_method.SECTIONS.values()):
        study = Study.load(STUDIES[answer.study]) if answer.study else None
        if study and answer.row:
            assert {answer.row, answer.against} <= study.rows.keys(), answer
            assert answer.column in study.columns, answer
            assert answer.point in study.points_of(answer.row), answer
    place = f"|[{which_method.SCARCE}](../../papers/polyfed/README.md"
    assert set(re.findall(r"[+-]\d", made(root)[which_method.PAGE])) == set()
    run_study(tmp_path / "polyfed-leaderboard-scarce-small", Study.load(STUDIES[which_method.SCARCE]))
    pages.take_over(tmp_path, root / "papers")
    lines = [
        line for line in made(root)[which_method.PAGE].splitlines() if place in line and "`change_distillation`" in line
    ]
    assert lines[0].startswith(
        "|representations of public pairs|`change_distillation`|**-2.1 (-2.4 to -1.8)**, contradicted|"
    )
    assert "|0.50|" in lines[0]  # 12 MiB of four clients and six rounds


def test_a_page_without_the_block_is_refused(root: Path) -> None:
    (root / "README.md").write_text("# Results\n")
    with pytest.raises(SystemExit, match=r"README.md: no block between"):
        pages.pages(root)
