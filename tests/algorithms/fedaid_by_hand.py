"""Both stages of FedAID and its losses written out as plain loops."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import torch
from aligned_sessions import RATE, Values, parts_of
from torch import Tensor, nn

from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch
from polyfed.models.model import Model
from polyfed.runs.session import Session
from sessions import woken


class Known:
    """Known representations, as a task receives them."""

    def __init__(self, values: Values) -> None:
        self.values = values

    def represent(self, modality: str, x: Tensor) -> Tensor:
        return self.values[modality]


@dataclass
class ByHand:
    """A client's two batches of a step, on a model that starts from given weights."""

    session: Session
    client: str
    start: Mapping[str, Tensor]
    number: int = 1
    model: Model = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.session.federation.client_model(self.session.federation.members[self.client])
        self.model.load_state_dict(dict(self.start))

    def batches(self, purpose: str = "task") -> Iterator[Batch]:
        own = woken(self.session, self.client, (self.number, 0))
        return islice(own.batches(own.train, f"{purpose}-0"), 2)

    def aligners(self) -> dict[str, nn.Module]:
        return {name: copy.deepcopy(encoder.aligner).train() for name, encoder in self.model.encoders.items()}

    def features(self, batch: Batch) -> dict[str, Any]:
        return {name: self.model.encoders[name].trunk(x) for name, x in batch.inputs.items()}

    def own(self, features: dict[str, Any]) -> Values:
        return seen({name: encoder.aligner for name, encoder in self.model.encoders.items()}, features)

    def task(self, values: Values, batch: Batch) -> Tensor:
        member = self.session.federation.members[self.client]
        loss: Tensor = member.settings.task.loss(Known(values), self.model.heads[member.head], batch)
        return loss

    def descend(self, loss: Tensor) -> None:
        self.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for value in self.model.parameters():
                if value.grad is not None:
                    value -= RATE * value.grad

    def result(self, names: Sequence[str] | None = None) -> Values:
        actual = self.model.state_dict()
        return {name: actual[name].detach().clone() for name in names or actual}


def seen(aligners: Mapping[str, nn.Module], features: dict[str, Any]) -> Values:
    """Unit vectors."""
    values = {name: aligners[name](actual) for name, actual in features.items()}
    return {name: value / value.norm(dim=1, keepdim=True) for name, value in values.items()}


def distance(z: Values, targets: Values, reduction: str) -> Tensor:
    total = torch.zeros(())
    for name in z:
        rows = [
            sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) for pair in zip(z[name], targets[name], strict=True)
        ]
        total = total + sum(rows) / {"sum": 1, "mean": len(rows), "element": z[name].numel()}[reduction]
    return total


def contrast(u: Tensor, v: Tensor, temperature: float, same: Sequence[int]) -> Tensor:
    """(CE(S) + CE(S^T)) / 2, of each row among itself and those whose number in ``same`` is another."""
    scores, total = u @ v.T / temperature, torch.zeros(())
    for side in (scores, scores.T):
        for i, row in enumerate(side):
            seen_by = [j for j in range(len(row)) if j == i or same[j] != same[i]]
            total = total + row[seen_by].logsumexp(0) - row[i]
    return total / (2 * len(u))


def same_in(session: Session, client: str, batch: Batch) -> list[int]:
    """Numbers shared by samples that are not negatives of each other in the client's task."""
    task = session.federation.members[client].settings.task
    return (batch.matches if task.mask_siblings else torch.arange(len(batch.matches))).tolist()


def guided(
    session: Session,
    client: str,
    start: Mapping[str, Tensor],
    *,
    guide: float = 1.0,
    alpha: float = 1.0,
    how: str = "sum",
    cut: bool = False,
) -> Values:
    """Stage 1: two steps on guide x L_guide + alpha x L_task; ``cut`` keeps gradient out of the anchors."""
    hand = ByHand(session, client, start)
    anchors = hand.aligners()
    hand.model.train()
    with isolated(0, 1, client, "guide", 0):
        for batch in hand.batches():
            features = hand.features(batch)
            z, targets = hand.own(features), seen(anchors, features)
            if cut:
                targets = {name: value.detach() for name, value in targets.items()}
            if how == "contrastive":
                same = same_in(session, client, batch)
                near = torch.stack([contrast(z[name], targets[name], 0.07, same) for name in z]).sum()
            else:
                near = distance(z, targets, how)
            hand.descend(guide * near + alpha * hand.task(z, batch))
    return hand.result()


def taught(
    session: Session,
    client: str,
    aggregated: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    *,
    beta: float = 2.0,
    weight: float = 1.0,
    how: str = "sum",
) -> Values:
    """Stage 2 from the aggregated model and the present teacher: the align modules that two steps give."""
    names = parts_of(session).aligner
    g = ByHand(session, client, aggregated).aligners()
    hand = ByHand(session, client, {**aggregated, **{name: teacher[name] for name in names}})
    still = copy.deepcopy(hand.model).eval()
    hand.model.train()
    with isolated(0, 1, client, "teach", 2):
        for batch in hand.batches("robust"):
            features = hand.features(batch)
            with torch.no_grad():
                undistorted = {name: still.encoders[name].trunk(x) for name, x in batch.inputs.items()}
            moved, kept = hand.own(features), hand.own(undistorted)
            loss = beta * distance(moved, kept, how) + hand.task(seen(g, features), batch)
            same = same_in(session, client, batch)
            pairs = [contrast(moved[a], moved[b], 0.07, same) for a, b in combinations(moved, 2)]
            hand.descend(loss + weight * torch.stack(pairs).sum())
    return hand.result([name for name in names if hand.model.state_dict()[name].is_floating_point()])


def without_statistics(values: Mapping[str, Tensor]) -> Values:
    """Without what batch norms count, which depends on the order of passes."""
    ends = ("running_mean", "running_var", "num_batches_tracked")
    return {name: value for name, value in values.items() if not name.endswith(ends)}


@torch.no_grad()
def loss_of(session: Session, client: str, weights: Mapping[str, Tensor]) -> float:
    """v: mean of L_task over whole batches of 12 of 30 drawn samples, in evaluation mode."""
    hand = ByHand(session, client, weights)
    hand.model.eval()
    own = woken(session, client, (1, 0))
    order = torch.randperm(30, generator=own.generator("measured"))[:24]
    total, count = 0.0, 0
    for chunk in order.split(12):
        batch = own.train.batch(chunk)
        total += len(chunk) * float(hand.task(hand.own(hand.features(batch)), batch))
        count += len(chunk)
    return total / count
