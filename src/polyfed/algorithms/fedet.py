"""FedET."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Self

import torch
from jaxtyping import Float, Int64
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from polyfed.aggregation.distinct import packed, unpacked
from polyfed.aggregation.ensemble import Ensemble, Ensembled
from polyfed.aggregation.mean import WeightedMean
from polyfed.aggregation.statistics import row_statistics
from polyfed.aggregation.weighting import Variance
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    LocalEpochs,
    Reply,
    Representations,
    Server,
    Weights,
    client_step,
    each,
)
from polyfed.algorithms.shared.distiller import Distiller, ServerTask, TaughtServer, is_joint
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.teacher import Ensembles, Teacher
from polyfed.core.untrusted import read_json
from polyfed.data.samples import Batch
from polyfed.losses.distillation import similarity_kl

_HEAD = "/head"  # among the types, whose names do not start with a slash


class ConsensusTarget(NamedTuple):
    """The server's target for one output on the exchanged samples."""

    consensus: Ensembled
    others: Ensembled
    """Ensemble of the clients whose answer differs from that of the consensus."""
    anchors: Float[Tensor, "n d"]
    """The server's representations, with which rows are compared."""


class ClientOutput(NamedTuple):
    """One client's rows for one output, with their weight."""

    sender: str
    values: Float[Tensor, "n d"]
    log_weights: Float[Tensor, " n"] | float


class FedET(TaughtServer):
    """Ensemble knowledge transfer to a large server model (FedET, Cho et al., IJCAI 2022).

    A round: each client trains its type's small model, as in FedAvg, and also returns that model's representations of
    the exchanged public samples: the server does not hold clients' architectures, so both cross. The server averages
    the models by type, weighs clients' outputs by their variance, and learns the consensus s, and from the clients that
    contradict it:

        distance(server(x), s) + lambda KL(softmax(s_div) || softmax(server(x))),

    s_div being the consensus of the clients whose own answer differs, with weights that again sum to 1 (0 if all
    agree). The paper's outputs are class scores, and its first term a cross-entropy. Here (a reconstruction) softmaxes
    are over similarities to the server's representations, the answer of a client is the sample that its representation
    is most similar to, and the first term is ``distiller.loss``.

    The shared representation layer are the tensors of heads that a type's model and the server's have in common by name
    and shape: their mean over all clients enters the server's model before the distillation, and the types' models
    receive them after it.

    All outputs of a round are held until the consensus is known: clients x exchanged samples x d x 4 bytes per output.
    A client's update whose norm exceeds ``largest_update`` times that of the model it received is scaled down to it.
    Clients keep nothing and are judged by the model of their type. Metric: ``contradicted`` by output, the share of
    samples on which some client contradicts the consensus.
    """

    has_global_models: ClassVar[bool] = True
    learns_by_fit: ClassVar[bool] = True
    takes_late_replies: ClassVar[bool] = True
    learns_parts: ClassVar[bool] = False

    local_epochs: LocalEpochs = 5
    diversity: float = Field(default=0.05, ge=0, description="lambda, factor of the divergence from dissenting clients")
    largest_update: float = Field(
        default=1.0, gt=0, description="largest norm of a client's update, relative to that of the model it received"
    )

    temperature: float | None = Field(
        default=None, gt=0, description="temperature of softmaxes over similarities; None: 0.1"
    )
    public: PublicExchange = PublicExchange()
    teacher: Teacher = Teacher(weights=Variance())
    task: ServerTask | None = ServerTask()
    distiller: Distiller | None = Distiller()

    @model_validator(mode="after")
    def _in_passes_of_their_own(self) -> Self:
        if is_joint(self.task):
            raise ValueError("task.order is joint, but FedET distils in passes of their own; choose last or first")
        return self

    @property
    def tau(self) -> float:
        return self.temperature or 0.1

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start each type's model; its head is the server's own where both have one."""
        super().setup(server)
        for type_name in server.types:
            initial = server.global_models.initial(type_name).items()
            server.weights[type_name] = {name: value.to(server.device, copy=True) for name, value in initial}
        self.return_head(server)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Clients train their types' models, the server averages these, and learns consensus and dissent."""
        exchange = self.exchange(server)
        outputs = self.gathered(exchange, cohort)
        targets = self.targets(exchange, outputs)
        self.train_task(server)
        if self.distiller is not None:
            self.distil_consensus(server, targets, self.distiller)
        self.return_head(server)

    def gathered(self, exchange: Ensembles, cohort: Cohort) -> dict[str, list[ClientOutput]]:
        """Averages the clients' models by type and the head over all; returns the clients' rows by output."""
        outputs: dict[str, list[ClientOutput]] = {}
        means: dict[str, WeightedMean] = {}
        server = exchange.server
        replies = exchange.ask(
            cohort, self.fit, weights=each(server.weights_for), order=exchange.order, channels=exchange.wanted
        )
        for reply in replies:
            self.fold_weights(server, reply, means)
            for output, values in exchange.received(reply.knowledge).items():
                # held, not folded in: which clients contradict is known once the consensus is
                weights = exchange.log_weights(reply, output, values)
                rows = exchange.mix_with_server(output, values, reply.mixing)
                outputs.setdefault(output, []).append(ClientOutput(reply.sender.id, rows, weights))
        head, own = means.pop(_HEAD, None), server.model.exchanged()
        server.weights.update({type_name: mean.take() for type_name, mean in means.items()})
        with torch.no_grad():
            for name, value in head.take().items() if head is not None else ():
                own[name].copy_(value)
        return outputs

    def fold_weights(self, server: Server, reply: Reply, means: dict[str, WeightedMean]) -> None:
        """Adds a client's bounded update to the mean of its type, and its head to that of all types."""
        type_name, count = server.type_of(reply.sender), reply.num_examples
        if count:  # a mean of clients without samples would end the round
            trained = limited(server.weights[type_name], reply.weights, self.largest_update)
            means.setdefault(type_name, WeightedMean()).add(trained, count)
            if names := self.shared(server, type_name):
                means.setdefault(_HEAD, WeightedMean()).add({name: trained[name] for name in names}, count)

    def targets(self, exchange: Ensembles, outputs: Mapping[str, Sequence[ClientOutput]]) -> dict[str, ConsensusTarget]:
        """Consensus of the clients' outputs, and the ensemble of the clients that contradict it."""
        server = exchange.server
        for output, rows in outputs.items():
            for own in rows:
                exchange.add_weighed(output, *own)
        targets, repeated = {}, self.public.inverse_index(server)
        for output, consensus in exchange.targets().items():
            anchors, inverse = exchange.outputs[output], repeated.get(output)
            among = packed(anchors, inverse)
            # diversity is dissent in answers, not in scores: clients differ in calibration
            agreed = answers(consensus.values, among, inverse)
            others = Ensemble(len(agreed), consensus.values.shape[1], server.device)
            for _, values, log_weights in outputs[output]:
                answered = unpacked(answers(packed(values, inverse), among), inverse)
                others.add(values, log_weights, consensus.valid & (answered != agreed))
            targets[output] = ConsensusTarget(consensus, others.result(), anchors)
            server.record(**{f"contradicted.{output}": float(targets[output].others.valid.float().mean())})
        return targets

    def distil_consensus(self, server: Server, targets: Mapping[str, ConsensusTarget], distiller: Distiller) -> None:
        """Passes over the exchanged samples towards the targets."""
        consensus, count = {name: own.consensus for name, own in targets.items()}, self.teacher.diagnostic_samples
        server.record(**distiller.distances(server, self.public, consensus, count, "before"))
        (trainer, size), samples = distiller.trainer(server), self.public.drawn(server)
        for batch in self.public.passes(server, "distil", distiller.epochs if targets else 0, size, samples):
            trainer.step(distiller.weight * self.consensus_loss(server, batch, targets, distiller))
        server.record(**distiller.distances(server, self.public, consensus, count, "after"))

    def consensus_loss(
        self, server: Server, batch: Batch, targets: Mapping[str, ConsensusTarget], distiller: Distiller
    ) -> Tensor:
        """Distance to the consensus + lambda x divergence from dissent, added over outputs.

        Both are means over the samples that have a consensus.
        """
        outputs, losses = self.public.batch_outputs(server, server.model, batch, list(targets)), []
        consensus = {name: own.consensus for name, own in targets.items()}
        distances = distiller.distillation_losses(outputs, batch, consensus)
        for name, (agreed, others, anchors) in targets.items():
            losses.append(distances[name])
            if self.diversity:
                away = similarity_kl(outputs[name], others.values[batch.index], anchors, self.tau)
                dissent, count = (away * others.valid[batch.index]).sum(), agreed.valid[batch.index].sum().clamp_min(1)
                losses.append(self.diversity * dissent / count)
        return torch.stack(losses).sum()

    def shared(self, server: Server, type_name: str) -> list[str]:
        """Tensors of heads that a type's model shares with the server's."""
        own = {name: value.shape for name, value in server.model.exchanged().items() if name.startswith("heads.")}
        return [name for name, value in server.global_models.initial(type_name).items() if own.get(name) == value.shape]

    def return_head(self, server: Server) -> None:
        """Copies the server's head into the types' models."""
        own = server.model.exchanged()
        for type_name in server.weights:
            head = {name: own[name].detach().clone() for name in self.shared(server, type_name)}
            server.weights[type_name] = server.weights[type_name] | head

    # ---- client half

    @client_step(weights=Weights, knowledge=Representations, num_examples=int)
    def fit(self, client: Client, weights: Weights, order: str, channels: str) -> Reply:
        """Train the received model on the client's own task; returns it and its outputs on public samples."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs)
        return Reply(
            weights=client.weights,
            knowledge=self.public.client_outputs(client, order, read_json(channels)),
            num_examples=client.num_examples,
        )


def answers(
    values: Float[Tensor, "n d"], anchors: Float[Tensor, "k d"], own: Int64[Tensor, " n"] | None = None
) -> Int64[Tensor, " n"]:
    """The anchor that each row is most similar to; ties go to its ``own``, see ``row_statistics``."""
    return row_statistics(F.normalize(values, dim=1), anchors, {"winner"}, own=own)["winner"]


@torch.no_grad()
def limited(received: Mapping[str, Tensor], trained: Mapping[str, Tensor], largest: float) -> dict[str, Tensor]:
    """w + min(1, largest |w| / |w_k - w|) (w_k - w), norms over all floating tensors; integers as trained.

    An update within the bound is returned bit for bit.
    """
    moved = {name: value.to(received[name].device) for name, value in trained.items()}
    floating = [name for name, value in moved.items() if value.is_floating_point()]
    # in fp32: bf16 squares of a whole model would overflow or vanish
    change = float(get_total_norm([moved[name].float() - received[name].float() for name in floating]))
    bound = largest * float(get_total_norm([received[name].float() for name in floating]))
    if change <= bound:
        return moved
    return moved | {name: torch.lerp(received[name], moved[name], bound / change) for name in floating}
