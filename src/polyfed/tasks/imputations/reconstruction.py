"""Reconstruction by variational autoencoders and mappings between their latents (FedRecon)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn

from polyfed.tasks.imputation import Embeddings, Imputation, Imputer, PresentEmbeddings, mean_of, of_both


class Reconstruction(Imputation):
    """FedRecon-like (Liu et al. 2025, arXiv 2504.09941): a light VAE a modality, and mappings between their latents.

    In place of z_b stands D_b(T_ab(h_a)) with h_a ~ N(mu_a, sigma_a^2) of E_a(z_a) in training and h_a = mu_a after it,
    the mean over all a that the sample has. Its loss is weight times

        sum_m ||D_m(h_m) - z_m||^2 / d + kl KL(N(mu_m, sigma_m^2) | N(0, I)) / d  +  sum_ab ||T_ab(mu_a) - mu_b||^2 / l,

    means over samples; mappings learn from samples that have both. Of the paper's two stages, the mappings leave the
    autoencoders alone (mu is constant to them), and the task leaves all of it alone (``frozen``), so that a client's
    classes do not pull the shared generator their way.

    Ours: both stages train side by side, on embeddings and not on raw features, and weights are averaged with the
    classifier's in every round, where the paper freezes the global generator after its own training.
    """

    latent: int = Field(default=32, ge=1, description="l, width of the latents")
    hidden: int = Field(default=128, ge=1, description="width of the one hidden layer of each network")
    weight: float = Field(default=1.0, gt=0, description="factor of the loss")
    kl: float = Field(default=0.01, ge=0, description="factor of the divergence")
    frozen: bool = Field(default=True, description="whether the task's loss leaves the generator alone")

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _Autoencoders(self, dim, modalities)


class _Autoencoders(Imputer):
    def __init__(self, settings: Reconstruction, dim: int, modalities: Sequence[str]) -> None:
        super().__init__(modalities, settings.dropout)
        self.settings = settings
        hidden, latent = settings.hidden, settings.latent
        self.encoders = nn.ModuleDict({name: _network(dim, hidden, 2 * latent) for name in modalities})
        self.decoders = nn.ModuleDict({name: _network(latent, hidden, dim) for name in modalities})
        pairs = [f"{a}_to_{b}" for a in modalities for b in modalities if a != b]
        self.mappings = nn.ModuleDict({pair: _network(latent, hidden, latent) for pair in pairs})

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        made = {}
        for name, part in parts.items():
            if name != modality:
                latent, _, _ = self.latent(name, part.values)
                value = self.decoders[modality](self.mappings[f"{name}_to_{modality}"](latent))
                made[name] = PresentEmbeddings(value.detach() if self.settings.frozen else value, part.places)
        return mean_of(made, parts, count)[places]

    def latent(self, modality: str, z: Float[Tensor, "k d"]) -> tuple[Tensor, Tensor, Tensor]:
        """h, mu and log sigma^2 of embeddings; h is drawn in training, from torch's global generator as dropout is."""
        mean, log_variance = self.encoders[modality](z).float().chunk(2, dim=-1)
        drawn = mean + (log_variance / 2).exp() * torch.randn_like(mean) if self.training else mean
        return drawn, mean, log_variance

    def loss(self, parts: Embeddings, count: int) -> Tensor | None:
        losses, means = list[Tensor](), dict[str, PresentEmbeddings]()
        for name, part in parts.items():
            z = part.values.detach().float()
            latent, mean, log_variance = self.latent(name, z)
            divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / (2 * z.shape[1])
            missed = (self.decoders[name](latent).float() - z).square().mean(1)
            losses.append((missed + self.settings.kl * divergence).sum() / count)
            means[name] = PresentEmbeddings(mean.detach(), part.places)
        for a, b in ((a, b) for a in parts for b in parts if a != b):
            start, goal, _ = of_both(means[a], means[b], count)
            losses.append((self.mappings[f"{a}_to_{b}"](start).float() - goal).square().mean(1).sum() / count)
        return self.settings.weight * torch.stack(losses).sum()


def _network(width: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out))
