"""What temperature makes the aggregation select: weights of Eq. 5 over the clients of a finished CreamFL run.

    python benchmarks/temperature.py RUN [RUN ...]

Takes the representations that clients uploaded last and those of the server's last model, and prints, for each run,
modality and temperature, the effective number of clients (the exponential of the mean entropy of the weights over
clients), the mean largest weight, and the weight of clients with several modalities against their share.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from polyfed.aggregation.weighting import Evidence
from polyfed.aggregation.weightings.gca import GCA
from polyfed.core.randomness import generator
from polyfed.engines.local import LocalEngine
from polyfed.federation.state import StateStore, unflatten
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.session import Session

ROWS = 512  # public samples on which weights are compared; the contrast is with all
TEMPERATURES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


def uploads(session: Session) -> dict[str, dict[str, Tensor]]:
    """Client -> what it uploaded last, of the clients that ever took part."""
    found = {}
    store = StateStore(session.hosting.states)
    for client, label in session.cohorts.accepted.items():
        found[client] = unflatten(store.load(client, label))["previous"]
    return found


def analyse(folder: Path) -> list[dict[str, object]]:
    """One record a modality and temperature."""
    experiment = Experiment.load(folder / "config.yaml")
    session = Session(experiment, RunFolder.existing(folder), "")
    session.attach(LocalEngine(session.hosting.here()))
    session.loop().checkpoints.restore()
    known = session.server.represent_public()
    sent = uploads(session)
    several = {info.id for info in session.server.clients if len(info.modalities) > 1}
    records: list[dict[str, object]] = []
    size = len(session.server.public_set)
    rows = torch.zeros(size, dtype=torch.bool)
    rows[torch.randperm(size, generator=generator(0, "rows"))[:ROWS]] = True
    for modality in known:
        (other,) = [name for name in known if name != modality]
        owners = [client for client, values in sent.items() if modality in values]
        share = sum(client in several for client in owners) / len(owners)
        for tau in TEMPERATURES:
            scores = [
                GCA(tau=tau).log_weights(Evidence(sent[client][modality], modality, {other: known[other]}, 1, 1))[rows]
                for client in owners
            ]
            weights = torch.stack(scores).softmax(0)
            entropy = -(weights * weights.clamp_min(1e-30).log()).sum(0).mean()
            paired = sum(float(weights[row].mean()) for row, client in enumerate(owners) if client in several)
            records.append(
                {"run": folder.name, "modality": modality, "tau": tau, "clients": len(owners)}
                | {"effective_clients": round(float(entropy.exp()), 2)}
                | {"largest_weight": round(float(weights.amax(0).mean()), 3)}
                | {"weight_of_paired": round(paired, 3), "share_of_paired": round(share, 3)}
            )
    return records


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for record in analyse(Path(name)):
            print(json.dumps(record))
