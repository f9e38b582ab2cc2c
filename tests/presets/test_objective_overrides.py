"""Medical presets with GLoRIA's and MGCA's objectives: centralised and decentralised rows of FedAID's tables."""

from __future__ import annotations

import pytest

from polyfed.runs.experiment import Experiment

TASK = "{{name: {name}, mask_siblings: true, in_batch: 64}}"
LOCAL = ("server.model.aligner.local=true", "clients.hospital.model.aligner.local=true")
SMALL = {  # as rows of leaderboard-medical
    "fedavg": ("algorithm={name: fedavg, local_steps: 20}",),
    "local": ("algorithm={name: local, local_steps: 20}",),
    "centralised": (
        "algorithm={name: centralised, local_steps: 100}",
        "clients.hospital.count=1",
        "clients.hospital.partition={name: iid}",
        "clients.hospital.test=all",
    ),
}
POOLED = ("algorithm={name: centralised, local_steps: 250}", "clients.hospital.count=1", "clients.hospital.test=all")
ALONE = ("algorithm={name: local, local_steps: 50}",)


@pytest.mark.parametrize("objective", ["convirt", "gloria", "mgca"])
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        *((preset, changes) for preset in ("fedaid-cxr", "fedaid-medpix") for changes in SMALL.values()),
        ("fedaid-mimic", LOCAL),
        ("fedaid-mimic", (*LOCAL, *POOLED)),
        ("fedaid-mimic", (*LOCAL, *ALONE)),
    ],
)
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
