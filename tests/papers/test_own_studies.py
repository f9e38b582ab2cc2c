"""Studies of our own questions: every row resolves; what the orderings take for granted is so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import polyfed
from paper_studies import NAMES, STUDIES
from polyfed.lab.analysis.partition import planned_holdings
from polyfed.lab.studies.cells import Places, StudyPlan, resolve
from polyfed.lab.studies.study import SMALL, SMOKE, Study
from polyfed.lab.studies.study_files import study_content
from polyfed.runs.experiment import Experiment
from small_federations import transformers


@pytest.mark.parametrize("name", [name for name in STUDIES if name not in NAMES])
@pytest.mark.parametrize("scale", [SMALL, pytest.param(SMOKE, marks=pytest.mark.slow)])
def test_every_row_resolves(name: str, scale: str, tmp_path: Path) -> None:
    study = Study.load(STUDIES[name], scale)
    plan = StudyPlan(study, Places(), tmp_path)
    first = next(iter(study.rows))
    for row, point in plan.row_points():
        if row == first or point in (study.points_of(row)[0], study.points_of(row)[-1]):
            plan.check(row, point)


@pytest.mark.parametrize("name", STUDIES)
def test_no_study_of_ours_keeps_models(name: str) -> None:
    """Hundreds of cells with models would fill a disk; a file of your own may keep them."""
    assert study_content(STUDIES[name]).get("keep", "records") == "records"


def test_the_damped_server_steps_by_the_paired_clients_share_of_samples() -> None:
    """n_vl / sum n over all clients, which a cohort, so large a share of each group, has in the mean."""
    if "POLYFED_DATA" not in os.environ:
        pytest.skip("POLYFED_DATA is not set: no real data")
    study = Study.load(STUDIES["fedcola/t2"])
    held = planned_holdings(resolve(study, "ca+cp+cl", (), Places(Path(os.environ["POLYFED_DATA"])))).holdings.values()
    share = sum(held.samples for held in held if held.group == "paired") / sum(held.samples for held in held)
    damped: Any = resolve(study, "fedavg, damped", (), Places()).algorithm
    optimizer = damped.averaging.server_optimizer
    assert (optimizer.momentum, optimizer.lr) == (0, pytest.approx(share, abs=5e-4))


@pytest.mark.slow
def test_fewer_clients_of_other_types_leave_fedavgs_paired_model_as_it_is(tmp_path: Path) -> None:
    result = []
    for cohort in ({"image": 2, "text": 4, "paired": 3}, {"image": 1, "text": 1, "paired": 3}):
        content = transformers()
        for group, count in (("image", 2), ("text", 4), ("paired", 6)):
            content["clients"][group]["count"] = count
        content["run"]["sampling"] = {"kind": "stratified", "cohort": cohort}
        content["run"] |= {"rounds": 2, "output": {"plots": False}, "eval_every": 2, "evaluate_clients": False}
        out = tmp_path / str(sum(cohort.values()))
        result.append(
            polyfed.run(Experiment.load(content, ["algorithm={name: fedavg, local_steps: 1}"]), out, quiet=True)
        )
    assert result[0].records.last("server") == result[1].records.last("server")
