"""Boards: share of the gap, its figure and tables, and a row of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import boards
import enter
import gap_picture
from lab.studies.conftest import tiny_study
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from small_federations import tiny_experiment
from study_records import STUDIES, StudyRecord

LEVELS = {"alone": 10.0, "pooled": 20.0, "change distillation": 15.0, "rival": 18.0}


def board(name: str = boards.SAME, **more: Any) -> StudyRecord:
    """Rows at ``LEVELS``, plus the seed; change distillation is half a point off, up or down by the seed."""
    rows = {row: {"set": {"algorithm": {"name": "fedavg", "local_epochs": 1}}} for row in LEVELS}
    study = Study.model_validate(tiny_study(base=tiny_experiment(), columns={"R@1": "r1_sum"}, rows=rows, **more))
    values = {
        (row, point, "R@1"): {k: level + k + (row == "change distillation") / 2 * (-1) ** k for k in study.seeds}
        for row, level in LEVELS.items()
        for point in study.points
    }
    return StudyRecord(name, "small", Results(study, values))


def test_the_share_of_the_gap_is_drawn_by_public_pairs_and_only_where_it_was_measured() -> None:
    four, pairs = board(seeds=4), board("polyfed/gap-same", axes={"pairs": {"points": {"100": {}, "1000": {}}}})
    # differences of 0.5 and -0.5, whose deviation is 1 / sqrt(3), over a gap of 10
    reach = 3.1824 / 3**0.5 / 4**0.5 / 10
    assert boards.gap_closed(four, "change distillation") == (0.5, pytest.approx(reach, rel=1e-4))
    panels = gap_picture.closed([four, pairs])
    shown = [(one.pairs, one.share) for one in panels["same networks"]["change distillation"]]
    assert (shown, panels["other encoders"]) == ([(100, 50), (250, 50), (1000, 50)], {})


def test_the_short_table_has_the_best_row_whatever_it_is() -> None:
    table, _, left = boards.short_table([board()]).partition("\n\n")
    assert [line.split("|")[1] for line in table.splitlines()[2:]] == [
        "pooled",
        "rival",
        "change distillation",
        "alone",
    ]
    assert "Other networks: 23 of 24 rows" in left


def test_a_row_of_ones_own_enters_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from polyfed.algorithms.fedavg import FedAvg\nclass Mine(FedAvg): length: int = 1"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (file := tmp_path / "board.yaml").write_text(json.dumps(board().study.content()))
    monkeypatch.setitem(STUDIES, boards.SAME, file)
    given = ["same", "--row", "mine", "--algorithm", "mine.Mine", "--out", str(tmp_path / "out")]
    for place, wrong, words in ((0, "sam", "no board 'sam'"), (2, "alone", "has that row"), (4, "mine.My", "import")):
        with pytest.raises(SystemExit):
            enter.main([*given[:place], wrong, *given[place + 1 :]], tmp_path)
        assert words in capsys.readouterr().err
    assert not [*tmp_path.glob("out/*")]
    assert enter.main([*given, "--set", "algorithm.length=2"], tmp_path) == 0
    assert {*json.loads((tmp_path / "out/same-mine/entry.json").read_text())["by_seed"]} == {"0", "1"}
    assert "algorithm.length: 2" in capsys.readouterr().out
