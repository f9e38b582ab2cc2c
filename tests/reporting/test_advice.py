"""The advice that follows from the figures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyfed.reporting.summary import RunSummary
from polyfed.runs.records import RunRecords
from run_folders import write_lines, write_run

FEW = {"accuracy": 54.0, "accuracy_of_constant": 50.0, "n": 100.0}
FOLDS = {"image_to_text_r@1_5fold": 2.0, "gallery_text_5fold": 100.0, "image_to_text_positives_per_query_5fold": 1.0}
MANY = FEW | {"n": 10_000.0}


def line(metrics: dict[str, float], number: int = 1, kind: str = "test", participant: str = "server") -> dict[str, Any]:
    return {"round": number, "participant": participant, "kind": kind, "metrics": metrics}


def course(*values: float, kind: str = "validation") -> list[dict[str, Any]]:
    return [line(MANY | {"accuracy": value}, number, kind) for number, value in enumerate(values)]


def teaching(ensemble: float, held_out: float = 50.0) -> dict[str, Any]:
    return line({"student.r1_sum": 40.0, "teacher.r1_sum": ensemble, "teacher.gallery": held_out}, 4, "train")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line(FEW)], "100 test items cannot tell 54.00 % from chance, about 597 could"),
        ([line(MANY)], ""),
        ([line(FEW | {"accuracy": 49.0})], "nothing was learnt in"),
        ([*course(50, 54, 56, 58, 60), line(MANY, 4)], "validation still rises (58.00, then 60.00): --rounds"),
        ([*course(50, 54, 60, 58, 60), line(MANY, 4)], ""),
        ([*course(50, 54, 60), line(MANY, 2)], ""),
        (course(50, 54, 56, 58, kind="test"), "test still rises"),
        ([line(MANY, 4), teaching(30.0)], "ensemble ranks below the server (r1_sum 30.00 against 40.00)"),
        ([line(MANY, 4), teaching(50.0)], ""),
        ([line(MANY, 4), teaching(30.0, held_out=0.0)], ""),
        ([line(FEW | {"accuracy": 49.0}, participant="image-0")], "nothing was learnt"),
        ([], ""),
        ([line(FOLDS) | {"intervals": {"image_to_text_r@1_5fold": [0.0, 5.0]}}], ""),
    ],
)
def test_the_first_condition_that_holds_speaks(tmp_path: Path, lines: list[dict[str, Any]], expected: str) -> None:
    folder = write_run(tmp_path / "run")
    write_lines(folder / "metrics.jsonl", lines)
    said = RunSummary(RunRecords.load(folder)).advice
    assert expected in said
    assert bool(said) == bool(expected)
