"""Training of what stands on frozen features: a linear classifier, or a decoder of feature maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.device import cpu_threads
from polyfed.core.settings import Settings
from polyfed.lab.downstream.maps import MappedPictures


class Fit(Settings):
    """How a linear layer is trained: AdamW, mini-batches, stopped early where there are validation data."""

    lr: float = Field(default=5e-4, gt=0, description="of AdamW")
    weight_decay: float = Field(default=1e-6, ge=0, description="of AdamW")
    epochs: int = Field(default=50, ge=1, description="at most")
    patience: int = Field(default=10, ge=1, description="epochs without a lower validation loss")
    batch_size: int = Field(default=48, ge=1, description="samples a step")


class DecoderFit(Fit):
    """How a decoder is trained."""

    lr: float = Field(default=2e-4, gt=0, description="of AdamW")
    weight_decay: float = Field(default=0.05, ge=0, description="of AdamW")
    batch_size: int = Field(default=8, ge=2, description="pictures a step")


class Labelled(NamedTuple):
    """Features of samples and their classes, on the CPU."""

    x: Float[Tensor, "n d"]
    y: Int64[Tensor, " n"]


def stratified(labels: Int64[Tensor, " n"], share: float, generator: torch.Generator) -> Int64[Tensor, " k"]:
    """Positions of a random share of every class, ascending: round(share n_c) of each class, and at least one."""
    order = torch.randperm(len(labels), generator=generator)
    kept = []
    for label in labels.unique().tolist():  # type: ignore[no-untyped-call]
        own = order[labels[order] == label]  # the class in random order
        kept.append(own[: max(1, round(share * len(own)))])
    return torch.cat(kept).sort().values


def standardised(train: Float[Tensor, "n d"], *others: Float[Tensor, "_ d"]) -> list[Tensor]:
    """All with the mean and standard deviation of ``train``, by dimension; a constant dimension is only centred."""
    mean, spread = train.mean(0), train.std(0, correction=0)
    spread = spread.where(spread > 0, 1.0)  # a unit that never fires would divide by 0
    return [(x - mean) / spread for x in (train, *others)]


def fit_module(
    module: nn.Module,
    losses: Callable[[], Iterator[Tensor]],
    validation: Callable[[], float] | None,
    fit: Fit,
    *,
    foreach: bool | None = None,
) -> None:
    """Train a module in place; with validation it ends as it was at its lowest validation loss.

    Args:
        module: what is trained.
        losses: a pass: the loss of each batch.
        validation: the validation loss of the module as it is; training ends when it has not fallen for
            ``fit.patience`` epochs, of which NaN is one. None: all epochs.
        fit: optimiser and length.
        foreach: of AdamW.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=fit.lr, weight_decay=fit.weight_decay, foreach=foreach)
    best: dict[str, Tensor] = {}
    lowest, waited = math.inf, 0
    for _ in range(fit.epochs):
        module.train()
        for loss in losses():
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if validation is None:
            continue
        waited += 1
        # NaN is below nothing, so a diverged epoch counts as waiting
        if (value := validation()) < lowest:
            lowest, waited = value, 0
            best = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        if waited >= fit.patience:
            break
    if best:
        module.load_state_dict(best)


def fit_linear(
    train: Labelled, validation: Labelled | None, classes: int, fit: Fit, generator: torch.Generator
) -> nn.Linear:
    """A linear layer trained by cross-entropy, as ``fit_module`` does.

    Weights and biases start at 0, so that a draw depends on its samples and their order alone.

    Args:
        train: what it is trained on, shuffled by ``generator``.
        validation: for early stopping; None: all epochs.
        classes: number of outputs.
        fit: optimiser and length.
        generator: of the order of the samples.
    """
    layer = nn.Linear(train.x.shape[1], classes, device="meta").to_empty(device="cpu")  # draws nothing
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)

    def losses() -> Iterator[Tensor]:
        for rows in torch.split(torch.randperm(len(train.y), generator=generator), fit.batch_size):
            yield F.cross_entropy(layer(train.x[rows]), train.y[rows])

    @torch.no_grad()
    def validation_loss() -> float:
        assert validation is not None
        return float(F.cross_entropy(layer(validation.x), validation.y))

    with cpu_threads(1):  # the products are too small to be worth sharing out
        fit_module(layer, losses, validation_loss if validation else None, fit, foreach=True)
    return layer


def fit_decoder(
    decoder: nn.Module,
    pictures: MappedPictures,
    train: Int64[Tensor, " n"],
    validation: Callable[[], float] | None,
    loss: Callable[[Tensor, Tensor], Tensor],
    fit: Fit,
    generator: torch.Generator,
) -> None:
    """Train a decoder (maps -> logits) in place, as ``fit_module`` does.

    Args:
        decoder: what is trained.
        pictures: what it is trained on.
        train: which of them, shuffled by ``generator``.
        validation: gives the validation loss of the decoder as it is; None: all epochs.
        loss: of logits and masks.
        fit: optimiser and length.
        generator: of the order of the pictures.
    """

    def losses() -> Iterator[Tensor]:
        parts = torch.split(train[torch.randperm(len(train), generator=generator)], fit.batch_size)
        for index in parts:
            if len(index) > 1 or len(parts) == 1:  # batch norms need more than one picture
                yield loss(decoder(pictures.maps(index)).squeeze(1), pictures.truth(index))

    fit_module(decoder, losses, validation, fit)


@torch.no_grad()
def logits_of(
    decoder: nn.Module, pictures: MappedPictures, index: Int64[Tensor, " n"], batch: int = 64
) -> Float[Tensor, "n h w"]:
    """Logits of some pictures in evaluation mode, on the CPU."""
    decoder.eval()
    return torch.cat([decoder(pictures.maps(part)).squeeze(1).float().cpu() for part in torch.split(index, batch)])
