"""FedAvg, LOCAL and server-only: two clients by hand, and what each must not do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.errors import ConfigError
from polyfed.experiment import Experiment
from polyfed.federation.cohort import each
from polyfed.randomness import isolated
from polyfed.runner import run
from sessions import first_cohort, prepared, woken

Config = dict[str, Any]


def sgd(config: Config) -> Config:
    training = {"optimizer": {"kind": "sgd", "lr": 0.001, "momentum": 0.0, "clip": None}, "batch_size": 12}
    for group in config["clients"].values():
        group["training"] = training
    return config


def test_a_round_equals_a_plain_loop(tiny: Config, tmp_path: Path) -> None:
    session = prepared(sgd(tiny), tmp_path)
    server = session.server
    start = {name: value.clone() for name, value in server.weights.items()}
    session.experiment.algorithm.round(server, first_cohort(session))

    totals: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    for info in server.clients:
        member = session.federation.members[info.id]
        model = session.federation.client_model(member)
        model.load_state_dict({name: start[name] for name in model.state_dict()})
        model.train()
        client = woken(session, info.id)
        with isolated(0, 1, info.id, "fit", 0):  # dropout draws as the step's does
            for batch in client.batches(session.federation.train(member), "task-0", size=12):
                head = model.heads[member.head] if member.head in model.heads else None
                model.zero_grad()
                member.settings.task.loss(model, head, batch).backward()
                with torch.no_grad():
                    for value in model.parameters():
                        if value.grad is not None:
                            value -= 0.001 * value.grad
        for name, value in model.state_dict().items():
            totals[name] = totals.get(name, 0) + info.samples * value.double()
            counts[name] = counts.get(name, 0) + info.samples
    for name, total in totals.items():
        if total.is_floating_point() and "num_batches" not in name:
            assert torch.allclose(server.weights[name].double(), total / counts[name], atol=1e-6), name


def test_image_encoders_are_averaged_over_all_who_have_images(tiny: Config, tmp_path: Path) -> None:
    session = prepared(tiny, tmp_path)
    own = session.server.architectures
    shared = [name for name in session.server.weights if name.startswith("encoders.image")]
    assert shared
    assert all(all(name in names for names in own.values()) for name in shared)
    heads = {name for name in session.server.weights if name.startswith("heads.")}
    assert any("classification-private" in name for name in heads)


def test_the_server_model_shows_the_average(tiny: Config, tmp_path: Path) -> None:
    session = prepared(tiny, tmp_path)
    session.experiment.algorithm.round(session.server, first_cohort(session))
    for name, value in session.server.model.state_dict().items():
        assert torch.equal(value, session.server.weights[name])


def test_encoders_of_different_shape_cannot_be_averaged(tiny: Config, tmp_path: Path) -> None:
    tiny["clients"]["image"]["model"] = copy.deepcopy(tiny["clients"]["image"]["model"])
    tiny["clients"]["image"]["model"]["encoders"]["image"]["widths"] = [16, 8]
    with pytest.raises(ConfigError, match=r"equal shapes: 'encoders\.image\."):
        run(Experiment.parse(tiny), tmp_path / "run")


def test_replies_do_not_share_memory_with_the_resident_model(tiny: Config, tmp_path: Path) -> None:
    session = prepared(tiny, tmp_path)
    algorithm, server = session.experiment.algorithm, session.server
    cohort = first_cohort(session)
    replies = list(cohort.ask(algorithm.fit, weights=each(server.weights_for)))  # all held at once
    paired = [reply for reply in replies if reply.sender.group == "paired"]
    name = next(key for key in paired[0].weights if key.endswith("weight"))
    assert not torch.equal(paired[0].weights[name], paired[1].weights[name])


def test_messages_that_are_really_encoded_give_the_same_bits(tiny: Config, tmp_path: Path) -> None:
    plain = run(Experiment.parse(tiny), tmp_path / "a")
    wire = {"engine": {"name": "local", "serialize": True}}
    wired = run(Experiment.parse(tiny | {"run": tiny["run"] | wire}), tmp_path / "b")
    for name in ("metrics.jsonl", "ledger.jsonl", "models/last/model.safetensors"):
        assert (plain.folder / name).read_bytes() == (wired.folder / name).read_bytes()


def test_half_precision_transport_halves_the_bytes(tiny: Config, tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("float32", "float16"):
        config = tiny | {"run": tiny["run"] | {"transport": {"dtype": dtype}}}
        records = run(Experiment.parse(config), tmp_path / dtype).records
        sizes[dtype] = sum(line.bytes for line in records.transfers if line.kind == "weights")
    assert 0.5 <= sizes["float16"] / sizes["float32"] < 0.52  # integer buffers stay as they are


def test_local_training_sends_nothing_and_leaves_the_server_alone(tiny: Config, tmp_path: Path) -> None:
    tiny["algorithm"] = {"name": "local", "local_epochs": 2}
    result = run(Experiment.parse(tiny), tmp_path / "run")
    assert all(line.kind == "framing" for line in result.records.transfers)
    series = list(result.records.series("server", "r1_sum").values())
    assert series == [series[0]] * 3
    assert set(result.records.clients) == {"paired-0", "paired-1", "image"}
    assert all(result.records.last(client) for client in result.records.clients)


def test_server_only_asks_nobody(tiny: Config, tmp_path: Path) -> None:
    tiny["algorithm"] = "server_only"
    tiny["run"]["evaluate_clients"] = False
    result = run(Experiment.parse(tiny), tmp_path / "run")
    assert result.records.transfers == ()
    losses = list(result.records.series("server", "r1_sum", "validation").values())
    assert len(losses) == 3


def test_a_federation_without_server_model(tiny: Config, tmp_path: Path) -> None:
    del tiny["server"], tiny["public"], tiny["clients"]["paired"]
    tiny["clients"]["image"]["count"] = 2
    result = run(Experiment.parse(tiny), tmp_path / "run")
    assert result.records.last("image-0")["accuracy"] == result.records.last("image-1")["accuracy"]  # one global model
