"""FedET."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from pydantic import Field, SerializeAsAny
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from polyfed.aggregation.distinct import packed, unpacked
from polyfed.aggregation.ensemble import Ensemble, Ensembled
from polyfed.aggregation.mean import WeightedMean
from polyfed.aggregation.statistics import row_statistics
from polyfed.aggregation.weighting import Weighting
from polyfed.aggregation.weightings.by_evidence import Variance
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    Lifetime,
    Logits,
    Reply,
    Representations,
    Server,
    Weights,
    client_step,
    each,
)
from polyfed.algorithms.shared.either_form import OF_FORM, SoftmaxForm
from polyfed.algorithms.shared.ensemble_distillation import MOVES, OF_MEANS, AlternatingDistillation
from polyfed.algorithms.shared.ensembles import MEASURES
from polyfed.algorithms.shared.global_models import ReplyCheck, weights_check
from polyfed.algorithms.shared.public_exchange import DISTILS
from polyfed.core.effects import Condition, Not, Only
from polyfed.core.untrusted import read_json
from polyfed.data.samples import Batch
from polyfed.federation.public_outputs import PublicOutputs
from polyfed.losses.distillation import Distillation, row_kl

_HEAD = "/head"  # beside types, whose names have no slash at their start


class Aim(NamedTuple):
    """What the server learns for one output on the exchanged samples."""

    consensus: Ensembled
    others: Ensembled
    """Ensemble of the clients whose answer is not that of the consensus."""
    anchors: Float[Tensor, "n w"] | None
    """What rows are compared with; None: they are class scores."""


class Vote(NamedTuple):
    """One client's rows for one output, and what weight they have."""

    sender: str
    values: Float[Tensor, "n w"]
    log_weights: Float[Tensor, " n"] | float


class FedET(SoftmaxForm, AlternatingDistillation):
    """Ensemble knowledge transfer to a large server model (FedET, Cho et al., IJCAI 2022).

    A round: each client trains its type's small model, as in FedAvg, and also sends that model's outputs on the
    exchanged public samples: the server does not hold clients' architectures, so both cross. The server averages the
    models by type, weighs clients' outputs by the variance of their scores, and learns from the class that this
    consensus prefers, and from those who contradict it:

        CE(server(x), argmax s) + lambda KL(softmax(s_div) || softmax(server(x))),

    s the consensus, s_div that of the clients whose own argmax differs, with weights that again sum to 1 (0 if all
    agree). With ``exchange: representations`` (a reconstruction) the first term is the distance ``kd_loss`` to the
    consensus, and the answer of a client is the sample that its representation is most similar to.

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
    only_if: ClassVar[Mapping[str, Condition]] = {
        "server_first": Only(server_epochs=Not(0)) & (OF_FORM | Only(share_head=True)),
        "kd_loss": DISTILS & OF_FORM,
        "judge_clients": OF_FORM & MEASURES,
        "renormalise_target": DISTILS & OF_FORM & OF_MEANS,
        "alignment": DISTILS & OF_FORM & (MOVES | Only(diversity=Not(0))),
        "temperature": DISTILS & Only(diversity=Not(0)),
    }

    aggregation: SerializeAsAny[Weighting] = Field(
        default=Variance(), description="weights over clients; the paper's: variance"
    )
    kd_loss: Literal[Distillation, "similarity"] = Field(
        default="l2", description="representations: distance to the consensus; class scores: none but cross-entropy"
    )
    diversity: Annotated[float, DISTILS] = Field(
        default=0.05, ge=0, description="lambda, factor of the divergence from who contradicts"
    )
    share_head: bool = Field(default=True, description="average tensors of heads over all clients and the server")
    largest_update: float = Field(
        default=1.0, gt=0, description="norm of a client's update at most, relative to that of the model it received"
    )

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start each type's model; heads as the server's own where it has them."""
        super().setup(server)
        server.weights = {
            kind: {
                name: value.to(server.device, copy=True)
                for name, value in server.blueprints[members.architecture].tensors.items()
            }
            for kind, members in server.types.items()
        }
        self.return_head(server)

    def aggregate(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> dict[str, Aim]:
        """Average models by type and the head over all, and find consensus and dissent."""
        votes: dict[str, list[Vote]] = {}
        means: dict[str, WeightedMean] = {}
        ensembles = self.ensembles(server, server_outputs)
        replies = cohort.ask(
            self.fit,
            check=self.reply_check(server, server_outputs),
            weights=each(server.weights_for),
            order=server_outputs.order,
            channels=each(self.asked_outputs(server_outputs)),
        )
        for reply in replies:
            self.fold_weights(server, reply, means)
            for output, values in ensembles.received(reply.knowledge).items():
                # held, not folded in: who contradicts is known once the consensus is
                vote = Vote(reply.sender.id, values, ensembles.log_weights(reply, output, values))
                votes.setdefault(output, []).append(vote)
        head, own = means.pop(_HEAD, None), server.model.exchanged()
        server.weights |= {kind: mean.take() for kind, mean in means.items()}
        with torch.no_grad():
            for name, value in head.take().items() if head is not None else ():
                own[name].copy_(value)
        return self.aims(server, server_outputs, votes)

    def fold_weights(self, server: Server, reply: Reply, means: dict[str, WeightedMean]) -> None:
        kind, count = server.type_of(reply.sender), reply.num_examples
        if count:  # a mean of nothing else would end the round
            trained = limited(server.weights[kind], reply.weights, self.largest_update)
            means.setdefault(kind, WeightedMean()).add(trained, count)
            if names := self.shared(server, kind):
                means.setdefault(_HEAD, WeightedMean()).add({name: trained[name] for name in names}, count)

    def reply_check(self, server: Server, server_outputs: PublicOutputs) -> ReplyCheck:
        """Raises PayloadError for a reply whose weights or outputs are not what its sender was asked for."""
        check_weights, check_outputs = weights_check(server), self.outputs_check(server, server_outputs, "knowledge")

        def check(reply: Reply) -> None:
            check_weights(reply)
            check_outputs(reply)

        return check

    def aims(
        self, server: Server, server_outputs: PublicOutputs, votes: Mapping[str, Sequence[Vote]]
    ) -> dict[str, Aim]:
        """Consensus of the clients' votes, and of those who contradict it."""
        ensembles = self.ensembles(server, server_outputs)
        for output, ballot in votes.items():
            for vote in ballot:
                ensembles.add_weighed(output, *vote)
        aims, repeated = {}, self.places(server)
        for output, consensus in ensembles.targets().items():
            anchors, places = self.anchors(server_outputs, output), repeated.get(output)
            among = None if anchors is None else packed(anchors, places)
            # diversity is dissent in answers, not in scores: clients differ in calibration
            agreed = answers(consensus.values, among, places)
            others = Ensemble(len(agreed), consensus.values.shape[1], server.device)
            for vote in votes[output]:
                answered = unpacked(answers(packed(vote.values, places), among), places)
                contradicts = consensus.valid & (answered != agreed)
                others.add(vote.values, vote.log_weights, contradicts)
            aims[output] = Aim(consensus, others.result(), anchors)
            server.record(**{f"contradicted.{output}": float(aims[output].others.valid.float().mean())})
        return aims

    def distil(self, server: Server, targets: Mapping[str, Aim]) -> None:
        """Passes over the exchanged samples towards the aims; then the types get the server's head."""
        goals = {name: aim.consensus for name, aim in targets.items()}
        server.record(**self.distances(server, goals, "before"))
        (trainer, size), samples = self.distiller(server), server.exchanged(self.public_samples)
        for batch in self.public_passes(server, "distil", self.kd_epochs if targets else 0, size, samples):
            trainer.step(self.kd_weight * self.aim_loss(server, batch, targets))
        server.record(**self.distances(server, goals, "after"))
        self.return_head(server)

    def aim_loss(self, server: Server, batch: Batch, aims: Mapping[str, Aim]) -> Tensor:
        """Distance to the consensus + lambda x divergence from who contradicts it, mean over samples that have a
        consensus, added over outputs."""
        outputs, losses = self.output_kind.outputs(server, server.model, batch, list(aims)), []
        goals = {name: aim.consensus for name, aim in aims.items()}
        distances = {} if self.exchanges_logits else self.departures(outputs, batch, goals)
        for name, (consensus, others, anchors) in aims.items():
            own, goal, valid = outputs[name], consensus.values[batch.index], consensus.valid[batch.index]
            if anchors is None:
                # the answer of the consensus alone, whose scores mix those of many scales
                wrong = F.cross_entropy(own, goal.argmax(1), reduction="none")
                losses.append((wrong * valid).sum() / valid.sum().clamp_min(1))
            else:
                losses.append(distances[name])
            if self.diversity:
                away = row_kl(own, others.values[batch.index], anchors, self.tau) * others.valid[batch.index]
                losses.append(self.diversity * away.sum() / valid.sum().clamp_min(1))
        return torch.stack(losses).sum()

    def shared(self, server: Server, kind: str) -> list[str]:
        own = {name: value.shape for name, value in server.model.exchanged().items() if name.startswith("heads.")}
        return [name for name, shape in server.shapes(kind).items() if self.share_head and own.get(name) == shape]

    def return_head(self, server: Server) -> None:
        own = server.model.exchanged()
        for kind in server.weights:
            head = {name: own[name].detach().clone() for name in self.shared(server, kind)}
            server.weights[kind] = server.weights[kind] | head

    # ---- client half

    @client_step(weights=Weights, knowledge=Representations | Logits, num_examples=int)
    def fit(self, client: Client, weights: Weights, order: str, channels: str) -> Reply:
        """Train the received model on the client's own task; replies with it and its outputs on public samples."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs)
        return Reply(
            weights=Weights(client.model.exchanged()),
            knowledge=self.client_outputs(client, order, read_json(channels)),
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
