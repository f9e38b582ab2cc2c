"""What a small network makes of the modalities that are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn

from polyfed.tasks.imputation import Embeddings, Imputation, Imputer, PresentEmbeddings, mean_of, of_both


class Generator(Imputation):
    """What a small network makes of the modalities that the sample has, learnt from samples that have both.

    G_ab(z_a), the mean over all a that it has, with weight times the mean over samples of ||G_ab(z_a) - z_b||^2 / d as
    its loss; z_b is what it is to learn, not what learns.
    """

    hidden: int = Field(default=128, ge=1, description="width of the one hidden layer")
    weight: float = Field(default=1.0, gt=0, description="factor of the loss of reconstruction")

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _Generators(self, dim, modalities)


class _Generators(Imputer):
    def __init__(self, settings: Generator, dim: int, modalities: Sequence[str]) -> None:
        super().__init__(modalities, settings.dropout)
        self.weight = settings.weight
        self.networks = nn.ModuleDict(
            {
                f"{one}_to_{other}": nn.Sequential(
                    nn.Linear(dim, settings.hidden), nn.GELU(), nn.Linear(settings.hidden, dim)
                )
                for one in modalities
                for other in modalities
                if one != other
            }
        )

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        made = {
            name: PresentEmbeddings(self.networks[f"{name}_to_{modality}"](part.values), part.places)
            for name, part in parts.items()
            if name != modality
        }
        return mean_of(made, parts, count)[places]

    def loss(self, parts: Embeddings, count: int) -> Tensor | None:
        losses = []
        for one, other in ((a, b) for a in parts for b in parts if a != b):
            z, goal, _ = of_both(parts[one], parts[other], count)
            made = self.networks[f"{one}_to_{other}"](z.detach())
            losses.append((made.float() - goal.detach().float()).square().mean(1).sum() / count)
        return self.weight * torch.stack(losses).sum() if losses else None
