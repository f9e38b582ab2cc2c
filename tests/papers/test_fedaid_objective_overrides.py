"""Medical presets with GLoRIA's and MGCA's objectives: rows of FedAID's tables."""

from __future__ import annotations

import pytest

from polyfed.runs.experiment import Experiment

TASK = "{{name: {name}, mask_siblings: true, in_batch: 64}}"
LOCAL = ("server.model.aligner.local=true", "clients.hospital.model.aligner.local=true")


@pytest.mark.parametrize("objective", ["convirt", "papers.fedaid.objectives.GLoRIA", "papers.fedaid.objectives.MGCA"])
@pytest.mark.parametrize(("preset", "changes"), [("fedaid-cxr", ()), ("fedaid-medpix", ()), ("fedaid-mimic", LOCAL)])
def test_the_objective_is_an_override_of_both_tasks(preset: str, changes: tuple[str, ...], objective: str) -> None:
    task = TASK.format(name=objective)
    experiment = Experiment.load(preset, [*changes, f"server.task={task}", f"clients.hospital.task={task}"])
    hospital = experiment.clients["hospital"]
    assert experiment.server is not None
    assert experiment.server.task == hospital.task
    assert hospital.task.component_name() == objective
    for model in (experiment.server.model, hospital.models[0]):
        assert model.aligner is not None
        assert model.aligner.local  # features by position, and attention to them
