"""FedMAC."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from polyfed.algorithms.algorithm import Client, Reply, Weights, client_step
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.shared.local_losses import SampleEmbeddings
from polyfed.data.samples import Batch
from polyfed.models.model import CachedModel


class FedMAC(FedAvg):
    """FedMAC-like (Nguyen et al., NCA 2024): FedAvg with two contrasts in what samples have, for samples with gaps.

    Clients add to their task's loss

        between mean_{m,n} InfoNCE(z_m, z_n) + fused mean_m InfoNCE(f, z_m)

    of the embeddings z of a batch: of each two modalities, over the samples that have both; and of what is classified,
    f, with each modality, over the samples that have it. The second keeps the fusion of what a sample has with what
    stands for what it lacks from saying nothing of the sample. Clients of one modality train as in FedAvg.

    It goes with any imputation. From the paper: the two contrasts. Ours, as its equations could not be checked: their
    form, weights and tau. Left out is its aggregator, which weighs modalities by how well each tells the others.
    """

    between: float = Field(default=0.1, ge=0, le=1e6, description="weight of the contrast between modalities")
    fused: float = Field(
        default=0.1, ge=0, le=1e6, description="weight of the contrast between what is classified and each modality"
    )
    tau: float = Field(default=0.1, gt=0, le=100, description="temperature of both")

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model on the task and the contrasts."""
        client.load_weights(weights)

        def contrasts(model: CachedModel, batch: Batch) -> Tensor:
            return self.contrasts(SampleEmbeddings.of(client, model, batch))

        regulariser = contrasts if (self.between or self.fused) and len(client.modalities) > 1 else None
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, regulariser=regulariser)
        return Reply(weights=client.weights, num_examples=client.num_examples)

    def contrasts(self, own: SampleEmbeddings) -> Tensor:
        """Both, weighted; 0 where no two samples have what they take."""
        between = [own.contrast(u, v, places, self.tau) for u, v, places in own.pairs()] if self.between else []
        fused = []
        if self.fused and own.fused is not None and own.is_fused:
            several = [part for part in own.parts.values() if len(part.index) > 1]
            fused = [own.contrast(own.fused[part.index], part.values, part.index, self.tau) for part in several]
        return self.between * own.mean(between) + self.fused * own.mean(fused)
