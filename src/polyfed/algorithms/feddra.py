"""FedDRA, the later form of FedAID."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import Lifetime, Reply, client_step, each
from polyfed.algorithms.robust_alignment import LikePart, RobustAlignment, chosen, local_view, noting, parts_of
from polyfed.data.samples import Batch
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.party import Regulariser
from polyfed.federation.payload import Weights
from polyfed.federation.server import Server
from polyfed.losses.guidance import Reduction
from polyfed.models.binding import Bound, Features, aligners_of, frozen
from polyfed.models.model import Embedder


class FedDRA(RobustAlignment):
    """Federated distributionally robust alignment (TMLR; the third version of arXiv 2404.03854, as released).

    First the align modules alone train at the clients, on frozen encoders, and become the robust aligner: their mean,
    by weights that follow the clients' losses (Eq. 4). Then everything trains on the task, while representations are
    held near those that the received encoder gives under the robust aligner. The mean of that is the next model.

    Where the released code does not say when losses are measured, it is done with the model that the second stage
    starts from, by which clients are weighed in the next round: this costs no message.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"encoder": Lifetime.ROUND}

    robust_steps: int = Field(default=20, ge=1, description="batches of the first stage, which trains aligners alone")
    guidance_reduction: Reduction = Field(
        default="element", description="of squared distances: the released code's mean over elements, mean, or sum"
    )
    measure_share: float = Field(
        default=0.1, gt=0, le=1, description="share of a client's training samples that its loss v is measured on"
    )

    @model_validator(mode="after")
    def _has_a_contrast(self) -> Self:
        usual = type(self).model_fields["contrast_temperature"].default
        if self.guidance != "contrastive" and self.contrast_temperature != usual:
            raise ValueError(f"contrast_temperature has no effect with guidance '{self.guidance}'; remove it")
        return self

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Robust aligner by weights, guided training, average, weights of the next round."""
        kind, parts = self.kind(server), self.parts(server)
        asked = cohort.ask(
            self.align,
            check=LikePart(server, parts.without_encoder),
            weights=server.weights_for(cohort.clients[0]),
            factor=each(self.loss_factor(server)),
        )
        robust = self.robust_mean(server, asked)
        losses: dict[str, float] = {}
        replies = cohort.ask(self.bind, check=self.like(server), aligner=Weights(robust))
        server.update_weights({kind: self.averaged(noting(replies, losses))})
        self.reweigh(server, losses)

    # ---- client half

    @client_step(weights=Weights)
    def align(self, client: Client, weights: Weights, factor: float) -> Reply:
        """Train align modules and heads on the task, on features of the frozen encoder."""
        parts = parts_of(client)
        client.receive(weights)
        client.state["encoder"] = dict(chosen(weights, parts.encoder))
        trained = set(parts.without_encoder)
        client.trainer(only=lambda name: name in trained)  # what fit will use
        frozen_encoder = frozen(client.model)

        def loss(model: Embedder, batch: Batch) -> Tensor:
            view = Bound(Features(frozen_encoder, frozen=True), aligners_of(client.model))
            return factor * client.task.loss(view, client.head, batch)

        client.fit(client.train, epochs=1, steps=self.robust_steps, purpose="align", task_weight=0, regulariser=loss)
        return Reply(weights=chosen(client.model.state_dict(), parts.without_encoder))

    @client_step(float, weights=Weights, num_examples=int)
    def bind(self, client: Client, aligner: Weights) -> Reply:
        """Train all on the task under guidance; before that, the loss of what was received."""
        client.receive({**client.state.pop("encoder"), **aligner})
        told = self.measured(client, lambda model, batch: client.task.loss(local_view(model), client.head, batch))
        client.fit(
            client.train,
            epochs=self.local_epochs,
            steps=self.local_steps,
            task_weight=0,
            regulariser=self.guided_loss(client),
        )
        return Reply(weights=Weights(client.model.state_dict()), num_examples=client.num_examples, **told)

    def guided_loss(self, client: Client) -> Regulariser:
        """Task and distance to what the received model gives."""
        received = frozen(client.model)

        def loss(model: Embedder, batch: Batch) -> Tensor:
            anchors = Bound(Features(received, frozen=True), aligners_of(received))
            return self.local_loss(client, local_view(client.model), anchors, batch)

        return loss
