"""FedAFD's adversarial alignment (BAA)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.algorithms.algorithm import Client
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.effects import SEVERAL, Inner, Never, Not, Only, Where
from polyfed.data.samples import Batch, Samples
from polyfed.federation.public_outputs import Pair
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Trainer
from polyfed.losses.adversarial import Discriminator, EncoderForm, discriminator_loss, encoder_loss
from polyfed.models.model import Model
from polyfed.optim.settings import OptimizerSettings

DISCRIMINATORS = "discriminator_"
ALIGNS = Only(beta=Not(0))
"""Clients align with the server."""


class AdversarialAlignment(PublicExchange):
    """Clients' public representations are to be indistinguishable from the server's (FedAFD, supplement, Eq. 1).

    Two discriminators a modality stay with the client: one judges against the server's representations of the same
    modality, the other against those of each other modality.
    """

    beta: float = Field(default=0.5, ge=0, description="weight of the adversarial alignment (BAA); 0: none")
    baa_update: Annotated[Literal["joint", "alternate"], ALIGNS] = Field(
        default="joint",
        description="add the alignment to the task loss, or give it passes over P of its own first, as released",
    )
    adversarial: Annotated[EncoderForm, ALIGNS] = Field(
        default="minimax", description="the encoder's loss: minimax (the paper's), or non_saturating, as released"
    )
    double_sigmoid: Annotated[bool, ALIGNS] = Field(
        default=False, description="discriminators end in a sigmoid, as released"
    )
    share_discriminators: Annotated[bool, ALIGNS & Where(SEVERAL)] = Field(
        default=False, description="one pair for all modalities of a client, as released, instead of one for each"
    )
    discriminator: Annotated[
        TrainingSettings, ALIGNS, Inner(batch_size=Never("its batches are of public_batch_size"))
    ] = Field(
        default=TrainingSettings(optimizer=OptimizerSettings(kind="adam", lr=1e-4)),
        description="optimiser of the discriminators (its batch size is public_batch_size)",
    )
    public_batch_size: Annotated[int, ALIGNS] = Field(
        default=128, ge=2, description="public samples a step of the alignment"
    )
    public_batches_per_epoch: Annotated[int | None, ALIGNS & Only(baa_update="joint")] = Field(
        default=None, ge=1, description="joint: public batches an epoch, spread evenly; None: one a private batch"
    )

    def add_modules(self, model: Model) -> None:
        """The discriminators of each modality."""
        super().add_modules(model)
        names = ["every"] if self.share_discriminators else list(model.encoders)
        # without a weight there would be parameters that nothing trains
        for name in names if self.beta else []:
            for kind in ("own", "cross"):
                model.extras[f"{DISCRIMINATORS}{kind}_{name}"] = Discriminator(
                    model.dim, double_sigmoid=self.double_sigmoid
                )

    # ---- client half

    def discriminating(
        self, client: Client, batch: Batch, local: Mapping[str, Tensor], server_outputs: Mapping[str, Tensor]
    ) -> Tensor:
        """What the discriminators minimise: -L_adv, summed over modalities and levels."""
        parts = [
            discriminator_loss(judge, real[batch.index], local[modality])
            for modality, judge, real in self.levels(client, local, server_outputs)
        ]
        return torch.stack(parts).sum()

    def alignment_loss(
        self, client: Client, batch: Batch, local: Mapping[str, Tensor], server_outputs: Mapping[str, Tensor]
    ) -> Tensor:
        """What the encoders minimise: L_adv = mean_k (L_in + L_cr), summed over the client's modalities."""
        parts = [
            encoder_loss(judge, real[batch.index], local[modality], self.adversarial)
            for modality, judge, real in self.levels(client, local, server_outputs)
        ]
        return torch.stack(parts).sum()

    def levels(
        self, client: Client, local: Mapping[str, Tensor], server_outputs: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, torch.nn.Module, Tensor]]:
        """(modality, discriminator, its real representations): the same modality, then each other one."""
        for modality in local:
            name = "every" if self.share_discriminators else modality
            yield modality, client.model.extras[f"{DISCRIMINATORS}own_{name}"], server_outputs[modality]
            for other in server_outputs:
                if other != modality:
                    yield modality, client.model.extras[f"{DISCRIMINATORS}cross_{name}"], server_outputs[other]

    def local_representations(
        self, client: Client, batch: Batch, server_outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Modality -> representations [b, d] of a public batch, with gradient, of what the server encodes too."""
        with client.autocast():
            return {name: client.model.represent(name, x) for name, x in batch.inputs.items() if name in server_outputs}

    def discriminator_trainer(self, client: Client) -> Trainer:
        """The optimiser of the discriminators."""
        return client.trainer(
            "discriminator", self.discriminator, lambda name: name.startswith(f"extras.{DISCRIMINATORS}")
        )

    def batch_pairs(
        self, client: Client, samples: Samples, server_outputs: Mapping[str, Tensor], epoch: int
    ) -> Iterator[Pair]:
        """Private and public batches of one epoch, as ``baa_update`` combines them."""
        private = client.batches(client.train, f"task-{epoch}")
        # a client none of whose modalities the server encodes has nothing to align with
        able = any(name in server_outputs for name in client.model.modalities)
        if not self.beta or not able:
            yield from ((batch, None) for batch in private)
            return
        size, wanted = self.public_batch_size, self.public_batches_per_epoch
        if self.baa_update == "joint":
            yield from self.mixed_batches(client, private, f"align-{epoch}", size, wanted, samples)
        else:
            public = client.public_batches(f"align-{epoch}-0", size, augment=self.public_augment, samples=samples)
            yield from ((None, batch) for batch in public)
            yield from ((batch, None) for batch in private)
