"""FedAFD's adversarial alignment (BAA), a part that the method holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.algorithms.algorithm import Client
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.public_training import Pair
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.federation.settings import TrainingSettings, require_no_batch_size
from polyfed.losses.adversarial import Discriminator, EncoderForm, discriminator_loss, encoder_loss
from polyfed.models.model import Model
from polyfed.optim.settings import OptimizerSettings

DISCRIMINATORS = "discriminator_"


class AdversarialAlignment(Settings):
    """Makes clients' public representations indistinguishable from the server's (FedAFD, supplement, Eq. 1).

    Two discriminators per modality stay with the client: one compares with the server's representations of the same
    modality (D_in), the other with those of each other modality (D_cr).
    """

    weight: float = Field(default=0.5, gt=0, description="beta, weight of the adversarial alignment (BAA)")
    update: Literal["joint", "alternate"] = Field(
        default="joint",
        description="add the alignment to the task loss, or, in the released code, its own passes over P first",
    )
    loss: EncoderForm = Field(
        default="minimax", description="the encoder's loss: minimax (paper), or non_saturating (released code)"
    )
    double_sigmoid: bool = Field(
        default=False, description="a sigmoid before losses that apply one themselves, as in the released code"
    )
    shared: bool = Field(
        default=False,
        description="one pair of discriminators for all modalities of a client, as in the released code, not one each",
    )
    training: TrainingSettings = Field(
        default=TrainingSettings(optimizer=OptimizerSettings(kind="adam", lr=1e-4)),
        description="optimiser of the discriminators",
    )
    batch_size: int = Field(default=128, ge=2, description="public samples per step of the alignment")
    batches_per_epoch: int | None = Field(
        default=None, ge=1, description="joint: public batches per epoch, spread evenly; None: one per private batch"
    )

    @model_validator(mode="after")
    def _all_act(self) -> Self:
        require_no_batch_size(self.training, "its batches are of adversarial.batch_size")
        if self.batches_per_epoch is not None and self.update != "joint":
            raise ValueError(f"batches_per_epoch {self.batches_per_epoch} acts only with update: joint; leave it out")
        return self

    def add_modules(self, model: Model) -> None:
        """Adds the discriminators of each modality to ``model.extras``."""
        for name in ["every"] if self.shared else list(model.encoders):
            for level in ("own", "cross"):
                model.extras[f"{DISCRIMINATORS}{level}_{name}"] = Discriminator(
                    model.dim, double_sigmoid=self.double_sigmoid
                )

    # ---- client half

    def against(self, client: Client, batch: Batch, server_outputs: Mapping[str, Tensor]) -> Tensor:
        """Takes a step of the discriminators; returns beta L_adv of the encoders on the same public batch."""
        local = self.local_representations(client, batch, server_outputs)

        def over_levels(loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Tensor:
            levels = self.levels(client, local, server_outputs)
            return torch.stack([loss(judge, real[batch.index], local[name]) for name, judge, real in levels]).sum()

        # the released code scales the discriminators' loss by beta as well
        factor = self.weight if self.update == "alternate" else 1.0
        own = client.trainer("discriminator", self.training, lambda name: name.startswith(f"extras.{DISCRIMINATORS}"))
        own.step(factor * over_levels(discriminator_loss))  # -L_adv, summed over modalities and levels
        # L_adv = mean_k (L_in + L_cr), summed over the client's modalities
        return self.weight * over_levels(partial(encoder_loss, form=self.loss))

    def levels(
        self, client: Client, local: Mapping[str, Tensor], server_outputs: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, nn.Module, Tensor]]:
        """Yields (modality, discriminator, its real representations): the same modality, then each other one."""
        for modality in local:
            name = "every" if self.shared else modality
            yield modality, client.model.extras[f"{DISCRIMINATORS}own_{name}"], server_outputs[modality]
            for other in server_outputs:
                if other != modality:
                    yield modality, client.model.extras[f"{DISCRIMINATORS}cross_{name}"], server_outputs[other]

    def local_representations(
        self, client: Client, batch: Batch, server_outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Maps modalities that the server encodes too to representations [b, d] of a public batch, with gradient."""
        with client.autocast():
            return {name: client.model.represent(name, x) for name, x in batch.inputs.items() if name in server_outputs}

    def batches(
        self, client: Client, public: PublicExchange, server_outputs: Mapping[str, Tensor], epoch: int
    ) -> Iterator[Pair]:
        """Private and public batches of one epoch, combined by ``update``."""
        # a client without a modality that the server encodes cannot be aligned
        able = any(name in server_outputs for name in client.modalities)
        if able and self.update == "joint":
            yield from public.among_private(client, "align", epoch, self.batch_size, self.batches_per_epoch, mixed=True)
            return
        alone = public.one_pass(client, f"align-{epoch}-0", self.batch_size) if able else ()
        yield from ((None, batch) for batch in alone)
        yield from ((batch, None) for batch in client.batches(client.train, f"task-{epoch}"))


class NoAlignment:
    """Local training without adversarial alignment, on private batches alone."""

    def add_modules(self, model: Model) -> None:
        """Adds nothing."""

    def against(self, client: Client, batch: Batch, server_outputs: Mapping[str, Tensor]) -> Tensor:
        """0."""
        return batch.no_loss

    def batches(
        self, client: Client, public: PublicExchange, server_outputs: Mapping[str, Tensor], epoch: int
    ) -> Iterator[Pair]:
        """Private batches of one epoch."""
        return ((batch, None) for batch in client.batches(client.train, f"task-{epoch}"))
