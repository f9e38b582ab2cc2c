"""FedAID (arXiv 2404.03854)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import (
    Client,
    ClientInfo,
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
from polyfed.models.model import Embedder
from polyfed.tasks.retrieval import PairTask

_JUDGED = 256  # samples on which aligners are compared


class ModalityContrast(Settings):
    """L_CL: InfoNCE between every two modalities.

    Negatives and the reduction of the two directions are those of the client's task, with whose loss it has the same
    weight (Eq. 5).
    """

    weight: float = Field(default=1.0, gt=0, description="factor of L_CL")
    temperature: float = Field(default=0.07, ge=0.01, le=1, description="temperature of L_CL")

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
        default="sum", description="reduction of the discrepancy's squares: sum over a batch, mean, or over elements"
    )
    contrast: ModalityContrast | None = Field(default=ModalityContrast(), description="L_CL; null: none")
    weights: RobustWeights = Field(default=RobustWeights(), description="weights of clients, by their losses v")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.beta == 0 and self.contrast is None:
            raise ValueError("beta is 0 and contrast null: no teacher would be learnt; set one of them")
        return self

    def loss(self, client: Client, local: Mapping[str, Aligner]) -> Regulariser:
        """L_dro (Eq. 5): the client's model is the distorted copy f~ under the teacher aligner g*; ``local`` is g."""
        # f* of Eq. 5: the average before stage 2 distorts it, in evaluation mode; f~ trains, dropout included
        reference, head = frozen_copy(client.model), None if client.head is None else frozen_copy(client.head)

        def loss(model: Embedder, batch: Batch) -> Tensor:
            features, teacher = EncoderFeatures(client.model), aligners_of(client.model)
            undistorted = Bound(EncoderFeatures(reference, frozen=True), teacher)
            distorted = Bound(features, teacher)
            gaps = [
                squared_distance(distorted.represent(name, x), undistorted.represent(name, x), self.reduction)
                for name, x in ((name, own.inputs[name]) for name, own in batch.by_modality())
            ]
            # distorts f~: the task with the average's aligners, which are fixed
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

    All clients train one model whose encoders have align modules (``model.aligner``). Numbers at statements are
    lines of the paper's algorithms. Choices: line 7 averages align modules too. v_k is the task's loss of that average
    (line 9; the text after Eq. 4 has L_dro), on whole batches. w_k is a share in the mean of line 17, where the paper
    has 1/N and w_k as a factor of L_dro (Eq. 3): ``weights.use: loss``, which AdamW divides out.

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
        """Starts from one initial model for all, and uniform weights (Algorithm 1, inputs)."""
        super().setup(server)
        if self.teacher:
            self.teacher.weights.start(server)

    def round(self, server: Server, cohort: Cohort) -> None:
        """One round r of Algorithm 1, lines 3 to 18."""
        name, parts = only_type(server), server_parts(server)
        model = server.weights[name]  # Theta, theta; theta* = theta: line 18, and at the start
        replies = cohort.ask(  # 3-6: broadcast, Algorithm 2
            self.guide,
            like={"weights": Weights(model)},
            weights=each(self.undelivered(server, model)),
            teacher=Weights({}),
        )
        aggregated = self.average(replies)  # 7
        if self.teacher is None:
            server.update_weights({name: aggregated})
            return
        judged = list(cohort.ask(self.judge, weights=Weights(aggregated)))  # 8-10
        self.teacher.weights.step(server, loss_reports(judged))  # 11-13 (Eq. 4)
        self.delivered(server, judged)
        replies = cohort.ask(  # 14-16: Algorithm 3
            self.teach,
            like={"weights": selected(model, parts.aligner)},
            weights=Weights({}),
            factor=each(self.teacher.weights.loss_factor(server)),
        )
        robust = self.teacher.weights.mean(server, replies)  # 17
        server.record(**compare_aligners(server, {"averaged": aggregated, "robust": aggregated | robust}))  # a gauge
        server.update_weights({name: aggregated | robust})  # 18

    def undelivered(self, server: Server, model: Mapping[str, Tensor]) -> Callable[[ClientInfo], Weights]:
        """The broadcast to each client; without the encoder to clients that have it since they were judged."""
        names, last = server_parts(server).without_encoder, server.clock.round - 1
        had = {name for name, number in server.state.get("holding", {}).items() if int(number) == last}
        return lambda client: selected(model, names) if client.id in had else Weights(model)

    def delivered(self, server: Server, replies: Iterable[Reply]) -> None:
        """Records which clients have this round's average, and so the encoder of the next broadcast."""
        now = {reply.sender.id: torch.tensor(server.clock.round) for reply in replies}
        server.state["holding"] = server.state.get("holding", {}) | now

    # ---- client half

    @client_step(float, weights=Weights, num_examples=int)
    def guide(self, client: Client, weights: Weights, teacher: Weights) -> Reply:
        """Stage 1 (Algorithm 2); ``teacher`` is empty, as the received aligner is both theta and theta* (line 18)."""
        client.load_weights({**client.state.pop("encoder", {}), **weights})  # 2
        aligner = dict(teacher or selected(weights, parts_of(client).aligner))  # theta*, an input (1)
        client.state["teacher"] = aligner
        loss = self.anchored_loss(client, frozen_aligners(client.model, aligner))  # L_guide + alpha L_task (Eq. 1, 2)
        # 3-7
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, task_weight=0, regulariser=loss)
        return Reply(weights=client.weights, num_examples=client.num_examples)  # 8

    @client_step(float)
    def judge(self, client: Client, weights: Weights) -> Reply:
        """v_k: the loss of the aggregated model on the client's own data (Algorithm 1, line 9)."""
        client.load_weights(weights)
        parts = parts_of(client)
        client.state["aligner"] = dict(selected(weights, parts.without_encoder))  # for stage 2
        client.state["encoder"] = dict(selected(weights, parts.encoder))  # for the next round too
        return Reply(**measured(client, 1.0, task_loss(client)))

    @client_step(weights=Weights)
    def teach(self, client: Client, factor: float, weights: Weights) -> Reply:
        """Stage 2 (Algorithm 3); ``weights`` are empty, as the client has Theta and theta since it was judged."""
        assert self.teacher is not None
        kept = client.state
        averaged = kept["aligner"]
        client.load_weights({**kept["encoder"], **averaged, **kept["teacher"]})  # 2 and 3
        parts = parts_of(client)
        loss = self.teacher.loss(client, frozen_aligners(client.model, averaged))  # L_dro (Eq. 5)
        names = (*parts.encoder, *parts.aligner)
        trained = train_part(client, names, self.teacher.steps, "robust", loss, factor)  # 4-7
        return Reply(weights=selected(trained, parts.aligner))


def compare_aligners(server: Server, models: Mapping[str, dict[str, Tensor]]) -> dict[str, float]:
    """``<name>.m``: the task's primary metric m of each model on up to 256 validation samples, or test ones.

    They are the same in every round, and no choice depends on it. Empty where the server has no model or samples.
    """
    samples, figures = server.validation or server.test, dict[str, float]()
    if server.has_model and samples:
        metric, count = server.task.primary, min(_JUDGED, len(samples))
        some = samples.subset(fixed_sample(server, len(samples), count))
        for name, tensors in models.items():
            server.update_weights({only_type(server): tensors})
            figures[f"{name}.{metric}"] = server.evaluate(some)[metric]
    return figures
