"""FedMD: a round by hand in both forms, what is exchanged, the first round, refusals, agreement."""

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
from polyfed.runs.config_files import merged
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload
from sessions import prepared, round_records, taught, watched, woken
from small_federations import Config, one_classification, three_kinds

CLIENTS = ("image", "text", "paired-0", "paired-1")
RATE = 0.05
FORMS = ("representations", "scores")


def federation(exchange: str, **algorithm: Any) -> Config:
    """Three kinds of clients; with scores they and the server tell the same classes."""
    config = three_kinds(**merged({"name": "fedmd", "public": {"form": exchange}}, algorithm))
    return one_classification(config) if exchange == "scores" else config


def session_of(folder: Path, exchange: str, **algorithm: Any) -> Session:
    return prepared(federation(exchange, **algorithm), folder)


# ---- a round by hand


def told(session: Session, model: Model, head: str, samples: Any, exchange: str, index: Tensor) -> dict[str, Tensor]:
    """What a model says of samples."""
    x = samples.batch(index).inputs
    if exchange == "representations":
        return {name: F.normalize(model.embed(name, values)) for name, values in x.items()}
    scores = model.heads[head](sum(model.embed(name, values) for name, values in x.items()) / len(x))
    return {"label": scores - scores.mean(1, keepdim=True)}


def consensus(session: Session, exchange: str) -> dict[str, Tensor]:
    """The plain mean over clients, in doubles, of what untrained clients say."""
    found: dict[str, list[Tensor]] = {}
    for name in CLIENTS:
        member = session.federation.members[name]
        model, samples = session.federation.client_model(member).eval(), woken(session, name).public_set
        with torch.no_grad():
            said = told(session, model, member.head, samples, exchange, torch.arange(len(samples)))
        for channel, values in said.items():
            found.setdefault(channel, []).append(values.double())
    return {channel: (sum(values) / len(values)).float() for channel, values in found.items()}


def learnt(session: Session, name: str, agreed: dict[str, Tensor], exchange: str) -> Model:
    """Digest and revisit in plain loops, with one descent by gradients."""
    settings, member = session.experiment.algorithm, session.federation.members[name]
    model, client = session.federation.client_model(member).train(), woken(session, name)
    task, samples = member.settings.task, client.public_set
    with isolated(0, 1, name, "learn", 1):
        for epoch in range(settings.digest.epochs):
            for batch in client.public_batches(f"digest-{epoch}", settings.digest.batch_size):
                own = told(session, model, member.head, samples, exchange, batch.index)
                descend(model, sum((own[key] - agreed[key][batch.index]).abs().mean() for key in own), RATE)
        for epoch in range(settings.local_epochs):
            for batch in client.batches(client.train, f"task-{epoch}"):
                head = model.heads[member.head]
                descend(model, task.loss(model, head, batch), RATE)
    return model


@pytest.mark.parametrize("exchange", FORMS)
def test_a_round_equals_plain_loops(tmp_path: Path, exchange: str) -> None:
    session = session_of(tmp_path, exchange, digest={"epochs": 2, "batch_size": 10})
    targets = taught(session)
    agreed = consensus(session, exchange)
    assert targets.keys() == agreed.keys() == ({"label"} if exchange == "scores" else {"image", "text"})
    for channel, values in agreed.items():
        torch.testing.assert_close(targets[channel].values, values, atol=1e-6, rtol=1e-5)
        assert bool(targets[channel].valid.all())
    for name in CLIENTS[:3]:
        expected = learnt(session, name, agreed, exchange).state_dict()
        found = as_left(session, name).model.state_dict()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=2e-6, rtol=1e-5, msg=f"{name} {key}")


@pytest.mark.parametrize("exchange", FORMS)
def test_the_server_distils_the_same_consensus(tmp_path: Path, exchange: str) -> None:
    session = session_of(tmp_path, exchange, task=None, distiller={"epochs": 8})
    play(session, 1, 1)
    metrics = {key: value for record in round_records(session) for key, value in record["metrics"].items()}
    channels = ["label"] if exchange == "scores" else ["image", "text"]
    for channel in channels:
        assert metrics[f"kd_distance_after.{channel}"] < 0.97 * metrics[f"kd_distance_before.{channel}"]
    senders = {"label": 4.0, "image": 3.0, "text": 3.0}
    assert {channel: metrics[f"senders.{channel}"] for channel in channels} == {k: senders[k] for k in channels}


@pytest.mark.slow
@pytest.mark.parametrize("exchange", FORMS)
def test_a_digest_makes_clients_agree(tmp_path: Path, exchange: str) -> None:
    """The distance between two clients' opinions of the public set, with and without it."""
    apart = {}
    for epochs in (0, 8):
        digest = {"epochs": epochs, "batch_size": 4, "loss": "l2"} if epochs else None
        session = session_of(tmp_path / str(epochs), exchange, digest=digest)
        play(session, 1, 2)
        form, said = session.experiment.algorithm.public.kind, []
        for name in ("image", "paired-0"):
            client = as_left(session, name)
            said.append(next(iter(form.of(client, client.public_set).values())))
        apart[epochs] = float((said[0] - said[1]).norm(dim=1).mean())
    assert apart[8] < 0.8 * apart[0]


# ---- what crosses


@pytest.mark.parametrize("exchange", FORMS)
def test_public_samples_are_drawn_alike_by_all_and_anew_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    session = session_of(tmp_path, exchange, public={"samples": 6})
    seen = watched(session, monkeypatch)
    drawn, orders, pictures = [], [], list[int]()
    for number in (1, 2, 3):
        session.server.begin(number)
        index = session.server.exchanged_index(6)
        assert len(index.unique()) == 6
        assert torch.equal(index, index.sort().values)
        own = session.server.exchanged(6)
        for name in CLIENTS:
            client = woken(session, name, (number, 0))
            assert torch.equal(client.exchanged_index(6), index)
            assert torch.equal(client.exchanged(6).items, own.items)
        drawn.append(tuple(index.tolist()))
        orders.append(session.server.order(6))
        pictures.append(len(set(own.items.tolist())))
    assert len(set(drawn)) == len(set(orders)) == 3
    assert min(pictures[:2]) < 6  # both captions of one picture were drawn
    play(session, 1, 2)
    for request, answer in seen:
        is_told = request.step == "tell"
        assert answer.payload is not None, answer.failure
        rows = answer.payload.fields["knowledge"] if is_told else request.payload.fields["consensus"]
        for name, values in rows.items():
            once = is_told and name == "image"  # a consensus may differ between captions of one picture
            assert len(values) == (pictures[request.round - 1] if once else 6)
        assert rows.order == orders[request.round - 1]


def test_a_modality_that_the_server_lacks_is_not_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = federation("representations")
    server = config["server"]["model"]
    task = {"name": "classification", "target": "label"}
    config["server"] |= {"model": server | {"encoders": {"image": server["encoders"]["image"]}}, "task": task}
    session = prepared(config, tmp_path)
    seen = watched(session, monkeypatch)
    play(session, 1, 1)
    sent = {r.client: tuple(a.payload.fields["knowledge"]) for r, a in seen if r.step == "tell" and a.payload}
    assert sent == {"image": ("image",), "text": (), "paired-0": ("image",), "paired-1": ("image",)}
    assert set(session.cohorts.accepted.values()) == {(1, 1)}


def test_where_nobody_counts_there_is_no_consensus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = federation("representations", teacher={"weights": "paired_only"})
    del config["clients"]["paired"]
    session = prepared(config, tmp_path)
    seen = watched(session, monkeypatch)
    play(session, 1, 1)
    assert [len(request.payload.fields["consensus"]) for request, _ in seen if request.step == "learn"] == [0, 0]


# ---- refusals and options


def test_loud_clients_are_bounded_in_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, "scores", public={"largest_score": 2.0})
    said: list[Tensor] = []

    def shout(request: Request, answer: Answer) -> Answer:
        if answer.payload is None or "knowledge" not in answer.payload.fields:
            return answer
        knowledge = answer.payload.fields["knowledge"]
        said.append((50.0 if answer.client == "image" else 1.0) * knowledge["label"])
        changed = type(knowledge)({"label": said[-1]}, order=knowledge.order)
        return Answer(answer.client, Payload(answer.payload.fields | {"knowledge": changed}))

    watched(session, monkeypatch, shout)
    targets = taught(session)
    expected = torch.zeros_like(said[0], dtype=torch.float64)
    for values in said:
        for k, row in enumerate(values.double()):
            expected[k] += row * min(1.0, 2.0 / float(row.norm())) / len(said)
    assert float(said[0].norm(dim=1).min()) > 2.0
    torch.testing.assert_close(targets["label"].values, expected.float(), atol=1e-6, rtol=1e-5)
