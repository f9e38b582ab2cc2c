"""FedCola: a round by hand, complementary training, and the paper's costs to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from by_hand import RATE, copies, plain_training
from polyfed.core.randomness import isolated
from polyfed.federation.cohort import ReplyPolicy
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Cause, Request
from sessions import first_cohort, prepared, woken
from small_federations import Config, plain_sgd, transformers

Weights = dict[str, Tensor]


@pytest.fixture
def config() -> Config:
    return transformers(name="fedcola")


def gated_by_hand(session: Session, client_id: str, start: Weights, other: Weights) -> Weights:
    """SGD on W, g and W_out, with W + g W_out computed anew for every batch, then merged."""
    member = session.federation.members[client_id]
    model = session.federation.client_model(member).train()
    client = woken(session, client_id)
    layers = [name for name in start if ".blocks." in name and name.endswith("weight") and start[name].ndim == 2]
    own = {name: start[name].clone().requires_grad_() for name in start}
    outs = {name: other[name.split(".", 2)[2]].clone().requires_grad_() for name in layers}
    gates = {name: torch.zeros(1, requires_grad=True) for name in layers}
    leaves = [*own.values(), *outs.values(), *gates.values()]

    def merged() -> Weights:
        return {name: own[name] + gates[name] * outs[name] if name in outs else own[name] for name in own}

    with isolated(0, 1, client_id, "complemented_fit", 0):
        for batch in client.batches(session.federation.train(member), "task-0"):
            loss = functional_call(_Task(model, member), {f"model.{k}": v for k, v in merged().items()}, (batch,))
            actual = torch.autograd.grad(loss, leaves, allow_unused=True)
            with torch.no_grad():
                for leaf, gradient in zip(leaves, actual, strict=True):
                    if gradient is not None:
                        leaf -= RATE * gradient
    return {name: value.detach() for name, value in merged().items()}


class _Task(torch.nn.Module):
    def __init__(self, model: Any, member: Any) -> None:
        super().__init__()
        self.model, self.member = model, member

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = self.member.settings.task.loss(self.model, self.model.heads[self.member.head], batch)
        return loss


def test_a_round_equals_one_by_hand(config: Config, tmp_path: Path) -> None:
    session = prepared(plain_sgd(config), tmp_path)
    server = session.server
    start = copies(server.weights)
    session.experiment.algorithm.round(server, first_cohort(session))

    blocks = {
        type_name: {name.split(".", 2)[2]: value for name, value in start[type_name].items() if ".blocks." in name}
        for type_name in ("image", "text")
    }
    trained = {
        "image": gated_by_hand(session, "image", start["image"], blocks["text"]),
        "text-0": gated_by_hand(session, "text-0", start["text"], blocks["image"]),
        "text-1": gated_by_hand(session, "text-1", start["text"], blocks["image"]),
        "paired-0": plain_training(session, "paired-0", start["paired"], step="complemented_fit"),
        "paired-1": plain_training(session, "paired-1", start["paired"], step="complemented_fit"),
    }
    n = {info.id: info.samples for info in server.clients}
    sizes = {type_name: sum(n[info.id] for info in members.clients) for type_name, members in server.types.items()}
    updates = {
        type_name: {
            name: sum(
                n[i.id] / sizes[type_name] * (trained[i.id][name] - value).double()
                for i in server.types[type_name].clients
            )
            for name, value in start[type_name].items()
        }
        for type_name in start
    }
    v, t, p = (sizes[type_name] for type_name in ("image", "text", "paired"))
    full = {"image": v + p, "text": t + p, "paired": v + t + p}
    for type_name, weights in server.weights.items():
        for name, value in weights.items():
            if ".attention." in name:
                modality = name.split(".")[1]
                mixed = sizes[modality] * updates[modality][name] + p * updates["paired"][name]
                expected = start[type_name][name] + mixed / full[type_name]
            else:
                expected = start[type_name][name] + sizes[type_name] / full[type_name] * updates[type_name][name]
            assert torch.allclose(value.double(), expected.double(), atol=1e-6), (type_name, name)
            assert not torch.equal(value, start[type_name][name]) or "positions" in name, (type_name, name)


@pytest.mark.parametrize(("options", "matrices"), [({}, 4), ({"layers": "attention"}, 2), ({"layers": "mlp"}, 2)])
def test_uni_modal_clients_receive_the_other_types_matrices(
    config: Config, tmp_path: Path, options: Config, matrices: int
) -> None:
    config["algorithm"] |= {"complement": options}
    session = prepared(config, tmp_path)
    complement, server = session.experiment.algorithm.complement, session.server
    actual = complement.out_weights(server, "image")
    assert len(actual) == matrices
    assert all(torch.equal(value, server.weights["text"][f"encoders.text.{key}"]) for key, value in actual.items())
    assert len(complement.out_weights(server, "paired")) == 0


def test_the_released_first_round_gates_a_clients_own_weights(config: Config, tmp_path: Path) -> None:
    config["algorithm"] |= {"complement": {"first_out": "own"}}
    session = prepared(config, tmp_path)
    complement, server = session.experiment.algorithm.complement, session.server
    key, value = next(iter(complement.out_weights(server, "image").items()))
    assert torch.equal(value, server.weights["image"][f"encoders.image.{key}"])
    server.begin(2)
    assert torch.equal(complement.out_weights(server, "image")[key], server.weights["text"][f"encoders.text.{key}"])


# ---- costs


def downloads(config: Config, folder: Path) -> dict[str, int]:
    """Bytes of tensors that each client receives in round 1, after which all are gone: only what is sent counts."""
    session, ledger = prepared(config, folder), Ledger()

    def gone(request: Request) -> Answer:
        return Answer.failed(request.client, Cause.LOST, "gone")

    cohort = session.cohort(1, ledger)
    cohort.reply_policy = lambda step: ReplyPolicy(min_clients=0)
    cohort.channel = replace(cohort.channel, exchange=lambda requests, deadline: map(gone, requests))
    session.experiment.algorithm.round(session.server, cohort)
    actual: dict[str, int] = {}
    for line in ledger.records:
        if line["kind"] == "weights":
            actual[line["client"]] = actual.get(line["client"], 0) + line["bytes"]
    return actual


def paper_size(config: Config) -> Config:
    """One image and one text client of the paper's size: CIFAR-100, and AG_NEWS with BERT's vocabulary."""
    del config["server"], config["clients"]["paired"]
    image = {"name": "blocks", "size": "small", "view": {"name": "pixels", "size": 224}}
    tokens = {"name": "tokens", "length": 40, "tokenizer": {"name": "hashing", "size": 30_522}}
    text = {"name": "blocks", "size": "small", "view": tokens}
    for type_name, encoder, classes in (("image", image, 100), ("text", text, 6)):
        task = config["clients"][type_name]["task"] | {"classes": classes}
        group = config["clients"][type_name] | {"count": 1, "task": task}
        config["clients"][type_name] = group | {"model": {"dim": 384, "encoders": {type_name: encoder}}}
    for source in config["data"]["sources"].values():
        source |= {"train": 4, "validation": 4, "test": 4}
    return config


OWN = 21_704_164 * 4, 33_033_220 * 4
TWO_MORE_CLASSES = 2 * 385 * 4  # scenes have six topics, AG_NEWS four
BLOCKS, MLP, ATTENTION = 12 * 1_774_464 * 4, 12 * 1_181_568 * 4, 12 * 591_360 * 4


@pytest.mark.parametrize(
    ("options", "out", "mib"),
    [
        pytest.param(None, 0, 208.81, marks=pytest.mark.slow),
        ({"send": "modules"}, BLOCKS, 371.26),
        pytest.param({"send": "modules", "layers": "mlp"}, MLP, 316.98, marks=pytest.mark.slow),
        pytest.param({"send": "modules", "layers": "attention"}, ATTENTION, 262.95, marks=pytest.mark.slow),
    ],
)
def test_costs_are_the_papers_to_the_byte(
    config: Config, tmp_path: Path, options: Config | None, out: int, mib: float
) -> None:
    config["algorithm"] |= {"complement": options} | ({"averaging": "by_type"} if not out else {})
    actual = downloads(paper_size(config), tmp_path)
    actual["text"] -= TWO_MORE_CLASSES
    assert actual == {"image": OWN[0] + out, "text": OWN[1] + out}
    assert sum(actual.values()) / 2**20 == pytest.approx(mib, abs=0.01)
