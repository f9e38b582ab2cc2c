"""FedAFD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, count
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.weighting import Weighting
from polyfed.aggregation.weightings.sed import SED
from polyfed.algorithms.algorithm import Lifetime, Reply, client_query, client_step, each
from polyfed.algorithms.shared.ensemble_distillation import EnsembleDistillation
from polyfed.core.effects import PAIRING, SEVERAL, SINGLE, Condition, Inner, Never, Not, Only, Where
from polyfed.core.errors import RunError
from polyfed.data.samples import Batch, Samples
from polyfed.federation.client import Client, ClientInfo, Guide
from polyfed.federation.cohort import Cohort
from polyfed.federation.mixing import Pair, interleave
from polyfed.federation.participant import Trainer, step_together
from polyfed.federation.public_outputs import PublicOutputs
from polyfed.federation.server import Server
from polyfed.federation.settings import TrainingSettings
from polyfed.losses.adversarial import EncoderForm, discriminator_loss, encoder_loss
from polyfed.models.discriminators import Discriminator
from polyfed.models.fused import Fused, Guidance, Partner, Seen, of_batch, of_rows
from polyfed.models.fusion import GranularityFusion
from polyfed.models.model import Model
from polyfed.optim.settings import OptimizerSettings
from polyfed.wire.payload import Representations, Weights

_DISCRIMINATORS, _FUSION, _VERSION = "discriminator_", "fusion", "version"


ALIGNS, FUSES = Only(beta=Not(0)), Only(fusion=Not("none"))
_OWN_SIZE = Inner(batch_size=Never("its batches are those of the task"))


class FedAFD(EnsembleDistillation):
    """Adversarial fusion and distillation (FedAFD, CVPR 2026): personal clients and a large server model.

    A round: the server trains on P and sends what it sees there, and its encoders (every ``broadcast_every``
    rounds). A client trains its task on features fused with those of the frozen encoders (GFF), while two
    discriminators a modality, which stay with it, push its public representations towards the server's of the same and
    of the other modality (BAA). The server weighs what clients see in P by likeness to what it sees itself (SED) and
    distils it. Clients are judged with their own model and fusion.

    Defaults follow the paper; where the released code differs, the other behaviour is an option, bundled in the preset
    ``fedafd-released``. Without BAA: ``beta: 0``; without GFF: ``fusion: none``; without SED: ``aggregation: mean``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "model": Lifetime.RUN,
        "optimizer": Lifetime.RUN,
        "encoders": Lifetime.RUN,
        "features": Lifetime.RUN,
    }
    shares_encoders: ClassVar[bool] = True

    only_if: ClassVar[Mapping[str, Condition]] = {"public_augment": ALIGNS | Only(kd_epochs=Not(0))}

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
    fusion: Literal["vectors", "maps", "none"] = Field(
        default="vectors", description="fuse vectors (the paper's setting) or features by position (GFF), or nothing"
    )
    fuse: Annotated[Literal["representations", "embeddings"], FUSES] = Field(
        default="representations", description="fuse vectors of unit norm, or as encoders give them"
    )
    renormalise: Annotated[bool, FUSES & Where(PAIRING)] = Field(
        default=True, description="unit norm of fused vectors in retrieval; off as released"
    )
    shared_global_branch: Annotated[bool, FUSES] = Field(
        default=False, description="three live branches instead of four, as released"
    )
    reset_fusion: Annotated[bool, FUSES] = Field(
        default=False, description="a new fusion module in every round, as released"
    )
    fusion_training: Annotated[TrainingSettings, FUSES & Where(SINGLE), _OWN_SIZE] = Field(
        default=TrainingSettings(optimizer=OptimizerSettings(kind="adam", lr=0.005, weight_decay=0.01)),
        description="optimiser of the fusion module at clients of one modality",
    )
    fusion_training_several: Annotated[TrainingSettings, FUSES & Where(SEVERAL), _OWN_SIZE] = Field(
        default=TrainingSettings(optimizer=OptimizerSettings(kind="adam", lr=1e-4, weight_decay=0.1)),
        description="optimiser of the fusion module at clients of several modalities",
    )
    broadcast_every: Annotated[int, FUSES] = Field(
        default=1, ge=1, description="K, rounds between two broadcasts of the encoders"
    )
    send_encoders: Annotated[Literal["own", "all"], FUSES & Where(SINGLE)] = Field(
        default="own", description="encoders of the client's modalities, which are all it uses, or of all, as released"
    )
    cache_global_features: Annotated[bool, FUSES] = Field(
        default=True,
        description="encode private data once a broadcast, not once a step; the same results up to rounding",
    )
    aggregation: SerializeAsAny[Weighting] = Field(default=SED(), description="weights over clients; the paper's: sed")
    server_first: bool = Field(default=True, description="train on P before the broadcast (Algorithm 1), not after")
    kd_weight: float = Field(default=0.4, ge=0, description="gamma, factor of the distillation loss")

    def add_modules(self, model: Model) -> None:
        """The discriminators of each modality, and the fusion."""
        names = ["every"] if self.share_discriminators else list(model.encoders)
        for name in names if self.beta else []:
            for kind in ("own", "cross"):
                model.extras[f"{_DISCRIMINATORS}{kind}_{name}"] = Discriminator(
                    model.dim, double_sigmoid=self.double_sigmoid
                )
        if self.fusion != "none":
            model.extras[_FUSION] = self._new_fusion(model.dim)

    def _new_fusion(self, dim: int) -> GranularityFusion:
        return GranularityFusion(dim, shared_global_branch=self.shared_global_branch)

    # ---- server half

    def aggregate(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> dict[str, Ensembled]:
        """Send representations, and encoders to those who lack the current ones; weigh what comes back (SED)."""
        version, encoders = self._current(server)
        had = {client.id for client in cohort.clients if self._has(server, client, version)}
        ensembles = self.ensembles(server, server_outputs)
        replies = cohort.ask(
            self.fit,
            check=self.outputs_check(server_outputs, "representations"),
            representations=server_outputs,
            encoders=each(lambda client: Weights({} if client.id in had else self._for(client, encoders))),
            version=version,
        )
        for reply in replies:
            server.state.setdefault("received", {})[reply.sender.id] = torch.tensor(version)
            ensembles.add(reply, reply.representations)
        return ensembles.targets()

    def _current(self, server: Server) -> tuple[int, dict[str, Tensor]]:
        """The encoders that clients are to have, and the round of their broadcast."""
        if self.fusion == "none":
            return 0, {}
        version = server.clock.round - (server.clock.round - 1) % self.broadcast_every
        if version == server.clock.round:
            own = server.model.state_dict()
            now = {name: value for name, value in own.items() if name.startswith(("encoders.", "final_norm."))}
            if self.broadcast_every == 1:
                return version, now
            server.state["broadcast"] = {name: value.detach().clone() for name, value in now.items()}
        return version, server.state["broadcast"]

    def _has(self, server: Server, client: ClientInfo, version: int) -> bool:
        received = server.state.get("received", {}).get(client.id)
        return self.fusion == "none" or (received is not None and int(received) == version)

    def _for(self, client: ClientInfo, encoders: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.send_encoders == "all":
            return dict(encoders)
        own = tuple(f"encoders.{name}." for name in client.modalities)
        return {name: value for name, value in encoders.items() if name.startswith((*own, "final_norm."))}

    # ---- client half

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations, encoders: Weights, version: int) -> Reply:
        """E epochs of task and alignment (supplement, Eq. 1), then representations of the public set, unfused."""
        server_outputs = {name: value.to(client.device) for name, value in representations.items()}
        guidance = self._received(client, encoders, version)
        samples = client.exchanged(self.public_samples)
        if self.reset_fusion and self.fusion != "none":
            client.model.extras[_FUSION] = self._new_fusion(client.model.dim).to(client.device)
            client.optimizer_state.pop(_FUSION, None)
        client.model.train()
        for epoch in client.epochs(self.local_epochs):
            for private, public in self._steps(client, samples, server_outputs, epoch):
                self._step(client, private, public, server_outputs, guidance)
        outputs = client.represent(samples, list(server_outputs), training=self.extraction == "train")
        own = {name: outputs[name] for name in client.model.modalities if name in outputs}
        return Reply(
            representations=Representations(own, order=representations.order), num_examples=client.num_examples
        )

    @client_query(float)
    def assess(self, client: Client) -> Reply:
        """Evaluate the client's model, fused; a client that has never received encoders by its own features."""
        kept = client.state.get("encoders")
        if client.test is None or not kept or self.fusion == "none":
            return super().assess(client)
        there = self._guide(client).test
        assert there is not None
        guidance = self._guidance(client, there, kept)
        partner, samples = of_rows(guidance, client.test)
        fused = self.fused(client.model, partner)
        with client.autocast():
            metrics = client.task.evaluate(fused, client.head, samples, batch_size=client.evaluation_batch)
        return Reply(**metrics)

    def _step(
        self,
        client: Client,
        private: Batch | None,
        public: Batch | None,
        server_outputs: Mapping[str, Tensor],
        guidance: Guidance | None,
    ) -> None:
        trainers = self._trainers(client)
        losses = []
        if public is not None:
            local = self._local(client, public, server_outputs)
            factor = self.beta if self.baa_update == "alternate" else 1.0
            trainers["discriminator"].step(factor * self.discriminating(client, public, local, server_outputs))
            losses.append(self.beta * self.alignment(client, public, local, server_outputs))
        if private is not None:
            losses.append(self._task_loss(client, private, guidance))
        moved = ("optimizer", _FUSION) if private is not None else ("optimizer",)
        step_together(torch.stack(losses).sum(), *(trainers[name] for name in moved if name in trainers))

    def discriminating(
        self, client: Client, batch: Batch, local: Mapping[str, Tensor], server_outputs: Mapping[str, Tensor]
    ) -> Tensor:
        """What the discriminators minimise: -L_adv, summed over modalities and levels."""
        parts = [
            discriminator_loss(judge, real[batch.index], local[modality])
            for modality, judge, real in self._levels(client, local, server_outputs)
        ]
        return torch.stack(parts).sum()

    def alignment(
        self, client: Client, batch: Batch, local: Mapping[str, Tensor], server_outputs: Mapping[str, Tensor]
    ) -> Tensor:
        """What the encoders minimise: L_adv = mean_k (L_in + L_cr), summed over the client's modalities."""
        parts = [
            encoder_loss(judge, real[batch.index], local[modality], self.adversarial)
            for modality, judge, real in self._levels(client, local, server_outputs)
        ]
        return torch.stack(parts).sum()

    def _levels(
        self, client: Client, local: Mapping[str, Tensor], server_outputs: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, torch.nn.Module, Tensor]]:
        """(modality, discriminator, its real representations): the same modality, then each other one."""
        for modality in local:
            name = "every" if self.share_discriminators else modality
            yield modality, client.model.extras[f"{_DISCRIMINATORS}own_{name}"], server_outputs[modality]
            for other in server_outputs:
                if other != modality:
                    yield modality, client.model.extras[f"{_DISCRIMINATORS}cross_{name}"], server_outputs[other]

    def _local(self, client: Client, batch: Batch, server_outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with client.autocast():
            return {name: client.model.represent(name, x) for name, x in batch.inputs.items() if name in server_outputs}

    def _task_loss(self, client: Client, batch: Batch, guidance: Guidance | None) -> Tensor:
        if guidance is None:
            return client.task_loss(batch)
        with client.autocast():
            return client.task.loss(self.fused(client.model, of_batch(guidance, batch.index)), client.head, batch)

    def _trainers(self, client: Client) -> dict[str, Trainer]:
        """One optimiser each for encoders with classifier, for the fusion and for the discriminators."""
        trainers = {"optimizer": client.trainer(only=lambda name: not name.startswith("extras."))}
        if self.fusion != "none":
            settings = self.fusion_training_several if len(client.model.modalities) > 1 else self.fusion_training
            trainers[_FUSION] = client.trainer(_FUSION, settings, lambda name: name.startswith(f"extras.{_FUSION}"))
        if self.beta:
            trainers["discriminator"] = client.trainer(
                "discriminator", self.discriminator, lambda name: name.startswith(f"extras.{_DISCRIMINATORS}")
            )
        return trainers

    def _steps(
        self, client: Client, samples: Samples, server_outputs: Mapping[str, Tensor], epoch: int
    ) -> Iterator[Pair]:
        """Private and public batches of one epoch, as ``baa_update`` combines them."""
        private = client.batches(client.train, f"task-{epoch}")
        able = any(name in server_outputs for name in client.model.modalities)
        if not self.beta or not able:
            yield from ((batch, None) for batch in private)
            return
        size, view = self.public_batch_size, self.public_augment
        passes = (
            client.public_batches(f"align-{epoch}-{number}", size, augment=view, samples=samples) for number in count()
        )
        if self.baa_update == "alternate":
            yield from ((None, batch) for batch in next(passes))
            yield from ((batch, None) for batch in private)
        else:
            wanted = self.public_batches_per_epoch
            yield from interleave(private, chain.from_iterable(passes), client.steps_an_epoch, wanted)

    def _received(self, client: Client, encoders: Weights, version: int) -> Guidance | None:
        """Keep the encoders that came; what those that are current see of the private data."""
        if self.fusion == "none" or not self._guide(client).train.modalities:
            return None  # in the second case the server encodes nothing that the client has
        if encoders:
            client.state["encoders"] = {**encoders, _VERSION: torch.tensor(version)}
        kept = client.state.get("encoders", {})
        if not kept or int(kept[_VERSION]) != version:
            held = f"those of round {int(kept[_VERSION])}" if kept else "none"
            raise RunError(f"the server's encoders of round {version} are needed, but this client has {held}")
        guidance = self._guidance(client, self._guide(client).train, kept)
        if self.cache_global_features:
            self._remember(client, guidance, version)
        return guidance

    def _guide(self, client: Client) -> Guide:
        if client.guide is None:
            raise RunError("this client was not told the architecture of the server's encoders, which it is to receive")
        return client.guide

    def _guidance(self, client: Client, samples: Samples, kept: Mapping[str, Tensor]) -> Guidance:
        model = self._guide(client).model({name: value for name, value in kept.items() if name != _VERSION})
        own = samples.only(
            [name for name in samples.modalities if any(key.startswith(f"encoders.{name}.") for key in kept)]
        )
        return Guidance(model, own, self.fusion == "maps", client.evaluation_batch, {})

    def _remember(self, client: Client, guidance: Guidance, version: int) -> None:
        """Encode private data once a broadcast; between broadcasts the features are kept."""
        kept = client.state.get("features", {})
        if kept and int(kept[_VERSION]) == version:
            for name in guidance.samples.modalities:
                mask = kept.get(f"{name}/mask")
                there = client.device
                guidance.tables[name] = Seen(kept[name].to(there), None if mask is None else mask.to(there))
            return
        with client.autocast():
            guidance.compute()
        if self.broadcast_every > 1:
            masks = {f"{name}/mask": table.mask for name, table in guidance.tables.items() if table.mask is not None}
            values = {name: table.values for name, table in guidance.tables.items()}
            client.state["features"] = {**values, **masks, _VERSION: torch.tensor(version)}

    def fused(self, model: Model, partner: Partner) -> Fused:
        """A client's model, fused with what ``partner`` finds."""
        fusion = model.extras[_FUSION]
        assert isinstance(fusion, GranularityFusion)
        return Fused(
            model,
            fusion,
            partner,
            maps=self.fusion == "maps",
            unit=self.fuse == "representations",
            renormalise=self.renormalise,
        )
