"""Studies at scale paper deal out the data sets that they name: here tiny folders of their layouts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from paper_studies import NAMES, STUDIES
from polyfed.lab.analysis.partition import planned_holdings
from polyfed.lab.studies.cells import Places, resolve
from polyfed.lab.studies.study import Study
from polyfed.runs.experiment import Experiment
from presets.paper_folders import paper_folders

pytestmark = pytest.mark.slow
STANDINS = {"organcmnist": "cifar100", "medical_abstracts": "ag_news"}
"""Labelled sets in the layout of another."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = paper_folders(tmp_path_factory.mktemp("data"))
    for name, like in STANDINS.items():
        shutil.copytree(data / like, data / name)
    return data


def tiny(experiment: Experiment) -> Experiment:
    """With sizes that tiny folders have."""
    content: dict[str, Any] = experiment.model_dump(mode="json")
    for group in content["clients"].values():
        partition = group["partition"]
        partition |= {"min_size": 1} if "min_size" in partition else {}
        partition |= {"per_client": 2, "total": 30} if partition["name"] == "shards" else {}
        if isinstance(group["items"], int):
            group["items"] = 100 if group["source"] == "flickr30k" else 20
    if content["public"]:
        content["public"] |= {"items": 12 if content["public"]["source"] == "vqa_v2" else 20, "without": {}}
    return Experiment.parse(content)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("fedaid/")])
def test_every_client_of_every_row_gets_items(name: str, folders: Path) -> None:
    study = Study.load(STUDIES[name], "paper")
    for row in study.rows:
        for point in (study.points_of(row)[0], study.points_of(row)[-1]):
            experiment = tiny(resolve(study, row, point, Places(data_dir=folders)))
            if experiment.clients:
                holdings = planned_holdings(experiment).holdings
                assert len(holdings) == sum(group.count for group in experiment.clients.values())
                assert all(holding.items for holding in holdings.values()), (row, point)
