"""Which classes a client has more of than others do, from what it sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyfed.aggregation.prototypes import ClassMeans, by_space
from polyfed.lab.analysis.leakage.figures import AttackResult, Discrimination, Found, NoAttack
from polyfed.lab.analysis.leakage.seen import SeenReply, shown_kind
from polyfed.lab.analysis.leakage.situation import Situation
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Logits, Prototypes, TensorBundle, Weights

_CLASSES = "classes"
ClassEvidence = Float[Tensor, " classes"]


def class_shares(labels: Tensor, classes: int) -> ClassEvidence:
    return torch.bincount(labels.long().cpu(), minlength=classes).double() / max(1, len(labels))


def evidence(sent: TensorBundle, received: Mapping[str, Tensor], head: str, target: str) -> ClassEvidence | str:
    """How much speaks for each class in what a client sent, or why nothing does.

    Weights: how far the bias of the class rose in the classifier, which is minus the sum of p - y over the client's
    samples. Logits: the mean probability of the class over public samples. Prototypes: how many samples stand behind
    one; where all say equally many, how long it is.
    """
    if isinstance(sent, Weights):
        name = f"heads.{head}.bias"
        biases = [key for key in sent if key.startswith(f"heads.{head}.") and key.endswith("bias") and key in received]
        if not biases:
            return f"no bias of a classifier ({name}) crosses"
        return sent[biases[0]].double().cpu() - received[biases[0]].double().cpu()
    if isinstance(sent, Logits):
        return sent[target].double().cpu().softmax(1).mean(0)
    if isinstance(sent, Prototypes):
        return _of_prototypes(next(iter(by_space(sent, ClassMeans).values())))
    return "representations of public samples name no classes"


def _of_prototypes(own: ClassMeans) -> ClassEvidence:
    counts = own.counts.double().cpu()
    told = (
        counts
        if len(counts) < len(own.present) or counts.min() < counts.max()
        else own.means.double().cpu().norm(dim=1)
    )
    dense = torch.zeros(len(own.present), dtype=torch.float64)
    dense[own.present.cpu()] = told
    return dense / dense.sum().clamp_min(1e-12)


def told_apart(
    by_client: Float[Tensor, "k classes"], shares: Float[Tensor, "k classes"]
) -> tuple[Float[Tensor, " m"], Bool[Tensor, " m"]]:
    above = shares - shares.mean(0)
    differs = above.abs() > 1e-9
    return (by_client - by_client.mean(0))[differs], (above > 0)[differs]


# ---- the attack


def class_findings(situation: Situation) -> Found:
    """Which classes a client has more of than others, from what all of a class space sent."""
    spaces: dict[tuple[str, str], list[tuple[SeenReply, TensorBundle, str]]] = defaultdict(list)
    for seen in situation.seen.replies:
        member = situation.member(seen.clients[0])
        for name, bundle in seen.bundles.items():
            spaces[shown_kind(name, bundle), member.head].append((seen, bundle, name))
    for (kind, head), sent in spaces.items():
        first = sent[0][0]
        task = situation.member(first.clients[0]).settings.task
        on = f"{kind} of {first.who if first.is_sum or len(sent) == 1 else f'{len(sent)} clients'}"
        if not isinstance(task, Classification):
            yield NoAttack(on, _CLASSES, "their task has no classes")
        elif any(seen.is_sum for seen, _, _ in sent):
            yield NoAttack(on, _CLASSES, "a sum says nothing of one client")
        elif len(sent) < 2:
            yield NoAttack(on, _CLASSES, "one client has nobody to be told from")
        else:
            yield _classes(situation, on, task, head, sent)


def _classes(
    situation: Situation,
    on: str,
    task: Classification,
    head: str,
    sent: Sequence[tuple[SeenReply, TensorBundle, str]],
) -> AttackResult | NoAttack:
    signs, shares = list[Tensor](), list[Tensor]()
    for seen, bundle, name in sent:
        start: Mapping[str, Tensor] = seen.received.bundles.get(name, {})
        sign = evidence(bundle, start, head, task.target)
        if isinstance(sign, str):
            return NoAttack(on, _CLASSES, sign)
        labels = situation.opened.federation.train(situation.member(seen.clients[0])).targets[task.target]
        signs.append(sign)
        shares.append(class_shares(labels, len(sign)))
    values, more = told_apart(torch.stack(signs), torch.stack(shares))
    if not bool(more.any()) or bool(more.all()):
        return NoAttack(on, _CLASSES, "all clients have equal shares of all classes")
    told = Discrimination.of(values[more].numpy(), values[~more].numpy(), situation.plan.seed)
    return told.result(on, "evidence by class", is_protected=situation.is_protected)
