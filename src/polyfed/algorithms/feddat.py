"""FedDAT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.averagings.low_rank import Separate, only
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    Cohort,
    FederationPlan,
    Lifetime,
    LocalEpochs,
    LocalSteps,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_query,
    client_step,
    each,
)
from polyfed.algorithms.shared.personal_training import SHARED_ALONE, STATE, keep_personal, restore_personal
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.losses.distillation import score_kl
from polyfed.models.model import CachedModel, Model
from polyfed.models.personal_adapters import (
    PERSONAL,
    RECEIVED,
    SHARED,
    adapter_tensors,
    add_adapters,
    copy_adapter,
    use_adapters,
)
from polyfed.tasks.task import Task

TEACHER: Mapping[str, float | Tensor] = {PERSONAL: 0.5, RECEIVED: 0.5}
"""The dual-adapter teacher: mean of the client's own adapter and a frozen copy of the shared one."""


class FedDAT(Algorithm):
    """Federated dual-adapter teacher (Chen et al., AAAI 2024, Algorithm 1).

    In each layer a client has the shared adapter A_s, a copy of it as received, which rests, and an adapter of its own.
    The teacher works with the mean of the last two, the student with A_s. On each batch first the student takes a step
    on (1 - w) task + w KL(teacher || student), then the teacher one, by the client's own adapter, on (1 - w) task + w
    KL(student || teacher); each takes the other's scores as constants (mutual knowledge distillation). Only A_s is
    averaged; the client's own adapter stays.

    The paper has bottleneck adapters behind the blocks of one fused network; here they are low-rank adapters (LoRA)
    within the linear layers of the encoders. All that has no adapters, such as heads, learns with the student and is
    shared. Scores are those of classes, or, in retrieval, of the candidates in a batch.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {STATE: Lifetime.RUN}
    takes_late_replies: ClassVar[bool] = True
    has_global_models: ClassVar[bool] = True

    local_epochs: LocalEpochs = 1
    local_steps: LocalSteps = None
    averaging: Annotated[WeightAveraging, only(Separate)] = Separate()
    kl_weight: float = Field(default=0.5, ge=0, le=1, description="w, share of the divergence in both losses")
    temperature: float = Field(
        default=3.0, gt=0, le=100, description="of both softmaxes, whose divergence counts its square; as released"
    )
    inference: Literal["teacher", "student"] = Field(default="teacher", description="whose test metrics a client gives")

    def add_modules(self, model: Model) -> None:
        add_adapters(model, PERSONAL, RECEIVED)

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"fit": "num_examples"}

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start the shared adapters.

        Raises:
            ConfigError: adapters are of unequal ranks.
        """
        server.share_weights(self.averaging)

    def require(self, plan: FederationPlan) -> None:
        """See ``Algorithm``; every client's task gives scores."""
        super().require(plan)
        for client in plan.clients:
            kind: Any = Task.named(client.task)
            if kind.scores is Task.scores:
                raise ConfigError(
                    f"algorithm 'feddat' distils scores, and task '{client.task}' of client '{client.id}' gives none; "
                    "choose classification, vqa, retrieval or convirt"
                )

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train student and teacher, average the shared adapter."""
        replies = cohort.ask(self.fit, check=server.weights_check(), weights=each(server.weights_for))
        server.average_weights(replies, cohort.clients, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the shared adapter as student and the client's own as teacher, in turn on each batch."""
        self.receive(client, weights)
        own = adapter_tensors(client.model, PERSONAL).keys()
        client.trainer(only=lambda name: name not in own)
        teacher, met = client.trainer("teacher", only=lambda name: name in own), list[tuple[Batch, Tensor]]()

        def from_teacher(model: CachedModel, batch: Batch) -> Tensor:
            batch = client.task.usable(batch)
            if not len(batch):  # the task's loss is 0 as well, and neither adapter takes a step
                return batch.no_loss
            student = client.task.scores(model, client.head, batch)
            use_adapters(client.model, TEACHER)
            with torch.no_grad():
                target = client.task.scores(client.model, client.head, batch)
            use_adapters(client.model, SHARED_ALONE)
            met[:] = [(batch, student.detach())]
            return self.kl_weight * self.divergence(student, target)

        def teach() -> None:
            ((batch, student),) = met
            use_adapters(client.model, TEACHER)
            shared = CachedModel(client.model)
            with client.autocast():
                loss = client.task.loss(shared, client.head, batch)
                divergence = self.divergence(client.task.scores(shared, client.head, batch), student)
            teacher.step((1 - self.kl_weight) * loss + self.kl_weight * divergence)
            use_adapters(client.model, SHARED_ALONE)

        client.fit(
            client.train,
            epochs=self.local_epochs,
            steps=self.local_steps,
            task_weight=1 - self.kl_weight,
            regulariser=from_teacher,
            after_step=teach,
        )
        keep_personal(client)
        return Reply(weights=client.weights, num_examples=client.num_examples)

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate teacher or student on the client's test samples."""
        if self.receive(client, weights) and self.inference == "teacher":
            use_adapters(client.model, TEACHER)
        reply = self.assess(client)
        use_adapters(client.model, SHARED_ALONE)
        return reply

    def receive(self, client: Client, weights: Weights) -> bool:
        """Have the received shared adapter, a frozen copy of it and the client's own; whether it has trained before."""
        client.load_weights(weights)
        copy_adapter(client.model, SHARED, RECEIVED)
        return restore_personal(client)

    def divergence(self, learner: Tensor, target: Tensor) -> Tensor:
        """tau^2 KL(softmax(target / tau) || softmax(learner / tau)), mean over rows."""
        return self.temperature**2 * score_kl(learner, target, self.temperature).mean()
