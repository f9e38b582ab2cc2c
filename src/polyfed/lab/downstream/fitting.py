"""Training of a decoder of frozen feature maps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.settings import Settings
from polyfed.lab.downstream.maps import MappedPictures


class DecoderFit(Settings):
    """How a decoder is trained: AdamW, mini-batches, stopped early where there are validation data."""

    lr: float = Field(default=2e-4, gt=0, description="of AdamW")
    weight_decay: float = Field(default=0.05, ge=0, description="of AdamW")
    epochs: int = Field(default=50, ge=1, description="at most")
    patience: int = Field(default=10, ge=1, description="epochs without a lower validation loss")
    batch_size: int = Field(default=8, ge=2, description="pictures a step")


def fit_decoder(
    decoder: nn.Module,
    pictures: MappedPictures,
    train: Int64[Tensor, " n"],
    validation: Callable[[], float] | None,
    loss: Callable[[Tensor, Tensor], Tensor],
    fit: DecoderFit,
    generator: torch.Generator,
) -> None:
    """Train a decoder (maps -> logits) in place; with validation it ends as it was at its lowest validation loss.

    Args:
        decoder: what is trained.
        pictures: what it is trained on.
        train: which of them, shuffled by ``generator``.
        validation: gives the validation loss of the decoder as it is; training ends when it has not fallen for
            ``fit.patience`` epochs, of which NaN is one. None: all epochs.
        loss: of logits and masks.
        fit: optimiser and length.
        generator: of the order of the pictures.
    """
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=fit.lr, weight_decay=fit.weight_decay)
    best: dict[str, Tensor] = {}
    lowest, waited = math.inf, 0
    for _ in range(fit.epochs):
        decoder.train()
        parts = torch.split(train[torch.randperm(len(train), generator=generator)], fit.batch_size)
        for index in parts:
            if len(index) > 1 or len(parts) == 1:  # batch norms need more than one picture
                optimizer.zero_grad()
                loss(decoder(pictures.maps(index)).squeeze(1), pictures.truth(index)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        if validation is None:
            continue
        waited += 1
        # NaN is below nothing, so a diverged epoch counts as waiting
        if (value := validation()) < lowest:
            lowest, waited = value, 0
            best = {name: tensor.detach().clone() for name, tensor in decoder.state_dict().items()}
        if waited >= fit.patience:
            break
    if best:
        decoder.load_state_dict(best)


@torch.no_grad()
def logits_of(
    decoder: nn.Module, pictures: MappedPictures, index: Int64[Tensor, " n"], batch: int = 64
) -> Float[Tensor, "n h w"]:
    """Logits of some pictures in evaluation mode, on the CPU."""
    decoder.eval()
    return torch.cat([decoder(pictures.maps(part)).squeeze(1).float().cpu() for part in torch.split(index, batch)])
