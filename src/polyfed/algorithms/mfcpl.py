"""MFCPL."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.prototypes import (
    ClassAverage,
    ClassMeans,
    GlobalPrototypes,
    by_space,
    mean_prototypes,
    prototype_tensors,
    renewed,
    table,
)
from polyfed.algorithms.algorithm import Client, ClientInfo, Cohort, Reply, Server, Weights, client_step, each, tap
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.shared.local_losses import SampleEmbeddings
from polyfed.core.errors import PayloadError
from polyfed.data.samples import Batch
from polyfed.federation.types import class_space
from polyfed.losses.classification import prototype_contrast
from polyfed.losses.distillation import mse, squared_distance
from polyfed.models.heads import class_count
from polyfed.models.model import CachedModel
from polyfed.tasks import evaluating
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Prototypes

PROTOTYPES = "prototypes"
"""What of the server's state they are."""


class MFCPL(FedAvg):
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

    >>> method = MFCPL(contrast=0.0)
    >>> method.regularisation, method.alignment
    (0.1, 0.1)
    """

    regularisation: float = Field(
        default=0.1,
        ge=0,
        le=1e6,
        description="weight of CMPR: a higher one draws features to the prototypes of their classes",
    )
    contrast: float = Field(
        default=0.1, ge=0, le=1e6, description="weight of CMPC: a higher one parts the classes in each modality"
    )
    alignment: float = Field(
        default=0.1, ge=0, le=1e6, description="weight of CMA: a higher one draws the modalities of a sample together"
    )
    tau: float = Field(default=0.5, gt=0, le=100, description="temperature of CMPC; a higher one softens it")

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {}

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast weights and prototypes, train, average both."""
        sent, known = dict[str, list[ClassMeans]](), global_prototypes(server)

        def fold(reply: Reply) -> None:
            for space, own in by_space(reply.prototypes, ClassMeans).items():
                means = ClassMeans(*(part.to(server.device) for part in own.clipped()))
                sent.setdefault(space, []).append(means.mix_with_server(known.get(space), reply.mixing))

        replies = cohort.ask(
            self.fit,
            check=SentCheck(server),
            weights=each(server.weights_for),
            prototypes=each(lambda client: prototypes_for(server, client)),
        )
        self.average(server, cohort, tap(replies, fold))
        for space, means in sent.items():
            known[space] = renewed(mean_prototypes(means), known.get(space))
        server.state[PROTOTYPES] = {
            name: value for one in known.items() for name, value in prototype_tensors(*one).items()
        }
        server.record(prototypes=float(sum(len(one.means) for one in known.values())))

    # ---- client half

    @client_step(weights=Weights, prototypes=Prototypes, num_examples=int)
    def fit(  # type: ignore[override]  # it is sent prototypes besides
        self, client: Client, weights: Weights, prototypes: Prototypes
    ) -> Reply:
        """Train the received model on the task and the three terms; send it, and its own complete prototypes."""
        client.load_weights(weights)
        known = received_prototypes(client, prototypes)
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
        near = width * mse(f, known.means[labels], known.present[labels])
        contrasts = [prototype_contrast(p.values, *known, labels[p.index], self.tau) for p in own.parts.values()]
        return self.regularisation * near + self.contrast * own.mean(contrasts)

    def apart(self, own: SampleEmbeddings) -> Tensor:
        """CMA."""
        pairs = ((F.normalize(u.float(), dim=1), F.normalize(v.float(), dim=1)) for u, v, _ in own.pairs())
        return own.mean([squared_distance(u, v, "mean") for u, v in pairs])

    def own(self, client: Client) -> Prototypes:
        """Means by class of unit features, over the samples that lack none of several modalities; empty without."""
        if not isinstance(client.task, Classification) or len(client.modalities) < 2:
            return Prototypes({})
        task, average = client.task, ClassAverage(_classes(client), client.model.dim, client.device)
        complete = task.usable(client.train.having(*client.modalities))
        with evaluating(client.model):
            for batch in (one.to(client.device) for one in complete.batches(client.setup.evaluation_batch)):
                with client.autocast():
                    features = task.feature(client.model, client.head, batch)
                average.add(F.normalize(features.float(), dim=-1), batch.targets[task.target].long())
        means = average.result()
        # where noise hides which classes a client has, so must the layout
        is_sent = len(means.counts) or client.protection is not None
        return Prototypes(prototype_tensors(class_space(client.setup.head_name), means) if is_sent else {})


class SentCheck:
    """Raises PayloadError for a reply whose weights or prototypes cannot be what its sender has.

    The first prototypes of a space that are accepted fix its number of classes and width.
    """

    def __init__(self, server: Server) -> None:
        self._weights = server.weights_check()
        self._shapes = {space: prototypes.shape for space, prototypes in global_prototypes(server).items()}

    def __call__(self, reply: Reply) -> None:
        self._weights(reply)
        sent = by_space(reply.prototypes, ClassMeans)
        if len(sent) > 1:
            raise PayloadError(f"prototypes of {len(sent)} class spaces ({', '.join(sent)}), expected one at most")
        for space, means in sent.items():
            if space != _space_of(reply.sender):
                raise PayloadError(f"prototypes of the class space '{space}', which is not the client's")
            means.require(reply.sender.samples)
            _require_shape(space, means.shape, self._shapes.setdefault(space, means.shape))


def global_prototypes(server: Server) -> dict[str, GlobalPrototypes]:
    return by_space(server.state.get(PROTOTYPES, {}), GlobalPrototypes)


def prototypes_for(server: Server, client: ClientInfo) -> Prototypes:
    """Global prototypes of a client's class space; empty while there are none."""
    kept = server.state.get(PROTOTYPES, {})
    return Prototypes({name: kept[name] for name in kept if name.rpartition(".")[0] == _space_of(client)})


def received_prototypes(client: Client, prototypes: Prototypes) -> GlobalPrototypes | None:
    """Global prototypes of a client's class space, on its device; None before there are any, or for other tasks.

    Raises:
        PayloadError: they have another number of classes or another width.
    """
    space = class_space(client.setup.head_name)
    known = by_space(prototypes, GlobalPrototypes).get(space)
    if known is None or not isinstance(client.task, Classification):
        return None
    _require_shape(space, known.shape, (_classes(client), client.model.dim))
    return GlobalPrototypes(*(part.to(client.device) for part in known))


def _space_of(client: ClientInfo) -> str:
    return class_space(client.architecture.partition("/")[2])


def _classes(client: Client) -> int:
    assert client.head is not None
    return class_count(client.head)


def _require_shape(space: str, shape: tuple[int, int], expected: tuple[int, int]) -> None:
    if shape != expected:
        raise PayloadError(
            f"prototypes of the class space '{space}' have {shape[0]} classes of width {shape[1]}, expected "
            f"{expected[0]} of width {expected[1]}: set task.classes and model.dim alike for all whose classes are the "
            "same"
        )
