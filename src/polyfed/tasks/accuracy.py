"""Classification metrics from logits; ties and NaN count against the model."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

_TOP5_CLASSES = 10  # with fewer classes, five guesses say little


def label_ranks(logits: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Rank from 0 of the true class: how many other classes score at least as high, or NaN."""
    true = logits.gather(1, labels[:, None])
    return logits.shape[1] - 1 - (logits < true).sum(1)


def sole_best(logits: Float[Tensor, "n c *places"]) -> Int64[Tensor, " n *places"]:
    """The class that scores higher than all others; -1 where another scores as high, or NaN."""
    best, classes = logits.max(1)
    return classes.where((logits < best[:, None]).sum(1) == logits.shape[1] - 1, -1)


def predictions(
    logits: Float[Tensor, "n c"], labels: Int64[Tensor, " n"], ranks: Int64[Tensor, " n"]
) -> Int64[Tensor, " n"]:
    """The class with the highest score; where the true class shares it, one of the others.

    ``ranks`` are the ``label_ranks`` of the same logits, so that a prediction is right where the rank is 0.
    """
    others = logits.scatter(1, labels[:, None], -torch.inf).argmax(1)
    return torch.where(ranks == 0, labels, others)


def top(ranks: Int64[Tensor, " n"], k: int) -> Float[Tensor, ""]:
    """Percent of samples whose true class is among the ``k`` highest."""
    return 100.0 * (ranks < k).double().mean()


def balanced_accuracy(predicted: Int64[Tensor, " n"], labels: Int64[Tensor, " n"], classes: int) -> Float[Tensor, ""]:
    hits, support, _ = _counts(predicted, labels, classes)
    return 100.0 * (hits / support)[support > 0].mean()


def macro_f1(predicted: Int64[Tensor, " n"], labels: Int64[Tensor, " n"], classes: int) -> Float[Tensor, ""]:
    """Mean F1 score, in percent, over the classes that occur or are predicted."""
    hits, support, claimed = _counts(predicted, labels, classes)
    sizes = support + claimed
    return 100.0 * (2 * hits / sizes)[sizes > 0].mean()


def accuracies(
    ranks: Int64[Tensor, " n"], predicted: Int64[Tensor, " n"], labels: Int64[Tensor, " n"], classes: int
) -> dict[str, float]:
    """``accuracy``, ``top5`` (from 10 classes on), ``balanced_accuracy`` and ``macro_f1``, in percent.

    Each has beside it ``<name>_of_constant``: the highest that one answer to all samples reaches, whichever it is.
    """
    shares = torch.bincount(labels, minlength=classes).double() / len(labels)
    occurring, best = int((shares > 0).sum()), float(shares.max())
    metrics = {"accuracy": (top(ranks, 1), best)}
    if classes >= _TOP5_CLASSES:
        metrics["top5"] = top(ranks, 5), float(shares.topk(5).values.sum())
    metrics["balanced_accuracy"] = balanced_accuracy(predicted, labels, classes), 1 / occurring
    metrics["macro_f1"] = macro_f1(predicted, labels, classes), 2 * best / (1 + best) / occurring
    constant = {f"{name}_of_constant": 100.0 * share for name, (_, share) in metrics.items()}
    return {name: float(value) for name, (value, _) in metrics.items()} | constant


def _counts(
    predicted: Int64[Tensor, " n"], labels: Int64[Tensor, " n"], classes: int
) -> tuple[Float[Tensor, " c"], ...]:
    groups = (labels[predicted == labels], labels, predicted)
    return tuple(torch.bincount(group, minlength=classes).double() for group in groups)
