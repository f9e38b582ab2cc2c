"""FedAFD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.weighting import Weighting
from polyfed.aggregation.weightings.by_evidence import SED
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    Lifetime,
    Reply,
    Representations,
    Server,
    Weights,
    client_step,
    each,
)
from polyfed.algorithms.shared.adversarial_alignment import ALIGNS, AdversarialAlignment
from polyfed.algorithms.shared.ensemble_distillation import EnsembleDistillation
from polyfed.algorithms.shared.guided_fusion import FUSION, GuidedFusion
from polyfed.core.effects import Condition, Not, Only
from polyfed.data.samples import Batch
from polyfed.federation.public_outputs import PublicOutputs, of_part
from polyfed.federation.trainer import step_together
from polyfed.models.fused import Guidance


class FedAFD(GuidedFusion, AdversarialAlignment, EnsembleDistillation):
    """Adversarial fusion and distillation (FedAFD, CVPR 2026): personal clients and a large server model.

    A round: the server trains on P and sends its representations of P, and its encoders (every ``broadcast_every``
    rounds). A client trains its task on features fused with those of the frozen encoders (GFF), while two
    discriminators a modality, which stay with it, push its public representations towards the server's of the same and
    of the other modality (BAA). The server weighs clients' representations of P by likeness to its own (SED) and
    distils them. Clients are judged with their own model and fusion.

    Defaults follow the paper; where the released code differs, the other behaviour is an option, bundled in the preset
    ``fedafd-released``. Without BAA: ``beta: 0``; without GFF: ``fusion: none``; without SED: ``aggregation: mean``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "model": Lifetime.RUN,
        "optimizer": Lifetime.RUN,
        "encoders": Lifetime.RUN,
        "features": Lifetime.RUN,
    }

    only_if: ClassVar[Mapping[str, Condition]] = {"public_augment": ALIGNS | Only(kd_epochs=Not(0))}

    aggregation: SerializeAsAny[Weighting] = Field(default=SED(), description="weights over clients; the paper's: sed")
    server_first: bool = Field(default=True, description="train on P before the broadcast (Algorithm 1), not after")
    kd_weight: float = Field(default=0.4, ge=0, description="gamma, factor of the distillation loss")

    # ---- server half

    def aggregate(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> dict[str, Ensembled]:
        """Send representations, and encoders to those who lack the current ones; weigh what comes back (SED)."""
        version, encoders = self.current_encoders(server)
        had = {client.id for client in cohort.clients if self.has_encoders(server, client, version)}
        ensembles = self.ensembles(server, server_outputs)
        replies = cohort.ask(
            self.fit,
            check=self.outputs_check(server, server_outputs, "representations"),
            representations=self.to_wire(server, of_part(server_outputs), server_outputs.order),
            encoders=each(lambda client: Weights({} if client.id in had else self.encoders_for(client, encoders))),
            version=version,
        )
        for reply in replies:
            server.state.setdefault("received", {})[reply.sender.id] = torch.tensor(version)
            ensembles.add(reply, reply.representations)
        return ensembles.targets()

    # ---- client half

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations, encoders: Weights, version: int) -> Reply:
        """E epochs of task and alignment (supplement, Eq. 1), then representations of the public set, unfused."""
        server_outputs = self.from_wire(client, representations)
        guidance = self.receive_encoders(client, encoders, version)
        samples = client.exchanged(self.public_samples)
        self.begin_fusion(client)
        client.model.train()
        for epoch in client.epochs(self.local_epochs):
            for private, public in self.batch_pairs(client, samples, server_outputs, epoch):
                self._step(client, private, public, server_outputs, guidance)
        return Reply(
            representations=self.client_outputs(client, representations.order, representations),
            num_examples=client.num_examples,
        )

    def _step(
        self,
        client: Client,
        private: Batch | None,
        public: Batch | None,
        server_outputs: Mapping[str, Tensor],
        guidance: Guidance | None,
    ) -> None:
        # one optimiser each for encoders with classifier, for the fusion and for the discriminators
        trainers = {"optimizer": client.trainer(only=lambda name: not name.startswith("extras."))}
        if self.fusion != "none":
            trainers[FUSION] = self.fusion_trainer(client)
        if self.beta:
            trainers["discriminator"] = self.discriminator_trainer(client)
        losses = []
        if public is not None:
            local = self.local_representations(client, public, server_outputs)
            # discriminators first, as in adversarial training; the released code scales their loss by beta as well
            factor = self.beta if self.baa_update == "alternate" else 1.0
            trainers["discriminator"].step(factor * self.discriminating(client, public, local, server_outputs))
            losses.append(self.beta * self.alignment_loss(client, public, local, server_outputs))
        if private is not None:
            losses.append(self.fused_task_loss(client, private, guidance))
        moved = ("optimizer", FUSION) if private is not None else ("optimizer",)
        step_together(torch.stack(losses).sum(), *(trainers[name] for name in moved if name in trainers))
