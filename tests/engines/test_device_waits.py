"""How often a round waits for the device, and its number of operators over that of a plain loop.

Seconds of a GPU cannot be measured here, but each of these can be counted: a value that is fetched stops the device's
queue, and an operator costs a launch. ``numpy`` is not among the fetches, as it fails for tensors of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from grids import mostly_slow
from polyfed.core.randomness import generator
from polyfed.models.model import Model
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import prepared
from small_federations import Config, experiment, group, plain, resnet, scenes

CLIENTS, SAMPLES, BATCH = 4, 16, 8
WAITS = 5
"""Most fetches of a client."""
OPERATORS = 1.25
"""Most operators of a client, in those of a plain loop."""
FETCHES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")


class Watch(TorchDispatchMode):
    """Counts operators and fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.fetches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.fetches += func._schema.name in FETCHES
        return func(*args, **(kwargs or {}))

    def counted(self, work: Callable[[], object]) -> Watch:
        with pytest.MonkeyPatch.context() as patch, self:
            for name in ("tolist", "cpu"):  # which reach no operator on the CPU
                patch.setattr(Tensor, name, self._noting(getattr(Tensor, name)))
            work()
        return self

    def _noting(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **more: Any) -> Any:
            self.fetches += 1
            return fetch(*args, **more)

        return noted


def config(depth: int, algorithm: Config, **sections: Any) -> Config:
    encoder = resnet() | {"widths": [4] * 4, "depths": [depth] * 4}
    data = {"noise": scenes(CLIENTS * SAMPLES, 8, 8)}
    clients = group(CLIENTS, "noise", {"image": encoder}, plain(0.05, BATCH), dim=8)
    return experiment("waits", data, algorithm, clients={"image": clients}, **sections)


def plain_loop(session: Session, model: Model) -> None:
    """FedAvg's clients in a plain loop, with the operators that an optimiser runs on a device."""
    (head,), mean = model.heads.values(), list[Tensor]()
    live, start = [*model.exchanged(live=True).values()], [*session.server.weights["image"].values()]
    floating = [value.data for value in live if value.is_floating_point()]
    for number, member in enumerate(session.federation.members.values()):
        samples = session.federation.train(member)
        with torch.no_grad():
            torch._foreach_copy_(live, start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)
        model.train()
        for batch in samples.batches(BATCH, generator(0)):
            loss = F.cross_entropy(head(model.encoders["image"](batch.inputs["image"])), batch.targets["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if mean:
            torch._foreach_lerp_(mean, floating, 1 / (number + 1))
        else:
            mean = [value.clone() for value in floating]


def counts(tmp_path: Path, settings: Config) -> tuple[float, float, float, int]:
    """Fetches and operators of a client in the second round, operators of a plain loop, and tensors of the model."""
    session = prepared(settings, tmp_path)
    method = session.experiment.algorithm
    method.round(session.server, session.cohort(1, Ledger()))
    session.server.begin(2)
    cohort = session.cohort(2, Ledger())
    ours = Watch().counted(lambda: method.round(session.server, cohort))
    assert len(cohort.clients) == CLIENTS
    model = session.federation.client_model(next(iter(session.federation.members.values())))
    loop = Watch().counted(lambda: plain_loop(session, model))
    (weights,) = session.server.weights.values()
    return ours.fetches / CLIENTS, ours.operators / CLIENTS, loop.operators / CLIENTS, len(weights)


FEDAVG = {"name": "fedavg", "local_epochs": 1}


ALIKE: list[Any] = [(FEDAVG, {}), (FEDAVG, {"aggregation": {"clip": {}}}), (FEDAVG | {"name": "fedprox"}, {})]


@pytest.mark.parametrize(("algorithm", "sections"), mostly_slow(ALIKE, ALIKE[0]))
def test_a_client_waits_a_few_times_and_adds_few_operators(tmp_path: Path, algorithm: Config, sections: Config) -> None:
    shallow = counts(tmp_path / "shallow", config(2, algorithm, **sections))
    deep = counts(tmp_path / "deep", config(4, algorithm, **sections))
    assert deep[3] > 1.7 * shallow[3] > 200
    for fetches, operators, plain_operators, _ in (shallow, deep):
        assert fetches <= WAITS
        assert operators <= OPERATORS * plain_operators
    assert deep[0] == shallow[0]
    # an alias of each tensor of a reply, and once per round the copy with which a mean begins
    added = (deep[1] - deep[2]) - (shallow[1] - shallow[2])
    assert added <= 1.25 * (deep[3] - shallow[3])


def test_a_reply_is_fetched_from_once_and_a_broadcast_once_for_all(tmp_path: Path) -> None:
    assert counts(tmp_path / "run", config(1, FEDAVG))[0] == (CLIENTS + 1) / CLIENTS


def test_figures_of_moves_are_fetched_once_per_round(tmp_path: Path) -> None:
    settings = config(1, FEDAVG)
    settings["server"] = {key: settings["clients"]["image"][key] for key in ("source", "model", "task", "training")}
    assert counts(tmp_path / "run", settings)[0] == (CLIENTS + 2) / CLIENTS


def test_no_batch_waits_for_the_device(tmp_path: Path) -> None:
    settings = config(1, FEDAVG)
    few = counts(tmp_path / "few", settings)
    settings["clients"]["image"]["training"]["batch_size"] = BATCH // 2
    many = counts(tmp_path / "many", settings)
    assert many[1] > 1.5 * few[1]
    assert many[0] == few[0]


def test_no_batch_of_an_evaluation_waits_for_the_device(tmp_path: Path) -> None:
    fetches = []
    for size in (4, 16):
        settings = config(1, FEDAVG)
        settings["run"]["evaluation_batch"] = size
        session = prepared(settings, tmp_path / str(size))
        cohort, method = session.cohort(1, Ledger()), session.experiment.algorithm
        fetches.append(Watch().counted(partial(method.evaluate_clients, session.server, cohort)).fetches)
    assert fetches[0] == fetches[1]
