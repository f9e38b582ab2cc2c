"""FedAID (arXiv 2404.03854)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import ClassVar, Literal, Self

import torch
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
from polyfed.algorithms.shared.public_exchange import fixed_sample
from polyfed.algorithms.shared.robust_alignment import (
    RobustAlignment,
    RobustWeights,
    loss_reports,
    measured,
    only_type,
    parts_of,
    selected,
    server_parts,
    task_loss,
    train_part,
)
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.federation.trainer import Regulariser
from polyfed.losses.distillation import GuidanceReduction, squared_distance
from polyfed.losses.info_nce import Reduction, info_nce
from polyfed.models.aligner import Aligner
from polyfed.models.binding import Bound, EncoderFeatures, aligners_of, frozen_aligners, frozen_copy
from polyfed.models.model import Embedder, Model
from polyfed.tasks.retrieval import PairTask

_JUDGED = 256  # samples that aligners are compared on


class ModalityContrast(Settings):
    """L_CL: InfoNCE between every two modalities.

    Negatives, and whether the two directions are averaged or added, are those of the client's task, beside whose loss
    it stands with the same weight (Eq. 5).
    """

    weight: float = Field(default=1.0, gt=0, description="factor of L_CL")
    temperature: float = Field(default=0.07, ge=0.01, le=1, description="of L_CL")

    def loss(self, client: Client, view: Bound, batch: Batch) -> Tensor:
        """L_CL of a batch, weighted."""
        task, losses = client.task, list[Tensor]()
        # every pair of modalities once: with two it is the paper's L_CL
        for one, other in combinations(batch.inputs, 2):
            pairs = batch.having(one, other)
            if len(pairs) > 1:
                u, v = (view.represent(name, pairs.inputs[name]) for name in (one, other))
                same = task.siblings(pairs) if isinstance(task, PairTask) else None
                how: Reduction = task.contrast_reduction if isinstance(task, PairTask) else "mean"
                losses.append(info_nce(u, v, 1 / self.temperature, same, reduction=how))
        return self.weight * torch.stack(losses or [batch.no_loss]).sum()


class RobustTeacher(Settings):
    """The second stage: clients learn the next teacher, by weights that follow their losses (Algorithm 3)."""

    steps: int = Field(default=50, ge=1, description="batches of the second stage")
    beta: float = Field(default=2.0, ge=0, description="factor of the discrepancy (Eq. 5)")
    reduction: GuidanceReduction = Field(
        default="sum", description="of the discrepancy's squares: sum over a batch, its mean, or over elements"
    )
    contrast: ModalityContrast | None = Field(default=ModalityContrast(), description="L_CL; null: none")
    weights: RobustWeights = Field(default=RobustWeights(), description="of clients, by their losses v")
    measure: Literal["task", "robust"] = Field(
        default="task",
        description="v: the task's loss of the aggregated model, or L_dro of the present teacher (Eq. 4), which adds "
        "L_CL of g*(f*)",
    )
    measured_on: Literal["aggregated", "local"] = Field(
        default="aggregated",
        description="v is of the average (Algorithm 1), or of what each client trained (Algorithm 2)",
    )
    measure_share: float = Field(
        default=1.0, gt=0, le=1, description="share of a client's training samples that its loss v is measured on"
    )
    aligner: Literal["averaged", "local"] = Field(
        default="averaged", description="g of the second stage: the mean of all, or what the client trained"
    )
    broadcast: Literal["shared", "repeated"] = Field(
        default="shared",
        description="the encoder that is sent to be measured also serves the next round's training, or is sent again",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.beta == 0 and self.contrast is None:
            raise ValueError("beta is 0 and contrast null: no teacher would be learnt; set one of them")
        if self.measured_on == "local" and self.measure == "robust":
            raise ValueError("measure 'robust' is a loss of the aggregated encoder; use measured_on 'aggregated'")
        return self

    def measured_loss(self, client: Client) -> Callable[[Model, Batch], Tensor]:
        """v_k: the task's loss, or L_dro(g*, P_k, f*) (Eq. 4), whose first term is 0 where f~ is f* itself."""
        if self.measure == "task" or self.contrast is None:
            return task_loss(client)
        teacher, contrast = frozen_aligners(client.model, client.state["teacher"], training=False), self.contrast

        def loss(model: Model, batch: Batch) -> Tensor:
            features = EncoderFeatures(model)
            task = client.task.loss(Bound(features, aligners_of(model)), client.head, batch)
            return task + contrast.loss(client, Bound(features, teacher), batch)

        return loss

    def loss(self, client: Client, local: Mapping[str, Aligner]) -> Regulariser:
        """L_dro (Eq. 5), of the client's model as distorted encoder and teacher aligner."""
        # of the average before stage 2 distorts it: the f* of Eq. 5
        reference, head = frozen_copy(client.model), None if client.head is None else frozen_copy(client.head)

        def loss(model: Embedder, batch: Batch) -> Tensor:
            features, teacher = EncoderFeatures(client.model), aligners_of(client.model)
            undistorted = Bound(EncoderFeatures(reference, frozen=True), teacher)
            distorted = Bound(features, teacher)
            gaps = [
                squared_distance(distorted.represent(name, x), undistorted.represent(name, x), self.reduction)
                for name, x in ((name, own.inputs[name]) for name, own in batch.by_modality())
            ]
            # the distortion of f~: the task with the average's aligners, which stay as they are
            task = client.task.loss(Bound(features, local), head, batch)
            discrepancy = self.beta * torch.stack(gaps or [batch.no_loss]).sum()
            if self.contrast is None:
                return discrepancy + task
            return discrepancy + self.contrast.loss(client, distorted, batch) + task

        return loss


class FedAID(RobustAlignment):
    """Cross-modal alignment binding (FedAID, arXiv 2404.03854, Algorithms 1-3).

    Encoders f (Theta) and align modules g (theta) train at the clients on their task, while a teacher aligner g*
    guides them: representations g(f(x)) are to stay near g*(f(x)) (stage 1). The server averages, and gathers every
    client's loss v_k of the average, by which it weighs clients (Eq. 4). Then the clients learn the next teacher
    (stage 2, Eq. 5): it is to align modalities and to give nearly the same from the aggregated encoder as from a copy
    that local training distorts. Its weighted mean is the teacher and the aligner of the next round.

    All clients train one model whose encoders have align modules (``model.aligner``). What the paper leaves open is a
    setting, with what this class takes to be meant as the default.

    >>> method = FedAID(local_steps=10, teacher={"steps": 10})
    >>> method.guidance.distance, method.teacher.weights.divergence, method.teacher.beta
    ('l2', 'chi_square', 2.0)
    """

    sends_parts: ClassVar[bool] = True
    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "encoder": Lifetime.RUN,
        "aligner": Lifetime.ROUND,
        "teacher": Lifetime.ROUND,
    }

    teacher: RobustTeacher | None = Field(
        default=RobustTeacher(), description="the second stage; null: the mean of the aligners (ablation, Table 17)"
    )

    @property
    def local_training(self) -> LocalTraining:
        return LocalTraining(self.local_epochs, self.local_steps, self.teacher.steps if self.teacher else 0)

    # ---- server half

    def setup(self, server: Server) -> None:
        """One initial model for all, and uniform weights."""
        super().setup(server)
        if self.teacher:
            self.teacher.weights.start(server)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Guided training, average, losses, weights, robust aligner (Algorithm 1)."""
        name, losses = only_type(server), dict[str, float]()
        aggregated = self.guided(server, cohort, losses)
        if self.teacher is None:
            server.update_weights({name: aggregated})
            return
        if self.teacher.measured_on == "aggregated":
            losses = loss_reports(self._delivered(server, cohort.ask(self.judge, weights=Weights(aggregated))))
        self.teacher.weights.step(server, losses)
        robust = self.robust_aligner(server, cohort, aggregated, self.teacher)
        server.record(**compare_aligners(server, {"averaged": aggregated, "robust": aggregated | robust}))
        server.update_weights({name: aggregated | robust})

    def guided(self, server: Server, cohort: Cohort, losses: dict[str, float]) -> dict[str, Tensor]:
        """Stage 1 and the mean of what it gives; clients that hold the encoder already get the rest only."""
        parts, now = server_parts(server), server.weights[only_type(server)]
        # who holds the encoder of the last round, sent to be measured
        repeated = self.teacher is not None and self.teacher.broadcast == "repeated"
        last = None if repeated else server.clock.round - 1
        had = {name for name, round in server.state.get("holding", {}).items() if int(round) == last}
        replies = cohort.ask(
            self.guide,
            check=server.weights_check(),
            origins={"weights": Weights(now)},
            weights=each(lambda client: selected(now, parts.without_encoder) if client.id in had else Weights(now)),
            teacher=selected(now, parts.aligner if repeated else ()),
        )
        return self.average(replies, losses)

    def robust_aligner(
        self, server: Server, cohort: Cohort, aggregated: Mapping[str, Tensor], teacher: RobustTeacher
    ) -> dict[str, Tensor]:
        """Stage 2 and the weighted mean of what it gives."""
        # heads and encoders do not cross back: the second stage moves them for its own sake only
        names = server_parts(server).aligner
        sent = Weights(aggregated if teacher.measured_on == "local" else {})
        replies = cohort.ask(
            self.teach,
            check=server.weights_check(names),
            origins={"weights": selected(server.weights[only_type(server)], names)},
            weights=sent,
            factor=each(teacher.weights.loss_factor(server)),
        )
        return teacher.weights.mean(server, self._delivered(server, replies) if sent else replies)

    def _delivered(self, server: Server, replies: Iterable[Reply]) -> Iterator[Reply]:
        for reply in replies:
            server.state.setdefault("holding", {})[reply.sender.id] = torch.tensor(server.clock.round)
            yield reply

    # ---- client half

    @client_step(float, weights=Weights, num_examples=int)
    def guide(self, client: Client, weights: Weights, teacher: Weights) -> Reply:
        """Stage 1 (Algorithm 2): minimise L_guide + alpha L_task (Eq. 2)."""
        client.load_weights({**client.state.pop("encoder", {}), **weights})
        parts, stage_two = parts_of(client), self.teacher
        # what was just received is both the start and the anchor, unless the broadcast is repeated
        anchors = dict(teacher or selected(weights, parts.aligner))
        client.state["teacher"] = anchors
        loss = self.anchored_loss(client, frozen_aligners(client.model, anchors))
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, task_weight=0, regulariser=loss)
        trained = client.model.exchanged()
        if stage_two and stage_two.aligner == "local":
            client.state["aligner"] = dict(selected(trained, parts.without_encoder))
        losses: dict[str, float] = {}
        if stage_two and stage_two.measured_on == "local":
            losses = measured(client, stage_two.measure_share, task_loss(client))
        return Reply(weights=Weights(trained), num_examples=client.num_examples, **losses)

    @client_step(float)
    def judge(self, client: Client, weights: Weights) -> Reply:
        """v_k: the loss of the aggregated model on the client's own data (Algorithm 1, line 9)."""
        assert self.teacher is not None
        client.load_weights(weights)
        _keep(client, weights)
        return Reply(**measured(client, self.teacher.measure_share, self.teacher.measured_loss(client)))

    @client_step(weights=Weights)
    def teach(self, client: Client, factor: float, weights: Weights) -> Reply:
        """Stage 2 (Algorithm 3): learn the next teacher with the frozen encoder and a copy that training distorts."""
        assert self.teacher is not None
        if weights:
            client.load_weights(weights)
            _keep(client, weights)
        kept = client.state
        averaged = kept["aligner"]
        client.load_weights({**kept["encoder"], **averaged, **kept["teacher"]})
        parts = parts_of(client)
        loss = self.teacher.loss(client, frozen_aligners(client.model, averaged))
        names = (*parts.encoder, *parts.aligner)
        trained = train_part(client, names, self.teacher.steps, "robust", loss, factor)
        if self.teacher.broadcast == "repeated":
            del client.state["encoder"]
        return Reply(weights=selected(trained, parts.aligner))


def compare_aligners(server: Server, models: Mapping[str, dict[str, Tensor]]) -> dict[str, float]:
    """``<name>.m``: the task's primary metric m of each model on up to 256 validation samples, or test ones.

    They are the same in every round, and nothing is chosen by it. Nothing where the server has no model or samples.
    """
    samples, figures = server.validation or server.test, dict[str, float]()
    if server.has_model and samples:
        metric, count = server.task.primary, min(_JUDGED, len(samples))
        some = samples.subset(fixed_sample(server, len(samples), count))
        for name, tensors in models.items():
            server.update_weights({only_type(server): tensors})
            figures[f"{name}.{metric}"] = server.evaluate(some)[metric]
    return figures


def _keep(client: Client, weights: Weights) -> None:
    """Remember the aggregated model, which has been loaded, for stage 2, and its encoder for the next round."""
    parts = parts_of(client)
    own = client.state.get("aligner", {})
    client.state["aligner"] = {**selected(weights, parts.without_encoder), **own}
    client.state["encoder"] = dict(selected(weights, parts.encoder))
