"""Membership inference on a model by one score a sample (Yeom et al., CSF 2018: threshold on the loss)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyfed.data.samples import Samples
from polyfed.models.model import Model
from polyfed.tasks import evaluating
from polyfed.tasks.classification import Classification
from polyfed.tasks.pairing import PairTask
from polyfed.tasks.task import Task


def has_scores(task: Task) -> bool:
    return isinstance(task, Classification | PairTask) or task.is_per_sample


def head_of(model: Model, name: str) -> nn.Module | None:
    """The head of that name, if the model has it."""
    return model.heads[name] if name in model.heads else None


def sample_scores(model: Model, task: Task, head: nn.Module | None, samples: Samples) -> Float[Tensor, " n"]:
    """How well a model knows each sample; higher is better known.

    Classification: log p / (1 - p) of the true class p, which orders samples as the loss does (Carlini et al., S&P
    2022, Eq. 5). Pairs: the similarity of a sample's two representations, less the mean of those with the other
    samples' both ways. Other tasks: minus the loss of the sample alone.
    """
    with evaluating(model, head):
        if isinstance(task, PairTask):
            return _pair_scores(model, task, samples)
        if isinstance(task, Classification):
            return torch.cat([_confidence(model, task, head, part) for part in _parts(samples, 256)]).cpu()
        losses = [
            task.loss(model, head, samples.batch(torch.tensor([place])).to(model.device))
            for place in range(len(samples))
        ]
        return -torch.stack(losses).double().cpu()


def confidence(logits: Float[Tensor, "n c"], labels: Tensor) -> Float[Tensor, " n"]:
    """log p / (1 - p) of the true class, from class scores: its score less the logarithmic sum of the others'."""
    true = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return true - others.logsumexp(1)


def pair_margin(similarities: Float[Tensor, "n n"]) -> Float[Tensor, " n"]:
    own, n = similarities.diagonal(), len(similarities)
    return own - (similarities.sum(0) + similarities.sum(1) - 2 * own) / (2 * (n - 1))


def _confidence(model: Model, task: Classification, head: nn.Module | None, part: Samples) -> Float[Tensor, " n"]:
    batch = task.usable(part.batch(torch.arange(len(part)))).to(model.device)
    logits = task.scores(model, head, batch).double()
    return confidence(logits, batch.targets[task.target].long())


def _pair_scores(model: Model, task: PairTask, samples: Samples) -> Float[Tensor, " n"]:
    sides, samples = [], task.usable(samples)
    for modality in task.between:
        inputs = [part.batch(torch.arange(len(part))).inputs[modality] for part in _parts(samples, 256)]
        sides.append(torch.cat([model.represent(modality, x.to(model.device)) for x in inputs]).double())
    return pair_margin(sides[0] @ sides[1].T).cpu()


def _parts(samples: Samples, size: int) -> list[Samples]:
    return [samples.subset(index) for index in torch.split(torch.arange(len(samples)), size)]
