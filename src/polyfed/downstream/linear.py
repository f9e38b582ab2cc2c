"""A linear classifier on fixed features, and the shares of a training set that it may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.device import cpu_threads
from polyfed.downstream.bench import Labelled
from polyfed.downstream.stopping import Stopping


@dataclass(frozen=True)
class Fit:
    """How a linear classifier is trained: AdamW, mini-batches, stopped early where there are validation data."""

    lr: float
    weight_decay: float
    epochs: int
    patience: int
    batch_size: int


def stratified(labels: Int64[Tensor, " n"], share: float, generator: torch.Generator) -> Int64[Tensor, " k"]:
    """Positions of a random share of every class, ascending: round(share n_c) of each class, and at least one."""
    order = torch.randperm(len(labels), generator=generator)
    kept = []
    for label in labels.unique().tolist():  # type: ignore[no-untyped-call]
        own = order[labels[order] == label]
        kept.append(own[: max(1, round(share * len(own)))])
    return torch.cat(kept).sort().values


def standardised(train: Float[Tensor, "n d"], *others: Float[Tensor, "_ d"]) -> list[Tensor]:
    """All with the mean and standard deviation of ``train``, by dimension; a constant dimension is only centred."""
    mean, spread = train.mean(0), train.std(0, correction=0)
    spread = spread.where(spread > 0, 1.0)
    return [(x - mean) / spread for x in (train, *others)]


def fit_linear(
    train: Labelled, validation: Labelled | None, classes: int, fit: Fit, generator: torch.Generator
) -> nn.Linear:
    """A linear layer trained by cross-entropy; with validation data, as it was at its lowest validation loss.

    Weights and biases start at 0, so that a draw depends on its samples and their order alone. On a CPU it takes one
    thread: the products are too small to be worth sharing out.

    Args:
        train: what it is trained on, shuffled by ``generator``.
        validation: ends the training when its loss has not fallen for ``fit.patience`` epochs; None: never.
        classes: number of outputs.
        fit: optimiser and length.
        generator: of the order of the samples.
    """
    layer = _zeroed(train.x.shape[1], classes)
    stopping = Stopping(layer, fit.patience)
    with cpu_threads(1):
        _train(layer, train, validation, fit, generator, stopping)
    stopping.restore()
    return layer


def _train(
    layer: nn.Linear,
    train: Labelled,
    validation: Labelled | None,
    fit: Fit,
    generator: torch.Generator,
    stopping: Stopping,
) -> None:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=fit.lr, weight_decay=fit.weight_decay, foreach=True)
    for _ in range(fit.epochs):
        for rows in torch.split(torch.randperm(len(train.y), generator=generator), fit.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(layer(train.x[rows]), train.y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if validation is not None and stopping.done(_loss(layer, validation)):
            return


@torch.no_grad()
def _loss(layer: nn.Linear, data: Labelled) -> float:
    return float(F.cross_entropy(layer(data.x), data.y))


def _zeroed(width: int, classes: int) -> nn.Linear:
    layer = nn.Linear(width, classes, device="meta").to_empty(device="cpu")  # draws nothing
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
