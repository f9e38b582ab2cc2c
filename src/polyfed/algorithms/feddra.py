"""FedDRA, the later form of FedAID."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    Lifetime,
    LocalTraining,
    Reply,
    Server,
    Weights,
    client_step,
    each,
)
from polyfed.algorithms.shared.robust_alignment import (
    AnchorGuidance,
    RobustAlignment,
    RobustWeights,
    local_view,
    loss_reports,
    measured,
    only_type,
    parts_of,
    selected,
    server_parts,
    task_loss,
    train_part,
)
from polyfed.data.samples import Batch
from polyfed.federation.trainer import Regulariser
from polyfed.losses.distillation import GuidanceReduction
from polyfed.models.binding import Bound, EncoderFeatures, aligners_of, frozen_aligners, frozen_copy
from polyfed.models.model import Embedder

Mode = Literal["training", "evaluation"]


class StagedGuidance(AnchorGuidance):
    """AnchorGuidance in one stage or both."""

    reduction: GuidanceReduction = Field(
        default="element", description="of squared distances: the released code's mean over elements, mean, or sum"
    )
    stages: Literal["second", "both"] = Field(
        default="second",
        description="stages with guidance; in the first (released) its anchors are those of the last round's teacher",
    )
    anchor_mode: Mode = Field(
        default="training",
        description="mode of what gives the anchors: training, as what is guided by them, so that equal weights are at "
        "distance 0 (released), or evaluation",
    )
    measured: bool = Field(
        default=False, description="whether v is the task's loss and the guidance by the robust aligner (released)"
    )


class FedDRA(RobustAlignment):
    """Federated distributionally robust alignment (TMLR; the third version of arXiv 2404.03854).

    First the align modules alone train at the clients, on frozen encoders, and become the robust aligner: their mean,
    by weights that follow the clients' losses (Eq. 4). Then everything trains on the task, while representations are
    held near those that the received encoder gives under the robust aligner. The mean of that is the next model. All
    clients train one model whose encoders have align modules (``model.aligner``).

    The released code does more in each stage, and the preset ``feddra-mimic`` all of it: ``guidance`` in both stages
    and ``measured``, ``weighted_stages: both`` with ``weights.use: loss``, ``aligner_in_stage_two: local``,
    ``measured_on: aggregated``, ``frozen_encoder_mode: training``, ``weights.divergence: released``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = dict.fromkeys(("encoder", "aligner", "teacher"), Lifetime.ROUND)

    robust_steps: int = Field(default=20, ge=1, description="batches of the first stage, which trains aligners alone")
    guidance: StagedGuidance | None = Field(default=StagedGuidance(), description="by the robust aligner; null: none")
    weights: RobustWeights = Field(default=RobustWeights(), description="of clients, by their losses v")
    weighted_stages: Literal["first", "both"] = Field(
        default="first",
        description="stages whose losses w is a factor of, with weights.use loss or both; released: both",
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
    measure_share: float = Field(
        default=0.1, gt=0, le=1, description="share of a client's training samples that its loss v is measured on"
    )
    frozen_encoder_mode: Mode = Field(
        default="evaluation", description="mode of the encoder in the first stage; training (released): with dropout"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.guidance and self.guidance.measured and self.measured_on == "received":
            raise ValueError("guidance.measured needs measured_on 'aggregated': the received model gives the anchors")
        if self.weighted_stages == "both" and self.weights.use not in ("loss", "both"):
            raise ValueError(f"weighted_stages 'both' has no effect with weights.use '{self.weights.use}'; use loss")
        return self

    @property
    def local_training(self) -> LocalTraining:
        return LocalTraining(self.local_epochs, self.local_steps, self.robust_steps)

    # ---- server half

    def setup(self, server: Server) -> None:
        """One initial model for all, and uniform weights."""
        super().setup(server)
        self.weights.start(server)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Robust aligner, guided training, average, weights of the next round."""
        robust, losses = self.robust_aligner(server, cohort), dict[str, float]()
        factor = each(self.weights.loss_factor(server)) if self.weighted_stages == "both" else 1.0
        replies = cohort.ask(
            self.bind,
            like={"weights": Weights(server.weights[only_type(server)] | robust)},
            aligner=Weights(robust),
            factor=factor,
        )
        aggregated = self.average(replies, losses)
        server.update_weights({only_type(server): aggregated})
        if self.measured_on == "aggregated":
            losses = loss_reports(cohort.ask(self.judge, weights=Weights(aggregated)))
        self.weights.step(server, losses)

    def robust_aligner(self, server: Server, cohort: Cohort) -> dict[str, Tensor]:
        """Stage 1 and the weighted mean of what it gives, whose layers are the teacher of the next round's."""
        names = server_parts(server).without_encoder
        replies = cohort.ask(
            self.align,
            like={"weights": server.weights_for(cohort.clients[0]).part(names)},
            weights=server.weights_for(cohort.clients[0]),
            teacher=Weights(server.state.get("teacher", {})),
            factor=each(self.weights.loss_factor(server)),
        )
        robust = self.weights.mean(server, replies)
        if self.guidance and self.guidance.stages == "both":
            server.state["teacher"] = _layers(robust)
        return robust

    # ---- client half

    @client_step(weights=Weights)
    def align(self, client: Client, weights: Weights, teacher: Weights, factor: float) -> Reply:
        client.load_weights(weights)
        parts = parts_of(client)
        client.state["encoder"] = dict(selected(weights, parts.encoder))
        loss = self.aligner_loss(client, {**selected(weights, parts.aligner), **teacher})
        names = parts.without_encoder
        learnt = selected(train_part(client, names, self.robust_steps, "align", loss, factor), names)
        if self.aligner_in_stage_two == "local":
            client.state["aligner"] = dict(learnt)
        return Reply(weights=learnt)

    @client_step(float, weights=Weights, num_examples=int)
    def bind(self, client: Client, aligner: Weights, factor: float) -> Reply:
        # not sent twice: the first stage of this round has left it with the client
        encoder = client.state.pop("encoder")
        client.load_weights({**encoder, **aligner})
        losses: dict[str, float] = {}
        if self.measured_on == "received":
            losses = measured(client, self.measure_share, task_loss(client))
        # before a local aligner is loaded: anchors are the robust aligner's in either case
        loss = self.guided_loss(client)
        if self.guidance and self.guidance.measured:
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
        return Reply(weights=client.weights, num_examples=client.num_examples, **losses)

    @client_step(float)
    def judge(self, client: Client, weights: Weights) -> Reply:
        client.load_weights(weights)
        return Reply(**measured(client, self.measure_share, self.aggregated_loss(client)))

    def aligner_loss(self, client: Client, teacher: Mapping[str, Tensor]) -> Regulariser:
        """Loss of the first stage: the task's; with guidance in both stages also the distance to the teacher's."""
        redrawn, guidance = self.frozen_encoder_mode == "training", self.guidance
        encoder = frozen_copy(client.model, training=redrawn)
        anchors = frozen_aligners(client.model, teacher, training=_trains(guidance))

        def loss(model: Embedder, batch: Batch) -> Tensor:
            features = EncoderFeatures(encoder, frozen=True)
            local = Bound(features, aligners_of(client.model))
            if guidance is None or guidance.stages == "second":
                return client.task.loss(local, client.head, batch)
            own = EncoderFeatures(encoder, frozen=True) if redrawn else features  # dropout draws for the anchors anew
            return self.guided_task_loss(client, local, Bound(own, anchors), batch)

        return loss

    def guided_loss(self, client: Client) -> Regulariser:
        received = frozen_copy(client.model, training=_trains(self.guidance))

        def loss(model: Embedder, batch: Batch) -> Tensor:
            anchors = Bound(EncoderFeatures(received, frozen=True), aligners_of(received))
            return self.guided_task_loss(client, local_view(client.model), anchors, batch)

        return loss

    def aggregated_loss(self, client: Client) -> Callable[[Embedder, Batch], Tensor]:
        """v: the task's loss of the aggregated model, with ``guidance.measured`` also the distance to the teacher's."""
        if self.guidance is None or not self.guidance.measured:
            return task_loss(client)
        # layers of the robust aligner, embedding heads of the average, as in the released code
        weights = {**client.model.exchanged(), **client.state["teacher"]}
        anchors = frozen_aligners(client.model, weights, training=False)
        return self.anchored_loss(client, anchors)


def _trains(guidance: StagedGuidance | None) -> bool:
    return guidance is None or guidance.anchor_mode == "training"


def _layers(aligner: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in aligner.items() if ".aligner.layers." in name}
