"""Sites: what clients share in memory, and what they must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import copies
from polyfed.federation.membership import Member
from polyfed.federation.population import Population
from polyfed.models.model import Model
from polyfed.runs.session import Session
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, Weights
from sessions import prepared, request


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """Client models in the order of their building."""
    models: list[Model] = []
    honest = Population.client_model

    def noting(self: Population, member: Member) -> Model:
        models.append(honest(self, member))
        return models[-1]

    monkeypatch.setattr(Population, "client_model", noting)
    return models


@pytest.fixture
def session(tiny: dict[str, Any], tmp_path: Path) -> Session:
    tiny["clients"]["paired"]["count"] = 3
    return prepared(tiny, tmp_path / "run")


def requests(session: Session) -> list[Request]:
    clients = [client for client in session.server.clients if client.group == "paired"]
    return [request(client.id, Payload({"weights": session.server.weights_for(client)})) for client in clients]


def test_a_reply_is_not_touched_by_the_clients_after_it(session: Session, built: list[Model]) -> None:
    sent = requests(session)
    before = copies(session.server.weights)
    answers, then = [], []
    for answer in session.engine.exchange(sent, None):
        assert answer.payload is not None
        answers.append(answer.payload.bundles["weights"])
        then.append({name: value.clone() for name, value in answers[-1].items()})
    assert len(built) == 1
    assert not torch.equal(*(reply["encoders.image.project.weight"] for reply in answers[:2]))
    for reply, copy in zip(answers, then, strict=True):
        assert all(torch.equal(reply[name], value) for name, value in copy.items())
    for kind, model in before.items():
        assert all(torch.equal(session.server.weights[kind][name], value) for name, value in model.items())


def test_clients_give_the_same_after_any_others(session: Session) -> None:
    sent = requests(session)
    *_, after_others = session.engine.exchange(sent, None)
    (alone,) = session.engine.exchange(sent[-1:], None)
    assert alone.client == after_others.client
    ours, theirs = (answer.payload.bundles["weights"] for answer in (alone, after_others) if answer.payload)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_no_gradients_are_left_for_the_next_client(session: Session, built: list[Model]) -> None:
    list(session.engine.exchange(requests(session), None))
    (model,) = built
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("change", "message"), [("drop", "Missing key"), ("shape", "size mismatch")])
def test_weights_that_do_not_fit_are_named(session: Session, change: str, message: str) -> None:
    sent = requests(session)[0]
    weights = dict(sent.payload.bundles["weights"])
    name = "encoders.image.project.weight"
    if change == "drop":
        del weights[name]
    else:
        weights[name] = torch.zeros(2, 2)
    (answer,) = session.engine.exchange([request(sent.client, Payload({"weights": Weights(weights)}))], None)
    assert answer.failure is not None
    assert message in answer.failure.text
    assert name in answer.failure.text
    assert "Traceback" in answer.failure.details


def test_a_reply_is_not_touched_by_weights_that_do_not_fit(session: Session) -> None:
    first, second, _ = requests(session)
    (answer,) = session.engine.exchange([first], None)
    assert answer.payload is not None
    reply = answer.payload.bundles["weights"]
    before = {name: value.clone() for name, value in reply.items()}
    odd = {name: value + 1 for name, value in second.payload.bundles["weights"].items()} | {"odd": torch.zeros(1)}
    (refused,) = session.engine.exchange([request(second.client, Payload({"weights": Weights(odd)}))], None)
    assert refused.failure is not None
    assert all(torch.equal(reply[name], value) for name, value in before.items())


def test_clients_that_are_tested_on_the_same_items_share_them(session: Session) -> None:
    federation = session.federation
    first, second, third, image = federation.members.values()
    assert federation.test(first) is federation.test(second) is federation.test(third)
    assert federation.test(image) is not federation.test(first)
