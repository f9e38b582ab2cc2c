"""FedDRA, the later form of FedAID."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Server, Weights, client_step, each
from polyfed.algorithms.shared.global_models import noted, weights_check
from polyfed.algorithms.shared.robust_alignment import (
    RobustAlignment,
    local_view,
    loss_reports,
    parts_of,
    selected,
    task_loss,
)
from polyfed.core.effects import Not, Only
from polyfed.data.samples import Batch
from polyfed.federation.trainer import Regulariser
from polyfed.losses.distillation import GuidanceReduction
from polyfed.models.binding import Bound, EncoderFeatures, aligners_of, frozen_aligners, frozen_copy
from polyfed.models.model import Embedder

Mode = Literal["training", "evaluation"]


_GUIDES = Only(guidance_weight=Not(0))


class FedDRA(RobustAlignment):
    """Federated distributionally robust alignment (TMLR; the third version of arXiv 2404.03854).

    First the align modules alone train at the clients, on frozen encoders, and become the robust aligner: their mean,
    by weights that follow the clients' losses (Eq. 4). Then everything trains on the task, while representations are
    held near those that the received encoder gives under the robust aligner. The mean of that is the next model.

    The released code does more in each stage, and the preset ``feddra-mimic`` all of it: ``guided_stages: both``,
    ``weighted_stages: both`` with ``weight_use: loss``, ``aligner_in_stage_two: local``, ``measured_on: aggregated``,
    ``measure: guided``, ``frozen_encoder_mode: training``, ``divergence: released``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "encoder": Lifetime.ROUND,
        "aligner": Lifetime.ROUND,
        "teacher": Lifetime.ROUND,
    }

    robust_steps: int = Field(default=20, ge=1, description="batches of the first stage, which trains aligners alone")
    guidance_reduction: GuidanceReduction = Field(
        default="element", description="of squared distances: the released code's mean over elements, mean, or sum"
    )
    measure_share: float = Field(
        default=0.1, gt=0, le=1, description="share of a client's training samples that its loss v is measured on"
    )
    guided_stages: Annotated[Literal["second", "both"], _GUIDES] = Field(
        default="second",
        description="stages with guidance; in the first (released) its anchors are those of the last round's teacher",
    )
    weighted_stages: Annotated[Literal["first", "both"], Only(weight_use={"loss", "both"})] = Field(
        default="first",
        description="stages whose losses w is a factor of, with weight_use loss or both; released: both",
    )
    aligner_in_stage_two: Literal["averaged", "local"] = Field(
        default="averaged",
        description="what the second stage trains on from: the robust aligner, or the client's own of the first "
        "(released); anchors are the robust aligner's in either case",
    )
    measured_on: Literal["received", "aggregated"] = Field(
        default="received",
        description="v is of the model that the second stage is sent, or of the mean that comes of it (released), "
        "which costs an ask",
    )
    measure: Annotated[Literal["task", "guided"], _GUIDES] = Field(
        default="task", description="v: the task's loss, or that with guidance by the robust aligner (released)"
    )
    anchor_mode: Annotated[Mode, _GUIDES] = Field(
        default="training",
        description="mode of what gives the anchors: training, as what is guided by them, so that equal weights are at "
        "distance 0 (released), or evaluation",
    )
    frozen_encoder_mode: Mode = Field(
        default="evaluation", description="mode of the encoder in the first stage; training (released): with dropout"
    )

    @model_validator(mode="after")
    def _has_anchors_to_measure(self) -> Self:
        if self.measure == "guided" and self.measured_on == "received":
            raise ValueError("measure 'guided' needs measured_on 'aggregated': the received model gives the anchors")
        return self

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Robust aligner, guided training, average, weights of the next round."""
        robust, losses = self.robust_aligner(server, cohort), dict[str, float]()
        factor = each(self.loss_factor(server)) if self.weighted_stages == "both" else 1.0
        replies = cohort.ask(
            self.bind,
            check=weights_check(server),
            origins={"weights": Weights(server.weights[self.kind(server)] | robust)},
            aligner=Weights(robust),
            factor=factor,
        )
        aggregated = self.averaged(noted(replies, lambda reply: losses.update(loss_reports([reply]))))
        server.update_weights({self.kind(server): aggregated})
        if self.measured_on == "aggregated":
            losses = loss_reports(cohort.ask(self.judge, weights=Weights(aggregated)))
        self.reweigh(server, losses)

    def robust_aligner(self, server: Server, cohort: Cohort) -> dict[str, Tensor]:
        """Stage 1 and the weighted mean of what it gives, whose layers are the teacher of the next round's."""
        names = self.parts(server).without_encoder
        replies = cohort.ask(
            self.align,
            check=weights_check(server, names),
            weights=server.weights_for(cohort.clients[0]),
            teacher=Weights(server.state.get("teacher", {})),
            factor=each(self.loss_factor(server)),
        )
        robust = self.robust_mean(server, replies)
        if self.guided_stages == "both":
            server.state["teacher"] = _layers(robust)
        return robust

    # ---- client half

    @client_step(weights=Weights)
    def align(self, client: Client, weights: Weights, teacher: Weights, factor: float) -> Reply:
        client.load_weights(weights)
        parts = parts_of(client)
        client.state["encoder"] = dict(selected(weights, parts.encoder))
        loss = self.aligner_loss(client, {**selected(weights, parts.aligner), **teacher})
        learnt = selected(self.train_part(client, parts.without_encoder, "align", loss, factor), parts.without_encoder)
        if self.aligner_in_stage_two == "local":
            client.state["aligner"] = dict(learnt)
        return Reply(weights=learnt)

    @client_step(float, weights=Weights, num_examples=int)
    def bind(self, client: Client, aligner: Weights, factor: float) -> Reply:
        # not sent twice: the first stage of this round has left it with the client
        encoder = client.state.pop("encoder")
        client.load_weights({**encoder, **aligner})
        measured = self.measured(client, task_loss(client)) if self.measured_on == "received" else {}
        # before a local aligner is loaded: anchors are the robust aligner's in either case
        loss = self.guided_loss(client)
        if self.measure == "guided":
            client.state["teacher"] = _layers(aligner)
        if self.aligner_in_stage_two == "local":
            client.load_weights({**encoder, **client.state.pop("aligner")})
        client.fit(
            client.train,
            epochs=self.local_epochs,
            steps=self.local_steps,
            task_weight=0,
            regulariser=lambda model, batch: factor * loss(model, batch),
        )
        return Reply(weights=Weights(client.model.exchanged()), num_examples=client.num_examples, **measured)

    @client_step(float)
    def judge(self, client: Client, weights: Weights) -> Reply:
        client.load_weights(weights)
        return Reply(**self.measured(client, self.aggregated_loss(client)))

    def aligner_loss(self, client: Client, teacher: Mapping[str, Tensor]) -> Regulariser:
        """Loss of the first stage: the task's; with ``guided_stages: both`` also the distance to the teacher's."""
        redrawn = self.frozen_encoder_mode == "training"
        encoder = frozen_copy(client.model, training=redrawn)
        anchors = frozen_aligners(client.model, teacher, training=self.anchor_mode == "training")

        def loss(model: Embedder, batch: Batch) -> Tensor:
            features = EncoderFeatures(encoder, frozen=True)
            local = Bound(features, aligners_of(client.model))
            if self.guided_stages == "second" or not self.guidance_weight:
                return client.task.loss(local, client.head, batch)
            own = EncoderFeatures(encoder, frozen=True) if redrawn else features  # dropout draws for the anchors anew
            return self.local_loss(client, local, Bound(own, anchors), batch)

        return loss

    def guided_loss(self, client: Client) -> Regulariser:
        received = frozen_copy(client.model, training=self.anchor_mode == "training")

        def loss(model: Embedder, batch: Batch) -> Tensor:
            anchors = Bound(EncoderFeatures(received, frozen=True), aligners_of(received))
            return self.local_loss(client, local_view(client.model), anchors, batch)

        return loss

    def aggregated_loss(self, client: Client) -> Callable[[Embedder, Batch], Tensor]:
        """v: the task's loss of the aggregated model, with ``measure: guided`` also the distance to the teacher's."""
        if self.measure == "task":
            return task_loss(client)
        # layers of the robust aligner, embedding heads of the average, as in the released code
        weights = {**client.model.exchanged(), **client.state["teacher"]}
        return self.anchored_loss(client, frozen_aligners(client.model, weights, training=False))


def _layers(aligner: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in aligner.items() if ".aligner.layers." in name}
