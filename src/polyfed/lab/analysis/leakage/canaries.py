"""Canaries: some of a client's samples get a random label for a round, and what crosses is asked for it.

Source: Carlini et al. (USENIX Security 2019), "The secret sharer"; here the secret is a label, and its alternatives are
the other classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.randomness import generator
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.lab.analysis.leakage.candidates import one_an_item
from polyfed.lab.analysis.leakage.figures import AttackResult, Discrimination, Found, NoAttack, leak_verdict
from polyfed.lab.analysis.leakage.membership import head_of
from polyfed.lab.analysis.leakage.membership_attacks import obstacle, sent_model
from polyfed.lab.analysis.leakage.seen import SeenReply, seen_round
from polyfed.lab.analysis.leakage.shadows import flat_outputs
from polyfed.lab.analysis.leakage.situation import Crossed, Situation
from polyfed.models.heads import class_count
from polyfed.tasks import evaluating
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Logits, Representations, TensorBundle, Weights

CANARIES = "canaries"
_SHARE = 0.25  # of a client's samples at most


@dataclass(frozen=True)
class Canaries:
    """Samples whose label is not theirs.

    Attributes:
        samples: all that the client trains on, these among them.
        places: of these.
    """

    samples: Samples
    places: Int64[Tensor, " k"]


def planted(samples: Samples, target: str, classes: int, number: int, draws: torch.Generator) -> Canaries:
    """So many random samples, of an item each, with another class than their own, each as likely."""
    order = torch.randperm(len(samples), generator=draws)
    places = order[one_an_item(samples.items[order])][: min(number, int(_SHARE * len(samples)))]
    labels = samples.targets[target].clone()
    shifts = torch.randint(1, classes, (len(places),), generator=draws)
    labels[places] = ((labels[places].long() + shifts) % classes).to(labels.dtype)
    return Canaries(replace(samples, targets={**samples.targets, target: labels}), places)


def exposures(logits: Float[Tensor, "k c"], labels: Int64[Tensor, " k"]) -> Float[Tensor, " k"]:
    """log2 of the number of classes less log2 of the label's rank among them; ties count against the model."""
    own = logits.gather(1, labels[:, None])
    ranks = (logits >= own).sum(1).double()
    return math.log2(logits.shape[1]) - ranks.log2()


def canary_findings(situation: Situation) -> Found:
    """Exposure of canaries in what crosses when they are there, beside the round without them."""
    members = {seen.clients[0]: situation.member(seen.clients[0]) for seen in situation.chosen()}
    held = {
        name: _held(situation, member, member.settings.task)
        for name, member in members.items()
        if isinstance(member.settings.task, Classification)
    }
    samples = {client: one.samples for client, one in held.items()}
    with seen_round(situation.opened, samples) if held else nullcontext() as again:
        replies = {(seen.clients, seen.request.step): seen for seen in again.replies} if again else {}
        for crossed in situation.crossed():
            seen = crossed.seen
            yield _of_bundle(situation, crossed, replies.get((seen.clients, seen.request.step)), held)


def _held(situation: Situation, member: Member, task: Classification) -> Canaries:
    draws, classes = generator(situation.plan.seed, CANARIES, member.id), _classes(situation, member)
    samples = situation.opened.federation.train(member)
    return planted(samples, task.target, classes, situation.plan.canaries, draws)


def _of_bundle(
    situation: Situation, crossed: Crossed, again: SeenReply | None, held: Mapping[str, Canaries]
) -> AttackResult | NoAttack:
    on, member, seen, name, bundle = crossed
    reason = obstacle(situation, member, name, bundle)
    if member.id not in held:
        reason = "a canary is a sample with a random label, and the task has no classes"
    elif reason or not isinstance(bundle, Weights | Representations | Logits):
        reason = reason or "no model can be asked"
    elif again is None:
        reason = "the client gave no usable reply with canaries"
    elif torch.equal(flat_outputs(bundle), flat_outputs(again.bundles[name])):
        reason = "it is made before the round's training, so canaries of a round are not in it"
    else:
        return _exposed(situation, on, member, (seen, bundle), (again, again.bundles[name]), held[member.id])
    return NoAttack(on, CANARIES, reason)


def _exposed(
    situation: Situation,
    on: str,
    member: Member,
    without: tuple[SeenReply, TensorBundle],
    planted_in: tuple[SeenReply, TensorBundle],
    canaries: Canaries,
) -> AttackResult:
    before, after = (_asked(situation, member, *sent, canaries) for sent in (without, planted_in))
    told = Discrimination.of(after.numpy(), before.numpy(), situation.plan.seed)
    says = leak_verdict(told.auc, is_protected=situation.is_protected)
    most = math.log2(_classes(situation, member))
    figures = {"exposure": float(after.mean()), "without": float(before.mean()), "highest": most}
    return AttackResult(
        on, "random labels", True, {"auc": dict(vars(told.auc)), **figures, "canaries": len(after)}, says
    )


def _classes(situation: Situation, member: Member) -> int:
    head = head_of(situation.fresh(member), member.head)
    assert head is not None
    return class_count(head)


def _asked(
    situation: Situation, member: Member, seen: SeenReply, bundle: TensorBundle, canaries: Canaries
) -> Float[Tensor, " k"]:
    """Exposure of each canary in what a reply holds."""
    task = member.settings.task
    assert isinstance(task, Classification)
    assert isinstance(bundle, Weights | Representations | Logits)
    model = sent_model(situation, seen, bundle)
    batch = canaries.samples.batch(canaries.places).to(model.device)
    with evaluating(model):
        logits = task.scores(model, head_of(model, member.head), batch).double().cpu()
    return exposures(logits, batch.targets[task.target].long().cpu())
