"""The suite that claims a paper's downstream protocol has its values, and its description lists the differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyfed.lab.downstream.probe import Probe
from polyfed.lab.downstream.suite import Suite
from polyfed.runs.experiment import Experiment

SUITES = Path(__file__).parents[2] / "papers" / "fedaid"
SEGMENTATION = "papers.fedaid.segmentation.SegmentationProbe"
SOURCED: dict[str, dict[str, Any]] = {
    SEGMENTATION: {"focal_weight": 10.0, "dice_weight": 1.0, "gamma": 2.0}
    | {"fit.lr": 2e-4, "fit.weight_decay": 0.05, "fit.epochs": 50, "fit.patience": 10, "fit.batch_size": 8}
}
"""From MGCA, ssl_segmenter.py and mgca_segmenter.py, whose masks FedAID's appendix B.2 takes over."""
CHOSEN: dict[str, dict[str, tuple[Any, str]]] = {
    "few_shot": {"shares": ([0.01, 0.1, 1.0], "all of the labels beside 1 % and 10 %"), "draws": (5, "five draws")},
    SEGMENTATION: {
        "shares": ([0.1, 1.0], "masks of 10 % and 100 % instead of 1 % and 10 %"),
        "draws": (5, "five draws"),
        "decoder": ([64, 32, 16], "decoders of widths 64, 32 and 16"),
        "size": (64, "masks of 64 pixels"),
        "validation": (0.15, "validation and test tested on together"),
        "test": (["validation", "test"], "validation and test tested on together"),
    },
    "retrieval": {"batch": (64, "galleries of 64"), "draws": (5, "five draws")},
}


@pytest.fixture(scope="module")
def medical() -> Suite:
    return Suite.load(str(SUITES / "medical.yaml"))


def flat(task: Probe) -> dict[str, Any]:
    """Settings by dotted path."""
    settings = task.model_dump(mode="json")
    return settings | {f"fit.{key}": value for key, value in settings.get("fit", {}).items()}


def test_every_value_is_the_sources_or_declared(medical: Suite) -> None:
    words, probes = " ".join(medical.description.split()), set()
    for name, task in medical.tasks.items():
        settings = flat(task)
        probe = str(settings["name"])
        probes.add(probe)
        due = SOURCED.get(probe, {}) | {key: value for key, (value, _) in CHOSEN.get(probe, {}).items()}
        assert due.items() <= settings.items(), name
        assert not [phrase for _, phrase in CHOSEN.get(probe, {}).values() if phrase not in words], name
    assert probes == SOURCED.keys() | CHOSEN.keys()


def test_at_the_papers_size_shares_decoder_and_the_rest_are_the_papers() -> None:
    suite = Suite.load(str(SUITES / "medical-paper-scale.yaml"))
    settings = {name: flat(task) for name, task in suite.tasks.items()}
    for task in settings.values():
        assert SOURCED.get(task["name"], {}).items() <= task.items()
        assert task["draws"] == 1
    assert {task["name"] for task in settings.values()} == {"few_shot", SEGMENTATION, "retrieval"}
    assert [settings[name]["shares"] for name in ("pneumonia", "covidx", "opacity")] == [[0.01, 0.1]] * 3
    assert settings["opacity"]["decoder"] == [512, 256, 128, 64]
    assert {settings[name]["batch"] for name in ("clients", "other")} == {388}
    assert "galleries are of the pre-training batch" in " ".join(suite.description.split())
    small = Suite.load(str(SUITES / "medical.yaml"))
    assert set(suite.tasks) <= set(small.tasks)  # studies name the same tasks at both scales


# ---- other objectives

TASK = "{{name: {name}, mask_siblings: true, in_batch: 64}}"
LOCAL = ("server.model.aligner.local=true", "clients.hospital.model.aligner.local=true")


@pytest.mark.parametrize("objective", ["convirt", "papers.fedaid.objectives.GLoRIA", "papers.fedaid.objectives.MGCA"])
@pytest.mark.parametrize(("preset", "changes"), [("fedaid-cxr", ()), ("fedaid-medpix", ()), ("fedaid-mimic", LOCAL)])
def test_the_objective_is_an_override_of_both_tasks(preset: str, changes: tuple[str, ...], objective: str) -> None:
    task = TASK.format(name=objective)
    experiment = Experiment.load(preset, [*changes, f"server.task={task}", f"clients.hospital.task={task}"])
    hospital = experiment.clients["hospital"]
    assert experiment.server.task == hospital.task
    assert hospital.task.component_name() == objective
    for model in (experiment.server.model, hospital.models[0]):
        assert model.aligner.local  # features by position, and attention to them
