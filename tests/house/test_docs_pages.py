"""Pages of papers/ and blocks of other pages are made from the records."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

import boards
import gap_picture
import pages
import prose_numbers
import record_checks
import study_records
import which_method
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from study_records import PAPERS, RECORDS, STUDIES, Again, StudyRecord, record_path, record_text, records


def test_the_pages_are_those_of_the_records() -> None:
    stale = [path.name for path, text in pages.pages().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "make pages"
    assert {*PAPERS.rglob("*.svg"), pages.ROOT / pages.COST, pages.ROOT / gap_picture.FILE} == {*pages.pictures()}
    assert len(records()) == len([*PAPERS.glob(f"*/{RECORDS}/*")])


def test_records_agree() -> None:
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


def run_study(folder: Path, study: Study, rows: Collection[str] = ()) -> None:
    """Results of a complete run: each row is above the one before by 2, at the first seed by half a point more."""
    run = [(row, point) for row in rows or study.rows for point in study.points_of(row)]
    steps = {row: 2 * place for place, row in enumerate(study.rows)}
    values = {
        (row, point, column): {seed: 10.0 + seed + steps[row] + (steps[row] and not seed) / 2 for seed in study.seeds}
        for row, point in run
        for column in study.columns
    }
    cells = {", ".join((row, *point, f"seed {k}")): f"{row}{point}{k}" for row, point in run for k in study.seeds}
    Results(study, values, cells=cells, code={row: ["0.1.0 abc"] for row, _ in run}).save(folder)


def confirmed(home: Path) -> None:
    """A cell of each row was run again, and equal."""
    for own in records(home):
        again = {row: Again(f"{row}, seed 0", "0.1.0 abc") for row in own.results.code}
        (home / record_path(own.name, own.scale)).write_text(record_text(own.results, again))


def made(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): text for path, text in pages.pages(root).items()}


def test_a_study_that_was_run_becomes_a_record_a_section_and_a_line_of_the_ledger(tmp_path: Path, root: Path) -> None:
    run_study(tmp_path / "fedcola-t4-small", Study.load(STUDIES["fedcola/t4"]))
    run_study(tmp_path / "mine-small", Study.load(STUDIES["fedcola/t4"]))
    assert pages.take_over(tmp_path, root / "papers") == 1
    taken, before = records(root / "papers"), Results.load(tmp_path / "fedcola-t4-small")
    assert [(one.name, one.scale) for one in taken] == [("fedcola/t4", "small")]
    assert taken[0].results.to_json() == before.to_json()
    confirmed(root / "papers")
    texts = made(root)
    page, ledger = texts["papers/fedcola/README.md"], texts["papers/README.md"]
    assert "## Table 4: every type's global model\n" in page
    assert "* method, above: fedcola > fedavg on r1_sum: +8.10 (+7.67…+8.53), p &lt; 0.001, 5 seeds\n" in page
    assert "|t4|Table 4: every type's global model|25|2 seen|" in ledger
    assert "|t1|Table 1: settings of the federation, by method|(≤ 150)|not run|150 cells, " in ledger
    assert "](../../papers/fedcola/README.md): 2 seen." in texts["docs/explanation/fedcola.md"]
    assert ": none was run." in texts["docs/explanation/creamfl.md"]
    assert "|[FedCola](fedcola/README.md)|2|" in ledger


def boards_run(tmp_path: Path, root: Path, left_out: Collection[str] = ()) -> dict[str, StudyRecord]:
    for name in boards.REQUIRED:
        study = Study.load(STUDIES[name])
        rows = [row for row in study.rows if row not in left_out]
        run_study(tmp_path / f"{name.replace('/', '-')}-small", study, rows)
    pages.take_over(tmp_path, root / "papers")
    confirmed(root / "papers")
    return boards.boards(record_checks.standing(root / "papers"))


def test_boards_are_tables_of_the_readme_and_json(tmp_path: Path, root: Path) -> None:
    same = boards_run(tmp_path, root)[boards.SAME]
    texts = made(root)
    board, *_ = json.loads(texts["papers/polyfed/boards.json"])["boards"]
    entries = {entry["row"]: entry for entry in board["entries"]}
    assert [*entries] == [row for row in [*same.study.rows][::-1] if boards.has_row(same, row)]
    difference = entries["fedavg"]["difference"]
    assert difference["interval"][0] < difference["mean"] < difference["interval"][1]
    assert "difference" not in entries["alone"]
    assert (entries["alone"]["share_of_gap"], entries["pooled"]["share_of_gap"]) == (0, 1)
    readme = texts["README.md"]
    assert "No headline result yet" not in readme
    (fedavg,) = [line for line in readme.splitlines() if line.startswith("|fedavg|")]
    assert fedavg.split("|")[2].startswith(f"{100 * entries['fedavg']['share_of_gap']:.0f}")


@pytest.mark.parametrize("row", ["fedavg", "pooled", "alone"])
def test_a_headline_without_fedavg_pooled_or_alone_is_withheld(tmp_path: Path, root: Path, row: str) -> None:
    recorded = boards_run(tmp_path, root, [row])
    assert f"board-same: {row}" in boards.lacking([*recorded.values()])
    assert {"board-other: alone", "board-other: pooled"} <= {*boards.lacking([recorded[boards.SAME]])}
    assert "**No headline result yet**: it waits for" in made(root)["README.md"]


def test_words_and_verdicts_are_the_same_on_all_pages(tmp_path: Path, root: Path) -> None:
    """The judged claims of a board: their estimate, interval and verdict stand everywhere as one test gave them."""
    for one in boards_run(tmp_path, root).values():
        texts = made(root)
        for item in one.judgements:
            left, right = (operand.row for operand in item.claim.operands)
            comparison, words = one.results.against(left, right, (), "R@1")
            assert (comparison, words) == (item.comparison, item.in_words)
            assert item.comparison is not None
            shown = study_records.comparison_text(item.comparison)
            if right == boards.ALONE:
                (line,) = [row for row in boards.board_table(one).splitlines() if row.startswith(f"|{left}|")]
                assert f"|{shown}|{words}|" in line
                assert f"{shown}, {words}|" in texts[which_method.TABLES]
            low, high = (f"{end:+.2f}" for end in item.comparison.interval)
            assert f"{words}: {item.claim.text}" in texts["papers/polyfed/README.md"].replace("\\", "")
            assert f"({low}…{high})" in texts["papers/polyfed/README.md"]


def test_answers_of_which_method_name_rows_of_studies_and_wait_for_their_records(tmp_path: Path, root: Path) -> None:
    answers = [*itertools.chain.from_iterable(which_method.sections().values())]
    for answer in answers:
        study = which_method.study_of(answer.study)
        assert {answer.row, answer.against} <= study.rows.keys(), answer
        assert answer.column in study.columns, answer
        assert answer.point in study.points_of(answer.row), answer
    assert not any("\n|" in made(root)[page] for page in (which_method.PAGE, which_method.TABLES))
    known = boards_run(tmp_path, root)
    own = [one for one in answers if one.study in known and boards.has_row(known[one.study], one.row)]
    assert (tables := made(root)[which_method.TABLES]).count("\n|") == 2 + len(own)
    assert f"|{own[-1].case}|`change_distillation`|-2.1 (" in tables


def test_a_leaf_is_the_best_row_that_its_answers_allow_with_its_equals(tmp_path: Path, root: Path) -> None:
    record = boards_run(tmp_path, root, ["creamfl, unpaired"])[boards.SAME]
    text = made(root)[which_method.PAGE]
    advice = [which_method.advised(record, one.rows()) for one in which_method.leaves() if one.study == record.name]
    assert advice == [["fedavg, holding public pairs"], ["scaffold"], ["fedafd, unpaired"], ["fedmkd"]]
    assert all(
        words in text for words in ("|if weights could leave: `fedavg`, cl", "with unpaired items too: `creamfl`.")
    )
    assert "#clients-of-one-modality" not in text
    values = dict(record.results.values)
    for column, steps in {"R@1": [9.0, -9.0, 0.0, 0.0, 0.0], "MiB": [-99.0] * 5}.items():
        rival = values["fedmkd", (), column]
        values["alone", (), column] = {seed: rival[seed] + step for seed, step in enumerate(steps)}
    record = replace(record, results=replace(record.results, values=values))
    assert which_method.advised(record, ["fedmkd", "alone", "fedmd"]) == ["alone", "fedmkd"]


def test_a_page_without_the_block_is_refused(root: Path) -> None:
    (root / "README.md").write_text("# Results\n")
    with pytest.raises(SystemExit, match=r"README.md: no block between"):
        pages.pages(root)
