"""FedDPA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
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
    LocalTraining,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_query,
    client_step,
    each,
)
from polyfed.algorithms.shared.personal_training import SHARED_ALONE, STATE, restore_personal, train_personal
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.models.model import CachedEmbedder, Model
from polyfed.models.personal_adapters import PERSONAL, SHARED, add_adapters, use_adapters
from polyfed.models.towers import Positions
from polyfed.tasks import evaluating


class InstanceWeight(Settings):
    """Weight of the personal adapter for each input: how alike it is to training inputs of its client (section 4.3)."""

    samples: int = Field(default=5, ge=1, description="S, training inputs of a modality that an input is compared with")
    largest: float = Field(default=0.5, gt=0, le=1, description="lambda, the weight of an input that is equal to all")


class FineTuning(Settings):
    """FedDPA-F: personal adapters are trained at the end, when the shared one is done."""

    rounds: int = Field(default=1, ge=1, description="last rounds, in which nothing but personal adapters is trained")


class FedDPA(Algorithm):
    """Dual personalizing adapters (Yang et al., NeurIPS 2024): a shared and a personal low-rank adapter in each layer.

    The shared adapter is averaged as in FedIT. The personal one, which stays at its client, is trained with the
    received one beside it, W + s ((1 - alpha) B_g A_g + alpha B_l A_l), of which that rests. In FedDPA-T clients do so
    in each round and then train the shared adapter alone; in FedDPA-F (``fine_tuning``) at the end. In tests alpha
    depends on the input (``instance``).

    The paper has one input of text. Here each modality has its own weight: lambda times the mean cosine of the input's
    representation with those of S training inputs of the client, by the personal adapter alone, as released; not below
    0. Names of classes have the weight of training. All that has no adapters, such as heads, is shared. A client that
    has not trained yet has no personal adapter and is judged by the shared one.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {STATE: Lifetime.RUN}
    has_global_models: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    averaging: Annotated[WeightAveraging, only(Separate)] = Separate()
    weight: float = Field(default=0.5, gt=0, le=1, description="alpha in training, of the personal adapter")
    instance: InstanceWeight | None = Field(
        default=InstanceWeight(), description="alpha in tests by input; null: that of training for all"
    )
    fine_tuning: FineTuning | None = Field(
        default=None, description="FedDPA-F; null: FedDPA-T, both adapters are trained in each round"
    )

    def add_modules(self, model: Model) -> None:
        add_adapters(model, PERSONAL)

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"fit": "num_examples"}

    @property
    def local_training(self) -> LocalTraining:
        others = self.local_steps if self.fine_tuning is None else None
        return LocalTraining(self.local_epochs, self.local_steps, others or 0)

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        super().require(plan)
        if self.fine_tuning is not None and self.fine_tuning.rounds >= plan.rounds:
            raise ConfigError(
                f"algorithm.fine_tuning.rounds is {self.fine_tuning.rounds}, which leaves none of run.rounds "
                f"{plan.rounds} for the shared adapter; give at most {plan.rounds - 1}"
            )

    def setup(self, server: Server) -> None:
        """Start the shared adapters.

        Raises:
            ConfigError: adapters are of unequal ranks.
        """
        server.share_weights(self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train personal and shared adapters, average the shared one."""
        weights = each(server.weights_for)
        last = 0 if self.fine_tuning is None else self.fine_tuning.rounds
        if server.clock.round > server.clock.rounds - last:
            for _ in cohort.ask(self.personalise, weights=weights):
                pass
            return
        replies = cohort.ask(self.fit, check=server.weights_check(), weights=weights)
        server.average_weights(replies, cohort.clients, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the personal adapter beside the received one (FedDPA-T), then the shared one alone."""
        client.load_weights(weights)
        restore_personal(client)
        if self.fine_tuning is None:
            train_personal(client, self.both, self.local_epochs, self.local_steps)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights, num_examples=client.num_examples)

    @client_step()
    def personalise(self, client: Client, weights: Weights) -> Reply:
        """Train the personal adapter beside the received one (FedDPA-F)."""
        client.load_weights(weights)
        restore_personal(client)
        train_personal(client, self.both, self.local_epochs, self.local_steps)
        return Reply()

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate the received adapter and the client's own together on the client's test samples."""
        client.load_weights(weights)
        if not restore_personal(client) or client.test is None:
            return self.assess(client)
        if self.instance is None:
            use_adapters(client.model, self.both)
            metrics = client.evaluate(client.test)
        else:
            metrics = self._by_input(client, self.instance)
        use_adapters(client.model, SHARED_ALONE)
        return Reply(**metrics)

    @property
    def both(self) -> Mapping[str, float | Tensor]:
        """Factors of the outputs of both adapters in training."""
        return {SHARED: 1 - self.weight, PERSONAL: self.weight}

    def _by_input(self, client: Client, instance: InstanceWeight) -> dict[str, float]:
        assert client.test is not None
        known = training_inputs(client, instance.samples)
        weighted = InstanceWeighted(client.model, known, instance.largest, self.weight)
        with evaluating(client.model), client.autocast():
            return client.task.evaluate(weighted, client.head, client.test, batch_size=client.evaluation_batch)


class InstanceWeighted(CachedEmbedder):
    """A model that embeds each input with its own weight of the personal adapter.

    Args:
        model: with both adapters, in evaluation mode.
        known: modality -> representations [s, d] of training inputs, by the personal adapter alone.
        largest: lambda.
        otherwise: weight of inputs of another modality, such as names of classes.
    """

    def __init__(self, model: Model, known: Mapping[str, Tensor], largest: float, otherwise: float) -> None:
        super().__init__(self._weighted, self._weighted_positions, model.detail)
        self.model, self.known, self.largest, self.otherwise = model, known, largest, otherwise

    @property
    def device(self) -> torch.device:
        return self.model.device

    def weight(self, modality: str, x: Tensor) -> Float[Tensor, " b"]:
        """alpha of each input."""
        use_adapters(self.model, {PERSONAL: 1.0})
        # no product of matrices, which autocast would round to 16 bits
        similarity = (self.model.represent(modality, x) * self.known[modality].mean(0)).sum(1)
        return (self.largest * similarity).clamp_min(0)

    def _weighted(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        self._weigh(modality, x)
        return self.model.embed(modality, x)

    def _weighted_positions(self, modality: str, x: Tensor) -> Positions:
        self._weigh(modality, x)
        return self.model.positions(modality, x)

    def _weigh(self, modality: str, x: Tensor) -> None:
        alpha = self.weight(modality, x)[:, None, None] if modality in self.known else self.otherwise
        use_adapters(self.model, {SHARED: 1 - alpha, PERSONAL: alpha})


def training_inputs(client: Client, count: int) -> dict[str, Float[Tensor, "s d"]]:
    """Representations of so many training inputs of each modality, drawn anew each round, by the personal adapter."""
    use_adapters(client.model, {PERSONAL: 1.0})
    known: dict[str, Tensor] = {}
    for modality in client.modalities:
        there = client.train.having(modality)
        if len(there):
            order = torch.randperm(len(there), generator=client.generator(f"instance-{modality}"))
            known |= client.represent(there.subset(order[:count]), [modality])
    return known
