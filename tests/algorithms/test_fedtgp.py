"""FedTGP: the server's training by hand, classes that come and go, bytes, resuming, separation, learning."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyfed.aggregation.prototypes import ClassMeans, GlobalPrototypes, by_space
from polyfed.algorithms.fedtgp import FedTGP
from polyfed.core.randomness import generator
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from prototype_sessions import SPACE, began, play
from sessions import prepared, woken
from small_federations import classifiers, with_retrieval

CLASSES, D = 4, 3
FEW = {"server_epochs": 3, "server_lr": 0.1, "server_batch_size": 2}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return prepared(classifiers("fedtgp", **FEW), tmp_path / "session")


def sent(counts: list[int], seed: int) -> ClassMeans:
    present = torch.tensor(counts) > 0
    means = torch.randn(int(present.sum()), D, generator=torch.Generator().manual_seed(seed))
    return ClassMeans(means, torch.tensor(counts, dtype=torch.int32)[present], present)


def method_of(session: Session) -> FedTGP:
    found = session.experiment.algorithm
    assert isinstance(found, FedTGP)
    return found


# ---- by hand


def trained_by_loops(session: Session, clients: list[ClassMeans], weights: dict[str, Tensor], seen: list[int]) -> None:
    """``FEW`` epochs of plain gradient descent on the formula, in place, in float64."""
    pairs = [
        (row, label)
        for one in clients
        for row, label in zip(one.means.double(), one.present.nonzero().flatten().tolist(), strict=True)
    ]
    margin = margin_by_loops(pairs)
    clock = session.server.clock
    for epoch in range(3):
        stream = generator(clock.seed, clock.round, "server", f"prototypes-x-{epoch}")
        order = torch.randperm(len(pairs), generator=stream).tolist()
        for start in range(0, len(order), 2):
            chosen = order[start : start + 2]
            values = [value.requires_grad_() for value in weights.values()]
            made = made_by_hand(weights)
            losses = []
            for row, label in (pairs[k] for k in chosen):
                gaps = {c: (row - made[c]).square().sum().sqrt() + (margin if c == label else 0) for c in seen}
                losses.append(-((-gaps[label]).exp() / sum((-gap).exp() for gap in gaps.values())).log())
            gradients = torch.autograd.grad(sum(losses) / len(losses), values)
            for name, gradient in zip(list(weights), gradients, strict=True):
                weights[name] = weights[name].detach() - 0.1 * gradient


def made_by_hand(weights: dict[str, Tensor]) -> list[Tensor]:
    found = []
    for vector in weights["vectors"]:
        hidden = (weights["layers.0.weight"] @ vector + weights["layers.0.bias"]).clamp_min(0)
        found.append(weights["layers.2.weight"] @ hidden + weights["layers.2.bias"])
    return found


def margin_by_loops(pairs: list[tuple[Tensor, int]]) -> float:
    means = {}
    for label in {label for _, label in pairs}:
        rows = [row for row, own in pairs if own == label]
        means[label] = (sum(rows) / len(rows)).tolist()
    gaps = [min(math.dist(a, b) for other, b in means.items() if other != label) for label, a in means.items()]
    return min(max(gaps), 100.0)


def test_two_rounds_of_the_server_equal_plain_loops(session: Session) -> None:
    """In the second one class is new, and one that is known is nobody's."""
    method, server = method_of(session), session.server
    rounds = [[sent([3, 0, 1, 0], 1), sent([1, 2, 0, 0], 2)], [sent([0, 5, 2, 1], 3), sent([0, 1, 0, 4], 4)]]
    known: GlobalPrototypes | None = None
    weights: dict[str, Tensor] = {}
    for number, (clients, seen) in enumerate(zip(rounds, [[0, 1, 2], [0, 1, 2, 3]], strict=True), 1):
        server.begin(number)
        start = method.generator(server, "x", CLASSES, D).state_dict()
        weights = weights or {name: value.double() for name, value in start.items()}
        trained_by_loops(session, clients, weights, seen)
        known = method.learn(server, "x", clients, known)
        assert known.present.nonzero().flatten().tolist() == seen
        expected = torch.stack([made_by_hand(weights)[label] for label in seen]).detach()
        assert torch.allclose(known.means.double(), expected, atol=1e-6)
        for name, value in weights.items():
            assert torch.allclose(server.state["generator"][f"x.{name}"].double(), value, atol=1e-6)
        assert not known.means.requires_grad


def test_clients_do_as_in_fedproto(tmp_path: Path) -> None:
    """Before they have prototypes, to the bit; the server then tells them others."""
    ours, averaging = began(classifiers("fedtgp", **FEW), tmp_path / "a"), began(classifiers(), tmp_path / "b")
    for name in ("image", "text-0", "text-1"):
        a, b = (woken(one, name, (2, 0), after=(1, 0)).model.state_dict() for one in (ours, averaging))
        assert all(torch.equal(value, b[key]) for key, value in a.items())
    trained, mean = (by_space(one.server.state["prototypes"], GlobalPrototypes)[SPACE] for one in (ours, averaging))
    assert torch.equal(trained.present, mean.present)
    assert not torch.allclose(trained.means, mean.means)


def test_classes_that_nobody_sent_are_neither_rivals_nor_broadcast(session: Session) -> None:
    method, server = method_of(session), session.server
    before = method.generator(server, "x", CLASSES, D).vectors.detach().clone()
    known = method.learn(server, "x", [sent([1, 1, 0, 0], 1)], None)
    after = method.generator(server, "x", CLASSES, D).vectors.detach()
    assert known.means.shape == (2, D)
    assert [bool(moved) for moved in (before != after).any(1)] == [True, True, False, False]


def test_one_class_alone_is_left_where_it_is(session: Session) -> None:
    method, server = method_of(session), session.server
    before = method.generator(server, "x", CLASSES, D)().detach()
    known = method.learn(server, "x", [sent([0, 0, 7, 0], 1)], None)
    assert torch.allclose(known.means, before[2:3])


def test_spaces_have_generators_of_their_own(session: Session) -> None:
    method, server = method_of(session), session.server
    method.learn(server, "x", [sent([1, 1, 0, 0], 1)], None)
    first = {name: value.clone() for name, value in server.state["generator"].items()}
    method.learn(server, "x.y", [sent([1, 1, 0, 0], 1)], None)
    assert all(torch.equal(server.state["generator"][name], value) for name, value in first.items())
    assert len(server.state["generator"]) == 2 * len(first)
    assert not torch.equal(server.state["generator"]["x.vectors"], server.state["generator"]["x.y.vectors"])


def test_the_order_of_clients_matters_no_more_than_that_of_batches(session: Session) -> None:
    """In one batch of everybody it does not matter at all."""
    method = method_of(session).model_copy(update={"server_batch_size": 100})
    clients, found = [sent([3, 0, 1, 0], 1), sent([1, 2, 0, 0], 2)], []
    for ordered in (clients, clients[::-1]):
        session.server.state = {}
        found.append(method.learn(session.server, "x", ordered, None).means)
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_trained_prototypes_are_farther_apart_than_means(session: Session, seed: int) -> None:
    """What the method is for: noise of the clients draws means together; the margin drives prototypes apart."""
    stream = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, D, generator=stream)
    noisy = [centres + 1.5 * torch.randn(CLASSES, D, generator=stream) for _ in range(6)]
    whole, counts = torch.ones(CLASSES, dtype=torch.bool), torch.ones(CLASSES, dtype=torch.int32)
    apart = {"mean": float(torch.pdist(torch.stack(noisy).mean(0)).mean())}
    for threshold in (100.0, 0.0):
        update = {"server_epochs": 100, "server_batch_size": 10, "margin_threshold": threshold}
        session.server.state = {}
        clients = [ClassMeans(rows, counts, whole) for rows in noisy]
        made = method_of(session).model_copy(update=update).learn(session.server, "x", clients, None)
        apart[str(threshold)] = float(torch.pdist(made.means).mean())
    assert apart["100.0"] > max(apart["0.0"], apart["mean"])


# ---- whole runs


def test_the_ledger_has_the_bytes_of_fedproto(tmp_path: Path) -> None:
    lines = []
    for name, more in (("fedproto", {}), ("fedtgp", FEW)):
        session, ledger = prepared(with_retrieval(classifiers(name, **more)), tmp_path / name), Ledger()
        for number in (1, 2):
            play(session, number, ledger)
        lines.append([line for line in ledger.records if line["kind"] != "framing"])
    assert lines[0] == lines[1]
    assert sum(line["bytes"] for line in lines[0]) > 0
