"""Which classes a client has more of than others do, from what it sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyfed.aggregation.prototypes import ClassMeans, by_space
from polyfed.wire.payload import Logits, Prototypes, TensorBundle, Weights

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
