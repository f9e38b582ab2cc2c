"""FedET: consensus and dissent, weights by type, the shared head and bounded updates by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import divergence, unit
from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.fedet import ClientOutput, ConsensusTarget, answers, limited
from polyfed.algorithms.shared.teacher import Ensembles
from polyfed.core.randomness import generator
from polyfed.runs.session import Session
from polyfed.wire.payload import Payload, Representations
from sessions import first_cohort, metrics, of_samples, prepared, request, site_of
from small_federations import Config, participants


def session_of(tiny: Config, folder: Path, *, classified: bool = False, **algorithm: Any) -> tuple[Session, Any]:
    """A large server, small image clients of two types, and paired ones; ``classified``: one head for all."""
    config = copy.deepcopy(tiny)
    config["server"]["model"] = copy.deepcopy(config["server"]["model"])
    config["server"]["model"]["encoders"]["image"]["widths"] = [16, 16]
    other = copy.deepcopy(config["clients"]["image"])
    other["model"]["encoders"]["image"]["widths"] = [4, 8]
    config["clients"]["other"] = other
    if classified:  # all on one source: the server has the same head
        config["server"] |= {"source": "private"}
        del config["clients"]["paired"]
        other["count"] = 2
        for participant in participants(config):
            participant["task"] = "classification"
    session = prepared(config | {"algorithm": {"name": "fedet", "local_epochs": 1} | algorithm}, folder)
    return session, session.experiment.algorithm


def asked(session: Session, exchange: Ensembles, client: str) -> dict[str, Any]:
    """A client's reply in round 1."""
    (info,) = (info for info in session.server.clients if info.id == client)
    weights, channels = session.server.weights_for(info), exchange.wanted.of(info)
    payload = Payload({"weights": weights, "order": exchange.order, "channels": channels})
    reply = site_of(session).handle(request(client, payload)).fields
    return dict(reply) | {"knowledge": of_samples(session, reply["knowledge"])}


def exchange_of(session: Session, method: Any, **outputs: Tensor) -> Ensembles:
    """An exchange in which the server has these representations."""
    exchange = method.exchange(session.server)
    exchange.outputs = Representations(outputs, order=exchange.order)
    return exchange


# ---- consensus and dissent


def answer_of(values: list[Tensor], anchors: Tensor, k: int) -> tuple[list[float], list[int]]:
    """Variance and answer of each client on one sample."""
    rows = [anchors @ F.normalize(value[k], dim=0) for value in values]
    return [float(row.var(correction=0)) for row in rows], [int(row.argmax()) for row in rows]


def test_consensus_and_dissent_equal_plain_loops(tiny: Config, tmp_path: Path) -> None:
    tiny["public"]["per_item"] = 1  # captions of one image would tie
    session, method = session_of(tiny, tmp_path / "a", diversity=0.5)
    twin, _ = session_of(tiny, tmp_path / "b", diversity=0.5)
    exchange = method.exchange(session.server)
    target = method.targets(exchange, method.gathered(exchange, first_cohort(session)))["image"]
    replies = [asked(twin, exchange, info.id) for info in twin.server.clients]
    sent = [reply["knowledge"]["image"].double() for reply in replies if "image" in reply["knowledge"]]
    anchors = exchange.outputs["image"].double()
    assert len(sent) > 2
    differing = 0
    for k in range(len(target.consensus.values)):
        variances, classes = answer_of(sent, anchors, k)
        mean = sum(v / sum(variances) * value[k] for v, value in zip(variances, sent, strict=True))
        assert torch.allclose(target.consensus.values[k].double(), mean, atol=1e-5)
        (agreed,) = answer_of([mean[None]], anchors, 0)[1]
        away = [c for c, answer in enumerate(classes) if answer != agreed]
        assert bool(target.others.valid[k]) == bool(away)
        if away:
            share = sum(variances[c] for c in away)
            expected = sum(variances[c] / share * sent[c][k] for c in away)
            assert torch.allclose(target.others.values[k].double(), expected, atol=1e-5)
            differing += len(away) < len(sent)
    assert differing


def test_clients_that_agree_leave_no_dissent_and_their_order_does_not_matter(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path)
    known = unit(80, 8, seed=9)
    sent = [ClientOutput(name, unit(80, 8, seed=seed), float(seed)) for seed, name in enumerate("abc")]
    first, second = (
        method.targets(exchange_of(session, method, text=known), {"text": order})["text"]
        for order in (sent, sent[::-1])
    )
    assert torch.allclose(first.consensus.values, second.consensus.values, atol=1e-6)
    assert torch.allclose(first.others.values, second.others.values, atol=1e-6)
    alike = [one._replace(values=sent[0].values) for one in sent]
    target = method.targets(exchange_of(session, method, text=known), {"text": alike})["text"]
    assert not target.others.valid.any()
    assert metrics(session)["contradicted.text"] == 0.0
    silent = [ClientOutput("a", torch.zeros(80, 8), torch.zeros(80).log())]
    target = method.targets(exchange_of(session, method, text=known), {"text": silent})["text"]
    assert not target.consensus.valid.any()
    assert not target.others.valid.any()


def test_answers_among_distinct_anchors_are_those_among_the_anchors_of_all_samples() -> None:
    """An image among the anchors stands for each of its captions, without changing answers."""
    positions = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    draw = generator(3)
    anchors, rows = (F.normalize(torch.randn(count, 5, generator=draw), dim=1) for count in (4, 7))
    rows[1] = anchors[0]  # whose own anchor wins, among its two copies
    nearest = [max(range(4), key=lambda k, row=row: float(row @ anchors[k])) for row in rows]
    assert answers(rows, anchors, positions).tolist() == nearest
    assert positions[answers(rows, anchors[positions])].tolist() == nearest
    assert len(set(nearest)) > 1


@pytest.mark.parametrize("diversity", [0.0, 0.3])
def test_the_servers_loss_equals_a_plain_loop(tiny: Config, tmp_path: Path, diversity: float) -> None:
    session, method = session_of(tiny, tmp_path, diversity=diversity, **({"temperature": 0.4} if diversity else {}))
    server = session.server
    server.model.eval()
    known, targets = method.public.server_outputs(server), {}
    batch = server.public_set.batch(torch.tensor([4, 0, 33]))
    valid, differs = torch.ones(80, dtype=torch.bool), torch.zeros(80, dtype=torch.bool)
    valid[0], differs[33] = False, True  # one without a consensus, one that is contradicted
    for name, values in known.items():
        goal, others = (Ensembled(unit(*values.shape, seed=s), mask) for s, mask in ((1, valid), (2, differs)))
        targets[name] = ConsensusTarget(goal, others, known[name])
    loss = method.consensus_loss(server, batch, targets, method.distiller)
    total = 0.0
    for name, own in method.public.batch_outputs(server, server.model, batch, list(known)).items():
        own, (goal, others, anchors) = own.detach().double(), targets[name]
        total += sum(float((own[row] - goal.values[k].double()).norm()) / 2 for row, k in ((0, 4), (2, 33)))
        mine, theirs = (rows @ anchors.double().T for rows in (own[2][None], others.values[33][None].double()))
        total += diversity * float(divergence(mine, theirs, 0.4)) / 2
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    loss.backward()
    assert all(value.grad is not None for value in server.model.encoders["image"].parameters())


# ---- weights


def test_models_by_type_and_the_head_over_all(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path / "a", classified=True)
    twin, _ = session_of(tiny, tmp_path / "b", classified=True)
    server, exchange = session.server, method.exchange(session.server)
    sizes = {info.id: info.samples for info in server.clients}
    assert len(set(sizes.values())) > 1
    sent = {name: asked(twin, exchange, name)["weights"] for name in sizes}
    heads = {name for name in sent["image"] if name.startswith("heads.")}
    assert {type_name: set(method.shared(server, type_name)) for type_name in server.types} == dict.fromkeys(
        server.types, heads
    )
    method.gathered(exchange, first_cohort(session))
    for type_name, members in server.types.items():
        ids = [info.id for info in members.clients]
        full = sum(sizes[name] for name in ids)
        for name, value in server.weights[type_name].items():
            if value.is_floating_point():
                mean = sum(sizes[c] / full * sent[c][name].double() for c in ids)
                assert torch.allclose(value.double(), mean, atol=1e-6), name
    own = server.model.state_dict()
    for name in heads:
        mean = sum(size / sum(sizes.values()) * sent[c][name].double() for c, size in sizes.items())
        assert torch.allclose(own[name].double(), mean, atol=1e-6)


def test_the_types_receive_the_servers_head(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, classified=True)
    server = session.server

    def equal() -> set[bool]:
        own = server.model.state_dict()
        pairs = [(own[name], value) for model in server.weights.values() for name, value in model.items()
                 if name.startswith("heads.")]  # fmt: skip
        assert pairs
        return {torch.equal(*pair) for pair in pairs}

    assert equal() == {True}
    before = copy.deepcopy(server.weights)
    method.round(server, first_cohort(session))
    assert equal() == {True}
    for type_name, model in server.weights.items():
        assert any(
            not torch.equal(value, before[type_name][name]) for name, value in model.items() if "encoders" in name
        )


def test_heads_that_differ_stay_apart(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path)
    (paired,) = (type_name for type_name, members in session.server.types.items() if len(members.modalities) == 2)
    actual = {type_name: method.shared(session.server, type_name) for type_name in session.server.types}
    assert {type_name for type_name, names in actual.items() if names} == {paired}  # the loss of retrieval


@pytest.mark.parametrize("largest", [0.1, 0.5, 100.0])
def test_updates_are_bounded(largest: float) -> None:
    received = {"a": unit(3, 4, seed=1).double(), "b": 5 * unit(2, 4, seed=2).double(), "n": torch.tensor(3)}
    trained = {"a": unit(3, 4, seed=3).double(), "b": unit(2, 4, seed=4).double(), "n": torch.tensor(9)}
    actual = limited(received, trained, largest)
    flat = [torch.cat([model[name].flatten() for name in "ab"]) for model in (received, trained, actual)]
    change, bound = float((flat[1] - flat[0]).norm()), largest * float(flat[0].norm())
    assert torch.allclose(flat[2], flat[0] + min(1.0, bound / change) * (flat[1] - flat[0]), atol=1e-6)
    assert int(actual["n"]) == 9
    if largest == 100.0:
        assert torch.equal(flat[2], flat[1])


def test_one_wild_client_cannot_carry_its_type_away(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, classified=True, largest_update=0.01)
    server, before = session.server, copy.deepcopy(session.server.weights)
    method.gathered(method.exchange(server), first_cohort(session))
    for type_name, model in server.weights.items():
        names = [name for name, value in model.items() if value.is_floating_point()]
        change = torch.cat([(model[name] - before[type_name][name]).flatten() for name in names]).norm()
        assert (
            0 < float(change) <= 0.01 * float(torch.cat([before[type_name][n].flatten() for n in names]).norm()) + 1e-5
        )
