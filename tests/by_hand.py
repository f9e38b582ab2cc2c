"""Local training written out as a plain loop, and what sessions are compared by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch
from polyfed.federation.client import Client
from polyfed.models.model import Model
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import woken

Weights = Mapping[str, Tensor]
RATE = 0.001


def play(session: Session, first: int, last: int) -> Session:
    """Rounds ``first`` to ``last`` of a prepared session, drawing what a run would draw."""
    for number in range(first, last + 1):
        session.server.begin(number)
        cohort = session.cohort(number, Ledger())
        with isolated(session.experiment.run.seed, number, "server"):
            session.experiment.algorithm.round(session.server, cohort)
    return session


def as_left(session: Session, client: str) -> Client:
    """A client after its last step."""
    return woken(session, client, (99, 0), after=session.cohorts.accepted[client])


def outcome(session: Session) -> dict[str, dict[str, Tensor]]:
    """The models of the server and of all clients that took part."""
    found = {}
    for name in session.cohorts.accepted:  # one at a time: clients of one architecture share a live model
        found |= copies({name: as_left(session, name).model.state_dict()})
    return found | (copies({"server": session.server.model.state_dict()}) if session.server.has_model else {})


def assert_learns_topics(session: Session, rounds: int = 6) -> None:
    """From near chance to twice as good, on texts that no client trains on; fails if a method does not train."""
    algorithm, server, accuracies = session.experiment.algorithm, session.server, []
    for number in range(1, rounds + 1):
        server.begin(number)
        cohort = session.cohort(number, Ledger())
        accuracies.append(algorithm.evaluate_clients(server, cohort)["text-0"]["accuracy"])
        algorithm.round(server, cohort)
    chance = 100 / 6
    assert accuracies[0] < 1.5 * chance
    assert accuracies[-1] > 2 * chance


def copies(models: Mapping[str, Weights]) -> dict[str, dict[str, Tensor]]:
    """Global models as they are now."""
    return {kind: {name: value.clone() for name, value in model.items()} for kind, model in models.items()}


def model_of(session: Session, client: str, weights: Weights) -> Model:
    """A client's model, of its own, with given weights."""
    model = session.federation.client_model(session.federation.members[client])
    model.load_state_dict(dict(weights))
    return model


def weights_of(model: Model) -> dict[str, Tensor]:
    """A model's tensors as they are now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def descend(
    model: Model, loss: Tensor, rate: float, correct: Callable[[str, Tensor], Tensor] = lambda name, gradient: gradient
) -> None:
    """w <- w - rate x gradient; ``correct`` gives the gradient to use, of a named parameter."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.grad is not None:
                value -= rate * correct(name, value.grad)


def plain_training(
    session: Session,
    client_id: str,
    start: Weights,
    *,
    epochs: int = 1,
    extra: Callable[[Model, Batch], Tensor | float] = lambda model, batch: 0.0,
    correct: Callable[[str, Tensor], Tensor] = lambda name, gradient: gradient,
    step: str = "fit",
) -> dict[str, Tensor]:
    """Weights of a client of ``plain_sgd`` after round 1: w <- w - lr x gradient of (task loss + extra), per batch.

    Args:
        session: prepared.
        client_id: of the client.
        start: the weights that it receives.
        epochs: passes.
        extra: a further loss of a batch.
        correct: gives the gradient to use, of a named parameter.
        step: name of the client step, for what it draws.
    """
    member, model = session.federation.members[client_id], model_of(session, client_id, start).train()
    client = woken(session, client_id)
    with isolated(0, 1, client_id, step, 0):  # dropout draws as the step's does
        for epoch in range(epochs):
            for batch in client.batches(session.federation.train(member), f"task-{epoch}"):
                head = model.heads[member.head] if member.head in model.heads else None
                descend(model, member.settings.task.loss(model, head, batch) + extra(model, batch), RATE, correct)
    return weights_of(model)


def all_trained(session: Session, start: Mapping[str, Weights], **more: Any) -> dict[str, dict[str, Tensor]]:
    """``plain_training`` of every client, from the global model of its type."""
    server = session.server
    return {info.id: plain_training(session, info.id, start[server.type_of(info)], **more) for info in server.clients}


def naive_gca(local: Tensor, partner: Tensor, tau: float = 1.0) -> Tensor:
    """Equations 4 to 6 of CreamFL, of [clients, rows, d] and [rows, d]."""
    result = torch.zeros_like(local[0])
    for k in range(len(partner)):
        scores = []
        for own in local[:, k]:
            logits = torch.stack([own @ other for other in partner]) / tau
            scores.append(logits[k] - torch.cat([logits[:k], logits[k + 1 :]]).exp().sum().log())
        result[k] = torch.stack(scores).softmax(0) @ local[:, k]
    return result


def naive_byol(encoder: Module, target: Module, predictor: Module, x: Tensor, *views: Tensor) -> Tensor:
    """BYOL of two views, the first of which is encoded as ``x``: 2 - 2 cos, each view against the other's target."""
    predictions = predictor(x), predictor(encoder(views[1]))
    with torch.no_grad():
        targets = [target(view) for view in views]
    losses = [
        sum(2 - 2 * (a @ b) / (a.norm() * b.norm()) for a, b in zip(*rows, strict=True)) / len(x)
        for rows in zip(predictions, reversed(targets), strict=True)
    ]
    return losses[0] + losses[1]


def assert_mean(
    found: Weights, trained: Mapping[str, Weights], shares: Mapping[str, float], tolerance: float = 1e-6
) -> None:
    """``found`` is the mean of the clients' floating tensors, weighted by ``shares``."""
    total = sum(shares[client] for client in trained)
    for name, value in found.items():
        if value.is_floating_point():
            mean = sum(shares[client] / total * weights[name].double() for client, weights in trained.items())
            assert torch.allclose(value.double(), mean, atol=tolerance), name


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_close(actual: Weights, expected: Weights, atol: float = 5e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


def furthest(a: Weights, b: Weights) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].is_floating_point())


def unit(*shape: int, seed: int = 0) -> Tensor:
    """Random rows of unit norm."""
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def divergence(student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """KL(softmax(teacher / tau) || softmax(student / tau)) of each row, in float64."""
    p, q = (torch.exp(rows.double() / tau) for rows in (teacher, student))
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    return (p * (p / q).log()).sum(1)
