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
    Lifetime,
    LocalEpochs,
    Logits,
    Reply,
    Representations,
    Server,
    Weights,
    client_step,
    each,
)
from polyfed.algorithms.shared.distiller import (
    Distiller,
    ServerTask,
    TaughtServer,
    compares_rows,
    is_joint,
    require_learning,
    train_task,
)
from polyfed.algorithms.shared.public_exchange import EitherExchange, PublicOutputs
from polyfed.algorithms.shared.teacher import Ensembles, Teacher
from polyfed.core.untrusted import read_json
from polyfed.data.samples import Batch
from polyfed.losses.distillation import row_kl
from polyfed.wire.schema import Declared

_HEAD = "/head"  # beside types, whose names have no slash at their start


class ConsensusTarget(NamedTuple):
    """What the server learns for one output on the exchanged samples."""

    consensus: Ensembled
    others: Ensembled
    """Ensemble of the clients whose answer is not that of the consensus."""
    anchors: Float[Tensor, "n w"] | None
    """What rows are compared with; None: they are class scores."""


class ClientOutput(NamedTuple):
    """One client's rows for one output, and what weight they have."""

    sender: str
    values: Float[Tensor, "n w"]
    log_weights: Float[Tensor, " n"] | float


class FedET(TaughtServer):
    """Ensemble knowledge transfer to a large server model (FedET, Cho et al., IJCAI 2022).

    A round: each client trains its type's small model, as in FedAvg, and also sends that model's outputs on the
    exchanged public samples: the server does not hold clients' architectures, so both cross. The server averages the
    models by type, weighs clients' outputs by the variance of their scores, and learns from the class that this
    consensus prefers, and from those who contradict it:

        CE(server(x), argmax s) + lambda KL(softmax(s_div) || softmax(server(x))),

    s the consensus, s_div that of the clients whose own argmax differs, with weights that again sum to 1 (0 if all
    agree). With ``public.form: representations`` (a reconstruction) the first term is the distance
    ``distiller.loss`` to the consensus, and the answer of a client is the sample that its representation is most
    similar to.

    The shared representation layer are the tensors of heads that a type's model and the server's have in common by name
    and shape: their mean over all clients enters the server's model before the distillation, and the types' models get
    what it makes of them.

    All outputs of a round are held until the consensus is known: clients x exchanged samples x w x 4 bytes an
    output. A client's update whose norm exceeds ``largest_update`` times that of the model it received is scaled down
    to it. Clients keep nothing and are judged by the model of their type. Metric: ``contradicted`` by output, the
    share of samples on which some client contradicts the consensus.
    """

    has_global_models: ClassVar[bool] = True
    learns_by_fit: ClassVar[bool] = True
    keeps: ClassVar[Mapping[str, Lifetime]] = {}
    takes_late_replies: ClassVar[bool] = True
    learns_parts: ClassVar[bool] = False

    local_epochs: LocalEpochs = 5
    diversity: float = Field(default=0.05, ge=0, description="lambda, factor of the divergence from who contradicts")
    share_head: bool = Field(default=True, description="average tensors of heads over all clients and the server")
    largest_update: float = Field(
        default=1.0, gt=0, description="norm of a client's update at most, relative to that of the model it received"
    )

    temperature: float | None = Field(
        default=None, gt=0, description="of softmaxes over classes; None: 1 for scores, 0.1 for similarities"
    )
    public: EitherExchange = EitherExchange()
    teacher: Teacher = Teacher(weights=Variance())
    task: ServerTask | None = ServerTask()
    distiller: Distiller | None = Field(
        default=Distiller(), description="its loss is of representations; class scores have the cross-entropy"
    )

    @model_validator(mode="after")
    def _of_one_piece(self) -> Self:
        require_learning(self.task, self.distiller, self.teacher)
        if is_joint(self.task):
            raise ValueError("task.order is joint, but FedET distils in passes of their own; choose last or first")
        if self.public.exchanges_scores and self.distiller is not None and self.distiller.loss != "l2":
            raise ValueError(f"distiller.loss {self.distiller.loss} has no effect with public.form: scores; leave it")
        return self

    @property
    def tau(self) -> float:
        return self.public.tau(self.temperature)

    def sends(self, declared: Declared) -> Declared:
        return self.public.sends(declared)

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start each type's model; heads as the server's own where it has them.

        Raises:
            ConfigError: somebody lacks what the method exchanges.
        """
        super().setup(server)
        for type_name in server.types:
            initial = server.global_models.initial(type_name).items()
            server.weights[type_name] = {name: value.to(server.device, copy=True) for name, value in initial}
        self.return_head(server)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Clients train their types' models, the server averages these, and learns consensus and dissent."""
        train_task(self.task, "first", server)
        own = self.public.server_outputs(server)
        aims = self.aims(server, own, self.votes(server, cohort, own))
        train_task(self.task, "last", server)
        if self.distiller is not None:
            self.distil(server, aims, self.distiller)
        self.return_head(server)

    def votes(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> dict[str, list[ClientOutput]]:
        """Average the clients' models by type and the head over all; returns their outputs."""
        votes: dict[str, list[ClientOutput]] = {}
        means: dict[str, WeightedMean] = {}
        ensembles = self.ensembles(server, server_outputs)
        replies = cohort.ask(
            self.fit,
            like=self.public.layout(server, server_outputs, "knowledge"),
            weights=each(server.weights_for),
            order=server_outputs.order,
            channels=each(self.public.asked(server_outputs)),
        )
        for reply in replies:
            self.fold_weights(server, reply, means)
            for output, values in ensembles.received(reply.knowledge).items():
                # held, not folded in: who contradicts is known once the consensus is
                weights = ensembles.log_weights(reply, output, values)
                rows = ensembles.mix_with_server(output, values, reply.mixing)
                votes.setdefault(output, []).append(ClientOutput(reply.sender.id, rows, weights))
        head, own = means.pop(_HEAD, None), server.model.exchanged()
        server.weights.update({type_name: mean.take() for type_name, mean in means.items()})
        with torch.no_grad():
            for name, value in head.take().items() if head is not None else ():
                own[name].copy_(value)
        return votes

    def ensembles(self, server: Server, server_outputs: PublicOutputs) -> Ensembles:
        return self.teacher.ensembles(server, self.public, server_outputs, keep_rows=compares_rows(self.distiller))

    def fold_weights(self, server: Server, reply: Reply, means: dict[str, WeightedMean]) -> None:
        type_name, count = server.type_of(reply.sender), reply.num_examples
        if count:  # a mean of nothing else would end the round
            trained = limited(server.weights[type_name], reply.weights, self.largest_update)
            means.setdefault(type_name, WeightedMean()).add(trained, count)
            if names := self.shared(server, type_name):
                means.setdefault(_HEAD, WeightedMean()).add({name: trained[name] for name in names}, count)

    def aims(
        self, server: Server, server_outputs: PublicOutputs, votes: Mapping[str, Sequence[ClientOutput]]
    ) -> dict[str, ConsensusTarget]:
        """Consensus of the clients' votes, and of those who contradict it."""
        ensembles = self.ensembles(server, server_outputs)
        for output, ballot in votes.items():
            for vote in ballot:
                ensembles.add_weighed(output, *vote)
        aims, repeated = {}, self.public.inverse_index(server)
        for output, consensus in ensembles.targets().items():
            anchors, inverse = self.public.anchors(server_outputs, output), repeated.get(output)
            among = None if anchors is None else packed(anchors, inverse)
            # diversity is dissent in answers, not in scores: clients differ in calibration
            agreed = answers(consensus.values, among, inverse)
            others = Ensemble(len(agreed), consensus.values.shape[1], server.device)
            for vote in votes[output]:
                answered = unpacked(answers(packed(vote.values, inverse), among), inverse)
                contradicts = consensus.valid & (answered != agreed)
                others.add(vote.values, vote.log_weights, contradicts)
            aims[output] = ConsensusTarget(consensus, others.result(), anchors)
            server.record(**{f"contradicted.{output}": float(aims[output].others.valid.float().mean())})
        return aims

    def distil(self, server: Server, aims: Mapping[str, ConsensusTarget], distiller: Distiller) -> None:
        """Passes over the exchanged samples towards the aims."""
        targets, count = {name: aim.consensus for name, aim in aims.items()}, self.teacher.diagnostic_samples
        server.record(**distiller.distances(server, self.public, targets, count, "before"))
        (trainer, size), samples = distiller.trainer(server), self.public.drawn(server)
        for batch in self.public.passes(server, "distil", distiller.epochs if aims else 0, size, samples):
            trainer.step(distiller.weight * self.aim_loss(server, batch, aims, distiller))
        server.record(**distiller.distances(server, self.public, targets, count, "after"))

    def aim_loss(
        self, server: Server, batch: Batch, aims: Mapping[str, ConsensusTarget], distiller: Distiller
    ) -> Tensor:
        """Distance to the consensus + lambda x divergence from who contradicts it, mean over samples that have a
        consensus, added over outputs."""
        outputs, losses = self.public.batch_outputs(server, server.model, batch, list(aims)), []
        targets = {name: aim.consensus for name, aim in aims.items()}
        distances = {} if self.public.exchanges_scores else distiller.distillation_losses(outputs, batch, targets)
        for name, (consensus, others, anchors) in aims.items():
            own, target, valid = outputs[name], consensus.values[batch.index], consensus.valid[batch.index]
            if anchors is None:
                # the answer of the consensus alone, whose scores mix those of many scales
                wrong = F.cross_entropy(own, target.argmax(1), reduction="none")
                losses.append((wrong * valid).sum() / valid.sum().clamp_min(1))
            else:
                losses.append(distances[name])
            if self.diversity:
                away = row_kl(own, others.values[batch.index], anchors, self.tau) * others.valid[batch.index]
                losses.append(self.diversity * away.sum() / valid.sum().clamp_min(1))
        return torch.stack(losses).sum()

    def shared(self, server: Server, type_name: str) -> list[str]:
        own = {name: value.shape for name, value in server.model.exchanged().items() if name.startswith("heads.")}
        initial = server.global_models.initial(type_name).items() if self.share_head else ()
        return [name for name, value in initial if own.get(name) == value.shape]

    def return_head(self, server: Server) -> None:
        own = server.model.exchanged()
        for type_name in server.weights:
            head = {name: own[name].detach().clone() for name in self.shared(server, type_name)}
            server.weights[type_name] = server.weights[type_name] | head

    # ---- client half

    @client_step(weights=Weights, knowledge=Representations | Logits, num_examples=int)
    def fit(self, client: Client, weights: Weights, order: str, channels: str) -> Reply:
        """Train the received model on the client's own task; replies with it and its outputs on public samples."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs)
        return Reply(
            weights=client.weights,
            knowledge=self.public.client_outputs(client, order, read_json(channels)),
            num_examples=client.num_examples,
        )


def answers(
    values: Float[Tensor, "n w"], anchors: Float[Tensor, "k w"] | None, own: Int64[Tensor, " n"] | None = None
) -> Int64[Tensor, " n"]:
    """The class that each row prefers, or the anchor that it is most similar to; ties go to its ``own``, see
    ``row_statistics``."""
    if anchors is None:
        return values.argmax(1)
    return row_statistics(F.normalize(values, dim=1), anchors, {"winner"}, own=own)["winner"]


@torch.no_grad()
def limited(received: Mapping[str, Tensor], trained: Mapping[str, Tensor], largest: float) -> dict[str, Tensor]:
    """w + min(1, largest |w| / |w_k - w|) (w_k - w), norms over all floating tensors; whole numbers as trained.

    An update within the bound comes out bit for bit.
    """
    moved = {name: value.to(received[name].device) for name, value in trained.items()}
    floating = [name for name, value in moved.items() if value.is_floating_point()]
    # in fp32: bf16 squares of a whole model would overflow or vanish
    change = float(get_total_norm([moved[name].float() - received[name].float() for name in floating]))
    bound = largest * float(get_total_norm([received[name].float() for name in floating]))
    if change <= bound:
        return moved
    return moved | {name: torch.lerp(received[name], moved[name], bound / change) for name in floating}
