"""FedAFD's fusion of a client's features with those of the server's encoders (GFF)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.algorithms.algorithm import Algorithm, Client, ClientInfo, Reply, Server, Weights, client_query
from polyfed.core.effects import PAIRING, SEVERAL, SINGLE, Inner, Never, Not, Only, Where
from polyfed.core.errors import RunError
from polyfed.data.samples import Batch, Samples
from polyfed.federation.client import Guide
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Trainer
from polyfed.models.fused import Fused, Guidance, Partner, SampleFeatures, of_batch, of_rows
from polyfed.models.fusion import GranularityFusion
from polyfed.models.model import Model
from polyfed.optim.settings import OptimizerSettings

FUSION, VERSION = "fusion", "version"
FUSES = Only(fusion=Not("none"))
"""Clients fuse their features with the server's."""
_OWN_SIZE = Inner(batch_size=Never("its batches are those of the task"))


class GuidedFusion(Algorithm):
    """Clients train and are judged on features fused with those of the server's frozen encoders, which they receive.

    A client keeps the encoders (``encoders``), and what these see of its data (``features``), until the next broadcast.
    """

    shares_encoders: ClassVar[bool] = True

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

    def add_modules(self, model: Model) -> None:
        """The fusion."""
        super().add_modules(model)
        if self.fusion != "none":
            model.extras[FUSION] = self._new_fusion(model.dim)

    def _new_fusion(self, dim: int) -> GranularityFusion:
        return GranularityFusion(dim, shared_global_branch=self.shared_global_branch)

    # ---- server half

    def current_encoders(self, server: Server) -> tuple[int, dict[str, Tensor]]:
        """The encoders that clients are to have, and the round of their broadcast."""
        if self.fusion == "none":
            return 0, {}
        # the last round in which encoders were broadcast, counted from the first
        version = server.clock.round - (server.clock.round - 1) % self.broadcast_every
        if version == server.clock.round:
            own = server.model.exchanged()
            now = {name: value for name, value in own.items() if name.startswith(("encoders.", "final_norm."))}
            if self.broadcast_every == 1:  # nobody will ask for them later: no copy
                return version, now
            server.state["broadcast"] = {name: value.detach().clone() for name, value in now.items()}
        return version, server.state["broadcast"]

    def has_encoders(self, server: Server, client: ClientInfo, version: int) -> bool:
        """Whether a client has the encoders of the broadcast ``version``, or needs none."""
        received = server.state.get("received", {}).get(client.id)
        return self.fusion == "none" or (received is not None and int(received) == version)

    def encoders_for(self, client: ClientInfo, encoders: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the encoders that a client is sent."""
        if self.send_encoders == "all":
            return dict(encoders)
        # the norm after the encoders belongs to all of them
        own = tuple(f"encoders.{name}." for name in client.modalities)
        return {name: value for name, value in encoders.items() if name.startswith((*own, "final_norm."))}

    # ---- client half

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

    def fused_task_loss(self, client: Client, batch: Batch, guidance: Guidance | None) -> Tensor:
        """The task's loss of a batch, fused where there is guidance."""
        if guidance is None:
            return client.task_loss(batch)
        with client.autocast():
            return client.task.loss(self.fused(client.model, of_batch(guidance, batch.index)), client.head, batch)

    def begin_fusion(self, client: Client) -> None:
        """Start the round with a new fusion, if so asked."""
        if self.reset_fusion and self.fusion != "none":
            client.model.extras[FUSION] = self._new_fusion(client.model.dim).to(client.device)
            client.optimizer_state.pop(FUSION, None)  # moments of other weights

    def fusion_trainer(self, client: Client) -> Trainer:
        """The optimiser of the fusion."""
        # the paper trains the fusion of image-text clients a fiftieth as fast
        settings = self.fusion_training_several if len(client.model.modalities) > 1 else self.fusion_training
        return client.trainer(FUSION, settings, lambda name: name.startswith(f"extras.{FUSION}"))

    def receive_encoders(self, client: Client, encoders: Weights, version: int) -> Guidance | None:
        """Keep the encoders that came; returns what the current ones make of the private data.

        Raises:
            RunError: the client has not got the encoders of this broadcast.
        """
        if self.fusion == "none" or not self._guide(client).train.modalities:
            return None  # in the second case the server encodes nothing that the client has
        if encoders:
            client.state["encoders"] = {**encoders, VERSION: torch.tensor(version)}
        kept = client.state.get("encoders", {})
        if not kept or int(kept[VERSION]) != version:
            held = f"those of round {int(kept[VERSION])}" if kept else "none"
            raise RunError(f"the server's encoders of round {version} are needed, but this client has {held}")
        # in the evaluation view: what is cached must not depend on a draw
        guidance = self._guidance(client, self._guide(client).train, kept)
        if self.cache_global_features:
            self._remember(client, guidance, version)
        return guidance

    def _guide(self, client: Client) -> Guide:
        if client.guide is None:
            raise RunError("this client was not told the architecture of the server's encoders, which it is to receive")
        return client.guide

    def _guidance(self, client: Client, samples: Samples, kept: Mapping[str, Tensor]) -> Guidance:
        model = self._guide(client).model({name: value for name, value in kept.items() if name != VERSION})
        own = samples.only(
            [name for name in samples.modalities if any(key.startswith(f"encoders.{name}.") for key in kept)]
        )
        return Guidance(model, own, self.fusion == "maps", client.evaluation_batch, {})

    def _remember(self, client: Client, guidance: Guidance, version: int) -> None:
        """Encode private data once a broadcast; between broadcasts the features are kept."""
        kept = client.state.get("features", {})
        if kept and int(kept[VERSION]) == version:
            for name in guidance.samples.modalities:
                mask = kept.get(f"{name}/mask")
                there = client.device
                guidance.tables[name] = SampleFeatures(kept[name].to(there), None if mask is None else mask.to(there))
            return
        with client.autocast():
            guidance.compute()
        if self.broadcast_every > 1:
            masks = {f"{name}/mask": table.mask for name, table in guidance.tables.items() if table.mask is not None}
            values = {name: table.values for name, table in guidance.tables.items()}
            client.state["features"] = {**values, **masks, VERSION: torch.tensor(version)}

    def fused(self, model: Model, partner: Partner) -> Fused:
        """A client's model, fused with what ``partner`` finds."""
        fusion = model.extras[FUSION]
        assert isinstance(fusion, GranularityFusion)
        return Fused(
            model,
            fusion,
            partner,
            maps=self.fusion == "maps",
            unit=self.fuse == "representations",
            renormalise=self.renormalise,
        )
