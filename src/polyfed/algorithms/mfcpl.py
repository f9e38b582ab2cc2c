"""MFCPL."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.averagings.by_type import ByType
from polyfed.aggregation.prototypes import (
    ClassMeans,
    GlobalPrototypes,
    MeanWeighting,
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
    LocalEpochs,
    LocalSteps,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_step,
    each,
    noted,
)
from polyfed.algorithms.shared.class_prototypes import (
    PROTOTYPES,
    PrototypeCheck,
    global_prototypes,
    own_prototypes,
    prototypes_for,
    received_prototypes,
)
from polyfed.algorithms.shared.sample_embeddings import SampleEmbeddings
from polyfed.data.samples import Batch
from polyfed.federation.types import class_space
from polyfed.losses.classification import prototype_contrast, prototype_distance
from polyfed.losses.distillation import squared_distance
from polyfed.models.model import CachedModel
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Prototypes


class MFCPL(Algorithm):
    """MFCPL-like (Le et al., arXiv 2401.13898): FedAvg with prototypes of complete samples, which guide the others.

    A complete prototype P_c is the mean of what is classified, f, over a client's samples of class c that lack nothing,
    and then over clients (Eq. 4). Clients of the class space, of whatever modalities, add to their task's loss

        regularisation ||f - P_y||^2                                    CMPR, in the shared space
        + contrast mean_m -log softmax_y(cos(z_m, P_c) / tau)            CMPC, in each modality
        + alignment mean_{m,n} ||z_m - z_n||^2                          CMA, over samples that have both

    of features f and embeddings z of unit norm; before there are prototypes, and for a task without classes, CMA alone.
    A class that nobody sent in a round keeps its prototype.

    From the paper: complete prototypes, the three terms and what each compares. Ours, as its equations could not be
    checked: distances, weights and tau; and no projections, as all encoders here end in one space.
    """

    has_global_models: ClassVar[bool] = True
    takes_late_replies: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    averaging: WeightAveraging = ByType()
    regularisation: float = Field(default=0.1, ge=0, le=1e6, description="weight of CMPR")
    contrast: float = Field(default=0.1, ge=0, le=1e6, description="weight of CMPC")
    alignment: float = Field(default=0.1, ge=0, le=1e6, description="weight of CMA")
    tau: float = Field(default=0.5, gt=0, le=100, description="temperature of CMPC")
    weighting: MeanWeighting = Field(
        default="uniform", description="of clients in the mean of a class: uniform (Eq. 4), or by their samples"
    )

    # ---- server half

    def setup(self, server: Server) -> None:
        server.share_weights(self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast weights and prototypes, train, average both."""
        sent, known = dict[str, list[ClassMeans]](), global_prototypes(server)

        def fold(reply: Reply) -> None:
            for space, own in by_space(reply.prototypes, ClassMeans).items():
                means = own.at_most(server.weight(reply.sender)).shortened()
                means = ClassMeans(*(part.to(server.device) for part in means))
                sent.setdefault(space, []).append(means.followed(known.get(space), reply.mixing))

        replies = cohort.ask(
            self.fit,
            check=both(server.weights_check(), PrototypeCheck(admits, server)),
            weights=each(server.weights_for),
            prototypes=each(lambda client: prototypes_for(server, client, admits)),
        )
        server.average_weights(noted(replies, fold), cohort.clients, self.averaging)
        for space, means in sent.items():
            known[space] = renewed(mean_prototypes(means, self.weighting), known.get(space))
        server.state[PROTOTYPES] = {
            name: value for one in known.items() for name, value in prototype_tensors(*one).items()
        }
        server.record(prototypes=float(sum(len(one.means) for one in known.values())))

    # ---- client half

    @client_step(weights=Weights, prototypes=Prototypes, num_examples=int)
    def fit(self, client: Client, weights: Weights, prototypes: Prototypes) -> Reply:
        """Train the received model on the task and the three terms; send it, and its own complete prototypes."""
        client.load_weights(weights)
        known = received_prototypes(client, prototypes, class_space(client.head_name))
        rows = None if known is None else known._replace(means=table(*known))

        def guidance(model: CachedModel, batch: Batch) -> Tensor:
            own = SampleEmbeddings.of(client, model, batch)
            return self.alignment * self.apart(own) + (0.0 if rows is None else self.guided(own, rows))

        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, regulariser=guidance)
        return Reply(weights=client.weights, prototypes=self.own(client), num_examples=client.num_examples)

    def guided(self, own: SampleEmbeddings, known: GlobalPrototypes) -> Tensor:
        """CMPR and CMPC, weighted; ``known`` with a row for every class."""
        if own.fused is None:
            return own.batch.no_loss
        f, labels, width = F.normalize(own.fused.float(), dim=1), own.labels, known.means.shape[1]
        # mse is the mean over dimensions of the squared norm
        near = width * prototype_distance(f, known.means, known.present, labels, "mse")
        told = [prototype_contrast(p.values, *known, labels[p.places], self.tau) for p in own.parts.values()]
        return self.regularisation * near + self.contrast * own.mean(told)

    def apart(self, own: SampleEmbeddings) -> Tensor:
        """CMA."""
        pairs = ((F.normalize(u.float(), dim=1), F.normalize(v.float(), dim=1)) for u, v, _ in own.pairs())
        return own.mean([squared_distance(u, v, "mean") for u, v in pairs])

    def own(self, client: Client) -> Prototypes:
        """Means by class of unit features, over the samples that lack none of several modalities; empty without."""
        if not isinstance(client.task, Classification) or len(client.modalities) < 2:
            return Prototypes({})
        complete = client.train.having(*client.modalities)
        return own_prototypes(client, complete, class_space(client.head_name), unit=True)


def admits(client: ClientInfo, space: str) -> bool:
    """Whether a class space is that of a client."""
    return space == class_space(client.architecture.partition("/")[2])


def both(*checks: Callable[[Reply], None]) -> Callable[[Reply], None]:
    """One check of several."""

    def check(reply: Reply) -> None:
        for one in checks:
            one(reply)

    return check
