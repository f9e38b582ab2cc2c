"""Every study runs end to end on the data that it names, in its smoke form: one seed, one round, the first labels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from paper_studies import STUDIES
from polyfed.lab.studies.runner import run_study
from polyfed.lab.studies.study import Study

PLACES = ("POLYFED_DATA", "POLYFED_WEIGHTS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(os.environ.get(name) for name in PLACES),
        reason=f"{' and '.join(PLACES)} do not say where data sets and weights are",
    ),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Studies of a module share their cells."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_and_measures_all_that_it_names(name: str, out: Path) -> None:
    study = Study.load(STUDIES[name], "smoke")
    done = run_study(study, out / name.replace("/", "-"), jobs=1)
    assert done.ended.failures == {}
    assert done.results.causes == {}
    figures: Mapping[str, int] = {row: len(study.columns_of(row)) * len(study.points_of(row)) for row in study.rows}
    assert {row: sum(place[0] == row for place in done.results.values) for row in study.rows} == figures
