"""RCSR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.averagings.low_rank import Separate, only
from polyfed.aggregation.prototypes import ClassAverage, ClassMeans, by_space, prototype_tensors
from polyfed.aggregation.router import Router, client_features, routing_loss
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
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
from polyfed.algorithms.shared.personal_training import SHARED_ALONE, STATE, restore_personal, train_personal
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.randomness import isolated
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.federation.settings import TrainingSettings, require_no_batch_size
from polyfed.federation.trainer import Regulariser
from polyfed.models.model import CachedModel, Model
from polyfed.models.personal_adapters import PERSONAL, SHARED, add_adapters, use_adapters
from polyfed.optim.settings import OptimizerSettings
from polyfed.tasks import evaluating
from polyfed.wire.payload import Prototypes

_PROTOTYPES, _ROUTER = "prototypes", "router"
_TOGETHER: Mapping[str, float | Tensor] = {SHARED: 1.0, PERSONAL: 1.0}


class Routing(Settings):
    """The router, a small network at the server."""

    width: int = Field(default=128, ge=4, multiple_of=4, description="of a client's token")
    layers: int = Field(default=2, ge=1, description="of attention between clients")
    entropy: float = Field(default=0.1, ge=0, le=1e3, description="factor of the weights' entropy in the loss")
    alignment: float = Field(
        default=0.3, ge=0, le=1e3, description="factor of the disagreement on where modalities lie to each other"
    )
    training: TrainingSettings = Field(
        default=TrainingSettings(optimizer=OptimizerSettings(kind="adam", lr=1e-3)), description="a step a round"
    )

    @model_validator(mode="after")
    def _has_no_batches(self) -> Self:
        require_no_batch_size(self.training, "the router looks at all clients of a round")
        return self


class RCSR(Algorithm):
    """Retrieval-centric semantic routing (Zhou et al., arXiv 2604.22885): adapters of two frozen towers.

    A prototype is the mean unit representation of a modality. Clients send theirs; the server keeps a moving average of
    each. Prototype anchoring: a client that lacks a modality adds 1 - cos(mean of a batch, prototype of the modality
    that it lacks) to the loss of its own task. Semantic routing: a small network gives clients their weights in the
    average of the shared adapters, by their prototypes, modalities, losses and changes; it is trained for averages
    whose prototypes are consistent with the global ones (``aggregation.router``). With ``personal`` each client trains
    an adapter of its own beside the shared one, which then rests.

    Follows the released code, of which the local losses are missing; the documentation says what that leaves open.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {STATE: Lifetime.RUN}
    has_global_models: ClassVar[bool] = True

    local_epochs: LocalEpochs = 1
    local_steps: LocalSteps = None
    averaging: Annotated[WeightAveraging, only(Separate)] = Separate()
    anchor_weight: float = Field(default=1.0, ge=0, le=1e6, description="of prototype anchoring; 0: none")
    decay: float = Field(default=0.95, ge=0, lt=1, description="share of the old in new global prototypes")
    router: Routing | None = Field(default=Routing(), description="null: clients count by their samples, as in FedAvg")
    personal: bool = Field(default=False, description="whether clients have adapters of their own besides")

    def add_modules(self, model: Model) -> None:
        if self.personal:
            add_adapters(model, PERSONAL)

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        """See ``Algorithm``; the clients have two modalities between them."""
        super().require(plan)
        names = _modalities(plan.clients)
        if plan.clients and len(names) != 2:
            raise ConfigError(
                f"algorithm 'rcsr' aligns two modalities, and clients have {', '.join(names)}; give some clients two, "
                "or choose another method"
            )

    def setup(self, server: Server) -> None:
        server.share_weights(self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast adapters and prototypes, train, weigh clients, average, learn new prototypes and routes."""
        known = server.state.get(_PROTOTYPES, {})
        replies = list(  # held, as a weight depends on all of them
            cohort.ask(
                self.fit, check=MeansCheck(server), weights=each(server.weights_for), prototypes=Prototypes(known)
            )
        )
        # fewer than the client has where its update was scaled down, and then it counts as much less
        samples = torch.tensor([float(reply.num_examples) for reply in replies], device=server.device)
        own = of_clients(replies, known, _modalities(server.clients), server.device)
        weights, settings = samples / samples.sum(), self.router
        if settings is not None:
            router = self.route(server, settings, own.shape[2])
            weights = router(self.features(server, replies, own))
        new = self.follow(server, known, weights.detach(), own)
        if settings is not None:
            loss = routing_loss(weights, own, new, settings.entropy, settings.alignment)
            self.learn(server, router, settings, loss)
            server.record(routing_loss=float(loss.detach()), largest_weight=float(weights.detach().max()))
            weights = weights * samples / samples.new_tensor([max(1, server.weight(reply.sender)) for reply in replies])
        shares = {reply.sender.id: float(weight) for reply, weight in zip(replies, weights.detach(), strict=True)}
        server.average_weights(replies, cohort.clients, self.averaging, lambda reply: shares[reply.sender.id])

    def features(self, server: Server, replies: Sequence[Reply], own: Float[Tensor, "k 2 d"]) -> Float[Tensor, "k f"]:
        """What the router sees of each client."""
        names = _modalities(server.clients)
        numbers = [
            [
                *(float(change_of(reply.weights, server.weights_for(reply.sender), name)) for name in names),
                *(float(name in reply.sender.modalities) for name in names),
                reply.loss,
                float(max(1, server.weight(reply.sender))),
            ]
            for reply in replies
        ]
        known = torch.tensor(numbers, device=own.device)
        return client_features(own, known[:, 2:4], known[:, 4], known[:, :2], known[:, 5])

    def route(self, server: Server, settings: Routing, width: int) -> Router:
        """The router as the last round left it, or new."""
        with isolated(server.clock.seed, "init", _ROUTER):
            router = Router(2 * width + 7, settings.width, settings.layers).to(server.device)
        if _ROUTER in server.state:
            router.load_state_dict(server.state[_ROUTER])
        return router

    def learn(self, server: Server, router: Router, settings: Routing, loss: Tensor) -> None:
        """One step of the router."""
        for _ in server.epochs(1):
            server.trainer(_ROUTER, settings.training, module=router).step(loss)
        server.state[_ROUTER] = {name: value.detach() for name, value in router.state_dict().items()}

    def follow(
        self, server: Server, known: Mapping[str, Tensor], weights: Float[Tensor, " k"], own: Float[Tensor, "k 2 d"]
    ) -> Float[Tensor, "2 d"]:
        """New global prototypes: decay g + (1 - decay) sum_k w_k p_k, of unit norm."""
        names = _modalities(server.clients)
        new = moving_means(known, dict(zip(names, torch.einsum("k,kmd->md", weights, own), strict=True)), self.decay)
        # none of a modality that nobody has had yet
        server.state[_PROTOTYPES] = {name: row for name, row in zip(names, new, strict=True) if bool(row.any())}
        return new

    # ---- client half

    @client_step(weights=Weights, prototypes=Prototypes, loss=float, num_examples=int)
    def fit(self, client: Client, weights: Weights, prototypes: Prototypes) -> Reply:
        """Train the shared adapters with anchors, then the client's own; send the former and what they come to."""
        client.load_weights(weights)
        if self.personal:
            restore_personal(client)
        anchor = self.anchor(client, prototypes) if self.anchor_weight else None
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, regulariser=anchor)
        means, loss = self.summary(client)
        if self.personal:
            train_personal(client, _TOGETHER, self.local_epochs, self.local_steps)
        return Reply(weights=client.weights, prototypes=means, loss=loss, num_examples=client.num_examples)

    def anchor(self, client: Client, prototypes: Prototypes) -> Regulariser | None:
        """1 - cos(mean representation of a batch, g) for each modality that the client lacks; None if it lacks none."""
        goals = [goal.to(client.device) for name, goal in prototypes.items() if name not in client.modalities]
        if not goals:
            return None

        def loss(model: CachedModel, batch: Batch) -> Tensor:
            own = [model.represent(name, one.inputs[name]).mean(0) for name, one in batch.by_modality()]
            if not own:
                return batch.no_loss
            terms = [1 - F.cosine_similarity(mean, goal, dim=0) for mean in own for goal in goals]
            return self.anchor_weight * torch.stack(terms).mean()

        return loss

    def summary(self, client: Client) -> tuple[Prototypes, float]:
        """Mean unit representation of each modality, and mean loss of a batch, of the training samples as they are."""
        averages = {name: ClassAverage(1, client.model.dim, client.device) for name in client.modalities}
        with evaluating(client.model), client.autocast():
            batches = (batch.to(client.device) for batch in client.train.batches(client.training.batch_size))
            losses = [self.folded(client, batch, averages) for batch in batches]
        means = {name: average.result() for name, average in averages.items()}
        sent = [prototype_tensors(name, one) for name, one in means.items() if len(one.counts)]
        return Prototypes({key: value for one in sent for key, value in one.items()}), float(torch.stack(losses).mean())

    def folded(self, client: Client, batch: Batch, averages: Mapping[str, ClassAverage]) -> Tensor:
        """The loss of a batch; what represents the samples that have a modality joins its average."""
        model = CachedModel(client.model)
        loss = client.task.loss(model, client.head, batch).float()
        for name, own in batch.by_modality(fewest=1):
            z, average = model.represent(name, own.inputs[name]), averages[name]
            average.add(z, torch.zeros(len(z), dtype=torch.int64, device=z.device))
        return loss

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate the received adapters, with ``personal`` beside the client's own, on the client's test samples."""
        client.load_weights(weights)
        if not self.personal:
            return self.assess(client)
        if restore_personal(client):
            use_adapters(client.model, _TOGETHER)
        reply = self.assess(client)
        use_adapters(client.model, SHARED_ALONE)
        return reply


class MeansCheck:
    """Raises PayloadError for a reply whose weights or prototypes cannot be what its sender has."""

    def __init__(self, server: Server) -> None:
        self._weights = server.weights_check()
        self._width = next((len(value) for value in server.state.get(_PROTOTYPES, {}).values()), None)

    def __call__(self, reply: Reply) -> None:
        self._weights(reply)
        sent = by_space(reply.prototypes, ClassMeans)
        if not sent or not set(sent) <= set(reply.sender.modalities):
            raise PayloadError(f"prototypes of {sorted(sent)} from a client with {list(reply.sender.modalities)}")
        for means in sent.values():
            means.require(reply.sender.samples)
            self._width = self._width or means.shape[1]
            if means.shape != (1, self._width):
                raise PayloadError(f"prototypes of shape {list(means.shape)}, expected [1, {self._width}]")


def of_clients(
    replies: Sequence[Reply], known: Mapping[str, Tensor], names: Sequence[str], device: torch.device
) -> Float[Tensor, "k 2 d"]:
    """Clients' prototypes, of unit norm; for a modality that one lacks the global one, or the mean of those sent.

    Args:
        replies: of k clients.
        known: modality -> global prototype [d].
        names: of the modalities.
        device: of the result; replies that came as bytes are on the CPU, as is what a resumed run knows.
    """
    sent = [by_space(reply.prototypes, ClassMeans) for reply in replies]
    rows = []
    for name in names:
        having = [F.normalize(one[name].means[0].to(device), dim=0) for one in sent if name in one]
        width = next(iter(sent[0].values())).shape[1]
        mean = torch.stack(having).mean(0) if having else torch.zeros(width, device=device)
        rows.append(
            torch.stack([(one[name].means[0] if name in one else known.get(name, mean)).to(mean) for one in sent])
        )
    return F.normalize(torch.stack(rows, 1), dim=2)


def _modalities(clients: Sequence[ClientInfo]) -> list[str]:
    return sorted({name for client in clients for name in client.modalities})


def moving_means(known: Mapping[str, Tensor], means: Mapping[str, Tensor], decay: float) -> Float[Tensor, "2 d"]:
    """decay g + (1 - decay) p of each modality, of unit norm; g is 0 where it is not known."""
    old = torch.stack(
        [known[name].to(mean) if name in known else torch.zeros_like(mean) for name, mean in means.items()]
    )
    return F.normalize(decay * old + (1 - decay) * torch.stack(list(means.values())), dim=1)


def change_of(new: Mapping[str, Tensor], old: Mapping[str, Tensor], modality: str) -> Float[Tensor, ""]:
    """Norm of what a client has changed of the encoder of a modality; 0 if it has none."""
    norms = [
        torch.linalg.vector_norm(value.float() - old[name].to(value.device).float())
        for name, value in new.items()
        if name.startswith(f"encoders.{modality}.")
    ]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
