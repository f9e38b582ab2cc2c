"""FedAvg and FedProx: rounds by hand, the pull towards the received model, and lengths of moves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from by_hand import all_trained, assert_mean, copies, plain_training
from polyfed.algorithms.fedprox import FedProx
from polyfed.algorithms.shared.moves import Moves
from polyfed.data.samples import Batch
from polyfed.federation.filters import each
from polyfed.models.model import Model
from polyfed.runs.experiment import Experiment
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Weights
from sessions import first_cohort, prepared
from small_federations import Config, plain_sgd, transformers


def test_a_round_equals_a_plain_loop(tiny: Config, tmp_path: Path) -> None:
    session = prepared(plain_sgd(tiny), tmp_path)
    server = session.server
    start = copies(server.weights)
    session.experiment.algorithm.round(server, first_cohort(session))
    for type_name, members in server.types.items():
        trained = {info.id: plain_training(session, info.id, start[type_name]) for info in members.clients}
        assert_mean(server.weights[type_name], trained, {info.id: info.samples for info in members.clients})


def test_encoders_across_types_equal_a_plain_mean(tiny: Config, tmp_path: Path) -> None:
    tiny["algorithm"] |= {"averaging": {"name": "by_slot", "layers": "encoder", "range": "modality"}}
    session = prepared(plain_sgd(tiny), tmp_path)
    server = session.server
    start = copies(server.weights)
    session.experiment.algorithm.round(server, first_cohort(session))
    trained = all_trained(session, start)
    samples = {info.id: info.samples for info in server.clients}
    names = [name for name in start["image"] if name.startswith("encoders.image.") and "num_batches" not in name]
    assert names
    for type_name in ("paired", "image"):
        assert_mean({name: server.weights[type_name][name] for name in names}, trained, samples)
    heads = {name: value for name, value in server.weights["image"].items() if name.startswith("heads.")}
    assert_mean(heads, {"image": trained["image"]}, samples)


def test_replies_do_not_share_memory_with_the_resident_model(tiny: Config, tmp_path: Path) -> None:
    session = prepared(tiny, tmp_path)
    algorithm, server = session.experiment.algorithm, session.server
    replies = first_cohort(session).ask(algorithm.fit, weights=each(server.weights_for))
    paired = [reply.weights for reply in replies if reply.sender.group == "paired"]  # all held at once
    name = next(key for key in paired[0] if key.endswith("weight"))
    assert not torch.equal(paired[0][name], paired[1][name])


def test_local_training_sends_nothing_and_leaves_the_server_alone(tiny: Config, tmp_path: Path) -> None:
    tiny["algorithm"] = {"name": "local", "local_epochs": 2}
    result = polyfed.run(Experiment.parse(tiny), tmp_path / "run", quiet=True)
    assert all(line.kind == "framing" for line in result.records.transfers)
    series = list(result.records.series("server", "r1_sum").values())
    assert series == [series[0]] * 3
    assert set(result.records.clients) == {"paired-0", "paired-1", "image"}
    assert all(result.records.last(client) for client in result.records.clients)


@pytest.mark.parametrize("averaging", ["by_type", "by_slot", "by_name", {"name": "by_type", "mean": "sequential"}])
def test_no_reply_is_held_while_the_next_client_trains(tiny: Config, tmp_path: Path, averaging: Any) -> None:
    session = prepared(tiny | {"algorithm": {"name": "fedavg", "averaging": averaging}}, tmp_path)
    server, cohort, sent = session.server, first_cohort(session), list[weakref.ref[Tensor]]()

    def answered(request: Request) -> Answer:
        assert not any(one() is not None for one in sent)
        weights = {name: value + 1 for name, value in request.payload.bundles["weights"].items()}
        sent.append(weakref.ref(next(iter(weights.values()))))
        return Answer(request.client, Payload({"weights": Weights(weights), "num_examples": 3}))

    cohort.channel = replace(cohort.channel, exchange=lambda requests, deadline: map(answered, requests))
    session.experiment.algorithm.round(server, cohort)
    assert len(sent) == len(cohort.clients) > 2


# ---- FedProx


@pytest.fixture(params=["tiny", pytest.param("transformers", marks=pytest.mark.slow)])
def config(request: pytest.FixtureRequest, tiny: Config) -> Config:
    config = tiny if request.param == "tiny" else transformers()
    config["algorithm"] = {"name": "fedprox", "local_epochs": 1, "mu": 5.0}
    return config


def proximal(start: dict[str, Tensor], norm: str, mu: float) -> Callable[[Model, Batch], Tensor]:
    """mu / 2 x the sum over tensors of the norm of w - W, squared or not, to be differentiated by autograd."""

    def extra(model: Model, batch: Batch) -> Tensor:
        drifts = [value - start[name] for name, value in model.named_parameters()]
        return mu / 2 * sum((d.square().sum() if norm == "squared" else d.norm() for d in drifts), torch.zeros(()))

    return extra


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "mu"), [("squared", 20.0), ("plain", 2.0)])
def test_two_rounds_equal_a_plain_loop(
    config: Config, tmp_path: Path, norm: str, mu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["algorithm"] |= {"norm": norm, "mu": mu, "local_epochs": 2}
    # the norm of a drift near zero enlarges last bits, in which processors and convolutions of oneDNN differ
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    session = prepared(plain_sgd(config, batch_size=40), tmp_path)
    server = session.server
    for _ in range(2):  # of the same draws: clients keep nothing
        start = copies(server.weights)
        session.experiment.algorithm.round(server, first_cohort(session))
        for type_name, members in server.types.items():
            samples, plain = {info.id: info.samples for info in members.clients}, proximal(start[type_name], norm, 0.0)
            for extra, same in ((proximal(start[type_name], norm, mu), True), (plain, False)):
                trained = {
                    client: plain_training(session, client, start[type_name], epochs=2, extra=extra)
                    for client in samples
                }
                with nullcontext() if same else pytest.raises(AssertionError):  # the term matters
                    assert_mean(server.weights[type_name], trained, samples, 1e-4 if norm == "squared" else 2e-3)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1e3])
def test_the_pull_is_finite_and_that_of_the_norm(scale: float) -> None:
    drift = scale * torch.tensor([3.0, -4.0])
    assert torch.equal(FedProx().pull([drift])[0], drift)
    (pull,) = FedProx(norm="plain").pull([drift])
    assert torch.isfinite(pull).all()
    assert float(pull.norm()) == pytest.approx(0.0 if scale < 1e-20 else 0.5)


# ---- lengths of moves


START = {"w": torch.tensor([1.0, 1.0]), "steps": torch.tensor(3)}


@pytest.mark.parametrize(
    ("ends", "disagreement", "followed"),
    [
        ([[3.0, 4.0]] * 3, 0.0, 0.2),  # the server moves by 1 where each moves by 5
        ([[3.0, 4.0], [4.0, -3.0]], 2**0.5, 0.2),
        ([[3.0, 4.0], [-3.0, -4.0]], 2.0, 0.2),
        # squares of distances 2, 1 and 1, of lengths 1, 1 and 0
        ([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], ((2 + 1 + 1) / 3 / (2 / 3)) ** 0.5, (2 / 3) ** -0.5),
        ([[0.0, 0.0]], None, None),
    ],
)
def test_moves_by_hand(ends: list[list[float]], disagreement: float | None, followed: float | None) -> None:
    moves = Moves()
    for end in ends:
        moves.add({"w": START["w"] + torch.tensor(end), "steps": torch.tensor(9)}, START, compared=True)
    assert moves.disagreement().get("disagreement") == pytest.approx(disagreement, abs=1e-6)
    assert moves.followed({"w": torch.tensor([1.0, 2.0])}, START).get("followed") == pytest.approx(followed)
