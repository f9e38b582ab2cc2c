"""What the report says of the clients' ensemble as a teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyfed.reporting.run_tables import teacher_table
from polyfed.runs.opened import open_run
from run_folders import write_measured, write_run

BETTER = "ranks better than the server"
WORSE = "it teaches nothing"
UNSURE = "set public.gallery"


@pytest.mark.parametrize(
    ("ensemble", "server", "held_out", "norm", "said"),
    [
        (12.0, 10.0, 200.0, 0.9, [BETTER, "12.00 against 10.00 on 200 held-out samples"]),
        (9.0, 10.0, 200.0, 0.9, [WORSE]),
        (9.0, 10.0, 0.0, 0.9, [UNSURE, "public pairs that the server trains on"]),
        (12.0, 10.0, 200.0, 0.3, [BETTER, "norm 0.30", "not aligned"]),
    ],
)
def test_instruments_are_read(
    tmp_path: Path, ensemble: float, server: float, held_out: float, norm: float, said: list[str]
) -> None:
    folder = write_run(tmp_path / "run")
    metrics = {"teacher.r1_sum": ensemble, "student.r1_sum": server, "teacher.gallery": held_out}
    metrics |= {"teacher.r1_sum.image": 11.0, "mean_norm.image": norm}
    write_measured(folder, {"server": metrics}, 1, 2, kind="train")
    table = teacher_table(open_run(folder).records)
    notes = " ".join(table.notes)
    assert all(part in notes for part in said)
    assert ("not aligned" in notes) == (norm < 0.5)
    rows = {row[0]: row[2] for row in table.rows}
    assert rows["ensemble: r1_sum"] == f"{ensemble:.2f}"
    assert rows["ensemble: r1_sum, its image beside the server's others"] == "11.00"
    assert "teacher.gallery" not in rows


def test_a_run_without_instruments_says_nothing(run_folder: Path) -> None:
    assert not [row for row in teacher_table(open_run(run_folder).records).rows if "ensemble" in row[0]]
