"""Training of a decoder on the maps of a frozen encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from polyfed.downstream.pictures import Pictures
from polyfed.downstream.stopping import Stopping

MaskLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderFit:
    """How a decoder is trained: AdamW, mini-batches, stopped early where there are validation pictures."""

    lr: float
    weight_decay: float
    epochs: int
    patience: int
    batch_size: int


def fit_decoder(
    decoder: nn.Module,
    pictures: Pictures,
    train: Int64[Tensor, " n"],
    validation: Callable[[], float] | None,
    loss: MaskLoss,
    fit: DecoderFit,
    generator: torch.Generator,
) -> None:
    """Train a decoder in place; with validation it ends as it was at its lowest validation loss.

    Args:
        decoder: maps -> logits.
        pictures: what is trained on.
        train: which of them.
        validation: gives the validation loss of the decoder as it is; None: all epochs.
        loss: of logits and masks.
        fit: optimiser and length.
        generator: of the order of the pictures.
    """
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=fit.lr, weight_decay=fit.weight_decay)
    stopping = Stopping(decoder, fit.patience)
    for _ in range(fit.epochs):
        decoder.train()
        for index in _batches(train, fit.batch_size, generator):
            optimizer.zero_grad()
            loss(decoder(pictures.maps(index)), pictures.truth(index)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if validation is not None and stopping.done(validation()):
            break
    stopping.restore()


@torch.no_grad()
def logits_of(
    decoder: nn.Module, pictures: Pictures, index: Int64[Tensor, " n"], batch: int = 64
) -> Float[Tensor, "n h w"]:
    """Logits of some pictures in evaluation mode, on the CPU."""
    decoder.eval()
    return torch.cat([decoder(pictures.maps(part)).float().cpu() for part in torch.split(index, batch)])


def mean_mask(masks: Tensor) -> Bool[Tensor, "h w"]:
    """Where more than half of the masks are 1: what is predicted without looking at the picture."""
    return masks.double().mean(0) > 0.5


def _batches(train: Int64[Tensor, " n"], size: int, generator: torch.Generator) -> list[Int64[Tensor, " b"]]:
    """A shuffled pass; a single picture left over is not trained on, as batch norms need more."""
    parts = torch.split(train[torch.randperm(len(train), generator=generator)], size)
    return [part for part in parts if len(part) > 1 or len(parts) == 1]
