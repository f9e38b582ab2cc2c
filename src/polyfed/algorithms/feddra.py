"""FedDRA, the later form of FedAID."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.mean import WeightedMean
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


class StagedGuidance(AnchorGuidance):
    """Guidance of the second stage, and, in the released code, of the first stage and of the measured losses."""

    reduction: GuidanceReduction = Field(
        default="element", description="reduction of squares: mean over elements (released code), mean, or sum"
    )
    stages: Literal["second", "both"] = Field(
        default="second",
        description="stages with guidance; in the first (released code) its anchors are those of the last round's "
        "teacher",
    )
    measured: bool = Field(
        default=False, description="v adds the guidance by the robust aligner to the task's loss (released code)"
    )


class FedDRA(RobustAlignment):
    """Federated distributionally robust alignment (TMLR; the third version of arXiv 2404.03854).

    First the align modules alone train at the clients, on frozen encoders, and become the robust aligner: their mean,
    by weights that follow the clients' losses (FedAID, Eq. 4). Then everything trains on the task, while
    representations are held near those of the received encoder under the robust aligner, in training mode too, so that
    batch norms of equal weights agree (dropout draws apart). The mean of these models is the next model. All clients
    train one model whose encoders have align modules (``model.aligner``).

    The released code does more in each stage, and the preset ``feddra-mimic`` all of it: ``guidance`` in both stages
    and ``measured``, ``weighted_stages: both`` with ``weights.use: loss``, ``aligner_in_stage_two: local``,
    ``measured_on: aggregated``, ``frozen_encoder_mode: training``, ``weights.divergence: released``. The switches of
    FedDRA itself act in the methods under "released code" alone, those of ``weights`` in ``RobustWeights``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = dict.fromkeys(("encoder", "aligner", "teacher"), Lifetime.ROUND)

    robust_steps: int = Field(default=20, ge=1, description="batches of the first stage, which trains aligners alone")
    guidance: StagedGuidance | None = Field(
        default=StagedGuidance(), description="guidance by the robust aligner; null: none"
    )
    weights: RobustWeights = Field(default=RobustWeights(), description="weights of clients, by their losses v")
    weighted_stages: Literal["first", "both"] = Field(
        default="first", description="stages whose losses have the factor w, with weights.use loss; released code: both"
    )
    aligner_in_stage_two: Literal["averaged", "local"] = Field(
        default="averaged",
        description="start of the second stage: the robust aligner, or the client's own of the first (released code); "
        "anchors are the robust aligner's in either case",
    )
    measured_on: Literal["received", "aggregated"] = Field(
        default="received",
        description="v is of the model that the second stage receives, or of the mean of its results (released code), "
        "which costs a further ask",
    )
    measure_share: float = Field(
        default=0.1, gt=0, le=1, description="share of a client's training samples on which its loss v is measured"
    )
    frozen_encoder_mode: Literal["training", "evaluation"] = Field(
        default="evaluation", description="mode of the encoder in the first stage; released code: training"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.guidance and self.guidance.measured and self.measured_on == "received":
            raise ValueError("guidance.measured needs measured_on 'aggregated': the received model gives the anchors")
        if self.weighted_stages == "both" and self.weights.use != "loss":
            raise ValueError(
                f"weighted_stages 'both' has no effect with weights.use '{self.weights.use}'; set it to loss"
            )
        return self

    @property
    def local_training(self) -> LocalTraining:
        return LocalTraining(self.local_epochs, self.local_steps, self.robust_steps)

    # ---- server half

    def setup(self, server: Server) -> None:
        """Starts from one initial model for all, and uniform weights."""
        super().setup(server)
        self.weights.start(server)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Robust aligner, guided training, average, weights of the next round."""
        name, losses = only_type(server), dict[str, float]()
        received = server.weights_for(cohort.clients[0])
        replies = cohort.ask(  # stage 1
            self.align,
            like={"weights": received.part(server_parts(server).without_encoder)},
            weights=received,
            teacher=Weights(server.state.get("teacher", {})),
            factor=each(self.weights.loss_factor(server)),
        )
        robust = self.weights.mean(server, replies)  # sum_k w_k theta_k
        self.keep_teacher(server, robust)
        replies = cohort.ask(  # stage 2
            self.bind,
            like={"weights": Weights(server.weights[name] | robust)},
            aligner=Weights(robust),
            factor=self.second_factor(server),
        )
        mean = WeightedMean()
        for reply in replies:
            mean.add(reply.weights, 1.0)
            losses |= loss_reports([reply])
        aggregated = mean.take()
        server.update_weights({name: aggregated})
        self.weights.step(server, self.final_losses(cohort, aggregated, losses))  # FedAID, Eq. 4

    # ---- client half

    @client_step(weights=Weights)
    def align(self, client: Client, weights: Weights, teacher: Weights, factor: float) -> Reply:
        """Stage 1: align modules and heads learn the task on a frozen encoder."""
        client.load_weights(weights)
        parts = parts_of(client)
        client.state["encoder"] = dict(selected(weights, parts.encoder))
        loss = self.aligner_loss(client, {**selected(weights, parts.aligner), **teacher})
        names = parts.without_encoder
        learnt = selected(train_part(client, names, self.robust_steps, "align", loss, factor), names)
        self.keep_aligner(client, learnt)
        return Reply(weights=learnt)

    @client_step(float, weights=Weights, num_examples=int)
    def bind(self, client: Client, aligner: Weights, factor: float) -> Reply:
        """Stage 2: everything learns the task, near the received model's representations."""
        # not sent twice: the first stage of this round has left it with the client
        encoder = client.state.pop("encoder")
        client.load_weights({**encoder, **aligner})
        losses = self.received_losses(client)
        loss = self.guided_loss(client)
        client.load_weights({**encoder, **self.start_of_stage_two(client, aligner)})
        client.fit(
            client.train,
            epochs=self.local_epochs,
            steps=self.local_steps,
            task_weight=0,
            regulariser=lambda model, batch: factor * loss(model, batch),
        )
        return Reply(weights=client.weights, num_examples=client.num_examples, **losses)

    def guided_loss(self, client: Client) -> Regulariser:
        """Task plus distance to a frozen copy of the client's model, taken here.

        The received encoder and the robust aligner are loaded at this moment.
        """
        received = frozen_copy(client.model, training=True)

        def loss(model: Embedder, batch: Batch) -> Tensor:
            anchors = Bound(EncoderFeatures(received, frozen=True), aligners_of(received))
            return self.guided_task_loss(client, local_view(client.model), anchors, batch)

        return loss

    # ---- released code: each switch at its default leaves the paper's method

    @client_step(float)
    def judge(self, client: Client, weights: Weights) -> Reply:
        """v_k of the aggregated model (released code)."""
        client.load_weights(weights)
        return Reply(**measured(client, self.measure_share, self.aggregated_loss(client)))

    def keep_teacher(self, server: Server, robust: Mapping[str, Tensor]) -> None:
        """Keeps the layers of the robust aligner as the teacher of the next round's first stage."""
        if self.guidance and self.guidance.stages == "both":
            server.state["teacher"] = _layers(robust)

    def second_factor(self, server: Server) -> each[float] | float:
        """Factor of each client's loss in the second stage."""
        return each(self.weights.loss_factor(server)) if self.weighted_stages == "both" else 1.0

    def final_losses(
        self, cohort: Cohort, aggregated: dict[str, Tensor], received: dict[str, float]
    ) -> Mapping[str, float]:
        """The losses v: as reported by the second stage, or of the aggregated model."""
        if self.measured_on == "received":
            return received
        return loss_reports(cohort.ask(self.judge, weights=Weights(aggregated)))

    def keep_aligner(self, client: Client, learnt: Weights) -> None:
        """Keeps the client's own aligner for the second stage."""
        if self.aligner_in_stage_two == "local":
            client.state["aligner"] = dict(learnt)

    def start_of_stage_two(self, client: Client, aligner: Weights) -> Mapping[str, Tensor]:
        """The aligner from which the second stage trains."""
        if self.guidance and self.guidance.measured:
            client.state["teacher"] = _layers(aligner)
        return aligner if self.aligner_in_stage_two == "averaged" else client.state.pop("aligner")

    def received_losses(self, client: Client) -> dict[str, float]:
        """v_k of the received model."""
        received = self.measured_on == "received"
        return measured(client, self.measure_share, task_loss(client)) if received else {}

    def aligner_loss(self, client: Client, teacher: Mapping[str, Tensor]) -> Regulariser:
        """Loss of the first stage: the task's; with guidance in both stages also the distance to the teacher's."""
        redrawn, guidance = self.frozen_encoder_mode == "training", self.guidance
        encoder = frozen_copy(client.model, training=redrawn)
        anchors = frozen_aligners(client.model, teacher, training=True)

        def loss(model: Embedder, batch: Batch) -> Tensor:
            features = EncoderFeatures(encoder, frozen=True)
            local = Bound(features, aligners_of(client.model))
            if guidance is None or guidance.stages == "second":
                return client.task.loss(local, client.head, batch)
            own = EncoderFeatures(encoder, frozen=True) if redrawn else features  # dropout draws for the anchors anew
            return self.guided_task_loss(client, local, Bound(own, anchors), batch)

        return loss

    def aggregated_loss(self, client: Client) -> Callable[[Embedder, Batch], Tensor]:
        """v: the task's loss of the aggregated model, with ``guidance.measured`` also the distance to the teacher's."""
        if self.guidance is None or not self.guidance.measured:
            return task_loss(client)
        # layers of the robust aligner, embedding heads of the average, as in the released code
        weights = {**client.model.exchanged(), **client.state["teacher"]}
        anchors = frozen_aligners(client.model, weights, training=False)
        return self.anchored_loss(client, anchors)


def _layers(aligner: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in aligner.items() if ".aligner.layers." in name}
