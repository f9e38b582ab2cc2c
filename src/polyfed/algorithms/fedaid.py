"""FedAID (arXiv 2404.03854)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import Client, Cohort, Reply, Server, Weights, client_step, each
from polyfed.algorithms.shared.global_models import noted, weights_check
from polyfed.algorithms.shared.robust_alignment import (
    CONTRASTIVE,
    SQUARED,
    RobustAlignment,
    loss_reports,
    parts_of,
    selected,
    task_loss,
)
from polyfed.core.effects import Condition, Not, Only
from polyfed.data.samples import Batch
from polyfed.federation.trainer import Regulariser
from polyfed.losses.distillation import squared_distance
from polyfed.losses.info_nce import info_nce
from polyfed.models.aligner import Aligner
from polyfed.models.binding import Bound, EncoderFeatures, aligners_of, frozen_aligners, frozen_copy
from polyfed.models.model import Embedder, Model
from polyfed.tasks.pairing import PairTask

_TEACHES = Only(teacher="robust")  # there is a second stage


class FedAID(RobustAlignment):
    """Cross-modal alignment binding (FedAID, arXiv 2404.03854, Algorithms 1-3).

    Encoders f (Theta) and align modules g (theta) train at the clients on their task, while a teacher aligner g*
    guides them: representations g(f(x)) are to stay near g*(f(x)) (stage 1). The server averages, and gathers every
    client's loss v_k of the average, by which it weighs clients (Eq. 4). Then the clients learn the next teacher
    (stage 2, Eq. 5): it is to align modalities and to give nearly the same from the aggregated encoder as from a copy
    that local training distorts. Its weighted mean is the teacher and the aligner of the next round.

    What the paper leaves open is a setting, with what this class takes to be meant as the default.
    """

    only_if: ClassVar[Mapping[str, Condition]] = {
        "guidance_reduction": SQUARED | Only(teacher="robust", beta=Not(0)),
        "contrast_temperature": CONTRASTIVE | Only(teacher="robust", contrast_weight=Not(0)),
        "robust_steps": _TEACHES,
        "gamma": _TEACHES & (Only(rho=Not(0)) | Only(divergence="none")),
        "rho": _TEACHES & Only(divergence=Not("none")),
        "divergence": _TEACHES,
        "weight_use": _TEACHES,
        "measure_share": _TEACHES,
    }

    beta: Annotated[float, _TEACHES] = Field(
        default=2.0, ge=0, description="factor of the discrepancy in the second stage (Eq. 5)"
    )
    contrast_weight: Annotated[float, _TEACHES] = Field(
        default=1.0, ge=0, description="factor of L_CL in the second stage"
    )
    teacher: Literal["robust", "averaged"] = Field(
        default="robust", description="learnt by the second stage, or the mean of the aligners (ablation, Table 17)"
    )
    measure: Annotated[Literal["task", "robust"], _TEACHES] = Field(
        default="task",
        description="v: the task's loss of the aggregated model, or L_dro of the present teacher (Eq. 4), which adds "
        "L_CL of g*(f*)",
    )
    measured_on: Annotated[Literal["aggregated", "local"], _TEACHES] = Field(
        default="aggregated",
        description="v is of the average (Algorithm 1), or of what each client trained (Algorithm 2)",
    )
    aligner_in_stage_two: Annotated[Literal["averaged", "local"], _TEACHES] = Field(
        default="averaged", description="g of the second stage: the mean of all, or what the client trained"
    )
    broadcast: Annotated[Literal["shared", "repeated"], _TEACHES] = Field(
        default="shared",
        description="the encoder that is sent to be measured also serves the next round's training, or is sent again",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.teacher == "robust" and self.beta == self.contrast_weight == 0:
            raise ValueError("beta and contrast_weight are both 0: no teacher would be learnt; set one above 0")
        if self.measured_on == "local" and self.measure == "robust":
            raise ValueError("measure 'robust' is a loss of the aggregated encoder; use measured_on 'aggregated'")
        return self

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Guided training, average, losses, weights, robust aligner (Algorithm 1)."""
        kind, losses = self.kind(server), dict[str, float]()
        aggregated = self.guided(server, cohort, losses)
        if self.teacher == "averaged":
            server.update_weights({kind: aggregated})
            return
        if self.measured_on == "aggregated":
            losses = loss_reports(self._delivered(server, cohort.ask(self.judge, weights=Weights(aggregated))))
        self.reweigh(server, losses)
        robust = self.robust_aligner(server, cohort, aggregated)
        server.update_weights({kind: aggregated | robust})

    def guided(self, server: Server, cohort: Cohort, losses: dict[str, float]) -> dict[str, Tensor]:
        """Stage 1 and the mean of what it gives; clients that hold the encoder already get the rest only."""
        parts, now = self.parts(server), server.weights[self.kind(server)]
        # who holds the encoder of the last round, sent to be measured; where replies are encoded against what was sent
        # for them, all of it is sent
        last = server.clock.round - 1 if self.broadcast == "shared" and not cohort.transport.refers else None
        had = {name for name, round in server.state.get("holding", {}).items() if int(round) == last}
        replies = cohort.ask(
            self.guide,
            check=weights_check(server),
            origins={"weights": Weights(now)},
            weights=each(lambda client: selected(now, parts.without_encoder) if client.id in had else Weights(now)),
            teacher=selected(now, parts.aligner if self.broadcast == "repeated" else ()),
        )
        return self.averaged(noted(replies, lambda reply: losses.update(loss_reports([reply]))))

    def robust_aligner(self, server: Server, cohort: Cohort, aggregated: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Stage 2 and the weighted mean of what it gives."""
        # heads and encoders do not cross back: the second stage moves them for its own sake only
        names = self.parts(server).aligner
        sent = Weights(aggregated if self.measured_on == "local" else {})
        replies = cohort.ask(
            self.teach,
            check=weights_check(server, names),
            origins={"weights": selected(server.weights[self.kind(server)], names)},
            weights=sent,
            factor=each(self.loss_factor(server)),
        )
        return self.robust_mean(server, self._delivered(server, replies) if sent else replies)

    def _delivered(self, server: Server, replies: Iterable[Reply]) -> Iterator[Reply]:
        for reply in replies:
            server.state.setdefault("holding", {})[reply.sender.id] = torch.tensor(server.clock.round)
            yield reply

    # ---- client half

    @client_step(float, weights=Weights, num_examples=int)
    def guide(self, client: Client, weights: Weights, teacher: Weights) -> Reply:
        """Stage 1 (Algorithm 2): minimise L_guide + alpha L_task (Eq. 2)."""
        client.load_weights({**client.state.pop("encoder", {}), **weights})
        parts = parts_of(client)
        # what was just received is both the start and the anchor, unless the broadcast is repeated
        anchors = dict(teacher or selected(weights, parts.aligner))
        client.state["teacher"] = anchors
        loss = self.anchored_loss(client, frozen_aligners(client.model, anchors))
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, task_weight=0, regulariser=loss)
        trained = client.model.exchanged()
        if self.aligner_in_stage_two == "local":
            client.state["aligner"] = dict(selected(trained, parts.without_encoder))
        measured = self.measured(client, task_loss(client)) if self.measured_on == "local" else {}
        return Reply(weights=Weights(trained), num_examples=client.num_examples, **measured)

    @client_step(float)
    def judge(self, client: Client, weights: Weights) -> Reply:
        """v_k: the loss of the aggregated model on the client's own data (Algorithm 1, line 9)."""
        client.load_weights(weights)
        self._keep(client, weights)
        return Reply(**self.measured(client, self.robust_measure(client)))

    @client_step(weights=Weights)
    def teach(self, client: Client, factor: float, weights: Weights) -> Reply:
        """Stage 2 (Algorithm 3): learn the next teacher with the frozen encoder and a copy that training distorts."""
        if weights:
            client.load_weights(weights)
            self._keep(client, weights)
        kept = client.state
        averaged = kept["aligner"]
        client.load_weights({**kept["encoder"], **averaged, **kept["teacher"]})
        parts = parts_of(client)
        loss = self.robust_loss(client, frozen_aligners(client.model, averaged))
        trained = self.train_part(client, (*parts.encoder, *parts.aligner), "robust", loss, factor)
        if self.broadcast == "repeated":
            del client.state["encoder"]
        return Reply(weights=selected(trained, parts.aligner))

    def _keep(self, client: Client, weights: Weights) -> None:
        """Remember the aggregated model, which has been loaded, for stage 2, and its encoder for the next round."""
        parts = parts_of(client)
        own = client.state.get("aligner", {})
        client.state["aligner"] = {**selected(weights, parts.without_encoder), **own}
        client.state["encoder"] = dict(selected(weights, parts.encoder))

    def robust_measure(self, client: Client) -> Callable[[Model, Batch], Tensor]:
        """v_k: the task's loss, or L_dro(g*, P_k, f*) (Eq. 4), whose first term is 0 where f~ is f* itself."""
        if self.measure == "task":
            return task_loss(client)
        teacher = frozen_aligners(client.model, client.state["teacher"], training=False)

        def loss(model: Model, batch: Batch) -> Tensor:
            features = EncoderFeatures(model)
            task = client.task.loss(Bound(features, aligners_of(model)), client.head, batch)
            return task + self.contrast(client, Bound(features, teacher), batch)

        return loss

    def robust_loss(self, client: Client, local: Mapping[str, Aligner]) -> Regulariser:
        """L_dro (Eq. 5), of the client's model as distorted encoder and teacher aligner."""
        # of the average before stage 2 distorts it: the f* of Eq. 5
        reference, head = frozen_copy(client.model), None if client.head is None else frozen_copy(client.head)

        def loss(model: Embedder, batch: Batch) -> Tensor:
            features, teacher = EncoderFeatures(client.model), aligners_of(client.model)
            undistorted = Bound(EncoderFeatures(reference, frozen=True), teacher)
            distorted = Bound(features, teacher)
            gaps = [
                squared_distance(distorted.represent(name, x), undistorted.represent(name, x), self.guidance_reduction)
                for name, x in batch.inputs.items()
            ]
            # the distortion of f~: the task with the average's aligners, which stay as they are
            task = client.task.loss(Bound(features, local), head, batch)
            return self.beta * torch.stack(gaps).sum() + self.contrast(client, distorted, batch) + task

        return loss

    def contrast(self, client: Client, view: Bound, batch: Batch) -> Tensor:
        """L_CL, weighted: InfoNCE between every two modalities.

        Negatives, and whether the two directions are averaged or added, are those of the client's task, beside whose
        loss it stands with the same weight (Eq. 5).
        """
        task = client.task
        same, how = (task.siblings(batch), task.contrast_reduction) if isinstance(task, PairTask) else (None, "mean")
        z, scale = [view.represent(name, x) for name, x in batch.inputs.items()], 1 / self.contrast_temperature
        # every pair of modalities once: with two it is the paper's L_CL
        losses = [info_nce(u, v, scale, same, reduction=how) for u, v in combinations(z, 2)]
        return self.contrast_weight * torch.stack(losses).sum()
