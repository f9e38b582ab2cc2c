"""FedAFD's fusion of a client's features with those of the server's encoders (GFF), a part that the method holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import Client, ClientInfo, Reply, Server, Weights, each
from polyfed.core.errors import RunError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.federation.client import ServerEncoders
from polyfed.federation.settings import TrainingSettings, require_no_batch_size
from polyfed.federation.trainer import Trainer
from polyfed.models.fusion import Fused, FusionGuidance, GranularityFusion, Partner, SampleFeatures, of_batch, of_rows
from polyfed.models.model import Model
from polyfed.optim.settings import OptimizerSettings

FUSION, VERSION = "fusion", "version"


class ClientTask(NamedTuple):
    """A client's task in local training: the loss of a private batch, and the optimisers of modules added for it."""

    loss: Callable[[Batch], Tensor]
    trainers: Sequence[Trainer] = ()


class GuidedFusion(Settings):
    """Fusion of clients' features with those of the server's frozen encoders, in training and in evaluation.

    A client keeps the encoders (``encoders``), and their features of its data (``features``), until the next broadcast.
    """

    level: Literal["vectors", "maps"] = Field(
        default="vectors", description="fuse vectors (the paper's setting) or features by position (GFF)"
    )
    inputs: Literal["representations", "embeddings"] = Field(
        default="representations", description="fuse vectors of unit norm, or as encoders give them"
    )
    renormalise: bool = Field(default=True, description="unit norm of fused vectors in retrieval; released code: false")
    shared_global_branch: bool = Field(default=False, description="three live branches (released code), not four")
    reset: bool = Field(default=False, description="a new fusion module in every round, as in the released code")
    training: TrainingSettings = Field(
        default=TrainingSettings(optimizer=OptimizerSettings(kind="adam", lr=0.005, weight_decay=0.01)),
        description="optimiser of the fusion module at clients of one modality",
    )
    training_several: TrainingSettings = Field(
        default=TrainingSettings(optimizer=OptimizerSettings(kind="adam", lr=1e-4, weight_decay=0.1)),
        description="optimiser of the fusion module at clients of several modalities",
    )
    broadcast_every: int = Field(default=1, ge=1, description="K, rounds between two broadcasts of the encoders")
    send: Literal["own", "all"] = Field(
        default="own",
        description="encoders of the client's modalities, which it uses, or of all (paper and released code)",
    )
    cache: bool = Field(
        default=True,
        description="encode private data once per broadcast, not per step; the same results up to rounding",
    )

    @model_validator(mode="after")
    def _all_act(self) -> Self:
        for training in (self.training, self.training_several):
            require_no_batch_size(training, "its batches are those of the task")
        return self

    def add_modules(self, model: Model) -> None:
        """Adds the fusion to ``model.extras``."""
        model.extras[FUSION] = self._new_fusion(model.dim)

    def _new_fusion(self, dim: int) -> GranularityFusion:
        return GranularityFusion(dim, shared_global_branch=self.shared_global_branch)

    # ---- server half

    def broadcast(self, server: Server) -> tuple[int, each[Weights]]:
        """Round of the current broadcast, and each client's encoders; none for clients that have them."""
        version, encoders = self.current_encoders(server)
        received = dict(server.state.get("received", {}))

        def missing(client: ClientInfo) -> Weights:
            has_them = client.id in received and int(received[client.id]) == version
            return Weights({} if has_them else self.encoders_for(client, encoders))

        return version, each(missing)

    def delivered(self, server: Server, reply: Reply) -> None:
        """Records the broadcast whose encoders the sender of a reply has."""
        version = self.version_at(server.clock.round - reply.staleness)
        server.state.setdefault("received", {})[reply.sender.id] = torch.tensor(version)

    def current_encoders(self, server: Server) -> tuple[int, dict[str, Tensor]]:
        """Round of the current broadcast, and its encoders."""
        version = self.version_at(server.clock.round)
        if version == server.clock.round:
            own = server.model.exchanged()
            named = {name: value for name, value in own.items() if name.startswith(("encoders.", "final_norm."))}
            # a client at work may look at them once the server has trained on
            now = {name: value.detach().clone() for name, value in named.items()}
            if self.broadcast_every == 1:  # no later round needs them
                return version, now
            server.state["broadcast"] = now
        return version, server.state["broadcast"]

    def version_at(self, number: int) -> int:
        """The round in which the encoders of round ``number`` were broadcast."""
        return number - (number - 1) % self.broadcast_every

    def encoders_for(self, client: ClientInfo, encoders: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The encoders that a client is sent."""
        if self.send == "all":
            return dict(encoders)
        # the norm after the encoders belongs to all of them
        own = tuple(f"encoders.{name}." for name in client.modalities)
        return {name: value for name, value in encoders.items() if name.startswith((*own, "final_norm."))}

    # ---- client half

    def evaluate(self, client: Client) -> dict[str, float] | None:
        """Metrics of the client's fused model; None for a client without test samples, or without encoders yet."""
        kept = client.state.get("encoders")
        if client.test is None or not kept:
            return None
        there = self._guide(client).test
        assert there is not None
        partner, samples = of_rows(self._guidance(client, there, kept), client.test)
        fused = self.fused(client.model, partner)
        with client.autocast():
            return client.task.evaluate(fused, client.head, samples, batch_size=client.setup.evaluation_batch)

    def client_task(self, client: Client, encoders: Weights, version: int) -> ClientTask:
        """The task on fused features, with the received encoders as guidance."""
        guidance = self.receive(client, encoders, version)
        if self.reset:
            client.model.extras[FUSION] = self._new_fusion(client.model.dim).to(client.device)
            client.optimizers.states.pop(FUSION, None)  # moments of other weights
        # the released code trains the fusion of image-text clients a fiftieth as fast
        settings = self.training_several if len(client.modalities) > 1 else self.training
        trainer = client.trainer(FUSION, settings, lambda name: name.startswith(f"extras.{FUSION}"))
        return ClientTask(lambda batch: self.task_loss(client, batch, guidance), [trainer])

    def task_loss(self, client: Client, batch: Batch, guidance: FusionGuidance | None) -> Tensor:
        """The task's loss of a batch, fused where there is guidance."""
        if guidance is None:
            return client.task_loss(batch)
        partner, positions = of_batch(guidance, batch)
        with client.autocast():
            return client.task.loss(self.fused(client.model, partner), client.head, positions)

    def receive(self, client: Client, encoders: Weights, version: int) -> FusionGuidance | None:
        """Keeps the received encoders; returns the features of the current ones on the private data.

        Raises:
            RunError: The client lacks the encoders of this broadcast.
        """
        if not self._guide(client).train.modalities:
            return None  # the server encodes none of the modalities
        if encoders:
            client.state["encoders"] = {**encoders, VERSION: torch.tensor(version)}
        kept = client.state.get("encoders", {})
        if not kept or int(kept[VERSION]) != version:
            held = f"those of round {int(kept[VERSION])}" if kept else "none"
            raise RunError(f"the server's encoders of round {version} are needed, but this client has {held}")
        # in the evaluation view: what is cached must not depend on a draw
        guidance = self._guidance(client, self._guide(client).train, kept)
        if self.cache:
            self._remember(client, guidance, version)
        return guidance

    def _guide(self, client: Client) -> ServerEncoders:
        if client.server_encoders is None:
            raise RunError("the architecture of the server's encoders, which this client receives, is unknown to it")
        return client.server_encoders

    def _guidance(self, client: Client, samples: Samples, kept: Mapping[str, Tensor]) -> FusionGuidance:
        model = self._guide(client).model({name: value for name, value in kept.items() if name != VERSION})
        own = samples.only(
            [name for name in samples.modalities if any(key.startswith(f"encoders.{name}.") for key in kept)]
        )
        return FusionGuidance(model, own, self.level == "maps", client.setup.evaluation_batch, {})

    def _remember(self, client: Client, guidance: FusionGuidance, version: int) -> None:
        """Encodes private data once per broadcast; between broadcasts the features are kept."""
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
        """A client's model, fused with the features of ``partner``."""
        fusion = model.extras[FUSION]
        assert isinstance(fusion, GranularityFusion)
        return Fused(
            model,
            fusion,
            partner,
            maps=self.level == "maps",
            unit=self.inputs == "representations",
            renormalise=self.renormalise,
        )


class NoFusion:
    """Local training without fusion: no encoders are sent, and the task has the client's own features."""

    def add_modules(self, model: Model) -> None:
        """Adds nothing."""

    def broadcast(self, server: Server) -> tuple[int, each[Weights]]:
        """No encoders."""
        return 0, each(lambda client: Weights({}))

    def delivered(self, server: Server, reply: Reply) -> None:
        """Records nothing."""

    def evaluate(self, client: Client) -> None:
        """None: the client is judged by its own features."""

    def client_task(self, client: Client, encoders: Weights, version: int) -> ClientTask:
        """The client's task."""
        return ClientTask(client.task_loss)
