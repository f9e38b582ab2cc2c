"""FedMD: a round by hand, and what is exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import as_left, descend, play
from polyfed.core.randomness import isolated
from polyfed.models.model import Model
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload
from sessions import metrics, of_samples, prepared, taught, watched, woken
from small_federations import three_kinds

CLIENTS = ("image", "text", "paired-0", "paired-1")
RATE = 0.05


def session_of(folder: Path, **algorithm: Any) -> Session:
    return prepared(three_kinds(name="fedmd", **algorithm), folder)


# ---- a round by hand


def represented(model: Model, samples: Any, index: Tensor) -> dict[str, Tensor]:
    return {name: F.normalize(model.embed(name, x)) for name, x in samples.batch(index).inputs.items()}


def consensus(session: Session) -> dict[str, Tensor]:
    """The plain mean over untrained clients, in doubles."""
    rows: dict[str, list[Tensor]] = {}
    for name in CLIENTS:
        model = session.federation.client_model(session.federation.members[name]).eval()
        samples = woken(session, name).public_set
        with torch.no_grad():
            for modality, values in represented(model, samples, torch.arange(len(samples))).items():
                rows.setdefault(modality, []).append(values.double())
    return {modality: (sum(values) / len(values)).float() for modality, values in rows.items()}


def learnt(session: Session, name: str, agreed: dict[str, Tensor]) -> Model:
    """Digest and revisit in plain loops, with one descent by gradients."""
    settings, member = session.experiment.algorithm, session.federation.members[name]
    model, client = session.federation.client_model(member).train(), woken(session, name)
    task, samples = member.settings.task, client.public_set
    with isolated(0, 1, name, "learn", 1):
        for epoch in range(settings.digest.epochs):
            for batch in client.public_batches(f"digest-{epoch}", settings.digest.batch_size):
                own = represented(model, samples, batch.index)
                descend(model, sum((own[key] - agreed[key][batch.index]).abs().mean() for key in own), RATE)
        for epoch in range(settings.local_epochs):
            for batch in client.batches(client.train, f"task-{epoch}"):
                descend(model, task.loss(model, model.heads[member.head], batch), RATE)
    return model


def test_a_round_equals_plain_loops(tmp_path: Path) -> None:
    session = session_of(tmp_path, digest={"epochs": 2, "batch_size": 10})
    targets, agreed = taught(session), consensus(session)
    assert targets.keys() == agreed.keys() == {"image", "text"}
    for modality, values in agreed.items():
        torch.testing.assert_close(targets[modality].values, values, atol=1e-6, rtol=1e-5)
        assert bool(targets[modality].valid.all())
    for name in CLIENTS[:3]:
        left, expected = as_left(session, name).model, learnt(session, name, agreed)
        torch.testing.assert_close(left.state_dict(), expected.state_dict(), atol=2e-6, rtol=1e-5)


def test_the_server_distils_the_same_consensus(tmp_path: Path) -> None:
    noted = metrics(play(session_of(tmp_path, task=None, distiller={"epochs": 8}), 1, 1))
    for modality in ("image", "text"):
        assert noted[f"kd_distance_after.{modality}"] < 0.97 * noted[f"kd_distance_before.{modality}"]
        assert noted[f"senders.{modality}"] == 3


# ---- what crosses


def test_public_samples_are_drawn_alike_by_all_and_anew_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(tmp_path, public={"samples": 6})
    seen = watched(session, monkeypatch)
    drawn, orders, images = [], [], list[int]()
    for number in (1, 2, 3):
        session.server.begin(number)
        index = session.server.exchanged_index(6)
        assert torch.equal(index, index.unique())
        own = session.server.exchanged(6)
        for name in CLIENTS:
            client = woken(session, name, (number, 0))
            assert torch.equal(client.exchanged_index(6), index)
            assert torch.equal(client.exchanged(6).items, own.items)
        drawn.append(tuple(index.tolist()))
        orders.append(session.server.order(6))
        images.append(len(set(own.items.tolist())))
    assert len(set(drawn)) == len(set(orders)) == 3
    assert min(images[:2]) < 6  # both captions of one image were drawn
    play(session, 1, 2)
    for request, answer in seen:
        is_reply = request.step == "tell"
        assert answer.payload is not None, answer.failure
        rows = answer.payload.fields["knowledge"] if is_reply else request.payload.fields["consensus"]
        for name, values in rows.items():
            once = is_reply and name == "image"  # a consensus may differ between captions of one image
            assert len(values) == (images[request.round - 1] if once else 6)
        assert rows.order == orders[request.round - 1]


def test_a_modality_that_the_server_lacks_is_not_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = three_kinds(name="fedmd")
    server = config["server"]["model"]
    task = {"name": "classification", "target": "label"}
    config["server"] |= {"model": server | {"encoders": {"image": server["encoders"]["image"]}}, "task": task}
    session = prepared(config, tmp_path)
    seen = watched(session, monkeypatch)
    play(session, 1, 1)
    sent = {r.client: tuple(a.payload.fields["knowledge"]) for r, a in seen if r.step == "tell" and a.payload}
    assert sent == {"image": ("image",), "text": (), "paired-0": ("image",), "paired-1": ("image",)}
    assert set(session.cohorts.accepted.values()) == {(1, 1)}


def test_without_counting_clients_no_consensus_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = three_kinds(name="fedmd", teacher={"weights": "paired_only"})
    del config["clients"]["paired"]
    session = prepared(config, tmp_path)
    seen = watched(session, monkeypatch)
    play(session, 1, 1)
    assert [len(request.payload.fields["consensus"]) for request, _ in seen if request.step == "learn"] == [0, 0]


def test_loud_clients_are_bounded_in_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, sent = session_of(tmp_path), list[Tensor]()

    def shout(request: Request, answer: Answer) -> Answer:
        if answer.payload is None or "image" not in answer.payload.fields.get("knowledge", ()):
            return answer
        rows = answer.payload.fields["knowledge"]
        louder = {name: (50.0 if answer.client == "image" else 1.0) * values for name, values in rows.items()}
        changed = type(rows)(louder, order=rows.order)
        sent.append(of_samples(session, changed)["image"])
        return Answer(answer.client, Payload(answer.payload.fields | {"knowledge": changed}))

    watched(session, monkeypatch, shout)
    targets = taught(session)
    mean = sum(F.normalize(values.double(), dim=1) for values in sent) / len(sent)
    assert len(sent) == 3
    torch.testing.assert_close(targets["image"].values.double(), mean, atol=1e-6, rtol=1e-5)
