"""FedAvg and LOCAL: two clients by hand, and what each must not do."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from by_hand import all_trained, assert_mean, copies, plain_training
from polyfed.federation.filters import each
from polyfed.runs.experiment import Experiment
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Weights
from sessions import first_cohort, prepared
from small_federations import Config, plain_sgd


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
