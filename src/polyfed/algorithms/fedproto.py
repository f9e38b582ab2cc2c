"""FedProto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.prototypes import (
    ClassMeans,
    GlobalPrototypes,
    MeanWeighting,
    bounded,
    by_space,
    mean_prototypes,
    prototype_tensors,
    renewed,
    table,
)
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
    client_query,
    client_step,
    each,
)
from polyfed.algorithms.shared.class_prototypes import (
    PROTOTYPES,
    PrototypeCheck,
    as_prototypes,
    class_features,
    global_prototypes,
    known_classes,
    own_prototypes,
    prototypes_for,
    received_prototypes,
)
from polyfed.core.errors import ConfigError, nearest
from polyfed.data.samples import Batch
from polyfed.federation.trainer import Regulariser
from polyfed.federation.types import class_space
from polyfed.losses.classification import distances, prototype_distance
from polyfed.losses.distillation import Distillation
from polyfed.models.model import CachedModel
from polyfed.tasks.accuracy import accuracies, label_ranks, predictions
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Prototypes


class FedProto(Algorithm):
    """Federated prototype learning (Tan et al., AAAI 2022, Algorithm 1).

    Clients keep models of their own, of any architecture and modality, and exchange only the mean of their features by
    class. They train on their task plus lambda times the distance of a sample's feature to the global prototype of its
    class (Eq. 7-8); the server averages what they send (Eq. 6); inference takes the nearest prototype (Eq. 4).

    A feature is what the classifier takes: the embedding, or the mean of those of several modalities. Prototypes mix
    within a class space, that of a target's classes, whatever modality and source. Clients whose task has no classes
    train on it alone. A class that nobody sent in a round keeps its global prototype.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}
    takes_late_replies: ClassVar[bool] = True

    local_epochs: LocalEpochs = 1
    local_steps: LocalSteps = None
    proto_weight: float = Field(default=1.0, ge=0, le=1e6, description="lambda, factor of the distance; HtFLlib 10")
    distance: Distillation = Field(
        default="l2", description="to the prototype: the norm; mse: squared, mean over dimensions, as released; cosine"
    )
    normalise: bool = Field(default=False, description="features of unit length in prototypes and distances")
    weighting: MeanWeighting = Field(
        default="count", description="of clients in the mean of a class: by samples, or uniform, as released"
    )
    inference: Literal["prototypes", "classifier"] = Field(
        default="prototypes", description="whose accuracy is called so; the other is reported beside it"
    )
    min_count: int = Field(default=1, ge=1, description="classes of which a client has fewer samples are not sent")
    largest_norm: float | None = Field(
        default=5.0, ge=1, description="longer received rows are scaled to so many median norms; None: no bound"
    )
    shared: dict[str, Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]] = Field(
        default={},
        description="group -> class space, for groups with the same classes under other names or targets",
    )

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"fit": None} if self.weighting == "count" else {}

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        """See ``Algorithm``; some client has classes, and the groups that share a class space are there."""
        super().require(plan)
        if plan.clients and not any(class_space(client.architecture.partition("/")[2]) for client in plan.clients):
            raise ConfigError(
                f"algorithm '{self.component_name()}' exchanges means by class, and no client has a task with classes; "
                "give some the task 'classification'"
            )
        groups = {client.group for client in plan.clients}
        for group in self.shared:
            if groups and group not in groups:
                raise ConfigError(f"algorithm.shared names '{group}', which is no group; {nearest(group, groups)}")

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast global prototypes, train, collect the clients' own, learn new global ones."""
        prototypes, known = each(lambda client: self.prototypes_for(server, client)), global_prototypes(server)
        sent: dict[str, list[ClassMeans]] = {}
        for reply in cohort.ask(self.fit, check=PrototypeCheck(self.admits, server), prototypes=prototypes):
            for space, own in by_space(reply.prototypes, ClassMeans).items():
                # a client that claims more samples than it joined with does not count for more
                own = ClassMeans(*(part.to(server.device) for part in own.at_most(server.weight(reply.sender))))
                sent.setdefault(space, []).append(own.followed(known.get(space), reply.mixing))
        if not sent:
            _require_earlier(server, cohort, self.min_count)
        scaled = 0
        for space, means in sent.items():
            rows, number = [one.means for one in means], 0
            if self.largest_norm is not None:
                # bounded before they are averaged: one false row would move a mean without limit
                rows, number = bounded(rows, self.largest_norm)
            honest = [one._replace(means=row) for one, row in zip(means, rows, strict=True)]
            new = self.learn(server, space, honest, known.get(space))
            server.state[PROTOTYPES] = dict(server.state.get(PROTOTYPES, {})) | prototype_tensors(space, new)
            scaled += number
        present = [prototypes.present.sum() for prototypes in global_prototypes(server).values()]
        server.record(prototypes=float(sum(present)), bounded=float(scaled))

    def learn(
        self, server: Server, space: str, sent: Sequence[ClassMeans], old: GlobalPrototypes | None
    ) -> GlobalPrototypes:
        """Eq. 6: the mean of what clients sent, and the old prototypes of the other classes."""
        return renewed(mean_prototypes(sent, self.weighting), old)

    def prototypes_for(self, server: Server, client: ClientInfo) -> Prototypes:
        return prototypes_for(server, client, self.admits)

    def admits(self, client: ClientInfo, space: str) -> bool:
        """Whether a class space can be that of a client; see ``space_of``."""
        own = self.shared.get(client.group) or class_space(client.architecture.partition("/")[2])
        return space == own

    @property
    def is_personal(self) -> bool:
        return False

    def evaluate_clients(self, server: Server, cohort: Cohort) -> Mapping[str, Mapping[str, float]]:
        """Every asked client's test metrics, with the global prototypes of its classes."""
        prototypes = each(lambda client: self.prototypes_for(server, client))
        replies = cohort.ask(self.assess_nearest, prototypes=prototypes)
        return {reply.sender.id: reply.payload.scalars for reply in replies}  # type: ignore[misc]

    # ---- client half

    @client_step(prototypes=Prototypes)
    def fit(self, client: Client, prototypes: Prototypes) -> Reply:
        """Train the client's own model; send the means of its features."""
        pull = self.pull(client, prototypes) if self.proto_weight else None
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, regulariser=pull)
        return Reply(prototypes=self.own(client))

    def pull(self, client: Client, prototypes: Prototypes) -> Regulariser | None:
        """lambda times the distance to the global prototypes (Eq. 7-8); None while the client knows of none."""
        received, task = self.received(client, prototypes), client.task
        if received is None or not isinstance(task, Classification):
            return None
        rows, present = table(*received), received.present

        def pull(model: CachedModel, batch: Batch) -> Tensor:
            own = task.classified(model, client.head, batch)
            if not own.parts:
                return own.batch.no_loss
            features, labels = as_prototypes(own.feature, unit=self.normalise), own.batch.targets[task.target].long()
            return self.proto_weight * prototype_distance(features, rows, present, labels, self.distance)

        return pull

    def own(self, client: Client) -> Prototypes:
        """Prototypes of the client's training samples; empty if there are no classes."""
        if not isinstance(client.task, Classification):
            return Prototypes({})
        space, fewest = self.space_of(client), self.min_count
        return own_prototypes(client, client.train, space, unit=self.normalise, min_count=fewest)

    def space_of(self, client: Client) -> str:
        """Name of a client's class space: of its target and classes, or what ``shared`` calls it."""
        return self.shared.get(client.info.group, class_space(client.head_name))

    def received(self, client: Client, prototypes: Prototypes) -> GlobalPrototypes | None:
        return received_prototypes(client, prototypes, self.space_of(client))

    @client_query(float)
    def assess_nearest(self, client: Client, prototypes: Prototypes) -> Reply:
        """Evaluate the client's model on its test samples, by its classifier and by the nearest prototype (Eq. 4)."""
        metrics: dict[str, float] = dict(self.assess(client).payload.scalars)  # type: ignore[arg-type]
        if client.test is None or not isinstance(client.task, Classification):
            return Reply(**metrics)
        received, classes, outcomes = self.received(client, prototypes), known_classes(client), []
        for features, labels in class_features(client, client.test, unit=self.normalise):
            # classes without a prototype are never named; not by -inf: a tie of all must count against the model
            scores = features.new_full((len(features), classes), torch.finfo(features.dtype).min)
            if received is not None:
                scores[:, received.present] = -distances(features, received.means)
            ranks = label_ranks(scores, labels)
            outcomes.append((ranks, predictions(scores, labels, ranks), labels))
        ranks, predicted, labels = (torch.cat(part).cpu() for part in zip(*outcomes, strict=True))
        by_prototype = accuracies(ranks, predicted, labels, classes)
        beside = {"classifier_accuracy": metrics["accuracy"], "prototype_accuracy": by_prototype["accuracy"]}
        chosen = by_prototype if self.inference == "prototypes" else {}
        known = len(received.means) if received is not None else 0
        return Reply(**metrics | chosen | beside, prototype_classes=float(known))


def _require_earlier(server: Server, cohort: Cohort, min_count: int) -> None:
    everybody = {client.id for client in server.clients}
    if PROTOTYPES not in server.state and cohort.may_have_changed({one.id for one in cohort.clients}) == everybody:
        raise ConfigError(
            "no client of the federation sent prototypes: "
            f"algorithm.min_count ({min_count}) is more than any has of a class; lower it"
        )
